//! Queue that the workers share: directories to be opened and lists of names to be copied. It is bounded: a worker
//! that finds it full does the work itself.

use crate::pair::{Names, Pair};
use parking_lot::{Condvar, Mutex};
use std::{collections::VecDeque, sync::Arc, time::Duration};

/// Maximum number of directories in the queue.
const DIRECTORIES: usize = 1024;
/// Maximum number of lists of names in the queue.
const LISTS: usize = 256;

/// A subdirectory that has not been opened yet.
#[derive(Debug)]
pub(crate) struct Subdirectory {
    pub(crate) parent: Arc<Pair>,
    pub(crate) name: Box<[u8]>,
}

/// Entries of one directory.
#[derive(Debug)]
pub(crate) struct List {
    pub(crate) pair: Arc<Pair>,
    pub(crate) names: Names,
}

/// An item of work.
#[derive(Debug)]
pub(crate) enum Work {
    Directory(Subdirectory),
    List(List),
}

#[derive(Debug, Default)]
struct Waiting {
    directories: Vec<Subdirectory>,
    lists: VecDeque<List>,
    /// Workers that are not waiting, and so may still add work.
    active: usize,
    closed: bool,
}

/// Bounded queue of directories and lists of names.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Queue {
    /// Makes a queue for this number of workers, all of which will call [`Queue::take`], or [`Queue::leave`].
    pub(crate) fn new(workers: usize) -> Queue {
        Queue { waiting: Mutex::new(Waiting { active: workers, ..Waiting::default() }), changed: Condvar::new() }
    }

    /// Queues a directory; returns it when too many are queued.
    pub(crate) fn offer_directory(&self, directory: Subdirectory) -> Result<(), Subdirectory> {
        let mut waiting = self.waiting.lock();
        if waiting.directories.len() >= DIRECTORIES {
            return Err(directory);
        }
        waiting.directories.push(directory);
        drop(waiting);
        self.changed.notify_one();
        Ok(())
    }

    /// Queues a list of names; returns it when too many are queued.
    pub(crate) fn offer_list(&self, list: List) -> Result<(), List> {
        let mut waiting = self.waiting.lock();
        if waiting.lists.len() >= LISTS {
            return Err(list);
        }
        waiting.lists.push_back(list);
        drop(waiting);
        self.changed.notify_one();
        Ok(())
    }

    /// Returns the next item: files before directories, the deepest directories first, so that the queue stays
    /// short. `None`: everything is done, or `stopped` returns true.
    pub(crate) fn take(&self, stopped: impl Fn() -> bool) -> Option<Work> {
        let mut waiting = self.waiting.lock();
        waiting.active = waiting.active.saturating_sub(1);
        loop {
            if waiting.closed || stopped() {
                waiting.closed = true;
                self.changed.notify_all();
                return None;
            }
            let work = match waiting.lists.pop_front() {
                Some(list) => Some(Work::List(list)),
                None => waiting.directories.pop().map(Work::Directory),
            };
            if work.is_some() {
                waiting.active += 1;
                return work;
            }
            if waiting.active == 0 {
                waiting.closed = true;
                self.changed.notify_all();
                return None;
            }
            // The timeout is for `stopped`, which is not signalled here.
            self.changed.wait_for(&mut waiting, Duration::from_millis(100));
        }
    }

    /// Leaves out workers that could not be started; the caller is one of the others.
    pub(crate) fn leave(&self, workers: usize) {
        let mut waiting = self.waiting.lock();
        waiting.active = waiting.active.saturating_sub(workers);
        self.changed.notify_all();
    }

    /// Lets all workers end.
    pub(crate) fn close(&self) {
        self.waiting.lock().closed = true;
        self.changed.notify_all();
    }
}
