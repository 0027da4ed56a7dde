//! Flushes files by threads of their own, each of which may wait for an inode's lock for ever: a user holds the lock
//! of a file for as long as he likes by a write(2) from a buffer that the kernel cannot read, as one in a FUSE mount of his own that
//! does not answer.
//!
//! Called by `flush.rs` and `flush_timer.rs`. Invariants: a call ends after [`MAX_WAIT`] and a little, however many
//! files are locked; a file whose lock a thread already waits for is returned as blocked at once, except by
//! [`Wait::Admitted`]; no more than [`MAX_THREADS`] threads of a mount wait.

use super::{
    Role,
    flush::{Passed, flush_within, outcome},
    own_mount::{Entered, InodeKey, MountPlace},
};
use crate::writeback::Writeback;
use nacre_vfs::Result;
use parking_lot::Mutex;
use rustix::io::Errno as SysErrno;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    time::{Duration, Instant},
};

/// Time without a flushed file after which the remaining ones are blocked.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum time for all files of a call.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Time without a flushed file after which one more thread continues with the next file.
const NEXT_THREAD: Duration = Duration::from_millis(15);
/// Interval of the checks whether a file still has to be waited for.
const LOOK: Duration = Duration::from_millis(5);
/// Maximum number of threads.
const MAX_THREADS: usize = 64;

/// Number of threads that flush a file now, by node id.
#[derive(Default)]
pub(crate) struct FlushThreads(Mutex<HashMap<u64, usize>>);

impl FlushThreads {
    fn flushes(&self, nodeid: u64) -> bool {
        self.0.lock().contains_key(&nodeid)
    }

    fn count(&self) -> usize {
        self.0.lock().values().sum()
    }

    fn begin(&self, nodeid: u64) {
        *self.0.lock().entry(nodeid).or_default() += 1;
    }

    fn end(&self, nodeid: u64) {
        let mut threads = self.0.lock();
        if let Some(count) = threads.get_mut(&nodeid) {
            *count -= 1;
            if *count == 0 {
                threads.remove(&nodeid);
            }
        }
    }
}

/// Files by node id.
pub(super) type FilesByNode = BTreeMap<u64, InodeKey>;

/// Result of a call.
pub(super) struct Flushed {
    /// The first error of the files that are not blocked.
    pub outcome: Result<()>,
    /// Files that were flushed.
    pub clean: Vec<InodeKey>,
    /// Files whose inodes are locked. What was written to them before the call may still be dirty.
    pub blocked: Vec<InodeKey>,
    /// Something else, or nothing, is at the mount point: files may not have been flushed.
    pub unmounted: bool,
}

/// Result of one file.
enum FileFlush {
    Passed(Passed),
    /// Something else, or nothing, is at the mount point.
    Unmounted,
}

/// What a call waits for, beside the files' locks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Writes that returned before.
    Returned,
    /// Also a write(2) in progress, as long as pages of the mount arrive: it was admitted by the layer.
    Admitted,
}

impl Writeback {
    /// Flushes files as fsync(2) does, after a write(2) in progress. From time to time, `leave_out` removes files
    /// that need not be waited for any more.
    ///
    /// # Errors
    /// Where no thread can be started.
    #[expect(clippy::disallowed_methods, reason = "how long a lock is waited for")]
    pub(super) fn flush_by_threads(
        &self,
        files: Vec<InodeKey>,
        place: &MountPlace,
        wait: Wait,
        leave_out: &dyn Fn(&mut FilesByNode),
    ) -> Result<Flushed> {
        let mut flushed = Flushed { outcome: Ok(()), clean: Vec::new(), blocked: Vec::new(), unmounted: false };
        let mut pending: FilesByNode = BTreeMap::new();
        // Files whose lock an earlier thread waits for: their admitted writes are flushed when that ends.
        let (mut first, mut later) = (VecDeque::new(), Vec::new());
        for inode in files {
            match (self.flush_threads.flushes(inode.nodeid), wait) {
                (true, Wait::Returned) => {
                    flushed.blocked.push(inode);
                    continue;
                }
                (true, Wait::Admitted) => later.push(inode),
                (false, _) => first.push_back(inode),
            }
            pending.insert(inode.nodeid, inode);
        }
        let queue = Arc::new(Mutex::new(first));
        let has_room = self.flush_threads.count() < MAX_THREADS;
        let (sender, results) = channel();
        let (mut threads, mut arrivals) = (0, self.arrivals());
        let begun = Instant::now();
        let (mut last, mut started) = (begun, begun);
        while !pending.is_empty() && has_room && last.elapsed() < PATIENCE && begun.elapsed() < MAX_WAIT {
            let late = last.elapsed() >= NEXT_THREAD && started.elapsed() >= NEXT_THREAD;
            let may_start = threads == 0 || late && self.flush_threads.count() < MAX_THREADS;
            if may_start && !queue.lock().is_empty() {
                match self.flush_in_turn(&queue, place.clone(), sender.clone()) {
                    Err(error) if threads == 0 => return Err(error),
                    Err(error) => tracing::debug!(%error, "no more threads for flushing files"),
                    Ok(()) => threads += 1,
                }
                started = Instant::now();
            }
            if let Ok((inode, result)) = results.recv_timeout(LOOK) {
                last = Instant::now();
                pending.remove(&inode.nodeid);
                match result {
                    FileFlush::Passed(Ok(())) => flushed.clean.push(inode),
                    FileFlush::Passed(failed) => flushed.outcome = flushed.outcome.and(outcome(failed)),
                    FileFlush::Unmounted => {
                        flushed.unmounted = true;
                        break;
                    }
                }
                continue;
            }
            later.retain(|inode| {
                let is_flushed = self.flush_threads.flushes(inode.nodeid);
                if !is_flushed {
                    queue.lock().push_back(*inode);
                }
                is_flushed
            });
            leave_out(&mut pending);
            if self.flush_for_seek {
                // The served caller has the lock, so nobody writes to the file; it may wait for the end of this
                // flush.
                pending.retain(|nodeid, inode| {
                    let locked = self.locked.has(*nodeid);
                    if locked {
                        flushed.blocked.push(*inode);
                    }
                    !locked
                });
            }
            if wait == Wait::Admitted && self.arrivals() != arrivals {
                arrivals = self.arrivals();
                last = Instant::now();
            }
        }
        queue.lock().clear();
        flushed.blocked.extend(pending.into_values());
        Ok(flushed)
    }

    /// Starts a thread that flushes the files of the queue and sends each result, as long as the receiver lives.
    fn flush_in_turn(
        &self,
        queue: &Arc<Mutex<VecDeque<InodeKey>>>,
        place: MountPlace,
        results: Sender<(InodeKey, FileFlush)>,
    ) -> Result<()> {
        let (queue, threads) = (Arc::clone(queue), Arc::clone(&self.flush_threads));
        self.self_io.start("nacre-flush", Role::Flush, move || {
            loop {
                let Some(inode) = queue.lock().pop_front() else { break };
                threads.begin(inode.nodeid);
                // The mount is entered for one file at a time, as that keeps it from being unmounted.
                let result = match Entered::new(&place.mountpoint, place.device) {
                    Ok(mount) => FileFlush::Passed(flush_within(&mount, &place, inode)),
                    Err(SysErrno::STALE) => FileFlush::Unmounted,
                    Err(error) => FileFlush::Passed(Err(error)),
                };
                threads.end(inode.nodeid);
                if results.send((inode, result)).is_err() {
                    break;
                }
            }
            Ok(())
        })?;
        Ok(())
    }
}
