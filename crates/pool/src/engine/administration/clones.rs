//! Clones: creation from snapshots, and promotion over their origins.

use super::refused;
use crate::catalog::{DatasetRow, SnapshotRow};
use crate::engine::reservation::refusal;
use crate::engine::{Admin, NewDataset, Pool};
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::properties::spelling;
use crate::space::{Purpose, Usage, UsageChange};

impl Pool {
    /// Creates a file system as a clone of a snapshot; returns its number. It takes neither time
    /// nor space.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the snapshot does not exist or the name does.
    pub fn clone_snapshot(&self, from: u64, snapshot: &str, new: &NewDataset) -> Result<u64, PoolError> {
        self.commit_with(|admin, txg| {
            let Some(origin) = admin.catalog.snapshot_named(from, snapshot)? else {
                return refused(format!("there is no snapshot '@{snapshot}'"));
            };
            if admin.catalog.child(new.parent, &new.name)?.is_some() {
                return refused(format!("dataset '{}' exists already", new.name));
            }
            let of = admin.catalog.snapshot(from, origin)?;
            let usage = Usage { referenced: of.referenced, logical_referenced: of.logical, ..Usage::default() };
            let rows = spelling::of_clone(self.parse_new(&new.properties)?, &admin.catalog.properties(from)?)?;
            let limits = admin.judge_new(new.parent, &rows, usage)?;
            let id = admin.catalog.number()?;
            let list = admin.catalog.deadlists().create()?;
            let row = DatasetRow {
                created: txg,
                root: of.root,
                usage,
                origin: Some((from, origin)),
                newest: origin,
                ..self.new_row(new.parent, &new.name, list)
            };
            admin.catalog.enter(id, &row)?;
            admin.catalog.set_clone(from, origin, id, true)?;
            admin.put_rows(id, &rows)?;
            admin.quota_tree().add(id, new.parent, usage, limits)?;
            Ok(id)
        })
    }

    /// Promotes a clone: it becomes the owner of its origin snapshot and of all older ones, and the
    /// former owner becomes its clone.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a dataset that is no clone, if names of snapshots clash, or if a
    /// partially received dataset depends on a snapshot that would move;
    /// [`PoolError::NoSpace`] if a quota above the clone does not allow the snapshots that move.
    pub fn promote(&self, id: u64) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let mut row = admin.catalog.dataset(id)?;
            let Some((from, origin)) = row.origin else { return refused("not a cloned filesystem".to_owned()) };
            let mut old = admin.catalog.dataset(from)?;
            let moving: Vec<(Txg, SnapshotRow)> =
                admin.catalog.snapshots(from)?.into_iter().filter(|(txg, _)| *txg <= origin).collect();
            // A stream that is received ends as it began: with the same base.
            if admin.is_half(id)? {
                return refused("it is partially received".to_owned());
            }
            for (txg, snapshot) in &moving {
                for clone in admin.catalog.clones(from, *txg)? {
                    if admin.is_half(clone)? {
                        return refused(format!(
                            "a partially received snapshot depends on '@{}': complete it, or discard it ('receive -A')",
                            snapshot.name
                        ));
                    }
                }
                if admin.catalog.snapshot_named(id, &snapshot.name)?.is_some() {
                    return refused(format!(
                        "snapshot name '@{}' from origin conflicts with one of this dataset",
                        snapshot.name
                    ));
                }
            }
            admin.charge_promotion(from, id, moving.len())?;
            for (txg, snapshot) in &moving {
                admin.move_snapshot(from, id, *txg, snapshot)?;
            }
            let count = i64::try_from(moving.len()).unwrap_or(i64::MAX);
            admin.quota_tree().count_snapshots(from, -count)?;
            admin.quota_tree().count_snapshots(id, count)?;
            admin.catalog.set_clone(id, origin, id, false)?;
            row.origin = old.origin;
            old.origin = Some((id, origin));
            admin.catalog.set_dataset(id, &row)?;
            admin.catalog.set_dataset(from, &old)?;
            admin.catalog.set_clone(id, origin, from, true)?;
            if let Some((above, txg)) = row.origin {
                admin.catalog.set_clone(above, txg, from, false)?;
                admin.catalog.set_clone(above, txg, id, true)?;
            }
            admin.note_usage(from)?;
            admin.note_usage(id)
        })
    }
}

impl Admin {
    /// Charges a clone for the snapshots that it is about to own, and relieves their former owner,
    /// if all quotas allow it. The chains of deadlists of both do not change; only the position
    /// moves at which the own part of each begins.
    pub(super) fn charge_promotion(&mut self, from: u64, to: u64, snapshots: usize) -> Result<(), PoolError> {
        let mut changes = Vec::new();
        for (id, gains) in [(from, false), (to, true)] {
            let (history, own) = self.catalog.history_of(id)?;
            let own = if gains { own.saturating_sub(snapshots) } else { own + snapshots };
            let after = self.catalog.deadlists().usage(&history, own)?;
            changes.push((id, UsageChange::between(&self.quota_tree().usage(id)?, &after)?));
        }
        self.quota_tree().charge_if_allowed(&changes, Purpose::Write).map_err(refusal)
    }

    /// Moves a snapshot from one dataset to another, with its holds, clones and properties.
    pub(super) fn move_snapshot(&mut self, from: u64, to: u64, txg: Txg, row: &SnapshotRow) -> Result<(), PoolError> {
        let (holds, clones) = (self.catalog.holds(from, txg)?, self.catalog.clones(from, txg)?);
        for (tag, _) in &holds {
            self.catalog.set_hold(from, txg, tag, None)?;
        }
        for clone in &clones {
            self.catalog.set_clone(from, txg, *clone, false)?;
        }
        for (name, row) in self.catalog.snapshot_properties(from, txg)? {
            self.catalog.set_snapshot_property(from, txg, &name, None)?;
            self.catalog.set_snapshot_property(to, txg, &name, Some(&row))?;
        }
        self.catalog.leave_snapshot(from, txg)?;
        // Holds and clones are counted again as they are entered below.
        self.catalog.enter_snapshot(to, txg, &SnapshotRow { holds: 0, clones: 0, ..row.clone() })?;
        for (tag, at) in &holds {
            self.catalog.set_hold(to, txg, tag, Some(*at))?;
        }
        for clone in &clones {
            self.catalog.set_clone(to, txg, *clone, true)?;
            let mut cloned = self.catalog.dataset(*clone)?;
            cloned.origin = Some((to, txg));
            self.catalog.set_dataset(*clone, &cloned)?;
        }
        Ok(())
    }
}
