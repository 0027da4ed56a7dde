//! Locks, where they are forwarded to the files below; otherwise the kernel keeps them itself and sends none of these
//! requests.

use crate::{door::Door, failure::Outcome, open_files::OpenHandle, wire};
use fusewire::{Reply, abi};
use nacre_vfs::{Errno, FileLock, LockKind, LockOwner};

/// `OFFSET_MAX`: to the end of the file.
const TO_THE_END: u64 = u64::MAX >> 1;

impl Door {
    pub(crate) fn getlk(&self, fh: u64, owner: u64, lock: &abi::FileLock, reply: &mut Reply<'_>) -> Outcome {
        let handle = self.handle_of(fh)?;
        let asked = wire::lock(lock).ok_or(Errno::EINVAL)?;
        let found = handle.file.test_lock(LockOwner(owner), asked)?;
        Ok(reply.lock(&wire::lock_out(&found))?)
    }

    pub(crate) fn setlk(&self, fh: u64, owner: u64, lock: &abi::FileLock, flags: u32, wait: bool) -> Outcome {
        let handle = self.handle_of(fh)?;
        let asked = wire::lock(lock).ok_or(Errno::EINVAL)?;
        let owner = LockOwner(owner);
        let file = &handle.file;
        let whole_file = flags & abi::flag::LK_FLOCK != 0;
        if !whole_file && asked.kind != LockKind::Unlock {
            handle.note_lock_owner(owner);
        }
        let take = || if whole_file { file.flock(owner, asked.kind, wait) } else { file.set_lock(owner, asked, wait) };
        // Unlocking never waits.
        if wait && asked.kind != LockKind::Unlock { Ok(fusewire::blocking(take)??) } else { Ok(take()?) }
    }

    pub(crate) fn flush(&self, fh: u64, owner: u64) -> Outcome {
        let reports = self.options.reports_at_close && !self.agreement().opens_files_itself;
        if !self.options.lock_forwarding && !reports {
            // The kernel remembers this and sends no more FLUSH.
            return Err(Errno::ENOSYS.into());
        }
        let handle = self.handle_of(fh)?;
        let owner = LockOwner(owner);
        if !self.options.lock_forwarding {
            return Ok(handle.file.flush(owner)?);
        }
        let all = FileLock { start: 0, end: TO_THE_END, kind: LockKind::Unlock, pid: 0 };
        // close(2) drops the process's locks on the file, no matter through which descriptor they were taken.
        let unlocked = handle.file.set_lock(owner, all, false);
        handle.forget_lock_owner(owner);
        handle.file.flush(owner)?;
        Ok(unlocked?)
    }

    /// Releases the locks of an open file itself (`F_OFD_SETLK`) at its last close, for which the kernel sends no
    /// request. The locks of processes ended with the FLUSH of each close(2).
    pub(crate) fn end_own_locks(&self, handle: &OpenHandle) {
        let all = FileLock { start: 0, end: TO_THE_END, kind: LockKind::Unlock, pid: 0 };
        for owner in handle.take_lock_owners() {
            if let Err(error) = handle.file.set_lock(owner, all, false) {
                tracing::warn!(%error, "a lock of a file that was closed stays");
            }
        }
    }
}
