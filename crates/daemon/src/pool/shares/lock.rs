//! Locks on directories that the processes of all pools change: the records of shares, the exports of NFS-Ganesha.
//!
//! Used by `shares.rs` and `ganesha.rs`. A process whose program does not end may hold a lock for ever. Invariant: a
//! process waits for a lock that is not released once, however many shares it makes or removes meanwhile; later
//! attempts fail at once, until one gets the lock.

use crate::clock;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{
    fs, io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// Maximum time for which a lock is waited for: longer than the programs of a server take.
const LOCKED_MOST: Duration = Duration::from_secs(30);
/// The same for a lock that was not released in that time: another process may hold it for a moment now.
const OVERDUE_MOST: Duration = Duration::from_secs(1);
const ASKED_AGAIN: Duration = Duration::from_millis(10);

/// A lock that is taken on a directory.
pub(super) struct DirectoryLock {
    /// It was not released in time.
    is_overdue: AtomicBool,
}

impl DirectoryLock {
    pub(super) const fn new() -> DirectoryLock {
        DirectoryLock { is_overdue: AtomicBool::new(false) }
    }

    /// Locks a directory until the returned file is closed.
    ///
    /// # Errors
    /// ETIMEDOUT where another process has it locked for long.
    pub(super) fn take(&self, directory: &Path) -> io::Result<fs::File> {
        self.take_within(directory, LOCKED_MOST)
    }

    pub(super) fn take_within(&self, directory: &Path, limit: Duration) -> io::Result<fs::File> {
        let file = fs::File::open(directory)?;
        let limit = if self.is_overdue.load(Ordering::Acquire) { limit.min(OVERDUE_MOST) } else { limit };
        let mut locked = Ok(());
        let is_decided = clock::look_until(limit, ASKED_AGAIN, || {
            locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
            !matches!(locked, Err(Errno::WOULDBLOCK | Errno::INTR))
        });
        self.is_overdue.store(!is_decided, Ordering::Release);
        if !is_decided {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "another process of nacre has it locked for long"));
        }
        locked?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_never_released_is_waited_for_once() {
        let directory = tempfile::tempdir().unwrap();
        let (holder, lock) = (DirectoryLock::new(), DirectoryLock::new());
        let held = holder.take(directory.path()).unwrap();
        let take = |limit| lock.take_within(directory.path(), limit);
        assert_eq!(take(Duration::from_millis(1)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        // With a limit that would not end within the test.
        for _ in 0..3 {
            assert_eq!(take(Duration::from_secs(86_400)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        drop(held);
        drop(take(Duration::ZERO).unwrap());
        assert!(!lock.is_overdue.load(Ordering::Acquire), "the next one is waited for again");
    }
}
