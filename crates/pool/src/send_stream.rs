//! Streams of snapshots: what `nacre fs send` writes and `nacre fs receive` reads, as bytes.
//! `docs/stream-format.md` has the tables.
//!
//! ```text
//!  record   the records: their fields, encoding and decoding
//!  writer   writes records under a running checksum
//!  reader   reads records; nothing is used before its checksum was verified
//!  token    the state with which an interrupted stream resumes
//! ```
//!
//! Called by the engine (`engine/sending.rs`, `engine/receiving.rs`) and by commands that display
//! streams. Invariants: a reader accepts arbitrary bytes and needs memory for one record only; it
//! never waits for bytes that the stream does not have.

pub mod reader;
pub mod record;
pub mod token;
pub mod writer;

#[cfg(test)]
mod tests;

pub use reader::{Received, StreamReader};
pub use record::{Record, RowOp, SentFrame, SentProperty, SnapshotHead, StreamError, StreamHead};
pub use token::ResumeToken;
pub use writer::StreamWriter;
