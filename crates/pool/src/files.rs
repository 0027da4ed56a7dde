//! POSIX files of one dataset over its rows: names, attributes, content, extended attributes, listings.
//!
//! Called by the layer `dataset` with inode numbers and names; calls the dataset's tree through [`Table`] and the store through
//! [`Frames`]. Permissions are not judged here: whoever calls has done it.
//!
//! Invariants:
//! - Lock order: the gate (shared), `names`, inodes (several only under `names`), the table, the small ones (`known`, `dirty`, `uses`, `freed`).
//! - What one operation changes in the table is one [`Batch`], applied under one lock: nobody sees half a rename.
//! - An inode that is *active* (written to since the last flush) has its attributes in memory; the row in the table then has the size that the content
//!   in the table supports, so that what is logged of it never shows content that is not there.
//! - Before a txg is frozen everything active is flushed into the table ([`Files::flush`]), so the frozen tree is the state of one moment.

mod content;
mod durable;
mod inodes;
mod listing;
mod names;
mod orphans;
mod table;
#[cfg(test)]
mod tests;
mod xattrs;

pub use content::{SeekTo, WriteOutcome};
pub use durable::Durable;
pub use inodes::{AttributeChange, Inode, TimeChange};
pub use listing::Listed;
pub use names::{MayReplace, NewInode, ParentView};
pub use table::{Batch, RowChange, Table};

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::error::PoolError;
use crate::frames::{Frames, NewFrame, Packing};
use crate::log::{Change, Ticket};
use crate::pointer::{ChecksumKind, Pointer, Txg};
use crate::rows::{Head, OwnerKind, Timestamp, keys};

/// Why an operation on files was refused or failed. The layer above has one error number for each.
#[derive(Clone, Debug)]
pub enum FileError {
    /// There is no such name, or the directory is removed.
    NotFound,
    /// The name exists.
    Exists,
    /// Not a directory.
    NotDirectory,
    /// A directory.
    IsDirectory,
    /// A directory that holds names.
    NotEmpty,
    /// What is asked makes no sense: a directory moved below itself, a symbolic link read that is none.
    Invalid,
    /// What is asked is allowed to nobody: a second name for a directory.
    NotPermitted,
    /// A name of more than 255 bytes, or a target that is too long.
    NameTooLong,
    /// No further name for this file can be counted.
    TooManyLinks,
    /// A file cannot be that large.
    TooLarge,
    /// There is no such extended attribute, no data behind this offset.
    NoData,
    /// The extended attribute exists.
    AttributeExists,
    /// The value does not fit the buffer.
    Range,
    /// The dataset is a snapshot or read-only.
    ReadOnly,
    /// The engine's reason.
    Pool(PoolError),
}

impl From<PoolError> for FileError {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotFound => "no such file or directory",
            Self::Exists => "the name exists",
            Self::NotDirectory => "not a directory",
            Self::IsDirectory => "a directory",
            Self::NotEmpty => "the directory is not empty",
            Self::Invalid => "not possible",
            Self::NotPermitted => "not permitted",
            Self::NameTooLong => "the name is too long",
            Self::TooManyLinks => "too many names",
            Self::TooLarge => "too large",
            Self::NoData => "no such data",
            Self::AttributeExists => "the attribute exists",
            Self::Range => "the buffer is too small",
            Self::ReadOnly => "read-only",
            Self::Pool(error) => return error.fmt(f),
        })
    }
}

impl std::error::Error for FileError {}

/// What operations on files answer.
pub type Result<T> = std::result::Result<T, FileError>;

/// The open transaction group. Operations enter it; a commit moves it on while nobody is inside.
#[derive(Debug)]
pub struct Gate {
    open: RwLock<Txg>,
}

impl Gate {
    /// A gate whose first open txg is this one.
    #[must_use]
    pub fn new(open: Txg) -> Self {
        Self { open: RwLock::new(open) }
    }

