//! Who holds the name or the number of a pool on this machine: a lock on a file beside the socket.

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

/// How long a name may be held by somebody who does not answer.
pub(super) const TAKEN: Duration = Duration::from_secs(3);

/// The name of a pool, taken by this process until it ends.
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

    /// The name of a pool that a process before this one took, and has left under this number.
    pub(super) fn left_name(directory: &Path, start: &Start, number: i32) -> Result<NameLock, Failure> {
        NameLock::left(directory.join(runtime_files::file(&start.name)).with_extension("lock"), number)
    }

    /// The same of the number of a pool.
    pub(super) fn left_number(directory: &Path, guid: u64, number: i32) -> Result<NameLock, Failure> {
        NameLock::left(directory.join(format!("{guid:016x}.guid")), number)
    }

    fn left(path: PathBuf, number: i32) -> Result<NameLock, Failure> {
        let lock = descriptors::take_over(number)
            .map_err(|error| Failure::io("cannot go on with the lock", path.display(), &error))?;
        Ok(NameLock { path, lock })
    }

    /// The number of its descriptor.
    pub(super) fn descriptor(&self) -> i32 {
        self.lock.as_raw_fd()
    }

    /// The name of a pool whose process was killed; nothing where somebody has it again.
    pub(super) fn free(directory: &Path, name: &str) -> Result<Option<NameLock>, Failure> {
        NameLock::lock(directory.join(runtime_files::file(name)).with_extension("lock"), || client::lives(name))
    }

    /// Removes what the process that was killed had beside the name: its socket, and the number of
    /// the pool.
    pub(super) fn give_up(self, guid: u64) {
        let (socket, number) =
            (self.path.with_extension("pool"), self.path.with_file_name(format!("{guid:016x}.guid")));
        // What stays is replaced by the next import.
        let _ = std::fs::remove_file(socket);
        if let Ok(Some(number)) = NameLock::lock(number, || true) {
            drop(number);
        }
    }

    /// The number of a pool, so that no copy of it is imported beside it: its mount points are the
    /// same.
    pub(super) fn number(directory: &Path, guid: u64, name: &str) -> Result<Option<NameLock>, Failure> {
        let path = directory.join(format!("{guid:016x}.guid"));
        let lives = || std::fs::read_to_string(&path).is_ok_and(|name| client::lives(&name));
        let taken = NameLock::lock(path.clone(), lives)?;
        if taken.is_some() {
            std::fs::write(&path, name).map_err(|error| Failure::io("cannot write", path.display(), &error))?;
        }
        Ok(taken)
    }

    /// Takes what somebody who was killed holds yet; nothing where somebody who lives does.
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
            // The one who had it may have removed the file since we opened it.
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
        // While it is locked still: whoever waits for it sees that it is another one then.
        let _ = std::fs::remove_file(&self.path);
    }
}
