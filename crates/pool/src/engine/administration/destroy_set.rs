//! Destruction of a set in one commit: file systems with their snapshots, snapshots of other file
//! systems, and bookmarks; alone, or before a rollback to an older snapshot.
//!
//! Called for `destroy -r`, `destroy -R` and `rollback -r`. Invariants: everything is checked
//! before the first change, so all of the set is destroyed in one commit, or nothing is; a file
//! system in use keeps all of the set from being destroyed.

use std::collections::HashSet;

use super::refused;
use crate::catalog::rows::PARTIAL;
use crate::engine::{Admin, Pool};
use crate::error::PoolError;
use crate::pointer::Txg;

/// A set of file systems, snapshots and bookmarks to destroy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DestroySet {
    /// File systems with all their snapshots, each after its descendants and after the clones of
    /// its snapshots.
    pub filesystems: Vec<u64>,
    /// Snapshots of other file systems: dataset, and the names after the `@`.
    pub snapshots: Vec<(u64, Vec<String>)>,
    /// Other file systems whose partially received next snapshot is discarded. That of a member of
    /// `filesystems` always is.
    pub partial: Vec<u64>,
    /// Bookmarks of other file systems: dataset, and the name after the `#`.
    pub bookmarks: Vec<(u64, String)>,
    /// Members of `snapshots` with holds or clones are destroyed when the last hold or clone is
    /// gone.
    pub deferred: bool,
}

impl DestroySet {
    /// Adds the partially received next snapshots to the file systems of the set, each before the
    /// file system that it lies below.
    pub(in crate::engine) fn with_partial(&self, admin: &Admin) -> Result<Self, PoolError> {
        let (mut filesystems, mut seen) = (Vec::new(), HashSet::new());
        for id in self.partial.iter().chain(&self.filesystems) {
            if let Some(half) = admin.catalog.child(*id, PARTIAL)?
                && seen.insert(half)
            {
                filesystems.push(half);
            }
        }
        filesystems.extend(self.filesystems.iter().copied().filter(|id| seen.insert(*id)));
        Ok(Self { filesystems, ..self.clone() })
    }
}

impl Pool {
    /// Destroys all of the set, or nothing. Frames that only it references are freed in the
    /// background.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a member that does not exist, is held, has clones or children
    /// outside the set, or is the root dataset; [`PoolError::Busy`] if one is in use, or if a stream
    /// is received into one.
    pub fn destroy_set(&self, set: &DestroySet) -> Result<(), PoolError> {
        self.close_datasets(&set.filesystems)?;
        self.commit_with(|admin, _| {
            let set = &set.with_partial(admin)?;
            self.judge_destroy_set(admin, set)?;
            self.take_away(admin, set)
        })
    }

    /// Checks whether all of the set can be destroyed; changes nothing.
    pub(in crate::engine) fn judge_destroy_set(&self, admin: &Admin, set: &DestroySet) -> Result<(), PoolError> {
        let root = admin.catalog.head()?.root;
        let open = self.datasets.read();
        let mut gone = HashSet::new();
        for id in &set.filesystems {
            if *id == root {
                return refused("the pool's own file system goes with the pool".to_owned());
            }
            if open.contains_key(id) || self.receiving.lock().contains(id) {
                return Err(PoolError::Busy);
            }
            if admin.catalog.children(*id)?.iter().any(|child| !gone.contains(child)) {
                return refused("filesystem has children".to_owned());
            }
            for (txg, row) in admin.catalog.snapshots(*id)? {
                admin.judge_snapshot((*id, txg), (&row.name, row.holds), &gone)?;
            }
            gone.insert(*id);
        }
        for (id, names) in &set.snapshots {
            for name in names {
                let Some(txg) = admin.catalog.snapshot_named(*id, name)? else {
                    return refused(format!("there is no snapshot '@{name}'"));
                };
                let row = admin.catalog.snapshot(*id, txg)?;
                if !set.deferred {
                    admin.judge_snapshot((*id, txg), (&row.name, row.holds), &gone)?;
                }
            }
        }
        for (id, name) in &set.bookmarks {
            if !admin.catalog.bookmarks(*id)?.iter().any(|(there, _)| there == name) {
                return refused(format!("there is no bookmark '#{name}'"));
            }
        }
        Ok(())
    }

    /// Destroys a set that [`Self::judge_destroy_set`] accepted.
    pub(in crate::engine) fn take_away(&self, admin: &mut Admin, set: &DestroySet) -> Result<(), PoolError> {
        for id in &set.filesystems {
            for (txg, _) in admin.catalog.snapshots(*id)? {
                admin.take_out_snapshot(*id, txg)?;
            }
            admin.recount(*id)?;
            self.destroy_head(admin, *id)?;
        }
        for (id, names) in &set.snapshots {
            let mut taken = false;
            for name in names {
                // A snapshot whose destruction was deferred was destroyed with its last clone.
                let Some(txg) = admin.catalog.snapshot_named(*id, name)? else { continue };
                let mut row = admin.catalog.snapshot(*id, txg)?;
                if row.holds == 0 && row.clones == 0 {
                    admin.take_out_snapshot(*id, txg)?;
                    taken = true;
                } else {
                    row.deferred = true;
                    admin.catalog.set_snapshot(*id, txg, &row)?;
                }
            }
            if taken {
                admin.recount(*id)?;
            }
        }
        set.bookmarks.iter().try_for_each(|(id, name)| admin.catalog.set_bookmark(*id, name, None))
    }

    /// Removes a live dataset from the catalog.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one with children or snapshots: nothing has changed then.
    pub(in crate::engine) fn destroy_head(&self, admin: &mut Admin, id: u64) -> Result<(), PoolError> {
        admin.judge_head(id)?;
        let row = admin.catalog.dataset(id)?;
        self.doom(admin, row.root, row.newest)?;
        // Frames of the origin that the clone dropped still belong to the origin.
        admin.catalog.deadlists().forget(row.list)?;
        for (name, _) in admin.catalog.bookmarks(id)? {
            admin.catalog.set_bookmark(id, &name, None)?;
        }
        admin.reservations.forget(id);
        admin.quota_tree().remove(id)?;
        admin.catalog.leave(id)?;
        if let Some((from, origin)) = row.origin {
            admin.catalog.set_clone(from, origin, id, false)?;
            admin.drop_if_due(from, origin)?;
        }
        Ok(())
    }
}

impl Admin {
    /// Checks that a live dataset has neither children nor snapshots.
    pub(in crate::engine) fn judge_head(&self, id: u64) -> Result<(), PoolError> {
        if !self.catalog.children(id)?.is_empty() {
            return refused("filesystem has children".to_owned());
        }
        if !self.catalog.snapshots(id)?.is_empty() {
            return refused("filesystem has snapshots".to_owned());
        }
        Ok(())
    }

    /// Checks whether a snapshot can be destroyed once these file systems are gone.
    fn judge_snapshot(
        &self,
        (id, txg): (u64, Txg),
        (name, holds): (&str, u64),
        gone: &HashSet<u64>,
    ) -> Result<(), PoolError> {
        if holds > 0 {
            return refused(format!("snapshot '@{name}' cannot be destroyed: it is held"));
        }
        if self.catalog.clones(id, txg)?.iter().any(|clone| !gone.contains(clone)) {
            return refused(format!("snapshot '@{name}' cannot be destroyed: it has clones"));
        }
        Ok(())
    }
}
