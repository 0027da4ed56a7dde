//! POSIX files of one dataset, stored as rows: names, attributes, content, extended attributes,
//! listings.
//!
//! Called by the crate `poolfs` with inode numbers and names; calls the dataset's tree through
//! [`Table`] and the store through [`Frames`]. Permissions are not checked here: the caller has
//! checked them.
//!
//! Invariants:
//! - Lock order: the gate (the txg lock, shared), `names`, inodes (several only under `names`), the
//!   table, the small ones (`known`, `dirty`, `owners`, `freed`).
//! - All table changes of one operation are one [`Batch`], applied under one lock: a rename is
//!   never visible in part.
//! - An *active* inode (written to since the last flush) has its attributes in memory; its row in
//!   the table has the size for which the table has the content, so that a row in the log never
//!   shows content that does not exist.
//! - Before a txg is frozen all active inodes are flushed into the table ([`Files::flush`]), so the
//!   frozen tree is the state of one moment.

mod buffered;
mod content;
mod durable;
mod flush_pace;
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
mod room_pace;
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

pub(crate) use content::flush_most;
pub use content::{SIZE_MOST, SeekTo, WriteOutcome};
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

/// Reason why an operation on files was refused or failed. The layer above maps each to an errno.
#[derive(Clone, Debug)]
pub enum FileError {
    /// The name does not exist, or the directory was removed.
    NotFound,
    /// The name exists.
    Exists,
    /// Not a directory.
    NotDirectory,
    /// A directory.
    IsDirectory,
    /// A directory that holds names.
    NotEmpty,
    /// An operation that makes no sense: a directory moved below itself, reading the target of
    /// something that is no symbolic link.
    Invalid,
    /// An operation that nobody may do: a second name for a directory.
    NotPermitted,
    /// A name of more than 255 bytes, or a target that is too long.
    NameTooLong,
    /// A new name that is not UTF-8, where the dataset requires UTF-8.
    NotUtf8,
    /// The link count of the file is at its maximum.
    TooManyLinks,
    /// A file cannot be that large.
    TooLarge,
    /// There is no extended attribute of this name, or no data after this offset.
    NoData,
    /// The extended attribute exists.
    AttributeExists,
    /// The value does not fit the buffer.
    Range,
    /// The dataset is a snapshot or read-only.
    ReadOnly,
    /// A quota of a dataset is exceeded.
    Quota,
    /// A quota of a user or group is exceeded; displayed like [`Self::Quota`].
    OwnerQuota,
    /// An error of the engine.
    Pool(PoolError),
}

impl FileError {
    /// Whether the error concerns the data that was read, and not the pool.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.is_rotten() || matches!(self, Self::Pool(PoolError::Device { doing: "reading", .. }))
    }

    /// Whether the data that was read is damaged for good: a read error of a device may not occur
    /// again.
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

/// Result of operations on files.
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

/// Amount of stored data, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// Space that it is charged.
    pub charged: u64,
    /// Before compression.
    pub logical: u64,
}

impl StoredBytes {
    /// Adds to the amount.
    #[must_use]
    pub fn and(self, charged: u64, logical: u64) -> Self {
        Self { charged: self.charged + charged, logical: self.logical + logical }
    }
}

/// Clock of the files' timestamps.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// The clock by which the kernel sets timestamps that it keeps itself: it advances once a tick.
/// With another clock files would be created after their first write.
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
    /// Room that content in memory needs.
    needed: Share,
    owners: owner_accounts::OwnerAccounts,
    /// Progress of charging inodes of older versions for their rows. Lock order: after the gate,
    /// before the table.
    recounted: Mutex<row_recount::Recounted>,
    /// Time at which a file last lost its last name.
    lost_name: Mutex<Option<std::time::Instant>>,
    /// Serializes operations that lack room, while commits make some. The first lock in the order.
    short: Mutex<()>,
    rules: RwLock<Rules>,
    admission: Arc<dyn Admission>,
    stop: stopping::Stop,
    /// Set during log replay: these operations have already been acknowledged.
    replaying: AtomicBool,
    /// Txg of the newest snapshot or of the origin: a frame born later is freed when it is
    /// replaced.
    held_by_snapshots: AtomicU64,
    /// The dataset header cannot be read, so nothing may be changed.
    headless: AtomicBool,
    /// A stream is being received: all rows come from it, the dataset header included.
    receiving: AtomicBool,
    readahead: readahead::ListingReadahead,
    streams: streams::Streams,
    freed: Mutex<Vec<Dead>>,
    unstored: Mutex<unstored::Unstored>,
    /// Frames that rows of the open txg share for the first time.
    shared: Mutex<Vec<Pointer>>,
    written: AtomicU64,
    written_logical: AtomicU64,
    recorder: OnceLock<Arc<dyn Recorder>>,
    keeper: OnceLock<Arc<Keeper>>,
    /// Orphan inodes of a crashed process, if there was one.
    left: Mutex<Option<HashSet<u64>>>,
}

