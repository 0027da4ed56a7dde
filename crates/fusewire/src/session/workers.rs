//! State of a session's threads: the request of each, the number of waiting threads, and when more are needed.
//!
//! Used by both transports, by [`crate::blocking`] and by the session. Invariants: a queue whose last waiting thread
//! takes a request gets another thread first (up to the limit); `taken - answered` of a worker is 1 while a request
//! is between being taken and its reply being in the kernel, 0 otherwise; flags are only ever set on their own
//! request, because they share a word with its number.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use super::uring::Consumed;
use crate::abi::UNIQUE_RESEND;

/// The request waits inside [`crate::blocking`].
const BLOCKING: u64 = 1;
/// The request's caller got a signal.
const INTERRUPTED: u64 = 2;
/// The request takes long, and its thread is not counted ([`super::stuck`]).
const DETACHED: u64 = 4;
const FLAGS: u64 = BLOCKING | INTERRUPTED | DETACHED;

/// The number of a request without its flag bits, shifted so that three bits are free below (bit 0
/// of a number is always 0).
fn key(unique: u64) -> u64 {
    (unique & !UNIQUE_RESEND) << 2 & !FLAGS
}

/// The caller of a request, as in its header.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallerIds {
    pub(super) uid: u32,
    pub(super) pid: u32,
}

/// What a queue needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    Nothing,
    /// Another thread.
    Thread,
    /// Another thread, but it has its maximum number.
    Room,
}

/// State of a worker when it started to wait for users.
pub(super) struct Before {
    pub(super) was_interrupted: bool,
    pub(super) was_detached: bool,
}

/// One thread.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) tid: u32,
    /// Number of the request being handled, with its flags; 0 between requests. Only the thread itself removes
    /// [`DETACHED`].
    state: AtomicU64,
    /// The node of the last request taken.
    node: AtomicU64,
    /// User and thread id of its caller, as in its header.
    uid: AtomicU32,
    pid: AtomicU32,
    /// The user of a request (low 32 bits) and the count of that request (high 32 bits, as in [`Worker::taken`]).
    user: AtomicU64,
    /// The queue that it serves: see [`QueueId::number`].
    place: AtomicU32,
    taken: AtomicU32,
    /// Number of replies that the kernel has, where the thread itself counts them (device).
    answered: AtomicU32,
    /// On rings: number of submissions consumed by the kernel ...
    consumed: OnceLock<Consumed>,
    /// ... of which this number were no replies.
    other_submissions: AtomicU32,
    exited: AtomicBool,
}

impl Worker {
    pub(super) fn new(tid: u32, consumed: Option<Consumed>) -> Worker {
        let cell = OnceLock::new();
        if let Some(consumed) = consumed {
            // The cell is new, so this cannot fail.
            let _ = cell.set(consumed);
        }
        Worker {
            tid,
            state: AtomicU64::new(0),
            node: AtomicU64::new(0),
            uid: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            // For a request that is never reached: the first one has the count 1.
            user: AtomicU64::new(u64::MAX),
            place: AtomicU32::new(QueueId::Device.number()),
            taken: AtomicU32::new(0),
            answered: AtomicU32::new(0),
            consumed: cell,
            other_submissions: AtomicU32::new(0),
            exited: AtomicBool::new(false),
        }
    }

    /// Notes that a request has been taken from the kernel. True once in 256 requests, as a sign of load.
    pub(super) fn begin(&self, unique: u64, node: u64) -> bool {
        self.node.store(node, Relaxed);
        // Before the number: a thread that reads the number and then the count must not get the count of the request
        // before, with the user that was noted for it, and charge this request to that user.
        let is_sign = self.taken.fetch_add(1, SeqCst) % 256 == 255;
        self.state.store(key(unique), SeqCst);
        is_sign
    }

    /// Sets the caller of the request that is about to begin.
    pub(super) fn called_by(&self, ids: CallerIds) {
        self.uid.store(ids.uid, Relaxed);
        self.pid.store(ids.pid, Relaxed);
    }

    /// Returns the caller of the last request taken.
    pub(super) fn caller(&self) -> CallerIds {
        CallerIds { uid: self.uid.load(Relaxed), pid: self.pid.load(Relaxed) }
    }

