//! Keeps a caller on its CPU while it is answered from there.
//!
//! When a ring thread replies, the kernel selects a CPU for the caller. The caller's own CPU is busy with the ring
//! thread, so on an otherwise idle machine it takes another one, wakes that up, and the next request comes from
//! there: round trips of 50 us instead of 10. A CPU on which only SCHED_IDLE threads run counts as free
//! (`sched_idle_cpu()` in `select_idle_sibling()`, kernel/sched/fair.c, since Linux 5.4). So while a session is busy
//! and its threads get the CPU at once, they are SCHED_IDLE in the system call in which they reply and wait, and only
//! there: handlers, which take locks of the file system below, run as SCHED_BATCH, unless they are known to be brief
//! ([`crate::Handler::is_brief`]). It costs two changes of class for each request that is not brief, so it is done
//! only where callers are seen to move, and once a second it is tried without.
//!
//! A SCHED_IDLE thread gets almost no time while others want the CPU, and a brief handler may be interrupted with a
//! lock held. So one thread of ordinary priority watches: if one ring thread was runnable and did not run for
//! [`PATIENCE`] ticks, or all of them did not for one, or they wait long for the CPU, it ends SCHED_IDLE for all, at
//! first for a second and longer each time; such a lock is held no longer than that. Everything else (an idle mount,
//! a mount with few requests, a process that may not return from SCHED_IDLE, which takes CAP_SYS_NICE) stays
//! SCHED_BATCH.
//!
//! Invariants: while the watcher sleeps, all threads are SCHED_BATCH; the watcher sleeps without a timer while the
//! session is not busy.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::state::SessionState;
use super::threads::{is_runnable, may_yield};
use crate::sys::{self, Class};

/// Interval of the watcher's checks.
const TICK: Duration = Duration::from_millis(10);
/// Number of ticks for which one thread may starve while others run: a RELEASE may well wait until its caller has
/// done other work.
const PATIENCE: u32 = 3;
/// Number of ticks without a request after which the watcher sleeps.
const QUIET: u32 = 20;
/// Number of requests in a tick that make a session busy.
const BUSY: u64 = 32;
/// Number of ticks of SCHED_BATCH after the first trouble ...
const FIRST_PENALTY: u32 = 100;
/// ... and at most.
const LAST_PENALTY: u32 = 6_000;
/// Number of ticks without trouble after which the penalty is reset.
const FORGIVEN: u32 = 3_000;
/// Number of ticks of SCHED_IDLE after which it is tried without.
const STRETCH: u32 = 100;
/// Number of callers whose last CPU is remembered.
const CALLERS: usize = 64;
/// Maximum mean wait for the CPU.
const MEAN_WAIT_NS: u64 = 1_000_000;

/// State shared by the watcher and the ring threads.
#[derive(Debug)]
pub(super) struct Pace {
    /// A caller and the CPU of its last request, packed, by a hash of the caller.
    last_seen: [AtomicU64; CALLERS],
    moved: AtomicU64,
    yielding: AtomicBool,
    /// Number of times that the watcher reset threads to SCHED_BATCH.
    brought: AtomicU32,
    /// A thread could not change its class.
    refused: AtomicBool,
    asleep: AtomicBool,
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            last_seen: std::array::from_fn(|_| AtomicU64::new(0)),
            moved: AtomicU64::new(0),
            yielding: AtomicBool::new(false),
            brought: AtomicU32::new(0),
            refused: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            woken: Mutex::new(false),
            changed: Condvar::new(),
        }
    }
}

impl Pace {
    /// Wakes the watcher up: the session is busy. Cheap where the watcher is awake.
    pub(super) fn busy(&self) {
        if self.asleep.load(Relaxed) {
            self.wake();
        }
    }

    /// Notes a request of this caller (0: no particular one) on this CPU.
    pub(super) fn came(&self, caller: u32, cpu: u16) {
        let Some(place) = self.last_seen.get(caller as usize % CALLERS).filter(|_| caller != 0) else { return };
        let (now, last) = (u64::from(caller) << 16 | u64::from(cpu), place.load(Relaxed));
        if last != now {
            place.store(now, Relaxed);
            if last >> 16 == now >> 16 {
                self.moved.fetch_add(1, Relaxed);
            }
        }
    }

    /// Changes to SCHED_IDLE, where that helps, before the calling thread replies and waits.
    pub(super) fn yields(&self, own: &mut Own) {
        if !self.yielding.load(Relaxed) {
            return self.works(own);
        }
        let brought = self.brought.load(Relaxed);
        if own.idle != Some(brought) {
            own.idle = Some(brought);
            self.change(Class::Idle);
        }
    }

