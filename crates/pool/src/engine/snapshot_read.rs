//! Read access to the snapshots of a dataset: their names, and their files.
//!
//! Called by the crate `poolfs` for `.zfs/snapshot`. Nothing that is opened here becomes part of a
//! commit.

use std::sync::Arc;

use super::{Dataset, Pool};
use crate::catalog::SnapshotRow;
use crate::error::PoolError;
use crate::pointer::Txg;

impl Pool {
    /// Returns the snapshots of a dataset, the oldest first.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn snapshot_rows(&self, id: u64) -> Result<Vec<(Txg, SnapshotRow)>, PoolError> {
        self.admin.lock().catalog.snapshots(id)
    }

    /// Finds the snapshot with this name.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn find_snapshot(&self, id: u64, name: &str) -> Result<Option<Txg>, PoolError> {
        self.admin.lock().catalog.snapshot_named(id, name)
    }

    /// Bytes that a dataset references; writes that are not committed yet count as the space
    /// reserved for them. Takes no lock that a commit holds.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn referenced(&self, id: u64) -> Result<u64, PoolError> {
        let quotas = self.reservations.quota_tree();
        quotas.expected(id)
    }

    /// Opens the files of a snapshot, read only. The caller drops them before the snapshot is
    /// destroyed: later reads would meet frames that were reused, and report damage.
    ///
    /// # Errors
    /// Errors of the store; a snapshot that is not there.
    pub fn snapshot_files(&self, id: u64, txg: Txg) -> Result<Arc<Dataset>, PoolError> {
        let root = self.admin.lock().catalog.snapshot(id, txg)?.root;
        let dataset = Dataset::open(self, id, root)?;
        dataset.files().make_read_only();
        Ok(Arc::new(dataset))
    }
}