    pub(super) fn set_place(&self, place: QueueId) {
        self.place.store(place.number(), Relaxed);
    }

    pub(super) fn place(&self) -> QueueId {
        QueueId::from_number(self.place.load(Relaxed))
    }

    /// Number of requests taken.
    pub(super) fn taken(&self) -> u32 {
        self.taken.load(SeqCst)
    }

    /// Whether it serves rings.
    pub(super) fn has_rings(&self) -> bool {
        self.consumed.get().is_some()
    }

    /// The node of the last request taken; 0 before the first.
    pub(super) fn node(&self) -> u64 {
        self.node.load(Relaxed)
    }

    /// Notes that the handler has returned, before the reply is sent; returns whether the thread was detached.
    pub(super) fn handled(&self) -> bool {
        self.state.swap(0, SeqCst) & DETACHED != 0
    }

    /// Marks the request with this number (as [`key`]) as one of a detached thread; false if it is no longer handled
    /// here, or waits for users.
    pub(super) fn detach(&self, request: u64) -> bool {
        let set = |state: u64| (request != 0 && state & !INTERRUPTED == request).then_some(state | DETACHED);
        self.state.fetch_update(SeqCst, SeqCst, set).is_ok()
    }

    /// Notes the user of the request with this count of [`Self::taken`]. The thread may handle another one meanwhile.
    pub(super) fn set_user(&self, taken: u32, user: u32) {
        self.user.store(u64::from(taken) << 32 | u64::from(user), SeqCst);
    }

    /// The user of the request with this count of [`Self::taken`], where it is known.
    pub(super) fn user(&self, taken: u32) -> Option<u32> {
        let noted = self.user.load(SeqCst);
        (noted >> 32 == u64::from(taken)).then_some(noted as u32)
    }

    /// Counts a reply that the kernel has (device only; on the ring the kernel itself counts).
    pub(super) fn answered(&self) {
        self.answered.fetch_add(1, SeqCst);
    }

    /// Counts a submission that is not a reply, before it is queued.
    pub(super) fn other_submission(&self) {
        self.other_submissions.fetch_add(1, SeqCst);
    }

    pub(super) fn exit(&self) {
        self.exited.store(true, SeqCst);
    }

    fn answered_count(&self) -> u32 {
        match self.consumed.get() {
            Some(consumed) => consumed.get().wrapping_sub(self.other_submissions.load(SeqCst)),
            None => self.answered.load(SeqCst),
        }
    }

    /// The request being handled, as a mark for [`Worker::passed`]; `None` if there is none, or it waits for users.
    pub(super) fn mark(&self) -> Option<u32> {
        let taken = self.taken.load(SeqCst);
        (!self.passed(taken)).then_some(taken)
    }

    /// Whether the marked request has been answered, or waits for users.
    pub(super) fn passed(&self, mark: u32) -> bool {
        // Wrapping: "answered >= mark".
        self.answered_count().wrapping_sub(mark) < u32::MAX / 2 || self.is_blocking() || self.exited.load(SeqCst)
    }

    /// Whether a request is between being taken and its reply being in the kernel.
    pub(super) fn in_flight(&self) -> bool {
        self.taken.load(SeqCst) != self.answered_count() && !self.exited.load(SeqCst)
    }

    /// Whether a handler is running.
    pub(super) fn handling(&self) -> bool {
        self.state.load(SeqCst) != 0
    }

    pub(super) fn is_blocking(&self) -> bool {
        self.state.load(SeqCst) & BLOCKING != 0
    }

    /// Whether it waits for users although the caller got a signal.
    pub(super) fn to_be_woken(&self) -> bool {
        self.state.load(SeqCst) & (BLOCKING | INTERRUPTED) == BLOCKING | INTERRUPTED
    }

    /// Begins a blocking call, which must not be made if the caller got a signal before. Ends the thread's
    /// detachment.
    pub(super) fn start_blocking(&self) -> Before {
        let enter = |state: u64| Some((state | BLOCKING) & !DETACHED);
        let (Ok(old) | Err(old)) = self.state.fetch_update(SeqCst, SeqCst, enter);
        Before { was_interrupted: old & INTERRUPTED != 0, was_detached: old & DETACHED != 0 }
    }

