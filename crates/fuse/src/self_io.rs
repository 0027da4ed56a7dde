//! The FUSE front end as a user of its own mount: updates of the kernel's state for which there is no notification.
//!
//! A thread that waits for a reply of its own mount cannot be killed while it waits. If it held the fuse device open,
//! a killed daemon would never release the device, and every user of the mount would hang. So each of these
//! operations is done by a thread that holds none of the daemon's descriptors ([`SelfIo::start`]); its requester
//! waits for a message, which ends with the process. The front end knows these threads by their ids, and answers
//! their requests without changing the layer (`Door::answer_own`). So does the front end of the next process after
//! this one was killed: the threads waiting at that time are recorded (`survival/numbers.rs`), and the kernel sends
//! their requests again.
//!
//! This file has the threads; their work is below: files' sizes and times (`attr_refresh.rs`, by `attr_setter.rs`,
//! from `times.rs`), writing dirty pages back (`flush.rs`, `flush_threads.rs`, `flush_timer.rs`), dropping pages (`page_dropper.rs`),
//! events for watchers (`inotify_replay.rs`), replaced files after a rollback (`replacing.rs`, `gate.rs`);
//! `own_mount.rs` finds the mount and its files; `waits.rs` reports requests that stay unanswered. Invariant: an
//! operation that needs an inode's lock never waits behind another one: each has a thread of its own, except for the
//! times, which share one.

pub(crate) mod attr_refresh;
mod attr_setter;
pub(crate) mod flush;
pub(crate) mod flush_threads;
mod flush_timer;
pub(crate) mod gate;
pub(crate) mod inotify_replay;
mod mapped_flush;
pub(crate) mod own_mount;
mod page_dropper;
pub(crate) mod replacing;
pub(crate) mod times;
pub(crate) mod waits;

use crate::survival::{Survival, numbers::Words};
use attr_refresh::AttrRefresh;
use flush_timer::FlushTimer;
use inotify_replay::InotifyReplay;
use own_mount::number;
use page_dropper::PageDropper;
use parking_lot::Mutex;
use rustix::io::Errno as SysErrno;
use std::{
    io,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};
use waits::Waits;

/// The task of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Sets sizes and times that the files already have: SETATTR is answered with these.
    Times,
    /// Writes dirty pages back: SETATTR of the access time is refused, OPEN and FSYNC are answered.
    Flush,
    /// Looks up files that have been replaced: gets the entries that make the old inodes bad.
    Replaced,
    /// Walks to a directory, so that the kernel knows it by its name: is answered like any caller.
    Walker,
    /// Repeats changes for watchers: its changes are answered as done.
    Replay,
}

/// The running threads, by their ids, and the channels to them.
#[derive(Default)]
pub(crate) struct SelfIo {
    threads: Mutex<Vec<(u32, Role)>>,
    /// Updates the kernel's sizes and times.
    pub attr_refresh: AttrRefresh,
    /// Raises events inside the mount.
    pub inotify_replay: InotifyReplay,
    /// Drops pages.
    pub page_dropper: PageDropper,
    /// Writes all dirty pages back periodically.
    pub flush_timer: FlushTimer,
    /// Their requests in flight.
    pub waits: Arc<Waits>,
    /// Bit `tid % 64` of each thread: most calls of [`SelfIo::role`] end here.
    mask: AtomicU64,
    /// Handoff state, where the mount survives its process.
    noted: OnceLock<Noted>,
}

/// The handoff state of these threads.
struct Noted {
    words: Words,
    /// Threads of previous processes that were still waiting when this one began.
    left: Vec<Actor>,
}

/// A thread, its process, and its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Actor {
    tid: u32,
    process: u32,
    role: Role,
}

/// Bits of a thread id and of a process id (`PID_MAX_LIMIT` has 22).
const ID: u32 = 28;

impl Actor {
    fn word(self) -> u64 {
        let role = ROLES.iter().position(|role| *role == self.role).unwrap_or(0) as u64;
        role << (2 * ID) | u64::from(self.process) << ID | u64::from(self.tid)
    }

    fn read(word: u64) -> Option<Actor> {
        let id = |word: u64| (word & ((1 << ID) - 1)) as u32;
        let role = *ROLES.get(usize::try_from(word >> (2 * ID)).ok()?)?;
        Some(Actor { tid: id(word), process: id(word >> ID), role })
    }

    /// Whether the thread still exists: no other thread of its process can have its number.
    fn is_left(self) -> bool {
        Path::new(&format!("/proc/{}/task/{}", self.process, self.tid)).exists()
    }
}

/// The roles by the numbers with which they are recorded.
const ROLES: [Role; 5] = [Role::Times, Role::Flush, Role::Replaced, Role::Walker, Role::Replay];

