//! Passthrough: registers backing files, so that the kernel does the I/O on open files itself, and keeps every inode
//! in one mode. Only this file knows backing ids.
//!
//! Called by `ops/opens.rs` at open, create and release, and for the invalidation thread. Rules of the kernel (6.9
//! and later):
//! * while an inode is open in passthrough, every further open must be passthrough with the same backing id;
//! * while it is open in cached mode, it cannot be opened in passthrough: breaking either rule makes the user's open
//!   fail (EIO). The kernel leaves a mode before it sends RELEASE, so the state here never leaves it too early;
//! * the ioctl that registers a backing file is the only proof that it is permitted: the INIT flag is granted without
//!   privilege, too.
//!
//! After the last close of a file opened for reading, the backing id and the layer's open file may be kept for the
//! next open. Kept files are bounded in number (they are descriptors), and are closed with the last name, with any
//! change from outside, and when the kernel forgets the inode: a kept file occupies its storage.

pub(crate) mod inode_io;

use crate::{
    inodes::{InodeRecord, Inodes},
    open_files::OpenState,
};
use inode_io::Mode;
use nacre_vfs::{Errno, OpenFlags, Opened};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    os::fd::BorrowedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Maximum time for which an open waits for [`Passthrough::start`], which takes microseconds.
const START: Duration = Duration::from_secs(2);

/// The two ioctls; a trait so that tests can do without a kernel.
pub(crate) trait BackingFiles: Send + Sync {
    /// Registers a file.
    fn open(&self, file: BorrowedFd<'_>) -> std::io::Result<i32>;
    /// Unregisters it.
    fn close(&self, id: i32) -> std::io::Result<()>;
}

impl BackingFiles for fusewire::Backing {
    fn open(&self, file: BorrowedFd<'_>) -> std::io::Result<i32> {
        fusewire::Backing::open(self, file)
    }

    fn close(&self, id: i32) -> std::io::Result<()> {
        fusewire::Backing::close(self, id)
    }
}

/// How an open file is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoMode {
    /// By the kernel from the file with this backing id.
    Passthrough(i32),
    /// By the daemon.
    Daemon,
}

/// Cleanup to be done outside of the inode's lock.
#[must_use = "the id must be closed outside of the inode's lock"]
#[derive(Default)]
pub(crate) struct Leftover {
    close: Option<i32>,
    _file: Option<Opened>,
    kept: Option<u64>,
}

/// Registers, shares and keeps backing files for one mount.
pub(crate) struct Passthrough {
    backing: OnceLock<Box<dyn BackingFiles>>,
    /// Why passthrough is off, where it is.
    refusal: OnceLock<String>,
    off: AtomicBool,
    /// [`Passthrough::start`] has ended, or is no longer waited for.
    settled: Mutex<bool>,
    settles: Condvar,
    kept: Mutex<VecDeque<(u64, u64)>>,
    kept_count: AtomicUsize,
    kept_limit: usize,
    stamps: AtomicU64,
    opens: AtomicU64,
    reuses: AtomicU64,
    failures: AtomicU64,
}

impl Passthrough {
    /// Off until [`Passthrough::start`]. At most `kept_limit` files are kept open after their last close.
    pub fn new(kept_limit: usize) -> Passthrough {
        Passthrough {
            backing: OnceLock::new(),
            refusal: OnceLock::new(),
            off: AtomicBool::new(true),
            settled: Mutex::new(false),
            settles: Condvar::new(),
            kept: Mutex::default(),
            kept_count: AtomicUsize::new(0),
            kept_limit,
            stamps: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            reuses: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// Turns passthrough off for this mount, with the reason.
    pub fn refuse(&self, why: impl Into<String>) {
        // The first reason stays.
        let _ = self.refusal.set(why.into());
        self.off.store(true, Ordering::Release);
    }

    /// Tries the ioctl once, on the daemon's own executable, and turns passthrough on if it is permitted. Returns the
    /// id that the kernel gave the tried file, if any: files registered later have greater ids.
    pub fn start(&self, backing: Box<dyn BackingFiles>) -> Option<i32> {
        let tried = if self.refusal.get().is_none() { self.try_start(backing) } else { None };
        self.settle();
        tried
    }

    fn try_start(&self, backing: Box<dyn BackingFiles>) -> Option<i32> {
        match probe(&*backing) {
            Ok(id) => {
                if self.backing.set(backing).is_ok() {
                    self.off.store(false, Ordering::Release);
                }
                return id;
            }
            Err(error) if error.raw_os_error() == Some(Errno::EPERM.raw()) => {
                self.refuse("not permitted: CAP_SYS_ADMIN in the initial user namespace is needed");
            }
            Err(error) => self.refuse(format!("the kernel refuses backing files: {error}")),
        }
        None
    }

    fn settle(&self) {
        *self.settled.lock() = true;
        self.settles.notify_all();
    }

    /// Waits until it is known whether passthrough works. The kernel sends requests before that; a file opened by one
    /// of them would be served by the daemon, with pages of its own, for all users until its last close.
    pub fn wait_for_start(&self) {
        if !self.off.load(Ordering::Acquire) || self.refusal.get().is_some() {
            return;
        }
        let mut settled = self.settled.lock();
        if !*settled && self.settles.wait_while_for(&mut settled, |settled| !*settled, START).timed_out() {
            *settled = true;
        }
    }

    /// `None` where passthrough is on, else why it is off.
    pub fn refusal(&self) -> Option<&str> {
        if self.off.load(Ordering::Acquire) {
            Some(self.refusal.get().map_or("not started", String::as_str))
        } else {
            None
        }
    }

    /// Returns (opens in passthrough, opens served by a kept file, opens served by the daemon after a failure, files
    /// kept).
    pub fn figures(&self) -> (u64, u64, u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&self.opens), get(&self.reuses), get(&self.failures), self.kept_count.load(Ordering::Relaxed) as u64)
    }

