//! Names in patches, quoted as git quotes them: bytes that are no printable ASCII as octal numbers. Names with blanks are
//! quoted as well, which git reads: patch(1) takes the names of files without hunks from the line `diff --git`, where a
//! blank ends an unquoted name.

use std::{os::unix::ffi::OsStrExt, path::Path};

/// A name with a prefix (`a/`), in quotes where it has to be.
pub(super) fn name(prefix: &[u8], path: &Path) -> Vec<u8> {
    let whole = [prefix, path.as_os_str().as_bytes()].concat();
    let is_plain = |byte: &u8| matches!(byte, b'!'..=b'~') && !matches!(byte, b'"' | b'\\');
    if whole.iter().all(is_plain) {
        return whole;
    }
    let mut quoted = vec![b'"'];
    for byte in &whole {
        match byte {
            b'"' | b'\\' => quoted.extend([b'\\', *byte]),
            b'\n' => quoted.extend(b"\\n"),
            b'\t' => quoted.extend(b"\\t"),
            b'\r' => quoted.extend(b"\\r"),
            0x07 => quoted.extend(b"\\a"),
            0x08 => quoted.extend(b"\\b"),
            0x0b => quoted.extend(b"\\v"),
            0x0c => quoted.extend(b"\\f"),
            b' '..=b'~' => quoted.push(*byte),
            other => quoted.extend(format!("\\{other:03o}").bytes()),
        }
    }
    quoted.push(b'"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn quotes_as_git_does() {
        let quoted = |bytes: &[u8]| name(b"a/", Path::new(OsStr::from_bytes(bytes)));
        assert_eq!(quoted(b"plain-name"), b"a/plain-name");
        assert_eq!(quoted(b"a name"), b"\"a/a name\"");
        assert_eq!(quoted(b"tab\tquote\"back\\"), b"\"a/tab\\tquote\\\"back\\\\\"");
        assert_eq!(quoted(b"\xff\x80\x01"), b"\"a/\\377\\200\\001\"");
    }
}
