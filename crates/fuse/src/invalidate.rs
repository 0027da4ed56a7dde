//! Takes the kernel's cached answers back when something changed below: one thread that turns
//! [`Invalidation`]s of the layer into notifications.
//!
//! Started by `mount.rs`; fed by the layer's watcher and by `Mount::invalidate_everything`. Rules:
//! * notifications come from this thread alone, never from one that serves requests: the kernel
//!   takes the directory's lock for them, which the process whose request is being served may hold;
//! * "not known" (ENOENT) is a normal answer;
//! * a name that leads nowhere needs one notification: look-ups and listings hold the directory's
//!   lock until their reply has been digested. Attributes, content, listings, and names that the
//!   kernel is to ask for again before it gives them up, are taken back once more after every
//!   request that was under way has been answered and its reply has had [`DIGESTION`] to reach the
//!   caller: a reply could carry old attributes into an inode that the kernel did not have yet.

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

/// How long a reply may take from the daemon's hand into the caller's caches.
const DIGESTION: Duration = Duration::from_millis(10);
/// How long files that were written to and closed are collected before their attributes are taken
/// back.
const COLLECTED: Duration = Duration::from_millis(50);
/// Changes taken into one batch.
const BATCH: usize = 4096;
/// Files waiting for their second notification above which all of them are notified instead.
const BACKLOG: usize = 65_536;

/// The way into the kernel's caches; a trait so that tests can look at what is sent. Errors are the
/// implementer's to judge: none of them may stop the thread.
pub(crate) trait CacheControl: Send + 'static {
    /// A moment: see [`CacheControl::passed`].
    type Moment;
    /// Now.
    fn now(&self) -> Self::Moment;
    /// Whether all requests that were under way at that moment have been answered.
    fn passed(&self, moment: &mut Self::Moment) -> bool;
    /// Attributes and ACLs of an inode are stale, and its pages (of a directory: its cached
    /// listing) if `pages`.
    fn inode(&self, nodeid: u64, pages: bool);
    /// A name of a directory is stale. Answers whether it has to be told once more: a name that
    /// leads somewhere is kept for as long as it leads to the same file, because something may be
    /// mounted on it, and a reply that is under way could make it count as fresh.
    fn entry(&self, parent: u64, name: &[u8]) -> bool;
    /// A name is given up, whatever it leads to.
    fn forget(&self, parent: u64, name: &[u8]);
    /// All names are stale.
    fn all_entries(&self);
    /// The same, for names of which the kernel had to be told one by one.
    fn all_entries_again(&self);
    /// Whether the layer checks permissions, as names are looked up, and not the kernel.
    fn layer_checks(&self) -> bool;
    /// A file changed below: what is kept open of it goes.
    fn release_kept(&self, nodeid: u64);
    /// Some name went away below, and perhaps a file with it: what is kept open of any file goes.
    fn release_all_kept(&self);
    /// Watchers inside the mount are to be told of changes of files and names. Answers whether the
    /// names were taken over: then they are forgotten when they have been told.
    fn tell(&self, files: &[(u64, bool)], names: &[(u64, &[u8])]) -> bool;
    /// Unused memory may go back.
    fn trim(&self);
    /// Changes are reported in vain: see `Layer::rest`.
    fn rest(&self, known: Option<&[Node]>) -> bool;
}

/// WritebackFigures of the thread.
#[derive(Default)]
pub(crate) struct InvalidationCounts {
    /// Changes of files and names that the kernel knew, and was told of. (Who watches a whole file
    /// system hears of many others.)
    pub told: AtomicU64,
    /// Times when anything may have changed: a watch overflowed, or rules were reloaded.
    pub everything: AtomicU64,
}

/// Forgotten files after which unused memory is given back.
const TRIM_EVERY: u64 = 65_536;

/// The way to the thread for the handlers.
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

    /// A file was written to in passthrough and closed: its attributes are taken back soon.
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

    /// The kernel has forgotten one more file. After very many, memory is given back.
    pub fn forgotten(&self) {
        if self.forgotten.fetch_add(1, Ordering::Relaxed) % TRIM_EVERY == TRIM_EVERY - 1 {
            self.trim.store(true, Ordering::Release);
            self.send(wake());
        }
    }

    /// The thread's side.
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

