//! What is done to several snapshots in one commit, and bookmarks that come from bookmarks or go.
//!
//! Invariant: all is checked before the first is changed.

use std::collections::BTreeSet;

use super::refused;
use crate::engine::Pool;
use crate::error::PoolError;
use crate::pointer::Txg;

impl Pool {
    /// Destroys snapshots of a dataset, all of them or none; what only they hold is freed in the
    /// background. With `deferred` those that are held or have clones go when the last of these
    /// does.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is not there, is held, or has clones.
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
    /// was deferred goes with its last hold.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the tag is there already, or is not.
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

    /// Makes a bookmark of another one.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where that is not there or the new one is.
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

    /// Takes a bookmark away.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where it is not there.
    pub fn destroy_bookmark(&self, id: u64, name: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            if !admin.catalog.bookmarks(id)?.iter().any(|(there, _)| there == name) {
                return refused(format!("there is no bookmark '#{name}'"));
            }
            admin.catalog.set_bookmark(id, name, None)
        })
    }

    /// Gives the snapshots of these datasets with one name another, all of them or none.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the old name is not there or the new one is.
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
