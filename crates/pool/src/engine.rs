//! The engine: an imported pool with its datasets, the commits that make them durable, and its
//! administrative operations (create, snapshot, destroy, send ...).
//!
//! Called by the crate `poolfs` (files of one dataset) and by the commands' server (everything
//! else); calls the store through [`Storage`].
//!
//! ```text
//!  operations ----- gate (shared) ------> rows of a dataset, frames
//!  commit           gate (exclusive, short): flush what memory holds, freeze every tree
//!                   write the trees out -> free rule -> catalog -> store: durable
//!  administration   the lock of the catalog: part of a commit
//! ```
//!
//! Invariants:
//! - Lock order: `admin`, the table of datasets, then the order given in [`crate::files`]. A commit
//!   holds `admin` for its whole length.
//! - An administrative operation is a commit: its changes are durable when it returns.
//! - After a failed commit the pool is suspended: it accepts nothing further, and the durable state
//!   is that of the last commit.

mod administration;
mod catalog_view;
pub mod changes;
mod check;
mod commit;
mod commit_times;
mod committer;
mod dataset;
mod doomed;
mod following;
mod keeping;
mod logging;
mod naming;
mod owners;
mod pool_meta;
mod properties;
mod received_shape;
pub mod receiving;
mod replay_skip;
mod reservation;
pub mod sending;
mod sharing;
mod snapshot_read;
mod storage;
#[cfg(test)]
mod tests;
mod tree_table;

pub use administration::{DestroySet, NewDataset};
pub use catalog_view::{CatalogView, SnapshotLine};
pub use check::CheckCounts;
pub use commit_times::CommitFigures;
use committer::OnStuck;
pub use committer::{Committer, Pace, Stuck};
pub use dataset::Dataset;
pub use following::{Ahead, Changes};
pub use owners::OwnerUsed;
pub use pool_meta::FilePath;
pub use properties::{Edit, Setting};
pub use tree_table::TreeTable;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use parking_lot::{MappedMutexGuard, Mutex, RwLock};

use commit_times::CommitTimes;
use reservation::Reservations;

use crate::cache::Cache;
use crate::catalog::{Catalog, PoolHead};
use crate::deadlist::{Dead, ListId};
use crate::error::PoolError;
use crate::files::{Clock, Gate, Keeper, Share, Storing, Throttle};
use crate::frames::{Compressed, CompressionSetting, Frames, NewFrame, Reach, Wanted};
use crate::log;
use crate::pointer::{ChecksumKind, Pointer, Txg};
use crate::properties::Level;
use crate::properties::effective::{check_mountpoints, limits};
use crate::rows::keys::Hashing;
use crate::space::{Limits, Purpose, QuotaTree};

/// Interface of the store (frames in segments) that the engine uses.
pub trait Storage: Frames {
    /// Frees a frame that nothing references any more once `txg` is committed.
    ///
    /// # Errors
    /// A frame that the store does not know, or that is free already: the catalog is damaged.
    fn free(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError>;

    /// Makes everything up to `txg` durable, with the catalog's root and the position in the intent
    /// log where a replay begins. `time` is shown in the list of retained root records (like uberblocks).
    ///
    /// # Errors
    /// A device that fails; the store is suspended then.
    fn commit(&self, txg: Txg, catalog: Option<Pointer>, log: log::Start, time: u64) -> Result<(), PoolError>;

    /// Confirms that the durable state from which the pool was opened can be read. If that state is
    /// an older one (a rewind), the newer ones are given up now.
    ///
    /// # Errors
    /// A device that fails.
    fn opened(&self) -> Result<(), PoolError>;

    /// Bytes that frames may use in all: slop space included, without the space that the store
    /// itself needs.
    fn size(&self) -> u64;

    /// Bytes that may be written for this purpose now: without the part of the slop space that the
    /// purpose may not use.
    fn room(&self, purpose: Purpose) -> u64;

    /// Bytes of content that can be stored before a writer has to wait for the cleaner.
    fn room_before_cleaning(&self) -> u64;

    /// Takes into use the space by which devices have grown since they became part of the pool;
    /// returns whether there was any. `time` is the current time.
    fn expand(&self, time: u64) -> bool;

    /// Sets whether frames are accepted even after a device has failed: frames that the device does
    /// not take stay in memory and are not durable.
    fn keep_unwritten(&self, on: bool);

    /// Bytes of memory used by frames that devices did not take.
    fn held_unwritten(&self) -> u64;

    /// Reason why no commit succeeds any more, if the pool is suspended: a device has failed.
    fn suspended(&self) -> Option<PoolError>;

    /// Suspends the store: no commit succeeds from now on. Returns the reason of the first
    /// suspension.
    fn suspend(&self, error: &PoolError) -> PoolError;

    /// Length of the longest record that makes sense in this store, bytes.
    fn largest_frame(&self) -> u64;

    /// Hash function of names in file systems that are created from now on.
    fn hashing(&self) -> Hashing;

    /// Marks the pool as one with name folding (names that are equal though their bytes differ),
    /// before the first file system of that kind is created: programs that do not know the feature
    /// then refuse to import the pool. `time` is the current time.
    ///
    /// # Errors
    /// A device that fails.
    fn allow_folding(&self, time: u64) -> Result<(), PoolError>;

    /// Whether frames of the pool may be sealed (encrypted).
    fn is_sealed(&self) -> bool;

    /// Does one step of the store's maintenance: cleans about `budget` bytes of segments and
    /// returns freed segment slots to their devices.
    ///
    /// # Errors
    /// A device that fails.
    fn tend(&self, budget: u64) -> Result<Work, PoolError>;
}

/// Whether more work can be done at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Nothing to do for now.
    None,
    /// More work is waiting.
    More,
    /// More work is waiting, and writers wait for it.
    Urgent,
}

