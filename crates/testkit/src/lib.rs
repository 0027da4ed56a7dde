//! Shared code of tests of layers and mounts: the conformance suite of the `Layer` contract, a
//! reference tree with a random-operation model, parity runs (the same calls on two directories),
//! and the wait for a condition.
//!
//! Callers: the tests of `layers`, `fuse` and `cli`; no part of the product. Depends on the
//! contract only, so that no layer can be tested against itself. A failed expectation here is a
//! failed test: this crate reports by panics.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

pub mod conformance;
pub mod faulty;
pub mod model;
pub mod parity;
mod waits;
mod world;

pub use waits::{PATIENCE, eventually};
pub use world::{Listed, World, name};

/// Skips a test on a machine without a prerequisite; the check of the prerequisite reports the
/// reason.
#[macro_export]
macro_rules! needs {
    ($what:expr) => {
        if !$what {
            return;
        }
    };
}
