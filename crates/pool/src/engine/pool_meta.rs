//! What concerns the pool as a whole: its root dataset, its own properties, its history, its size,
//! and the names of files that are damaged.

use super::Pool;
use crate::catalog::{HistoryRow, PropertyRow, PropertySource};
use crate::error::PoolError;
use crate::files::FileError;
use crate::pointer::{Pointer, Txg};
use crate::tree::{Context, walk::Visitor, walk::walk};

/// Lines that the history keeps.
const HISTORY_MOST: u64 = 100_000;

/// The number under which the pool's own properties are kept: no dataset has it.
const POOL: u64 = 0;

/// Where a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePath {
    /// In this snapshot; `None`: in the head.
    pub snapshot: Option<String>,
    /// Its path below the root of its dataset.
    pub path: Vec<u8>,
}

impl Pool {
    /// The number of the dataset that has the pool's name.
    ///
    /// # Errors
    /// Those of the store.
    pub fn root(&self) -> Result<u64, PoolError> {
        Ok(self.admin.lock().catalog.head()?.root)
    }

    /// What is stored of the pool's own properties: names and values.
    ///
    /// # Errors
    /// Those of the store.
    pub fn pool_properties(&self) -> Result<Vec<(String, String)>, PoolError> {
        let rows = self.admin.lock().catalog.properties(POOL)?;
        Ok(rows.into_iter().map(|(name, row)| (name, row.value)).collect())
    }

    /// Stores properties of the pool, or (`None`) removes them. Values are canonical; what they
    /// mean is the caller's.
    ///
    /// # Errors
    /// Those of a commit.
    pub fn set_pool_properties(&self, changes: &[(&str, Option<&str>)]) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            for (name, value) in changes {
                let row = value.map(|value| PropertyRow { source: PropertySource::Local, value: value.to_owned() });
                admin.catalog.set_property(POOL, name, row.as_ref())?;
            }
            Ok(())
        })
    }

    /// Adds a line to the history. It is durable with the next commit.
    ///
    /// # Errors
    /// Those of the store.
    pub fn remember(&self, line: &HistoryRow) -> Result<(), PoolError> {
        self.admin.lock().catalog.remember(line, HISTORY_MOST)
    }

    /// The history, the oldest line first.
    ///
    /// # Errors
    /// Those of the store.
    pub fn history(&self) -> Result<Vec<HistoryRow>, PoolError> {
        self.admin.lock().catalog.history()
    }

    /// The store has got larger or smaller: devices were added, have become longer, leave.
    pub fn grown(&self) {
        let size = self.storage.size();
        self.admin.lock().quota_tree().resize(size);
        self.reservations.measure();
    }

    /// Visits a stored tree: for dumps.
    ///
    /// # Errors
    /// The visitor's, and those of reading that it does not take.
    pub fn visit_tree(&self, root: &Pointer, visitor: &mut dyn Visitor) -> Result<(), PoolError> {
        walk(&Context { frames: &*self.frames, cache: &self.cache }, root, Txg(0), visitor)
    }

    /// The paths of files below the root of their dataset, of the head or of the newest snapshot
    /// that has them: then with that snapshot's name. In the order of the files. Each snapshot is
    /// opened once, and none that is not needed.
    ///
    /// # Errors
    /// Those of the store; those that concern one file stand for its path.
    pub fn paths_of(
        &self,
        dataset: u64,
        inodes: &[u64],
    ) -> Result<Vec<Result<Option<FilePath>, PoolError>>, PoolError> {
        let named = |files: &super::Dataset, inode: u64| {
            let files = files.files();
            match files.by_number(inode).and_then(|inode| files.path(&inode)) {
                Ok(path) => Ok(path),
                Err(FileError::Pool(error)) => Err(error),
                Err(_) => Ok(None),
            }
        };
        let mut found: Vec<Result<Option<FilePath>, PoolError>> = inodes.iter().map(|_| Ok(None)).collect();
        let mut look = |files: &super::Dataset, snapshot: Option<&str>| {
            let mut left = false;
            for (inode, found) in inodes.iter().zip(&mut found).filter(|(_, found)| matches!(found, Ok(None))) {
                *found = named(files, *inode)
                    .map(|path| path.map(|path| FilePath { snapshot: snapshot.map(str::to_owned), path }));
                left |= matches!(found, Ok(None));
            }
            left
        };
        let mut left = look(&*self.dataset(dataset)?, None);
        let snapshots: Vec<(Txg, String)> =
            self.snapshot_rows(dataset)?.into_iter().map(|(txg, row)| (txg, row.name)).collect();
        for (txg, name) in snapshots.into_iter().rev() {
            if !left {
                break;
            }
            left = look(&*self.snapshot_files(dataset, txg)?, Some(&name));
        }
        Ok(found)
    }
}
