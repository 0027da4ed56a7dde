//! Cages: engines that enforce their limits, and reports on existing cages.
//!
//! One of three engines holds a cage: this program through FUSE (a stack of the layers `host` and
//! `cage`, served like any other mount: [`serving`]), or one of the kernel's ([`engine`]).

pub mod change;
pub mod engine;
pub mod engines;
pub mod find;
mod loop_engine;
pub mod place;
mod quota_engine;
pub mod record;
pub mod report;
pub mod resize;
pub mod serving;
pub mod state;
pub mod writers;

pub(crate) use loop_engine::programs;
