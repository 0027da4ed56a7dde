//! POSIX files of one dataset over its rows: names, attributes, content, extended attributes,
//! listings.
//!
//! Called by the layer `dataset` with inode numbers and names; calls the dataset's tree through
//! [`Table`] and the store through [`Frames`]. Permissions are not judged here: whoever calls has
//! done it.
//!
//! Invariants:
//! - Lock order: the gate (shared), `names`, inodes (several only under `names`), the table, the
//!   small ones (`known`, `dirty`, `owners`, `freed`).
//! - What one operation changes in the table is one [`Batch`], applied under one lock: nobody sees
//!   half a rename.
//! - An inode that is *active* (written to since the last flush) has its attributes in memory; the
//!   row in the table then has the size that the content in the table supports, so that what is
//!   logged of it never shows content that is not there.
//! - Before a txg is frozen everything active is flushed into the table ([`Files::flush`]), so the
//!   frozen tree is the state of one moment.

mod buffered;
mod content;
mod durable;
pub(crate) mod gate;
mod held_values;
mod inodes;
mod keeping;
mod known;
mod listing;
mod names;
mod orphans;
mod owner_accounts;
mod patches;
mod protection;
mod quota_check;
mod readahead;
mod received;
mod recent;
mod row_charges;
mod row_recount;
mod sharing;
mod spin_lock;
mod split;
mod stopping;
mod stored_patches;
mod streams;
mod table;
#[cfg(test)]
mod tests;
mod throttle;
mod unstored;
mod xattrs;

pub use content::{SeekTo, WriteOutcome};
pub use durable::Durability;
pub use gate::{Entered, Gate};
pub use inodes::{AttributeChange, ChangedTime, FlagChange, Inode, TimeChange};
pub use keeping::Keeper;
pub use listing::{InodeFilter, ListedEntry, SeenEntry};
pub use names::{Making, MayReplace, NewInode, ParentView};
pub use orphans::Swept;
pub use quota_check::{AccessTimes, Admission, Admit, ExpectedWrites, Overwrite, Rules};
pub use sharing::Range;
pub use stopping::StoppedFiles;
pub use table::{Absent, Batch, Change, RowChange, Table};
pub use throttle::{Share, Throttle, Woken};

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use nacre_sys::clocks;
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use owner_accounts::owners_of;
use spin_lock::{SpinMutex, SpinRwLock};

use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::frames::{CompressionSetting, Frames, NewFrame};
use crate::log::{LogRecord, Ticket};
use crate::pointer::{ChecksumKind, Pointer, Txg};
use crate::rows::keys::Hashing;
use crate::rows::{DatasetHead, Folding, Timestamp, keys};

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
    /// What is asked makes no sense: a directory moved below itself, a symbolic link read that is
    /// none.
    Invalid,
    /// What is asked is allowed to nobody: a second name for a directory.
    NotPermitted,
    /// A name of more than 255 bytes, or a target that is too long.
    NameTooLong,
    /// A new name that is not UTF-8, where names have to be.
    NotUtf8,
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
    /// A quota is in the way.
    Quota,
    /// The quota of a user or group is in the way; told as [`Self::Quota`].
    OwnerQuota,
    /// The engine's reason.
    Pool(PoolError),
}

impl FileError {
    /// Whether it is about what was to be read, not about the pool.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.is_rotten() || matches!(self, Self::Pool(PoolError::Device { doing: "reading", .. }))
    }

    /// Whether it is about what was to be read, and will stay: what a device refuses to read now it
    /// may read another time.
    pub(crate) fn is_rotten(&self) -> bool {
        matches!(self, Self::Pool(PoolError::Frame { .. } | PoolError::Format(_)))
    }
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
            Self::NotUtf8 => "the name is not UTF-8",
            Self::TooManyLinks => "too many names",
            Self::TooLarge => "too large",
            Self::NoData => "no such data",
            Self::AttributeExists => "the attribute exists",
            Self::Range => "the buffer is too small",
            Self::ReadOnly => "read-only",
            Self::Quota | Self::OwnerQuota => "disk quota exceeded",
            Self::Pool(error) => return error.fmt(f),
        })
    }
}

impl std::error::Error for FileError {}

