//! Bytes in and out: little-endian numbers, variable-length numbers, and byte strings with their
//! lengths. Every structure on a device is read and written through these two.
//!
//! Invariant: reading never panics and never allocates more than the input is long.

use crate::error::{Damage, PoolError};

const SHORT: PoolError = PoolError::Format(Damage::Structure("a structure ends too early"));

/// Reads a structure from the bytes that hold it.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Whether everything has been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// What has not been read yet.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The next `length` bytes.
    ///
    /// # Errors
    /// As for all here: [`PoolError::Format`] where the input is too short.
    pub fn take(&mut self, length: usize) -> Result<&'a [u8], PoolError> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else { return Err(SHORT) };
        self.rest = rest;
        Ok(taken)
    }

    /// An array of bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], PoolError> {
        let Some((taken, rest)) = self.rest.split_first_chunk::<N>() else { return Err(SHORT) };
        self.rest = rest;
        Ok(*taken)
    }

    /// One byte.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u8(&mut self) -> Result<u8, PoolError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// Two bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u16(&mut self) -> Result<u16, PoolError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u32(&mut self) -> Result<u32, PoolError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u64(&mut self) -> Result<u64, PoolError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of variable length (LEB128, at most ten bytes).
    ///
    /// # Errors
    /// As [`Self::take`]; also for a number of more than 64 bits.
    pub fn varint(&mut self) -> Result<u64, PoolError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(PoolError::Format(Damage::Structure("a number of more than 64 bits")))
    }

    /// A byte string after its length as a [`Self::varint`].
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn string(&mut self) -> Result<&'a [u8], PoolError> {
        let length = usize::try_from(self.varint()?).map_err(|_| SHORT)?;
        self.take(length)
    }
}

/// Writes a structure.
#[derive(Clone, Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Default for Writer {
    /// Most structures are rows: room for one, so that none grows byte by byte.
    fn default() -> Self {
        Self { bytes: Vec::with_capacity(64) }
    }
}

impl Writer {
    /// One with room for so many bytes.
    #[must_use]
    pub fn with_room(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes) }
    }

    /// How many bytes a number takes as a [`Self::varint`].
    #[must_use]
    pub const fn length_of(value: u64) -> usize {
        (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
    }

    /// Bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Two bytes.
    pub fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// A number of variable length (LEB128).
    pub fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.u8((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.u8(value as u8);
    }

    /// A byte string after its length as a [`Self::varint`].
    pub fn string(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.bytes(bytes);
    }

    /// Makes room for so many bytes more at once.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve_exact(bytes);
    }

    /// How much has been written, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing has been written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What was written.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(a: u8, b: u16, c: u32, d: u64, e: u64, s: Vec<u8>) {
            let mut writer = Writer::default();
            writer.u8(a);
            writer.u16(b);
            writer.u32(c);
            writer.u64(d);
            let before = writer.len();
            writer.varint(e);
            prop_assert_eq!(writer.len() - before, Writer::length_of(e));
            writer.string(&s);
            let bytes = writer.finish();
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!((reader.u8().unwrap(), reader.u16().unwrap(), reader.u32().unwrap()), (a, b, c));
            prop_assert_eq!((reader.u64().unwrap(), reader.varint().unwrap(), reader.string().unwrap()), (d, e, s.as_slice()));
            prop_assert!(reader.is_empty());
            for cut in 0..bytes.len() {
                let mut reader = Reader::new(&bytes[..cut]);
                let all = (|| Ok::<_, PoolError>((reader.u8()?, reader.u16()?, reader.u32()?, reader.u64()?, reader.varint()?, reader.string()?.len())))();
                prop_assert!(all.is_err());
            }
        }

        #[test]
        fn numbers_from_any_bytes(bytes in proptest::collection::vec(0x80u8.., 0..12)) {
            prop_assert!(Reader::new(&bytes).varint().is_err());
        }
    }
}