    /// Holds the open txg open: what changes under it belongs to it. Not to be entered twice by one thread: a commit may wait in between.
    pub fn enter(&self) -> Entered<'_> {
        Entered { open: self.open.read() }
    }

    /// Closes the open txg: runs `freeze` with it while nobody is inside, then opens the next one.
    pub fn advance<R>(&self, freeze: impl FnOnce(Txg) -> R) -> R {
        let mut open = self.open.write();
        let answer = freeze(*open);
        open.0 += 1;
        answer
    }
}

/// The open txg is held open.
#[derive(Debug)]
pub struct Entered<'a> {
    open: RwLockReadGuard<'a, Txg>,
}

impl Entered<'_> {
    /// Which txg it is.
    #[must_use]
    pub fn txg(&self) -> Txg {
        *self.open
    }
}

/// How new content is stored: the dataset's properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storing {
    /// Record size as a power of two, 9 to 24 (`recordsize`).
    pub record_shift: u8,
    /// `compression`.
    pub packing: Packing,
    /// `checksum`.
    pub checksum: ChecksumKind,
}

/// The clock that files get their times from.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// What an owner's use has changed by since the last flush: bytes, objects.
type UseChanges = HashMap<(OwnerKind, u32), (i64, i64)>;

/// The files of one dataset.
pub struct Files<T> {
    dataset: u64,
    gate: Arc<Gate>,
    frames: Arc<dyn Frames>,
    clock: Clock,
    storing: RwLock<Storing>,
    table: RwLock<T>,
    names: Mutex<()>,
    numbers: Numbers,
    known: Arc<inodes::Known>,
    dirty: Mutex<HashMap<u64, Arc<Inode>>>,
    buffered: AtomicU64,
    uses: Mutex<UseChanges>,
    freed: Mutex<Vec<Pointer>>,
    written: AtomicU64,
    recorder: OnceLock<Arc<dyn Recorder>>,
}

/// The head's numbers as they are now.
#[derive(Debug)]
struct Numbers {
    seed: u64,
    root: u64,
    next: AtomicU64,
    objects: AtomicU64,
}

impl<T> fmt::Debug for Files<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("dataset", &self.dataset).field("numbers", &self.numbers).finish_non_exhaustive()
    }
}

/// Takes what operations do, so that an fsync need not wait for a commit: the intent log. Called with the txg held open.
pub trait Recorder: Send + Sync {
    /// An operation has changed these rows.
    fn record(&self, txg: Txg, dataset: u64, changes: &[Change<'_>]) -> Ticket;

    /// An operation has changed what no record can hold: until this txg is committed, only a commit makes anything durable.
    fn cannot_record(&self, txg: Txg);
}

/// What the files of a dataset stand on.
pub struct Ground {
    /// The dataset's number, for the headers of frames.
    pub dataset: u64,
    /// The pool's gate.
    pub gate: Arc<Gate>,
    /// The pool's frames.
    pub frames: Arc<dyn Frames>,
    /// The clock.
    pub clock: Clock,
    /// How content is stored.
    pub storing: Storing,
}

impl fmt::Debug for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ground").field("dataset", &self.dataset).field("storing", &self.storing).finish_non_exhaustive()
    }
}

impl<T: Table> Files<T> {
    /// An empty file system in an empty table: a root directory that belongs to 0:0 with mode 755.
    ///
    /// # Errors
    /// [`PoolError`] of the table.
    pub fn format(ground: Ground, table: T, seed: u64) -> std::result::Result<Self, PoolError> {
        const ROOT: u64 = 1;
        let head = Head { next: ROOT + 1, root: ROOT, seed, objects: 1 };
        let files = Self::over(ground, table, head);
        let mut batch = Batch::default();
        let root = crate::rows::Inode::new(crate::rows::FileType::Directory, 0o755, (files.clock)());
        batch.put(&keys::head(), head.encode());
        batch.put(&keys::inode(ROOT), root.encode());
        files.count_owner(&root, 0, 1);
        let entered = files.gate.enter();
        files.table.write().change(entered.txg(), &batch)?;
        drop(entered);
        Ok(files)
    }

