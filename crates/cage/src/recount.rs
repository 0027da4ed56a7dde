//! Recount: counts everything that is stored in a cage, while it is in use.
//!
//! Run by the cage in a thread of its own, at the lowest priority: after a start whose saved sums
//! may be old, and after changes that bypassed the cage. The walk remembers the counted cost of
//! each file (about ten bytes a file), so that a file of several names counts once, and so that
//! [`Recount::settle`] can replace the counted cost of a file that the cage has changed meanwhile
//! by the ledger's cost. Hence the result is exact at the moment of [`Recount::settle`], as far as
//! the cage saw all changes: a file changed by another process during the walk counts as it was
//! found. Invariants: no lock is held during calls into the layer below; a batch holds at most 256
//! entries; directories are walked by node, never by path, and a directory that vanishes is no
//! error.

#[cfg(test)]
mod tests;
mod visited;

use super::ledger::{Owner, Sums};
use nacre_layers::clock::Clock;
use nacre_vfs::{Attr, Caller, DirEntry, DirSink, Entry, Errno, FileId, Kind, Layer, Name, Node};
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use visited::Visited;

/// Entries read from a directory at once; between batches the walk pauses.
const BATCH: usize = 256;

/// Maximum length of a pause, which otherwise is as long as the batch took.
const REST_MAX: Duration = Duration::from_millis(20);

/// Maximum number of unreadable names that are kept; all are counted.
const UNREAD_KEPT: usize = 32;

/// The cage's rules for a recount. Called in the walking thread, without locks held.
pub trait CountRule: Send + Sync {
    /// Whether a file with this identity belongs to the cage at all (`fs` distinguishes file
    /// systems mounted inside). If a directory does not, everything below it is left out as well.
    fn counts(&self, id: &FileId) -> bool;

    /// Cost of a file, bytes.
    fn cost(&self, node: &Node, attr: &Attr) -> u64;

    /// The group of `directory` and of its content, given the group of the parent directory.
    fn group(&self, directory: &FileId, above: Option<usize>) -> Option<usize>;
}

/// Progress of a walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Files of any kind counted, once each.
    pub files: u64,
    /// Directories entered.
    pub directories: u64,
    /// Bytes counted.
    pub bytes: u64,
    /// Names and directories that could not be read.
    pub unread: u64,
}

/// Handle by which other threads observe and control a walk.
#[derive(Default)]
pub struct Control {
    files: AtomicU64,
    directories: AtomicU64,
    bytes: AtomicU64,
    unread: AtomicU64,
    cancelled: AtomicBool,
    hurried: AtomicBool,
    moved: Mutex<Vec<Directory>>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Control").field(&self.progress()).finish()
    }
}

impl Control {
    /// Returns the progress so far.
    pub fn progress(&self) -> Progress {
        Progress {
            files: self.files.load(Ordering::Relaxed),
            directories: self.directories.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            unread: self.unread.load(Ordering::Relaxed),
        }
    }

    /// Stops it at the next entry.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Sets whether the walk runs without pauses, because a caller waits for the result.
    pub fn hurry(&self, hurried: bool) {
        self.hurried.store(hurried, Ordering::Relaxed);
    }

    /// Reports a directory that moved inside the cage, where its files belong to `group`: its
    /// content may have moved from a part not yet walked to a walked part, so it is walked again.
    /// To be called after the rename and before the next [`Recount::settle`] can begin.
    pub fn moved(&self, node: Node, group: Option<usize>) {
        self.moved.lock().push(Directory { node, group, name: Box::default() });
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// A directory to be walked.
struct Directory {
    node: Node,
    group: Option<usize>,
    /// For messages; empty for the root and for moved directories.
    name: Box<[u8]>,
}

/// A name that could not be read, and so was not counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// Path below the root.
    pub path: Vec<u8>,
    /// The error.
    pub errno: Errno,
}

/// Reason why a walk ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// [`Control::cancel`].
    Cancelled,
    /// The root itself cannot be reached.
    Root(Errno),
}

