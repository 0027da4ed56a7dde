//! Makes the kernel write dirty pages back: of all cached files of our own mount, for the layer and for callers of
//! `Mount::flush`; and of one file without its inode's lock, which is held, for lseek(2).
//!
//! Files are reached by threads of their own (`self_io.rs`), by name where that is known, else by handle
//! (`own_mount.rs`). They are not opened, which inotify watchers would see: the kernel writes everything back before
//! it requests a change of a file's times, and the front end refuses that request. The kernel takes the inode's lock
//! for it, as for fsync(2), and so also waits for a write(2) in progress. Only for lseek(2) the file is opened; the
//! front end answers these OPENs itself. syncfs(2) would not do: most kernels do not wait for FUSE there (6.17 does;
//! docs/decisions/own-mount-locks.md).
//!
//! Invariant: before Linux 6.18 no file is opened for reading here, as close(2) would wait for the inode's lock,
//! which the served caller may hold (docs/decisions/own-mount-locks.md): lseek(2) gets the kernel's length instead,
//! and the flush of a file that stays locked ends with EBUSY.

use super::{
    Role,
    own_mount::{Entered, InodeKey, MountPlace, Names, number},
    waits::during,
};
use crate::inodes::ROOT;
use crate::writeback::Writeback;
use fusewire::{
    Op, Reply, Request,
    abi::{self, fattr, fopen},
};
use nacre_vfs::{Errno, Result};
use rustix::fs::{AtFlags, OFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno as SysErrno;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// File handle of these opens; the table returns smaller ones.
const OWN_HANDLE: u64 = u64::MAX;
/// Pause between the two passes: a writer that reserved before the recall, and was admitted, has its inode's lock by
/// then.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Maximum time to wait for the attributes of directories.
const FRESHENING: Duration = Duration::from_secs(1);

/// Number of checks in vain after which a file that stays locked is given up, where the kernel cannot flush it under
/// the lock: a second.
const LOOKS_AT_LOCKED: u32 = 200;

/// How long a file is waited for between two checks whether it still has to be waited for.
const LOOK: Duration = Duration::from_millis(5);

impl Writeback {
    #[expect(clippy::disallowed_methods, reason = "a writer in the kernel tells nobody when he has the lock")]
    pub fn flush_all(&self) -> Result<()> {
        let _one = self.flushing.lock();
        self.flush_each(&self.place())?;
        std::thread::sleep(PAUSE);
        self.flush_each(&self.place())
    }

    /// Writes back all that is dirty at this moment. Later writes may remain dirty.
    pub fn flush_once(&self, names: Names) -> Result<()> {
        let names = self.freshened(names);
        let _one = self.flushing.lock();
        self.flush_each(&MountPlace { names, ..self.place() })
    }

    fn flush_each(&self, place: &MountPlace) -> Result<()> {
        if self.is_unopened() {
            return self.flush_unopened(self.keys(), place);
        }
        self.flush_these(self.keys(), &|inode| self.caches_writes(inode.nodeid), place)
    }

    /// Writes back the dirty pages of files that are open for writing, as long as `open` contains them: data stored
    /// to a mapping is dirty even where writes are not cached.
    pub fn flush_open(&self, open: &dyn Fn() -> BTreeSet<InodeKey>, names: Names) -> Result<()> {
        let names = self.freshened(names);
        let _one = self.flushing.lock();
        let place = MountPlace { names, ..self.place() };
        if self.is_unopened() {
            return self.flush_unopened(open().into_iter().collect(), &place);
        }
        self.flush_these(open(), &|inode| open().contains(&inode), &place)
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

    /// Writes back files that the kernel opens without a request, one after the other in one thread.
    fn flush_unopened(&self, files: Vec<InodeKey>, place: &MountPlace) -> Result<()> {
        let (mut files, mut all) = (VecDeque::from(files), Ok(()));
        while !files.is_empty() {
            let told = self.flush_in_turn(files.iter().copied().collect(), place.clone())?;
            while let Some(inode) = files.pop_front() {
                match self.await_passed(inode.nodeid, &told) {
                    Some(Ok(Err(SysErrno::STALE))) => {
                        // Another file system, or none, is at its mount point.
                        self.flush_unseen();
                        return Ok(());
                    }
                    Some(passed) => all = all.and(outcome(passed)),
                    None => {
                        // The served caller has the lock, so nobody writes to the file; it may wait for the end of
                        // this flush. The thread ends when the caller releases the lock.
                        let flushed = if self.flush_for_seek { self.flush_key(inode) } else { Err(Errno::EBUSY) };
                        all = all.and(flushed);
                        break;
                    }
                }
            }
        }
        all
    }

    /// Waits for the result of one file; `None` where a request is being served whose caller has the inode's lock
    /// and, where the kernel cannot flush under that lock, keeps it for [`LOOKS_AT_LOCKED`].
    fn await_passed(
        &self,
        nodeid: u64,
        told: &Receiver<Passed>,
    ) -> Option<std::result::Result<Passed, RecvTimeoutError>> {
        let patience = if self.flush_for_seek { 0 } else { LOOKS_AT_LOCKED };
        let mut locked = 0;
        loop {
            match told.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if !self.locked.has(nodeid) => locked = 0,
                Err(RecvTimeoutError::Timeout) if locked >= patience => return None,
                Err(RecvTimeoutError::Timeout) => locked += 1,
                passed => return Some(passed),
            }
        }
    }

    /// Starts a thread that writes these files back and sends each result, as long as the receiver lives.
    fn flush_in_turn(&self, files: Vec<InodeKey>, place: MountPlace) -> Result<Receiver<Passed>> {
        let (tell, told) = channel();
        self.self_io.start("nacre-flush", Role::Flush, move || {
            let mount = match Entered::new(&place.mountpoint, place.device) {
                Ok(mount) => mount,
                Err(error) => {
                    // The receiver may be gone.
                    let _ = tell.send(Err(error));
                    return Ok(());
                }
            };
            for inode in files {
                if tell.send(flush_within(&mount, &place, inode)).is_err() {
                    break;
                }
            }
            Ok(())
        })?;
        Ok(told)
    }

    /// Writes all of them back, even if one fails.
    fn flush_these(
        &self,
        files: impl IntoIterator<Item = InodeKey>,
        open: &dyn Fn(InodeKey) -> bool,
        place: &MountPlace,
    ) -> Result<()> {
        files.into_iter().map(|inode| self.flush_one(inode, open, place)).fold(Ok(()), Result::and)
    }

    fn flush_one(&self, inode: InodeKey, open: &dyn Fn(InodeKey) -> bool, place: &MountPlace) -> Result<()> {
        let told = self.flush_by_thread(inode, true, place.clone())?;
        loop {
            match told.recv_timeout(LOOK) {
                // Closed meanwhile, which writes everything back. A writer may hold the inode's lock and wait for the
                // end of this flush: the thread ends when the writer continues.
                Err(RecvTimeoutError::Timeout) if !open(inode) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
                told => return outcome(told),
            }
        }
    }

    /// Writes back all dirty pages of a mount that is in no mount tree of ours any more, so that its files cannot be
    /// opened: by invalidations, as the kernel writes pages back before it drops them. A daemon that is killed
    /// meanwhile would hang, unless another process takes over, so this is for these mounts only.
    pub fn flush_unseen(&self) {
        let Some(notifier) = self.notifier() else { return };
        for nodeid in self.nodes() {
            if let Err(error) = self.tell(|| notifier.inval_inode(nodeid, 0, 0)) {
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
        outcome(self.flush_by_thread(inode, false, self.place())?.recv().map_err(|_| RecvTimeoutError::Disconnected))
    }

    fn flush_by_thread(&self, inode: InodeKey, locking: bool, place: MountPlace) -> Result<Receiver<Passed>> {
        let (tell, told) = channel();
        self.self_io.start("nacre-flush", Role::Flush, move || {
            // The receiver may be gone.
            let _ = tell.send(flush_file(&place, inode, locking));
            Ok(())
        })?;
        Ok(told)
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

type Passed = std::result::Result<(), SysErrno>;

/// Without a result the thread has failed, which it has logged itself.
fn outcome(told: std::result::Result<Passed, RecvTimeoutError>) -> Result<()> {
    told.unwrap_or(Err(SysErrno::IO)).map_err(|error| Errno::from_raw(error.raw_os_error()))
}

/// Writes one file of an entered mount back.
pub(super) fn flush_within(mount: &Entered, place: &MountPlace, inode: InodeKey) -> Result<(), SysErrno> {
    let flushed = during("flush", inode.nodeid, || flush_unseen(&mount.reach(place, inode)?));
    passed(inode.nodeid, flushed)
}

/// Writes one file back: if `locking` like fsync(2), after a write(2) in progress; else without the inode's lock.
fn flush_file(place: &MountPlace, inode: InodeKey, locking: bool) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    if locking {
        return flush_within(&mount, place, inode);
    }
    // The caller of lseek(2) has the inode's lock.
    let flushed = during("flush for lseek", inode.nodeid, || {
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
