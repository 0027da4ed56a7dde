//! File locks kept in memory: byte ranges (`fcntl`) and whole files (`flock`). For leaves without a
//! kernel file system below (`mem`, and file systems of pools). A wait cannot be interrupted.

use nacre_vfs::{Errno, FileLock, LockKind, LockOwner, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

#[derive(Debug, Default)]
struct Held {
    /// One owner's ranges never overlap each other.
    ranges: Vec<(LockOwner, FileLock)>,
    whole: Vec<(LockOwner, LockKind)>,
}

/// The locks of one file.
#[derive(Debug, Default)]
pub struct Locks {
    held: Mutex<Held>,
    released: Condvar,
}

fn clash(a: LockKind, b: LockKind) -> bool {
    a == LockKind::Write || b == LockKind::Write
}

impl Held {
    fn in_the_way(&self, owner: LockOwner, lock: &FileLock) -> Option<FileLock> {
        let overlap = |other: &FileLock| other.start <= lock.end && lock.start <= other.end;
        let found = self
            .ranges
            .iter()
            .find(|(holder, other)| *holder != owner && overlap(other) && clash(other.kind, lock.kind));
        found.map(|(_, other)| *other)
    }

    /// Removes `lock` from the owner's ranges, splitting those that overlap, and inserts it unless
    /// it is an unlock.
    fn put(&mut self, owner: LockOwner, lock: FileLock) {
        let mut kept = Vec::with_capacity(self.ranges.len() + 2);
        for (holder, other) in self.ranges.drain(..) {
            if holder != owner || other.start > lock.end || lock.start > other.end {
                kept.push((holder, other));
                continue;
            }
            if other.start < lock.start {
                kept.push((holder, FileLock { end: lock.start - 1, ..other }));
            }
            if other.end > lock.end {
                kept.push((holder, FileLock { start: lock.end + 1, ..other }));
            }
        }
        if lock.kind != LockKind::Unlock {
            kept.push((owner, lock));
        }
        self.ranges = kept;
    }
}

impl Locks {
    /// Returns a conflicting lock, or the lock as unlocked (`F_GETLK`).
    pub fn test(&self, owner: LockOwner, lock: FileLock) -> FileLock {
        self.held.lock().in_the_way(owner, &lock).unwrap_or(FileLock { kind: LockKind::Unlock, ..lock })
    }

    /// Takes, changes or releases a byte range (`F_SETLK`, with `wait` `F_SETLKW`).
    ///
    /// # Errors
    /// EAGAIN if another owner's lock conflicts and `wait` is false.
    pub fn set(&self, owner: LockOwner, lock: FileLock, wait: bool) -> Result<()> {
        let mut held = self.held.lock();
        while lock.kind != LockKind::Unlock && held.in_the_way(owner, &lock).is_some() {
            if !wait {
                return Err(Errno::EAGAIN);
            }
            self.released.wait(&mut held);
        }
        held.put(owner, lock);
        self.released.notify_all();
        Ok(())
    }

    /// Takes, changes or releases the lock of the whole file (flock(2)), which is independent of
    /// ranges.
    ///
    /// # Errors
    /// EAGAIN if another owner's lock conflicts and `wait` is false.
    pub fn flock(&self, owner: LockOwner, kind: LockKind, wait: bool) -> Result<()> {
        let mut held = self.held.lock();
        let others = |held: &Held| held.whole.iter().any(|(holder, other)| *holder != owner && clash(*other, kind));
        while kind != LockKind::Unlock && others(&held) {
            if !wait {
                return Err(Errno::EAGAIN);
            }
            self.released.wait(&mut held);
        }
        held.whole.retain(|(holder, _)| *holder != owner);
        if kind != LockKind::Unlock {
            held.whole.push((owner, kind));
        }
        self.released.notify_all();
        Ok(())
    }

    /// Releases all ranges of an owner, like a process that closes the file.
    pub fn release(&self, owner: LockOwner) {
        self.held.lock().ranges.retain(|(holder, _)| *holder != owner);
        self.released.notify_all();
    }
}

/// Locks of a file system's open files, by inode number.
#[derive(Debug, Default)]
pub struct LockTable {
    held: Mutex<HashMap<u64, Weak<Locks>>>,
}

impl LockTable {
    /// Returns the locks of a file: the same object for all that have it open.
    pub fn of(&self, number: u64) -> Arc<Locks> {
        let mut held = self.held.lock();
        if let Some(locks) = held.get(&number).and_then(Weak::upgrade) {
            return locks;
        }
        let locks = Arc::new(Locks::default());
        // Entries of closed files are removed when the table is full.
        if held.len() == held.capacity() {
            held.retain(|_, locks| locks.strong_count() > 0);
        }
        held.insert(number, Arc::downgrade(&locks));
        locks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LockOwner = LockOwner(1);
    const B: LockOwner = LockOwner(2);

    fn lock(kind: LockKind, start: u64, end: u64) -> FileLock {
        FileLock { start, end, kind, pid: 7 }
    }

    #[test]
    fn ranges_conflict_only_where_they_overlap() {
        let locks = Locks::default();
        locks.set(A, lock(LockKind::Write, 10, 19), false).unwrap();
        assert_eq!(locks.set(B, lock(LockKind::Read, 19, 30), false), Err(Errno::EAGAIN));
        assert_eq!(locks.set(B, lock(LockKind::Write, 20, 30), false), Ok(()));
        assert_eq!(locks.test(B, lock(LockKind::Read, 0, 100)), lock(LockKind::Write, 10, 19));
        locks.set(A, lock(LockKind::Unlock, 12, 15), false).unwrap();
        assert_eq!(locks.set(B, lock(LockKind::Write, 12, 15), false), Ok(()));
        assert_eq!(locks.set(B, lock(LockKind::Write, 16, 16), false), Err(Errno::EAGAIN));
        locks.release(A);
        assert_eq!(locks.test(B, lock(LockKind::Write, 0, 100)).kind, LockKind::Unlock);
    }

    #[test]
    fn whole_files_are_shared_or_exclusive() {
        let locks = Locks::default();
        locks.flock(A, LockKind::Read, false).unwrap();
        locks.flock(B, LockKind::Read, false).unwrap();
        assert_eq!(locks.flock(A, LockKind::Write, false), Err(Errno::EAGAIN));
        locks.flock(B, LockKind::Unlock, false).unwrap();
        assert_eq!(locks.flock(A, LockKind::Write, true), Ok(()));
    }

    #[test]
    fn a_waiting_lock_gets_its_turn() {
        let locks = Locks::default();
        locks.set(A, lock(LockKind::Write, 0, 9), false).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| locks.set(B, lock(LockKind::Write, 5, 5), true));
            locks.set(A, lock(LockKind::Unlock, 0, 9), false).unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        assert_eq!(locks.set(A, lock(LockKind::Read, 5, 5), false), Err(Errno::EAGAIN));
    }
}
