//! Streams of snapshots: what `nacre fs send` writes and `nacre fs receive` reads, as bytes.
//! `docs/stream-format.md` has the tables.
//!
//! ```text
//!  record   the records: what each says, as bytes and back
//!  writer   records under a running checksum
//!  reader   the same back; nothing is believed before its checksum was seen
//!  token    what a half received stream goes on with
//! ```
//!
//! Called by the engine (`engine/sending.rs`, `engine/receiving.rs`) and by whoever shows streams.
//! Invariants: a reader takes any bytes and needs no more memory than one record; it never waits
//! for bytes that the stream does not have.

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