    /// Returns the kept file of an inode, if it fits an open with these flags by this user. Changes nothing yet.
    pub fn reusable(&self, record: &mut InodeRecord<'_>, flags: OpenFlags, uid: Option<u32>) -> Option<Opened> {
        match &record.open_state_if_any()?.io.0 {
            Mode::Kept { file, flags: kept, uid: owner, .. }
                if *kept == flags && uid.is_none_or(|uid| uid == *owner) =>
            {
                self.reuses.fetch_add(1, Ordering::Relaxed);
                Some(Arc::clone(file))
            }
            _ => None,
        }
    }

    /// Decides how a file just opened is served, and counts it; `file` is the backing file, if the kernel may use
    /// one. Under the inode's lock.
    pub fn begin(&self, state: &mut OpenState, file: Option<BorrowedFd<'_>>) -> (IoMode, Leftover) {
        let mut left = Leftover::default();
        let (mode, chosen) = match std::mem::take(&mut state.io.0) {
            Mode::Cached { opens } => (Mode::Cached { opens: opens.saturating_add(1) }, IoMode::Daemon),
            Mode::Passthrough { id, opens } => {
                (Mode::Passthrough { id, opens: opens.saturating_add(1) }, IoMode::Passthrough(id))
            }
            Mode::Kept { id, file: kept, .. } => {
                self.kept_count.fetch_sub(1, Ordering::Relaxed);
                left._file = Some(kept);
                if file.is_some() {
                    (Mode::Passthrough { id, opens: 1 }, IoMode::Passthrough(id))
                } else {
                    left.close = Some(id);
                    (Mode::Cached { opens: 1 }, IoMode::Daemon)
                }
            }
            Mode::Idle => match self.register(file) {
                Some(id) => (Mode::Passthrough { id, opens: 1 }, IoMode::Passthrough(id)),
                None => (Mode::Cached { opens: 1 }, IoMode::Daemon),
            },
        };
        state.io.0 = mode;
        if matches!(chosen, IoMode::Passthrough(_)) {
            self.opens.fetch_add(1, Ordering::Relaxed);
        }
        (chosen, left)
    }

    /// Counts a file opened in a previous process, which the kernel still serves in that mode. Under the inode's
    /// lock.
    pub fn resume(&self, state: &mut OpenState, backing: Option<i32>) {
        state.io.0 = match (std::mem::take(&mut state.io.0), backing) {
            (Mode::Cached { opens }, _) => Mode::Cached { opens: opens.saturating_add(1) },
            (Mode::Passthrough { id, opens }, _) => Mode::Passthrough { id, opens: opens.saturating_add(1) },
            (Mode::Idle | Mode::Kept { .. }, Some(id)) => Mode::Passthrough { id, opens: 1 },
            (Mode::Idle | Mode::Kept { .. }, None) => Mode::Cached { opens: 1 },
        };
    }

    /// Closes the backing ids from `first` to `end` (exclusive) except those for which `stays` is true: a process
    /// that died had registered them, and no file uses them. Ids are assigned in ascending order.
    pub fn close_left(&self, first: i32, end: i32, stays: impl Fn(i32) -> bool) {
        let Some(backing) = self.backing.get() else { return };
        for id in (first..end).filter(|id| !stays(*id)) {
            // Most are closed already.
            let _ = backing.close(id);
        }
    }

    /// Ends an open file. With `keep`, the last one is kept for the next open: (file, flags, user). Under the inode's
    /// lock.
    pub fn end(&self, state: &mut OpenState, keep: Option<(Opened, OpenFlags, u32)>) -> Leftover {
        let mut left = Leftover::default();
        state.io.0 = match std::mem::take(&mut state.io.0) {
            Mode::Cached { opens } if opens > 1 => Mode::Cached { opens: opens - 1 },
            Mode::Passthrough { id, opens } if opens > 1 => Mode::Passthrough { id, opens: opens - 1 },
            Mode::Passthrough { id, .. } => match keep {
                Some((file, flags, uid)) if self.kept_limit > 0 => {
                    let stamp = self.stamps.fetch_add(1, Ordering::Relaxed);
                    self.kept_count.fetch_add(1, Ordering::Relaxed);
                    left.kept = Some(stamp);
                    Mode::Kept { id, file, flags, uid, stamp }
                }
                _ => {
                    left.close = Some(id);
                    Mode::Idle
                }
            },
            Mode::Cached { .. } | Mode::Idle => Mode::Idle,
            kept @ Mode::Kept { .. } => kept,
        };
        left
    }

