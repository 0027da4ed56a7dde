//! Data of the pool as a whole: its root dataset, its own properties, its history, its size, and
//! the paths of damaged files.

use super::Pool;
use crate::catalog::{HistoryRow, PropertyRow, PropertySource};
use crate::error::PoolError;
use crate::files::FileError;
use crate::pointer::{Pointer, Txg};
use crate::tree::{Context, walk::Visitor, walk::walk};

/// Number of lines that the history keeps.
const HISTORY_MOST: u64 = 100_000;

/// Dataset number under which the pool's own properties are stored: no dataset has it.
const POOL: u64 = 0;

/// Location of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePath {
    /// Name of the snapshot that has it; `None`: the live dataset.
    pub snapshot: Option<String>,
    /// Its path below the root of its dataset.
    pub path: Vec<u8>,
}

impl Pool {
    /// Returns the number of the root dataset, which has the pool's name.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn root(&self) -> Result<u64, PoolError> {
        Ok(self.admin.lock().catalog.head()?.root)
    }

    /// Returns the stored properties of the pool: names and values.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn pool_properties(&self) -> Result<Vec<(String, String)>, PoolError> {
        let rows = self.admin.lock().catalog.properties(POOL)?;
        Ok(rows.into_iter().map(|(name, row)| (name, row.value)).collect())
    }

    /// Stores properties of the pool, or (`None`) removes them. Values are canonical; the caller
    /// knows their meaning.
    ///
    /// # Errors
    /// Errors of a commit.
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
    /// Errors of the store.
    pub fn remember(&self, line: &HistoryRow) -> Result<(), PoolError> {
        self.admin.lock().catalog.remember(line, HISTORY_MOST)
    }

    /// Returns the history, the oldest line first.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn history(&self) -> Result<Vec<HistoryRow>, PoolError> {
        self.admin.lock().catalog.history()
    }

    /// Notes that the store's size has changed: devices were added, have grown, or are being
    /// removed.
    pub fn grown(&self) {
        let size = self.storage.size();
        self.admin.lock().quota_tree().resize(size);
        self.reservations.measure();
    }

    /// Visits the rows of a stored tree: for dumps.
    ///
    /// # Errors
    /// Errors of the visitor, and of reading, unless it accepts them.
    pub fn visit_tree(&self, root: &Pointer, visitor: &mut dyn Visitor) -> Result<(), PoolError> {
        walk(&Context { frames: &*self.frames, cache: &self.cache }, root, Txg(0), visitor)
    }

    /// Returns the paths of files below the root of their dataset, in the order of `inodes`: from
    /// the live dataset, or from the newest snapshot that has the file, with that snapshot's name.
    /// Each snapshot is opened at most once, and only if it is needed.
    ///
    /// # Errors
    /// Errors of the store; an error of one file takes the place of its path.
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
