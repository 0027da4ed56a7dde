//! The snapshots of a dataset as their readers see them: names, and files as they were.
//!
//! Called by the layer `dataset` for `.zfs/snapshot`. Reads only: what is opened here is in no
//! commit.

use std::sync::Arc;

use super::{Dataset, Pool};
use crate::catalog::SnapshotRow;
use crate::error::PoolError;
use crate::pointer::Txg;

impl Pool {
    /// The snapshots of a dataset, the oldest first.
    ///
    /// # Errors
    /// Those of the store.
    pub fn snapshot_rows(&self, id: u64) -> Result<Vec<(Txg, SnapshotRow)>, PoolError> {
        self.admin.lock().catalog.snapshots(id)
    }

    /// The snapshot of this name, if there is one.
    ///
    /// # Errors
    /// Those of the store.
    pub fn find_snapshot(&self, id: u64, name: &str) -> Result<Option<Txg>, PoolError> {
        self.admin.lock().catalog.snapshot_named(id, name)
    }

    /// What a dataset references, what is written to it at this moment counted as it is promised;
    /// bytes. It asks no lock that a commit holds.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn referenced(&self, id: u64) -> Result<u64, PoolError> {
        let quotas = self.reservations.quota_tree();
        quotas.expected(id)
    }

    /// The files of a snapshot, to be read only: what is changed in them is in no commit. Whoever
    /// holds them lets go before the snapshot is destroyed; later reads meet frames that are used
    /// anew, which is damage to them.
    ///
    /// # Errors
    /// Those of the store; a snapshot that is not there.
    pub fn snapshot_files(&self, id: u64, txg: Txg) -> Result<Arc<Dataset>, PoolError> {
        let root = self.admin.lock().catalog.snapshot(id, txg)?.root;
        let dataset = Dataset::open(self, id, root)?;
        dataset.files().make_read_only();
        Ok(Arc::new(dataset))
    }
}
