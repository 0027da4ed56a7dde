//! Threads that take jobs from one bounded queue, and the processors that they run on.
//!
//! Callers: the store's `write_queue.rs`, `compressors.rs`, `streaming.rs`, and `backend/objects` (requests
//! ahead of readers). Invariants:
//! - Nobody waits for room in a queue: whoever finds it full gets his job back.
//! - The threads end with their owner, after the last job that waits.

use std::sync::OnceLock;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};

/// How many processors there are for threads of a pool, 8 at most. Those of the whole process: the
/// threads that serve requests are bound to one each.
pub(crate) fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| nacre_sys::cpus::count().min(8))
}

/// Lets the calling thread run on all processors of the process: whoever starts it may be bound to
/// one, to serve its requests.
pub(crate) fn unpin_thread() {
    // Where it cannot, it is slower.
    let _ = nacre_sys::cpus::unpin_thread();
}

/// Threads and their queue.
pub(crate) struct Workers<J> {
    jobs: Option<Sender<J>>,
    waiting: Receiver<J>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static> Workers<J> {
    /// Starts so many threads of this name, or as many of them as there can be; so many jobs wait
    /// for them at most.
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
    /// How many threads there are.
    pub(crate) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Whether a job would be given back.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.is_full()
    }

    /// How many jobs wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Leaves a job to the threads; gives it back where too many wait, or where there are none.
    pub(crate) fn offer(&self, job: J) -> Result<(), J> {
        match &self.jobs {
            Some(jobs) if !self.threads.is_empty() => {
                jobs.try_send(job).map_err(crossbeam_channel::TrySendError::into_inner)
            }
            _ => Err(job),
        }
    }

    /// A job that no thread has begun.
    pub(crate) fn take(&self) -> Option<J> {
        self.waiting.try_recv().ok()
    }
}

impl<J> Drop for Workers<J> {
    fn drop(&mut self) {
        self.jobs = None;
        // What waits is done first; a panic of a thread was met by whoever waited for its job.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
