//! Invalidates the kernel's caches after changes below: one thread that turns [`Invalidation`]s of the layer into
//! notifications.
//!
//! Started by `mount.rs`; fed by the layer's watcher and by `Mount::invalidate_everything`. Rules:
//! * notifications come from this thread and those of `notices.rs`, never from one that serves requests: the kernel
//!   takes the directory's lock for them, which the process whose request is being served may hold;
//! * "not known" (ENOENT) is a normal answer;
//! * a name that does not exist needs one notification: lookups and listings hold the directory's lock until their
//!   reply has been processed. Attributes, content, listings, and dentries that the kernel only has to revalidate are
//!   invalidated once more, after every request that was in flight has been answered and its reply has had
//!   [`DIGESTION`] to reach the caller: such a reply could put old attributes into an inode that the kernel did not
//!   have yet.

mod resting;

use crate::inodes::Inodes;
use nacre_vfs::{FileId, Invalidation, Node};
use parking_lot::Mutex;
use resting::Resting;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender},
    },
    time::{Duration, Instant},
};

/// Maximum time from sending a reply until it is in the caller's caches.
const DIGESTION: Duration = Duration::from_millis(10);
/// How long files that were written to and closed are batched before their attributes are invalidated.
const COLLECTED: Duration = Duration::from_millis(50);
/// Maximum number of changes in one batch.
const BATCH: usize = 4096;
/// Number of files waiting for their second notification above which all files are notified instead.
const BACKLOG: usize = 65_536;

/// The kernel's caches; a trait so that tests can inspect the notifications. The implementation handles errors: none
/// of them may stop the thread.
pub(crate) trait CacheControl: Send + 'static {
    /// A point in time: see [`CacheControl::passed`].
    type Moment;
    /// Returns the current point in time.
    fn now(&self) -> Self::Moment;
    /// Whether all requests that were in flight at that point have been answered.
    fn passed(&self, moment: &mut Self::Moment) -> bool;
    /// Invalidates the attributes and ACLs of an inode, and its pages (of a directory: its cached listing) if
    /// `pages`.
    fn inode(&self, nodeid: u64, pages: bool);
    /// Invalidates a name of a directory. Returns whether a second notification is needed: a dentry of an existing
    /// file is only expired, because something may be mounted on it, and the reply of a request in flight could make
    /// it valid again.
    fn entry(&self, parent: u64, name: &[u8]) -> bool;
    /// Drops the dentry of a name, even if the file exists.
    fn forget(&self, parent: u64, name: &[u8]);
    /// Waits until all invalidations before this call have been delivered, except those that wait for a lock which a
    /// user keeps. Returns when it has to be called again, even without other invalidations.
    fn finish(&self) -> Option<Instant>;
    /// Invalidates all names.
    fn all_entries(&self);
    /// Invalidates all names a second time, if that has to be done one by one.
    fn all_entries_again(&self);
    /// Whether the layer checks permissions, at lookup, and not the kernel.
    fn layer_checks(&self) -> bool;
    /// Closes the kept open file of a file that changed below.
    fn release_kept(&self, nodeid: u64);
    /// Closes the kept open files of all files: some name was removed below, and perhaps the last one of a file.
    fn release_all_kept(&self);
    /// Notifies inotify watchers inside the mount of changes of files and names. Returns whether it also takes over
    /// the invalidation of the names, after the watchers have been notified.
    fn tell(&self, files: &[(u64, bool)], names: &[(u64, &[u8])]) -> bool;
    /// Returns unused memory to the system.
    fn trim(&self);
    /// Lets the layer stop watching an idle mount: see `Layer::rest`.
    fn rest(&self, known: Option<&[Node]>) -> bool;
}

/// Counters of the thread.
#[derive(Default)]
pub(crate) struct InvalidationCounts {
    /// Changes of files and names that the kernel knew and was notified of. (A watch of a whole file system reports
    /// many others.)
    pub told: AtomicU64,
    /// Number of times when anything may have changed: a watch overflowed, or rules were reloaded.
    pub everything: AtomicU64,
}

/// Number of forgotten files after which unused memory is returned.
const TRIM_EVERY: u64 = 65_536;

