//! The walk through all verbs (`real_walk.rs`): its rows, the scene that each is walked on, and how
//! it is walked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

pub mod rows;
pub mod scene;
pub mod walking;
