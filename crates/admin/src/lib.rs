//! Implementation of the verbs of `nacre pool` and `nacre fs` on an imported pool, independent of
//! any command line and any mount.
//!
//! Called by the process that owns the pool (one JSON value per line over its socket: [`Command`]
//! in, [`Reply`] out) and by the tests. Knows the engine (`nacre-pool`) and nothing of FUSE: mounts
//! are made and removed through the trait [`Mounts`].
//!
//! ```text
//!  imported   an imported pool: engine, store, devices, counters
//!  fs         datasets:  fs::run(&Imported, &dyn Mounts, FsRequest, &mut dyn Progress) -> Result<FsAnswer, Refusal>
//!  pool       the pool:  pool::run(the same)
//!  mounts     the interface to mounts
//!  counted    devices with I/O counters; failing: the property failmode; watch: events and damage
//!  followed   position of a read-only pool that follows a writer on another machine
//!  job        a background thread with start, wait and end: scrub, trim
//!  refusal    errors of verbs
//!  system_places  directories that are no mount points of streams and of pools that others write
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

pub mod clock;
pub mod counted;
pub mod failing;
mod followed;
pub mod fs;
pub mod host;
pub mod imported;
mod job;
pub mod mounts;
pub mod pool;
pub mod progress;
mod reading;
pub mod refusal;
pub mod system_places;
pub mod watch;

pub use imported::{Imported, Opening};
pub use mounts::{AtOneMoment, MountOptions, Mounted, Mounts, NoMounts, Sharing, What};
pub use progress::{Progress, Silent};
pub use refusal::{Kind, Refusal};

use serde::{Deserialize, Serialize};

/// A request to the process that owns a pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Command {
    /// The command line, for the pool's history.
    pub command: String,
    /// The request itself.
    pub verb: Verb,
}

/// The two families of verbs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// On datasets.
    Fs(fs::FsRequest),
    /// On the pool.
    Pool(pool::PoolRequest),
}

/// Answer of the process that owns the pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Done, on datasets.
    Fs(fs::FsAnswer),
    /// Done, on the pool.
    Pool(pool::PoolAnswer),
}
