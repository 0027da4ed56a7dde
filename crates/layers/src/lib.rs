//! The layers and how they are stacked: leaves (`host`, `mem`), filters (`remap`, `readonly`,
//! `throttle`, `trace`, `cage`), and the builder that turns a [`spec::StackSpec`] into a running
//! [`nacre_vfs::Layer`].
//!
//! Callers: the command line and tests. Nothing here knows a wire protocol.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod accounts;
pub mod cage;
pub mod clock;
pub mod context;
pub mod ends;
#[cfg(test)]
mod fakes;
pub mod host;
pub mod locks;
pub mod mem;
pub mod override_stat;
pub mod readonly;
pub mod remap;
pub mod shift;
pub mod size;
pub mod spec;
pub mod stack;
mod sync;
pub mod system;
pub mod throttle;
pub mod trace;
mod vigil;
pub mod without;
