//! The engine: an imported pool. Its datasets, the commits that make them durable, and what
//! administration does with them.
//!
//! Called by the layer `dataset` (files of one dataset) and by the commands' server (everything
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
//! - Lock order: `admin`, the table of datasets, then what [`crate::files`] says. A commit holds
//!   `admin` for its whole length.
//! - What administration changes is durable when it returns: it is a commit.
//! - After a commit that failed nothing further is accepted: the pool is suspended, and what is
//!   durable is the state of the last commit.

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

/// The store as the engine sees it.
pub trait Storage: Frames {
    /// Nothing reaches the frame any more once `txg` is committed.
    ///
    /// # Errors
    /// A frame that the store does not know, or that is free already: the catalog is damaged.
    fn free(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError>;

    /// Makes everything up to `txg` durable, with the catalog's root and where a replay of the log
    /// begins. `time` is for people who list the roots that are kept.
    ///
    /// # Errors
    /// A device that fails; the store is suspended then.
    fn commit(&self, txg: Txg, catalog: Option<Pointer>, log: log::Start, time: u64) -> Result<(), PoolError>;

    /// The durable state that the pool was opened from could be read: where later ones are given up
    /// for it, this is the moment.
    ///
    /// # Errors
    /// A device that fails.
    fn opened(&self) -> Result<(), PoolError>;

    /// What frames may take in all, bytes: slop included, what the store itself needs left out.
    fn size(&self) -> u64;

    /// What may be written for this now, bytes: what of the slop it may not use is left out.
    fn room(&self, purpose: Purpose) -> u64;

    /// Takes the room that devices have got since they became part of the pool; whether there was any. `time` is
    /// when.
    fn expand(&self, time: u64) -> bool;

    /// Whether frames are taken also after a device has failed: what it does not take stays in memory, and is
    /// not durable.
    fn keep_unwritten(&self, on: bool);

    /// What frames take in memory that devices did not take, bytes.
    fn held_unwritten(&self) -> u64;

    /// Why no commit succeeds any more, if it is so: a device has failed.
    fn suspended(&self) -> Option<PoolError>;

    /// From now on no commit succeeds; answers the first reason.
    fn suspend(&self, error: &PoolError) -> PoolError;

    /// The longest record that makes sense here, bytes.
    fn largest_frame(&self) -> u64;

    /// How names are hashed in file systems that are made now.
    fn hashing(&self) -> Hashing;

    /// File systems in which names are the same though their bytes differ are about to be made:
    /// from now on who does not know of them keeps away. `time` is when.
    ///
    /// # Errors
    /// A device that fails.
    fn allow_folding(&self, time: u64) -> Result<(), PoolError>;

    /// A step of what keeps the store in order: cleaning about so many bytes, giving freed slots
    /// back to their devices.
    ///
    /// # Errors
    /// A device that fails.
    fn tend(&self, budget: u64) -> Result<Work, PoolError>;
}

/// Whether there is more to do at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing for now.
    None,
    /// More.
    More,
}

impl Work {
    /// More, where one of both is.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self == Self::More { self } else { other }
    }
}

/// Random numbers, for what must not be guessed or must be unique.
pub type Entropy = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What an imported pool stands on.
pub struct PoolConfig {
    /// The store.
    pub storage: Arc<dyn Storage>,
    /// The clock.
    pub clock: Clock,
    /// Random numbers.
    pub entropy: Entropy,
    /// The limit of the cache, bytes.
    pub cache: u64,
    /// The blocks of the intent log; without them each fsync is a commit.
    pub log: Option<Box<dyn log::Blocks>>,
    /// What is to outlive the process; that of one that has died is replayed.
    pub kept: Option<Arc<log::KeptLog>>,
}

/// The durable state that a pool is opened from.
#[derive(Clone, Copy, Debug)]
pub struct Durable {
    /// The last commit.
    pub txg: Txg,
    /// The catalog's root.
    pub catalog: Pointer,
    /// Where the log begins that is not in that commit.
    pub log: log::Start,
}

impl fmt::Debug for PoolConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolConfig").field("cache", &self.cache).finish_non_exhaustive()
    }
}

/// A pool of which the catalog was read, and the log was not.
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
    /// For the nodes of trees: the cache asks it.
    frames: Arc<dyn Frames>,
    /// For content: it asks the cache.
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
    /// Files without a name that a process which has died left are held.
    holds_left: AtomicBool,
    throttle: Arc<Throttle>,
    /// Frames of a replay that devices did not take.
    unwritten: Share,
    on_stuck: OnceLock<Box<OnStuck>>,
    /// The last txg that is durable.
    committed: AtomicU64,
    commit_times: CommitTimes,
    /// Something that was destroyed is being freed still.
    freeing: AtomicBool,
    /// Datasets that take rows of a stream at this moment.
    receiving: Mutex<HashSet<u64>>,
    /// To whom root directories of new file systems belong.
    owner: Mutex<(u32, u32)>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("gate", &self.gate).finish_non_exhaustive()
    }
}

/// What administration works on.
#[derive(Debug)]
struct Admin {
    catalog: Catalog,
    reservations: Arc<Reservations>,
    /// Some frames may be named by several rows.
    sharing: bool,
    /// Why nothing is accepted any more.
    failed: Option<PoolError>,
}

