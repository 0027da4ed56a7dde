//! What the verbs of `nacre pool` and `nacre fs` mean on an imported pool, apart from any command
//! line and any mount.
//!
//! Called by the process that owns the pool (one JSON value per line over its socket: [`Command`]
//! in, [`Reply`] out) and by the tests. Knows the engine (`nacre-pool`) and nothing of FUSE: what
//! it needs of mounting is the trait [`Mounts`].
//!
//! ```text
//!  imported   an imported pool: engine, store, devices, what it counts
//!  fs         verbs on datasets:  fs::run(&Imported, &dyn Mounts, FsRequest, &mut dyn Progress) -> Result<FsAnswer, Refusal>
//!  pool       verbs on the pool:  pool::run(the same)
//!  mounts     what the verbs need of mounting
//!  counted    devices that count; failing: what becomes of writes that they refuse; watch: events and damage
//!  followed   how far a pool is that follows a writer elsewhere
//!  job        a thread in the background that is started, waited for and ended: scrub, trim
//!  refusal    why something was not done
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
pub mod watch;

pub use imported::{Imported, Opening};
pub use mounts::{AtOneMoment, MountOptions, Mounted, Mounts, NoMounts, Sharing, What};
pub use progress::{Progress, Silent};
pub use refusal::{Kind, Refusal};

use serde::{Deserialize, Serialize};

/// What a command asks of the process that owns a pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Command {
    /// The command line, for the pool's history.
    pub command: String,
    /// What is to be done.
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

/// What the process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Done, on datasets.
    Fs(fs::FsAnswer),
    /// Done, on the pool.
    Pool(pool::PoolAnswer),
}
