//! Counts everything that lies in a cage, while it is in use.
//!
//! Run by the cage in a thread of its own, at the lowest priority: after a start whose saved sums
//! may be old, and when somebody changed files behind the cage's back. The walk remembers what it
//! counted for each file (about ten bytes a file), so that a file of several names counts once, and
//! so that [`Recount::settle`] can replace what was seen of a file that the cage itself has touched
//! meanwhile by what the ledger holds for it. Hence the result is exact at the moment of settling,
//! as far as the cage saw all changes: what others change while the walk runs counts as it was
//! seen. Invariants: no lock is held while the layer below works; a batch holds at most 256
//! entries; directories are walked by node, never by path, and one that vanishes is no error.

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

/// Entries taken from a directory at once; between batches the walk rests.
const BATCH: usize = 256;

/// A rest is as long as the batch took, but no longer than this.
const REST_MAX: Duration = Duration::from_millis(20);

/// The most names of unreadable things that are kept; all are counted.
const UNREAD_KEPT: usize = 32;

/// How the cage counts. Asked in the walking thread, without locks held.
pub trait CountRule: Send + Sync {
    /// Whether a file with this identity belongs to the cage at all (`fs` tells what is mounted
    /// inside from the rest). What is below a directory that does not is left out as well.
    fn counts(&self, id: &FileId) -> bool;

    /// What a file costs, bytes.
    fn cost(&self, node: &Node, attr: &Attr) -> u64;

    /// The group of what lies in `directory` and of itself, given the group of the directory above.
    fn group(&self, directory: &FileId, above: Option<usize>) -> Option<usize>;
}

/// How far a walk has come.
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

/// The handle by which other threads see and steer a walk.
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
    /// How far it has come.
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

    /// Whether it walks on without rests: somebody waits for the result.
    pub fn hurry(&self, hurried: bool) {
        self.hurried.store(hurried, Ordering::Relaxed);
    }

    /// A directory got another place inside the cage, where its files belong to `group`: what is
    /// below may have moved from where the walk has not been to where it has. It is walked again.
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
    /// For messages; empty for the root and for what moved.
    name: Box<[u8]>,
}

/// Something that could not be read, and so was not counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// Path below the root.
    pub path: Vec<u8>,
    /// Why.
    pub errno: Errno,
}

/// Why a walk ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// [`Control::cancel`].
    Cancelled,
    /// The root itself cannot be reached.
    Root(Errno),
}

/// A file that the cage touched, as its ledger has it at the moment of settling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The file.
    pub id: FileId,
    /// Whose accounts hold it.
    pub owner: Owner,
    /// What it costs, bytes; 0 for one that is gone.
    pub bytes: u64,
    /// 1, or 0 for one that is gone.
    pub inodes: u64,
}

/// The result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// What all accounts should hold.
    pub sums: Sums,
    /// Whether everything could be read. If not, there is at least this much
    /// ([`super::ledger::Ledger::raise`]).
    pub complete: bool,
    /// The first of what could not be read.
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

/// Lets everybody else go first: the calling thread gets the weakest claim to the CPU (nice 19).
/// Where that is refused it stays as it is.
pub fn lower_priority() {
    // On Linux, "this process" is the calling thread (setpriority(2), "C library/kernel
    // differences").
    if let Err(error) = rustix::process::setpriority_process(None, 19) {
        tracing::debug!(%error, "the count keeps its priority");
    }
}

impl Recount {
    /// A walk over all of `below`, which begins with [`Recount::run`]. From before this call on,
    /// the cage notes what it touches.
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

    /// For other threads.
    pub fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    /// Walks everything, and again what moved meanwhile. Called again after a [`Recount::settle`]
    /// that answered `None`.
    ///
    /// # Errors
    /// Cancelled, or the root is gone. What cannot be read further down is left out and listed in
    /// the result.
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

    /// What there is, with the ledger's word for all files that the cage touched since before
    /// [`Recount::new`] (more do no harm; of several entries for one file the last holds). The
    /// caller holds off changes of the books from before it collects `touched` until the result is
    /// in the ledger. `None` where directories moved since [`Recount::run`]: run again, then settle
    /// again.
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
        // A signal that ends the rest early is welcome.
        let _ = self.clock.pause(took.min(REST_MAX));
    }

    /// Takes the next names of a directory, which lies below those in `above`, and counts what they
    /// are.
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
            // The listing could not examine it: ask why.
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

/// Whether an error means that the file is not there any more, or not under this name.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ESTALE | Errno::ENOTDIR)
}

/// A directory on the way down.
struct Frame {
    directory: Directory,
    /// Where the listing goes on.
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

/// Takes one batch.
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
