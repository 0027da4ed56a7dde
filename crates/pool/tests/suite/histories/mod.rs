//! Histories: two or three programs with whole pools on one simulated object store, which stand still at
//! any request and take the pool from each other. What is checked at each moment: what one of them was told
//! to be durable stays, no generation is acknowledged twice, whoever lost the pool is told nothing any more,
//! and nothing that a reader may need is removed or written over.

mod facts;
mod programs;
mod store;

pub use programs::{campaign, go_back_beside_a_writer, take_over_at_once};
