//! Rollback and destruction of datasets.

use std::sync::Arc;
use std::time::Duration;

use super::{DestroySet, refused};
use crate::engine::{Dataset, Pool};
use crate::error::PoolError;
use crate::patience;

/// How long to wait for the users of a dataset that is to be closed.
const PATIENCE: Duration = Duration::from_secs(3);

impl Pool {
    /// Rolls a dataset back to its newest snapshot. Its users get the files of the snapshot from
    /// then on, and have to drop what they have cached of the old ones.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the snapshot is not the newest.
    pub fn roll_back(&self, id: u64, name: &str) -> Result<(), PoolError> {
        self.roll_back_over(id, name, &DestroySet::default())
    }

    /// As [`Self::roll_back`], after destroying what is newer, in the same commit: snapshots,
    /// bookmarks, clones.
    ///
    /// # Errors
    /// In addition, [`PoolError::Refused`] if a newer snapshot is not in `set`, or if the snapshot
    /// itself would be destroyed with its last clone, and as [`Self::destroy_set`].
    pub fn roll_back_over(&self, id: u64, name: &str, set: &DestroySet) -> Result<(), PoolError> {
        self.close_datasets(&set.filesystems)?;
        let mut admin = self.admin.lock();
        let dataset = self.datasets.read().get(&id).cloned();
        let stopped = dataset.as_ref().map(|dataset| dataset.files().stop());
        self.commit_under(&mut admin, |admin, _| {
            let Some(to) = admin.catalog.snapshot_named(id, name)? else {
                return refused(format!("there is no snapshot '@{name}'"));
            };
            let set = &set.with_partial(admin)?;
            self.judge_destroy_set(admin, set)?;
            let snapshot = admin.catalog.snapshot(id, to)?;
            let clones = admin.catalog.clones(id, to)?;
            if snapshot.deferred
                && snapshot.holds == 0
                && !clones.is_empty()
                && clones.iter().all(|clone| set.filesystems.contains(clone))
            {
                return refused(format!(
                    "'@{name}' is to be destroyed with its last clone (destroy -d), and that clone would be destroyed"
                ));
            }
            let goes = |name: &String| set.snapshots.iter().any(|(of, names)| *of == id && names.contains(name));
            let newer = admin.catalog.snapshots(id)?.into_iter().filter(|(txg, _)| *txg > to).map(|(_, row)| row.name);
            if set.deferred
                || set.filesystems.contains(&id)
                || !newer.into_iter().all(|name| goes(&name))
                || goes(&name.to_owned())
            {
                return refused(format!(
                    "'@{name}' is not the newest snapshot: those after it must be destroyed first"
                ));
            }
            self.take_away(admin, set)?;
            dataset.iter().for_each(|dataset| dataset.files().keep_numbers());
            let mut row = admin.catalog.dataset(id)?;
            self.doom(admin, row.root, to)?;
            admin.catalog.deadlists().forget(row.list)?;
            row.root = snapshot.root;
            (row.usage.referenced, row.usage.logical_referenced) = (snapshot.referenced, snapshot.logical);
            admin.catalog.set_dataset(id, &row)?;
            admin.recount(id)
        })?;
        if let (Some(dataset), Some(stopped)) = (&dataset, stopped) {
            // Before the next commit, which would write the old tree.
            let replaced =
                admin.catalog.dataset(id).and_then(|row| stopped.replace(Dataset::table(self, id, row.root)));
            if let Err(error) = replaced {
                // The next commit would write the old tree over what is durable.
                admin.failed = Some(error.clone());
                self.throttle.fail(&error);
                return Err(error);
            }
            drop(stopped);
            drop(admin);
            // The rollback is durable whatever this returns: the next import frees the orphans.
            if let Err(error) = dataset.files().adopt_orphans() {
                tracing::error!(%error, "files without a name cannot be freed now");
            }
        }
        Ok(())
    }

    /// Destroys a dataset that has neither children nor snapshots. It is closed first: nobody may
    /// use it.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if it has any, or is the root dataset; [`PoolError::Busy`] if it is
    /// in use.
    pub fn destroy_dataset(&self, id: u64) -> Result<(), PoolError> {
        self.close_datasets(&[id])?;
        self.commit_with(|admin, _| {
            if admin.catalog.head()?.root == id {
                return refused("the pool's own file system goes with the pool".to_owned());
            }
            admin.judge_head(id)?;
            if self.datasets.read().contains_key(&id) {
                return Err(PoolError::Busy);
            }
            self.destroy_head(admin, id)
        })
    }

    /// Closes datasets: no files of them stay open.
    pub(in crate::engine) fn close_datasets(&self, ids: &[u64]) -> Result<(), PoolError> {
        if !ids.is_empty() {
            self.commit()?;
        }
        ids.iter().try_for_each(|id| self.close_dataset(*id))
    }

    fn close_dataset(&self, id: u64) -> Result<(), PoolError> {
        let until = patience::now() + PATIENCE;
        loop {
            {
                let mut datasets = self.datasets.write();
                let Some(dataset) = datasets.remove(&id) else { return Ok(()) };
                match Arc::try_unwrap(dataset) {
                    Ok(dataset) => {
                        dataset.files().give_up();
                        return Ok(());
                    }
                    Err(used) => drop(datasets.insert(id, used)),
                }
            }
            // A commit or a background thread may hold it for a moment; users of its files hold it
            // for longer.
            if patience::now() >= until {
                return Err(PoolError::Busy);
            }
            patience::sleep(Duration::from_millis(2));
        }
    }
}
