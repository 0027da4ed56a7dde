//! Making the kernel pass on what it holds back: of every collected file of our own mount, for the
//! layer and for who asks for it; without the inode's lock of one file whose lock is held, for
//! lseek(2).
//!
//! Files are reached by threads of their own (`self_io.rs`), by name where that is known, else by
//! handle (`own_mount.rs`). They are not opened, which watchers would be told of: the kernel passes everything on before it asks for other times of a
//! file, and the door refuses that question. It takes the inode's lock, as fsync(2) does, and so
//! waits for a write(2) that is under way as well. For lseek(2) alone the file is opened; the door
//! answers such OPENs itself. syncfs(2) would not do: most kernels do not wait for FUSE there (6.17 does;
//! docs/decisions/own-mount-locks.md).
//!
//! Invariant: before Linux 6.18 no file is opened for reading here, as close(2) would wait for the
//! inode's lock, which the served caller may hold (docs/decisions/own-mount-locks.md): lseek(2) gets the
//! kernel's length instead, and the flush of a file that stays locked ends with EBUSY.

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

/// The file handle of such opens; the table gives out smaller ones.
const OWN_HANDLE: u64 = u64::MAX;
/// Between the two passes: a writer that asked before the recall, and was let through, has its
/// inode's lock by then.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// How long the attributes of directories are waited for.
const FRESHENING: Duration = Duration::from_secs(1);

/// How often it is looked in vain before a file that stays locked is given up, where the kernel cannot
/// flush it under the lock: a second.
const LOOKS_AT_LOCKED: u32 = 200;

/// How long a file is waited for before it is looked whether it has to be waited for.
const LOOK: Duration = Duration::from_millis(5);

impl Writeback {
    #[expect(clippy::disallowed_methods, reason = "a writer in the kernel tells nobody when he has the lock")]
    pub fn flush_all(&self) -> Result<()> {
        let _one = self.flushing.lock();
        self.flush_each(&self.place())?;
        std::thread::sleep(PAUSE);
        self.flush_each(&self.place())
    }

    /// Makes the kernel pass on all that it holds back at this moment. What is written meanwhile
    /// may come later.
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

    /// The same for files that are open for writing, while `open` says that they are: what is
    /// stored to a mapping is held back as well where writes are not collected.
    pub fn flush_open(&self, open: &dyn Fn() -> BTreeSet<InodeKey>, names: Names) -> Result<()> {
        let names = self.freshened(names);
        let _one = self.flushing.lock();
        let place = MountPlace { names, ..self.place() };
        if self.is_unopened() {
            return self.flush_unopened(open().into_iter().collect(), &place);
        }
        self.flush_these(open(), &|inode| open().contains(&inode), &place)
    }

    /// Names by which files can be reached: their directories' attributes are asked for before
    /// anything is locked here, as the layer may wait with its answer for somebody who needs that.
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
            // Who asked may have gone on.
            let _ = tell.send(());
            Ok(())
        });
        // Without fresh attributes, files are reached by handle.
        if started.is_ok() && told.recv_timeout(FRESHENING) == Err(RecvTimeoutError::Timeout) {
            tracing::debug!("directories do not tell their attributes");
        }
        names
    }

    /// Files that the kernel opens without a request, one after the other by one thread.
    fn flush_unopened(&self, files: Vec<InodeKey>, place: &MountPlace) -> Result<()> {
        let (mut files, mut all) = (VecDeque::from(files), Ok(()));
        while !files.is_empty() {
            let told = self.flush_in_turn(files.iter().copied().collect(), place.clone())?;
            while let Some(inode) = files.pop_front() {
                match self.await_passed(inode.nodeid, &told) {
                    Some(Ok(Err(SysErrno::STALE))) => {
                        // Something else is seen at its place, or nothing.
                        self.flush_unseen();
                        return Ok(());
                    }
                    Some(passed) => all = all.and(outcome(passed)),
                    None => {
                        // The served caller has the lock, so nobody writes to the file; he may wait for
                        // the end of this. The thread ends when he releases it.
                        let flushed = if self.flush_for_seek { self.flush_key(inode) } else { Err(Errno::EBUSY) };
                        all = all.and(flushed);
                        break;
                    }
                }
            }
        }
        all
    }

    /// Waits for what becomes of one file; `None` where a request is served whose caller has the
    /// inode's lock, and, where nothing can be done about it, keeps it for [`LOOKS_AT_LOCKED`].
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

    /// A thread that has these files passed on, and tells of each, for as long as somebody listens.
    fn flush_in_turn(&self, files: Vec<InodeKey>, place: MountPlace) -> Result<Receiver<Passed>> {
        let (tell, told) = channel();
        self.self_io.start("nacre-flush", Role::Flush, move || {
            let mount = match Entered::new(&place.mountpoint, place.device) {
                Ok(mount) => mount,
                Err(error) => {
                    // Who asked may have found out that he need not wait.
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

    /// All of them, whatever becomes of one.
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
                // Closed meanwhile, which passes everything on. Who writes to it now may hold its
                // lock and wait for the end of this flushing: the thread ends when he goes on.
                Err(RecvTimeoutError::Timeout) if !open(inode) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
                told => return outcome(told),
            }
        }
    }

    /// The same for a mount that is in no tree of ours any more, so that its files cannot be
    /// opened: the kernel passes pages on before it drops them. A daemon that is killed meanwhile
    /// would hang, unless another process goes on, so this is for such mounts alone.
    pub fn flush_unseen(&self) {
        let Some(notifier) = self.notifier() else { return };
        for nodeid in self.nodes() {
            if let Err(error) = self.tell(|| notifier.inval_inode(nodeid, 0, 0)) {
                tracing::warn!(%error, "what was written to a file may not have been passed on by the kernel");
            }
        }
    }

    /// Makes the kernel pass on what it holds of one file, whoever holds the inode's lock.
    pub fn flush_file(&self, nodeid: u64) -> Result<()> {
        // Of what has left, nothing is held back.
        self.key(nodeid).map_or(Ok(()), |inode| self.flush_key(inode))
    }

    /// The kernel's length of a file of which it may hold writes, asked for without the inode's lock; none
    /// where it holds no writes.
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
            // The mount is in no tree any more. The kernel asks nothing more then, and answers lseek(2)
            // by its own length.
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
            // Who asked may have found out that he need not wait.
            let _ = tell.send(flush_file(&place, inode, locking));
            Ok(())
        })?;
        Ok(told)
    }
}

