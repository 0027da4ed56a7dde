//! Requests that take long: their threads are not counted, and no single user occupies all threads.
//!
//! Any call of a handler may wait for another user: for an inode's lock held by a write(2) whose buffer is not in
//! memory, for a lease, for a server that does not answer. The number of threads is limited, so a user who causes
//! enough of these waits would stop the mount for all. So while all threads of a queue are busy, a thread watches them:
//! a worker that has handled one request for [`STUCK_AFTER`] is *detached*, that is, not counted any more, like one
//! inside [`crate::blocking`], and another thread replaces it.
//!
//! The total number of threads is limited, too. So while many are detached ([`Bounds::many`]), a user with more than
//! its share gets EAGAIN for further requests: first for those that begin an operation by a name, and for reads and
//! writes at twice the share. Requests that make data durable, end an operation, or release a lock are never refused.
//! Requests are not left waiting instead: the kernel holds locks of directories and pages for them, which other users
//! want.
//!
//! Used by the transports and by `state.rs`. Invariants: a worker's detachment ends with its request; the lock is
//! held during no system call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::time::Duration;

use parking_lot::Mutex;

use super::state::SessionState;
use super::workers::{Lack, QueueId, Worker};
use crate::abi::{INVALID_UIDGID, InHeader, opcode};

/// Time after which a request is stuck; detected after at most twice as long.
const STUCK_AFTER: Duration = Duration::from_millis(100);
/// Share of one user while many threads wait inside [`crate::blocking`].
const MOST_BLOCKED: usize = 512;

/// Numbers of detached threads from which on requests are refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// For all users together.
    pub(super) many: usize,
    /// For one user.
    pub(super) share: usize,
}

/// The detached threads.
#[derive(Debug, Default)]
pub(super) struct Stuck {
    /// A thread watches the workers.
    watched: AtomicBool,
    /// Number of detached threads.
    count: AtomicUsize,
    /// By thread id, with the user to which each is charged.
    threads: Mutex<HashMap<u32, Option<u32>>>,
}

impl Stuck {
    /// Detaches a worker's thread from now on, charged to this user, if it still handles this request.
    fn detach(&self, worker: &Worker, request: u64, user: Option<u32>) -> bool {
        // Under the lock: the worker removes the entry added here.
        let mut threads = self.threads.lock();
        if !worker.detach(request) {
            return false;
        }
        threads.insert(worker.tid, user);
        self.count.store(threads.len(), Relaxed);
        true
    }

    /// Ends a thread's detachment.
    pub(super) fn reattached(&self, tid: u32) {
        let mut threads = self.threads.lock();
        threads.remove(&tid);
        self.count.store(threads.len(), Relaxed);
    }

    /// Whether a request is refused: many threads are detached, and its user has more than a share of them.
    pub(super) fn refuses(&self, header: &InHeader, bounds: Bounds) -> bool {
        if self.count.load(Relaxed) < bounds.many {
            return false;
        }
        let most = match header.opcode {
            opcode::FSYNC
            | opcode::FSYNCDIR
            | opcode::SYNCFS
            | opcode::FLUSH
            | opcode::RELEASE
            | opcode::RELEASEDIR => {
                return false;
            }
            // Their waits are bounded by themselves: see `SessionState::has_too_many_blocked`.
            opcode::GETLK | opcode::SETLK | opcode::SETLKW | opcode::INIT | opcode::DESTROY => return false,
            opcode::READ | opcode::WRITE => 2 * bounds.share,
            _ => bounds.share,
        };
        let user = user_of(header.uid, header.pid);
        user.is_some() && count(&self.threads.lock(), user) >= most
    }
}

fn count(threads: &HashMap<u32, Option<u32>>, user: Option<u32>) -> usize {
    threads.values().filter(|other| **other == user).count()
}

/// The user to which a request is charged: its caller's user id, or the real one of a caller that is root by a
/// set-user-id program. `None` for requests without a waiting process, whose number the kernel limits.
fn user_of(uid: u32, pid: u32) -> Option<u32> {
    if pid == 0 {
        return None;
    }
    if uid != INVALID_UIDGID && uid != 0 {
        return Some(uid);
    }
    // On mounts that can be idmapped most requests have no ids. Callers that are invisible here (`hidepid`) count as
    // one user.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    // Real, effective, saved, file system.
    Some(ids.split_ascii_whitespace().next().and_then(|id| id.parse().ok()).unwrap_or(INVALID_UIDGID))
}

/// The user to which a worker's request is charged.
fn worker_user(worker: &Worker) -> Option<u32> {
    let taken = worker.taken();
    if let Some(user) = worker.user(taken) {
        return Some(user);
    }
    let caller = worker.caller();
    let user = user_of(caller.uid, caller.pid)?;
    worker.set_user(taken, user);
    Some(user)
}

impl SessionState {
    /// Returns the numbers of detached threads from which on requests are refused.
    pub(super) fn bounds(&self) -> Bounds {
        let at_least = |threads: i32, least: usize| usize::try_from(self.few(threads)).unwrap_or(0).max(least);
        Bounds { many: at_least(1024, 128), share: at_least(512, 64) }
    }

    /// Whether so many threads wait for this worker's user that none may remain for others.
    pub(super) fn has_too_many_blocked(&self, worker: &Worker) -> bool {
        let user = worker_user(worker);
        user.is_some() && {
            let is_same = |other: &&Arc<Worker>| other.is_blocking() && worker_user(other) == user;
            self.workers().iter().filter(is_same).count() > MOST_BLOCKED
        }
    }