/// The handlers' channel to the thread.
pub(crate) struct InvalidationFeed {
    changes: Mutex<Sender<Invalidation>>,
    written: Arc<Mutex<Vec<u64>>>,
    trim: Arc<AtomicBool>,
    forgotten: AtomicU64,
}

impl InvalidationFeed {
    /// `changes` leads to the thread.
    pub fn new(changes: Sender<Invalidation>) -> InvalidationFeed {
        InvalidationFeed {
            changes: Mutex::new(changes),
            written: Arc::default(),
            trim: Arc::default(),
            forgotten: AtomicU64::new(0),
        }
    }

    /// Sends a change. The thread is gone only when the mount is.
    pub fn send(&self, change: Invalidation) {
        if self.changes.lock().send(change).is_err() {
            tracing::debug!("a change came after the end of the mount");
        }
    }

    /// Schedules the invalidation of a file's attributes: it was written to in passthrough and closed.
    pub fn written(&self, nodeid: u64) {
        let first = {
            let mut written = self.written.lock();
            written.push(nodeid);
            written.len() == 1
        };
        if first {
            self.send(wake());
        }
    }

    /// Counts a file that the kernel has forgotten; after very many, memory is returned.
    pub fn forgotten(&self) {
        if self.forgotten.fetch_add(1, Ordering::Relaxed) % TRIM_EVERY == TRIM_EVERY - 1 {
            self.trim.store(true, Ordering::Release);
            self.send(wake());
        }
    }

    /// Creates the thread's shared state.
    pub fn state(&self, inodes: &Arc<Inodes>) -> InvalidationState {
        InvalidationState {
            inodes: Arc::clone(inodes),
            counts: Arc::default(),
            stop: Arc::default(),
            trim: Arc::clone(&self.trim),
            written: Arc::clone(&self.written),
            marks: Marks::default(),
        }
    }
}

/// State that the thread shares with the mount.
pub(crate) struct InvalidationState {
    /// Files and their node ids.
    pub inodes: Arc<Inodes>,
    /// Counters.
    pub counts: Arc<InvalidationCounts>,
    /// Set before the thread is woken up for the last time.
    pub stop: Arc<AtomicBool>,
    /// Set before the thread is woken up to return memory.
    pub trim: Arc<AtomicBool>,
    /// Node ids of files written to in passthrough and closed; the thread is woken up for the first one.
    pub written: Arc<Mutex<Vec<u64>>>,
    /// Waiters, in the order of the [`mark`]s sent.
    pub marks: Marks,
}

/// Waiters for the delivery of all changes sent before their mark.
pub(crate) type Marks = Arc<Mutex<VecDeque<SyncSender<()>>>>;

/// A change without a file, which wakes the thread up.
pub(crate) fn wake() -> Invalidation {
    Invalidation::Attributes { id: WAKE }
}

const WAKE: FileId = FileId { fs: u64::MAX, ino: 0, generation: u64::MAX };

/// A change without a file: the first waiter is notified when everything sent before it has been delivered.
pub(crate) fn mark() -> Invalidation {
    Invalidation::Attributes { id: MARK }
}

const MARK: FileId = FileId { fs: u64::MAX, ino: 1, generation: u64::MAX };

/// Changes combined so that each file is notified once.
#[derive(Default)]
struct Batch {
    everything: bool,
    all_names: bool,
    names: BTreeMap<FileId, BTreeSet<Box<[u8]>>>,
    /// Names whose dentries are dropped.
    forgotten: BTreeSet<(FileId, Box<[u8]>)>,
    /// Files; true where the content changed, too.
    files: BTreeMap<FileId, bool>,
    /// Files whose owner, mode or ACL may have changed.
    attributes: BTreeSet<FileId>,
    /// Number of waiters to be notified after delivery.
    marks: usize,
    /// Number of changes in the batch, including those of files that the kernel cannot know.
    heard: u64,
}

