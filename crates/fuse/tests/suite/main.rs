//! The tests of the FUSE front end with real mounts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod enforcement;
mod fixture;
mod requests;
mod semantics;
mod sync_call;
mod watchers;
mod writeback;
