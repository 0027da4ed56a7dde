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
//!                 |   survival.rs                                               what a process after this one needs
//!              invalidate.rs <-- Invalidation -- Layer              own thread; it alone notifies of names and pages
//!              self_io/*.rs                                         own threads, use the mount to tell the kernel what no notification can
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod closes;
mod door;
mod failure;
mod implicit_opens;
mod inodes;
mod invalidate;
mod kernel_side;
mod mapped;
mod mount;
mod negotiate;
mod open_files;
mod open_tables;
mod ops;
mod options;
mod passthrough;
mod running;
mod self_io;
mod status;
mod stores;
mod survival;
mod sync_call;
mod wire;
mod writeback;

pub use mount::{HeldWrites, Mount, MountError, usable};
pub use options::{AclChoice, FuseOptions, PassthroughChoice, TransportChoice, WorkerSetup, XattrChoice};
pub use self_io::waits::Waiting;
pub use status::{OperationCounts, PassthroughCounts, Status, Transport, WritebackCounts};
pub use survival::{Survival, VERSION as SURVIVAL_VERSION};
pub use sync_call::{Duty, SyncCalls, let_go_of_sync_calls};
