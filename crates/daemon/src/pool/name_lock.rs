//! Locks on the name and the GUID of a pool on this machine: a lock on a file next to the socket.

use super::{
    client, runtime_files,
    start::{How, Start},
};
use crate::{
    clock,
    failure::{Exit, Failure},
};
use nacre_sys::descriptors;
use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock, open},
    io::Errno,
};
use std::{
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// How long a name may be locked by a process that does not answer.
pub(super) const TAKEN: Duration = Duration::from_secs(3);

/// A lock on the name or GUID of a pool, held until the process ends.
pub(super) struct NameLock {
    path: PathBuf,
    lock: OwnedFd,
}

impl NameLock {
    pub(super) fn take(directory: &Path, start: &Start) -> Result<NameLock, Failure> {
        let path = directory.join(runtime_files::file(&start.name)).with_extension("lock");
        let doing = if matches!(start.how, How::Create { .. }) { "create" } else { "import" };
        NameLock::lock(path, || client::lives(&start.name))?.ok_or_else(|| {
            Failure::new(format!("cannot {doing} '{}': a pool of that name is imported already", start.name))
                .exit(Exit::Busy)
        })
    }

    /// Takes over the lock on the name from the previous process, by its descriptor number.
    pub(super) fn left_name(directory: &Path, start: &Start, number: i32) -> Result<NameLock, Failure> {
        NameLock::left(directory.join(runtime_files::file(&start.name)).with_extension("lock"), number)
    }

    /// Takes over the lock on the GUID in the same way.
    pub(super) fn left_number(directory: &Path, guid: u64, number: i32) -> Result<NameLock, Failure> {
        NameLock::left(directory.join(format!("{guid:016x}.guid")), number)
    }

    fn left(path: PathBuf, number: i32) -> Result<NameLock, Failure> {
        let lock = descriptors::take_over(number)
            .map_err(|error| Failure::io("cannot go on with the lock", path.display(), &error))?;
        Ok(NameLock { path, lock })
    }

    /// Returns the number of its descriptor.
    pub(super) fn descriptor(&self) -> i32 {
        self.lock.as_raw_fd()
    }

    /// Locks the name of a pool whose process was killed; `None` where another process has it again.
    pub(super) fn free(directory: &Path, name: &str) -> Result<Option<NameLock>, Failure> {
        NameLock::lock(directory.join(runtime_files::file(name)).with_extension("lock"), || client::lives(name))
    }

    /// Removes the files of a killed process next to the lock: its socket, and the lock file of the GUID.
    pub(super) fn give_up(self, guid: u64) {
        let (socket, number) =
            (self.path.with_extension("pool"), self.path.with_file_name(format!("{guid:016x}.guid")));
        // Files that stay are replaced by the next import.
        let _ = std::fs::remove_file(socket);
        if let Ok(Some(number)) = NameLock::lock(number, || true) {
            drop(number);
        }
    }

    /// Locks the GUID of a pool, so that no copy of it is imported in addition: its mount points are the same.
    pub(super) fn number(directory: &Path, guid: u64, name: &str) -> Result<Option<NameLock>, Failure> {
        let path = directory.join(format!("{guid:016x}.guid"));
        let lives = || std::fs::read_to_string(&path).is_ok_and(|name| client::lives(&name));
        let taken = NameLock::lock(path.clone(), lives)?;
        if taken.is_some() {
            std::fs::write(&path, name).map_err(|error| Failure::io("cannot write", path.display(), &error))?;
        }
        Ok(taken)
    }

    /// Takes a lock that a killed process may hold a moment longer; `None` where a living one holds it.
    fn lock(path: PathBuf, lives: impl Fn() -> bool) -> Result<Option<NameLock>, Failure> {
        let failed = |error: Errno| Failure::io("cannot lock", path.display(), &error.into());
        let until = clock::now() + TAKEN;
        loop {
            let lock = open(
                &path,
                OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW,
                Mode::RUSR | Mode::WUSR,
            )
            .map_err(failed)?;
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                // Held by a process that was killed, or that is about to answer or to fail.
                Err(Errno::WOULDBLOCK) if clock::now() < until && !lives() => {
                    clock::pause(Duration::from_millis(10));
                    continue;
                }
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(failed(error)),
            }
            // The previous holder may have removed the file since it was opened here.
            let held = File::from(lock);
            let same = match (held.metadata(), std::fs::metadata(&path)) {
                (Ok(held), Ok(there)) => (held.dev(), held.ino()) == (there.dev(), there.ino()),
                _ => false,
            };
            if same {
                return Ok(Some(NameLock { path, lock: held.into() }));
            }
        }
    }
}

impl Drop for NameLock {
    fn drop(&mut self) {
        // Removed while it is locked: a waiter then sees that the file is another one.
        let _ = std::fs::remove_file(&self.path);
    }
}
