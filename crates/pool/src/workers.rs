//! Thread pools with one bounded queue each, the processors for them, and threads for single pieces of work.
//!
//! Callers: the store's `write_queue.rs`, `compressors.rs`, `streaming.rs`, and `backend` (parallel writes and syncs,
//! readahead). Invariants:
//! - A thread that cannot be started is no failure: the caller does its work.
//! - No thread waits for space in a queue: where it is full, the caller gets the job back.
//! - The threads end with their owner, after the last queued job.

use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::error::PoolError;

type Done = Result<(), PoolError>;

/// Number of processors for threads of a pool, 8 at most. Counted for the whole process: the threads that serve
/// requests are pinned to one each.
pub(crate) fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| nacre_sys::cpus::count().min(8))
}

/// Lets the calling thread run on all processors of the process: the thread that starts it may be pinned to one, to
/// serve its requests.
pub(crate) fn unpin_thread() {
    // A failure only makes it slower.
    let _ = nacre_sys::cpus::unpin_thread();
}

/// Starts a thread in a scope.
///
/// # Errors
/// The system has no room for another thread.
pub(crate) fn start_in<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, R>> {
    let thread = Builder::new().name("pool-parallel".to_owned());
    #[cfg(test)]
    let thread = refusal::apply(thread);
    thread.spawn_scoped(scope, work)
}

/// Runs `work` on each item, in parallel as far as threads can be started; returns the results in the items' order.
pub(crate) fn in_threads<T: Sync>(items: &[T], work: impl Fn(&T) -> Done + Sync) -> Vec<Done> {
    let Some((last, others)) = items.split_last() else { return Vec::new() };
    let (work, gone) = (&work, || Err(PoolError::Refused("a thread that used a device is gone".to_owned())));
    std::thread::scope(|scope| {
        let start = |item| start_in(scope, move || work(item)).map_err(|_| work(item));
        let begun: Vec<_> = others.iter().map(start).collect();
        let last = work(last);
        let others = begun.into_iter().map(|begun| match begun {
            Ok(thread) => thread.join().unwrap_or_else(|_| gone()),
            Err(done) => done,
        });
        others.chain([last]).collect()
    })
}

/// Refusal of threads in tests.
#[cfg(test)]
pub(crate) mod refusal {
    use std::cell::Cell;
    use std::thread::Builder;

    thread_local! {
        static REFUSED: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs `act` while the calling thread can start no others by [`super::start_in`].
    pub(crate) fn during<R>(act: impl FnOnce() -> R) -> R {
        REFUSED.set(true);
        let done = act();
        REFUSED.set(false);
        done
    }

    /// Asks for more stack than there are addresses, where threads are refused.
    pub(super) fn apply(thread: Builder) -> Builder {
        if REFUSED.get() { thread.stack_size(1 << 60) } else { thread }
    }
}

/// Calls a function when it is dropped by a panic.
pub(crate) struct OnPanic<F: Fn()>(pub(crate) F);

impl<F: Fn()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0)();
        }
    }
}

/// A thread pool and its queue.
pub(crate) struct Workers<J> {
    jobs: Option<Sender<J>>,
    waiting: Receiver<J>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static> Workers<J> {
    /// Starts this many threads with a name, or as many as possible, with a queue of at most `most` jobs.
    pub(crate) fn start(name: &str, threads: usize, most: usize, run: fn(J)) -> Self {
        let (jobs, waiting) = bounded::<J>(most);
        let start = |_| {
            let waiting = waiting.clone();
            let work = move || {
                unpin_thread();
                waiting.into_iter().for_each(run);
            };
            Builder::new().name(name.to_owned()).spawn(work).ok()
        };
        let threads = (0..threads).filter_map(start).collect();
        Self { jobs: Some(jobs), waiting, threads }
    }
}

impl<J> Workers<J> {
    /// Number of threads.
    pub(crate) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Whether the queue is full.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.is_full()
    }

    /// Number of queued jobs.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Queues a job; returns it where the queue is full, or where there are no threads.
    pub(crate) fn offer(&self, job: J) -> Result<(), J> {
        match &self.jobs {
            Some(jobs) if !self.threads.is_empty() => {
                jobs.try_send(job).map_err(crossbeam_channel::TrySendError::into_inner)
            }
            _ => Err(job),
        }
    }

    /// Takes a queued job that no thread has begun.
    pub(crate) fn take(&self) -> Option<J> {
        self.waiting.try_recv().ok()
    }
}

impl<J> Drop for Workers<J> {
    fn drop(&mut self) {
        self.jobs = None;
        // Queued jobs are finished first; a panic of a thread was noticed by the caller that waited for its job.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_be_started_is_an_error() {
        std::thread::scope(|scope| {
            assert!(refusal::during(|| start_in(scope, || ()).is_err()));
            start_in(scope, || ()).unwrap().join().unwrap();
        });
    }

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let work = |number: &u32| if *number == 3 { Err(PoolError::NoSpace) } else { Ok(()) };
        let failed = |done: &Done| done.is_err();
        for threads in [true, false] {
            let run = || in_threads(&[1, 3, 5], work);
            let done = if threads { run() } else { refusal::during(run) };
            assert_eq!(done.iter().map(failed).collect::<Vec<_>>(), [false, true, false]);
        }
        assert!(in_threads(&[], work).is_empty());
    }
}