impl SelfIo {
    /// Returns the task of the thread with this id, if it is one of these.
    pub fn role(&self, tid: u32) -> Option<Role> {
        if self.mask.load(Ordering::Acquire) & bit(tid) == 0 {
            return None;
        }
        let own = self.threads.lock().iter().find(|(known, _)| *known == tid).map(|(_, role)| *role);
        own.or_else(|| {
            let left = self.left().iter().find(|actor| actor.tid == tid)?;
            left.is_left().then_some(left.role)
        })
    }

    /// Records threads from now on, and reads those of previous processes.
    pub fn note_in(&self, memory: &Survival) {
        let words = Words::actors(memory);
        let mut left = Vec::new();
        for (place, word) in words.all() {
            match Actor::read(word).filter(|actor| actor.is_left()) {
                Some(actor) => left.push(actor),
                None => words.remove(place),
            }
        }
        // Set once, before any thread is started.
        let _ = self.noted.set(Noted { words, left });
        self.change(|_| {});
    }

    fn left(&self) -> &[Actor] {
        self.noted.get().map_or(&[], |noted| &noted.left)
    }

    /// Starts a thread without descriptors.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        role: Role,
        body: impl FnOnce() -> Result<T, SysErrno> + Send + 'static,
    ) -> io::Result<JoinHandle<Result<T, SysErrno>>> {
        self.waits.watch()?;
        let self_io = Arc::clone(self);
        // It may be waiting for the mount when the process is killed, and then must not be waited for.
        let name = if self.noted.get().is_some() { fusewire::APART } else { name };
        std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(move || {
            nacre_sys::descriptors::leave_all_to_others().map_err(number)?;
            let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            let _known = KnownThread::new(&self_io, tid, role);
            self_io.waits.enter();
            body()
        })
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(u32, Role)>)) {
        let mut threads = self.threads.lock();
        change(&mut threads);
        let left = self.left().iter().map(|actor| actor.tid);
        let mask = threads.iter().map(|(tid, _)| *tid).chain(left).fold(0, |mask, tid| mask | bit(tid));
        self.mask.store(mask, Ordering::Release);
    }
}

impl Drop for SelfIo {
    fn drop(&mut self) {
        self.waits.end();
    }
}

fn bit(tid: u32) -> u64 {
    1 << (tid % 64)
}

/// Keeps a thread in the list while this lives: afterwards its id may be reused.
struct KnownThread<'a> {
    self_io: &'a SelfIo,
    tid: u32,
    /// Index of its record.
    place: Option<usize>,
}

impl KnownThread<'_> {
    fn new(self_io: &SelfIo, tid: u32, role: Role) -> KnownThread<'_> {
        let actor = Actor { tid, process: std::process::id(), role };
        let place = self_io.noted.get().and_then(|noted| noted.words.add(actor.word()));
        self_io.change(|threads| threads.push((tid, role)));
        KnownThread { self_io, tid, place }
    }
}

impl Drop for KnownThread<'_> {
    fn drop(&mut self) {
        self.self_io.change(|threads| threads.retain(|(known, _)| *known != self.tid));
        if let Some((noted, place)) = self.self_io.noted.get().zip(self.place) {
            noted.words.remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_wait_are_known_to_the_next_process() {
        let mut memory = Survival::small().unwrap();
        let own = Arc::new(SelfIo::default());
        own.note_in(&memory);
        let ((there, waiting), (go, told)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let thread = own.start("named-otherwise", Role::Times, move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            there.send((tid, rustix::thread::name().unwrap())).unwrap();
            let _ = told.recv();
            Ok(())
        });
        let (tid, name) = waiting.recv().unwrap();
        assert_eq!((own.role(tid), name.to_str()), (Some(Role::Times), Ok(fusewire::APART)));
        memory.next_life();
        let next = || {
            let next = SelfIo::default();
            next.note_in(&memory);
            next
        };
        let second = next();
        assert_eq!([second.role(tid), second.role(tid + 64)], [Some(Role::Times), None]);
        // One that has died is not taken for another thread with its number.
        Words::actors(&memory).add(Actor { tid: 77, process: u32::MAX >> 4, role: Role::Flush }.word());
        assert_eq!(next().role(77), None);
        drop(go);
        thread.unwrap().join().unwrap().unwrap();
        // It can be joined a moment before the kernel has it out of the list of threads.
        let begun = std::time::Instant::now();
        while Path::new(&format!("/proc/self/task/{tid}")).exists() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "the thread does not end");
            std::thread::yield_now();
        }
        assert_eq!((own.role(tid), second.role(tid), next().role(tid)), (None, None, None));
        assert!(Words::actors(&memory).all().is_empty());
        for role in ROLES {
            let actor = Actor { tid: (1 << 22) - 1, process: 1 << 22, role };
            assert_eq!(Actor::read(actor.word()), Some(actor));
        }
    }
}
