//! Writes a stream: records under a running checksum.
//!
//! Called by senders. Invariant: a record is passed to the sink as a whole.

use xxhash_rust::xxh3::Xxh3;

use super::record::{MAGIC, Record, StreamError, VERSION};

/// Receiver of a stream's bytes.
pub type Sink<'a> = dyn FnMut(&[u8]) -> std::io::Result<()> + 'a;

/// A stream that is being written.
pub struct StreamWriter<'a> {
    sink: &'a mut Sink<'a>,
    sum: Xxh3,
    /// Number of bytes written.
    pub written: u64,
}

impl std::fmt::Debug for StreamWriter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamWriter").field("written", &self.written).finish_non_exhaustive()
    }
}

impl<'a> StreamWriter<'a> {
    /// Starts a stream.
    ///
    /// # Errors
    /// Errors of the sink.
    pub fn begin(sink: &'a mut Sink<'a>) -> Result<Self, StreamError> {
        let mut writer = Self { sink, sum: Xxh3::new(), written: 0 };
        let mut preamble = MAGIC.to_vec();
        preamble.extend_from_slice(&VERSION.to_le_bytes());
        preamble.extend_from_slice(&[0; 4]);
        writer.put(&preamble)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), StreamError> {
        self.sum.update(bytes);
        (self.sink)(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Writes a record.
    ///
    /// # Errors
    /// Errors of the sink.
    pub fn record(&mut self, record: &Record) -> Result<(), StreamError> {
        let (kind, payload) = record.encode();
        self.raw(kind, &payload)
    }

    /// Writes rows, encoded one after the other by [`super::RowOp::encode`].
    ///
    /// # Errors
    /// Errors of the sink.
    pub fn rows(&mut self, payload: &[u8]) -> Result<(), StreamError> {
        self.raw(Record::Rows(Vec::new()).encode().0, payload)
    }

    fn raw(&mut self, kind: u8, payload: &[u8]) -> Result<(), StreamError> {
        let mut header = vec![kind, 0, 0, 0];
        header.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        self.put(&header)?;
        self.put(payload)?;
        let sum = self.sum.digest().to_le_bytes();
        self.put(&sum)
    }
}
