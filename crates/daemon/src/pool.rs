//! The process that owns an imported pool ([`process`], started by [`start`]), the mounts of its
//! file systems, and how commands reach it ([`client`]).
//!
//! The verbs are implemented in the crate `nacre-admin`.

pub mod cachefile;
mod carrier;
pub mod client;
pub mod dates;
mod events;
pub mod expected;
mod going_on;
pub mod known;
pub mod left;
mod mount_point;
mod mounts;
mod name_lock;
mod place_operations;
pub mod process;
pub mod rewind;
pub mod runtime_files;
mod shares;
mod snapshot_directory;
pub mod start;
mod telling;
mod trust;

pub use process::run as serve;
pub use start::order as serves;
