//! The door as a user of its own mount: what the kernel can only be told by doing it there.
//!
//! A thread that waits for an answer of its own mount cannot be killed while it waits. If it held
//! the fuse device open, a daemon that is killed would never let go of it, and every user of the
//! mount would hang; so each such act is done by a thread that holds none of the daemon's
//! descriptors ([`SelfIo::start`]), and who wants it done waits for a message, which ends with the
//! process. The door knows these threads by their ids, and answers what they pretend without
//! touching the layer (`Door::answer_own`).
//!
//! Here are the threads; what they do is below: files' sizes and times (`attr_refresh.rs`, by
//! `attr_setter.rs`, from `times.rs`), passing on what the kernel holds back (`flush.rs`,
//! `flush_timer.rs`), dropping pages (`page_dropper.rs`), events for watchers (`inotify_replay.rs`),
//! files that became others (`replacing.rs`, `gate.rs`); `own_mount.rs` finds the mount and its files.
//! Invariant: an act that needs an inode's lock never waits behind another's: each has a thread of
//! its own, but for the times, which have one in all.

pub(crate) mod attr_refresh;
mod attr_setter;
pub(crate) mod flush;
mod flush_timer;
pub(crate) mod gate;
pub(crate) mod inotify_replay;
pub(crate) mod own_mount;
mod page_dropper;
pub(crate) mod replacing;
pub(crate) mod times;

use attr_refresh::AttrRefresh;
use flush_timer::FlushTimer;
use inotify_replay::InotifyReplay;
use own_mount::number;
use page_dropper::PageDropper;
use parking_lot::Mutex;
use rustix::io::Errno as SysErrno;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It sets sizes and times that the files have already: SETATTR is answered with them.
    Times,
    /// It has files passed on: SETATTR of the access time is refused, OPEN and FSYNC are answered.
    Flush,
    /// It looks up files that have been replaced: it is told of those in their place.
    Replaced,
    /// It walks to a directory, so that the kernel knows it by its name: it is told what anybody is.
    Walker,
    /// It repeats changes for watchers: what it pretends is answered as done.
    Replay,
}

/// The threads that are at it, by their ids, and the ways to them.
#[derive(Default)]
pub(crate) struct SelfIo {
    threads: Mutex<Vec<(u32, Role)>>,
    /// What tells the kernel of sizes and times.
    pub attr_refresh: AttrRefresh,
    /// What raises events inside the mount.
    pub inotify_replay: InotifyReplay,
    /// What drops pages.
    pub page_dropper: PageDropper,
    /// What has everything passed on now and then.
    pub flush_timer: FlushTimer,
    /// Bit `tid % 64` of each: most questions of [`SelfIo::role`] end here.
    mask: AtomicU64,
}

impl SelfIo {
    /// What the thread with this id is for, if it is one of these.
    pub fn role(&self, tid: u32) -> Option<Role> {
        if self.mask.load(Ordering::Acquire) & bit(tid) == 0 {
            return None;
        }
        self.threads.lock().iter().find(|(known, _)| *known == tid).map(|(_, role)| *role)
    }

    /// Starts a thread without descriptors.
    ///
    /// # Errors
    /// Where there can be none.
    pub fn start<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        role: Role,
        body: impl FnOnce() -> Result<T, SysErrno> + Send + 'static,
    ) -> io::Result<JoinHandle<Result<T, SysErrno>>> {
        let self_io = Arc::clone(self);
        std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(move || {
            nacre_sys::descriptors::leave_all_to_others().map_err(number)?;
            let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            let _known = KnownThread::new(&self_io, tid, role);
            body()
        })
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(u32, Role)>)) {
        let mut threads = self.threads.lock();
        change(&mut threads);
        let mask = threads.iter().fold(0, |mask, (tid, _)| mask | bit(*tid));
        self.mask.store(mask, Ordering::Release);
    }
}

fn bit(tid: u32) -> u64 {
    1 << (tid % 64)
}

/// A thread is in the list for as long as this lives: its id may be another's afterwards.
struct KnownThread<'a>(&'a SelfIo, u32);

impl KnownThread<'_> {
    fn new(self_io: &SelfIo, tid: u32, role: Role) -> KnownThread<'_> {
        self_io.change(|threads| threads.push((tid, role)));
        KnownThread(self_io, tid)
    }
}

impl Drop for KnownThread<'_> {
    fn drop(&mut self) {
        self.0.change(|threads| threads.retain(|(known, _)| *known != self.1));
    }
}
