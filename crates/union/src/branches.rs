//! A branch at work: its layer, what may be done with it, and its own directories.
//!
//! Made once by [`crate::Union::new`]; the list never changes, and whoever uses a file of a branch holds the branch.

use crate::{branch::BranchMode, marks::Marks, work::Work};
use nacre_vfs::{Errno, FileId, Layer, Node, Result};
use std::sync::Arc;

/// A branch.
pub(crate) struct Branch {
    /// Its place, counted from the top.
    pub(crate) index: usize,
    pub(crate) layer: Arc<dyn Layer>,
    pub(crate) mode: BranchMode,
    pub(crate) root: Node,
    pub(crate) root_id: FileId,
    pub(crate) marks: Marks,
    /// The hard-link index, where marks are read.
    pub(crate) links: Option<Node>,
    /// Of writable branches.
    pub(crate) work: Option<Work>,
}

impl Branch {
    /// Whether this is its top directory.
    pub(crate) fn is_root(&self, id: FileId) -> bool {
        id == self.root_id
    }

    /// Whether files on it may be changed.
    pub(crate) fn is_writable(&self) -> bool {
        self.work.is_some()
    }

    /// Its own directories.
    ///
    /// # Errors
    /// EROFS where it is not writable.
    pub(crate) fn work(&self) -> Result<&Work> {
        self.work.as_ref().ok_or(Errno::EROFS)
    }
}
