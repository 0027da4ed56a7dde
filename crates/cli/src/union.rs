//! Unions: several directories shown as one tree.
//!
//! `nacre union` mounts them ([`command`], [`plan`]: pure) where they can stand ([`place`]); its
//! verbs ask the process that serves one ([`run`], [`serving`]).

pub mod absent;
pub mod balancing;
pub mod command;
pub mod list;
pub mod metrics;
pub mod place;
pub mod plan;
pub mod report;
pub mod run;
pub mod serving;
mod tiering;

/// What stands before the branches in the first column of the mount table, and of fstab.
pub const PREFIX: &str = "union:";
