//! Read-ahead for listings with attributes.
//!
//! A reader that lists a large directory whose inodes are not cached by the kernel waits for each
//! inode to be loaded. While it processes the names of one answer, a thread examines those of the
//! next, so that the kernel has loaded them by then. The thread discards the results: the listing
//! itself asks again, and is never older than without the thread.
//!
//! Called by `listing.rs`, where examining entries turned out to take long. Invariants: the thread
//! makes no call that could send a request to the mount that is being served; it ends after a short
//! time without work, and with the layer. It is separate from a union's (`listing/ahead.rs` there):
//! nothing waits for the results of this thread, and it drops the oldest of too many jobs; a
//! union's merge uses the names that its thread has read.

use super::stat;
use nacre_sys::{cpus, directory};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Maximum number of queued jobs; of more, the oldest is dropped.
const WAITING_MAX: usize = 4;
/// How long the thread waits for more work.
const IDLE: Duration = Duration::from_secs(2);

/// Progress of a listing in the records of its buffer, in bytes.
pub(super) type Reached = Arc<AtomicUsize>;

struct Job {
    directory: Arc<OwnedFd>,
    records: Box<[u8]>,
    /// Offset of `records` in the buffer of the listing.
    offset: usize,
    reached: Reached,
}

#[derive(Default)]
struct AheadQueue {
    jobs: VecDeque<Job>,
    runs: bool,
    ended: bool,
}

#[derive(Default)]
struct AheadThread {
    queue: Mutex<AheadQueue>,
    wake: Condvar,
    #[cfg(test)]
    examined: AtomicUsize,
}

/// The thread, if it runs at the moment, and its queue.
#[derive(Default)]
pub(super) struct Ahead {
    thread: Arc<AheadThread>,
}

impl Ahead {
    /// Examines the records that start at `offset` of a listing's buffer in the thread, except
    /// those that the listing itself reaches first.
    pub fn examine(&self, directory: &Arc<OwnedFd>, records: &[u8], offset: usize, reached: &Reached) {
        let mut queue = self.thread.queue.lock();
        if queue.ended {
            return;
        }
        if queue.jobs.len() == WAITING_MAX {
            queue.jobs.pop_front();
        }
        queue.jobs.push_back(Job {
            directory: Arc::clone(directory),
            records: records.into(),
            offset,
            reached: Arc::clone(reached),
        });
        if queue.runs {
            self.thread.wake.notify_one();
            return;
        }
        let thread = Arc::clone(&self.thread);
        match std::thread::Builder::new()
            .name("nacre-ahead".to_owned())
            .stack_size(128 << 10)
            .spawn(move || thread.run())
        {
            Ok(_) => queue.runs = true,
            Err(error) => {
                tracing::debug!(%error, "no thread reads ahead");
                queue.jobs.clear();
            }
        }
    }

    /// Number of names examined so far.
    #[cfg(test)]
    pub fn examined(&self) -> usize {
        self.thread.examined.load(Ordering::Relaxed)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let mut queue = self.thread.queue.lock();
        queue.ended = true;
        queue.jobs.clear();
        self.thread.wake.notify_one();
    }
}

impl AheadThread {
    fn run(&self) {
        if let Err(error) = cpus::unpin_thread() {
            tracing::debug!(%error, "the thread that reads ahead stays on its maker's CPU");
        }
        while let Some(job) = self.next() {
            let mut at = 0;
            while let Some(record) = job.records.get(at..).and_then(directory::first) {
                if job.offset + at >= job.reached.load(Ordering::Relaxed) {
                    // The listing finds an error as well.
                    let _ = stat::of_name_quietly(job.directory.as_fd(), record.name);
                    #[cfg(test)]
                    self.examined.fetch_add(1, Ordering::Relaxed);
                }
                at += record.length;
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.ended || self.wake.wait_for(&mut queue, IDLE).timed_out() && queue.jobs.is_empty() {
                queue.runs = false;
                return None;
            }
        }
    }
}
