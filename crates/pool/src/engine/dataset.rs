//! An open live dataset: its files, stored in its tree, and the changes that a commit takes from
//! it.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::RwLock;

use super::commit::passed_over;
use super::properties::{Bounds, access_times};
use super::tree_table::TreeTable;
use super::{Pool, as_pool_error};
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::files::{Admission, Files, FilesConfig, NewFiles, Recorder, Rules, StoredBytes, Storing};
use crate::pointer::{Pointer, Txg};
use crate::properties::Behaviour;
use crate::rows::Folding;
use crate::space::OwnerQuotas;
use crate::tree::Frozen;

/// An open dataset.
#[derive(Debug)]
pub struct Dataset {
    id: u64,
    files: Files<TreeTable>,
    behaviour: RwLock<Behaviour>,
}

/// The changes that a commit takes from a dataset while no operation is running.
pub(super) struct Taken {
    pub(super) dataset: Arc<Dataset>,
    pub(super) frozen: Frozen,
    /// Space of new content frames.
    pub(super) written: StoredBytes,
    /// Content frames that no row references any more.
    pub(super) freed: Vec<Dead>,
    /// Frames that several rows share since the last commit.
    pub(super) shared: Vec<Pointer>,
}

impl Dataset {
    fn config(pool: &Pool, id: u64) -> FilesConfig {
        FilesConfig {
            dataset: id,
            gate: Arc::clone(&pool.gate),
            frames: Arc::clone(&pool.content),
            clock: Arc::clone(&pool.clock),
            storing: pool.storing(),
            longest_record: pool.bounds().frame,
            throttle: Arc::clone(&pool.throttle),
            admission: Arc::clone(&pool.reservations) as Arc<dyn Admission>,
        }
    }

    pub(super) fn table(pool: &Pool, id: u64, root: Option<Pointer>) -> TreeTable {
        TreeTable::open((id, root), &pool.frames, &pool.cache, &pool.throttle)
    }

    /// Creates a dataset with an empty root directory.
    pub(super) fn format(pool: &Pool, id: u64, folding: Folding) -> Result<Self, PoolError> {
        if !folding.is_exact() {
            pool.storage.allow_folding(pool.seconds())?;
        }
        let new =
            NewFiles { hashing: pool.storage.hashing(), folding, seed: (pool.entropy)(), owner: *pool.owner.lock() };
        let files = Files::format(Self::config(pool, id), Self::table(pool, id, None), new)?;
        files.set_held_by_snapshots(Txg(0));
        Ok(Self::recorded(pool, id, files))
    }

    /// Opens the dataset whose tree has this root.
    pub(super) fn open(pool: &Pool, id: u64, root: Option<Pointer>) -> Result<Self, PoolError> {
        let files = Files::open(Self::config(pool, id), Self::table(pool, id, root))?;
        Ok(Self::recorded(pool, id, files))
    }

    /// Opens a dataset that receives the rows of a stream; `owner` is recorded in its frames as
    /// their dataset.
    pub(super) fn receiving(pool: &Pool, (id, root): (u64, Option<Pointer>), owner: u64) -> Result<Self, PoolError> {
        let files = Files::receiving(Self::config(pool, id), Self::table(pool, owner, root))?;
        Ok(Self { id, files, behaviour: RwLock::default() })
    }

    fn recorded(pool: &Pool, id: u64, files: Files<TreeTable>) -> Self {
        if let Some(log) = pool.log.get() {
            files.record_to(Arc::clone(log) as Arc<dyn Recorder>);
        }
        if let Some(keeper) = pool.keeper.get() {
            files.keep_with(Arc::clone(keeper));
        }
        Self { id, files, behaviour: RwLock::default() }
    }

    /// Number of the dataset.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The effective properties.
    #[must_use]
    pub fn behaviour(&self) -> Behaviour {
        *self.behaviour.read()
    }

    /// Applies these properties from now on.
    pub(super) fn adopt(&self, behaviour: Behaviour, bounds: &Bounds, quotas: OwnerQuotas) {
        let record_shift = behaviour.record_shift.min(bounds.record_shift);
        self.files.set_storing(Storing {
            record_shift,
            compression: behaviour.compression,
            checksum: behaviour.checksum,
        });
        let (read_only, utf8_only) = (behaviour.readonly, behaviour.utf8_only);
        self.files.set_rules(Rules { read_only, access: access_times(&behaviour), utf8_only, quotas });
        *self.behaviour.write() = behaviour;
    }

    /// The dataset's files.
    #[must_use]
    pub fn files(&self) -> &Files<TreeTable> {
        &self.files
    }

    /// Whether a commit has anything to write for it.
    pub(super) fn has_changes(&self) -> bool {
        self.files.has_changes() || self.files.look_at_table(|table| table.tree.has_changes())
    }

    /// Schedules orphans for being freed in the background: no process has them open since the pool
    /// was closed or its process crashed.
    pub(super) fn sweep(&self) -> Result<(), PoolError> {
        let swept = self.files.let_orphans_go(&HashSet::new()).map_err(as_pool_error);
        swept.or_else(|error| passed_over(error, "files without a name cannot be freed now"))
    }

    /// Flushes content and freezes the tree. Called while no operation is running.
    pub(super) fn take(self: &Arc<Self>, txg: Txg) -> Result<Taken, PoolError> {
        self.files.flush(txg).map_err(as_pool_error)?;
        let frozen = self.files.with_table(|table| table.tree.freeze());
        let (written, freed, shared) = (self.files.take_written(), self.files.take_freed(), self.files.take_shared());
        Ok(Taken { dataset: Arc::clone(self), frozen, written, freed, shared })
    }
}