/// What operations on files answer.
pub type Result<T> = std::result::Result<T, FileError>;

/// How new content is stored: the dataset's properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storing {
    /// Record size as a power of two, 9 to 24 (`recordsize`).
    pub record_shift: u8,
    /// `compression`.
    pub compression: CompressionSetting,
    /// `checksum`.
    pub checksum: ChecksumKind,
}

/// How much was stored, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// As it is charged.
    pub charged: u64,
    /// Before compression.
    pub logical: u64,
}

impl StoredBytes {
    /// This and more.
    #[must_use]
    pub fn and(self, charged: u64, logical: u64) -> Self {
        Self { charged: self.charged + charged, logical: self.logical + logical }
    }
}

/// The clock that files get their times from.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// The clock by which the kernel stamps files whose times it keeps itself: it moves once a tick. By another
/// one, files would be born after their first write.
pub fn kernel_clock() -> Clock {
    Arc::new(|| {
        let now = clocks::now(clocks::Clock::RealtimeCoarse);
        Timestamp { seconds: now.as_secs().cast_signed(), nanoseconds: now.subsec_nanos() }
    })
}

/// The files of one dataset.
pub struct Files<T> {
    dataset: u64,
    gate: Arc<Gate>,
    frames: Arc<dyn Frames>,
    clock: Clock,
    storing: RwLock<Storing>,
    longest_record: u64,
    table: SpinRwLock<T>,
    recent: recent::Recent,
    names: SpinMutex,
    numbers: Numbers,
    known: Arc<known::Known>,
    dirty: Mutex<HashMap<u64, Arc<Inode>>>,
    held_values: held_values::HeldValues,
    throttle: Arc<Throttle>,
    buffered: Share,
    owners: owner_accounts::OwnerAccounts,
    /// How far inodes of older versions have been charged for their rows. Under the gate, before the table.
    recounted: Mutex<row_recount::Recounted>,
    /// When a file lost its last name.
    lost_name: Mutex<Option<std::time::Instant>>,
    /// Held by whoever is short of room, over the commits that may make some. The first of all
    /// locks.
    short: Mutex<()>,
    rules: RwLock<Rules>,
    admission: Arc<dyn Admission>,
    stop: stopping::Stop,
    /// What comes was done before: the log is being replayed.
    replaying: AtomicBool,
    /// The txg of the newest snapshot or the origin: what was born later is freed when it is replaced.
    held_by_snapshots: AtomicU64,
    /// The head cannot be read, so nothing more may change.
    headless: AtomicBool,
    /// All rows come with a stream, that of the head as well.
    receiving: AtomicBool,
    readahead: readahead::ListingReadahead,
    streams: streams::Streams,
    freed: Mutex<Vec<Dead>>,
    unstored: Mutex<unstored::Unstored>,
    /// Frames that rows of the open txg have come to share.
    shared: Mutex<Vec<Pointer>>,
    written: AtomicU64,
    written_logical: AtomicU64,
    recorder: OnceLock<Arc<dyn Recorder>>,
    keeper: OnceLock<Arc<Keeper>>,
    /// Inodes without a name that a process which has died left, where there was one.
    left: Mutex<Option<HashSet<u64>>>,
}

/// The head's numbers as they are now.
#[derive(Debug)]
struct Numbers {
    seed: u64,
    hashing: Hashing,
    folding: Folding,
    root: u64,
    next: AtomicU64,
    objects: AtomicU64,
}

impl<T> fmt::Debug for Files<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("dataset", &self.dataset).field("numbers", &self.numbers).finish_non_exhaustive()
    }
}

/// Takes what operations do, so that an fsync need not wait for a commit: the intent log. Called
/// with the txg held open.
pub trait Recorder: Send + Sync {
    /// An operation of this txg has changed what its [record](LogRecord::encoded) says.
    fn record(&self, txg: Txg, record: Vec<u8>) -> Ticket;

    /// An operation has changed what no record can hold: until this txg is committed, only a commit
    /// makes anything durable.
    fn cannot_record(&self, txg: Txg);
}

