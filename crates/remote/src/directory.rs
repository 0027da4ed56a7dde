//! A bucket that is a directory: for tests, and for a remote file system with hard links that is mounted there.
//!
//! Invariants: an object gets its name only when it is complete and durable. It is written under another name
//! first; a new object gets its name by link(2), which fails if the name exists, a replaceable one by rename(2). No
//! link below the directory is followed, and no existing file is opened for writing: others may be able to write to
//! the directory. Only their owner can read objects.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_pool::backend::{Bucket, Put, Requests, longest_object};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Directory of objects that are being written; no object has such a name.
const UNFINISHED: &str = ".unfinished";

pub(crate) struct Directory {
    path: PathBuf,
    name: String,
    /// Counter that makes the names of unfinished objects unique.
    written: AtomicU64,
    puts: AtomicU64,
    gets: AtomicU64,
    lists: AtomicU64,
    deletes: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

fn add(counter: &AtomicU64, number: usize) {
    counter.fetch_add(number as u64, Ordering::Relaxed);
}

impl Directory {
    pub(crate) fn new(path: PathBuf, name: String) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            path,
            name,
            written: zero(),
            puts: zero(),
            gets: zero(),
            lists: zero(),
            deletes: zero(),
            sent: zero(),
            received: zero(),
        }
    }

    fn missing(&self) -> io::Error {
        io::Error::new(ErrorKind::NotFound, format!("there is no directory '{}'", self.path.display()))
    }

    /// Opens the directory itself.
    fn root(&self) -> io::Result<OwnedFd> {
        match rustix::fs::open(&self.path, DIRECTORY, Mode::empty()) {
            Ok(root) => Ok(root),
            Err(Errno::NOENT) => Err(self.missing()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes an object under a temporary name; the caller gives it its own.
    fn write(&self, body: &[u8]) -> io::Result<Unfinished> {
        add(&self.puts, 1);
        add(&self.sent, body.len());
        let directory = entered(self.root()?.as_fd(), UNFINISHED)?;
        loop {
            // Containers that share the directory may have the same process id: the next name is tried.
            let number = self.written.fetch_add(1, Ordering::Relaxed);
            let name = format!("{}-{number}", std::process::id());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = match rustix::fs::openat(&directory, &name, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => continue,
                opened => opened?,
            };
            let mut file = File::from(file);
            file.write_all(body)?;
            file.sync_all()?;
            return Ok(Unfinished { directory, name, file });
        }
    }

    /// Opens the directory of an object, made where it is missing; returns it with the object's name in it.
    fn place<'a>(&self, key: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let mut directory = self.root()?;
        let (above, name) = key.rsplit_once('/').unwrap_or(("", key));
        for part in above.split('/').filter(|part| !part.is_empty()) {
            directory = entered(directory.as_fd(), part)?;
        }
        Ok((directory, name))
    }

    /// Opens a file or directory below this one for reading, without following links.
    fn open(&self, key: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let key = if key.is_empty() { "." } else { key };
        // Does not block on a pipe that others may have put there.
        let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::openat2(self.root()?, key, flags, Mode::empty(), BELOW)?)
    }
}

/// Flags for opening directories.
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Flags for resolving all paths below the directory.
const BELOW: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::BENEATH);

/// An object under its temporary name.
struct Unfinished {
    directory: OwnedFd,
    name: String,
    file: File,
}

impl Unfinished {
    fn remove(self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty())?)
    }
}

/// Opens a directory in another one; makes it durably where it is missing.
fn entered(above: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    match rustix::fs::openat2(above, name, DIRECTORY, Mode::empty(), BELOW) {
        Err(Errno::NOENT) => {
            match rustix::fs::mkdirat(above, name, Mode::RWXU) {
                Err(Errno::EXIST) => {}
                made => made?,
            }
            rustix::fs::fsync(above)?;
            Ok(rustix::fs::openat2(above, name, DIRECTORY, Mode::empty(), BELOW)?)
        }
        opened => Ok(opened?),
    }
}

impl Bucket for Directory {
    fn name(&self) -> &str {
        &self.name
    }

    fn attempts(&self) -> usize {
        1
    }

    fn parallel(&self) -> usize {
        4
    }

