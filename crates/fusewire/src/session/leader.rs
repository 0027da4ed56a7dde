//! A single reader of the fuse device, on the CPU of its single caller.
//!
//! Threads that wait in read(2) get requests in rotation, the longest waiting thread first. So a program that makes
//! one call after the other wakes up a different thread with each, on another CPU, which on an idle machine has to be
//! woken up itself; and requests for which it does not wait (RELEASE, FORGET) wake up one more. Where only one caller
//! at a time sends requests, one thread is enough: it becomes the *leader*, stays on the CPU of the caller, and the
//! others *park*: they do not read. Leader and caller then alternate on one CPU, and no other thread is awake. A
//! caller that moves, because another CPU is idle, is kept: the leader sends replies as SCHED_IDLE (`pace.rs` has the
//! reason), and handles requests that are not brief as SCHED_BATCH.
//!
//! A leader that is held up holds up all others. So it stops being the leader (all threads read again) as soon as
//! * it waits for users ([`crate::blocking`]), or ends;
//! * more than one caller sends requests, or data is transferred;
//! * it is busy with one request, or does not get its CPU, from one [`TICK`] to the next; then there is no leader for
//!   some time, longer each time;
//! * no request comes for [`QUIET`] ticks.
//!
//! One of the parked threads, the deputy, checks the leader at every tick. It also makes the leader follow a caller
//! that has moved. Invariants: while there is a leader, it reads, or handles a request, or a parked thread checks it
//! (threads that are not parked yet read themselves); while there are no requests there is no leader, and no thread
//! checks.
//!
//! Any handler may wait for any other request, so all depends on the deputy. It waits only for the clock and the lock
//! of the parked state; and the holder of that lock waits for nothing. Even calls that look harmless may wait for a
//! caller, which waits for us: reading `/proc` blocks on a process that is in execve(2) and closes files meanwhile.
//! So another thread looks up the CPU of a caller (`whereabouts.rs`), and the leader follows a tick later, or not at
//! all.
//!
//! Used by `device.rs` (the threads) and `state.rs` (events that end a leader). Not used in addition to rings.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::thread::CpuSet;

use super::threads::{is_runnable, may_yield};
use super::whereabouts::Whereabouts;
use super::workers::Worker;
use crate::abi::{InHeader, opcode};
use crate::sys::{self, Class};

/// Interval of the deputy's checks.
const TICK: Duration = Duration::from_millis(2);
/// Number of ticks without a request that end a leader.
const QUIET: u32 = 20;
/// Number of consecutive requests of one caller ...
const STREAK: u32 = 16;
/// ... within this time that make a thread the leader.
const STREAK_WITHIN: Duration = Duration::from_millis(4);
/// In this number of requests ...
const WINDOW: u32 = 64;
/// ... more changes of the caller than this end the leader: several callers at once.
const MOST_CHANGES: u32 = 16;
/// Size from which a request or READ counts as data, bytes.
const DATA: u32 = 32 << 10;
/// Time without a leader after one that ended for a good reason ...
const PAUSE: Duration = Duration::from_millis(20);
/// ... and after one that held others up: the first time, and at most.
const FIRST_PENALTY: Duration = Duration::from_millis(20);
const LAST_PENALTY: Duration = Duration::from_secs(5);
/// Number of consecutive ticks with a moving caller that make the leader yield ...
const MOVES: u32 = 2;
/// ... for this number of ticks; then the leader runs without yielding, as a trial.
const STRETCH: u32 = 50;
/// Number of ticks without trouble after which the penalty is reset.
const FORGIVEN: u32 = 250;

/// Assignment of the device's reader.
#[derive(Debug)]
pub(super) struct Lead {
    began: Instant,
    /// Thread id of the leader; 0: all threads read.
    leader: AtomicU32,
    /// The leader's caller.
    caller: AtomicU32,
    callers: Whereabouts,
    /// While all threads read: a caller, and its number of consecutive requests (32 bits each).
    streak: AtomicU64,
    /// Start of the streak, nanoseconds since `began`.
    streak_since: AtomicU64,
    /// No leader before this time.
    not_before: AtomicU64,
    over: AtomicBool,
    /// The leader sends replies as SCHED_IDLE.
    yielding: AtomicBool,
    /// A thread could not change its scheduling class.
    refused: AtomicBool,
    parked: Mutex<Parked>,
    changed: Condvar,
}

