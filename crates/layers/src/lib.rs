//! Layers: leaves (`host`, `mem`) and filters (`remap`, `readonly`, `throttle`, `trace`, `shift`,
//! `override_stat`), their settings, and the traits by which they query the system.
//!
//! Callers: crates with layers of their own (`cage`, `poolfs`), the stack builder, the command
//! line and tests. Nothing here knows a wire protocol.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

// The macros for settings refer to this crate by its name, also from within it.
extern crate self as nacre_layers;

pub mod accounts;
pub mod clock;
pub mod context;
pub mod ends;
#[cfg(any(test, feature = "fakes"))]
pub mod fakes;
pub mod host;
pub mod locks;
pub mod mem;
pub mod override_stat;
pub mod readonly;
pub mod remap;
pub mod rest_state;
mod set_id;
pub mod settings;
pub mod shift;
pub mod size;
pub mod system;
pub mod throttle;
pub mod trace;
