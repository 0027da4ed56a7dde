//! Where writes are collected, the kernel keeps sizes and times of regular files itself and
//! believes no answer about them. Two things it does not know then: that a direct write changed the
//! time of modification (Linux 6.18 notes it only for writes that it collects), and what others
//! changed behind the mount. A thread of ours tells it by performing the change on the mount itself
//! (truncate, utimensat), by file handle; the door, which knows the thread by its id, answers with
//! what the file has and changes nothing.
//!
//! Fed by `ops/data.rs` (direct writes) and by the invalidation thread, waited for by stat(2)
//! (`ops/attributes.rs`). Invariants: a file with collected writes is left alone, as what is held
//! back is missing below; nobody who serves requests waits for longer than [`PATIENCE`].

use super::attr_setter::AttrSetter;
use crate::{door::Door, failure::Outcome, open_files::OpenState, wire};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Attr, Caller, ChangeTime, Errno, Kind, SetAttr, Time};
use parking_lot::Mutex;
use rustix::io::Errno as SysErrno;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    time::{Duration, Instant},
};

/// For how long files are gathered before the kernel is told of their times.
const GATHER: Duration = Duration::from_millis(10);
/// The longest that a stat(2) waits.
const PATIENCE: Duration = Duration::from_millis(500);
/// The longest that an open(2) waits; after that the kernel is told of writes soon after they were
/// made.
const BRIEF: Duration = Duration::from_millis(100);
/// Times of modification that are closer than this are as good as equal, nanoseconds: native ones
/// have the granularity of a clock tick.
const CLOSE: i64 = 10_000_000;

/// What the kernel believes of an inode that is written to directly.
pub(crate) struct Times {
    /// The time of modification that it has, nanoseconds since 1970.
    kernel: AtomicI64,
    /// Direct writes, by number.
    writes: AtomicU64,
    /// Of these, the last one that the kernel has heard of.
    told: AtomicU64,
    /// The thread has been asked to tell the kernel.
    asked: AtomicBool,
    /// It does not believe for long: the attributes that it has are valid no more.
    short: AtomicBool,
    /// Files open for direct writes.
    writers: AtomicUsize,
}

/// The state between the thread and the door.
#[derive(Default)]
pub(crate) struct AttrRefresh {
    /// The thread that acts on the mount.
    pub setter: AttrSetter,
    /// The one that has the kernel ask.
    pub asker: AttrSetter,
    queue: Mutex<Option<Sender<Job>>>,
}

/// What the thread is asked for.
pub(crate) enum Job {
    /// The file with this node id, soon.
    Soon(u64),
    /// At once; whoever waits is told when it is done.
    Now(u64, SyncSender<()>),
}

impl Times {
    /// Entered for an inode that the kernel has with these attributes; `short` where it was told
    /// that they are valid for no time.
    fn new(attr: &Attr, short: bool) -> Times {
        Times {
            kernel: AtomicI64::new(nanoseconds(attr.mtime)),
            writes: AtomicU64::new(0),
            told: AtomicU64::new(0),
            asked: AtomicBool::new(false),
            short: AtomicBool::new(short),
            writers: AtomicUsize::new(0),
        }
    }

    /// Whether the kernel's time is as good as this one, or just this one where it has to be
    /// `exact`.
    fn fits(&self, attr: &Attr, exact: bool) -> bool {
        let most = if exact { 0 } else { CLOSE.unsigned_abs() };
        nanoseconds(attr.mtime).abs_diff(self.kernel.load(Ordering::Acquire)) <= most
    }

    /// A direct write is about to be made; whether the kernel is to be told.
    pub fn written(&self) -> bool {
        self.writes.fetch_add(1, Ordering::AcqRel);
        // Where the kernel's answers are short, a stat(2) asks and waits.
        !self.short.load(Ordering::Acquire) && !self.asked.swap(true, Ordering::AcqRel)
    }

    /// Whether there are writes that the kernel has not heard of.
    fn is_stale(&self) -> bool {
        self.told.load(Ordering::Acquire) < self.writes.load(Ordering::Acquire)
    }

    /// Whether nothing is left to be done: no writers, and what the thread was asked for is done.
    fn is_over(&self) -> bool {
        self.writers.load(Ordering::Acquire) == 0 && !self.asked.load(Ordering::Acquire) && !self.is_stale()
    }

    /// The kernel has heard of the writes up to this one.
    fn heard(&self, writes: u64) {
        self.told.fetch_max(writes, Ordering::AcqRel);
    }

    /// The kernel has this time from now on.
    fn set(&self, mtime: Time) {
        self.kernel.store(nanoseconds(mtime), Ordering::Release);
    }

    /// The kernel has told us this time, or set it for somebody: it has it, and so has the file.
    pub fn agreed(&self, mtime: Time) {
        let writes = self.writes.load(Ordering::Acquire);
        self.set(mtime);
        self.heard(writes);
    }

    /// Whether this is the time that the kernel has from before a direct write: it must not go to
    /// the file.
    pub fn outdated(&self, mtime: Time) -> bool {
        self.is_stale() && self.kernel.load(Ordering::Acquire) == nanoseconds(mtime)
    }
}

