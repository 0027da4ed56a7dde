//! Unions that are served: where they can stand ([`place`]), what can be asked of them
//! ([`requests`]), and who answers ([`serving`]).

pub mod absent;
pub mod balancing;
pub mod place;
pub mod report;
pub mod requests;
pub mod serving;
mod tiering;

/// What stands before the branches in the first column of the mount table, and of fstab.
pub const PREFIX: &str = "union:";