/// Current values of the dataset header.
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

/// The intent log: records operations so that an fsync need not wait for a commit. Called while the
/// txg is held open.
pub trait Recorder: Send + Sync {
    /// Records an operation of this txg, as an encoded [record](LogRecord::encoded).
    fn record(&self, txg: Txg, record: Vec<u8>) -> Ticket;

    /// Notes a change that no record can hold: until this txg is committed, only a commit makes
    /// anything durable.
    fn cannot_record(&self, txg: Txg);
}

/// Parts from which the files of a dataset are assembled.
pub struct FilesConfig {
    /// The dataset's number, for the headers of frames.
    pub dataset: u64,
    /// The pool's txg lock.
    pub gate: Arc<Gate>,
    /// The pool's frames.
    pub frames: Arc<dyn Frames>,
    /// The clock.
    pub clock: Clock,
    /// How content is stored.
    pub storing: Storing,
    /// Longest record, bytes: the segments of the pool hold no longer frames.
    pub longest_record: u64,
    /// Accounting of uncommitted memory.
    pub throttle: Arc<Throttle>,
    /// Admission of writes against all quotas and the pool's space.
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

/// Permanent parameters of a new file system.
#[derive(Clone, Copy, Debug)]
pub struct NewFiles {
    /// How names are hashed; with name folding always [`Hashing::Ordered`].
    pub hashing: Hashing,
    /// Which names are equal.
    pub folding: Folding,
    /// Seed of the hashes of names.
    pub seed: u64,
    /// The uid and gid of the root directory.
    pub owner: (u32, u32),
}

/// Reads absent nodes of a table without its lock. A commit may have freed them meanwhile; a read
/// error is reported by the operation that needs them under the lock.
fn hint(read: Absent) {
    if let Err(error) = read() {
        tracing::debug!(%error, "a part of a table that was to be read ahead is gone");
    }
}

/// No path down a tree is longer.
const WARMED_MOST: usize = 16;

impl<T: Table> Files<T> {
    /// Creates an empty file system in an empty table; its root directory has mode 755.
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

    /// Opens the files of a table.
    ///
    /// # Errors
    /// [`PoolError`] of the table; a table without a dataset header is damaged.
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
            buffered: Share::of_content(Arc::clone(&throttle)),
            needed: Share::of_room(Arc::clone(&throttle)),
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

    /// Returns which names are equal.
    #[must_use]
    pub fn folding(&self) -> Folding {
        self.numbers.folding
    }

    /// Number of inodes.
    #[must_use]
    pub fn objects(&self) -> u64 {
        self.numbers.objects.load(Ordering::Relaxed)
    }

    /// Bytes of content that wait in memory for the next flush.
    #[must_use]
    pub fn buffered(&self) -> u64 {
        self.buffered.bytes()
    }

    /// Sets how new content is stored.
    pub fn set_storing(&self, storing: Storing) {
        *self.storing.write() = storing;
    }

    /// Runs `look` with the table locked for writing: a commit freezes it, a check reads it.
    pub fn with_table<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        let mut table = self.table.write();
        self.recent.clear();
        look(&mut table)
    }