#[derive(Debug)]
struct Parked {
    leader: Option<Arc<Worker>>,
    /// The CPU that the leader is bound to.
    cpu: Option<usize>,
    /// The CPUs that it may use.
    cpus: CpuSet,
    /// A parked thread checks the leader at every tick.
    deputy: bool,
    penalty: Duration,
    /// Number of ticks without trouble.
    good: u32,
}

/// A device thread's own state.
#[derive(Debug)]
pub(super) struct Reader {
    worker: Arc<Worker>,
    /// The CPUs that it may use.
    cpus: CpuSet,
    /// It was the leader, and may still be bound to a CPU.
    led: bool,
    /// It is SCHED_IDLE, unless another thread has reset it.
    idle: bool,
    caller: u32,
    requests: u32,
    changes: u32,
}

impl Reader {
    /// State of the calling thread.
    pub(super) fn new(worker: Arc<Worker>) -> Reader {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        Reader { worker, cpus, led: false, idle: false, caller: 0, requests: 0, changes: 0 }
    }
}

/// The deputy's observations at the previous tick.
#[derive(Debug, Default)]
struct Seen {
    taken: u32,
    mark: Option<u32>,
    quiet: u32,
    starving: u32,
    /// Number of consecutive ticks with a moving caller; remaining ticks for which the leader yields.
    moves: u32,
    stretch: u32,
}

impl Default for Lead {
    #[expect(clippy::disallowed_methods, reason = "measures how fast requests come")]
    fn default() -> Lead {
        Lead {
            began: Instant::now(),
            leader: AtomicU32::new(0),
            caller: AtomicU32::new(0),
            callers: Whereabouts::default(),
            streak: AtomicU64::new(0),
            streak_since: AtomicU64::new(0),
            not_before: AtomicU64::new(0),
            over: AtomicBool::new(false),
            yielding: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            parked: Mutex::new(Parked {
                leader: None,
                cpu: None,
                cpus: CpuSet::new(),
                deputy: false,
                penalty: FIRST_PENALTY,
                good: 0,
            }),
            changed: Condvar::new(),
        }
    }
}

impl Lead {
    /// Waits until the calling thread may read.
    pub(super) fn wait_to_read(&self, reader: &mut Reader) {
        let leader = self.leader.load(SeqCst);
        if leader == reader.worker.tid {
            return;
        }
        if reader.led {
            self.works(reader);
            self.unbind(reader);
        }
        if leader != 0 {
            self.park();
        }
    }

    /// Notes a request that the calling thread has taken; `brief`: it is known to be brief.
    pub(super) fn came(&self, reader: &mut Reader, header: &InHeader, fixed: &[u8], brief: bool) {
        let leader = self.leader.load(Relaxed);
        if !brief || !self.yielding.load(Relaxed) {
            self.works(reader);
        }
        if leader == reader.worker.tid {
            self.led(reader, header, fixed);
        } else if leader == 0 && header.pid != 0 && !self.over.load(Relaxed) {
            self.follows(reader, header, fixed);
        }
    }

    /// Changes to SCHED_IDLE, if needed, before the calling thread sends a reply.
    pub(super) fn yields(&self, reader: &mut Reader) {
        if reader.idle || !self.yielding.load(Relaxed) || self.leader.load(Relaxed) != reader.worker.tid {
            return;
        }
        // Under the lock: the thread that ends a leader also resets its class.
        let _parked = self.parked.lock();
        if self.leader.load(SeqCst) == reader.worker.tid && self.yielding.load(Relaxed) {
            reader.idle = self.change(0, Class::Idle);
        }
    }

