//! Shared state of all threads of a session, and the end of a session.
//!
//! Used by the transports, by [`blocking`] and by `Session`. Invariants: every started thread is in `alive` until it
//! has left its loop; the last one to leave calls the handler's `destroy`, once; a thread that waits for users is
//! signalled again and again until it gives up, because a signal that arrives just before its system call would be
//! lost otherwise.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use super::SessionOptions;
use super::leader::Lead;
use super::pace::Pace;
use super::stuck::Stuck;
use super::workers::{Lack, Queue, QueueId, Worker};
use crate::connection::Connection;
use crate::counters::Counters;
use crate::errno::Errno;
use crate::handler::Handler;
use crate::request::Form;
use crate::sys;

/// Maximum number of remembered interrupts of requests that no thread has taken yet; the oldest are dropped.
const EARLY_INTERRUPTS: usize = 64;
/// Maximum number of threads of a session, however many wait for users; beyond it each queue may have
/// [`LEAST_OF_QUEUE`].
const MOST_THREADS: i32 = 2048;
/// Number of threads that each queue may have regardless of the others: on io_uring threads stay with their queue
/// until the session ends, so a burst on one CPU must not leave none for another.
const LEAST_OF_QUEUE: i32 = 128;
/// Number of threads waiting for users from which on one user may not have more than its share.
const MANY_BLOCKED: i32 = MOST_THREADS / 2;
/// Interval of the signals to a thread that does not leave its blocking call.
const WAKE_AGAIN: Duration = Duration::from_millis(5);

/// State of the session's life cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// INIT has not been answered; `destroy` is not due.
    Starting,
    Serving,
    /// No thread remains; `destroy` is being called.
    Ending,
    /// No thread remains and `destroy` has been called.
    Over,
}

/// Whether no thread remains and `destroy` has returned, if it was due.
fn is_over((threads, life): (i32, Life)) -> bool {
    threads == 0 && matches!(life, Life::Starting | Life::Over)
}

pub(super) struct SessionState {
    pub(super) handler: Arc<dyn Handler>,
    pub(super) connection: Arc<Connection>,
    pub(super) counters: Arc<Counters>,
    pub(super) form: Form,
    /// Maximum data of a request or reply, bytes; whole pages.
    pub(super) max_io: usize,
    pub(super) options: SessionOptions,
    add_thread: AddThread,
    /// Queues of the rings, by CPU; empty on the device.
    pub(super) rings: Vec<Queue>,
    /// The device's own queue: all requests without rings; FORGET and INTERRUPT in addition to rings.
    pub(super) device: Queue,
    workers: RwLock<Vec<Arc<Worker>>>,
    /// Bit `tid % 64` for each worker: most calls of [`SessionState::is_own_thread`] end here.
    tid_filter: AtomicU64,
    alive: Mutex<(i32, Life)>,
    changed: Condvar,
    /// The kernel has ended the connection, or we want to end it.
    ending: AtomicBool,
    /// We want to end it: threads leave as soon as they are woken.
    stopping: AtomicBool,
    /// Number of threads inside [`blocking`], of all queues.
    blocked: AtomicI32,
    early_interrupts: Mutex<VecDeque<u64>>,
    /// Assignment of the device's reader.
    pub(super) lead: Lead,
    /// Scheduling of the ring threads.
    pub(super) pace: Pace,
    /// Requests that take long.
    pub(super) stuck: Stuck,
    /// Maximum number of descriptors of the process at the start.
    descriptors: i32,
    waking: AtomicBool,
    panic_logged: AtomicBool,
    growth_logged: AtomicBool,
}

impl std::fmt::Debug for SessionState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionState")
            .field("workers", &self.workers.read().len())
            .field("ending", &self.ending)
            .finish_non_exhaustive()
    }
}

/// The calling thread: its session, its worker, and the queue that it serves at the moment.
type Current = (Arc<SessionState>, Arc<Worker>, QueueId);

