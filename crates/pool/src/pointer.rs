//! Pointers: references to frames in trees and root records (like ZFS' block pointers). Every module above `device`
//! uses them; `docs/pool-format.md` has a picture.
//!
//! Invariant: a pointer stays valid when its frame moves: segment and index are its name, the offset is only a hint
//! for frames that never moved.

use std::fmt;

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};

/// Number of a transaction group (one commit). 0 is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Txg(pub u64);

impl fmt::Display for Txg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Kind of a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// File content.
    Data = 1,
    /// A leaf of a tree.
    Leaf = 2,
    /// An inner node of a tree.
    Inner = 3,
    /// A large value: an extended attribute that does not fit its row.
    Value = 4,
    /// A piece of the segment table.
    Table = 5,
}

/// Compression of a frame's stored bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Compression {
    /// Uncompressed.
    Off = 0,
    /// An LZ4 block.
    Lz4 = 1,
    /// A zstd frame; the level is not needed to decompress.
    Zstd = 2,
}

/// Checksum function of a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ChecksumKind {
    /// XXH3, 128 bits, little-endian.
    Xxh3 = 1,
    /// The first 16 bytes of BLAKE3.
    Blake3 = 2,
}

macro_rules! from_byte {
    ($kind:ty, $what:literal, $($byte:literal => $value:expr),+) => {
        impl TryFrom<u8> for $kind {
            type Error = PoolError;

            fn try_from(byte: u8) -> Result<Self, PoolError> {
                match byte {
                    $($byte => Ok($value),)+
                    _ => Err(PoolError::Format(Damage::Structure($what))),
                }
            }
        }
    };
}
from_byte!(FrameKind, "unknown kind of frame", 1 => Self::Data, 2 => Self::Leaf, 3 => Self::Inner, 4 => Self::Value, 5 => Self::Table);
from_byte!(Compression, "unknown compression", 0 => Self::Off, 1 => Self::Lz4, 2 => Self::Zstd);
from_byte!(ChecksumKind, "unknown checksum", 1 => Self::Xxh3, 2 => Self::Blake3);

/// Name of a frame, and its expected properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pointer {
    /// The segment in which the frame was written first.
    pub segment: u32,
    /// Index of the frame in that segment, in the order of writing.
    pub index: u32,
    /// Offset from the start of the segment when it was written, in units of [`Pointer::UNIT`] bytes.
    pub offset: u32,
    /// Length of the stored bytes after the frame's header.
    pub stored: u32,
    /// Length of the content, bytes.
    pub logical: u32,
    /// Kind of the content.
    pub kind: FrameKind,
    /// How the content is compressed.
    pub compression: Compression,
    /// The checksum function.
    pub checksum_kind: ChecksumKind,
    /// The txg in which the frame was written.
    pub birth: Txg,
    /// Checksum of the content (not of the stored bytes), so that a frame can be recompressed without changing its
    /// pointer.
    pub checksum: [u8; 16],
}

impl Pointer {
    /// Length of an encoded pointer, bytes.
    pub const LENGTH: usize = 48;
    /// Alignment of frames, bytes.
    pub const UNIT: u32 = 16;
    /// Length of the header before each frame's stored bytes.
    pub const HEADER: u32 = 80;

    /// Space that the frame uses in its segment, and that its owner is charged: header and stored bytes, rounded up
    /// to the unit. Bytes.
    #[must_use]
    pub fn charged(&self) -> u64 {
        (u64::from(Self::HEADER) + u64::from(self.stored)).next_multiple_of(u64::from(Self::UNIT))
    }

    /// Encodes the pointer in 48 bytes.
    pub fn encode(&self, to: &mut Writer) {
        to.u32(self.segment);
        to.u32(self.index);
        to.u32(self.offset);
        to.u32(self.stored);
        to.u32(self.logical);
        to.u8(self.kind as u8);
        to.u8(self.compression as u8);
        to.u8(self.checksum_kind as u8);
        to.u8(0);
        to.u64(self.birth.0);
        to.bytes(&self.checksum);
    }

    /// Decodes a pointer from 48 bytes.
    ///
    /// # Errors
    /// [`PoolError::Format`] for malformed bytes.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let (segment, index, offset, stored, logical) =
            (from.u32()?, from.u32()?, from.u32()?, from.u32()?, from.u32()?);
        let (kind, compression, checksum_kind) =
            (from.u8()?.try_into()?, from.u8()?.try_into()?, from.u8()?.try_into()?);
        if from.u8()? != 0 {
            return Err(PoolError::Format(Damage::Structure("reserved byte of a pointer")));
        }
        let birth = Txg(from.u64()?);
        Ok(Self {
            segment,
            index,
            offset,
            stored,
            logical,
            kind,
            compression,
            checksum_kind,
            birth,
            checksum: from.array()?,
        })
    }
}

impl fmt::Display for Pointer {
    /// `segment.index`, as `nacre pool inspect` names frames.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.segment, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pointers_survive(segment: u32, index: u32, offset: u32, stored in 0..u32::MAX / 2, logical: u32, birth: u64, checksum: [u8; 16], kind in 1u8..=5) {
            let pointer = Pointer {
                segment, index, offset, stored, logical,
                kind: kind.try_into().unwrap(),
                compression: Compression::Zstd,
                checksum_kind: ChecksumKind::Blake3,
                birth: Txg(birth),
                checksum,
            };
            let mut writer = Writer::default();
            pointer.encode(&mut writer);
            let bytes = writer.finish();
            prop_assert_eq!(bytes.len(), Pointer::LENGTH);
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!(Pointer::decode(&mut reader).unwrap(), pointer);
            prop_assert!(reader.is_empty());
            prop_assert_eq!(pointer.charged() % 16, 0);
        }

        #[test]
        fn any_bytes_are_a_pointer_or_an_error(bytes: Vec<u8>) {
            let mut reader = Reader::new(&bytes);
            if let Ok(pointer) = Pointer::decode(&mut reader) {
                let mut writer = Writer::default();
                pointer.encode(&mut writer);
                let written = writer.finish();
                prop_assert_eq!(written.as_slice(), &bytes[..Pointer::LENGTH]);
            }
        }
    }
}