    /// Changes back to SCHED_BATCH before work that may take long.
    fn works(&self, reader: &mut Reader) {
        if std::mem::take(&mut reader.idle) {
            self.change(0, Class::Batch);
        }
    }

    fn change(&self, tid: u32, class: Class) -> bool {
        let changed = sys::schedule(tid, class);
        if let Err(error) = &changed {
            self.refused.store(true, Relaxed);
            self.yielding.store(false, Relaxed);
            tracing::warn!(%error, ?class, "cannot change the scheduling of the reader of the fuse device");
        }
        changed.is_ok()
    }

    /// Checks a request of the leader.
    fn led(&self, reader: &mut Reader, header: &InHeader, fixed: &[u8]) {
        if moves_data(header, fixed) {
            return self.end(reader.worker.tid, PAUSE);
        }
        // Requests without a waiting process have no caller.
        if header.pid == 0 {
            return;
        }
        reader.requests += 1;
        if reader.caller != header.pid {
            reader.caller = header.pid;
            reader.changes += 1;
            self.caller.store(header.pid, Relaxed);
        }
        if reader.requests == WINDOW {
            if reader.changes > MOST_CHANGES {
                self.end(reader.worker.tid, PAUSE);
            }
            (reader.requests, reader.changes) = (0, 0);
        }
    }

    /// Counts a request while all threads read. Other threads may count at the same moment: the result is an
    /// estimate, and need not be more.
    fn follows(&self, reader: &mut Reader, header: &InHeader, fixed: &[u8]) {
        let (caller, count) = unpack(self.streak.load(Relaxed));
        if caller != header.pid || count == STREAK || moves_data(header, fixed) {
            self.streak.store(pack(header.pid, 1), Relaxed);
            self.streak_since.store(self.now(), Relaxed);
            return;
        }
        self.streak.store(pack(caller, count + 1), Relaxed);
        if count + 1 < STREAK {
            return;
        }
        let now = self.now();
        let quick = now.saturating_sub(self.streak_since.load(Relaxed)) < nanoseconds(STREAK_WITHIN);
        if quick && now >= self.not_before.load(Relaxed) {
            self.begin(reader, header.pid);
        }
    }

    /// Makes the calling thread the leader, if there is none.
    fn begin(&self, reader: &mut Reader, caller: u32) {
        let mut parked = self.parked.lock();
        if self.over.load(SeqCst) || self.leader.load(SeqCst) != 0 {
            return;
        }
        (reader.led, reader.caller, reader.requests, reader.changes) = (true, caller, 0, 0);
        parked.leader = Some(Arc::clone(&reader.worker));
        (parked.cpu, parked.cpus) = (None, reader.cpus);
        self.caller.store(caller, Relaxed);
        self.leader.store(reader.worker.tid, SeqCst);
        follow(&mut parked, self.callers.of(caller));
    }

    /// Ends this thread's leadership, if it is the leader; there is no leader for `pause`.
    pub(super) fn end(&self, tid: u32, pause: Duration) {
        if self.leader.load(SeqCst) == tid {
            self.not_before.store(self.now() + nanoseconds(pause), Relaxed);
            self.release(&mut self.parked.lock(), tid);
        }
    }

    /// Ends this thread's leadership while it waits for users.
    pub(super) fn end_for_now(&self, tid: u32) {
        self.end(tid, PAUSE);
    }

    /// Ends the use of leaders.
    pub(super) fn end_for_good(&self) {
        let mut parked = self.parked.lock();
        self.over.store(true, SeqCst);
        let leader = self.leader.load(SeqCst);
        self.release(&mut parked, leader);
    }

    fn release(&self, parked: &mut Parked, tid: u32) {
        if self.leader.load(SeqCst) == tid {
            parked.leader = None;
            self.yielding.store(false, Relaxed);
            self.leader.store(0, SeqCst);
            if sys::yields(tid) {
                self.change(tid, Class::Batch);
            }
            self.changed.notify_all();
        }
    }

