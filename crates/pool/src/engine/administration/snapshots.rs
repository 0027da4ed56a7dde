//! Snapshots: creation, destruction, holds, properties, renaming; creation of bookmarks.

use super::refused;
use crate::catalog::{BookmarkRow, PropertyRow, PropertySource, SnapshotRow};
use crate::engine::reservation::refusal;
use crate::engine::{Pool, Setting};
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::properties::{Property, PropertyError, dataset_property};

/// The row that a change of a snapshot's property results in; `None` removes the property.
pub(in crate::engine) fn snapshot_row(name: &str, to: &Setting) -> Result<(String, Option<PropertyRow>), PoolError> {
    let property = dataset_property(name)?;
    let Property::User(name) = &property else { return Err(PropertyError::NotOfSnapshots.into()) };
    let row = match to {
        Setting::Local(text) => {
            Some(PropertyRow { source: PropertySource::Local, value: property.parse(text, false)? })
        }
        Setting::Received(text) => {
            Some(PropertyRow { source: PropertySource::Received, value: property.parse(text, true)? })
        }
        Setting::Inherit | Setting::BackToReceived => None,
    };
    Ok((name.clone(), row))
}

impl Pool {
    /// Takes snapshots of several datasets at the same moment. Names are the parts after the `@`.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if a snapshot exists or a dataset is named twice;
    /// [`PoolError::NoSpace`] if a refreservation needs more space than there is.
    pub fn snapshot(&self, wanted: &[(u64, String)]) -> Result<Txg, PoolError> {
        self.snapshot_with(wanted, &[])
    }

    /// As [`Self::snapshot`]; each snapshot gets these user properties.
    ///
    /// # Errors
    /// In addition, [`PoolError::Property`] for a property that snapshots cannot have.
    pub fn snapshot_with(&self, wanted: &[(u64, String)], properties: &[(String, String)]) -> Result<Txg, PoolError> {
        self.snapshot_at(wanted, properties, &mut || {})
    }

    /// As [`Self::snapshot_with`]; `frozen` is called once later changes are in none of the
    /// snapshots, some time before these are durable.
    ///
    /// # Errors
    /// The same.
    pub fn snapshot_at(
        &self,
        wanted: &[(u64, String)],
        properties: &[(String, String)],
        frozen: &mut dyn FnMut(),
    ) -> Result<Txg, PoolError> {
        let mut rows = Vec::new();
        for (name, value) in properties {
            rows.push(snapshot_row(name, &Setting::Local(value.clone()))?);
        }
        let mut admin = self.admin.lock();
        self.commit_frozen(&mut admin, Some(frozen), |admin, txg| {
            let mut seen = std::collections::HashSet::new();
            for (id, name) in wanted {
                if !seen.insert(*id) {
                    return refused("two snapshots of one dataset at the same moment".to_owned());
                }
                if admin.catalog.snapshot_named(*id, name)?.is_some() {
                    return refused(format!("snapshot '@{name}' exists already"));
                }
                if admin.is_half(*id)? {
                    return refused("a file system that is half received has no state of its own".to_owned());
                }
                let lacking = self.datasets.read().get(id).and_then(|dataset| dataset.files().lacks_at(txg));
                if let Some(error) = lacking {
                    return refused(format!("what was written to a file cannot be stored: {error}"));
                }
            }
            let ids: Vec<u64> = wanted.iter().map(|(id, _)| *id).collect();
            admin.judge_snapshots(&ids)?;
            admin.quota_tree().take_snapshots(&ids).map_err(refusal)?;
            for (id, name) in wanted {
                admin.enter_snapshot(*id, txg, name, ((self.entropy)(), (self.clock)().seconds))?;
                for (name, row) in &rows {
                    admin.catalog.set_snapshot_property(*id, txg, name, row.as_ref())?;
                }
            }
            Ok(txg)
        })
    }

