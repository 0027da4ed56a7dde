//! The log of a process that owns a pool: a file beside its socket, which lies in memory on most
//! systems. Bounded, whatever users make happen.
//!
//! Used by [`super`]. Invariant: the file has at most [`FILE_MOST`] bytes, and the one before it is
//! kept beside it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// The longest file, bytes.
const FILE_MOST: u64 = 2 << 20;

/// See the file's head.
#[derive(Debug)]
pub(super) struct RotatingFile {
    path: PathBuf,
    file: File,
    length: u64,
}

impl RotatingFile {
    /// A file that begins anew.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn start(path: &Path) -> io::Result<RotatingFile> {
        let file = open(path, true)?;
        // Of the import before, if there is one.
        let _ = fs::remove_file(RotatingFile::before(path));
        Ok(RotatingFile { path: path.to_owned(), file, length: 0 })
    }

    /// A file that goes on.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn go_on(path: &Path) -> io::Result<RotatingFile> {
        let file = open(path, false)?;
        let length = file.metadata()?.len();
        Ok(RotatingFile { path: path.to_owned(), file, length })
    }

    /// Where the part before the one that is written lies.
    fn before(path: &Path) -> PathBuf {
        path.with_extension("log.old")
    }

    /// Adds a line.
    ///
    /// # Errors
    /// As `write(2)`, or those of beginning anew.
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

/// A file of its owner's alone that is there for the process alone.
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
