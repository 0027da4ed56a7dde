//! The storage engine: pools of devices that hold datasets as copy-on-write trees on relocatable segments.
//!
//! Callers: the layer `dataset` and the commands `nacre pool` and `nacre fs`. The engine knows neither FUSE nor the layer contract.
//! The format is in `docs/pool-format.md`, byte by byte; the modules follow it from the bottom up:
//!
//! ```text
//!  tree      copy-on-write B+trees whose nodes are frames          tree, cache
//!  store     frames written, read, freed; commits                  store, frame, pointer
//!  segment   frames packed into segments, streams, cleaner         segment
//!  label     who the pool is; the root records                     label
//!  device    length, read, write, sync, discard                    device
//! ```
//!
//! Invariants:
//! - A frame is never changed in place. What a durable root reaches is not written over until [`Txg`]s later it is reached by no root kept.
//! - A pointer names a segment and a frame, never a place: frames move without a change of any tree.
//! - Every byte read from a device is checked before it is believed; damage is an error that names the frame, never data and never a panic.
//! - Clock and randomness are passed in.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

pub mod cache;
pub mod catalog;
pub mod checksum;
pub mod codec;
pub mod deadlist;
pub mod device;
pub mod engine;
pub mod error;
pub mod files;
pub mod frame;
pub mod frames;
pub mod label;
pub mod log;
pub mod names;
pub mod packing;
pub mod pointer;
pub mod properties;
pub mod rows;
pub mod segment;
pub mod space;
pub mod store;
pub mod tree;

pub use error::{Damage, PoolError};
pub use frames::{Frames, NewFrame, Owner, Packing, Stream, Wanted};
pub use pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
pub use store::Store;
