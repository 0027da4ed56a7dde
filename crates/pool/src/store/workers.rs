//! Threads that take jobs from one queue, and the processors that they run on.
//!
//! Callers: `write_queue.rs` (writing) and `compressors.rs` (compression). Invariants:
//! - The threads end with their owner, after the last job that waits.
//! - A queue grows by what room was given for before: so what is prepared for it is never in vain,
//!   and its length is bounded.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// How many processors there are for threads of a pool, 8 at most. Those of the whole process: the
/// threads that serve requests are bound to one each.
pub(crate) fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    let count = || {
        let all = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).map(|all| all.count() as usize);
        all.unwrap_or_else(|_| std::thread::available_parallelism().map_or(1, std::num::NonZero::get)).clamp(1, 8)
    };
    *PROCESSORS.get_or_init(count)
}

/// Lets the calling thread run on all processors of the process. A thread begins on those of the
/// one that starts it, and whoever serves the requests of one processor is bound to that one: what
/// is done beside him would wait for him.
pub(crate) fn unpin_thread() {
    let first = rustix::process::getpid();
    // Where it cannot, it is slower.
    let _ =
        rustix::thread::sched_getaffinity(Some(first)).and_then(|all| rustix::thread::sched_setaffinity(None, &all));
}

struct Queue<J> {
    jobs: VecDeque<J>,
    /// Rooms that are not filled yet.
    coming: usize,
    ended: bool,
}

struct Shared<J> {
    queue: Mutex<Queue<J>>,
    changed: Condvar,
}

impl<J> Shared<J> {
    fn work(&self, run: fn(J)) {
        unpin_thread();
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                run(job);
                queue = self.queue.lock();
            } else if queue.ended {
                return;
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }
}

/// Threads and their queue.
pub(super) struct Workers<J> {
    shared: Arc<Shared<J>>,
    threads: Vec<JoinHandle<()>>,
}

/// A place in the queue that is kept until it is filled or dropped.
pub(super) struct Room<'w, J>(&'w Shared<J>);

impl<J: Send + 'static> Workers<J> {
    /// Starts so many threads of this name, or as many of them as there can be.
    pub(super) fn start(name: &str, threads: usize, run: fn(J)) -> Self {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), coming: 0, ended: false });
        let shared = Arc::new(Shared { queue, changed: Condvar::new() });
        let start = |_| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(name.to_owned()).spawn(move || shared.work(run)).ok()
        };
        let threads = (0..threads).filter_map(start).collect();
        Self { shared, threads }
    }
}

impl<J> Workers<J> {
    /// How many threads there are.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// How many jobs wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.shared.queue.lock().jobs.len()
    }

    /// A place in the queue, where fewer than `most` wait.
    pub(super) fn room(&self, most: usize) -> Option<Room<'_, J>> {
        let mut queue = self.shared.queue.lock();
        if queue.jobs.len() + queue.coming >= most {
            return None;
        }
        queue.coming += 1;
        Some(Room(&self.shared))
    }

    /// Takes out those of these that no thread has begun.
    pub(super) fn take_back(&self, is_meant: impl Fn(&J) -> bool) -> Vec<J> {
        let mut queue = self.shared.queue.lock();
        let (meant, others) = std::mem::take(&mut queue.jobs).into_iter().partition::<VecDeque<J>, _>(is_meant);
        queue.jobs = others;
        meant.into()
    }
}

impl<J> Room<'_, J> {
    /// Puts a job there.
    pub(super) fn fill(self, job: J) {
        let mut queue = self.0.queue.lock();
        queue.jobs.push_back(job);
        queue.coming -= 1;
        drop(queue);
        self.0.changed.notify_one();
        // It is given up already.
        std::mem::forget(self);
    }
}

impl<J> Drop for Room<'_, J> {
    fn drop(&mut self) {
        self.0.queue.lock().coming -= 1;
    }
}

impl<J> Drop for Workers<J> {
    fn drop(&mut self) {
        self.shared.queue.lock().ended = true;
        self.shared.changed.notify_all();
        // What waits is done first.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
