//! Makes the kernel write dirty pages back: of all cached files of our own mount, for the layer and for callers of
//! `Mount::flush`; and of one file without its inode's lock, which is held, for lseek(2).
//!
//! Files are reached by threads of their own (`self_io.rs`), by name where that is known, else by handle
//! (`own_mount.rs`). They are not opened, which inotify watchers would see: the kernel writes everything back before
//! it requests a change of a file's times, and the front end refuses that request. The kernel takes the inode's lock
//! for it, as for fsync(2), and so also waits for a write(2) in progress; but a user can keep that from returning
//! (`flush_threads.rs`). Such a file, and one for lseek(2), is opened and flushed without the lock; the front end
//! answers these OPENs itself. syncfs(2) would not do: most kernels do not wait for FUSE there (6.17 does;
//! docs/decisions/own-mount-locks.md).
//!
//! Invariant: before Linux 6.18 no file is opened for reading here, as close(2) would wait for the inode's lock,
//! which the served caller may hold (docs/decisions/own-mount-locks.md): lseek(2) gets the kernel's length instead, a
//! file that stays locked by a writer is flushed by an invalidation, and one that stays locked by a served caller is
//! EBUSY.

use super::{
    Role,
    flush_threads::{FilesByNode, Wait},
    own_mount::{Entered, InodeKey, MountPlace, Names, number},
    waits::during,
};
use crate::inodes::ROOT;
use crate::writeback::Writeback;
use fusewire::{
    Notifier, Op, Reply, Request,
    abi::{self, fattr, fopen},
};
use nacre_vfs::{Errno, Result};
use rustix::fs::{AtFlags, OFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno as SysErrno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// File handle of these opens; the table returns smaller ones.
const OWN_HANDLE: u64 = u64::MAX;
/// Pause between the two passes: a writer that reserved before the recall, and was admitted, has its inode's lock by
/// then.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Maximum time to wait for the attributes of directories.
const FRESHENING: Duration = Duration::from_secs(1);

impl Writeback {
    #[expect(clippy::disallowed_methods, reason = "a writer in the kernel tells nobody when he has the lock")]
    pub fn flush_all(&self) -> Result<()> {
        let _one = self.flushing.lock();
        self.flush_cached(&self.place(), Wait::Admitted)?;
        std::thread::sleep(PAUSE);
        self.flush_cached(&self.place(), Wait::Admitted)
    }

    /// Writes back all that is dirty at this moment. Later writes may remain dirty.
    pub fn flush_once(&self, names: Names) -> Result<()> {
        let names = self.freshened(names);
        let _one = self.flushing.lock();
        self.flush_cached(&MountPlace { names, ..self.place() }, Wait::Returned)
    }

    fn flush_cached(&self, place: &MountPlace, wait: Wait) -> Result<()> {
        let leave_out = |files: &mut FilesByNode| files.retain(|nodeid, _| self.caches_writes(*nodeid));
        self.flush_files(self.keys(), place, wait, &leave_out)
    }

    /// Writes back the dirty pages of files that are open for writing, as long as `open` contains them: data stored
    /// to a mapping is dirty even where writes are not cached.
    pub fn flush_open(&self, open: &dyn Fn() -> BTreeSet<InodeKey>, names: Names) -> Result<()> {
        let names = self.freshened(names);
        let _one = self.flushing.lock();
        let place = MountPlace { names, ..self.place() };
        let leave_out = |files: &mut FilesByNode| {
            let open = open();
            files.retain(|_, inode| open.contains(inode));
        };
        self.flush_files(open().into_iter().collect(), &place, Wait::Returned, &leave_out)
    }

    /// Writes back all of these files, even if one fails: after a write(2) in progress, or without the inode's lock
    /// where that is not released. `leave_out` removes those that were closed meanwhile, as that writes everything
    /// back.
    fn flush_files(
        &self,
        files: Vec<InodeKey>,
        place: &MountPlace,
        wait: Wait,
        leave_out: &dyn Fn(&mut FilesByNode),
    ) -> Result<()> {
        // Files that the kernel opens itself are never seen to be closed.
        let opened = |files: &mut FilesByNode| {
            if !self.is_unopened() {
                leave_out(files);
            }
        };
        let flushed = self.flush_by_threads(files, place, wait, &opened)?;
        if flushed.unmounted {
            if !self.is_unopened() {
                return Err(Errno::ESTALE);
            }
            self.flush_unseen();
            return Ok(());
        }
        flushed.blocked.into_iter().map(|inode| self.flush_locked(inode)).fold(flushed.outcome, Result::and)
    }

    /// Writes back a file whose inode's lock is not released. What a write(2) in progress adds remains dirty: it has
    /// not returned.
    fn flush_locked(&self, inode: InodeKey) -> Result<()> {
        if self.flush_for_seek {
            return self.flush_key(inode);
        }
        if self.locked.has(inode.nodeid) {
            // The served caller may wait for the end of this flush.
            return Err(Errno::EBUSY);
        }
        match self.notifier() {
            Some(notifier) => self.flush_by_invalidation(&notifier, inode.nodeid),
            // The session has ended: the kernel has written everything back.
            None => Ok(()),
        }
    }

    /// Makes the kernel write back the dirty pages of a file, and drop them, without its inode's lock. A daemon that
    /// is killed meanwhile would hang, unless another process takes over.
    fn flush_by_invalidation(&self, notifier: &Notifier, nodeid: u64) -> Result<()> {
        match self.tell(|| notifier.inval_inode(nodeid, 0, 0)) {
            // The kernel does not have it in memory, nor any pages.
            Err(error) if error.raw_os_error() == Some(Errno::ENOENT.raw()) => Ok(()),
            told => told.map_err(|error| Errno::from_raw(number(error).raw_os_error())),
        }
    }

    /// Makes these names usable for reaching files: requests their directories' attributes before any lock is taken
    /// here, as the layer's reply may depend on a thread that needs that lock.
    fn freshened(&self, names: Names) -> Arc<Names> {
        let names = Arc::new(names);
        if names.is_empty() {
            return names;
        }
        let (tell, told) = channel();
        let place = MountPlace { names: Arc::clone(&names), ..self.place() };
        let started = self.self_io.start("nacre-flush", Role::Flush, move || {
            let mount = Entered::new(&place.mountpoint, place.device)?;
            during("attributes of directories", ROOT, || mount.freshen(&place.names));
            // The waiter may have timed out.
            let _ = tell.send(());
            Ok(())
        });
        // Without fresh attributes, files are reached by handle.
        if started.is_ok() && told.recv_timeout(FRESHENING) == Err(RecvTimeoutError::Timeout) {
            tracing::debug!("directories do not tell their attributes");
        }
        names
    }

    /// Writes back all dirty pages of a mount that is in no mount tree of ours any more, so that its files cannot be
    /// opened: by invalidations, as the kernel writes pages back before it drops them. A daemon that is killed
    /// meanwhile would hang, unless another process takes over, so this is for these mounts only.
    pub fn flush_unseen(&self) {
        let Some(notifier) = self.notifier() else { return };
        for nodeid in self.nodes() {
            if let Err(error) = self.flush_by_invalidation(&notifier, nodeid) {
                tracing::warn!(%error, "what was written to a file may not have been passed on by the kernel");
            }
        }
    }

    /// Writes one file back, even while its inode's lock is held.
    pub fn flush_file(&self, nodeid: u64) -> Result<()> {
        // A file that was removed from the table has no dirty pages.
        self.key(nodeid).map_or(Ok(()), |inode| self.flush_key(inode))
    }

    /// Returns the kernel's length of a file that may have cached writes, without the inode's lock; none where it has
    /// no cached writes.
    pub fn kernel_length(&self, nodeid: u64) -> Result<Option<u64>> {
        let Some(inode) = self.key(nodeid) else { return Ok(None) };
        let (tell, told) = channel();
        let place = self.place();
        self.self_io.start("nacre-flush", Role::Flush, move || {
            // The process may be ending.
            let _ = tell.send(kernel_length(&place, inode));
            Ok(())
        })?;
        match told.recv().unwrap_or(Err(SysErrno::IO)) {
            Ok(length) => Ok(Some(length)),
            // The mount is in no mount tree any more. The kernel sends no further LSEEK after ENOSYS, and uses its
            // own length.
            Err(SysErrno::STALE) => Err(Errno::ENOSYS),
            Err(error) => Err(Errno::from_raw(error.raw_os_error())),
        }
    }

    fn flush_key(&self, inode: InodeKey) -> Result<()> {
        let (tell, told) = channel();
        let place = self.place();
        self.self_io.start("nacre-flush", Role::Flush, move || {
            // The receiver may be gone.
            let _ = tell.send(flush_unlocked(&place, inode));
            Ok(())
        })?;
        // Without a result the thread has failed, which it has logged itself.
        outcome(told.recv().unwrap_or(Err(SysErrno::IO)))
    }
}

/// Answers a request of a flushing thread if it is about its own file handles; false where it is like any other.
///
/// # Errors
/// FLUSHED for SETATTR of the access time; errors of the reply.
pub(crate) fn answer(request: &Request<'_>, reply: &mut Reply<'_>) -> std::result::Result<bool, fusewire::Errno> {
    match request.op {
        Op::Open { .. } => {
            // Direct I/O, so that the open takes part in no mode and drops no pages.
            let open_flags = fopen::DIRECT_IO | fopen::KEEP_CACHE | fopen::NOFLUSH;
            reply.open(&abi::OpenOut { fh: OWN_HANDLE, open_flags, backing_id: 0 })?;
            Ok(true)
        }
        // The kernel has written everything back before it sends this; a SETATTR without the access time carries the
        // times of changes.
        Op::Setattr(change) if change.valid & fattr::ATIME != 0 => Err(FLUSHED.into()),
        Op::Fsync { fh: OWN_HANDLE, .. } | Op::Flush { fh: OWN_HANDLE, .. } => Ok(true),
        _ => Ok(false),
    }
}

/// Result of writing one file back.
pub(super) type Passed = std::result::Result<(), SysErrno>;

pub(super) fn outcome(passed: Passed) -> Result<()> {
    passed.map_err(|error| Errno::from_raw(error.raw_os_error()))
}

/// Writes one file of an entered mount back.
pub(super) fn flush_within(mount: &Entered, place: &MountPlace, inode: InodeKey) -> Result<(), SysErrno> {
    let flushed = during("flush", inode.nodeid, || flush_unseen(&mount.reach(place, inode)?));
    passed(inode.nodeid, flushed)
}

/// Writes one file back without its inode's lock, which the caller of lseek(2) or a writer holds.
fn flush_unlocked(place: &MountPlace, inode: InodeKey) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let flushed = during("flush without the lock", inode.nodeid, || {
        nacre_sys::writeback::write_and_wait(mount.by_handle(inode, OFlags::RDONLY)?.as_fd()).map_err(number)
    });
    passed(inode.nodeid, flushed)
}

