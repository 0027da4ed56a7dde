//! A bucket that is a directory: for tests, and for what is mounted from elsewhere and has hard
//! links.
//!
//! Invariant: an object has its name only when it is whole and durable. It is written under another
//! name first; a new one gets its own by link(2), which refuses a name that is there, one that may
//! be replaced by rename(2).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_pool::backend::{Bucket, Put, Requests, longest_object};

/// Objects that are being written are there, below names that are no object's.
const UNFINISHED: &str = ".unfinished";

pub(crate) struct Directory {
    path: PathBuf,
    name: String,
    /// Tells what is being written apart.
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

    /// Writes an object under another name; its own is given to it by the caller.
    fn write(&self, body: &[u8]) -> io::Result<PathBuf> {
        add(&self.puts, 1);
        add(&self.sent, body.len());
        if !self.path.is_dir() {
            return Err(io::Error::new(
                ErrorKind::NotFound,
                format!("there is no directory '{}'", self.path.display()),
            ));
        }
        let unfinished = self.path.join(UNFINISHED);
        fs::create_dir_all(&unfinished)?;
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let path = unfinished.join(format!("{}-{number}", std::process::id()));
        let mut file = File::create(&path)?;
        file.write_all(body)?;
        file.sync_all()?;
        Ok(path)
    }

    /// The path of an object, in a directory that is there.
    fn place(&self, key: &str) -> io::Result<(PathBuf, PathBuf)> {
        let path = self.path.join(key);
        let parent = path.parent().unwrap_or(&self.path).to_owned();
        if !parent.is_dir() {
            fs::create_dir_all(&parent)?;
            let above = parent.ancestors().skip(1).take_while(|above| above.starts_with(&self.path));
            above.into_iter().try_for_each(|above| File::open(above)?.sync_all())?;
        }
        Ok((path, parent))
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
        let (path, parent) = self.place(key)?;
        fs::rename(written, path)?;
        File::open(parent)?.sync_all()
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let written = self.write(body)?;
        let (path, parent) = self.place(key)?;
        let made = fs::hard_link(&written, path);
        fs::remove_file(written)?;
        match made {
            Ok(()) => File::open(parent)?.sync_all().map(|()| Put::Made),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Put::Exists),
            Err(error) => Err(error),
        }
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        add(&self.gets, 1);
        // A pipe that somebody has put there is not waited for.
        let mut opened = OpenOptions::new();
        opened.read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
        let file = match opened.open(self.path.join(key)) {
            Ok(file) => file,
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
        match gather(&self.path.join(prefix), prefix, &mut found) {
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
        match fs::remove_file(self.path.join(key)) {
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
    use super::*;

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