impl Batch {
    fn add(&mut self, change: Invalidation) {
        match change {
            Invalidation::Entry { parent, name } => {
                self.names.entry(parent).or_default().insert(name);
                self.files.insert(parent, true);
            }
            Invalidation::Forget { parent, name } => {
                self.forgotten.insert((parent, name));
                self.files.insert(parent, true);
            }
            Invalidation::Attributes { id } if id == WAKE => {}
            Invalidation::Attributes { id } if id == MARK => self.marks += 1,
            Invalidation::Attributes { id } => {
                self.files.entry(id).or_insert(false);
                self.attributes.insert(id);
            }
            Invalidation::Content { id } => {
                self.files.insert(id, true);
            }
            Invalidation::Names => self.all_names = true,
            Invalidation::Everything => self.everything = true,
        }
    }
}

/// A second notification, before its time.
struct Repeat<M> {
    /// The requests in flight at that point must be answered first.
    moment: M,
    /// Set once they are: the time from which the last reply counts as processed.
    due: Option<Instant>,
    everything: bool,
    all_names: bool,
    files: BTreeMap<FileId, bool>,
    /// Names, by the node ids of their directories.
    names: Vec<(u64, Box<[u8]>)>,
}

/// Body of the thread: ends when `shared.stop` is set or all senders are gone.
pub(crate) fn run<C: CacheControl>(changes: &Receiver<Invalidation>, control: &C, shared: &InvalidationState) {
    let mut repeats: VecDeque<Repeat<C::Moment>> = VecDeque::new();
    let mut collected: Option<Instant> = None;
    let mut again: Option<Instant> = None;
    let mut resting = Resting::default();
    loop {
        let first = match next(changes, &repeats, [collected, again]) {
            Ok(change) => Some(change),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        if shared.trim.swap(false, Ordering::AcqRel) {
            control.trim();
        }
        if let Some(first) = first {
            let batch = collect(first, changes);
            let names = deliver(&batch, control, shared);
            control.finish();
            for waiting in std::iter::from_fn(|| shared.marks.lock().pop_front()).take(batch.marks) {
                // The waiter may have timed out.
                let _ = waiting.try_send(());
            }
            resting.heard(batch.heard, control, &shared.inodes);
            enqueue(&mut repeats, batch, names, control);
        }
        repeat_due(&mut repeats, control, shared);
        collected = written(collected, control, shared);
        again = control.finish();
    }
}

/// Invalidates the attributes of files that were written to; returns when to do so next.
#[expect(clippy::disallowed_methods, reason = "attributes are taken back after a while")]
fn written(due: Option<Instant>, control: &impl CacheControl, shared: &InvalidationState) -> Option<Instant> {
    match due {
        Some(due) if due > Instant::now() => Some(due),
        Some(_) => {
            let mut files = std::mem::take(&mut *shared.written.lock());
            files.sort_unstable();
            files.dedup();
            // Many of the files have been removed by now.
            files.retain(|&nodeid| shared.inodes.node(nodeid).is_some());
            files.iter().for_each(|&nodeid| control.inode(nodeid, false));
            None
        }
        None => (!shared.written.lock().is_empty()).then(|| Instant::now() + COLLECTED),
    }
}

#[expect(clippy::disallowed_methods, reason = "the end of a wait for a condition")]
fn next<M>(
    changes: &Receiver<Invalidation>,
    repeats: &VecDeque<Repeat<M>>,
    others: [Option<Instant>; 2],
) -> Result<Invalidation, RecvTimeoutError> {
    let now = Instant::now();
    // Requests that are still in flight are polled at this interval.
    let repeat = repeats.front().map(|repeat| repeat.due.unwrap_or(now + DIGESTION));
    match repeat.into_iter().chain(others.into_iter().flatten()).min() {
        None => changes.recv().map_err(|_| RecvTimeoutError::Disconnected),
        Some(due) => changes.recv_timeout(due.saturating_duration_since(now)),
    }
}

fn collect(first: Invalidation, changes: &Receiver<Invalidation>) -> Batch {
    let mut batch = Batch::default();
    for change in std::iter::once(first).chain(changes.try_iter().take(BATCH)) {
        batch.heard += u64::from(change != wake() && change != mark());
        batch.add(change);
    }
    batch
}

/// Sends the notifications; returns the names that need a second one.
fn deliver(batch: &Batch, control: &impl CacheControl, shared: &InvalidationState) -> Vec<(u64, Box<[u8]>)> {
    for (parent, name) in &batch.forgotten {
        if let Some(parent) = shared.inodes.find(parent) {
            control.release_all_kept();
            control.forget(parent, name);
        }
    }
    if batch.everything {
        shared.counts.everything.fetch_add(1, Ordering::Relaxed);
        control.all_entries();
        all_inodes(control, shared);
        return Vec::new();
    }
    deliver_files(&batch.files, control, shared);
    let is_directory = |id: &FileId| shared.inodes.find(id).is_some_and(|it| shared.inodes.is_directory(it));
    // The search permission of a directory may have changed, which has an effect when its names are looked up.
    if batch.all_names || control.layer_checks() && batch.attributes.iter().any(is_directory) {
        control.all_entries();
    }
    let found = batch.names.iter().filter_map(|(parent, names)| Some((shared.inodes.find(parent)?, names)));
    let names: Vec<(u64, &[u8])> =
        found.flat_map(|(nodeid, names)| names.iter().map(move |name| (nodeid, &**name))).collect();
    if !names.is_empty() {
        // One of them may have been the last name of a kept file, which would occupy its space. Names outside of the
        // mount's files (a whole file system may be watched) are not among them.
        control.release_all_kept();
    }
    let changed = batch.files.iter().filter(|(id, _)| !batch.names.contains_key(id));
    let mut files = Vec::new();
    for (id, &content) in changed {
        let Some(nodeid) = shared.inodes.find(id) else { continue };
        files.push((nodeid, content));
        if content && batch.attributes.contains(id) {
            files.push((nodeid, false));
        }
    }
    shared.counts.told.fetch_add((names.len() + files.len()) as u64, Ordering::Relaxed);
    if control.tell(&files, &names) {
        return Vec::new();
    }
    let again = names.into_iter().filter(|(parent, name)| control.entry(*parent, name));
    again.map(|(parent, name)| (parent, Box::from(name))).collect()
}

fn deliver_files(files: &BTreeMap<FileId, bool>, control: &impl CacheControl, shared: &InvalidationState) {
    for (id, &pages) in files {
        if let Some(nodeid) = shared.inodes.find(id) {
            control.release_kept(nodeid);
            control.inode(nodeid, pages);
        }
    }
}

fn all_inodes(control: &impl CacheControl, shared: &InvalidationState) {
    control.release_all_kept();
    shared.inodes.for_each(|nodeid| control.inode(nodeid, true));
}

fn enqueue<C: CacheControl>(
    repeats: &mut VecDeque<Repeat<C::Moment>>,
    batch: Batch,
    names: Vec<(u64, Box<[u8]>)>,
    control: &C,
) {
    if batch.files.is_empty() && !batch.everything && !batch.all_names {
        return;
    }
    let waiting: usize = repeats.iter().map(|repeat| repeat.files.len() + repeat.names.len()).sum();
    let everything = batch.everything || waiting > BACKLOG;
    let all_names = batch.all_names || everything;
    let (mut files, mut names) = (batch.files, names);
    if everything {
        // Names are few compared with files.
        names.extend(repeats.drain(..).flat_map(|repeat| repeat.names));
        files = BTreeMap::new();
    }
    repeats.push_back(Repeat { moment: control.now(), due: None, everything, all_names, files, names });
}

#[expect(clippy::disallowed_methods, reason = "what was told is told again after a while")]
fn repeat_due<C: CacheControl>(repeats: &mut VecDeque<Repeat<C::Moment>>, control: &C, shared: &InvalidationState) {
    let now = Instant::now();
    for repeat in repeats.iter_mut().filter(|repeat| repeat.due.is_none()) {
        if control.passed(&mut repeat.moment) {
            repeat.due = Some(now + DIGESTION);
        }
    }
    while repeats.front().is_some_and(|repeat| repeat.due.is_some_and(|due| due <= now)) {
        match repeats.pop_front() {
            Some(repeat) => {
                if repeat.all_names {
                    control.all_entries_again();
                }
                if repeat.everything {
                    all_inodes(control, shared);
                }
                deliver_files(&repeat.files, control, shared);
                for (parent, name) in &repeat.names {
                    let _ = control.entry(*parent, name);
                }
            }
            None => return,
        }
    }
}

#[cfg(test)]
#[path = "invalidate_tests.rs"]
mod tests;