impl Work {
    /// Returns the more urgent one of the two.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        self.max(other)
    }
}

/// Source of random numbers, for values that must be unpredictable or unique.
pub type Entropy = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Parts from which an imported pool is assembled.
pub struct PoolConfig {
    /// The store.
    pub storage: Arc<dyn Storage>,
    /// The clock.
    pub clock: Clock,
    /// Random numbers.
    pub entropy: Entropy,
    /// Limit of the cache, bytes.
    pub cache: u64,
    /// The blocks of the intent log; without them each fsync is a commit.
    pub log: Option<Box<dyn log::Blocks>>,
    /// The replay journal, which survives the process; the journal of a crashed process is
    /// replayed.
    pub kept: Option<Arc<log::KeptLog>>,
}

/// Durable state from which a pool is opened.
#[derive(Clone, Copy, Debug)]
pub struct Durable {
    /// The last commit.
    pub txg: Txg,
    /// The catalog's root.
    pub catalog: Pointer,
    /// Where the part of the intent log begins that is newer than that commit.
    pub log: log::Start,
}

impl fmt::Debug for PoolConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolConfig").field("cache", &self.cache).finish_non_exhaustive()
    }
}

/// A pool whose catalog was read and whose log was not replayed yet.
pub struct ReadCatalog {
    pool: Pool,
    blocks: Option<Box<dyn log::Blocks>>,
    kept: Option<Arc<log::KeptLog>>,
}

impl fmt::Debug for ReadCatalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadCatalog").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// An imported pool.
pub struct Pool {
    storage: Arc<dyn Storage>,
    /// Source of tree nodes: the cache calls it.
    frames: Arc<dyn Frames>,
    /// Source of file content: it calls the cache.
    content: Arc<dyn Frames>,
    cache: Arc<Cache>,
    gate: Arc<Gate>,
    clock: Clock,
    entropy: Entropy,
    admin: Mutex<Admin>,
    reservations: Arc<Reservations>,
    datasets: RwLock<HashMap<u64, Arc<Dataset>>>,
    log: OnceLock<Arc<logging::PoolLog>>,
    keeper: OnceLock<Arc<Keeper>>,
    /// Orphan inodes (open files without a name) of a crashed process are held, not freed.
    holds_left: AtomicBool,
    throttle: Arc<Throttle>,
    /// Memory used by replayed frames that devices did not take.
    unwritten: Share,
    on_stuck: OnceLock<Box<OnStuck>>,
    /// The last durable txg.
    committed: AtomicU64,
    commit_times: CommitTimes,
    /// Frames of destroyed datasets or snapshots are still being freed.
    freeing: AtomicBool,
    /// Datasets into which a stream is being received.
    receiving: Mutex<HashSet<u64>>,
    /// Owner (uid, gid) of root directories of new file systems.
    owner: Mutex<(u32, u32)>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("gate", &self.gate).finish_non_exhaustive()
    }
}