    /// The files of a table that has them.
    ///
    /// # Errors
    /// [`PoolError`] of the table; a table without a head is damaged.
    pub fn open(ground: Ground, table: T) -> std::result::Result<Self, PoolError> {
        let row = table.get(&keys::head())?;
        let head = Head::decode(&row.unwrap_or_default())?;
        Ok(Self::over(ground, table, head))
    }

    fn over(ground: Ground, table: T, head: Head) -> Self {
        let Ground { dataset, gate, frames, clock, storing } = ground;
        Self {
            dataset,
            gate,
            frames,
            clock,
            storing: RwLock::new(storing),
            table: RwLock::new(table),
            names: Mutex::new(()),
            numbers: Numbers { seed: head.seed, root: head.root, next: AtomicU64::new(head.next), objects: AtomicU64::new(head.objects) },
            known: Arc::default(),
            dirty: Mutex::default(),
            buffered: AtomicU64::new(0),
            uses: Mutex::default(),
            freed: Mutex::default(),
            written: AtomicU64::new(0),
            recorder: OnceLock::new(),
        }
    }

    /// The root directory.
    #[must_use]
    pub fn root(&self) -> Arc<Inode> {
        self.known.get(self.numbers.root)
    }

    /// How many inodes there are.
    #[must_use]
    pub fn objects(&self) -> u64 {
        self.numbers.objects.load(Ordering::Relaxed)
    }

    /// Content that is held in memory until the next flush, bytes.
    #[must_use]
    pub fn buffered(&self) -> u64 {
        self.buffered.load(Ordering::Relaxed)
    }

    /// Changes how new content is stored.
    pub fn set_storing(&self, storing: Storing) {
        *self.storing.write() = storing;
    }

    /// Runs `look` with the table, for a commit that freezes it or a check that reads it.
    pub fn with_table<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.table.write())
    }

    /// The content frames that the open txg has freed so far; the commit takes them and applies the free rule.
    pub fn take_freed(&self) -> Vec<Pointer> {
        std::mem::take(&mut *self.freed.lock())
    }

    /// What the content frames of the open txg are charged so far, bytes; the commit takes it.
    pub fn take_written(&self) -> u64 {
        self.written.swap(0, Ordering::Relaxed)
    }

    /// Writes a frame and counts it.
    fn write_frame(&self, frame: &NewFrame<'_>) -> Result<Pointer> {
        let pointer = self.frames.write(frame)?;
        self.written.fetch_add(pointer.charged(), Ordering::Relaxed);
        Ok(pointer)
    }

    /// A number for a new inode or a new entry. Never given twice.
    fn number(&self) -> u64 {
        self.numbers.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that an owner's inode has grown by so many bytes and objects.
    fn count_owner(&self, row: &crate::rows::Inode, bytes: i64, objects: i64) {
        let mut uses = self.uses.lock();
        for owner in [(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)] {
            let change = uses.entry(owner).or_default();
            change.0 = change.0.saturating_add(bytes);
            change.1 = change.1.saturating_add(objects);
        }
    }

    /// From now on operations are recorded. Before, as while a log is replayed, they are not.
    pub fn record_to(&self, recorder: Arc<dyn Recorder>) {
        // A second recorder would split the log: the first stays.
        let _ = self.recorder.set(recorder);
    }

    /// Applies what an operation changes, and records it.
    fn apply_recorded(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply(txg, batch)?;
        if let Some(recorder) = self.recorder.get() {
            let changes: Vec<Change<'_>> = batch.changes().iter().map(RowChange::as_change).collect();
            recorder.record(txg, self.dataset, &changes);
        }
        Ok(())
    }

    /// Applies what an operation changes.
    fn apply(&self, txg: Txg, batch: &Batch) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        Ok(self.table.write().change(txg, batch)?)
    }
}
