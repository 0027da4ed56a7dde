//! The FUSE front end: serves a [`nacre_vfs::Layer`] as a Linux mount.
//!
//! [`Mount::start`] mounts a layer. From then on the kernel's requests arrive through `fusewire` and become calls of
//! the layer; the kernel caches the answers for as long as the layer's coherence allows. Where the layer offers a
//! backing file, the kernel reads and writes content itself (passthrough). `docs/fuse-door.md` lists what is cached
//! for how long and how many requests each operation costs.
//!
//! ```text
//!  fusewire -- door.rs -- ops/*.rs -- Layer
//!                 |          |
//!                 |   inodes.rs, open_files.rs, passthrough.rs, writeback.rs      tables
//!                 |   survival.rs                                handoff state for the next process
//!              invalidate.rs <-- Invalidation -- Layer         own thread; the only one that invalidates names, pages
//!              self_io/*.rs                                    own threads, use the mount where no notification helps
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
mod notices;
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
