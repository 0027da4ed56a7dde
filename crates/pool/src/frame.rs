//! The header in front of each frame in a segment. It makes a segment readable without any tree: a scrub verifies
//! frames and names their owners, the cleaner finds live frames, and a lost tree can be salvaged.
//!
//! Callers: the store, the cleaner, the scrub. Invariant: a header is valid only if its own checksum matches; it is
//! copied unchanged when its frame moves, so the name in it is the one in pointers.

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::frames::Owner;
use crate::pointer::{Pointer, Txg};

pub mod stored;

/// Magic number at the start of each frame.
pub const MAGIC: [u8; 4] = *b"NFr1";
/// Length of a header, bytes.
pub const LENGTH: usize = Pointer::HEADER as usize;

const NO_HEADER: PoolError = PoolError::Format(Damage::Header);

/// Content of a frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The frame as pointers name it; the offset is not part of the header and is 0 after decoding.
    pub pointer: Pointer,
    /// The owner of the frame; of a sealed frame the inode and the offset are masked.
    pub owner: Owner,
    /// The key generation of a sealed frame.
    pub sealer: Sealer,
}

/// The key generation that a sealed frame is sealed under; zeros for other frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sealer {
    /// Number of the family of keys, at most [`Sealer::FAMILY_MAX`].
    pub family: u32,
    /// Ordinal of the generation in the family.
    pub ordinal: u8,
}

impl Sealer {
    /// Maximum number of a family: 24 bits.
    pub const FAMILY_MAX: u32 = (1 << 24) - 1;

    /// Decodes the family (24 bits) and the ordinal (8 bits).
    fn from_word(word: u32) -> Self {
        Self { family: word & Self::FAMILY_MAX, ordinal: (word >> 24) as u8 }
    }

    fn word(self) -> u32 {
        self.family & Self::FAMILY_MAX | u32::from(self.ordinal) << 24
    }
}