    /// Starts watching the workers: a queue has its maximum number of threads, and all are busy.
    pub(super) fn watch(self: &Arc<Self>) {
        if self.stuck.watched.load(SeqCst) || self.stuck.watched.swap(true, SeqCst) {
            return;
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("fuse watch".to_owned())
            .stack_size(128 << 10)
            .spawn(move || watch_loop(shared));
        if let Err(error) = thread {
            self.stuck.watched.store(false, SeqCst);
            tracing::warn!(%error, "cannot start a thread to watch for requests that take long; others may wait for them");
        }
    }

    /// Detaches the workers that still handle the request of the last check, where their queue lacks threads. Returns
    /// the present requests.
    fn detach_stuck(self: &Arc<Self>, seen: &HashMap<u32, u32>) -> HashMap<u32, u32> {
        let mut marks = HashMap::new();
        let mut stuck = Vec::new();
        for worker in self.workers() {
            let Some(mark) = worker.mark() else { continue };
            marks.insert(worker.tid, mark);
            if seen.get(&worker.tid) == Some(&mark) && self.lack(worker.place()) == Lack::Room {
                stuck.push(worker);
            }
        }
        let mut places: Vec<QueueId> = stuck.iter().map(|worker| worker.place()).collect();
        places.dedup();
        for worker in &stuck {
            self.detach(worker);
        }
        for place in places {
            self.supply(place, self.lack(place));
        }
        marks
    }

    fn detach(&self, worker: &Worker) {
        let (request, user) = (worker.current(), worker_user(worker));
        let queue = self.queue(worker.place());
        // Counted before it is marked: both end with the request.
        queue.block();
        if !self.stuck.detach(worker, request, user) {
            queue.unblock();
        }
    }

    fn is_short_of_room(&self) -> bool {
        self.workers().iter().any(|worker| self.lack(worker.place()) == Lack::Room)
    }
}

#[expect(clippy::disallowed_methods, reason = "a request is stuck by the time that it takes")]
fn watch_loop(mut shared: Arc<SessionState>) {
    let mut seen = HashMap::new();
    loop {
        // The session's end waits for its workers, not for this thread.
        let waiting = Arc::downgrade(&shared);
        drop(shared);
        std::thread::sleep(STUCK_AFTER);
        let Some(again) = waiting.upgrade() else { return };
        shared = again;
        if shared.is_ending() {
            return;
        }
        seen = shared.detach_stuck(&seen);
        if !shared.is_short_of_room() {
            shared.stuck.watched.store(false, SeqCst);
            // A queue may have become short of threads while `watched` was still set.
            if !shared.is_short_of_room() || shared.stuck.watched.swap(true, SeqCst) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Pod;

    /// A request of this user by the first process of all.
    fn request(opcode: u32, uid: u32) -> InHeader {
        let mut bytes = [0; size_of::<InHeader>()];
        InHeader { len: 40, opcode, uid, pid: 1, ..InHeader::read(&bytes).unwrap() }.write(&mut bytes).unwrap();
        InHeader::read(&bytes).unwrap()
    }

    #[test]
    fn a_user_with_more_than_its_share_is_refused_while_many_are_detached() {
        let stuck = Stuck::default();
        let refuses = |opcode, uid| stuck.refuses(&request(opcode, uid), Bounds { many: 3, share: 2 });
        let detach = |tid, user| {
            let worker = Worker::new(tid, None);
            worker.begin(2, 1);
            assert!(stuck.detach(&worker, worker.current(), Some(user)) && worker.handled());
        };
        (1..=2).for_each(|tid| detach(tid, 7));
        assert!(!refuses(opcode::OPEN, 7), "nobody else is short of threads");
        (3..=4).for_each(|tid| detach(tid, 9));
        assert!(refuses(opcode::OPEN, 7) && refuses(opcode::OPEN, 9) && !refuses(opcode::OPEN, 8));
        assert!(!refuses(opcode::READ, 7), "at twice the share");
        for never in [opcode::RELEASE, opcode::FSYNC, opcode::SETLKW] {
            assert!(!refuses(never, 7));
        }
        stuck.reattached(3);
        assert!(refuses(opcode::OPEN, 7) && !refuses(opcode::OPEN, 9), "the end of another's changes nothing");
        (5..=6).for_each(|tid| detach(tid, 7));
        assert!(refuses(opcode::READ, 7));
        stuck.reattached(1);
        stuck.reattached(2);
        stuck.reattached(5);
        assert!(!refuses(opcode::OPEN, 7));
    }

    #[test]
    fn a_request_that_is_done_detaches_nobody() {
        let (stuck, worker) = (Stuck::default(), Worker::new(1, None));
        worker.begin(2, 1);
        let request = worker.current();
        worker.handled();
        worker.begin(4, 1);
        assert!(!stuck.detach(&worker, request, Some(7)) && !worker.handled());
        assert!(stuck.threads.lock().is_empty());
    }

    #[test]
    fn whose_a_request_is() {
        assert_eq!(user_of(5, 0), None);
        assert_eq!(user_of(5, 1), Some(5));
        assert_eq!(user_of(INVALID_UIDGID, 1), Some(0));
    }
}