    /// Gives the calling thread all of its CPUs back.
    fn unbind(&self, reader: &mut Reader) {
        // Under the lock: the deputy binds only a leader.
        let _parked = self.parked.lock();
        reader.led = false;
        if let Err(error) = rustix::thread::sched_setaffinity(None, &reader.cpus) {
            tracing::debug!(%error, "a thread of the fuse device stays on one CPU");
        }
    }

    /// Waits as long as there is a leader; checks it, if no other parked thread does.
    fn park(&self) {
        let mut seen = Seen::default();
        let mut parked = self.parked.lock();
        while self.leader.load(SeqCst) != 0 {
            if parked.deputy {
                self.changed.wait(&mut parked);
                continue;
            }
            parked.deputy = true;
            let timeout = self.changed.wait_for(&mut parked, TICK).timed_out();
            parked.deputy = false;
            if timeout {
                self.look(&mut parked, &mut seen);
            }
        }
    }

    /// Checks the leader, at each tick of the deputy.
    fn look(&self, parked: &mut Parked, seen: &mut Seen) {
        let Some(leader) = parked.leader.clone() else { return };
        let (taken, mark) = (leader.taken(), leader.mark());
        let stuck = mark.is_some() && mark == seen.mark;
        if taken == seen.taken && mark.is_none() {
            seen.quiet += 1;
            seen.starving = if is_runnable(leader.tid) { seen.starving + 1 } else { 0 };
        } else {
            (seen.quiet, seen.starving) = (0, 0);
        }
        (seen.taken, seen.mark) = (taken, mark);
        if stuck || seen.starving > 2 {
            self.not_before.store(self.now() + nanoseconds(parked.penalty), Relaxed);
            parked.penalty = (parked.penalty * 2).min(LAST_PENALTY);
            parked.good = 0;
            self.release(parked, leader.tid);
        } else if seen.quiet >= QUIET {
            self.release(parked, leader.tid);
        } else if seen.quiet == 0 {
            parked.good = (parked.good + 1).min(FORGIVEN);
            if parked.good == FORGIVEN {
                parked.penalty = FIRST_PENALTY;
            }
            let moved = follow(parked, self.callers.of(self.caller.load(Relaxed)));
            self.keep_caller(moved, seen);
        }
    }

    /// Decides whether the leader has to yield, from the deputy's observations.
    fn keep_caller(&self, moved: bool, seen: &mut Seen) {
        if seen.stretch > 0 {
            seen.stretch -= 1;
        } else {
            seen.moves = if moved { seen.moves + 1 } else { 0 };
            seen.stretch = if seen.moves >= MOVES { STRETCH } else { 0 };
        }
        let yields = seen.stretch > 0 && !self.refused.load(Relaxed) && may_yield();
        self.yielding.store(yields, Relaxed);
    }

    fn now(&self) -> u64 {
        nanoseconds(self.began.elapsed())
    }
}

/// Binds the leader to a CPU, if it may use that one; returns whether it was bound to another.
fn follow(parked: &mut Parked, cpu: Option<usize>) -> bool {
    let (Some(leader), Some(cpu)) = (&parked.leader, cpu) else { return false };
    if parked.cpu == Some(cpu) || cpu >= CpuSet::MAX_CPU || !parked.cpus.is_set(cpu) {
        return false;
    }
    match sys::pin_to_cpu(leader.tid, cpu) {
        Ok(()) => parked.cpu.replace(cpu).is_some(),
        Err(error) => {
            tracing::debug!(cpu, %error, "the reader of the fuse device does not follow its caller");
            false
        }
    }
}

/// Whether a request transfers data; several of those are in flight at a time.
fn moves_data(header: &InHeader, fixed: &[u8]) -> bool {
    // `size` of READ.
    let size = || fixed.get(16..).and_then(|rest| rest.first_chunk::<4>()).map_or(0, |size| u32::from_ne_bytes(*size));
    header.len > DATA || header.opcode == opcode::READ && size() > DATA
}

fn pack(caller: u32, count: u32) -> u64 {
    u64::from(caller) << 32 | u64::from(count)
}

