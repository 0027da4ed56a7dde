//! One live dataset: its files over its tree, and what a commit takes of it.

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

/// A dataset that is in use.
#[derive(Debug)]
pub struct Dataset {
    id: u64,
    files: Files<TreeTable>,
    behaviour: RwLock<Behaviour>,
}

/// What a commit takes of a dataset while nobody is inside.
pub(super) struct Taken {
    pub(super) dataset: Arc<Dataset>,
    pub(super) frozen: Frozen,
    /// What new content frames are.
    pub(super) written: StoredBytes,
    /// Content frames that no row names any more.
    pub(super) freed: Vec<Dead>,
    /// Frames that rows have come to share.
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

    /// A dataset with an empty root directory.
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

    /// The dataset with this root.
    pub(super) fn open(pool: &Pool, id: u64, root: Option<Pointer>) -> Result<Self, PoolError> {
        let files = Files::open(Self::config(pool, id), Self::table(pool, id, root))?;
        Ok(Self::recorded(pool, id, files))
    }

    /// A dataset that takes rows of a stream; its frames will belong to `owner`.
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

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What its properties say now.
    #[must_use]
    pub fn behaviour(&self) -> Behaviour {
        *self.behaviour.read()
    }

    /// From now on these properties hold.
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

    /// Its files.
    #[must_use]
    pub fn files(&self) -> &Files<TreeTable> {
        &self.files
    }

    /// Whether a commit has anything to do for it.
    pub(super) fn has_changes(&self) -> bool {
        self.files.has_changes() || self.files.look_at_table(|table| table.tree.has_changes())
    }

    /// Whatever lost its last name before the pool was closed or died is nobody's now: it is freed
    /// by and by.
    pub(super) fn sweep(&self) -> Result<(), PoolError> {
        let swept = self.files.let_orphans_go(&HashSet::new()).map_err(as_pool_error);
        swept.or_else(|error| passed_over(error, "files without a name cannot be freed now"))
    }

    /// Flushes and freezes. Called while nobody is inside.
    pub(super) fn take(self: &Arc<Self>, txg: Txg) -> Result<Taken, PoolError> {
        self.files.flush(txg).map_err(as_pool_error)?;
        let frozen = self.files.with_table(|table| table.tree.freeze());
        let (written, freed, shared) = (self.files.take_written(), self.files.take_freed(), self.files.take_shared());
        Ok(Taken { dataset: Arc::clone(self), frozen, written, freed, shared })
    }
}