/// Counts one more file open for direct writes.
pub(crate) fn one_more(times: &Arc<Times>) -> Arc<Times> {
    times.writers.fetch_add(1, Ordering::AcqRel);
    Arc::clone(times)
}

/// The same where it may be the first, of an inode that the kernel has with these attributes. Under
/// the inode's lock.
pub(crate) fn begin(state: &mut OpenState, attr: &Attr, created: bool) -> Arc<Times> {
    one_more(state.times.get_or_insert_with(|| Arc::new(Times::new(attr, created))))
}

fn nanoseconds(time: Time) -> i64 {
    time.sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.nsec))
}

impl AttrRefresh {
    /// Opens the queue; its end goes to the thread.
    pub fn open(&self) -> Receiver<Job> {
        let (sender, receiver) = channel();
        *self.queue.lock() = Some(sender);
        receiver
    }

    /// Closes the queue: the thread ends when it is empty.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Has the kernel told of a file soon.
    pub fn soon(&self, nodeid: u64) {
        self.send(Job::Soon(nodeid));
    }

    fn send(&self, job: Job) -> bool {
        self.queue.lock().as_ref().is_some_and(|queue| queue.send(job).is_ok())
    }

    /// Has the kernel told of a file and waits for it.
    fn now(&self, nodeid: u64) {
        let (done, waiting) = sync_channel(1);
        if self.send(Job::Now(nodeid, done)) && waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tracing::debug!(nodeid, "the kernel could not be told of a file's times yet");
        }
    }
}

impl Door {
    /// Whether answers about a file must not be kept: it is written to directly, or the kernel has
    /// not heard of a write yet.
    pub(crate) fn times_move(&self, nodeid: u64) -> bool {
        let Some(times) = self.write_times(nodeid) else { return false };
        let move_on = times.writers.load(Ordering::Acquire) > 0 || times.is_stale();
        times.short.store(move_on, Ordering::Release);
        move_on
    }

    /// Somebody asks for the attributes of a file, which are these: tells the kernel first where it
    /// has another time of modification.
    pub(crate) fn true_times(&self, nodeid: u64, attr: &Attr) -> Outcome {
        let Some(times) = self.write_times(nodeid).filter(|times| times.is_stale()) else { return Ok(()) };
        if times.fits(attr, self.is_exact()) {
            return Ok(());
        }
        Ok(fusewire::blocking(|| self.self_io.attr_refresh.now(nodeid))?)
    }

    /// A file that was open for direct writes has been closed.
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

    /// Whether layers store the very times that the kernel shows.
    fn is_exact(&self) -> bool {
        self.writeback.is_patient()
    }

    /// A file is opened for direct writes: where the kernel may take its attributes for valid for
    /// long, it is made to ask for them, and told that they are not. Otherwise it would answer a
    /// question for the time of modification alone from what it has.
    pub(crate) fn doubt(&self, nodeid: u64, times: &Times) {
        if !self.is_exact() || times.short.swap(true, Ordering::AcqRel) {
            return;
        }
        let asked = fusewire::blocking(|| self.self_io.attr_refresh.asker.ask(self.writeback.place(), nodeid, BRIEF));
        if !matches!(asked, Ok(Ok(()))) {
            tracing::debug!(?asked, nodeid, "the kernel could not be made to ask for a file's times");
            times.short.store(false, Ordering::Release);
        }
    }

    /// A request of the thread: what the file has is answered, and nothing changed but the time of
    /// change, which the kernel shows from now on.
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
        Ok(reply.attr(&wire::attr_out(&attr, Duration::ZERO))?)
    }

    /// The state of an inode that is written to directly.
    pub(crate) fn write_times(&self, nodeid: u64) -> Option<Arc<Times>> {
        self.inodes
            .with_any(nodeid, |record| record.open_state_if_any().and_then(|state| state.times.clone()))
            .flatten()
    }

    /// Gives the state back where nothing is written to the file any more and the kernel knows its
    /// time.
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

/// The body of the thread.
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
                // Whoever waited may have lost patience.
                let _ = done.try_send(());
            }
            Ok(Job::Soon(nodeid)) => {
                gathered.insert(nodeid);
                due = due.or_else(|| Some(Instant::now() + GATHER));
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
        // Not in the kernel's memory any more, or gone below.
        Err(SysErrno::STALE | SysErrno::NOENT) => tracing::trace!(nodeid, "nobody to be told of a file"),
        Err(error) => tracing::debug!(%error, nodeid, "the kernel could not be told of a file's size and times"),
    }
    door.forget_times(nodeid);
}

/// Makes the kernel's size and time of modification those of the file.
fn tell(door: &Door, nodeid: u64) -> Result<(), SysErrno> {
    let times = door.write_times(nodeid);
    // Of a write that comes after this, the kernel is told again.
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
        door.self_io.attr_refresh.setter.set(door.writeback.place(), nodeid, attr.size, attr.mtime)?;
    }
    if let Some(times) = times {
        times.set(attr.mtime);
        times.heard(writes);
    }
    Ok(())
}