    /// Destroys a snapshot; the frames that only it references are freed in the background. With
    /// `deferred`, a snapshot with holds or clones is destroyed when the last of them is gone.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a snapshot that does not exist, is held, or has clones.
    pub fn destroy_snapshot(&self, id: u64, name: &str, deferred: bool) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, name)? else {
                return refused(format!("there is no snapshot '@{name}'"));
            };
            let mut row = admin.catalog.snapshot(id, txg)?;
            if row.holds == 0 && row.clones == 0 {
                return admin.drop_snapshot(id, txg);
            }
            if !deferred {
                let why = if row.holds > 0 { "it is held" } else { "it has clones" };
                return refused(format!("snapshot '@{name}' cannot be destroyed: {why}"));
            }
            row.deferred = true;
            admin.catalog.set_snapshot(id, txg, &row)
        })
    }

    /// Sets or releases a hold. A snapshot whose destruction was deferred is destroyed with its
    /// last hold.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the tag exists already, or does not exist.
    pub fn hold(&self, id: u64, name: &str, tag: &str, hold: bool) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, name)? else {
                return refused(format!("there is no snapshot '@{name}'"));
            };
            if admin.catalog.is_held(id, txg, tag)? == hold {
                return refused(if hold {
                    "tag already exists on this dataset".to_owned()
                } else {
                    "no such tag on this dataset".to_owned()
                });
            }
            admin.catalog.set_hold(id, txg, tag, hold.then(|| (self.clock)().seconds))?;
            admin.drop_if_due(id, txg)
        })
    }

    /// Creates a bookmark of a snapshot.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the snapshot does not exist or the bookmark does.
    pub fn bookmark(&self, id: u64, snapshot: &str, name: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, snapshot)? else {
                return refused(format!("there is no snapshot '@{snapshot}'"));
            };
            if admin.catalog.bookmarks(id)?.iter().any(|(there, _)| there == name) {
                return refused(format!("bookmark '#{name}' exists already"));
            }
            let row = admin.catalog.snapshot(id, txg)?;
            admin.catalog.set_bookmark(id, name, Some(&BookmarkRow { txg, guid: row.guid, created_at: row.created_at }))
        })
    }

    /// Changes properties of snapshots, on all of them or none; snapshots have user properties
    /// only.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a snapshot that does not exist, [`PoolError::Property`] for a
    /// property that snapshots cannot have.
    pub fn set_snapshot_properties(
        &self,
        snapshots: &[(u64, String)],
        changes: &[(String, Setting)],
    ) -> Result<(), PoolError> {
        let mut rows = Vec::new();
        for (name, to) in changes {
            rows.push(snapshot_row(name, to)?);
        }
        self.commit_with(|admin, _| {
            let mut found = Vec::new();
            for (id, name) in snapshots {
                let Some(txg) = admin.catalog.snapshot_named(*id, name)? else {
                    return refused(format!("there is no snapshot '@{name}'"));
                };
                found.push((*id, txg));
            }
            for (id, txg) in found {
                for (name, row) in &rows {
                    admin.catalog.set_snapshot_property(id, txg, name, row.as_ref())?;
                }
            }
            Ok(())
        })
    }

    /// Renames a snapshot.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the old name does not exist or the new one does.
    pub fn rename_snapshot(&self, id: u64, old: &str, new: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, old)? else {
                return refused(format!("there is no snapshot '@{old}'"));
            };
            if admin.catalog.snapshot_named(id, new)?.is_some() {
                return refused(format!("snapshot '@{new}' exists already"));
            }
            let mut row = admin.catalog.snapshot(id, txg)?;
            admin.catalog.leave_snapshot(id, txg)?;
            new.clone_into(&mut row.name);
            admin.catalog.enter_snapshot(id, txg, &row)
        })
    }

    /// Returns the snapshots of a dataset, the oldest first, each with the bytes that destroying it
    /// alone would free.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn snapshots(&self, id: u64) -> Result<Vec<(Txg, SnapshotRow, u64)>, PoolError> {
        let mut admin = self.admin.lock();
        let (history, own) = admin.catalog.history_of(id)?;
        let rows = admin.catalog.snapshots(id)?;
        let mut listed = Vec::new();
        for (position, (txg, row)) in rows.into_iter().enumerate() {
            let used = admin.catalog.deadlists().used_by_snapshot(&history, own + position)?;
            listed.push((txg, row, used));
        }
        Ok(listed)
    }
}
