//! The handlers of the operations, one file per family. Each is short: ids to nodes, one call of the layer, the
//! reply.

mod attributes;
pub(crate) mod data;
mod directories;
mod handles;
mod ioctls;
mod locks;
mod names;
pub(crate) mod opens;
mod protected;
mod undelivered;
pub(crate) mod unopened;
mod xattrs;
