//! Creation, renaming and description of datasets.

use std::sync::Arc;

use super::{NewDataset, refused};
use crate::catalog::{DatasetRow, PropertyRow};
use crate::deadlist::ListId;
use crate::engine::reservation::refusal;
use crate::engine::{Admin, Dataset, Pool, find};
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::properties::spelling;
use crate::space::{Limits, Usage};

impl Pool {
    /// Creates the root dataset, which has the pool's name.
    pub(in crate::engine) fn create_root(&self, name: &str, properties: &[(String, String)]) -> Result<u64, PoolError> {
        self.make(0, name, properties)
    }

    /// Creates an empty file system; returns its number.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the name exists.
    pub fn create_dataset(&self, new: &NewDataset) -> Result<u64, PoolError> {
        self.make(new.parent, &new.name, &new.properties)
    }

    /// Checks whether [`Self::create_dataset`] would succeed now.
    ///
    /// # Errors
    /// The error that it would return.
    pub fn would_create(&self, new: &NewDataset) -> Result<(), PoolError> {
        let admin = self.admin.lock();
        if let Some(failed) = &admin.failed {
            return Err(failed.clone());
        }
        let rows = admin.with_rules_for_names(new.parent, self.parse_new(&new.properties)?)?;
        admin.judge_new(new.parent, &rows, Usage::default()).map(drop)
    }

    fn make(&self, parent: u64, name: &str, properties: &[(String, String)]) -> Result<u64, PoolError> {
        // The files exist before the commit that enters the dataset: it flushes and freezes them
        // like the files of any other dataset.
        let mut admin = self.admin.lock();
        if let Some(failed) = &admin.failed {
            return Err(failed.clone());
        }
        if parent != 0 && admin.catalog.child(parent, name)?.is_some() {
            return refused(format!("dataset '{name}' exists already"));
        }
        let rows = admin.with_rules_for_names(parent, self.parse_new(properties)?)?;
        let limits = admin.judge_new(parent, &rows, Usage::default())?;
        let before = admin.catalog.changes();
        let entered = self.enter_new(&mut admin, parent, name, (&rows, limits));
        if let Err(error) = &entered
            && admin.catalog.changes() != before
        {
            // A part of the dataset is in the catalog: no commit may make that durable.
            admin.failed = Some(error.clone());
            self.throttle.fail(error);
        }
        let id = entered?;
        self.commit_under(&mut admin, |admin, txg| {
            let mut row = admin.catalog.dataset(id)?;
            row.created = txg;
            admin.catalog.set_dataset(id, &row)
        })?;
        Ok(id)
    }

    /// Enters a new file system into the catalog, the accounts and the table of datasets; its files
    /// are in memory only.
    fn enter_new(
        &self,
        admin: &mut Admin,
        parent: u64,
        name: &str,
        (rows, limits): (&[(String, PropertyRow)], Limits),
    ) -> Result<u64, PoolError> {
        let id = admin.catalog.number()?;
        let dataset = Arc::new(Dataset::format(self, id, spelling::folding(rows))?);
        let list = admin.catalog.deadlists().create()?;
        let row = self.new_row(parent, name, list);
        admin.catalog.enter(id, &row)?;
        admin.put_rows(id, rows)?;
        if parent == 0 {
            let quotas = self.forest_of(&admin.catalog)?;
            *admin.quota_tree() = quotas;
        } else {
            admin.quota_tree().add(id, parent, Usage::default(), limits)?;
        }
        dataset.adopt(admin.behaviour_of(id)?, &self.bounds(), admin.owner_quotas(id)?);
        self.datasets.write().insert(id, dataset);
        Ok(id)
    }

    pub(in crate::engine) fn new_row(&self, parent: u64, name: &str, list: ListId) -> DatasetRow {
        DatasetRow {
            parent,
            name: name.to_owned(),
            guid: (self.entropy)(),
            created: Txg(0),
            created_at: (self.clock)().seconds,
            root: None,
            list,
            usage: Usage::default(),
            origin: None,
            newest: Txg(0),
        }
    }

    /// Renames a dataset, or moves it below another parent.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the name exists or the new parent lies below the dataset;
    /// [`PoolError::NoSpace`] for a quota of the new parent.
    pub fn rename_dataset(&self, id: u64, new: &NewDataset) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            if admin.catalog.child(new.parent, &new.name)?.is_some() {
                return refused(format!("dataset '{}' exists already", new.name));
            }
            if admin.catalog.dataset(id)?.parent != new.parent {
                admin.judge_parent(new.parent)?;
                admin.judge_move(id, new.parent)?;
                admin.quota_tree().reparent(id, new.parent).map_err(refusal)?;
            }
            admin.catalog.rename(id, new.parent, &new.name)
        })
    }

    /// Sets the name of the root dataset in memory, for as long as this pool is open: for a pool
    /// that is imported read only.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn call_root(&self, name: &str) -> Result<(), PoolError> {
        let mut admin = self.admin.lock();
        let root = admin.catalog.head()?.root;
        admin.catalog.rename(root, 0, name)
    }

    /// Returns the number and the catalog row of the dataset with this name.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn describe(&self, name: &str) -> Result<Option<(u64, DatasetRow)>, PoolError> {
        let admin = self.admin.lock();
        let Some(id) = find(&admin.catalog, name)? else { return Ok(None) };
        Ok(Some((id, admin.catalog.dataset(id)?)))
    }

    /// Bytes that a dataset uses and may still use: the breakdown, the usage, and the available
    /// space.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn space(&self, id: u64) -> Result<(crate::space::Breakdown, Usage, u64), PoolError> {
        let admin = self.admin.lock();
        let quotas = admin.quota_tree();
        Ok((quotas.breakdown(id)?, quotas.usage(id)?, quotas.available(id)?))
    }
}
