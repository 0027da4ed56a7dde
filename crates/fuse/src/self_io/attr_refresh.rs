//! Updates the kernel's sizes and times of files under write-back caching, where the kernel keeps them itself and
//! ignores the values in replies. Two changes are unknown to it then: that a direct write changed the mtime (Linux
//! 6.18 notes it only for cached writes), and changes by others behind the mount. A thread of ours performs the
//! change on the mount itself (truncate, utimensat), by file handle; the front end, which knows the thread by its id,
//! replies with the file's real attributes and changes nothing.
//!
//! Fed by `ops/data.rs` (direct writes) and by the invalidation thread; stat(2) waits for it (`ops/attributes.rs`).
//! Invariants: a file with cached writes is left alone, as its dirty data is missing below; no serving thread waits
//! for longer than [`PATIENCE`].

use super::{
    attr_setter::AttrSetter,
    own_mount::{InodeKey, Names},
    times::{Times, nanoseconds},
};
use crate::writeback::written_files::Uses;
use crate::{door::Door, failure::Outcome, wire};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Attr, Caller, ChangeTime, Errno, Kind, SetAttr};
use parking_lot::Mutex;
use rustix::io::Errno as SysErrno;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    time::{Duration, Instant},
};

/// How long files are batched before the kernel's times are updated.
const GATHER: Duration = Duration::from_millis(10);
/// Maximum time for which a stat(2) waits.
const PATIENCE: Duration = Duration::from_millis(500);
/// Maximum time for which an open(2) waits; after that the kernel is updated soon after each write.
const BRIEF: Duration = Duration::from_millis(100);

/// State shared by the thread and the front end.
#[derive(Default)]
pub(crate) struct AttrRefresh {
    /// The thread that sets sizes and times on the mount.
    pub setter: AttrSetter,
    /// The thread that makes the kernel ask for attributes.
    pub asker: AttrSetter,
    queue: Mutex<Option<Sender<Job>>>,
}

/// Request to the thread.
pub(crate) enum Job {
    /// Update the file with this node id soon.
    Soon(u64),
    /// Update it now, and notify the waiter.
    Now(u64, SyncSender<()>),
    /// The kernel holds no dirty pages of this file any more: remove it from the table of files that may have some,
    /// unless it was used since.
    Leave(u64, Uses),
    /// Notify the waiter when all removals before this one are done.
    Left(SyncSender<()>),
    /// Return the paths of these files.
    Names(Vec<u64>, SyncSender<Names>),
}

impl AttrRefresh {
    /// Opens the queue; returns its end for the thread.
    pub fn open(&self) -> Receiver<Job> {
        let (sender, receiver) = channel();
        *self.queue.lock() = Some(sender);
        receiver
    }

    /// Closes the queue: the thread ends when it is empty.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Schedules an update of a file.
    pub fn soon(&self, nodeid: u64) {
        self.send(Job::Soon(nodeid));
    }

    /// Schedules the removal of a file without dirty pages. That may close the file, which takes a thread with the
    /// descriptors of the process.
    pub fn leave(&self, nodeid: u64, uses: Uses) {
        self.send(Job::Leave(nodeid, uses));
    }

    /// Notifies the waiter when all removals scheduled before are done.
    pub fn left(&self, waiting: SyncSender<()>) {
        self.send(Job::Left(waiting));
    }

    /// Returns paths of files below the root, for a thread without the descriptors of the process; empty where that
    /// takes too long.
    pub fn names(&self, files: Vec<u64>) -> Names {
        let (done, waiting) = sync_channel(1);
        if self.send(Job::Names(files, done)) {
            waiting.recv_timeout(PATIENCE).unwrap_or_default()
        } else {
            Names::new()
        }
    }

    fn send(&self, job: Job) -> bool {
        self.queue.lock().as_ref().is_some_and(|queue| queue.send(job).is_ok())
    }

    /// Has a file updated and waits for it.
    fn now(&self, nodeid: u64) {
        let (done, waiting) = sync_channel(1);
        if self.send(Job::Now(nodeid, done)) && waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tracing::debug!(nodeid, "the kernel could not be told of a file's times yet");
        }
    }
}

impl Door {
    /// Whether attributes of a file must not be cached: it is being written to directly, or the kernel does not know
    /// of a write yet.
    pub(crate) fn times_move(&self, nodeid: u64) -> bool {
        let Some(times) = self.write_times(nodeid) else { return false };
        let move_on = times.writers.load(Ordering::Acquire) > 0 || times.is_stale();
        times.short.store(move_on, Ordering::Release);
        move_on
    }

    /// Updates the kernel before these attributes of a file are returned, where its mtime is different.
    pub(crate) fn true_times(&self, nodeid: u64, attr: &Attr) -> Outcome {
        let Some(times) = self.write_times(nodeid).filter(|times| times.is_stale()) else { return Ok(()) };
        if times.fits(attr, self.is_exact()) {
            return Ok(());
        }
        Ok(fusewire::blocking(|| self.self_io.attr_refresh.now(nodeid))?)
    }

    /// Ends an open file for direct writes.
    pub(crate) fn writer_gone(&self, nodeid: u64, times: &Times) {
        if times.writers.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let writes = times.writes.load(Ordering::Acquire);
        if times.is_stale()
            && let Some((node, file)) = self.inodes.node_and_file(nodeid)
            && self
                .layer
                .getattr(&Caller::ROOT, &node, file.as_deref())
                .is_ok_and(|attr| times.fits(&attr, self.is_exact()))
        {
            times.heard(writes);
        }
        self.forget_times(nodeid);
    }