    /// Changes back to SCHED_BATCH before work that may take long.
    pub(super) fn works(&self, own: &mut Own) {
        if own.idle.take().is_some() {
            self.change(Class::Batch);
        }
    }

    /// Changes the class of the calling thread; after a failure no other thread tries.
    fn change(&self, class: Class) {
        if let Err(error) = sys::schedule(0, class) {
            self.refused.store(true, Relaxed);
            self.yielding.store(false, Relaxed);
            tracing::warn!(%error, ?class, "cannot change the scheduling of a ring thread");
        }
    }

    /// Wakes the watcher up, to check whether the session has ended.
    pub(super) fn wake(&self) {
        *self.woken.lock() = true;
        self.changed.notify_one();
    }

    fn sleep(&self) {
        self.asleep.store(true, Relaxed);
        let mut woken = self.woken.lock();
        while !std::mem::take(&mut *woken) {
            self.changed.wait(&mut woken);
        }
        self.asleep.store(false, Relaxed);
    }

    fn rest(&self) {
        let mut woken = self.woken.lock();
        self.changed.wait_for(&mut woken, TICK);
    }
}

/// A ring thread's own scheduling state.
#[derive(Debug, Default)]
pub(super) struct Own {
    /// It made itself SCHED_IDLE, when the watcher had reset threads this number of times.
    idle: Option<u32>,
}

/// Scheduling of the ring threads in one tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Turns {
    /// Number of times that they got the CPU.
    turns: u64,
    /// Number of requests whose caller had sent the previous one from another CPU.
    moved: u64,
    /// Time spent waiting for the CPU.
    waited_ns: u64,
    /// A thread was runnable all the time, and never ran.
    starved: bool,
}

/// Decides on SCHED_IDLE from the observations; pure.
#[derive(Debug)]
struct Judge {
    yielding: bool,
    cooldown: u32,
    penalty: u32,
    good: u32,
    /// Number of ticks since yielding began.
    stretch: u32,
}

impl Judge {
    fn new() -> Judge {
        Judge { yielding: false, cooldown: 0, penalty: FIRST_PENALTY, good: 0, stretch: 0 }
    }

    /// Whether the threads shall be SCHED_IDLE in the next tick.
    fn step(&mut self, seen: Turns) -> bool {
        let slow = seen.waited_ns > seen.turns.saturating_mul(MEAN_WAIT_NS);
        let trouble = seen.starved || slow;
        if self.yielding && trouble {
            self.yielding = false;
            self.cooldown = self.penalty;
            self.penalty = (self.penalty * 2).min(LAST_PENALTY);
            self.good = 0;
        } else if self.yielding {
            self.good = self.good.saturating_add(1);
            if self.good == FORGIVEN {
                self.penalty = FIRST_PENALTY;
            }
            self.stretch += 1;
            self.yielding = self.stretch < STRETCH;
        } else if self.cooldown > 0 {
            self.cooldown -= 1;
        } else if seen.turns >= BUSY && seen.moved * 4 > seen.turns && !trouble {
            self.yielding = true;
            self.stretch = 0;
        }
        self.yielding
    }
}

/// The kernel's counters of a thread (`/proc/PID/task/TID/schedstat`).
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    ran_ns: u64,
    waited_ns: u64,
    turns: u64,
    /// Number of ticks for which it was runnable, but did not run.
    starving: u32,
}

fn counted(tid: u32) -> Option<Counted> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some(Counted { ran_ns: next()?, waited_ns: next()?, turns: next()?, starving: 0 })
}

/// Starts the watcher of a session over rings, where the process can return from SCHED_IDLE.
pub(super) fn spawn(shared: &Arc<SessionState>) {
    let started = shared.spawn("fuse pace".to_owned(), |shared| {
        if may_yield() {
            watch(shared);
        }
    });
    if let Err(error) = started {
        tracing::debug!(%error, "no thread to watch the ring threads; they stay SCHED_BATCH");
    }
}

fn watch(shared: &Arc<SessionState>) {
    while !shared.is_ending() {
        shared.pace.sleep();
        let mut judge = Judge::new();
        let mut before: HashMap<u32, Counted> = HashMap::new();
        let mut quiet = 0;
        while quiet < QUIET && !shared.is_ending() {
            shared.pace.rest();
            let tids = shared.ring_threads();
            let mut seen = look(&tids, &mut before);
            seen.moved = shared.pace.moved.swap(0, Relaxed);
            quiet = if seen.turns == 0 && !seen.starved { quiet + 1 } else { 0 };
            let yields = judge.step(seen) && !shared.pace.refused.load(Relaxed);
            shared.pace.yielding.store(yields, Relaxed);
            if !yields {
                bring_back(shared, &tids);
            }
        }
        shared.pace.yielding.store(false, Relaxed);
        // A thread may have read the old value just now, and be about to yield: so check again, until there was none
        // for a tick.
        let mut clean = 0;
        while clean < 2 && !shared.is_ending() {
            shared.pace.rest();
            clean = if bring_back(shared, &shared.ring_threads()) { 0 } else { clean + 1 };
        }
    }
}