    pub(super) fn end_blocking(&self) {
        self.state.fetch_and(!BLOCKING, SeqCst);
    }

    /// Number (as [`key`]) of the request being handled.
    pub(super) fn current(&self) -> u64 {
        self.state.load(SeqCst) & !FLAGS
    }

    /// Marks the request with this number as interrupted. `None` if it is not handled here; else whether it waits for
    /// users.
    pub(super) fn interrupt(&self, unique: u64) -> Option<bool> {
        let set = |state: u64| (state & !FLAGS == key(unique)).then_some(state | INTERRUPTED);
        self.state.fetch_update(SeqCst, SeqCst, set).ok().map(|old| old & BLOCKING != 0)
    }

    /// Whether the request being handled has this number.
    pub(super) fn handles(&self, unique: u64) -> bool {
        self.current() == key(unique)
    }
}

/// The queue that a worker serves at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueId {
    Device,
    /// Index into [`super::state::SessionState::rings`].
    Ring(usize),
}

impl QueueId {
    /// The queue as a number, for an atomic.
    pub(super) fn number(self) -> u32 {
        match self {
            QueueId::Device => u32::MAX,
            QueueId::Ring(index) => u32::try_from(index).unwrap_or(u32::MAX),
        }
    }

    pub(super) fn from_number(number: u32) -> QueueId {
        if number == u32::MAX { QueueId::Device } else { QueueId::Ring(number as usize) }
    }
}

/// Requests for which the same threads wait: one queue per CPU on io_uring, one in total on the device.
#[derive(Debug)]
pub(super) struct Queue {
    /// Index of the kernel's queue, which is the CPU's number; not used on the device.
    pub(super) qid: u16,
    /// Number of threads that wait, or are about to.
    idle: AtomicI32,
    threads: AtomicI32,
    /// Number of threads inside [`crate::blocking`], and detached ones.
    blocked: AtomicI32,
    growing: AtomicBool,
}

impl Queue {
    pub(super) fn new(qid: u16) -> Queue {
        Queue {
            qid,
            idle: AtomicI32::new(0),
            threads: AtomicI32::new(0),
            blocked: AtomicI32::new(0),
            growing: AtomicBool::new(false),
        }
    }

    /// Counts a thread that has been, or is about to be, added.
    pub(super) fn add(&self) {
        self.threads.fetch_add(1, SeqCst);
        self.idle.fetch_add(1, SeqCst);
    }

    /// Removes a waiting thread that has ended, or could not be started.
    pub(super) fn remove(&self) {
        self.threads.fetch_sub(1, SeqCst);
        self.idle.fetch_sub(1, SeqCst);
    }

    /// Number of threads.
    pub(super) fn threads(&self) -> i32 {
        self.threads.load(SeqCst)
    }

    /// Counts a request taken by a waiting thread; returns what the queue lacks then.
    pub(super) fn take(&self, limit: i32) -> Lack {
        self.idle.fetch_sub(1, SeqCst);
        self.lack(limit)
    }

    /// Counts a thread that waits again.
    pub(super) fn give_back(&self) {
        self.idle.fetch_add(1, SeqCst);
    }

    /// Counts a thread that starts to wait for users, or is detached.
    pub(super) fn block(&self) {
        self.blocked.fetch_add(1, SeqCst);
    }

    pub(super) fn unblock(&self) {
        self.blocked.fetch_sub(1, SeqCst);
    }

    /// Whether some thread does not wait for users. Each thread that starts to wait calls this after it has been
    /// counted, so the last one gets the right answer.
    pub(super) fn served(&self) -> bool {
        self.threads.load(SeqCst) > self.blocked.load(SeqCst)
    }

    /// Checks the number of threads: one must remain waiting, and two while some wait for users (a new thread does
    /// not get the requests that came while it was being started, so it must not be started at the last moment).
    pub(super) fn lack(&self, limit: i32) -> Lack {
        let blocked = self.blocked.load(SeqCst);
        let least = if blocked > 0 { 2 } else { 1 };
        if self.idle.load(SeqCst) >= least {
            Lack::Nothing
        } else if self.threads.load(SeqCst) - blocked < limit {
            Lack::Thread
        } else {
            Lack::Room
        }
    }

