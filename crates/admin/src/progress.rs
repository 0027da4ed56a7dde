//! Progress lines of long verbs, and the bytes of streams to and from the caller.

use std::io;

/// Receiver of a verb's progress lines and stream bytes: the caller.
pub trait Progress: Send {
    /// Shows a line; `false`: the caller is gone (the verb may continue or end in order).
    fn note(&mut self, line: &str) -> bool;

    /// Sends bytes of a stream to the caller.
    ///
    /// # Errors
    /// The caller takes none.
    fn give(&mut self, bytes: &[u8]) -> io::Result<()> {
        let _ = bytes;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Reads bytes of a stream from the caller; returns 0 at its end.
    ///
    /// # Errors
    /// The caller is gone.
    fn take(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let _ = buffer;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A [`Progress`] that discards all lines; the verb continues.
#[derive(Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn note(&mut self, _: &str) -> bool {
        true
    }
}
