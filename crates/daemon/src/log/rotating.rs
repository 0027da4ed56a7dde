//! Log file of a process that owns a pool, next to its socket, which lies in memory on most systems. Its size is
//! bounded, since users can cause any number of events.
//!
//! Used by [`super`]. Invariant: the file has at most [`FILE_MOST`] bytes, and the previous file is kept next to
//! it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// The longest file, bytes.
const FILE_MOST: u64 = 2 << 20;

/// Log file with a bounded size.
#[derive(Debug)]
pub(super) struct RotatingFile {
    path: PathBuf,
    file: File,
    length: u64,
}

impl RotatingFile {
    /// Starts an empty file.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn start(path: &Path) -> io::Result<RotatingFile> {
        let file = open(path, true)?;
        // The previous file, if any, is of an earlier import.
        let _ = fs::remove_file(RotatingFile::before(path));
        Ok(RotatingFile { path: path.to_owned(), file, length: 0 })
    }

    /// Opens the log file of an earlier process to append to it.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn go_on(path: &Path) -> io::Result<RotatingFile> {
        let file = open(path, false)?;
        let length = file.metadata()?.len();
        Ok(RotatingFile { path: path.to_owned(), file, length })
    }

    /// Returns the path of the previous file.
    fn before(path: &Path) -> PathBuf {
        path.with_extension("log.old")
    }

    /// Appends a line.
    ///
    /// # Errors
    /// As `write(2)`, or errors of the rotation.
    pub fn put(&mut self, line: &[u8]) -> io::Result<()> {
        if self.length + line.len() as u64 > FILE_MOST {
            fs::rename(&self.path, RotatingFile::before(&self.path))?;
            self.file = open(&self.path, true)?;
            self.length = 0;
        }
        self.length += line.len() as u64;
        self.file.write_all(line)
    }
}

/// Opens a file that only its owner can read, to append to it.
fn open(path: &Path, anew: bool) -> io::Result<File> {
    let links = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(links).open(path)?;
    if anew {
        file.set_len(0)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_gives_way() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tank.log");
        let mut log = RotatingFile::start(&path).unwrap();
        let line = vec![b'x'; 1 << 16];
        for _ in 0..200 {
            log.put(&line).unwrap();
        }
        let lengths = [&path, &RotatingFile::before(&path)].map(|path| fs::metadata(path).unwrap().len());
        assert!(lengths.iter().all(|length| *length > 0 && *length <= FILE_MOST), "{lengths:?}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