/// Returns the kernel's own length of a file, without a request and without a lock.
fn kernel_length(place: &MountPlace, inode: InodeKey) -> Result<u64, SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    during("length", inode.nodeid, || {
        Ok(rustix::fs::statx(mount.by_handle(inode, OFlags::PATH)?, c"", flags, StatxFlags::SIZE)?.stx_size)
    })
}

/// Maps the result of writing a file back.
fn passed(nodeid: u64, passed: Result<(), SysErrno>) -> Result<(), SysErrno> {
    match passed {
        // Closed meanwhile, which writes everything back; or the dirty data could not be written, or not to a protected file, which
        // its writer gets as an error as well: it is no longer dirty. Nothing is dirty where nothing can be written.
        Ok(()) | Err(SysErrno::STALE | SysErrno::NOSPC | SysErrno::DQUOT | SysErrno::ROFS | SysErrno::PERM) => Ok(()),
        Err(error) => {
            tracing::debug!(%error, nodeid, "a file could not be passed on");
            Err(error)
        }
    }
}

/// Writes all dirty pages of a file back and waits for it. Before the kernel requests a change of a file's times, it
/// writes the cached data back (`fuse_do_setattr`), as that would change them later. The front end refuses the
/// request ([`FLUSHED`]): so no file is opened and none is changed, and watchers of the mount see no event. Without
/// the refusal, only the access time would change.
fn flush_unseen(file: &OwnedFd) -> Result<(), SysErrno> {
    let stamps = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    match rustix::fs::utimensat(file, c"", &stamps, AtFlags::EMPTY_PATH) {
        Err(FLUSHED) => Ok(()),
        other => other,
    }
}

/// The error by which the front end refuses the change of times that writes a file back.
const FLUSHED: SysErrno = SysErrno::CANCELED;
