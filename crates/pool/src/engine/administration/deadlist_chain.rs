//! The chain of deadlists of a dataset, and the dataset's usage in the catalog and in the accounts.

use super::refused;
use crate::catalog::SnapshotRow;
use crate::deadlist::Point;
use crate::engine::Admin;
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::space::UsageChange;

impl Admin {
    /// Destroys a snapshot; the frames that only it references go to the list of frames to free.
    pub(in crate::engine) fn drop_snapshot(&mut self, id: u64, txg: Txg) -> Result<(), PoolError> {
        self.take_out_snapshot(id, txg)?;
        self.recount(id)
    }

    /// As [`Self::drop_snapshot`] without the recount of the live dataset's usage, which follows
    /// after the last of several snapshots.
    pub(super) fn take_out_snapshot(&mut self, id: u64, txg: Txg) -> Result<(), PoolError> {
        let (history, _) = self.catalog.history_of(id)?;
        let position = history.iter().position(|point| point.txg == txg).unwrap_or_default();
        let previous =
            position.checked_sub(1).and_then(|previous| history.get(previous)).map_or(Txg(0), |point| point.txg);
        let (Some(point), Some(next)) = (history.get(position).copied(), history.get(position + 1).copied()) else {
            return refused("a snapshot that is not in its own line".to_owned());
        };
        let freeing = self.catalog.head()?.freeing;
        let (_, list) = self.catalog.deadlists().destroy_snapshot(previous, &point, next.list, freeing)?;
        if next.txg == Point::HEAD {
            let mut head = self.catalog.dataset(id)?;
            (head.list, head.newest) = (list, previous);
            self.catalog.set_dataset(id, &head)?;
        } else {
            let mut after = self.catalog.snapshot(id, next.txg)?;
            after.list = list;
            self.catalog.set_snapshot(id, next.txg, &after)?;
        }
        for (name, _) in self.catalog.snapshot_properties(id, txg)? {
            self.catalog.set_snapshot_property(id, txg, &name, None)?;
        }
        self.catalog.leave_snapshot(id, txg)?;
        self.quota_tree().count_snapshots(id, -1)
    }

    /// Destroys a snapshot whose destruction was deferred, if it has no holds and no clones any
    /// more.
    pub(in crate::engine) fn drop_if_due(&mut self, id: u64, txg: Txg) -> Result<(), PoolError> {
        let row = self.catalog.snapshot(id, txg)?;
        if row.deferred && row.holds == 0 && row.clones == 0 { self.drop_snapshot(id, txg) } else { Ok(()) }
    }

    /// Copies the usage of a live dataset from the accounts to its catalog row.
    pub(in crate::engine) fn note_usage(&mut self, id: u64) -> Result<(), PoolError> {
        let mut row = self.catalog.dataset(id)?;
        row.usage = self.quota_tree().usage(id)?;
        self.catalog.set_dataset(id, &row)
    }

    /// Makes a snapshot of a live dataset's state at this moment, with this GUID and creation time
    /// (seconds since 1970). A new deadlist takes the frames that the live dataset drops from now
    /// on.
    pub(in crate::engine) fn enter_snapshot(
        &mut self,
        id: u64,
        txg: Txg,
        name: &str,
        (guid, created_at): (u64, i64),
    ) -> Result<(), PoolError> {
        let mut row = self.catalog.dataset(id)?;
        let snapshot = SnapshotRow {
            name: name.to_owned(),
            guid,
            created_at,
            root: row.root,
            list: row.list,
            referenced: row.usage.referenced,
            logical: row.usage.logical_referenced,
            deferred: false,
            holds: 0,
            clones: 0,
        };
        self.catalog.enter_snapshot(id, txg, &snapshot)?;
        self.quota_tree().count_snapshots(id, 1)?;
        row.list = self.catalog.deadlists().create()?;
        row.newest = txg;
        row.usage = self.quota_tree().usage(id)?;
        self.catalog.set_dataset(id, &row)
    }

    /// Recounts the usage of a live dataset from its chain of deadlists.
    pub(in crate::engine) fn recount(&mut self, id: u64) -> Result<(), PoolError> {
        let (history, own) = self.catalog.history_of(id)?;
        let usage = self.catalog.deadlists().usage(&history, own)?;
        let before = self.quota_tree().usage(id)?;
        self.quota_tree().charge(id, UsageChange::between(&before, &usage)?)?;
        self.note_usage(id)
    }
}