/// A file that the cage has changed, with its cost in the ledger at the moment of
/// [`Recount::settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The file.
    pub id: FileId,
    /// The accounts that hold it.
    pub owner: Owner,
    /// Its cost, bytes; 0 for a removed file.
    pub bytes: u64,
    /// 1, or 0 for a removed file.
    pub inodes: u64,
}

/// Result of a recount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Usage that all accounts should hold.
    pub sums: Sums,
    /// Whether everything could be read. If not, the sums are a lower bound
    /// ([`super::ledger::Ledger::raise`]).
    pub complete: bool,
    /// The first names that could not be read.
    pub unread: Vec<Unread>,
}

/// A walk over a tree.
pub struct Recount {
    below: Arc<dyn Layer>,
    rule: Arc<dyn CountRule>,
    clock: Arc<dyn Clock>,
    control: Arc<Control>,
    visited: Visited,
    unread: Vec<Unread>,
    begun: bool,
    root: Option<FileId>,
}

impl fmt::Debug for Recount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recount").field("control", &self.control).finish_non_exhaustive()
    }
}

/// Gives the calling thread the lowest CPU priority (nice 19). If that is refused, the priority
/// stays as it is.
pub fn lower_priority() {
    // On Linux, "this process" is the calling thread (setpriority(2), "C library/kernel
    // differences").
    if let Err(error) = rustix::process::setpriority_process(None, 19) {
        tracing::debug!(%error, "the count keeps its priority");
    }
}

impl Recount {
    /// Creates a walk over all of `below`, which begins with [`Recount::run`]. The cage must record
    /// its changes from before this call on.
    pub fn new(below: Arc<dyn Layer>, rule: Arc<dyn CountRule>, clock: Arc<dyn Clock>) -> Recount {
        Recount {
            below,
            rule,
            clock,
            control: Arc::default(),
            visited: Visited::default(),
            unread: Vec::new(),
            begun: false,
            root: None,
        }
    }

    /// Returns the handle for other threads.
    pub fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    /// Walks the whole tree, then again the directories that moved meanwhile. Called again after a
    /// [`Recount::settle`] that returned `None`.
    ///
    /// # Errors
    /// Cancelled, or the root is gone. Names below the root that cannot be read are left out and
    /// listed in the result.
    pub fn run(&mut self) -> Result<(), Stopped> {
        if !self.begun {
            let root = self.below.root().map_err(Stopped::Root)?;
            self.root = Some(root.attr.id);
            let group = self.rule.group(&root.attr.id, None);
            self.walk(Directory { node: root.node, group, name: Box::default() })?;
            self.begun = true;
        }
        loop {
            let Some(moved) = self.control.moved.lock().pop() else { return Ok(()) };
            self.walk(moved)?;
        }
    }

    /// Returns the usage, with the ledger's costs for all files that the cage has changed since
    /// before [`Recount::new`] (more do no harm; of several entries for one file the last is used).
    /// The caller holds off changes of the accounts from before it collects `touched` until the
    /// result is in the ledger. `None` where directories moved since [`Recount::run`]: run again,
    /// then settle again.
    pub fn settle(&mut self, touched: impl IntoIterator<Item = Held>) -> Option<Counted> {
        if !self.begun || !self.control.moved.lock().is_empty() {
            return None;
        }
        let sums = self.visited.sums_with(touched);
        let complete = self.control.unread.load(Ordering::Relaxed) == 0;
        Some(Counted { sums, complete, unread: self.unread.clone() })
    }

