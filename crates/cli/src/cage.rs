//! Cages: directories that cannot hold more than their limit.
//!
//! `nacre cage` makes them, with one of three engines: this program through FUSE (a stack of the
//! layers `host` and `cage`, served like any other mount), or one of the kernel's ([`engine`]).
//! Pure parts: [`command`], [`plan`], [`settings`], [`report`]; effects: [`run`], [`resize`],
//! [`find`].

pub mod command;
pub mod engine;
pub mod find;
mod loop_engine;
pub mod metrics;
pub mod place;
pub mod plan;
mod quota_engine;
pub mod record;
pub mod report;
pub mod resize;
pub mod run;
pub mod serving;
pub mod settings;
pub mod state;
pub mod status;
pub mod writers;

/// What stands before the directory in the first column of the mount table, and of fstab.
pub const PREFIX: &str = "cage:";
