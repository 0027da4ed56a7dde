//! Segments: a segment is a slot's worth of frames, one after the other; it is written once, front to back, and then
//! only read until it is freed as a whole.
//!
//! Callers: the store. The parts: [`table`] (the state of each segment), [`pages`] and [`table_log`] (its storage on
//! the pool), [`stream`] (open segments being filled), [`cleaner`] (the choice of victims).
//!
//! Invariant: frame numbers and locations are only changed through [`table::Op`], so that the state in memory equals
//! that of a replay.

pub mod cleaner;
pub mod moved;
pub mod pages;
pub mod stream;
pub mod table;
pub mod table_log;