    /// Depth first, without recursion: trees may be deeper than stacks.
    fn walk(&mut self, top: Directory) -> Result<(), Stopped> {
        let mut stack = vec![Frame::new(top)];
        self.control.directories.fetch_add(1, Ordering::Relaxed);
        while let Some(mut frame) = stack.pop() {
            if self.control.is_cancelled() {
                return Err(Stopped::Cancelled);
            }
            if let Some(below) = frame.below.pop() {
                self.control.directories.fetch_add(1, Ordering::Relaxed);
                stack.extend([frame, Frame::new(below)]);
            } else if !frame.ended {
                let begun = self.clock.now();
                self.batch(&mut frame, &stack);
                stack.push(frame);
                self.rest(begun);
            }
        }
        Ok(())
    }

    fn rest(&self, begun: Duration) {
        if self.control.hurried.load(Ordering::Relaxed) {
            return;
        }
        let took = self.clock.now().saturating_sub(begun);
        // A signal may end the pause early.
        let _ = self.clock.pause(took.min(REST_MAX));
    }

    /// Reads and counts the next entries of a directory, whose parents are `above`.
    fn batch(&mut self, frame: &mut Frame, above: &[Frame]) {
        let mut sink = Batch { entries: Vec::with_capacity(BATCH), next: frame.next };
        let listed = self.below.readdir(&Caller::ROOT, &frame.directory.node, frame.next, true, &mut sink);
        let Batch { entries, next } = sink;
        frame.ended = listed.is_err() || next == frame.next || entries.len() < BATCH;
        frame.next = next;
        for (name, entry) in entries {
            if let Err(errno) = self.take(frame, &name, entry) {
                self.not_read(above, frame, &name, errno);
            }
        }
        if let Err(errno) = listed {
            self.not_read(above, frame, b"", errno);
        }
    }

    fn take(&mut self, frame: &mut Frame, name: &[u8], entry: Option<Entry>) -> nacre_vfs::Result<()> {
        let Entry { node, attr } = match entry {
            Some(found) => found,
            // The listing could not examine it: ask for the error.
            None => self.below.lookup(&Caller::ROOT, &frame.directory.node, Name::new(name)?)?,
        };
        if !self.rule.counts(&attr.id) || Some(attr.id) == self.root {
            return Ok(());
        }
        let mut group = frame.directory.group;
        let cost = self.rule.cost(&node, &attr);
        if attr.kind == Kind::Directory {
            group = self.rule.group(&attr.id, group);
            frame.below.push(Directory { node, group, name: name.into() });
        }
        self.count(&attr, cost, group);
        Ok(())
    }

    fn count(&mut self, attr: &Attr, cost: u64, group: Option<usize>) {
        if self.visited.add(&attr.id, Owner { uid: attr.uid, group }, cost) {
            self.control.files.fetch_add(1, Ordering::Relaxed);
            self.control.bytes.fetch_add(cost, Ordering::Relaxed);
        }
    }

    fn not_read(&mut self, above: &[Frame], frame: &Frame, name: &[u8], errno: Errno) {
        if is_gone(errno) {
            return;
        }
        self.control.unread.fetch_add(1, Ordering::Relaxed);
        if self.unread.len() < UNREAD_KEPT {
            let names = above.iter().chain([frame]).map(|frame| &*frame.directory.name).chain([name]);
            let path = names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(&b'/');
            self.unread.push(Unread { path, errno });
        }
    }
}

/// Whether an error means that the file does not exist any more, or not under this name.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ESTALE | Errno::ENOTDIR)
}

/// A directory on the way down.
struct Frame {
    directory: Directory,
    /// Position at which the listing continues.
    next: u64,
    ended: bool,
    /// Directories of the last batch that are still to be walked.
    below: Vec<Directory>,
}

impl Frame {
    fn new(directory: Directory) -> Frame {
        Frame { directory, next: 0, ended: false, below: Vec::new() }
    }
}

/// Sink for one batch of a listing.
struct Batch {
    entries: Vec<(Box<[u8]>, Option<Entry>)>,
    next: u64,
}

impl DirSink for Batch {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.entries.len() == BATCH {
            return false;
        }
        self.next = entry.next;
        self.entries.push((entry.name.bytes().into(), entry.entry));
        true
    }
}
