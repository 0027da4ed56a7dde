//! Operations on several snapshots in one commit; copying and destroying bookmarks.
//!
//! Invariant: everything is checked before the first change.

use std::collections::BTreeSet;

use super::refused;
use crate::engine::Pool;
use crate::error::PoolError;
use crate::pointer::Txg;

impl Pool {
    /// Destroys snapshots of a dataset, all of them or none; the frames that only they reference
    /// are freed in the background. With `deferred`, snapshots with holds or clones are destroyed
    /// when the last hold or clone is gone.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a snapshot that is not there, is held, or has clones.
    pub fn destroy_snapshots(&self, id: u64, names: &[&str], deferred: bool) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let mut now = BTreeSet::new();
            let mut later = Vec::new();
            for name in names {
                let Some(txg) = admin.catalog.snapshot_named(id, name)? else {
                    return refused(format!("there is no snapshot '@{name}'"));
                };
                let row = admin.catalog.snapshot(id, txg)?;
                match (row.holds == 0 && row.clones == 0, deferred) {
                    (true, _) => drop(now.insert(txg)),
                    (false, true) => later.push((txg, row)),
                    (false, false) => {
                        let why = if row.holds > 0 { "it is held" } else { "it has clones" };
                        return refused(format!("snapshot '@{name}' cannot be destroyed: {why}"));
                    }
                }
            }
            for (txg, mut row) in later {
                row.deferred = true;
                admin.catalog.set_snapshot(id, txg, &row)?;
            }
            now.into_iter().try_for_each(|txg| admin.drop_snapshot(id, txg))
        })
    }

    /// Sets or releases a hold on several snapshots, on all or none. A snapshot whose destruction
    /// was deferred is destroyed with its last hold.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the tag exists already, or does not exist.
    pub fn hold_all(&self, snapshots: &[(u64, &str)], tag: &str, hold: bool) -> Result<(), PoolError> {
        let now = (self.clock)().seconds;
        self.commit_with(|admin, _| {
            let mut found: BTreeSet<(u64, Txg)> = BTreeSet::new();
            for (id, name) in snapshots {
                let Some(txg) = admin.catalog.snapshot_named(*id, name)? else {
                    return refused(format!("there is no snapshot '@{name}'"));
                };
                if admin.catalog.is_held(*id, txg, tag)? == hold {
                    let why = if hold { "tag already exists on this dataset" } else { "no such tag on this dataset" };
                    return refused(why.to_owned());
                }
                found.insert((*id, txg));
            }
            for (id, txg) in found {
                admin.catalog.set_hold(id, txg, tag, hold.then_some(now))?;
                admin.drop_if_due(id, txg)?;
            }
            Ok(())
        })
    }

    /// Creates a bookmark as a copy of another one.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the old bookmark does not exist or the new one does.
    pub fn copy_bookmark(&self, id: u64, from: &str, name: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let bookmarks = admin.catalog.bookmarks(id)?;
            if bookmarks.iter().any(|(there, _)| there == name) {
                return refused(format!("bookmark '#{name}' exists already"));
            }
            let Some((_, row)) = bookmarks.iter().find(|(there, _)| there == from) else {
                return refused(format!("there is no bookmark '#{from}'"));
            };
            admin.catalog.set_bookmark(id, name, Some(row))
        })
    }

    /// Destroys a bookmark.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if it does not exist.
    pub fn destroy_bookmark(&self, id: u64, name: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            if !admin.catalog.bookmarks(id)?.iter().any(|(there, _)| there == name) {
                return refused(format!("there is no bookmark '#{name}'"));
            }
            admin.catalog.set_bookmark(id, name, None)
        })
    }

    /// Renames the snapshots of this name in all these datasets, all of them or none.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the old name does not exist or the new one does.
    pub fn rename_snapshots(&self, ids: &[u64], old: &str, new: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let mut found = Vec::new();
            for id in ids {
                let Some(txg) = admin.catalog.snapshot_named(*id, old)? else {
                    return refused(format!("there is no snapshot '@{old}'"));
                };
                if admin.catalog.snapshot_named(*id, new)?.is_some() {
                    return refused(format!("snapshot '@{new}' exists already"));
                }
                found.push((*id, txg));
            }
            for (id, txg) in found {
                let mut row = admin.catalog.snapshot(id, txg)?;
                admin.catalog.leave_snapshot(id, txg)?;
                new.clone_into(&mut row.name);
                admin.catalog.enter_snapshot(id, txg, &row)?;
            }
            Ok(())
        })
    }
}
