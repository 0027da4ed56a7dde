//! Thread pools with one bounded queue each, and the processors for them.
//!
//! Callers: the store's `write_queue.rs`, `compressors.rs`, `streaming.rs`, and `backend/objects` (readahead).
//! Invariants:
//! - No thread waits for space in a queue: where it is full, the caller gets the job back.
//! - The threads end with their owner, after the last queued job.

use std::sync::OnceLock;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};

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
            std::thread::Builder::new().name(name.to_owned()).spawn(work).ok()
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
