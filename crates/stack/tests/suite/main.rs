//! The tests of stacks of layers, without mounts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod cage;
mod cage_edge;
mod cage_hostile;
mod cage_writeback;
mod conformance;
mod model;
mod stacks;
