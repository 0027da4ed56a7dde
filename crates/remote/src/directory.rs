//! A bucket that is a directory: for tests, and for a remote file system with hard links that is mounted there.
//!
//! Invariants:
//! - An object gets its name only when it is complete and durable. It is written without a name first, or under
//!   another one where the file system has no files without names; a new object gets its name by link(2), which
//!   fails if the name exists, a replaceable one by rename(2).
//! - A file with another name is locked (`flock`) by its writer, which removes it also after an error: one without a
//!   lock is a dead process', and is removed by the next writer ([`Bucket::remove_unfinished`]).
//! - No link below the directory is followed, and no existing file is opened for writing: others may be able to write
//!   to the directory. Only their owner can read objects.
//! - The directory is opened once: what is mounted over it later, or put in its place, is another bucket. It is opened
//!   again only where its file system has gone (a server that was started again).

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_pool::backend::{Bucket, Put, Requests, longest_object};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Directory of objects that are being written; no object has such a name.
const UNFINISHED: &str = ".unfinished";

pub(crate) struct Directory {
    path: PathBuf,
    name: String,
    /// The directory, from the first request that finds it.
    opened: Mutex<Option<Arc<OwnedFd>>>,
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
            opened: Mutex::default(),
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

    /// Returns the directory itself.
    fn root(&self) -> io::Result<Arc<OwnedFd>> {
        let mut kept = self.opened.lock();
        let known = kept.as_ref().map(|opened| (Arc::clone(opened), rustix::fs::fstat(opened)));
        let (opened, stat) = match known {
            Some((opened, stat)) if !matches!(stat, Err(Errno::NOTCONN | Errno::STALE | Errno::NODEV)) => {
                (opened, stat?)
            }
            _ => match rustix::fs::open(&self.path, DIRECTORY, Mode::empty()) {
                Ok(opened) => {
                    let stat = rustix::fs::fstat(&opened)?;
                    (Arc::clone(kept.insert(Arc::new(opened))), stat)
                }
                Err(Errno::NOENT) => return Err(self.missing()),
                Err(error) => return Err(error.into()),
            },
        };
        // Some file systems count no names of directories; the kernel marks those that it has seen removed.
        let is_removed = || {
            let path = rustix::fs::readlink(format!("/proc/self/fd/{}", opened.as_raw_fd()), Vec::new());
            path.is_ok_and(|path| path.to_bytes().ends_with(b" (deleted)"))
        };
        if stat.st_nlink == 0 && is_removed() {
            return Err(self.missing());
        }
        Ok(opened)
    }

    /// Writes an object without its name; the caller gives it one.
    fn write(&self, body: &[u8]) -> io::Result<Unfinished> {
        add(&self.puts, 1);
        add(&self.sent, body.len());
        let directory = entered(self.root()?.as_fd(), UNFINISHED)?;
        let nameless = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let mut written = match rustix::fs::openat(&directory, ".", nameless, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Unfinished { directory, name: None, file: File::from(file) },
            // Not every file system has files without names.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => self.named(directory)?,
            Err(error) => return Err(error.into()),
        };
        written.file.write_all(body)?;
        written.file.sync_all()?;
        Ok(written)
    }

    /// Makes an empty file with another name.
    fn named(&self, directory: OwnedFd) -> io::Result<Unfinished> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        loop {
            let name = self.next_name();
            let file = match rustix::fs::openat(&directory, &name, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => continue,
                opened => File::from(opened?),
            };
            // Another process that removes what dead ones have left may have been first.
            let is_own = is_locked(&file) && rustix::fs::fstat(&file)?.st_nlink > 0;
            if is_own {
                return Ok(Unfinished { directory, name: Some(name), file });
            }
        }
    }

    /// Containers that share the directory may have the same process id: the next name is tried where one exists.
    fn next_name(&self) -> String {
        format!("{}-{}", std::process::id(), self.written.fetch_add(1, Ordering::Relaxed))
    }

    /// Opens the directory of an object, made where it is missing; returns it with the object's name in it.
    fn place<'a>(&self, key: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let mut directory = self.root()?.try_clone()?;
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
        Ok(rustix::fs::openat2(&*self.root()?, key, flags, Mode::empty(), BELOW)?)
    }
}

/// Flags for opening directories.
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Flags for resolving all paths below the directory.
const BELOW: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::BENEATH);

/// An object without its name. Dropping it removes the file.
struct Unfinished {
    directory: OwnedFd,
    /// Another name that it has.
    name: Option<String>,
    file: File,
}