/// Answers a request of such a thread where it is about its own file handles; false where it is like
/// any other.
///
/// # Errors
/// What the reply says.
pub(crate) fn answer(request: &Request<'_>, reply: &mut Reply<'_>) -> std::result::Result<bool, fusewire::Errno> {
    match request.op {
        Op::Open { .. } => {
            // Past the page cache, so that the open takes part in no mode and drops no pages.
            let open_flags = fopen::DIRECT_IO | fopen::KEEP_CACHE | fopen::NOFLUSH;
            reply.open(&abi::OpenOut { fh: OWN_HANDLE, open_flags, backing_id: 0 })?;
            Ok(true)
        }
        // Before the kernel asks, it has passed everything on; times that it passes on itself are
        // those of changes.
        Op::Setattr(change) if change.valid & fattr::ATIME != 0 => Err(FLUSHED.into()),
        Op::Fsync { fh: OWN_HANDLE, .. } | Op::Flush { fh: OWN_HANDLE, .. } => Ok(true),
        _ => Ok(false),
    }
}

type Passed = std::result::Result<(), SysErrno>;

/// Without an answer, the thread had failed, which has been reported by itself.
fn outcome(told: std::result::Result<Passed, RecvTimeoutError>) -> Result<()> {
    told.unwrap_or(Err(SysErrno::IO)).map_err(|error| Errno::from_raw(error.raw_os_error()))
}

/// Has the kernel pass on what it holds of a file of a mount that was entered.
pub(super) fn flush_within(mount: &Entered, place: &MountPlace, inode: InodeKey) -> Result<(), SysErrno> {
    let flushed = during("flush", inode.nodeid, || flush_unseen(&mount.reach(place, inode)?));
    passed(inode.nodeid, flushed)
}

/// Has the kernel pass on what it holds of a file, if `locking` as with fsync(2), after a write(2)
/// that is under way; else without the inode's lock.
fn flush_file(place: &MountPlace, inode: InodeKey, locking: bool) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    if locking {
        return flush_within(&mount, place, inode);
    }
    // Who asks by lseek(2) has the inode's lock.
    let flushed = during("flush for lseek", inode.nodeid, || {
        nacre_sys::writeback::write_and_wait(mount.by_handle(inode, OFlags::RDONLY)?.as_fd()).map_err(number)
    });
    passed(inode.nodeid, flushed)
}

/// The kernel's own length of a file, asked for without a request and without a lock.
fn kernel_length(place: &MountPlace, inode: InodeKey) -> Result<u64, SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    during("length", inode.nodeid, || {
        Ok(rustix::fs::statx(mount.by_handle(inode, OFlags::PATH)?, c"", flags, StatxFlags::SIZE)?.stx_size)
    })
}

/// What became of a file that was to be passed on.
fn passed(nodeid: u64, passed: Result<(), SysErrno>) -> Result<(), SysErrno> {
    match passed {
        // Closed meanwhile, which passes everything on; or what was held back could not be written,
        // which its writer is told as well: it is not held back any more. Nothing is held back
        // where nothing can be written.
        Ok(()) | Err(SysErrno::STALE | SysErrno::NOSPC | SysErrno::DQUOT | SysErrno::ROFS) => Ok(()),
        Err(error) => {
            tracing::debug!(%error, nodeid, "a file could not be passed on");
            Err(error)
        }
    }
}

/// Has all that is held back of a file written, and waits for it. Before it asks for other times of
/// a file, the kernel writes what it has collected of it (`fuse_do_setattr`), or it would be late
/// for them. The door refuses that change ([`FLUSHED`]): so no file is opened and none is
/// changed, and nobody who watches the mount hears of anything. Were the refusal lost, only the
/// access time would be another.
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

/// With this the door refuses the change of times by which a file is passed on.
const FLUSHED: SysErrno = SysErrno::CANCELED;
