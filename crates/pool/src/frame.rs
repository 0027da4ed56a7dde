//! The header in front of each frame in a segment. It makes a segment readable without any tree: a scrub verifies
//! frames and names their owners, the cleaner finds live frames, and a lost tree can be salvaged.
//!
//! Callers: the store, the cleaner, the scrub. Invariant: a header is valid only if its own checksum matches; it is
//! copied unchanged when its frame moves, so the name in it is the one in pointers.

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::frames::Owner;
use crate::pointer::{Pointer, Txg};

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
    /// The owner of the frame.
    pub owner: Owner,
}

impl Header {
    /// Encodes the header in 80 bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Pointer { segment, index, stored, logical, kind, compression, checksum_kind, birth, checksum, offset: _ } =
            self.pointer;
        let mut body = Writer::default();
        for number in [segment, index, stored, logical] {
            body.u32(number);
        }
        body.u64(birth.0);
        body.bytes(&checksum);
        body.bytes(&[kind as u8, compression as u8, checksum_kind as u8, 0]);
        body.u32(0);
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
        if from.u8()? != 0 || from.u32()? != 0 {
            return Err(NO_HEADER);
        }
        let owner = Owner { dataset: from.u64()?, object: from.u64()?, offset: from.u64()? };
        let pointer =
            Pointer { segment, index, offset: 0, stored, logical, kind, compression, checksum_kind, birth, checksum };
        Ok(Self { pointer, owner })
    }

    /// Whether this is the header of the pointer's frame.
    #[must_use]
    pub fn is_of(&self, pointer: &Pointer) -> bool {
        self.pointer == Pointer { offset: 0, ..*pointer }
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
                kind: FrameKind::Data, compression: Compression::Lz4, checksum_kind: ChecksumKind::Xxh3,
            };
            let header = Header { pointer, owner: Owner { dataset, object, offset } };
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