    /// Runs `look` with the table locked for reading.
    pub fn look_at_table<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.table.read())
    }

    /// Whether the table's lock is free.
    #[cfg(test)]
    pub(crate) fn table_is_free(&self) -> bool {
        self.table.try_write().is_some()
    }

    /// Whether memory has changes that are not in the table.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        !self.dirty.lock().is_empty() || self.owners.has_changes() || self.known.has_released()
    }

    /// Takes the content frames that the open txg has freed so far; the commit applies the free
    /// rule to them.
    pub fn take_freed(&self) -> Vec<Dead> {
        std::mem::take(&mut *self.freed.lock())
    }

    /// Takes the amount of content that the open txg has stored so far, for the commit.
    pub fn take_written(&self) -> StoredBytes {
        StoredBytes {
            charged: self.written.swap(0, Ordering::Relaxed),
            logical: self.written_logical.swap(0, Ordering::Relaxed),
        }
    }

    /// Writes a frame and counts it as written.
    fn write_frame(&self, frame: &NewFrame<'_>) -> Result<Pointer> {
        let pointer = self.frames.write(frame)?;
        self.count_written(&pointer);
        Ok(pointer)
    }

    fn count_written(&self, pointer: &Pointer) {
        self.written.fetch_add(pointer.charged(), Ordering::Relaxed);
        self.written_logical.fetch_add(pointer.counted_logical().into(), Ordering::Relaxed);
    }

    /// Begins an operation: waits while memory holds too much, then holds the open txg open. Not to
    /// be called under any lock.
    #[track_caller]
    fn enter(&self) -> Result<Entered<'_>> {
        self.enter_with(keeping::ROWS)
    }

    /// As [`Self::enter`], for an operation that appends this many bytes to the replay journal, if
    /// there is one.
    #[track_caller]
    fn enter_with(&self, bytes: u64) -> Result<Entered<'_>> {
        self.throttle.admit()?;
        let room = self.room_to_keep(bytes)?;
        Ok(self.enter_now().with_room(room))
    }

    /// Holds the open txg open, however much memory holds. Not to be called under any lock.
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

    /// Assigns a number to a new inode or entry. A number is never assigned twice.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`] if all are used: the counter in a dataset header ends at
    /// [`keys::NUMBER_MOST`].
    fn number(&self) -> Result<u64> {
        let next = |next: u64| (next < keys::NUMBER_MOST).then_some(next + 1);
        self.numbers
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .map_err(|_| PoolError::NoSpace.into())
    }

    /// Adds bytes and objects to the usage of an inode's user and group.
    fn count_owner(&self, row: &crate::rows::InodeRow, bytes: i64, objects: i64) {
        self.owners.change(owners_of(row).map(|owner| (owner, (bytes, objects))));
    }

    /// Starts recording operations. Before, during a log replay, they are not recorded.
    pub fn record_to(&self, recorder: Arc<dyn Recorder>) {
        // A second recorder would split the log: the first stays.
        let _ = self.recorder.set(recorder);
    }

    /// Applies and records the changes of an operation.
    fn apply_recorded(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply_and(txg, batch, || {
            let kept = self.keep_rows(txg, batch);
            self.record_rows(txg, batch, kept);
        })
    }

    /// Records the rows of a batch; `encoded` is their record, if it was encoded already.
    fn record_rows(&self, txg: Txg, batch: &Batch, encoded: Option<Vec<u8>>) {
        if let Some(recorder) = self.recorder.get() {
            recorder.record(txg, encoded.unwrap_or_else(|| self.record_of(txg, batch)));
        }
    }

    fn record_of(&self, txg: Txg, batch: &Batch) -> Vec<u8> {
        LogRecord { txg, dataset: self.dataset, changes: batch.logged() }.encoded()
    }

    /// Reads the nodes on the path to a row into memory, as far as they are known, so that no
    /// device is waited for under the table's lock. Not to be called under that lock.
    fn warm(&self, key: &[u8]) -> Result<()> {
        // Nodes that a small cache does not keep are read under the lock after all.
        for _ in 0..WARMED_MOST {
            let absent = self.table.read().absent(key)?;
            match absent {
                None => break,
                Some(read) => hint(read),
            }
        }
        Ok(())
    }

    /// As [`Self::warm`] for the rows of a range, up to a number of leaves.
    fn warm_range(&self, range: &std::ops::Range<Vec<u8>>, leaves: usize) -> Result<()> {
        let absent = self.table.read().absent_in(range, leaves)?;
        absent.into_iter().for_each(hint);
        Ok(())
    }

    /// Applies the changes of an operation; its freed frames and usage are noted only on success.
    fn apply(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply_and(txg, batch, || {})
    }

    /// As [`Self::apply`]; `record` is called before the change is visible, and before another
    /// operation can depend on it.
    fn apply_and(&self, txg: Txg, batch: &Batch, record: impl FnOnce()) -> Result<()> {
        self.change_table(txg, batch, record).inspect_err(|_| self.abandon(batch))?;
        if !batch.dead.is_empty() {
            self.freed.lock().extend(batch.dead.iter().copied());
            let held = self.held_by_snapshots.load(Ordering::Relaxed);
            let freed = batch.dead.iter().filter(|dead| !dead.shared && dead.birth.0 > held);
            let replaced = freed.map(|dead| dead.charged).sum();
            self.throttle.replaced(replaced, || self.admission.room_before_cleaning());
        }
        if !batch.uses.is_empty() {
            self.owners.change(batch.uses.iter().map(|(owner, bytes)| (*owner, (*bytes, 0))));
        }
        Ok(())
    }

    /// Drops a batch that was not applied: the frames that were written for it are freed.
    fn abandon(&self, batch: &Batch) {
        if !batch.written.is_empty() {
            self.freed.lock().extend(batch.written.iter().copied());
        }
    }

    /// Changes the table, and the charges of inodes for their rows.
    fn change_table(&self, txg: Txg, batch: &Batch, record: impl FnOnce()) -> Result<()> {
        if batch.is_empty() {
            record();
            return Ok(());
        }
        batch.changes().iter().try_for_each(|change| self.warm(&change.key))?;
        let table = self.table.write();
        self.change_locked(table, txg, batch, record)
    }

    /// Changes the table by a batch that is computed from its current rows.
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