impl Header {
    /// Encodes the header in 80 bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Pointer {
            segment,
            index,
            stored,
            logical,
            kind,
            compression,
            checksum_kind,
            pin,
            birth,
            checksum,
            offset: _,
        } = self.pointer;
        let mut body = Writer::default();
        for number in [segment, index, stored, logical] {
            body.u32(number);
        }
        body.u64(birth.0);
        body.bytes(&checksum);
        body.bytes(&[kind as u8, compression as u8, checksum_kind as u8, pin]);
        body.u32(self.sealer.word());
        for number in [self.owner.dataset, self.owner.object, self.owner.offset] {
            body.u64(number);
        }
        let body = body.finish();
        let mut header = Writer::default();
        header.bytes(&MAGIC);
        header.u32(crc32c::crc32c(&body));
        header.bytes(&body);
        header.finish()
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`Damage::Header`] for malformed bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(bytes);
        if from.array()? != MAGIC {
            return Err(NO_HEADER);
        }
        let sum = from.u32()?;
        let body = from.take(LENGTH - 8)?;
        if crc32c::crc32c(body) != sum {
            return Err(NO_HEADER);
        }
        let mut from = Reader::new(body);
        let (segment, index, stored, logical) = (from.u32()?, from.u32()?, from.u32()?, from.u32()?);
        let (birth, checksum) = (Txg(from.u64()?), from.array()?);
        let (kind, compression, checksum_kind) =
            (from.u8()?.try_into()?, from.u8()?.try_into()?, from.u8()?.try_into()?);
        let (pin, sealer) = (from.u8()?, Sealer::from_word(from.u32()?));
        let owner = Owner { dataset: from.u64()?, object: from.u64()?, offset: from.u64()? };
        let pointer = Pointer {
            segment,
            index,
            offset: 0,
            stored,
            logical,
            kind,
            compression,
            checksum_kind,
            pin,
            birth,
            checksum,
        };
        let header = Self { pointer, owner, sealer };
        if header.is_possible() { Ok(header) } else { Err(NO_HEADER) }
    }

    /// Whether the fields fit the kind of checksum.
    fn is_possible(&self) -> bool {
        let Sealer { family, ordinal } = self.sealer;
        let is_sealer = if self.pointer.is_sealed() {
            self.pointer.logical.is_multiple_of(Pointer::UNIT) && family != 0 && ordinal >= self.pointer.pin
        } else {
            self.sealer == Sealer::default()
        };
        is_sealer && self.pointer.check_seal().is_ok()
    }

    /// Whether this is the header of the pointer's frame.
    #[must_use]
    pub fn is_of(&self, pointer: &Pointer) -> bool {
        // Headers have the rounded length of sealed content, rows in memory the exact one.
        self.pointer == Pointer { offset: 0, logical: pointer.counted_logical(), ..*pointer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pointer::{ChecksumKind, Compression, FrameKind};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive(segment: u32, index: u32, stored: u32, logical: u32, birth: u64, checksum: [u8; 16], dataset: u64, object: u64, offset: u64, flip in 0usize..640) {
            let pointer = Pointer {
                segment, index, offset: 0, stored, logical, birth: Txg(birth), checksum,
                kind: FrameKind::Data, compression: Compression::Lz4, checksum_kind: ChecksumKind::Xxh3, pin: 0,
            };
            let header = Header { pointer, owner: Owner { dataset, object, offset }, sealer: Sealer::default() };
            let mut bytes = header.encode();
            prop_assert_eq!(bytes.len(), LENGTH);
            prop_assert_eq!(Header::decode(&bytes).unwrap(), header);
            let (moved, other) = (Pointer { offset: 9, ..pointer }, Pointer { index: index ^ 1, ..pointer });
            prop_assert!(header.is_of(&moved));
            prop_assert!(!header.is_of(&other));
            bytes[flip / 8] ^= 1 << (flip % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn sealed_headers_survive_and_others_are_refused(logical in 1u32..1 << 24, family in 1u32..1 << 24, pin in 1u8..=200, later in 0u8..=55, id: [u8; 16], object: u64) {
            let pointer = Pointer {
                segment: 1, index: 2, offset: 0, stored: 160, logical, birth: Txg(3), checksum: id,
                kind: FrameKind::Data, compression: Compression::Off, checksum_kind: ChecksumKind::Sealed, pin,
            };
            let rounded = Pointer { logical: pointer.counted_logical(), ..pointer };
            let sealer = Sealer { family, ordinal: pin + later };
            let header = Header { pointer: rounded, owner: Owner { dataset: 1, object, offset: 5 }, sealer };
            prop_assert_eq!(Header::decode(&header.encode()).unwrap(), header);
            prop_assert!(header.is_of(&pointer) && header.is_of(&rounded));
            for other in [Pointer { pin: pin + 1, ..pointer }, Pointer { logical: rounded.logical + 1, ..pointer }] {
                prop_assert!(!header.is_of(&other), "{:?}", other);
            }
            for wrong in [
                Header { sealer: Sealer::default(), ..header },
                Header { sealer: Sealer { family: 0, ..sealer }, ..header },
                Header { sealer: Sealer { ordinal: pin - 1, ..sealer }, ..header },
                Header { pointer: Pointer { logical: rounded.logical + 8, ..rounded }, ..header },
                Header { pointer: Pointer { compression: Compression::Zstd, ..rounded }, ..header },
                Header { pointer: Pointer { checksum_kind: ChecksumKind::Xxh3, ..rounded }, ..header },
                Header { pointer: Pointer { checksum_kind: ChecksumKind::Xxh3, pin: 0, ..rounded }, ..header },
            ] {
                prop_assert!(Header::decode(&wrong.encode()).is_err(), "{:?}", wrong);
            }
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(Header::decode(&bytes).is_err());
            // The same with a right checksum, so that the fields are validated.
            if bytes.len() >= LENGTH {
                bytes[..4].copy_from_slice(&MAGIC);
                let sum = crc32c::crc32c(&bytes[8..LENGTH]);
                bytes[4..8].copy_from_slice(&sum.to_le_bytes());
                if let Ok(header) = Header::decode(&bytes) {
                    let written = header.encode();
                    prop_assert_eq!(written.as_slice(), &bytes[..LENGTH]);
                }
            }
        }
    }
}
