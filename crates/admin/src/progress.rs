//! Progress lines of long verbs, and the bytes of streams to and from the caller.

use std::io;

use crate::{Kind, Refusal};

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

/// Sends lines that are the result of a verb: where one is not sent, the verb is refused.
pub(crate) struct ResultLines<'a> {
    progress: &'a mut dyn Progress,
    all_sent: bool,
}

impl<'a> ResultLines<'a> {
    pub fn to(progress: &'a mut dyn Progress) -> Self {
        Self { progress, all_sent: true }
    }

    /// Sends a line, unless an earlier one was not sent; returns whether it was sent.
    pub fn send(&mut self, line: &str) -> bool {
        self.all_sent = self.all_sent && self.progress.note(line);
        self.all_sent
    }

    /// # Errors
    /// A line was not sent: the caller is gone, or the pool is about to be.
    pub fn end(&self, doing: &str) -> Result<(), Refusal> {
        if self.all_sent {
            return Ok(());
        }
        Err(Refusal::new(Kind::Io, format!("{doing}: not all of it was read before the pool was let go")))
    }
}
