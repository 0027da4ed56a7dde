//! File systems of a pool as layers: a single one (`dataset`), and an ordinary user's file systems
//! mounted below one another in one tree (`dataset_tree`).
//!
//! Created by the process that has imported the pool. Nothing here depends on a mount or a wire
//! protocol.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod dataset;
pub mod dataset_tree;
mod generation;
// The same locks as in `layers`: whether they are the real ones or loom's depends on how the crate
// that uses them is built.
#[path = "../../cage/src/sync.rs"]
mod sync;