/// What the thread shares with the mount.
pub(crate) struct InvalidationState {
    /// Files and their node ids.
    pub inodes: Arc<Inodes>,
    /// WritebackFigures.
    pub counts: Arc<InvalidationCounts>,
    /// Set before the thread is woken for the last time.
    pub stop: Arc<AtomicBool>,
    /// Set before the thread is woken to give memory back.
    pub trim: Arc<AtomicBool>,
    /// Node ids of files written to in passthrough and closed; the thread is woken for the first.
    pub written: Arc<Mutex<Vec<u64>>>,
    /// Who waits, in the order of the [`mark`]s sent.
    pub marks: Marks,
}

/// Those who wait until what was sent before their mark is with the kernel.
pub(crate) type Marks = Arc<Mutex<VecDeque<SyncSender<()>>>>;

/// A change that is about no file: it wakes the thread.
pub(crate) fn wake() -> Invalidation {
    Invalidation::Attributes { id: WAKE }
}

const WAKE: FileId = FileId { fs: u64::MAX, ino: 0, generation: u64::MAX };

/// A change that is about no file: the first of those who wait is told when everything sent before
/// it has been delivered.
pub(crate) fn mark() -> Invalidation {
    Invalidation::Attributes { id: MARK }
}

const MARK: FileId = FileId { fs: u64::MAX, ino: 1, generation: u64::MAX };

/// Changes put together so that each file is notified once.
#[derive(Default)]
struct Batch {
    everything: bool,
    all_names: bool,
    names: BTreeMap<FileId, BTreeSet<Box<[u8]>>>,
    /// Those that are given up.
    forgotten: BTreeSet<(FileId, Box<[u8]>)>,
    /// Files; true where the content changed, too.
    files: BTreeMap<FileId, bool>,
    /// Those whose owner, mode or ACL may have changed.
    attributes: BTreeSet<FileId>,
    /// Those to be told that all of this is delivered.
    marks: usize,
    /// How many changes it was made of, also of files that nobody can know.
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

/// A second notification that waits for its time.
struct Repeat<M> {
    /// The requests that were under way then must be answered first.
    moment: M,
    /// When they were, the time from which the last reply counts as digested.
    due: Option<Instant>,
    everything: bool,
    all_names: bool,
    files: BTreeMap<FileId, bool>,
    /// Names of directories that are known by these numbers.
    names: Vec<(u64, Box<[u8]>)>,
}

/// The body of the thread: ends when `shared.stop` is set or nobody can send any more.
pub(crate) fn run<C: CacheControl>(changes: &Receiver<Invalidation>, control: &C, shared: &InvalidationState) {
    let mut repeats: VecDeque<Repeat<C::Moment>> = VecDeque::new();
    let mut collected: Option<Instant> = None;
    let mut resting = Resting::default();
    loop {
        let first = match next(changes, &repeats, collected) {
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
            for waiting in std::iter::from_fn(|| shared.marks.lock().pop_front()).take(batch.marks) {
                // Gone is who has waited for too long.
                let _ = waiting.try_send(());
            }
            resting.heard(batch.heard, control, &shared.inodes);
            enqueue(&mut repeats, batch, names, control);
        }
        repeat_due(&mut repeats, control, shared);
        collected = written(collected, control, shared);
    }
}

/// Takes back the attributes of files that were written to; answers when to come back.
#[expect(clippy::disallowed_methods, reason = "attributes are taken back after a while")]
fn written(due: Option<Instant>, control: &impl CacheControl, shared: &InvalidationState) -> Option<Instant> {
    match due {
        Some(due) if due > Instant::now() => Some(due),
        Some(_) => {
            let mut files = std::mem::take(&mut *shared.written.lock());
            files.sort_unstable();
            files.dedup();
            // Many a file that was written to is gone by now.
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
    collected: Option<Instant>,
) -> Result<Invalidation, RecvTimeoutError> {
    let now = Instant::now();
    // Requests that are still under way are waited for without haste.
    let repeat = repeats.front().map(|repeat| repeat.due.unwrap_or(now + DIGESTION));
    match repeat.into_iter().chain(collected).min() {
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

/// Answers the names that are to be told once more.
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
    // Who may pass a directory may have changed, which shows when its names are looked up.
    if batch.all_names || control.layer_checks() && batch.attributes.iter().any(is_directory) {
        control.all_entries();
    }
    let found = batch.names.iter().filter_map(|(parent, names)| Some((shared.inodes.find(parent)?, names)));
    let names: Vec<(u64, &[u8])> =
        found.flat_map(|(nodeid, names)| names.iter().map(move |name| (nodeid, &**name))).collect();
    if !names.is_empty() {
        // One of them may have been the last name of a kept file, which would hold its space.
        // Elsewhere on the file system, whose every change is reported, names are nothing to us.
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
        // Names are few among files.
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