/// Resets yielding threads to SCHED_BATCH; returns whether there were any.
fn bring_back(shared: &SessionState, tids: &[u32]) -> bool {
    let mut any = false;
    for &tid in tids {
        if sys::yields(tid) {
            if !any {
                // The threads' own states are no longer true.
                shared.pace.brought.fetch_add(1, Relaxed);
            }
            any = true;
            if let Err(error) = sys::schedule(tid, Class::Batch) {
                // At worst it has just ended.
                tracing::debug!(tid, %error, "a ring thread keeps its scheduling class");
            }
        }
    }
    any
}

fn look(tids: &[u32], before: &mut HashMap<u32, Counted>) -> Turns {
    let mut all = Turns::default();
    let mut longest = 0;
    for &tid in tids {
        let Some(mut now) = counted(tid) else { continue };
        let Some(then) = before.get(&tid).copied() else {
            before.insert(tid, now);
            continue;
        };
        let turns = now.turns.saturating_sub(then.turns);
        if turns == 0 && now.ran_ns == then.ran_ns && is_runnable(tid) {
            now.starving = then.starving + 1;
        }
        longest = longest.max(now.starving);
        all.turns += turns;
        all.waited_ns += now.waited_ns.saturating_sub(then.waited_ns);
        before.insert(tid, now);
    }
    all.starved = longest >= PATIENCE || (longest > 0 && all.turns == 0);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Turns = Turns { turns: 500, moved: 400, waited_ns: 3_000_000, starved: false };
    const REST: Turns = Turns { turns: 0, moved: 0, waited_ns: 0, starved: false };
    const STARVED: Turns = Turns { turns: 0, moved: 0, waited_ns: 0, starved: true };

    fn ticks_until_yielding(judge: &mut Judge) -> u32 {
        (1..).find(|_| judge.step(WORK)).unwrap()
    }

    #[test]
    fn work_makes_threads_yield_and_trouble_stops_it_longer_each_time() {
        let mut judge = Judge::new();
        assert!(!judge.step(REST));
        assert_eq!(ticks_until_yielding(&mut judge), 1);
        assert!(judge.step(REST), "a pause is no trouble");
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert!(!judge.step(STARVED));
            pauses.push(ticks_until_yielding(&mut judge));
        }
        assert_eq!(pauses, [101, 201, 401, 801, 1601, 3201, 6001, 6001, 6001]);
        (0..FORGIVEN + FORGIVEN / STRETCH).for_each(|_| _ = judge.step(WORK));
        assert!(!judge.step(STARVED));
        assert_eq!(ticks_until_yielding(&mut judge), FIRST_PENALTY + 1);
    }

    #[test]
    fn callers_that_stay_are_left_alone_and_it_is_tried_without_now_and_then() {
        let mut judge = Judge::new();
        let stay = Turns { moved: 3, ..WORK };
        assert!((0..1_000).all(|_| !judge.step(stay)));
        assert!(judge.step(WORK));
        assert!((1..STRETCH).all(|_| judge.step(stay)));
        assert!(!judge.step(stay), "tried without");
        assert!(!judge.step(stay));
        assert!(judge.step(WORK));
    }

    #[test]
    fn a_caller_that_asks_from_elsewhere_has_moved() {
        let pace = Pace::default();
        [(7, 0), (7, 0), (7, 1), (7 + CALLERS as u32, 0), (7, 1), (7, 0)]
            .into_iter()
            .for_each(|(caller, cpu)| pace.came(caller, cpu));
        assert_eq!(pace.moved.load(Relaxed), 2);
    }

    #[test]
    fn long_waits_are_trouble_too() {
        let mut judge = Judge::new();
        let slow = Turns { turns: 40, moved: 40, waited_ns: 41 * MEAN_WAIT_NS, starved: false };
        assert!(!judge.step(slow));
        assert!(judge.step(WORK));
        assert!(!judge.step(slow));
    }

    #[test]
    fn threads_are_read_from_proc() {
        let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        assert!(is_runnable(tid));
        assert!(counted(tid).is_none_or(|counted| counted.turns > 0));
        assert!(!is_runnable(u32::MAX) && counted(u32::MAX).is_none());
    }
}