fn unpack(streak: u64) -> (u32, u32) {
    ((streak >> 32) as u32, streak as u32)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader() -> Reader {
        Reader::new(Arc::new(Worker::new(rustix::thread::gettid().as_raw_pid().unsigned_abs(), None)))
    }

    fn request(pid: u32, opcode: u32, len: u32) -> InHeader {
        InHeader { pid, opcode, len, ..InHeader::default() }
    }

    /// One caller asks until the thread leads; a slow machine may take several attempts.
    fn lead(lead: &Lead, reader: &mut Reader) {
        let caller = reader.worker.tid;
        lead.not_before.store(0, SeqCst);
        let leads = (0..100_000).any(|_| {
            lead.came(reader, &request(caller, opcode::LOOKUP, 50), &[], true);
            lead.leader.load(SeqCst) == caller
        });
        assert!(leads);
    }

    #[test]
    fn one_caller_makes_a_leader_and_several_end_it() {
        let (shared, mut reader) = (Lead::default(), reader());
        for i in 0..1_000 {
            shared.came(&mut reader, &request(1 + i % 2, opcode::LOOKUP, 50), &[], true);
        }
        assert_eq!(shared.leader.load(SeqCst), 0);
        lead(&shared, &mut reader);
        for _ in 0..1_000 {
            // Requests without a waiting process, and one caller after the other.
            shared.came(&mut reader, &request(0, opcode::RELEASE, 64), &[], true);
            shared.came(&mut reader, &request(1, opcode::LOOKUP, 50), &[], true);
        }
        assert_ne!(shared.leader.load(SeqCst), 0);
        for i in 0..2 * WINDOW {
            shared.came(&mut reader, &request(1 + i % 2, opcode::LOOKUP, 50), &[], true);
        }
        assert_eq!(shared.leader.load(SeqCst), 0);
        shared.wait_to_read(&mut reader);
        assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), reader.cpus);
    }

    #[test]
    fn data_and_the_end_leave_no_leader() {
        let (shared, mut reader) = (Lead::default(), reader());
        let mut read = [0; 40];
        read[16..20].copy_from_slice(&(DATA + 1).to_ne_bytes());
        for (header, fixed) in
            [(request(1, opcode::WRITE, DATA + 80), &[][..]), (request(1, opcode::READ, 80), &read[..])]
        {
            lead(&shared, &mut reader);
            shared.came(&mut reader, &header, fixed, false);
            assert_eq!(shared.leader.load(SeqCst), 0);
        }
        lead(&shared, &mut reader);
        shared.end_for_good();
        (0..1_000).for_each(|_| shared.came(&mut reader, &request(1, opcode::LOOKUP, 50), &[], true));
        assert_eq!(shared.leader.load(SeqCst), 0);
    }

    #[test]
    fn who_is_parked_reads_again_when_the_leader_is_held_up_or_has_nothing_to_do() {
        for held_up in [true, false] {
            let (shared, mut reader) = (Lead::default(), reader());
            lead(&shared, &mut reader);
            if held_up {
                reader.worker.begin(2, 1);
            }
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| shared.wait_to_read(&mut super::tests::reader()));
                }
            });
            assert_eq!(shared.leader.load(SeqCst), 0);
            assert_eq!(shared.parked.lock().penalty > FIRST_PENALTY, held_up);
        }
    }

    #[test]
    fn a_leader_yields_for_a_while_to_a_caller_that_moves() {
        let (shared, mut seen) = (Lead::default(), Seen::default());
        shared.keep_caller(true, &mut seen);
        shared.keep_caller(false, &mut seen);
        shared.keep_caller(true, &mut seen);
        assert_eq!(seen.stretch, 0);
        shared.keep_caller(true, &mut seen);
        assert_eq!((seen.stretch, shared.yielding.load(Relaxed)), (STRETCH, may_yield()));
        (0..STRETCH).for_each(|_| shared.keep_caller(false, &mut seen));
        assert!(!shared.yielding.load(Relaxed));
    }
}
