//! Segments: where frames lie. A segment is a slot's worth of frames, one behind the other; it is
//! written once, front to back, and then only read until it is freed whole.
//!
//! Callers: the store. The parts: [`table`] (what is known of each segment), [`pages`] and
//! [`table_log`] (how that is kept on the pool), [`stream`] (open segments being filled), [`cleaner`] (which segments are worth moving).
//!
//! Invariant: frame numbers and places are only ever changed through [`table::Op`], so that what is
//! in memory is what a replay gives.

pub mod cleaner;
pub mod moved;
pub mod pages;
pub mod stream;
pub mod table;
pub mod table_log;