/// What the files of a dataset stand on.
pub struct FilesConfig {
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
    /// Records get no longer, bytes: the segments of the pool hold no longer frames.
    pub longest_record: u64,
    /// What counts what is held in memory.
    pub throttle: Arc<Throttle>,
    /// Who knows all limits.
    pub admission: Arc<dyn Admission>,
}

impl fmt::Debug for FilesConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilesConfig")
            .field("dataset", &self.dataset)
            .field("storing", &self.storing)
            .finish_non_exhaustive()
    }
}

/// What is said of a file system when it is made, and holds for good.
#[derive(Clone, Copy, Debug)]
pub struct NewFiles {
    /// How names are hashed; where names are folded, in any case [`Hashing::Ordered`].
    pub hashing: Hashing,
    /// Which names are the same.
    pub folding: Folding,
    /// The seed of hashes of names.
    pub seed: u64,
    /// The user and the group of the root directory.
    pub owner: (u32, u32),
}

/// Reads what was missing in a table, without its lock. What was committed meanwhile may have taken
/// it away: whether it can be read, whoever looks under the lock is told.
fn hint(read: Absent) {
    if let Err(error) = read() {
        tracing::debug!(%error, "a part of a table that was to be read ahead is gone");
    }
}

/// No way down a tree is longer.
const WARMED_MOST: usize = 16;

impl<T: Table> Files<T> {
    /// An empty file system in an empty table; its root directory has mode 755.
    ///
    /// # Errors
    /// [`PoolError`] of the table.
    pub fn format(config: FilesConfig, table: T, new: NewFiles) -> std::result::Result<Self, PoolError> {
        const ROOT: u64 = 1;
        let NewFiles { hashing, folding, seed, owner } = new;
        let hashing = if folding.is_exact() { hashing } else { Hashing::Ordered };
        let head = DatasetHead { next: ROOT + 1, root: ROOT, seed, hashing, folding, objects: 1 };
        let files = Self::over(config, table, head);
        let mut batch = Batch::default();
        let mut root = crate::rows::InodeRow::new(crate::rows::FileType::Directory, 0o755, (files.clock)());
        (root.uid, root.gid) = owner;
        batch.put(&keys::head(), head.encode());
        batch.put(&keys::inode(ROOT), root.encode_charged(row_charges::INODE));
        batch.put(&keys::recounted(), row_recount::all_counted());
        files.count_owner(&root, row_charges::INODE as i64, 1);
        let entered = files.gate.enter();
        files.table.write().change(entered.txg(), &batch.uncharged())?;
        drop(entered);
        Ok(files)
    }

    /// The files of a table that has them.
    ///
    /// # Errors
    /// [`PoolError`] of the table; a table without a head is damaged.
    pub fn open(config: FilesConfig, table: T) -> std::result::Result<Self, PoolError> {
        let row = table.get(&keys::head())?;
        let head = DatasetHead::decode(&row.unwrap_or_default())?;
        Ok(Self::over(config, table, head))
    }

    fn over(config: FilesConfig, table: T, head: DatasetHead) -> Self {
        let FilesConfig { dataset, gate, frames, clock, storing, longest_record, throttle, admission } = config;
        Self {
            dataset,
            gate,
            frames,
            clock,
            storing: RwLock::new(storing),
            longest_record,
            table: SpinRwLock::new(table),
            recent: recent::Recent::default(),
            names: SpinMutex::default(),
            numbers: Numbers {
                seed: head.seed,
                hashing: head.hashing,
                folding: head.folding,
                root: head.root,
                next: AtomicU64::new(head.next),
                objects: AtomicU64::new(head.objects),
            },
            known: Arc::default(),
            dirty: Mutex::default(),
            buffered: Share::new(Arc::clone(&throttle)),
            held_values: held_values::HeldValues::new(Arc::clone(&throttle)),
            throttle,
            owners: Default::default(),
            recounted: Mutex::default(),
            lost_name: Mutex::default(),
            short: Mutex::default(),
            rules: RwLock::default(),
            admission,
            replaying: AtomicBool::new(false),
            held_by_snapshots: AtomicU64::new(u64::MAX),
            headless: AtomicBool::new(false),
            receiving: AtomicBool::new(false),
            readahead: readahead::ListingReadahead::default(),
            streams: streams::Streams::default(),
            stop: stopping::Stop::default(),
            freed: Mutex::default(),
            unstored: Mutex::default(),
            shared: Mutex::default(),
            written: AtomicU64::new(0),
            written_logical: AtomicU64::new(0),
            recorder: OnceLock::new(),
            keeper: OnceLock::new(),
            left: Mutex::default(),
        }
    }

