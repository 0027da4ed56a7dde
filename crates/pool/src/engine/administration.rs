//! What `fs` commands change: datasets, snapshots, clones, rollback, promote, destroy, rename,
//! holds, bookmarks.
//!
//! Invariants: each is part of one commit, so it is durable when it returns and never seen in part;
//! what is refused has changed nothing.

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

/// A dataset that is to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewDataset {
    /// The dataset above it.
    pub parent: u64,
    /// The last part of its name.
    pub name: String,
    /// Properties that it is made with, by their stored names, with values as users write them.
    pub properties: Vec<(String, String)>,
}

impl NewDataset {
    /// One without properties of its own.
    #[must_use]
    pub fn named(parent: u64, name: &str) -> Self {
        Self { parent, name: name.to_owned(), properties: Vec::new() }
    }
}

fn refused<T>(why: String) -> Result<T, PoolError> {
    Err(PoolError::Refused(why))
}