    /// Whether layers store exactly the times that the kernel shows.
    fn is_exact(&self) -> bool {
        self.writeback.is_patient()
    }

    /// Makes the kernel ask for a file's attributes, and expires them, when it is opened for direct writes and the
    /// kernel may have them cached for long. Otherwise the kernel would answer a stat for the mtime alone from its
    /// cache.
    pub(crate) fn doubt(&self, inode: InodeKey, times: &Times) {
        if !self.is_exact() || times.short.swap(true, Ordering::AcqRel) {
            return;
        }
        let asked = fusewire::blocking(|| self.self_io.attr_refresh.asker.ask(self.writeback.place(), inode, BRIEF));
        if !matches!(asked, Ok(Ok(()))) {
            tracing::debug!(?asked, inode.nodeid, "the kernel could not be made to ask for a file's times");
            times.short.store(false, Ordering::Release);
        }
    }

    /// Answers SETATTR of the thread: replies with the file's attributes, and changes nothing but the ctime, which
    /// the kernel shows from now on.
    pub(crate) fn refresh_setattr(&self, header: &Header, told: &abi::SetattrIn, reply: &mut Reply<'_>) -> Outcome {
        if self.writeback.caches_writes(header.nodeid) {
            return Err(Errno::EBUSY.into());
        }
        let (node, file) = self.node_and_file(header.nodeid)?;
        let mut attr = self.layer.getattr(&Caller::ROOT, &node, file.as_deref())?;
        let ctime = wire::change_time(told);
        if let ChangeTime::To(time) = ctime
            && self.is_exact()
            && nanoseconds(time) > nanoseconds(attr.ctime)
        {
            attr =
                self.layer.setattr(&Caller::ROOT, &node, file.as_deref(), &SetAttr { ctime, ..SetAttr::default() })?;
        }
        Ok(reply.attr(&wire::attr_out(&self.with_sector(header.nodeid, &attr), Duration::ZERO))?)
    }

    /// Returns the write times of an inode that is written to directly.
    pub(crate) fn write_times(&self, nodeid: u64) -> Option<Arc<Times>> {
        self.inodes
            .with_any(nodeid, |record| record.open_state_if_any().and_then(|state| state.times.clone()))
            .flatten()
    }

    /// Frees the write times where the file is no longer written to and the kernel has its mtime.
    fn forget_times(&self, nodeid: u64) {
        self.inodes.with(nodeid, |record| {
            if let Some(state) = record.open_state_if_any()
                && state.times.as_ref().is_some_and(|times| times.is_over())
            {
                state.times = None;
            }
            record.tidy();
        });
    }
}

/// Body of the thread.
#[expect(clippy::disallowed_methods, reason = "files are gathered for a moment")]
pub(crate) fn run(jobs: &Receiver<Job>, door: &Door) {
    let mut gathered = BTreeSet::new();
    let mut due = None;
    loop {
        let next = match due {
            None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => jobs.recv_timeout(Instant::saturating_duration_since(&due, Instant::now())),
        };
        match next {
            Ok(Job::Now(nodeid, done)) => {
                told(door, nodeid);
                // The waiter may have timed out.
                let _ = done.try_send(());
            }
            Ok(Job::Soon(nodeid)) => {
                gathered.insert(nodeid);
                due = due.or_else(|| Some(Instant::now() + GATHER));
            }
            Ok(Job::Leave(nodeid, uses)) => {
                if door.writeback.leave_unused(nodeid, uses) {
                    door.changed_meanwhile(nodeid);
                }
            }
            Ok(Job::Names(files, done)) => {
                // The waiter may have timed out.
                let _ = done.try_send(door.names(files));
            }
            Ok(Job::Left(waiting)) => {
                let _ = waiting.try_send(());
            }
            Err(RecvTimeoutError::Timeout) => {
                due = None;
                std::mem::take(&mut gathered).into_iter().for_each(|nodeid| told(door, nodeid));
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    door.self_io.attr_refresh.setter.close();
    door.self_io.attr_refresh.asker.close();
}

fn told(door: &Door, nodeid: u64) {
    match tell(door, nodeid) {
        Ok(()) => {}
        // Not in the kernel's memory any more, or removed below.
        Err(SysErrno::STALE | SysErrno::NOENT) => tracing::trace!(nodeid, "nobody to be told of a file"),
        Err(error) => tracing::debug!(%error, nodeid, "the kernel could not be told of a file's size and times"),
    }
    door.forget_times(nodeid);
}

/// Sets the kernel's size and mtime to those of the file.
fn tell(door: &Door, nodeid: u64) -> Result<(), SysErrno> {
    let times = door.write_times(nodeid);
    // A write that comes after this triggers another update.
    let writes = times.as_ref().map_or(0, |times| {
        times.asked.store(false, Ordering::Release);
        times.writes.load(Ordering::Acquire)
    });
    if door.writeback.miss(nodeid) {
        return Ok(());
    }
    let Some((node, file)) = door.inodes.node_and_file(nodeid) else { return Ok(()) };
    let attr = door
        .layer
        .getattr(&Caller::ROOT, &node, file.as_deref())
        .map_err(|error| SysErrno::from_raw_os_error(error.raw()))?;
    if attr.kind == Kind::File {
        door.self_io.attr_refresh.setter.set(door.writeback.place(), door.key(nodeid, &attr), attr.size, attr.mtime)?;
    }
    if let Some(times) = times {
        times.set(attr.mtime);
        times.heard(writes);
    }
    Ok(())
}