impl Admin {
    /// The accounts. Held for a moment only: every write asks for them.
    fn quota_tree(&self) -> MappedMutexGuard<'_, QuotaTree> {
        self.reservations.quota_tree()
    }
}

/// Frames through the cache.
struct CachedFrames {
    storage: Arc<dyn Storage>,
    cache: Arc<Cache>,
}

impl Frames for CachedFrames {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        self.cache.data(&*self.storage, pointer)
    }

    fn read_all(&self, wanted: &mut [Wanted<'_>]) -> Result<(), PoolError> {
        let mut missing = Vec::with_capacity(wanted.len());
        for Wanted { pointer, target } in wanted.iter_mut() {
            match self.cache.cached_data(pointer) {
                Some(content) if content.len() == target.len() => target.copy_from_slice(&content),
                // The pages of a stream are kept by the kernel; kept here, too, they would push out
                // what only this cache has.
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

impl Pool {
    /// A new pool in an empty store: the catalog and the dataset that has the pool's name. It is
    /// durable when this returns.
    ///
    /// # Errors
    /// Those of the store.
    pub fn create(config: PoolConfig, name: &str) -> Result<Self, PoolError> {
        Self::create_owned(config, name, (0, 0), &[])
    }

    /// As [`Self::create`], for a user and a group: root directories belong to them, as after
    /// [`Self::belongs_to`]. And the pool's own file system has these properties, as users write
    /// them.
    ///
    /// # Errors
    /// Those of the store.
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

    /// Whether nobody commits, or has done within this time: questions wait for whoever does.
    #[must_use]
    pub fn answers_within(&self, time: std::time::Duration) -> bool {
        self.admin.try_lock_for(time).is_some()
    }

    /// Root directories of file systems that are made from now on belong to this user and group.
    pub fn belongs_to(&self, owner: (u32, u32)) {
        *self.owner.lock() = owner;
    }

    /// A pool as it was at its last commit, with what its log holds of fsyncs after that; or with all that
    /// was done after that, where a process that has died kept it.
    ///
    /// # Errors
    /// Those of the store; a damaged catalog.
    pub fn open(config: PoolConfig, durable: &Durable) -> Result<Self, PoolError> {
        Self::open_after(config, durable, &mut |_| Ok(()))
    }

    /// The same; `before` is called before what a process that has died kept is applied, where there is any:
    /// nobody else has that, and whoever writes it may have to wait for a device.
    ///
    /// # Errors
    /// As [`Self::open`], and those of `before`.
    pub fn open_after(
        config: PoolConfig,
        durable: &Durable,
        before: &mut dyn FnMut(&Self) -> Result<(), PoolError>,
    ) -> Result<Self, PoolError> {
        Self::read_catalog(config, durable)?.replay(durable, before)
    }

    /// A pool as it was at its last commit, before its log is replayed: what is wrong with the catalog shows here.
    ///
    /// # Errors
    /// Those of the store; a damaged catalog.
    pub fn read_catalog(mut config: PoolConfig, durable: &Durable) -> Result<ReadCatalog, PoolError> {
        let (blocks, kept) = (config.log.take(), config.kept.take());
        let pool = Self::over(config, Txg(durable.txg.0 + 1), Some(durable.catalog));
        {
            let mut admin = pool.admin.lock();
            admin.catalog.check_shape()?;
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

    /// The tree of datasets with their figures, from the catalog: parents before children.
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

    /// A dataset by its number; the same one for everybody.
    ///
    /// # Errors
    /// Those of the store; a number that is not in the catalog is damage.
    pub fn dataset(&self, id: u64) -> Result<Arc<Dataset>, PoolError> {
        let (dataset, opened) = self.open_dataset(id)?;
        if opened {
            self.sweep(&dataset)?;
        }
        Ok(dataset)
    }

    /// The dataset, and whether it was opened just now.
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

    /// A dataset by its name: the pool's name and the parts behind it, with slashes.
    ///
    /// # Errors
    /// Those of the store.
    pub fn find(&self, name: &str) -> Result<Option<u64>, PoolError> {
        let admin = self.admin.lock();
        find(&admin.catalog, name)
    }

    /// How content of a dataset is stored as long as its properties are not known.
    fn storing(&self) -> Storing {
        Storing { record_shift: 17, compression: CompressionSetting::On, checksum: ChecksumKind::Xxh3 }
    }
}

impl ReadCatalog {
    /// Applies the log, or what a process that has died kept: see [`Pool::open_after`].
    ///
    /// # Errors
    /// Those of the store, and of `before`.
    pub fn replay(
        self,
        durable: &Durable,
        before: &mut dyn FnMut(&Pool) -> Result<(), PoolError>,
    ) -> Result<Pool, PoolError> {
        let Self { pool, blocks, kept } = self;
        let confirmed = pool.storage.opened();
        match (blocks, kept) {
            (Some(blocks), Some(kept)) if kept.has_served() => {
                // A replay needs no device that takes writes.
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

/// The engine's reason behind an error of files: inside the engine there is no other.
fn as_pool_error(error: crate::files::FileError) -> PoolError {
    match error {
        crate::files::FileError::Pool(error) => error,
        other => PoolError::Refused(other.to_string()),
    }
}
