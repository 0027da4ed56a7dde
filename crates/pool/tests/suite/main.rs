//! The tests of a pool's storage through its public interface, on simulated devices and object stores.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod backends;
mod crash_model;
mod crashes;
mod damage;
mod decoders;
mod fixtures;
mod forged;
mod forged_labels;
mod groups;
mod histories;
mod kept;
mod log_devices;
mod pools;
mod threads;