/// State that administrative operations and commits work on.
#[derive(Debug)]
struct Admin {
    catalog: Catalog,
    reservations: Arc<Reservations>,
    /// Some frames may be referenced by several rows.
    sharing: bool,
    /// Why the pool is suspended: nothing is accepted any more.
    failed: Option<PoolError>,
}

impl Admin {
    /// The accounts of datasets. Hold the lock only for a moment: every write needs it.
    fn quota_tree(&self) -> MappedMutexGuard<'_, QuotaTree> {
        self.reservations.quota_tree()
    }
}

/// Frames read through the cache.
struct CachedFrames {
    storage: Arc<dyn Storage>,
    cache: Arc<Cache>,
}

impl Frames for CachedFrames {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        self.cache.data(&*self.storage, pointer)
    }

    fn read_accepted(
        &self,
        pointer: &Pointer,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Arc<[u8]>, PoolError> {
        // Not from the cache, which may have the refused bytes: they are forgotten there.
        let content = self.storage.read_accepted(pointer, is_right)?;
        self.cache.forget(pointer);
        Ok(content)
    }

    fn read_all(&self, wanted: &mut [Wanted<'_>]) -> Result<(), PoolError> {
        let mut missing = Vec::with_capacity(wanted.len());
        for Wanted { pointer, target } in wanted.iter_mut() {
            match self.cache.cached_data(pointer) {
                Some(content) if content.len() == target.len() => target.copy_from_slice(&content),
                // The kernel's page cache keeps what a stream reads; kept here, too, it would evict
                // content that only this cache has.
                _ => missing.push(Wanted { pointer: *pointer, target }),
            }
        }
        if missing.is_empty() { Ok(()) } else { self.storage.read_all(&mut missing) }
    }

    fn expect(&self, pointers: &[Pointer]) {
        self.storage.expect(pointers);
    }

    fn expect_later(&self, pointers: &[Pointer], beyond: &[Pointer]) {
        self.storage.expect_later(pointers, beyond);
    }

    fn ahead(&self) -> Reach {
        self.storage.ahead()
    }

    fn await_room(&self) {
        self.storage.await_room();
    }

    fn make_room(&self, bytes: u64) -> Result<bool, PoolError> {
        self.storage.make_room(bytes)
    }

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        self.storage.write(frame)
    }

    fn write_all(&self, frames: &[NewFrame<'_>], written: &mut Vec<Pointer>) -> Result<(), PoolError> {
        self.storage.write_all(frames, written)
    }

    fn read_stored(&self, pointer: &Pointer) -> Result<Option<Vec<u8>>, PoolError> {
        self.storage.read_stored(pointer)
    }

    fn compress_all(&self, frames: &[NewFrame<'_>]) -> Result<Vec<Compressed>, PoolError> {
        self.storage.compress_all(frames)
    }

    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer, PoolError> {
        self.storage.write_compressed(frame, compressed)
    }
}

#[cfg(test)]
pub(crate) fn cached_for_tests(storage: Arc<dyn Storage>, cache: &Arc<Cache>) -> Arc<dyn Frames> {
    Arc::new(CachedFrames { storage, cache: Arc::clone(cache) })
}

impl Pool {
    /// Creates a pool in an empty store: the catalog, and the root dataset, which has the pool's
    /// name. It is durable when this returns.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn create(config: PoolConfig, name: &str) -> Result<Self, PoolError> {
        Self::create_owned(config, name, (0, 0), &[])
    }

    /// As [`Self::create`], with an owner (uid, gid) of root directories, as after
    /// [`Self::belongs_to`], and with these properties of the root dataset, as users write them.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn create_owned(
        mut config: PoolConfig,
        name: &str,
        owner: (u32, u32),
        properties: &[(String, String)],
    ) -> Result<Self, PoolError> {
        let open = Txg(1);
        let (blocks, kept) = (config.log.take(), config.kept.take());
        let pool = Self::over(config, open, None);
        pool.belongs_to(owner);
        {
            let mut admin = pool.admin.lock();
            let catalog = &mut admin.catalog;
            catalog.set_txg(open);
            let head = PoolHead { next: 1, root: 1, freeing: ListId(0), history: 0 };
            catalog.set_head(&head)?;
            let freeing = catalog.deadlists().create()?;
            catalog.set_head(&PoolHead { freeing, ..head })?;
        }
        if let Some(mut blocks) = blocks {
            blocks.begin(log::Start::default())?;
            pool.start_log(blocks);
        }
        pool.create_root(name, properties)?;
        kept.into_iter().for_each(|kept| pool.keep_with(kept));
        Ok(pool)
    }

    /// Whether no commit is running, or the running one ends within this time: requests for status
    /// wait for it.
    #[must_use]
    pub fn answers_within(&self, time: std::time::Duration) -> bool {
        self.admin.try_lock_for(time).is_some()
    }

    /// Sets the owner (uid, gid) of root directories of file systems that are created from now on.
    pub fn belongs_to(&self, owner: (u32, u32)) {
        *self.owner.lock() = owner;
    }

    /// Opens a pool at its last commit, and applies the fsyncs that the intent log holds after
    /// that; or, if a crashed process left a replay journal, all operations after that.
    ///
    /// # Errors
    /// Errors of the store; a damaged catalog.
    pub fn open(config: PoolConfig, durable: &Durable) -> Result<Self, PoolError> {
        Self::open_after(config, durable, &mut |_| Ok(()))
    }

    /// As [`Self::open`]. `before` is called before the replay journal of a crashed process is
    /// applied, if there is one: only the journal has these operations, and writing them may block
    /// on a device.
    ///
    /// # Errors
    /// As [`Self::open`], and errors of `before`.
    pub fn open_after(
        config: PoolConfig,
        durable: &Durable,
        before: &mut dyn FnMut(&Self) -> Result<(), PoolError>,
    ) -> Result<Self, PoolError> {
        Self::read_catalog(config, durable)?.replay(durable, before)
    }

    /// Opens a pool at its last commit, without replaying its log: damage of the catalog is found
    /// here.
    ///
    /// # Errors
    /// Errors of the store; a damaged catalog.
    pub fn read_catalog(mut config: PoolConfig, durable: &Durable) -> Result<ReadCatalog, PoolError> {
        let (blocks, kept) = (config.log.take(), config.kept.take());
        let pool = Self::over(config, Txg(durable.txg.0 + 1), Some(durable.catalog));
        {
            let mut admin = pool.admin.lock();
            admin.catalog.check_shape()?;
            admin.catalog.check_keys(pool.storage.is_sealed())?;
            let quotas = pool.forest_of(&admin.catalog)?;
            *admin.quota_tree() = quotas;
            admin.count_shared()?;
            pool.reservations.measure();
        }
        Ok(ReadCatalog { pool, blocks, kept })
    }

    fn over(config: PoolConfig, open: Txg, root: Option<Pointer>) -> Self {
        let PoolConfig { storage, clock, entropy, cache, .. } = config;
        let cache = Arc::new(Cache::new(cache));
        let frames: Arc<dyn Frames> = Arc::clone(&storage) as Arc<dyn Frames>;
        let content: Arc<dyn Frames> =
            Arc::new(CachedFrames { storage: Arc::clone(&storage), cache: Arc::clone(&cache) });
        let catalog = Catalog::open(Arc::clone(&frames), Arc::clone(&cache), root, open);
        let quotas = QuotaTree::new(0, storage.size(), crate::space::Usage::default(), Limits::default());
        let reservations = Arc::new(Reservations::new(Arc::clone(&storage), quotas));
        let throttle: Arc<Throttle> = Arc::default();
        Self {
            admin: Mutex::new(Admin { catalog, reservations: Arc::clone(&reservations), sharing: false, failed: None }),
            reservations,
            frames,
            content,
            cache,
            gate: Arc::new(Gate::new(open)),
            clock,
            entropy,
            storage,
            datasets: RwLock::default(),
            log: OnceLock::new(),
            keeper: OnceLock::new(),
            holds_left: AtomicBool::new(false),
            unwritten: Share::new(Arc::clone(&throttle)),
            throttle,
            on_stuck: OnceLock::new(),
            committed: AtomicU64::new(open.0.saturating_sub(1)),
            commit_times: CommitTimes::default(),
            freeing: AtomicBool::new(true),
            receiving: Mutex::default(),
            owner: Mutex::default(),
        }
    }

    /// Builds the tree of datasets with their usage and limits from the catalog, parents before
    /// children.
    fn forest_of(&self, catalog: &Catalog) -> Result<QuotaTree, PoolError> {
        let root = catalog.head()?.root;
        let limits = |id| {
            let rows = catalog.properties(id)?;
            check_mountpoints(&rows)?;
            limits(&Level { name: "", rows: &rows })
        };
        let usage = catalog.dataset(root)?.usage;
        let mut quotas = QuotaTree::new(root, self.storage.size(), usage, limits(root)?);
        let mut waiting = catalog.children(root)?;
        while let Some(id) = waiting.pop() {
            let row = catalog.dataset(id)?;
            quotas.add(id, row.parent, row.usage, limits(id)?)?;
            waiting.extend(catalog.children(id)?);
        }
        for (id, _) in catalog.datasets()? {
            quotas.count_snapshots(id, i64::try_from(catalog.snapshots(id)?.len()).unwrap_or(i64::MAX))?;
        }
        Ok(quotas)
    }

    /// Returns an open dataset by its number, opening it first if necessary; all callers share one.
    ///
    /// # Errors
    /// Errors of the store; a number that the catalog does not have is damage.
    pub fn dataset(&self, id: u64) -> Result<Arc<Dataset>, PoolError> {
        let (dataset, opened) = self.open_dataset(id)?;
        if opened {
            self.sweep(&dataset)?;
        }
        Ok(dataset)
    }

    /// As [`Self::dataset`], and whether the dataset was opened by this call.
    fn open_dataset(&self, id: u64) -> Result<(Arc<Dataset>, bool), PoolError> {
        if let Some(dataset) = self.datasets.read().get(&id) {
            return Ok((Arc::clone(dataset), false));
        }
        let admin = self.admin.lock();
        if let Some(dataset) = self.datasets.read().get(&id) {
            return Ok((Arc::clone(dataset), false));
        }
        let row = admin.catalog.dataset(id)?;
        if admin.is_half(id)? {
            return Err(PoolError::Refused("it is half received: nothing in it can be used yet".to_owned()));
        }
        let dataset = Arc::new(Dataset::open(self, id, row.root)?);
        dataset.adopt(admin.behaviour_of(id)?, &self.bounds(), admin.owner_quotas(id)?);
        dataset.files().set_held_by_snapshots(row.newest);
        self.datasets.write().insert(id, Arc::clone(&dataset));
        Ok((dataset, true))
    }

    /// Finds a dataset by its full name: the pool's name and the components below it, separated by
    /// slashes.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn find(&self, name: &str) -> Result<Option<u64>, PoolError> {
        let admin = self.admin.lock();
        find(&admin.catalog, name)
    }

    /// How a dataset's content is stored until its properties are known.
    fn storing(&self) -> Storing {
        Storing { record_shift: 17, compression: CompressionSetting::On, checksum: ChecksumKind::Xxh3 }
    }
}

