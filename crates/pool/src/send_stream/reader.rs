//! Reads a stream, and refuses anything else.
//!
//! Called by receivers and by commands that display streams. Invariants: a record is returned only
//! if all bytes up to its end match the checksum that follows it; memory is that of one record.

use std::io::{ErrorKind, Read};

use xxhash_rust::xxh3::Xxh3;

use super::record::{CHECKSUM, HEADER, LONGEST, MAGIC, PREAMBLE, Record, StreamError, VERSION};

/// Magic number of OpenZFS streams, at their eighth byte, in either byte order.
const OPENZFS: u64 = 0x2_F5BA_CBAC;

/// A record, with its end in the stream.
#[derive(Debug)]
pub struct Received {
    /// The record.
    pub record: Record,
    /// Position of its end in the stream, bytes.
    pub end: u64,
}

/// A stream that is being read.
pub struct StreamReader<R> {
    from: R,
    sum: Xxh3,
    read: u64,
}

impl<R> std::fmt::Debug for StreamReader<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamReader").field("read", &self.read).finish_non_exhaustive()
    }
}

impl<R: Read> StreamReader<R> {
    /// Begins to read a stream.
    ///
    /// # Errors
    /// [`StreamError::Foreign`] and [`StreamError::Version`] for streams of another kind;
    /// [`StreamError::Cut`], [`StreamError::Io`].
    pub fn begin(from: R) -> Result<Self, StreamError> {
        let mut reader = Self { from, sum: Xxh3::new(), read: 0 };
        let mut preamble = [0; PREAMBLE];
        reader.fill(&mut preamble)?;
        let (magic, rest) = preamble.split_at(MAGIC.len());
        let eight: [u8; 8] = rest.try_into().unwrap_or_default();
        if u64::from_le_bytes(eight) == OPENZFS || u64::from_be_bytes(eight) == OPENZFS {
            return Err(StreamError::Foreign("a stream of OpenZFS: only streams that nacre has sent can be received"));
        }
        if magic != MAGIC {
            return Err(StreamError::Foreign("bad magic number"));
        }
        let [a, b, c, d, zero @ ..] = eight;
        let version = u32::from_le_bytes([a, b, c, d]);
        if version != VERSION {
            return Err(StreamError::Version(version));
        }
        if zero != [0; 4] {
            return Err(StreamError::Damaged("its beginning"));
        }
        Ok(reader)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), StreamError> {
        self.from.read_exact(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => StreamError::Cut,
            _ => error.into(),
        })?;
        self.sum.update(bytes);
        self.read += bytes.len() as u64;
        Ok(())
    }

    /// Returns the number of bytes read.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.read
    }

    /// Returns the next record.
    ///
    /// # Errors
    /// [`StreamError::Cut`] at the end, [`StreamError::Damaged`], [`StreamError::Io`].
    #[allow(clippy::should_implement_trait, reason = "an iterator has an end; a stream that ends early is an error")]
    pub fn next(&mut self) -> Result<Received, StreamError> {
        let mut header = [0; HEADER];
        self.fill(&mut header)?;
        let [kind, zero @ .., a, b, c, d] = header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if zero != [0; 3] || length > LONGEST {
            return Err(StreamError::Damaged("the head of a record"));
        }
        let mut payload = vec![0; length];
        self.fill(&mut payload)?;
        let wanted = self.sum.digest();
        let mut sum = [0; CHECKSUM];
        self.fill(&mut sum)?;
        if u64::from_le_bytes(sum) != wanted {
            return Err(StreamError::Damaged("a record"));
        }
        Ok(Received { record: Record::decode(kind, payload)?, end: self.read })
    }
}