impl Unfinished {
    /// Links the file that was written, even if its other name is another file's now.
    fn link(&self, directory: &OwnedFd, name: &str) -> Result<(), Errno> {
        let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(rustix::fs::CWD, file, directory, name, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(name) = &self.name else { return };
        match rustix::fs::unlinkat(&self.directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => tracing::warn!(name, %error, "an unfinished object stays"),
        }
    }
}

/// Locks a file, unless another process has locked it. Where there are no locks, nothing is removed.
fn is_locked(file: &File) -> bool {
    !matches!(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK))
}

/// Removes an unfinished object whose writer is gone.
fn remove_dead(directory: &OwnedFd, name: &std::ffi::CStr) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => File::from(opened?),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(()),
        locked => locked?,
    }
    // Another process may have removed it, and the name may be a living writer's now.
    if rustix::fs::fstat(&file)?.st_nlink > 0 {
        rustix::fs::unlinkat(directory, name, AtFlags::empty())?;
    }
    Ok(())
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
        let mut written = self.write(body)?;
        let (directory, name) = self.place(key)?;
        // link(2) replaces nothing.
        if written.name.is_none() && !is_locked(&written.file) {
            return Err(ErrorKind::WouldBlock.into());
        }
        while written.name.is_none() {
            let other = self.next_name();
            match written.link(&written.directory, &other) {
                Err(Errno::EXIST) => {}
                linked => {
                    linked?;
                    written.name = Some(other);
                }
            }
        }
        if let Some(other) = &written.name {
            rustix::fs::renameat(&written.directory, other, &directory, name)?;
        }
        written.name = None;
        Ok(rustix::fs::fsync(directory)?)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let written = self.write(body)?;
        let (directory, name) = self.place(key)?;
        match written.link(&directory, name) {
            Ok(()) => {
                rustix::fs::fsync(directory)?;
                Ok(Put::Made)
            }
            Err(Errno::EXIST) => Ok(Put::Exists),
            Err(error) => Err(error.into()),
        }
    }

    fn remove_unfinished(&self) -> io::Result<()> {
        let directory = match self.open(UNFINISHED, OFlags::DIRECTORY) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        let mut done = Ok(());
        for entry in rustix::fs::Dir::read_from(&directory)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                // What others have put there keeps no dead object.
                done = done.and(remove_dead(&directory, entry.file_name()));
            }
        }
        done
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        add(&self.gets, 1);
        let file = match self.open(key, OFlags::empty()) {
            Ok(file) => File::from(file),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.root()?;
                return Ok(None);
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
                self.root()?;
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
        assert_eq!(unfinished(&inside), Vec::<String>::new(), "what could not get its name");
        fs::remove_dir_all(inside.join(UNFINISHED)).unwrap();
        symlink(&outside, inside.join(UNFINISHED)).unwrap();
        assert!(bucket.put("a", b"x").is_err() && bucket.put_new("a", b"x").is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"theirs");
    }

    fn unfinished(bucket: &Path) -> Vec<String> {
        let names = fs::read_dir(bucket.join(UNFINISHED)).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn what_dead_writers_left_is_removed_and_nothing_of_living_ones() {
        let scratch = tempfile::tempdir().unwrap();
        let bucket = Directory::new(scratch.path().to_owned(), "d".to_owned());
        bucket.remove_unfinished().unwrap();
        bucket.put_new("a", b"first").unwrap();
        fs::write(scratch.path().join(UNFINISHED).join("1-1"), "half of it").unwrap();
        // As on a file system without files that have no name.
        let mut living = bucket.named(entered(bucket.root().unwrap().as_fd(), UNFINISHED).unwrap()).unwrap();
        living.file.write_all(b"whole").unwrap();
        bucket.remove_unfinished().unwrap();
        assert_eq!(unfinished(scratch.path()), living.name.iter().cloned().collect::<Vec<_>>());
        living.link(&bucket.root().unwrap().try_clone().unwrap(), "b").unwrap();
        drop(living);
        assert_eq!(unfinished(scratch.path()), Vec::<String>::new());
        assert_eq!(bucket.get("b", None).unwrap().unwrap(), b"whole");
        assert_eq!(bucket.get("a", None).unwrap().unwrap(), b"first");
    }

    #[test]
    fn another_directory_in_its_place_is_another_bucket() {
        let scratch = tempfile::tempdir().unwrap();
        let (path, moved) = (scratch.path().join("d"), scratch.path().join("moved"));
        fs::create_dir(&path).unwrap();
        let bucket = Directory::new(path.clone(), "d".to_owned());
        bucket.put_new("a/1", b"first").unwrap();
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        bucket.put_new("a/2", b"second").unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "it took an object");
        assert_eq!(bucket.list("a/", "").unwrap(), ["a/1", "a/2"]);
        fs::remove_dir_all(&moved).unwrap();
        assert!(bucket.get("a/1", None).is_err() && bucket.list("a/", "").is_err() && bucket.put("a/3", b"x").is_err());
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
