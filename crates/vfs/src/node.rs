//! A file of one layer, as a reference for the layer's callers.

use std::{any::Any, fmt, sync::Arc};

/// An owned, opaque reference to a file: created and understood by one layer, cheap to clone. Dropping the last clone
/// means "forget": it frees all of the layer's state of the file. Two nodes may stand for the same file; compare
/// their [`crate::FileId`].
///
/// Filters forward nodes unchanged, so a layer in a stack costs no memory per file.
#[derive(Clone)]
pub struct Node(Arc<dyn Any + Send + Sync>);

impl Node {
    /// Wraps a layer's state of a file.
    pub fn new<T: Any + Send + Sync>(inner: Arc<T>) -> Node {
        Node(inner)
    }

    /// The wrapped state; `None` where the node belongs to another layer (a wiring error: return EIO).
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// The wrapped state as an owned reference.
    pub fn arc<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        Arc::clone(&self.0).downcast().ok()
    }

    /// Whether both are clones of one node (not: whether both stand for the same file).
    pub fn same(&self, other: &Node) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node({:p})", Arc::as_ptr(&self.0))
    }
}
