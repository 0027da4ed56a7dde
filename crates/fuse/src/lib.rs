//! The FUSE door: a [`nacre_vfs::Layer`] as a Linux mount.
//!
//! [`Mount::start`] mounts a layer; from then on the kernel's requests arrive through `fusewire`,
//! become calls of the layer, and the answers are cached by the kernel for as long as the layer's
//! coherence allows. Content is read and written by the kernel itself wherever the layer offers a
//! descriptor. `docs/fuse-door.md` says what is cached for how long and how many requests each
//! operation costs.
//!
//! ```text
//!  fusewire -- door.rs -- ops/*.rs -- Layer
//!                 |          |
//!                 |   inodes.rs, open_files.rs, passthrough.rs, writeback.rs      tables
//!              invalidate.rs <-- Invalidation -- Layer              own thread; it alone notifies of names and pages
//!              attr_refresh.rs                                      own thread, tells the kernel of sizes and times where it collects writes
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod attr_refresh;
mod door;
mod failure;
mod implicit_opens;
mod inodes;
mod inotify_replay;
mod invalidate;
mod mount;
mod negotiate;
mod numbers;
mod open_files;
mod ops;
mod options;
mod own_mount;
mod passthrough;
mod replacing;
mod resting;
mod running;
mod self_io;
mod status;
mod stores;
mod sync_call;
mod wire;
mod writeback;

pub use mount::{HeldWrites, Mount, MountError, usable};
pub use options::{AclChoice, FuseOptions, PassthroughChoice, TransportChoice, WorkerSetup, XattrChoice};
pub use status::{OperationCounts, PassthroughCounts, Status, Transport, WritebackCounts};
pub use sync_call::{Duty, SyncCalls};