    /// The root directory.
    #[must_use]
    pub fn root(&self) -> Arc<Inode> {
        self.known.get(self.numbers.root)
    }

    /// Which names are the same.
    #[must_use]
    pub fn folding(&self) -> Folding {
        self.numbers.folding
    }

    /// How many inodes there are.
    #[must_use]
    pub fn objects(&self) -> u64 {
        self.numbers.objects.load(Ordering::Relaxed)
    }

    /// Content that is held in memory until the next flush, bytes.
    #[must_use]
    pub fn buffered(&self) -> u64 {
        self.buffered.bytes()
    }

    /// Changes how new content is stored.
    pub fn set_storing(&self, storing: Storing) {
        *self.storing.write() = storing;
    }

    /// Runs `look` with the table, for a commit that freezes it or a check that reads it.
    pub fn with_table<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        let mut table = self.table.write();
        self.recent.clear();
        look(&mut table)
    }

    /// Runs `look` with the table, for whoever only reads.
    pub fn look_at_table<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.table.read())
    }

    /// Whether nobody holds the table's lock.
    #[cfg(test)]
    pub(crate) fn table_is_free(&self) -> bool {
        self.table.try_write().is_some()
    }

    /// Whether memory holds anything that the table does not have yet.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        !self.dirty.lock().is_empty() || self.owners.has_changes() || self.known.has_released()
    }

    /// The content frames that the open txg has freed so far; the commit takes them and applies the
    /// free rule.
    pub fn take_freed(&self) -> Vec<Dead> {
        std::mem::take(&mut *self.freed.lock())
    }

    /// What the content frames of the open txg are charged so far, bytes; the commit takes it.
    pub fn take_written(&self) -> StoredBytes {
        StoredBytes {
            charged: self.written.swap(0, Ordering::Relaxed),
            logical: self.written_logical.swap(0, Ordering::Relaxed),
        }
    }

    /// Writes a frame and counts it.
    fn write_frame(&self, frame: &NewFrame<'_>) -> Result<Pointer> {
        let pointer = self.frames.write(frame)?;
        self.count_written(&pointer);
        Ok(pointer)
    }

    fn count_written(&self, pointer: &Pointer) {
        self.written.fetch_add(pointer.charged(), Ordering::Relaxed);
        self.written_logical.fetch_add(pointer.logical.into(), Ordering::Relaxed);
    }

    /// Begins an operation: waits while too much is held in memory, then holds the open txg open.
    /// Not under any lock.
    #[track_caller]
    fn enter(&self) -> Result<Entered<'_>> {
        self.enter_with(keeping::ROWS)
    }

    /// The same, for an operation that appends so many bytes to the kept log, where there is one.
    #[track_caller]
    fn enter_with(&self, bytes: u64) -> Result<Entered<'_>> {
        self.throttle.admit()?;
        let room = self.room_to_keep(bytes)?;
        Ok(self.enter_now().with_room(room))
    }

    /// Holds the open txg open, however much is held in memory. Not under any lock.
    #[track_caller]
    fn enter_now(&self) -> Entered<'_> {
        loop {
            let entered = self.gate.enter();
            if !self.stop.is_on() {
                return entered;
            }
            drop(entered);
            self.stop.wait();
        }
    }

    /// A number for a new inode or a new entry. Never given twice.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`] where all are given: the counter of a head ends at [`keys::NUMBER_MOST`].
    fn number(&self) -> Result<u64> {
        let next = |next: u64| (next < keys::NUMBER_MOST).then_some(next + 1);
        self.numbers
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .map_err(|_| PoolError::NoSpace.into())
    }

    /// Notes that an owner's inode has grown by so many bytes and objects.
    fn count_owner(&self, row: &crate::rows::InodeRow, bytes: i64, objects: i64) {
        self.owners.change(owners_of(row).map(|owner| (owner, (bytes, objects))));
    }

    /// From now on operations are recorded. Before, as while a log is replayed, they are not.
    pub fn record_to(&self, recorder: Arc<dyn Recorder>) {
        // A second recorder would split the log: the first stays.
        let _ = self.recorder.set(recorder);
    }

    /// Applies what an operation changes, and records it.
    fn apply_recorded(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply_and(txg, batch, || {
            let kept = self.keep_rows(txg, batch);
            self.record_rows(txg, batch, kept);
        })
    }

    /// Records the rows of a batch; `encoded` is their record, where it has been made already.
    fn record_rows(&self, txg: Txg, batch: &Batch, encoded: Option<Vec<u8>>) {
        if let Some(recorder) = self.recorder.get() {
            recorder.record(txg, encoded.unwrap_or_else(|| self.record_of(txg, batch)));
        }
    }

    fn record_of(&self, txg: Txg, batch: &Batch) -> Vec<u8> {
        LogRecord { txg, dataset: self.dataset, changes: batch.logged() }.encoded()
    }

    /// Has the way to a row in memory, as far as that is known, so that nobody waits for a device
    /// under the table's lock. Not under that lock.
    fn warm(&self, key: &[u8]) -> Result<()> {
        // What a small cache does not keep is read under the lock after all.
        for _ in 0..WARMED_MOST {
            let absent = self.table.read().absent(key)?;
            match absent {
                None => break,
                Some(read) => hint(read),
            }
        }
        Ok(())
    }

    /// The same for the rows of a range, as far as so many leaves reach.
    fn warm_range(&self, range: &std::ops::Range<Vec<u8>>, leaves: usize) -> Result<()> {
        let absent = self.table.read().absent_in(range, leaves)?;
        absent.into_iter().for_each(hint);
        Ok(())
    }

    /// Applies what an operation changes; what follows from that is told only then.
    fn apply(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply_and(txg, batch, || {})
    }

    /// The same; `record` is called before anybody can see the change, and so build on it.
    fn apply_and(&self, txg: Txg, batch: &Batch, record: impl FnOnce()) -> Result<()> {
        self.change_table(txg, batch, record).inspect_err(|_| self.abandon(batch))?;
        if !batch.dead.is_empty() {
            self.freed.lock().extend(batch.dead.iter().copied());
        }
        if !batch.uses.is_empty() {
            self.owners.change(batch.uses.iter().map(|(owner, bytes)| (*owner, (*bytes, 0))));
        }
        Ok(())
    }

    /// A batch that the table does not get: the frames that were written for it are free again.
    fn abandon(&self, batch: &Batch) {
        if !batch.written.is_empty() {
            self.freed.lock().extend(batch.written.iter().copied());
        }
    }

    /// Changes the table, with what inodes are charged for their rows.
    fn change_table(&self, txg: Txg, batch: &Batch, record: impl FnOnce()) -> Result<()> {
        if batch.is_empty() {
            record();
            return Ok(());
        }
        batch.changes().iter().try_for_each(|change| self.warm(&change.key))?;
        let table = self.table.write();
        self.change_locked(table, txg, batch, record)
    }

    /// Changes the table by a batch that follows from what it has.
    fn change_with(&self, txg: Txg, batch: impl FnOnce(&T) -> Result<Batch>) -> Result<()> {
        let table = self.table.write();
        let batch = batch(&table)?;
        if batch.is_empty() {
            return Ok(());
        }
        self.change_locked(table, txg, &batch, || {})
    }

    fn change_locked(
        &self,
        mut table: RwLockWriteGuard<'_, T>,
        txg: Txg,
        batch: &Batch,
        record: impl FnOnce(),
    ) -> Result<()> {
        let charges = self.row_charges(&*table, batch)?;
        let changes = charges.changes(batch);
        let before = table.dirty_bytes();
        let changed = table.change(txg, &changes);
        self.recent.follow(&changes, changed.is_err());
        let grown = table.dirty_bytes().saturating_sub(before);
        if changed.is_ok() {
            record();
            self.owners.change(charges.uses.iter().map(|(owner, bytes)| (*owner, (*bytes, 0))));
        }
        drop(table);
        if grown > 0 {
            self.admission.dirtied(self.dataset, txg, grown);
        }
        Ok(changed?)
    }
}
