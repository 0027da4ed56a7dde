//! The log of a process that owns a pool: a file beside its socket, which lies in memory on most
//! systems. Bounded, whatever users make happen.
//!
//! Started by `process.rs`. Invariants: at most [`LINES_MOST`] lines are written within [`WHILE`],
//! and how many were left out is said; the file has at most [`FILE_MOST`] bytes, and the one before
//! it is kept beside it.

use crate::clock;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Lines that are written within [`WHILE`].
const LINES_MOST: u64 = 100;
const WHILE: Duration = Duration::from_secs(10);
/// The longest file, bytes.
const FILE_MOST: u64 = 2 << 20;

/// See the file's head.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    length: u64,
    /// When the lines that are counted began.
    since: Instant,
    lines: u64,
}

impl LogFile {
    /// A file that begins anew.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn start(path: &Path) -> io::Result<LogFile> {
        let file = open(path)?;
        // Of the import before, if there is one.
        let _ = fs::remove_file(LogFile::before(path));
        Ok(LogFile { path: path.to_owned(), file, length: 0, since: clock::now(), lines: 0 })
    }

    /// Where the part before the one that is written lies.
    fn before(path: &Path) -> PathBuf {
        path.with_extension("log.old")
    }

    fn put(&mut self, line: &[u8]) -> io::Result<()> {
        if self.length + line.len() as u64 > FILE_MOST {
            fs::rename(&self.path, LogFile::before(&self.path))?;
            self.file = open(&self.path)?;
            self.length = 0;
        }
        self.length += line.len() as u64;
        self.file.write_all(line)
    }

    /// Takes a line that comes at this moment.
    fn take(&mut self, line: &[u8], now: Instant) -> io::Result<()> {
        if now.saturating_duration_since(self.since) >= WHILE {
            let left_out = self.lines.saturating_sub(LINES_MOST);
            (self.since, self.lines) = (now, 0);
            if left_out > 0 {
                self.put(format!("{left_out} more lines were left out\n").as_bytes())?;
            }
        }
        self.lines += 1;
        if self.lines <= LINES_MOST { self.put(line) } else { Ok(()) }
    }
}

/// A file of its owner's alone that is there for the process alone.
fn open(path: &Path) -> io::Result<File> {
    let links = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).custom_flags(links).open(path)
}

impl Write for LogFile {
    /// The subscriber writes whole lines.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.take(line, clock::now())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_without_end_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tank.log");
        let mut log = LogFile::start(&path).unwrap();
        let now = Instant::now();
        for _ in 0..LINES_MOST + 7 {
            log.take(b"the pool: no\n", now).unwrap();
        }
        log.take(b"later\n", now + WHILE).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().filter(|line| *line == "the pool: no").count() as u64, LINES_MOST);
        assert!(text.ends_with("\n7 more lines were left out\nlater\n"), "{text}");
    }

    #[test]
    fn a_long_file_gives_way() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tank.log");
        let mut log = LogFile::start(&path).unwrap();
        let line = vec![b'x'; 1 << 16];
        let mut now = Instant::now();
        for _ in 0..200 {
            log.take(&line, now).unwrap();
            now += WHILE;
        }
        let lengths = [&path, &LogFile::before(&path)].map(|path| fs::metadata(path).unwrap().len());
        assert!(lengths.iter().all(|length| *length > 0 && *length <= FILE_MOST), "{lengths:?}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
