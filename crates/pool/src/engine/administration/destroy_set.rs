//! What goes at one moment: file systems with their snapshots, snapshots of others, bookmarks;
//! alone, or before a head goes back to an older snapshot.
//!
//! Called for `destroy -r`, `destroy -R` and `rollback -r`. Invariants: all is judged before the
//! first is touched, so it all goes in one commit or nothing does; whoever uses a file system that
//! is to go stops all of it.

use std::collections::HashSet;

use super::refused;
use crate::engine::{Admin, Pool};
use crate::error::PoolError;
use crate::pointer::Txg;

/// What goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DestroySet {
    /// File systems with all their snapshots, each behind what lies below it and behind the clones
    /// of its snapshots.
    pub filesystems: Vec<u64>,
    /// Snapshots of other file systems, by the names behind the `@`.
    pub snapshots: Vec<(u64, Vec<String>)>,
    /// Bookmarks of other file systems, by the names behind the `#`.
    pub bookmarks: Vec<(u64, String)>,
    /// Of `snapshots` those that are held or have clones go when the last of these does.
    pub deferred: bool,
}

impl Pool {
    /// Destroys all of it, or nothing. What only it holds is freed in the background.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for what is not there, is held, has clones or children that stay, or
    /// is the pool's own file system; [`PoolError::Busy`] where something is in use.
    pub fn destroy_set(&self, set: &DestroySet) -> Result<(), PoolError> {
        self.close_datasets(&set.filesystems)?;
        self.commit_with(|admin, _| {
            self.judge_destroy_set(admin, set)?;
            self.take_away(admin, set)
        })
    }

    /// Whether all of it can go; nothing is changed.
    pub(in crate::engine) fn judge_destroy_set(&self, admin: &Admin, set: &DestroySet) -> Result<(), PoolError> {
        let root = admin.catalog.head()?.root;
        let open = self.datasets.read();
        let mut gone = HashSet::new();
        for id in &set.filesystems {
            if *id == root {
                return refused("the pool's own file system goes with the pool".to_owned());
            }
            if open.contains_key(id) {
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

    /// Takes away what was judged.
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
                // One whose destruction was deferred has gone with its last clone.
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

    /// Takes a head without snapshots and children out of the catalog.
    pub(in crate::engine) fn destroy_head(&self, admin: &mut Admin, id: u64) -> Result<(), PoolError> {
        let row = admin.catalog.dataset(id)?;
        self.doom(admin, row.root, row.newest)?;
        // What a clone let go of its origin's is the origin's.
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
    /// Whether a snapshot can go once these file systems are gone.
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
