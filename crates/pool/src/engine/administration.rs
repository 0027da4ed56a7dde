//! Administrative operations of `fs` commands: datasets, snapshots, clones, rollback, promote,
//! destroy, rename, holds, bookmarks.
//!
//! Invariants: each operation is part of one commit, so it is durable when it returns and never
//! visible in part; a refused operation has changed nothing.

mod batch;
mod clones;
mod datasets;
mod deadlist_chain;
mod destroy;
mod destroy_set;
mod snapshots;

pub use destroy_set::DestroySet;
pub(super) use snapshots::snapshot_row;

use crate::error::PoolError;

/// Description of a dataset that is to be created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewDataset {
    /// Number of the parent dataset.
    pub parent: u64,
    /// The last part of its name.
    pub name: String,
    /// Properties to create it with: stored names, and values as users write them.
    pub properties: Vec<(String, String)>,
}

impl NewDataset {
    /// A description without properties.
    #[must_use]
    pub fn named(parent: u64, name: &str) -> Self {
        Self { parent, name: name.to_owned(), properties: Vec::new() }
    }
}

fn refused<T>(why: String) -> Result<T, PoolError> {
    Err(PoolError::Refused(why))
}
