//! The tests of this repository's own rules, and of the test kit.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod parity;
mod tidy;
