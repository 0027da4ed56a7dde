//! The tests of unions, without mounts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod apart;
mod behaviour;
mod checking;
mod conformance;
mod devices;
mod duplicates;
mod durable;
mod faults;
mod full;
mod links;
mod listing;
mod live;
mod model;
mod notices;
mod overlay;
mod placement;
mod pools;
mod threads;
mod tiers;
mod unions;
