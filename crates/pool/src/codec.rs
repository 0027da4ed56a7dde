//! Encoding and decoding of little-endian numbers, variable-length numbers, and length-prefixed byte strings. Every
//! structure on a device is read and written through these two types.
//!
//! Invariant: decoding never panics and never allocates more than the length of the input.

use crate::error::{Damage, PoolError};

const SHORT: PoolError = PoolError::Format(Damage::Structure("a structure ends too early"));

/// Decoder of a structure.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A decoder of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Whether all input was decoded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The remaining input.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Takes the next `length` bytes.
    ///
    /// # Errors
    /// [`PoolError::Format`] where the input is too short; the same for all methods.
    pub fn take(&mut self, length: usize) -> Result<&'a [u8], PoolError> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else { return Err(SHORT) };
        self.rest = rest;
        Ok(taken)
    }

    /// Decodes an array of bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], PoolError> {
        let Some((taken, rest)) = self.rest.split_first_chunk::<N>() else { return Err(SHORT) };
        self.rest = rest;
        Ok(*taken)
    }

    /// Decodes one byte.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u8(&mut self) -> Result<u8, PoolError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// Decodes two bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u16(&mut self) -> Result<u16, PoolError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Decodes four bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u32(&mut self) -> Result<u32, PoolError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Decodes eight bytes.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn u64(&mut self) -> Result<u64, PoolError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Decodes a number of variable length (LEB128, at most ten bytes).
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

    /// Decodes a byte string with its length as a [`Self::varint`].
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn string(&mut self) -> Result<&'a [u8], PoolError> {
        let length = usize::try_from(self.varint()?).map_err(|_| SHORT)?;
        self.take(length)
    }
}

/// Encoder of a structure.
#[derive(Clone, Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Default for Writer {
    /// Most structures are rows: the capacity fits one, so that none grows byte by byte.
    fn default() -> Self {
        Self { bytes: Vec::with_capacity(64) }
    }
}

impl Writer {
    /// An encoder with this capacity in bytes.
    #[must_use]
    pub fn with_room(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes) }
    }

    /// Encoded length of a number as a [`Self::varint`], bytes.
    #[must_use]
    pub const fn length_of(value: u64) -> usize {
        (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
    }

    /// Appends bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends one byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Appends two bytes.
    pub fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends four bytes.
    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// Appends a number of variable length (LEB128).
    pub fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.u8((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.u8(value as u8);
    }

    /// Appends a byte string with its length as a [`Self::varint`].
    pub fn string(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.bytes(bytes);
    }

    /// Reserves capacity for this many more bytes.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve_exact(bytes);
    }

    /// Number of encoded bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing was encoded yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the encoded bytes.
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
