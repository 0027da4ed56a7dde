//! Read-ahead for listings with attributes.
//!
//! Who lists a large directory that the kernel has not in memory waits for each inode to be loaded.
//! While he looks at the names of one answer, a thread examines those of the next, so that the
//! kernel has them by then. What it learns is thrown away: the listing itself asks again, and is
//! never older than it would be otherwise.
//!
//! Called by `listing.rs`, where examining turned out to take long. Invariants: the thread does
//! nothing that could send a request to the mount that is being served; it ends when there was
//! nothing to do for a moment, and when the layer goes. It shares nothing with a union's
//! (`listing/ahead.rs` there): nobody waits for what this one does, and of too many jobs it drops
//! the oldest; a merge takes over what that one has read.

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

/// Listings that wait; of more at a time, the oldest is left alone.
const WAITING_MAX: usize = 4;
/// How long the thread waits for more.
const IDLE: Duration = Duration::from_secs(2);

/// How far a listing has come in the records of its buffer, in bytes.
pub(super) type Reached = Arc<AtomicUsize>;

struct Job {
    directory: Arc<OwnedFd>,
    records: Box<[u8]>,
    /// Where `records` begins in the buffer of the listing.
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

/// The thread, where there is one at the moment, and what it has to do.
#[derive(Default)]
pub(super) struct Ahead {
    thread: Arc<AheadThread>,
}

impl Ahead {
    /// Has the records that start at `offset` of a listing's buffer examined, but for those that
    /// the listing itself reaches first.
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

    /// How many names were examined so far.
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
                    // Whatever comes out is found by the listing, too.
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
