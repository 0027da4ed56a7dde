//! The log of hidden entries: which entries of lower branches the upper branch hides, and their identity at that moment.
//!
//! Written by unions with the setting `base-log`, so that a program can find out later what others have changed below
//! (docs/decisions/workspaces.md has the rules). A line is appended before an entry of a read-only branch that is visible
//! is hidden by a copy, a whiteout or a rename over it. Invariant: an entry that is hidden already gets no further line,
//! so the last line of a path says what the user saw last. The log is not synced: a missing line means "unknown", which
//! readers take for a conflict.

use crate::{
    OWN, UnionShared,
    node::{Part, UnionNode, path_in},
};
use nacre_vfs::{Attr, Errno, Kind, Result, Time};
use parking_lot::Mutex;
use std::{
    fmt::Write as _,
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// One hidden entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HiddenEntry {
    /// Index of the branch that showed it.
    pub branch: usize,
    /// Path from the branch's top, names divided by `/`; empty for the top itself.
    pub path: Vec<u8>,
    /// Letter of the type, as `find -printf %y` prints it.
    pub kind: char,
    /// Permission bits with set-id and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device.
    pub device: (u32, u32),
    /// Bytes.
    pub size: u64,
    /// Last change of content: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Last change of status.
    pub ctime: (i64, u32),
    /// Inode number on the branch.
    pub ino: u64,
    /// Birth, where the file system knows it.
    pub btime: Option<(i64, u32)>,
    /// Inode number of the copy on the upper branch, if it was copied up.
    pub copy: Option<u64>,
}

impl HiddenEntry {
    pub(crate) fn new(branch: usize, path: Vec<u8>, attr: &Attr, copy: Option<u64>) -> HiddenEntry {
        let time = |time: Time| (time.sec, time.nsec);
        HiddenEntry {
            branch,
            path,
            kind: letter(attr.kind),
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            device: (attr.rdev_major, attr.rdev_minor),
            size: attr.size,
            mtime: time(attr.mtime),
            ctime: time(attr.ctime),
            ino: attr.id.ino,
            btime: attr.btime.map(time),
            copy,
        }
    }

    /// The line of the entry, with a newline at its end.
    pub fn line(&self) -> String {
        let mut line = format!("{} ", self.branch);
        line.push_str(&escaped(&self.path));
        let time = |(seconds, nanos): (i64, u32)| format!("{seconds}.{nanos:09}");
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let _ = writeln!(
            line,
            " {} {:o} {} {} {}:{} {} {} {} {} {} {}",
            self.kind,
            self.mode,
            self.uid,
            self.gid,
            self.device.0,
            self.device.1,
            self.size,
            time(self.mtime),
            time(self.ctime),
            self.ino,
            or_dash(self.btime.map(time)),
            or_dash(self.copy.map(|ino| ino.to_string())),
        );
        line
    }

    /// Parses a line without its newline; `None` where it is malformed.
    pub fn parse(line: &str) -> Option<HiddenEntry> {
        let fields: Vec<&str> = line.split(' ').collect();
        let [branch, path, kind, mode, uid, gid, device, size, mtime, ctime, ino, btime, copy] = fields[..] else {
            return None;
        };
        let (major, minor) = device.split_once(':')?;
        let mut letters = kind.chars();
        let (Some(kind), None) = (letters.next(), letters.next()) else { return None };
        Some(HiddenEntry {
            branch: branch.parse().ok()?,
            path: unescaped(path)?,
            kind,
            mode: u32::from_str_radix(mode, 8).ok()?,
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            device: (major.parse().ok()?, minor.parse().ok()?),
            size: size.parse().ok()?,
            mtime: parsed_time(mtime)?,
            ctime: parsed_time(ctime)?,
            ino: ino.parse().ok()?,
            btime: if btime == "-" { None } else { Some(parsed_time(btime)?) },
            copy: if copy == "-" { None } else { Some(copy.parse().ok()?) },
        })
    }
}

fn letter(kind: Kind) -> char {
    match kind {
        Kind::File => 'f',
        Kind::Directory => 'd',
        Kind::Symlink => 'l',
        Kind::Fifo => 'p',
        Kind::Socket => 's',
        Kind::Character => 'c',
        Kind::Block => 'b',
    }
}

fn parsed_time(text: &str) -> Option<(i64, u32)> {
    let (seconds, nanos) = text.split_once('.')?;
    Some((seconds.parse().ok()?, nanos.parse().ok()?))
}

/// A path as one word of ASCII: bytes outside of `!` to `~`, and `%`, as `%XX`; the empty path is `%`.
pub fn escaped(path: &[u8]) -> String {
    if path.is_empty() {
        return "%".to_owned();
    }
    let mut text = String::with_capacity(path.len());
    for byte in path {
        match byte {
            b'!'..=b'~' if *byte != b'%' => text.push(char::from(*byte)),
            // Writing to a string cannot fail.
            _ => drop(write!(text, "%{byte:02X}")),
        }
    }
    text
}

/// Reads back what [`escaped`] writes; `None` where it is malformed.
pub fn unescaped(text: &str) -> Option<Vec<u8>> {
    if text == "%" {
        return Some(Vec::new());
    }
    let (mut path, mut bytes) = (Vec::with_capacity(text.len()), text.bytes());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            path.push(byte);
            continue;
        }
        let high = char::from(bytes.next()?).to_digit(16)?;
        let low = char::from(bytes.next()?).to_digit(16)?;
        path.push(u8::try_from(high << 4 | low).ok()?);
    }
    Some(path)
}