    /// Whether it has more threads than its limit: a detached one can end.
    pub(super) fn has_surplus(&self, limit: i32) -> bool {
        self.threads.load(SeqCst) - self.blocked.load(SeqCst) > limit
    }

    /// Claims the start of a thread: at most one thread at a time starts another.
    pub(super) fn start_growing(&self) -> bool {
        !self.growing.swap(true, SeqCst)
    }

    /// Whether a thread is being started.
    pub(super) fn is_growing(&self) -> bool {
        self.growing.load(SeqCst)
    }

    pub(super) fn end_growing(&self) {
        self.growing.store(false, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_stick_to_their_request() {
        let worker = Worker::new(1, None);
        worker.begin(10, 1);
        assert_eq!(worker.interrupt(12), None);
        assert_eq!(worker.interrupt(10), Some(false));
        assert!(worker.start_blocking().was_interrupted);
        worker.end_blocking();
        assert!(!worker.handled());
        worker.answered();
        assert_eq!(worker.interrupt(10), None);
        worker.begin(12, 1);
        assert!(!worker.start_blocking().was_interrupted);
        assert_eq!(worker.interrupt(12 | UNIQUE_RESEND), Some(true));
        assert!(worker.to_be_woken() && worker.handles(12));
    }

    #[test]
    fn a_thread_is_detached_for_the_request_that_was_meant_and_until_it_waits_for_users() {
        let worker = Worker::new(1, None);
        worker.begin(10, 1);
        let request = worker.current();
        worker.handled();
        worker.begin(12, 1);
        assert!(!worker.detach(request), "another request");
        assert_eq!(worker.interrupt(12), Some(false));
        assert!(worker.detach(worker.current()));
        assert!(!worker.detach(worker.current()), "it is already");
        let before = worker.start_blocking();
        assert!(before.was_detached && before.was_interrupted && worker.to_be_woken());
        assert!(!worker.detach(worker.current()), "it waits for users");
        worker.end_blocking();
        assert!(worker.detach(worker.current()) && worker.handled());
    }

    #[test]
    fn a_noted_user_is_that_of_one_request() {
        let worker = Worker::new(1, None);
        worker.begin(10, 1);
        let first = worker.taken();
        assert_eq!(worker.user(first), None);
        worker.set_user(first, u32::MAX);
        assert_eq!(worker.user(first), Some(u32::MAX));
        worker.begin(12, 1);
        worker.set_user(first, 1000);
        assert_eq!(worker.user(worker.taken()), None, "found out too late, for the request before");
    }

    #[test]
    fn a_mark_passes_with_the_answer() {
        let worker = Worker::new(1, None);
        assert_eq!(worker.mark(), None);
        worker.begin(2, 1);
        let mark = worker.mark().unwrap();
        worker.handled();
        assert!(!worker.passed(mark) && worker.in_flight());
        worker.answered();
        assert!(worker.passed(mark) && !worker.in_flight());
        worker.begin(4, 1);
        assert!(worker.passed(mark));
        let mark = worker.mark().unwrap();
        worker.start_blocking();
        assert!(worker.passed(mark));
    }

    #[test]
    fn a_queue_grows_before_it_is_out_of_threads() {
        let queue = Queue::new(0);
        (0..3).for_each(|_| queue.add());
        assert_eq!(queue.take(8), Lack::Nothing);
        queue.block();
        assert_eq!(queue.lack(8), Lack::Nothing);
        assert_eq!(queue.take(8), Lack::Thread, "one is left, but one waits for users");
        assert_eq!(queue.take(8), Lack::Thread);
        assert!(queue.served(), "one handles a request to its end");
        assert_eq!(queue.take(2), Lack::Room, "the limit counts those that do not wait for users");
        assert!(!queue.has_surplus(2) && queue.has_surplus(1));
        queue.block();
        assert!(queue.served() && queue.lack(8) == Lack::Thread);
        queue.block();
        assert!(!queue.served() && queue.lack(8) == Lack::Thread, "the last one has to make another");
    }
}
