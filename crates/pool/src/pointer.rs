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
    /// None: the frame is sealed (encrypted and authenticated), and a random frame id is in the checksum's place. The
    /// stored bytes begin with a hash of their own ([`crate::frame::stored`]).
    Sealed = 3,
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
from_byte!(ChecksumKind, "unknown checksum", 1 => Self::Xxh3, 2 => Self::Blake3, 3 => Self::Sealed);

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
    /// Ordinal of the key generation under which a sealed frame was written first; 0 for other frames.
    pub pin: u8,
    /// The txg in which the frame was written.
    pub birth: Txg,
    /// Checksum of the content (not of the stored bytes), so that a frame can be recompressed without changing its
    /// pointer; of a sealed frame its id.
    pub checksum: [u8; 16],
}

impl Pointer {
    /// Length of an encoded pointer, bytes.
    pub const LENGTH: usize = 48;
    /// Alignment of frames, bytes.
    pub const UNIT: u32 = 16;
    /// Length of the header before each frame's stored bytes.
    pub const HEADER: u32 = 80;
    /// Minimum length of a sealed frame's stored bytes.
    pub const SEALED_LEAST: u32 = 80;
    /// Length of a sealed frame without children in addition to its content, bytes. Owners are not charged for it.
    pub const SEALED_ADDED: u64 = 64;

    /// Whether the frame is sealed: the store knows its stored bytes only.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.checksum_kind == ChecksumKind::Sealed
    }

    /// Length of the bytes that the store returns for this frame: the content, or the stored bytes of a sealed frame.
    #[must_use]
    pub fn content_length(&self) -> u32 {
        if self.is_sealed() { self.stored } else { self.logical }
    }

    /// The length of the content in sums (`logicalused`, deadlists) and in frame headers: of a sealed frame it is
    /// rounded up to 16, as everybody without the key knows it.
    #[must_use]
    pub fn counted_logical(&self) -> u32 {
        if self.is_sealed() { self.logical.checked_next_multiple_of(16).unwrap_or(u32::MAX) } else { self.logical }
    }

    /// Space that an inode and its owners are charged for the frame: [`Self::charged`] of the same frame in the clear.
    #[must_use]
    pub fn owner_charge(&self) -> u64 {
        let is_content = matches!(self.kind, FrameKind::Data | FrameKind::Value);
        let added = if self.is_sealed() && is_content { Self::SEALED_ADDED } else { 0 };
        self.charged().saturating_sub(added)
    }

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
        to.u8(self.pin);
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
        let pin = from.u8()?;
        let birth = Txg(from.u64()?);
        let pointer = Self {
            segment,
            index,
            offset,
            stored,
            logical,
            kind,
            compression,
            checksum_kind,
            pin,
            birth,
            checksum: from.array()?,
        };
        pointer.check_seal()?;
        Ok(pointer)
    }

    /// Checks that the fields fit the kind of checksum.
    pub(crate) fn check_seal(&self) -> Result<(), PoolError> {
        let is_possible = if self.is_sealed() {
            let is_length = self.stored >= Self::SEALED_LEAST && self.stored.is_multiple_of(Self::UNIT);
            self.pin != 0 && self.compression == Compression::Off && self.kind != FrameKind::Table && is_length
        } else {
            self.pin == 0
        };
        if is_possible { Ok(()) } else { Err(PoolError::Format(Damage::Structure("impossible seal of a frame"))) }
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
                pin: 0,
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
        fn sealed_pointers_survive_and_others_are_refused(logical in 1..u32::MAX / 2, units in 5u32..1 << 20, id: [u8; 16], pin in 1u8.., kind in 1u8..=4) {
            let pointer = Pointer {
                segment: 1, index: 2, offset: 3, stored: units * 16, logical,
                kind: kind.try_into().unwrap(),
                compression: Compression::Off,
                checksum_kind: ChecksumKind::Sealed,
                pin,
                birth: Txg(4),
                checksum: id,
            };
            let read = |pointer: Pointer| {
                let mut writer = Writer::default();
                pointer.encode(&mut writer);
                Pointer::decode(&mut Reader::new(&writer.finish()))
            };
            prop_assert_eq!(read(pointer).unwrap(), pointer);
            prop_assert_eq!(pointer.content_length(), units * 16);
            prop_assert!(pointer.counted_logical().is_multiple_of(16) && pointer.counted_logical() - logical < 16);
            prop_assert_eq!(pointer.charged() - pointer.owner_charge(), if kind == 1 || kind == 4 { 64 } else { 0 });
            for wrong in [
                Pointer { pin: 0, ..pointer },
                Pointer { compression: Compression::Lz4, ..pointer },
                Pointer { kind: FrameKind::Table, ..pointer },
                Pointer { stored: pointer.stored + 8, ..pointer },
                Pointer { stored: 64, ..pointer },
                Pointer { checksum_kind: ChecksumKind::Xxh3, ..pointer },
            ] {
                prop_assert!(read(wrong).is_err(), "{:?}", wrong);
            }
            let plain = Pointer { checksum_kind: ChecksumKind::Blake3, pin: 0, ..pointer };
            prop_assert_eq!(read(plain).unwrap(), plain);
            prop_assert_eq!((plain.content_length(), plain.counted_logical(), plain.owner_charge()), (logical, logical, plain.charged()));
        }

        #[test]
        fn any_bytes_are_a_pointer_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..100), kinds in 0u8..32, seal in 0u8..4) {
            let mut bytes = bytes;
            // With kinds that exist, so that the other fields are validated.
            if let Some(part) = bytes.get_mut(20..24) {
                part.copy_from_slice(&[kinds % 8, 0, seal, if seal == 3 { kinds / 8 } else { 0 }]);
            }
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