    /// Removes the kept file of an inode. Under the inode's lock.
    pub fn release_kept(&self, state: &mut OpenState) -> Leftover {
        let mut left = Leftover::default();
        match std::mem::take(&mut state.io.0) {
            Mode::Kept { id, file, .. } => {
                self.kept_count.fetch_sub(1, Ordering::Relaxed);
                left.close = Some(id);
                left._file = Some(file);
            }
            other => state.io.0 = other,
        }
        left
    }

    /// Closes all of an inode that the kernel forgot: nothing of it stays registered.
    pub fn abandon(&self, mut state: Box<OpenState>) {
        let left = self.release_kept(&mut state);
        if let Mode::Passthrough { id, .. } = state.io.0 {
            self.close(id);
        }
        self.finish_close(left);
    }

    /// Finishes [`Passthrough::begin`], [`Passthrough::end`] or [`Passthrough::release_kept`] outside of the lock of
    /// `nodeid`.
    pub fn finish(&self, left: Leftover, nodeid: u64, inodes: &Inodes) {
        if let Some(stamp) = left.kept {
            self.queue(nodeid, stamp, inodes);
        }
        self.finish_close(left);
    }

    /// Closes the kept file of `nodeid`.
    pub fn drop_kept(&self, nodeid: u64, inodes: &Inodes) {
        let left = inodes.with(nodeid, |record| {
            let left = record.open_state_if_any().map(|state| self.release_kept(state));
            record.tidy();
            left
        });
        if let Some(left) = left.flatten() {
            self.finish_close(left);
        }
    }

    /// Closes all kept files.
    pub fn drop_all_kept(&self, inodes: &Inodes) {
        if self.kept_count.load(Ordering::Relaxed) > 0 {
            let queue = std::mem::take(&mut *self.kept.lock());
            queue.into_iter().for_each(|(nodeid, stamp)| self.drop_if_stamped(nodeid, stamp, inodes));
        }
    }

    fn finish_close(&self, left: Leftover) {
        if let Some(id) = left.close {
            self.close(id);
        }
    }

    /// Puts a kept file at the new end of the queue and closes the oldest ones above the limit.
    fn queue(&self, nodeid: u64, stamp: u64, inodes: &Inodes) {
        let mut queue = self.kept.lock();
        queue.push_back((nodeid, stamp));
        // Entries of files that were opened again meanwhile stay in the queue until they are the oldest.
        while self.kept_count.load(Ordering::Relaxed) > self.kept_limit || queue.len() > 4 * self.kept_limit {
            let Some((old, stamp)) = queue.pop_front() else { return };
            drop(queue);
            self.drop_if_stamped(old, stamp, inodes);
            queue = self.kept.lock();
        }
    }

    fn drop_if_stamped(&self, nodeid: u64, wanted: u64, inodes: &Inodes) {
        let left = inodes.with(nodeid, |record| {
            let state = record.open_state_if_any()?;
            let same = matches!(state.io.0, Mode::Kept { stamp, .. } if stamp == wanted);
            let left = same.then(|| self.release_kept(state));
            record.tidy();
            left
        });
        if let Some(left) = left.flatten() {
            self.finish_close(left);
        }
    }

    fn register(&self, file: Option<BorrowedFd<'_>>) -> Option<i32> {
        if self.off.load(Ordering::Acquire) {
            return None;
        }
        let backing = self.backing.get()?;
        match backing.open(file?) {
            Ok(id) => Some(id),
            Err(error) => {
                // Not a regular file, a stacked file system below, no memory: the daemon serves
                // this inode instead.
                self.failures.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%error, "a file could not be handed to the kernel");
                None
            }
        }
    }

    fn close(&self, id: i32) {
        if let Some(backing) = self.backing.get()
            && let Err(error) = backing.close(id)
        {
            tracing::debug!(%error, id, "a backing file could not be closed");
        }
    }
}

/// A digest of the attributes of a backing file that change with its content, and whether it has set-id bits. `None`
/// where fstat(2) fails.
pub(crate) fn signature(file: BorrowedFd<'_>) -> Option<(u64, bool)> {
    use std::hash::{Hash, Hasher};
    let stat = rustix::fs::fstat(file).ok()?;
    let mut hasher = std::hash::DefaultHasher::new();
    (stat.st_size, stat.st_blocks, stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec)
        .hash(&mut hasher);
    Some((hasher.finish(), stat.st_mode & 0o6000 != 0))
}

fn probe(backing: &dyn BackingFiles) -> std::io::Result<Option<i32>> {
    use std::os::fd::AsFd;
    let file = std::fs::File::open("/proc/self/exe")?;
    match backing.open(file.as_fd()) {
        Ok(id) => backing.close(id).map(|()| Some(id)),
        // The program lies on a stacked file system; the kernel checks the permission before that.
        Err(error) if error.raw_os_error() == Some(Errno::ELOOP.raw()) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "passthrough_tests.rs"]
mod tests;
