//! Bytes as text in the journal: `%XX` for all but printable ASCII.

use crate::meta::Xattrs;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::Write as _,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

fn written(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = match byte {
            b' '..=b'~' if *byte != b'%' => write!(text, "{}", char::from(*byte)),
            _ => write!(text, "%{byte:02X}"),
        };
    }
    text
}

fn read(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.bytes());
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (high, low) = (char::from(rest.next()?).to_digit(16)?, char::from(rest.next()?).to_digit(16)?);
        bytes.push(u8::try_from(high << 4 | low).ok()?);
    }
    Some(bytes)
}

/// Paths.
pub(crate) mod path {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        written(path.as_os_str().as_bytes()).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = read(&text).ok_or_else(|| D::Error::custom("a path with a broken escape"))?;
        Ok(PathBuf::from(OsString::from_vec(bytes)))
    }
}

/// Lists of paths.
pub(crate) mod paths {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
        let texts: Vec<String> = paths.iter().map(|path| written(path.as_os_str().as_bytes())).collect();
        texts.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let mut paths = Vec::with_capacity(texts.len());
        for text in texts {
            let bytes = read(&text).ok_or_else(|| D::Error::custom("a path with a broken escape"))?;
            paths.push(PathBuf::from(OsString::from_vec(bytes)));
        }
        Ok(paths)
    }
}

/// Extended attributes.
pub(crate) mod xattrs {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(xattrs: &Xattrs, serializer: S) -> Result<S::Ok, S::Error> {
        let texts: BTreeMap<String, String> =
            xattrs.iter().map(|(name, value)| (written(name), written(value))).collect();
        texts.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Xattrs, D::Error> {
        let texts = BTreeMap::<String, String>::deserialize(deserializer)?;
        let mut xattrs = Xattrs::new();
        for (name, value) in texts {
            let broken = || D::Error::custom("an attribute with a broken escape");
            xattrs.insert(read(&name).ok_or_else(broken)?, read(&value).ok_or_else(broken)?);
        }
        Ok(xattrs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_read_as_written() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(read(&written(&bytes)), Some(bytes.clone()));
        assert!(written(&bytes).is_ascii());
        assert_eq!(read("%F"), None);
        assert_eq!(read("%GG"), None);
    }
}
