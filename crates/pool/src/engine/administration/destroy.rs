//! Rolling back and destroying datasets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::refused;
use crate::engine::{Dataset, Pool, as_pool_error};
use crate::error::PoolError;

/// How long a dataset that is to be closed is waited for.
const PATIENCE: Duration = Duration::from_secs(3);

impl Pool {
    /// Makes a dataset what its newest snapshot is. Whoever uses it has the files of that time from then on, and has to forget what was kept of others.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for another snapshot than the newest.
    pub fn roll_back(&self, id: u64, name: &str) -> Result<(), PoolError> {
        let mut admin = self.admin.lock();
        let dataset = self.datasets.read().get(&id).cloned();
        let stopped = dataset.as_ref().map(|dataset| dataset.files().stop());
        self.commit_under(&mut admin, |admin, _| {
            let Some(to) = admin.catalog.snapshot_named(id, name)? else { return refused(format!("there is no snapshot '@{name}'")) };
            let mut row = admin.catalog.dataset(id)?;
            if row.newest != to {
                return refused(format!("'@{name}' is not the newest snapshot: those after it must be destroyed first"));
            }
            let snapshot = admin.catalog.snapshot(id, to)?;
            self.doom(admin, row.root, to)?;
            admin.catalog.deadlists().forget(row.list)?;
            row.root = snapshot.root;
            (row.usage.referenced, row.usage.logical_referenced) = (snapshot.referenced, snapshot.logical);
            admin.catalog.set_dataset(id, &row)?;
            admin.recount(id)
        })?;
        if let (Some(dataset), Some(stopped)) = (&dataset, stopped) {
            // Before the next commit, which would write the old tree.
            let root = admin.catalog.dataset(id)?.root;
            if let Err(error) = stopped.replace(Dataset::table(self, id, root)) {
                // The next commit would write the old tree over what is durable.
                admin.failed = Some(error.clone());
                self.throttle.fail(&error);
                return Err(error);
            }
            drop(stopped);
            drop(admin);
            dataset.files().adopt_orphans().map_err(as_pool_error)?;
        }
        Ok(())
    }

    /// Destroys a dataset that has neither children nor snapshots. Nobody may use it: it is closed before.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where it has, is in use, or is the pool's own.
    pub fn destroy_dataset(&self, id: u64) -> Result<(), PoolError> {
        self.close_dataset(id)?;
        self.commit_with(|admin, _| {
            if admin.catalog.head()?.root == id {
                return refused("the pool's own file system goes with the pool".to_owned());
            }
            if !admin.catalog.children(id)?.is_empty() {
                return refused("filesystem has children".to_owned());
            }
            if !admin.catalog.snapshots(id)?.is_empty() {
                return refused("filesystem has snapshots".to_owned());
            }
            let row = admin.catalog.dataset(id)?;
            self.doom(admin, row.root, row.newest)?;
            // What a clone let go of its origin's is the origin's.
            admin.catalog.deadlists().forget(row.list)?;
            let bookmarks = admin.catalog.bookmarks(id)?;
            for (name, _) in bookmarks {
                admin.catalog.set_bookmark(id, &name, None)?;
            }
            admin.desk.forget(id);
            admin.forest().remove(id)?;
            admin.catalog.leave(id)?;
            if let Some((from, origin)) = row.origin {
                admin.catalog.set_clone(from, origin, id, false)?;
                admin.drop_if_due(from, origin)?;
            }
            Ok(())
        })
    }

    /// Ends the use of a dataset.
    fn close_dataset(&self, id: u64) -> Result<(), PoolError> {
        self.commit()?;
        let patience = Instant::now() + PATIENCE;
        loop {
            {
                let mut datasets = self.datasets.write();
                let Some(dataset) = datasets.remove(&id) else { return Ok(()) };
                let Err(used) = Arc::try_unwrap(dataset) else { return Ok(()) };
                datasets.insert(id, used);
            }
            // A commit or the committer looks at it just now; whoever works with its files has it for longer.
            if Instant::now() >= patience {
                return refused("dataset is busy".to_owned());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