/// Parses a log. A last line without newline is a crash in the middle of a write, and is left out; so are malformed
/// lines.
pub fn parse(log: &[u8]) -> Vec<HiddenEntry> {
    let whole = log.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let lines = log.get(..whole).unwrap_or_default().split(|byte| *byte == b'\n');
    lines.filter_map(|line| HiddenEntry::parse(std::str::from_utf8(line).ok()?)).collect()
}

impl UnionShared {
    /// Notes in the log, if there is one, that an entry of a read-only branch is about to be hidden. `part` is what is
    /// visible at the path; nothing is noted for parts on writable branches.
    ///
    /// # Errors
    /// EROFS for frozen paths; the log cannot be written. Then the entry must not be hidden.
    pub(crate) fn note_hidden(
        &self,
        directory: &UnionNode,
        name: &[u8],
        part: &Part,
        copy: Option<&Part>,
    ) -> Result<()> {
        if self.base_log.get().is_none() || part.branch.is_writable() {
            return Ok(());
        }
        let attr = part.branch.layer.getattr(&OWN, &part.node, None)?;
        self.note_hidden_with(directory, name, part, &attr, copy)
    }

    /// As [`Self::note_hidden`], with attributes that were read before.
    ///
    /// # Errors
    /// As [`Self::note_hidden`].
    pub(crate) fn note_hidden_with(
        &self,
        directory: &UnionNode,
        name: &[u8],
        part: &Part,
        attr: &Attr,
        copy: Option<&Part>,
    ) -> Result<()> {
        let Some(log) = self.base_log.get().filter(|_| !part.branch.is_writable()) else { return Ok(()) };
        let path = path_in(directory, name);
        if log.is_frozen(&path) {
            return Err(Errno::EROFS);
        }
        log.append(&HiddenEntry::new(part.branch.index(), path, attr, copy.map(|copy| copy.id.ino)))
    }
}

/// A log that is appended to.
#[derive(Debug)]
pub struct BaseLog {
    file: Mutex<File>,
    /// Paths below which nothing may be hidden.
    frozen: Vec<Vec<u8>>,
}

impl BaseLog {
    /// Opens a log, which is created if missing. An incomplete last line is ended.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open(path: &Path) -> io::Result<BaseLog> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        if file.seek(SeekFrom::End(0))? > 0 {
            file.seek(SeekFrom::End(-1))?;
            let mut last = [0];
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        Ok(BaseLog { file: Mutex::new(file), frozen: Vec::new() })
    }

    /// Has entries at and below these paths stay as they are on their branches: each change of them is EROFS.
    #[must_use]
    pub fn frozen(mut self, paths: Vec<Vec<u8>>) -> BaseLog {
        self.frozen = paths;
        self
    }

    fn is_frozen(&self, path: &[u8]) -> bool {
        self.frozen.iter().any(|frozen| {
            path.strip_prefix(frozen.as_slice())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/") || frozen.is_empty())
        })
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// ENOSPC and other errors of the storage; then the entry must not be hidden.
    pub(crate) fn append(&self, entry: &HiddenEntry) -> Result<()> {
        let line = entry.line();
        let mut file = self.file.lock();
        let before = file.metadata().map_err(errno)?.len();
        if let Err(error) = file.write_all(line.as_bytes()) {
            // Half a line would spoil the next one.
            file.set_len(before).map_err(errno)?;
            return Err(errno(error));
        }
        Ok(())
    }
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &[u8]) -> HiddenEntry {
        HiddenEntry {
            branch: 1,
            path: path.to_vec(),
            kind: 'f',
            mode: 0o4755,
            uid: 1000,
            gid: 100,
            device: (8, 1),
            size: 77,
            mtime: (-1, 5),
            ctime: (1_700_000_000, 999_999_999),
            ino: u64::MAX,
            btime: None,
            copy: Some(12),
        }
    }

    #[test]
    fn lines_are_read_as_written() {
        for path in [&b""[..], b"a", b"d/a b", b"%", b"\xff\n\0%20", "\u{e9}".as_bytes()] {
            let written = HiddenEntry { btime: Some((3, 4)), ..entry(path) };
            let line = written.line();
            assert!(line.is_ascii() && line.ends_with('\n') && line.matches('\n').count() == 1);
            assert_eq!(HiddenEntry::parse(line.trim_end_matches('\n')), Some(written));
        }
    }

    #[test]
    fn frozen_paths_have_everything_below_them() {
        let scratch = tempfile::tempdir().unwrap();
        let log = BaseLog::open(&scratch.path().join("log")).unwrap().frozen(vec![b"a/b".to_vec()]);
        for (path, is_frozen) in [("a", false), ("a/b", true), ("a/b/c", true), ("a/bc", false), ("", false)] {
            assert_eq!(log.is_frozen(path.as_bytes()), is_frozen, "{path}");
        }
    }

    #[test]
    fn a_torn_line_is_left_out_and_ended() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("base.log");
        let (first, second) = (entry(b"first"), entry(b"second"));
        let log = BaseLog::open(&path).unwrap();
        log.append(&first).unwrap();
        drop(log);
        let half = second.line();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&half.as_bytes()[..half.len() / 2]).unwrap();
        assert_eq!(parse(&std::fs::read(&path).unwrap()), std::slice::from_ref(&first));
        BaseLog::open(&path).unwrap().append(&second).unwrap();
        assert_eq!(parse(&std::fs::read(&path).unwrap()), [first, second]);
    }
}
