//! File locks that are forwarded to the source.
//!
//! Natively a byte-range lock belongs to a process, and a `flock` to an open file; here one process
//! holds them for all users. So each owner gets an open file of its own: byte-range locks as
//! open-file-description locks, one open file per file and owner, and `flock` with one per open
//! file and owner. They then conflict with each other, and with locks taken directly on the source,
//! exactly as the owners' locks would natively. Invariant: no internal lock is held while a call
//! waits.

use super::{descriptor::reopen, errno};
use nacre_sys::locks::{self, Kind, Range};
use nacre_vfs::{Errno, FileId, FileLock, LockKind, LockOwner, Result};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, OFlags};
use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// The last byte that a lock can cover.
const LAST: u64 = i64::MAX as u64;

/// The open files that hold byte-range locks, by file and owner.
#[derive(Default)]
pub(super) struct LockTables {
    ranges: Mutex<HashMap<(FileId, LockOwner), Arc<OwnedFd>>>,
}

fn range(lock: FileLock) -> Range {
    let kind = match lock.kind {
        LockKind::Read => Kind::Read,
        LockKind::Write => Kind::Write,
        LockKind::Unlock => Kind::Unlock,
    };
    let length = if lock.end >= LAST { 0 } else { (lock.end + 1).saturating_sub(lock.start) };
    Range { kind, start: lock.start, length, pid: 0 }
}

/// Opens a separate open file, for reading and writing where possible, so that both kinds of lock
/// can be held on it.
fn separate(file: BorrowedFd<'_>, access: OFlags) -> Result<Arc<OwnedFd>> {
    // A lock need not break leases.
    Ok(Arc::new(match reopen(file, OFlags::RDWR | OFlags::NONBLOCK) {
        Ok(descriptor) => descriptor,
        Err(_) => reopen(file, access)?,
    }))
}

impl LockTables {
    fn descriptor(&self, key: (FileId, LockOwner), file: BorrowedFd<'_>, access: OFlags) -> Result<Arc<OwnedFd>> {
        if let Some(known) = self.ranges.lock().get(&key) {
            return Ok(Arc::clone(known));
        }
        let fresh = separate(file, access)?;
        Ok(Arc::clone(self.ranges.lock().entry(key).or_insert(fresh)))
    }

    /// Returns the first lock that conflicts with `lock`, or one of kind `Unlock`.
    pub(super) fn test(
        &self,
        key: (FileId, LockOwner),
        file: BorrowedFd<'_>,
        access: OFlags,
        lock: FileLock,
    ) -> Result<FileLock> {
        let descriptor = self.descriptor(key, file, access)?;
        let found = locks::test(descriptor.as_fd(), range(lock))?;
        let kind = match found.kind {
            Kind::Read => LockKind::Read,
            Kind::Write => LockKind::Write,
            Kind::Unlock => return Ok(FileLock { kind: LockKind::Unlock, ..lock }),
        };
        let end = if found.length == 0 { LAST } else { found.start.saturating_add(found.length - 1) };
        Ok(FileLock { start: found.start, end, kind, pid: found.pid })
    }

    /// Sets or releases a lock.
    pub(super) fn set(
        &self,
        key: (FileId, LockOwner),
        file: BorrowedFd<'_>,
        access: OFlags,
        lock: FileLock,
        wait: bool,
    ) -> Result<()> {
        if lock.kind == LockKind::Unlock {
            let known = self.ranges.lock().get(&key).cloned();
            return known.map_or(Ok(()), |descriptor| Ok(locks::set(descriptor.as_fd(), range(lock), false)?));
        }
        let descriptor = self.descriptor(key, file, access)?;
        Ok(locks::set(descriptor.as_fd(), range(lock), wait)?)
    }

    /// Releases all locks of an owner that closed the file, like `close(2)`.
    pub(super) fn release(&self, key: (FileId, LockOwner)) {
        let Some(gone) = self.ranges.lock().remove(&key) else { return };
        // Closing alone would leave them with a process that is just being started, until that has
        // closed its copy of the descriptor.
        let all = Range { kind: Kind::Unlock, start: 0, length: 0, pid: 0 };
        if let Err(error) = locks::set(gone.as_fd(), all, false) {
            tracing::debug!(%error, "byte-range locks go with their descriptor");
        }
    }
}

/// The `flock` locks of one open file.
#[derive(Default)]
pub(super) struct Flocks {
    owners: Mutex<Vec<(LockOwner, Arc<OwnedFd>)>>,
}

impl Drop for Flocks {
    fn drop(&mut self) {
        self.owners.get_mut().iter().for_each(|(_, descriptor)| unlock(descriptor));
    }
}

/// Releases a `flock`, also for copies of the descriptor in a process that is just being started.
fn unlock(descriptor: &OwnedFd) {
    if let Err(error) = rustix::fs::flock(descriptor, FlockOperation::Unlock) {
        tracing::debug!(%error, "a lock of a whole file goes with its descriptor");
    }
}

impl Flocks {
    fn find(&self, owner: LockOwner) -> Option<Arc<OwnedFd>> {
        self.owners.lock().iter().find(|(known, _)| *known == owner).map(|(_, descriptor)| Arc::clone(descriptor))
    }

    pub(super) fn set(
        &self,
        owner: LockOwner,
        file: BorrowedFd<'_>,
        access: OFlags,
        kind: LockKind,
        wait: bool,
    ) -> Result<()> {
        if kind == LockKind::Unlock {
            let gone: Vec<_> = self.owners.lock().extract_if(.., |(known, _)| *known == owner).collect();
            gone.iter().for_each(|(_, descriptor)| unlock(descriptor));
            return Ok(());
        }
        let operation = match (kind, wait) {
            (LockKind::Write, true) => FlockOperation::LockExclusive,
            (LockKind::Write, false) => FlockOperation::NonBlockingLockExclusive,
            (_, true) => FlockOperation::LockShared,
            (_, false) => FlockOperation::NonBlockingLockShared,
        };
        let (descriptor, fresh) = match self.find(owner) {
            Some(known) => (known, false),
            None => (Arc::new(reopen(file, access)?), true),
        };
        rustix::fs::flock(&*descriptor, operation).map_err(errno)?;
        if fresh {
            let mut owners = self.owners.lock();
            if owners.iter().any(|(known, _)| *known == owner) {
                // Two calls of one owner at once: the later one would hold a second lock that no
                // call could release.
                return Err(Errno::EAGAIN);
            }
            owners.push((owner, descriptor));
        }
        Ok(())
    }
}
