//! What long verbs tell while they run, and the bytes that they give and take.

use std::io;

/// Somebody who is told.
pub trait Progress: Send {
    /// A line for people; `false`: nobody listens any more (the verb may go on or end in order).
    fn note(&mut self, line: &str) -> bool;

    /// Bytes of a stream for whoever asked.
    ///
    /// # Errors
    /// Nobody takes them.
    fn give(&mut self, bytes: &[u8]) -> io::Result<()> {
        let _ = bytes;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Bytes of a stream from whoever asked; none at its end.
    ///
    /// # Errors
    /// It is gone.
    fn take(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let _ = buffer;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Nobody listens, and nothing ends for that.
#[derive(Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn note(&mut self, _: &str) -> bool {
        true
    }
}