    fn requests(&self) -> Requests {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests {
            puts: of(&self.puts),
            gets: of(&self.gets),
            lists: of(&self.lists),
            deletes: of(&self.deletes),
            again: 0,
            sent: of(&self.sent),
            received: of(&self.received),
        }
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        let written = self.write(body)?;
        let (directory, name) = self.place(key)?;
        rustix::fs::renameat(&written.directory, &written.name, &directory, name)?;
        Ok(rustix::fs::fsync(directory)?)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let written = self.write(body)?;
        let (directory, name) = self.place(key)?;
        // Links the file that was written, even if its temporary name is another file's now.
        let file = format!("/proc/self/fd/{}", written.file.as_raw_fd());
        let made = rustix::fs::linkat(rustix::fs::CWD, file, &directory, name, AtFlags::SYMLINK_FOLLOW);
        written.remove()?;
        match made {
            Ok(()) => {
                rustix::fs::fsync(directory)?;
                Ok(Put::Made)
            }
            Err(Errno::EXIST) => Ok(Put::Exists),
            Err(error) => Err(error.into()),
        }
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        add(&self.gets, 1);
        let file = match self.open(key, OFlags::empty()) {
            Ok(file) => File::from(file),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return if self.path.is_dir() { Ok(None) } else { Err(self.missing()) };
            }
            Err(error) => return Err(error),
        };
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("'{key}' is no file")));
        }
        let length = found.len();
        let Range { start, end } = range.unwrap_or(0..longest_object(key));
        let mut body = vec![0; end.min(length).saturating_sub(start) as usize];
        file.read_exact_at(&mut body, start)?;
        add(&self.received, body.len());
        Ok(Some(body))
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        add(&self.lists, 1);
        let mut found = Vec::new();
        let gathered = self.open(prefix, OFlags::DIRECTORY).and_then(|directory| {
            let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
            gather(&path, prefix, &mut found)
        });
        match gathered {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if !self.path.is_dir() {
                    return Err(self.missing());
                }
            }
            gathered => gathered?,
        }
        found.retain(|key| key.as_str() > after);
        found.sort();
        Ok(found)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        add(&self.deletes, 1);
        let (above, name) = key.rsplit_once('/').unwrap_or(("", key));
        let removed = self.open(above, OFlags::DIRECTORY).and_then(|directory| {
            rustix::fs::unlinkat(&directory, name, AtFlags::empty())?;
            Ok(())
        });
        match removed {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

fn gather(directory: &Path, prefix: &str, found: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        match entry.file_type()?.is_dir() {
            true if name == UNFINISHED => {}
            true => gather(&entry.path(), &format!("{prefix}{name}/"), found)?,
            false => found.push(format!("{prefix}{name}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn no_link_leads_out_of_the_directory() {
        let scratch = tempfile::tempdir().unwrap();
        let (inside, outside) = (scratch.path().join("d"), scratch.path().join("outside"));
        fs::create_dir_all(&outside).unwrap();
        fs::create_dir(&inside).unwrap();
        fs::write(outside.join("file"), "theirs").unwrap();
        symlink(&outside, inside.join("seg")).unwrap();
        symlink(outside.join("file"), inside.join("linked")).unwrap();
        let bucket = Directory::new(inside.clone(), "d".to_owned());
        assert!(bucket.put("seg/00/1", b"x").is_err() && bucket.put_new("seg/1", b"x").is_err());
        assert!(bucket.get("seg/file", None).is_err() && bucket.get("linked", None).is_err());
        assert!(bucket.delete("seg/file").is_err() && bucket.list("seg/", "").is_err());
        bucket.put("linked", b"ours").unwrap();
        assert_eq!(bucket.get("linked", None).unwrap().unwrap(), b"ours");
        assert_eq!(fs::metadata(inside.join("linked")).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_dir_all(inside.join(UNFINISHED)).unwrap();
        symlink(&outside, inside.join(UNFINISHED)).unwrap();
        assert!(bucket.put("a", b"x").is_err() && bucket.put_new("a", b"x").is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"theirs");
    }

    #[test]
    fn a_directory_does_what_a_bucket_does() {
        let scratch = tempfile::tempdir().unwrap();
        let bucket = Directory::new(scratch.path().join("d"), "d".to_owned());
        assert_eq!(bucket.list("a/", "").unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(bucket.put("a/b/1", b"x").unwrap_err().kind(), ErrorKind::NotFound);
        fs::create_dir(scratch.path().join("d")).unwrap();
        assert_eq!((bucket.list("a/", "").unwrap(), bucket.get("a/b/1", None).unwrap()), (Vec::new(), None));
        assert_eq!(bucket.put_new("a/b/1", b"first").unwrap(), Put::Made);
        assert_eq!(bucket.put_new("a/b/1", b"second").unwrap(), Put::Exists);
        assert_eq!(bucket.get("a/b/1", None).unwrap().unwrap(), b"first");
        bucket.put("a/b/1", b"third").unwrap();
        bucket.put("a/c", b"").unwrap();
        assert_eq!(bucket.get("a/b/1", Some(1..3)).unwrap().unwrap(), b"hi");
        assert_eq!(bucket.get("a/b/1", Some(3..99)).unwrap().unwrap(), b"rd");
        assert_eq!(bucket.list("a/", "").unwrap(), ["a/b/1", "a/c"]);
        assert_eq!(bucket.list("a/", "a/b/1").unwrap(), ["a/c"]);
        assert_eq!(bucket.list("", "").unwrap(), ["a/b/1", "a/c"]);
        bucket.delete("a/c").unwrap();
        bucket.delete("a/c").unwrap();
        assert_eq!(bucket.list("a/", "").unwrap(), ["a/b/1"]);
        let Requests { puts, deletes, sent, received, .. } = bucket.requests();
        assert_eq!((puts, deletes, sent, received), (5, 2, 17, 9));
    }
}
