//! Lines of fstab(5).
//!
//! Called by unions, which wait for branches on planned mounts, and by mount programs, which find
//! words there that mount(8) keeps for itself. Parsing is pure; a missing table has no lines.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// The system's table.
const TABLE: &str = "/etc/fstab";

/// A line of the table, with its octal escapes decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FstabLine {
    /// First column.
    pub source: OsString,
    /// Second column.
    pub mountpoint: PathBuf,
    /// Words of the fourth column.
    pub options: Vec<OsString>,
}

impl FstabLine {
    /// Whether the options contain this word.
    pub fn has(&self, word: &str) -> bool {
        self.options.iter().any(|option| option == word)
    }
}

/// Lines of the system's table; none if it cannot be read.
pub fn lines() -> Vec<FstabLine> {
    fs::read(TABLE).map(|text| parsed(&text)).unwrap_or_default()
}

/// Words by which the system's table allows set-user-id programs (`suid`) and device nodes (`dev`)
/// in a mount. mount(8) passes neither to a mount program (util-linux 2.38): they only clear flags
/// that it has not set.
pub fn permissive_words(source: &std::ffi::OsStr, mountpoint: &Path) -> Vec<&'static str> {
    words_of(&lines(), source, mountpoint)
}

fn words_of(lines: &[FstabLine], source: &std::ffi::OsStr, mountpoint: &Path) -> Vec<&'static str> {
    let Some(line) =
        lines.iter().find(|line| Path::new(&line.source) == Path::new(source) && line.mountpoint == mountpoint)
    else {
        return Vec::new();
    };
    ["suid", "dev"].into_iter().filter(|word| line.has(word)).collect()
}

fn parsed(text: &[u8]) -> Vec<FstabLine> {
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii_start().starts_with(b"#"));
    lines.filter_map(line).collect()
}

fn line(text: &[u8]) -> Option<FstabLine> {
    let mut fields = text.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty()).map(unescaped);
    let (source, mountpoint, _kind) = (fields.next()?, fields.next()?, fields.next());
    let options = fields.next().unwrap_or_default();
    let words = options.as_bytes().split(|byte| *byte == b',').map(|word| OsString::from_vec(word.to_vec()));
    Some(FstabLine { source, mountpoint: PathBuf::from(mountpoint), options: words.collect() })
}

/// Decodes the octal escapes of fstab (`\040` is a blank).
fn unescaped(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((byte, after)) = rest.split_first() {
        let code =
            (*byte == b'\\').then(|| after.get(..3)).flatten().and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) => {
                bytes.push(code);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_columns() {
        let text = b"# a comment\nUUID=5 / ext4 defaults 0 1\n/srv/a\\040b\t/mnt/c fuse.nacre suid,ro 0 0\nLABEL=x /mnt/d\n\nx\n";
        let lines = parsed(text);
        let places: Vec<&Path> = lines.iter().map(|line| line.mountpoint.as_path()).collect();
        assert_eq!(places, ["/", "/mnt/c", "/mnt/d"].map(Path::new));
        assert!(lines[1].has("suid") && !lines[1].has("dev") && lines[1].source == "/srv/a b");
        assert_eq!(words_of(&lines, "/srv/a b".as_ref(), Path::new("/mnt/c")), ["suid"]);
        assert!(words_of(&lines, "/srv/other".as_ref(), Path::new("/mnt/c")).is_empty());
        assert!(words_of(&lines, "LABEL=x".as_ref(), Path::new("/mnt/d")).is_empty());
    }
}