impl ReadCatalog {
    /// Applies the intent log, or the replay journal of a crashed process: see
    /// [`Pool::open_after`].
    ///
    /// # Errors
    /// Errors of the store, and of `before`.
    pub fn replay(
        self,
        durable: &Durable,
        before: &mut dyn FnMut(&Pool) -> Result<(), PoolError>,
    ) -> Result<Pool, PoolError> {
        let Self { pool, blocks, kept } = self;
        let confirmed = pool.storage.opened();
        match (blocks, kept) {
            (Some(blocks), Some(kept)) if kept.has_served() => {
                // A replay works without a device that takes writes.
                if pool.storage.suspended().is_none() {
                    confirmed?;
                }
                before(&pool)?;
                pool.replay_kept(blocks, kept, durable)?;
            }
            (Some(blocks), kept) => {
                confirmed?;
                pool.replay_log(blocks, durable)?;
                kept.into_iter().for_each(|kept| pool.keep_with(kept));
            }
            (None, Some(_)) => return Err(PoolError::Refused("what is not written to has nothing to keep".to_owned())),
            (None, None) => confirmed?,
        }
        Ok(pool)
    }
}

fn find(catalog: &Catalog, name: &str) -> Result<Option<u64>, PoolError> {
    let mut parts = name.split('/');
    let root = catalog.head()?.root;
    if parts.next() != Some(catalog.dataset(root)?.name.as_str()) {
        return Ok(None);
    }
    let mut at = root;
    for part in parts {
        match catalog.child(at, part)? {
            Some(child) => at = child,
            None => return Ok(None),
        }
    }
    Ok(Some(at))
}

/// Takes the engine's error out of an error of files: inside the engine there is no other kind.
fn as_pool_error(error: crate::files::FileError) -> PoolError {
    match error {
        crate::files::FileError::Pool(error) => error,
        other => PoolError::Refused(other.to_string()),
    }
}