thread_local! {
    /// Set in worker threads.
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Initial values of a session.
pub(super) struct Parts {
    pub(super) handler: Arc<dyn Handler>,
    pub(super) connection: Arc<Connection>,
    pub(super) counters: Arc<Counters>,
    pub(super) form: Form,
    pub(super) max_io: usize,
    pub(super) options: SessionOptions,
    pub(super) add_thread: AddThread,
    pub(super) rings: Vec<Queue>,
}

/// Starts another thread for a queue.
pub(super) type AddThread = fn(&Arc<SessionState>, QueueId) -> std::io::Result<()>;

impl SessionState {
    pub(super) fn new(parts: Parts) -> Arc<SessionState> {
        Arc::new(SessionState {
            handler: parts.handler,
            connection: parts.connection,
            counters: parts.counters,
            form: parts.form,
            max_io: parts.max_io,
            options: parts.options,
            add_thread: parts.add_thread,
            rings: parts.rings,
            device: Queue::new(0),
            workers: RwLock::new(Vec::new()),
            tid_filter: AtomicU64::new(0),
            alive: Mutex::new((0, Life::Starting)),
            changed: Condvar::new(),
            ending: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            blocked: AtomicI32::new(0),
            early_interrupts: Mutex::new(VecDeque::new()),
            lead: Lead::default(),
            pace: Pace::default(),
            stuck: Stuck::default(),
            descriptors: sys::descriptor_limit(),
            waking: AtomicBool::new(false),
            panic_logged: AtomicBool::new(false),
            growth_logged: AtomicBool::new(false),
        })
    }

    pub(super) fn queue(&self, place: QueueId) -> &Queue {
        match place {
            QueueId::Device => &self.device,
            QueueId::Ring(index) => self.rings.get(index).unwrap_or(&self.device),
        }
    }

    /// Starts a thread that is counted in `alive`. It calls `body` with the session; panics are caught.
    pub(super) fn spawn(
        self: &Arc<Self>,
        name: String,
        body: impl FnOnce(&Arc<SessionState>) + Send + 'static,
    ) -> std::io::Result<()> {
        self.alive.lock().0 += 1;
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name(name).stack_size(self.options.stack_size).spawn(move || {
            sys::mask_signals();
            if catch_unwind(AssertUnwindSafe(|| body(&shared))).is_err() {
                tracing::error!("a worker thread died of a panic outside of any handler; the session ends");
                shared.stop();
            }
            shared.left();
        });
        if thread.is_err() {
            self.alive.lock().0 -= 1;
        }
        thread.map(drop)
    }

    /// Registers the calling thread as a worker, with the session, [`blocking`] and the handler.
    pub(super) fn enter(self: &Arc<Self>, worker: &Arc<Worker>, place: QueueId) {
        self.workers.write().push(Arc::clone(worker));
        self.tid_filter.fetch_or(1 << (worker.tid % 64), SeqCst);
        self.set_place(worker, place);
        self.guarded(|| self.handler.worker_started());
    }

    /// Sets the queue that the calling thread serves now, for [`blocking`].
    pub(super) fn set_place(self: &Arc<Self>, worker: &Arc<Worker>, place: QueueId) {
        worker.set_place(place);
        CURRENT.with_borrow_mut(|current| match current {
            Some((_, _, old)) => *old = place,
            None => *current = Some((Arc::clone(self), Arc::clone(worker), place)),
        });
    }

    /// Unregisters the calling thread.
    pub(super) fn leave(&self, worker: &Arc<Worker>) {
        worker.exit();
        CURRENT.with_borrow_mut(Option::take);
        self.workers.write().retain(|other| !Arc::ptr_eq(other, worker));
    }

    /// Runs a handler's method; a panic is logged once and gives `None`.
    pub(super) fn guarded<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let result = catch_unwind(AssertUnwindSafe(call));
        if result.is_err() && !self.panic_logged.swap(true, SeqCst) {
            tracing::error!("a handler panicked; the request fails with EIO, and so will others (logged once)");
        }
        result.ok()
    }

    /// Counts a thread that has left its loop.
    fn left(&self) {
        let mut alive = self.alive.lock();
        alive.0 -= 1;
        self.finish(alive);
    }

    /// Notes that INIT has been answered: from now on the last thread calls `destroy`.
    pub(super) fn serving(&self) {
        let mut alive = self.alive.lock();
        alive.1 = Life::Serving;
        self.finish(alive);
    }

    /// Ends the session, if no thread remains.
    fn finish(&self, mut alive: MutexGuard<'_, (i32, Life)>) {
        if alive.0 == 0 && alive.1 == Life::Serving {
            alive.1 = Life::Ending;
            drop(alive);
            self.guarded(|| self.handler.destroy());
            self.connection.close();
            self.alive.lock().1 = Life::Over;
        }
        self.changed.notify_all();
    }

    /// Waits until no thread remains (and `destroy` has returned, if it was due).
    pub(super) fn wait(&self) {
        let mut alive = self.alive.lock();
        while !is_over(*alive) {
            self.changed.wait(&mut alive);
        }
    }

    /// Waits like [`Self::wait`], for `patience` at most; returns whether it is over.
    pub(super) fn ends_within(&self, patience: Duration) -> bool {
        let mut alive = self.alive.lock();
        self.changed.wait_while_for(&mut alive, |alive| !is_over(*alive), patience);
        is_over(*alive)
    }

    pub(super) fn over(&self) -> bool {
        is_over(*self.alive.lock())
    }

    /// Thread ids of the workers that serve rings.
    pub(super) fn ring_threads(&self) -> Vec<u32> {
        self.workers.read().iter().filter(|worker| worker.has_rings()).map(|worker| worker.tid).collect()
    }

    pub(super) fn threads(&self) -> usize {
        usize::try_from(self.alive.lock().0).unwrap_or(0)
    }

    /// Notes that the kernel has ended the connection: threads that wait for users give up, the others notice it
    /// themselves.
    pub(super) fn ended(self: &Arc<Self>) {
        if !self.ending.swap(true, SeqCst) {
            self.lead.end_for_good();
            self.pace.wake();
            self.wake_up();
        }
    }

    /// Notes that a thread leaves its loop: because the connection has ended (`fine`), or on an error, which ends the
    /// session, because with some threads missing requests could wait forever.
    pub(super) fn left_loop(self: &Arc<Self>, fine: bool) {
        if !fine {
            self.stop();
        } else if !self.is_stopping() {
            self.ended();
        }
    }

    /// Ends the connection from our side: all threads leave, and when the last descriptor is closed the kernel aborts
    /// it.
    pub(super) fn stop(self: &Arc<Self>) {
        self.ending.store(true, SeqCst);
        self.lead.end_for_good();
        self.pace.wake();
        if !self.stopping.swap(true, SeqCst) {
            self.connection.close();
            self.wake_up();
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(SeqCst)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(SeqCst)
    }

    pub(super) fn anyone_blocked(&self) -> bool {
        self.blocked.load(SeqCst) > 0
    }

    pub(super) fn workers(&self) -> Vec<Arc<Worker>> {
        self.workers.read().clone()
    }

    pub(super) fn is_own_thread(&self, tid: u32) -> bool {
        self.tid_filter.load(SeqCst) & (1 << (tid % 64)) != 0
            && self.workers.read().iter().any(|worker| worker.tid == tid)
    }

    /// Handles a signal for the caller of a request.
    pub(super) fn interrupt(self: &Arc<Self>, unique: u64) {
        let find = || self.workers.read().iter().find_map(|worker| worker.interrupt(unique));
        let found = find().or_else(|| {
            self.remember_interrupt(unique);
            // A thread may have taken the request meanwhile, and have searched for its number before it was added.
            find()
        });
        if found == Some(true) {
            self.wake_up();
        }
    }

    fn remember_interrupt(&self, unique: u64) {
        let mut early = self.early_interrupts.lock();
        if early.len() == EARLY_INTERRUPTS {
            early.pop_front();
        }
        early.push_back(unique);
    }

    /// Signals threads that have to leave a system call, until none remains; in a thread of its own.
    fn wake_up(self: &Arc<Self>) {
        if self.waking.swap(true, SeqCst) {
            return;
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("fuse wake".to_owned())
            .stack_size(64 << 10)
            .spawn(move || SessionState::wake_loop(shared));
        if let Err(error) = thread {
            self.waking.store(false, SeqCst);
            tracing::error!(%error, "cannot start a thread to interrupt blocked requests; they stay until they end themselves");
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a signal is sent again until it has met its thread in a call")]
    fn wake_loop(mut shared: Arc<Self>) {
        sys::mask_signals();
        loop {
            // A thread that died of a panic stays in the list; without any thread there is none to be signalled.
            let due = if shared.threads() == 0 { Vec::new() } else { shared.due() };
            if due.is_empty() {
                shared.waking.store(false, SeqCst);
                // A thread may have become due while `waking` was still set.
                let nobody = shared.threads() == 0 || shared.due().is_empty() && !shared.is_stopping();
                if nobody || shared.waking.swap(true, SeqCst) {
                    return;
                }
            }
            for worker in &due {
                // A thread that has ended meanwhile (ESRCH) is fine.
                let _ = sys::wake_thread(worker.tid);
            }
            // A caller that has waited for the end expects the handler, and all that it holds, to be released.
            let waiting = Arc::downgrade(&shared);
            drop(shared);
            std::thread::sleep(WAKE_AGAIN);
            let Some(again) = waiting.upgrade() else { return };
            shared = again;
        }
    }

    /// Returns the threads that have to be signalled now.
    fn due(&self) -> Vec<Arc<Worker>> {
        let (ending, stopping) = (self.is_ending(), self.is_stopping());
        let due = |worker: &Arc<Worker>| {
            worker.to_be_woken() || (ending && worker.is_blocking()) || (stopping && !worker.handling())
        };
        self.workers.read().iter().filter(|worker| due(worker)).cloned().collect()
    }

    /// Notes that a worker's handler has returned; returns whether the thread was detached.
    pub(super) fn handled(&self, worker: &Worker, place: QueueId) -> bool {
        let was_detached = worker.handled();
        if was_detached {
            self.stuck.reattached(worker.tid);
            self.queue(place).unblock();
        }
        was_detached
    }

    /// Checks whether a queue lacks threads.
    pub(super) fn lack(&self, place: QueueId) -> Lack {
        self.queue(place).lack(self.limit(place))
    }

    /// Starts a thread, or the watch for stuck requests, as the queue needs.
    pub(super) fn supply(self: &Arc<Self>, place: QueueId, lack: Lack) {
        match lack {
            Lack::Nothing => {}
            Lack::Thread => self.grow(place),
            Lack::Room => self.watch(),
        }
    }

    /// Adds a thread to a queue, unless one is being started already.
    pub(super) fn grow(self: &Arc<Self>, place: QueueId) {
        let queue = self.queue(place);
        let is_full = self.alive.lock().0 >= MOST_THREADS && queue.threads() >= LEAST_OF_QUEUE;
        if self.is_ending() || is_full || !queue.start_growing() {
            return;
        }
        if let Err(error) = (self.add_thread)(self, place) {
            queue.end_growing();
            if !self.growth_logged.swap(true, SeqCst) {
                tracing::warn!(%error, "cannot start another worker thread; requests may wait for each other (logged once)");
            }
        }
    }

    /// Begins a wait for users in the calling worker.
    fn start_blocking(self: &Arc<Self>, worker: &Worker, place: QueueId) -> Result<(), Errno> {
        let before = worker.start_blocking();
        self.lead.end_for_now(worker.tid);
        if before.was_detached {
            // Its detachment is already counted in the queue.
            self.stuck.reattached(worker.tid);
        } else {
            self.queue(place).block();
        }
        self.blocked.fetch_add(1, SeqCst);
        self.supply(place, self.lack(place));
        let error = if before.was_interrupted || self.is_ending() || self.was_interrupted_early(worker) {
            Errno::EINTR
        } else if self.blocked.load(SeqCst) > MANY_BLOCKED && self.has_too_many_blocked(worker)
            || !self.is_served(place)
        {
            Errno::EAGAIN
        } else {
            return Ok(());
        };
        self.end_blocking(worker, place);
        Err(error)
    }

    /// Whether a thread of the queue does not wait for users: it waits for requests, is being started, or handles a
    /// request to its end. The last thread that begins to wait sees that there is none, and starts one.
    fn is_served(self: &Arc<Self>, place: QueueId) -> bool {
        let queue = self.queue(place);
        while !queue.served() {
            if queue.is_growing() {
                // Another thread is about to count the thread that it starts, or to report that it could not.
                std::thread::yield_now();
                continue;
            }
            self.grow(place);
            if !queue.served() && !queue.is_growing() {
                return false;
            }
        }
        true
    }

    fn end_blocking(&self, worker: &Worker, place: QueueId) {
        worker.end_blocking();
        self.queue(place).unblock();
        self.blocked.fetch_sub(1, SeqCst);
    }

    fn was_interrupted_early(&self, worker: &Worker) -> bool {
        let mut early = self.early_interrupts.lock();
        let before = early.len();
        early.retain(|unique| !worker.handles(*unique));
        early.len() < before
    }

    /// Limits a number of threads where the process may have few descriptors: a request may need several at a time.
    pub(super) fn few(&self, threads: i32) -> i32 {
        threads.min(self.descriptors / 48).max(1)
    }

    /// Whether the device may be opened once more for another thread.
    pub(super) fn affords_clone(&self) -> bool {
        i32::try_from(self.threads()).is_ok_and(|threads| threads < self.descriptors / 128)
    }

    /// Whether this number of descriptors can be spent on rings.
    pub(super) fn affords_rings(&self, rings: usize) -> bool {
        i32::try_from(rings).is_ok_and(|rings| rings <= self.descriptors / 8)
    }

    /// Maximum number of threads of a queue that neither wait for users nor are detached.
    pub(super) fn limit(&self, place: QueueId) -> i32 {
        let chosen = i32::try_from(self.options.max_threads).unwrap_or(i32::MAX);
        match (chosen, place, self.rings.is_empty()) {
            (0, QueueId::Device, true) => self.few(32).max(2),
            (0, QueueId::Device, false) => 4,
            (0, QueueId::Ring(_), _) => self.few(16),
            (chosen, QueueId::Device, true) => chosen.max(2),
            (chosen, _, _) => chosen.max(1),
        }
    }
}

/// Runs a call that may wait for users: a lock, a pipe, another request on the same mount.
///
/// To be used by handlers in their worker thread. It makes sure that another thread serves the queue meanwhile, and
/// that the call is interrupted when the caller of the request gets a signal or the session ends: a system call in it
/// then returns EINTR (which a retry loop, for example in the standard library, must not swallow). Fails without
/// having made the call: EINTR if the signal came before, EAGAIN if no other thread could be started or too many wait
/// for the same user. Outside of a request it only makes the call.
pub fn blocking<T>(call: impl FnOnce() -> T) -> Result<T, Errno> {
    struct Guard(Arc<SessionState>, Arc<Worker>, QueueId);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.end_blocking(&self.1, self.2);
        }
    }
    let current = CURRENT.with_borrow(Clone::clone);
    let Some((shared, worker, place)) = current.filter(|(_, worker, _)| worker.handling() && !worker.is_blocking())
    else {
        return Ok(call());
    };
    shared.start_blocking(&worker, place)?;
    let _guard = Guard(shared, worker, place);
    Ok(call())
}
