//! File systems of a pool as layers: one by itself (`dataset`), and an ordinary user's file systems below one another in one tree (`family`).
//!
//! Made by who has imported the pool. Nothing here knows a mount or a wire protocol.
#![forbid(unsafe_code)]

pub mod dataset;
pub mod family;
