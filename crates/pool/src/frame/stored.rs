//! Verification of a frame's stored bytes: the only place that knows what has to be right about them.
//!
//! Callers: the store's reads, its scrub, its cleaner. The content of a frame has a checksum in the pointer. The store
//! cannot see the content of a sealed frame: its stored bytes begin with a hash of the others, which finds damage but
//! no forgery (anybody can compute it); the seal inside is verified by holders of the key.

use xxhash_rust::xxh3::Xxh3;

use crate::error::Damage;
use crate::pointer::{Compression, FrameKind, Pointer};
use crate::{checksum, compress};

/// Length of the hash at the start of a sealed frame's stored bytes.
pub const HASH: usize = 16;

/// Verifies content, or the stored bytes of a sealed frame.
pub(crate) fn verify(pointer: &Pointer, bytes: &[u8]) -> Option<Damage> {
    let is_right = match checksum::content(pointer.checksum_kind, bytes) {
        Some(checksum) => checksum == pointer.checksum,
        None => bytes.split_first_chunk::<HASH>().is_some_and(|(hash, rest)| *hash == stored_hash(pointer, rest)),
    };
    (!is_right).then_some(Damage::Checksum)
}

/// Decompresses stored bytes into a buffer of [`Pointer::content_length`], and verifies the content; of a sealed frame
/// the stored bytes are copied.
pub(crate) fn unpack(pointer: &Pointer, stored: &[u8], target: &mut [u8]) -> Option<Damage> {
    if compress::decompress(pointer.compression, stored, target) {
        verify(pointer, target)
    } else {
        Some(Damage::Compression)
    }
}

/// Verifies stored bytes without keeping the content.
pub(crate) fn check(pointer: &Pointer, stored: &[u8]) -> Option<Damage> {
    let length = pointer.content_length() as usize;
    if pointer.compression == Compression::Off && stored.len() == length {
        return verify(pointer, stored);
    }
    unpack(pointer, stored, &mut vec![0; length])
}

/// The hash at the start of a sealed frame's stored bytes, of which `rest` are those behind it.
#[must_use]
pub fn stored_hash(pointer: &Pointer, rest: &[u8]) -> [u8; HASH] {
    hash_of(&pointer.checksum, pointer.kind, pointer.counted_logical(), rest)
}

/// XXH3-128 of a frame's id, kind, rounded length, and the stored bytes behind the hash.
#[must_use]
pub fn hash_of(id: &[u8; 16], kind: FrameKind, rounded: u32, rest: &[u8]) -> [u8; HASH] {
    let mut hash = Xxh3::new();
    hash.update(id);
    hash.update(&[kind as u8, 0, 0, 0]);
    hash.update(&rounded.to_le_bytes());
    hash.update(rest);
    hash.digest128().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::CompressionSetting;
    use crate::pointer::{ChecksumKind, Txg};

    fn pointer(stored: &[u8]) -> Pointer {
        Pointer {
            segment: 1,
            index: 2,
            offset: 3,
            stored: stored.len() as u32,
            logical: 99,
            kind: FrameKind::Data,
            compression: Compression::Off,
            checksum_kind: ChecksumKind::Sealed,
            pin: 1,
            birth: Txg(1),
            checksum: [7; 16],
        }
    }

    #[test]
    fn sealed_bytes_are_those_of_their_frame() {
        let mut stored = vec![5; 160];
        let hash = stored_hash(&pointer(&stored), &stored[HASH..]);
        stored[..HASH].copy_from_slice(&hash);
        let frame = pointer(&stored);
        let whole = [&frame.checksum[..], &[1, 0, 0, 0], &112u32.to_le_bytes(), &stored[HASH..]].concat();
        assert_eq!(hash, checksum::structure(&whole), "the hash of one string");
        let mut target = vec![0; 160];
        assert_eq!((check(&frame, &stored), unpack(&frame, &stored, &mut target)), (None, None));
        assert_eq!(target, stored);
        for other in [
            Pointer { checksum: [8; 16], ..frame },
            Pointer { kind: FrameKind::Value, ..frame },
            Pointer { logical: 113, ..frame },
        ] {
            assert_eq!(check(&other, &stored), Some(Damage::Checksum));
        }
        assert_eq!(check(&Pointer { logical: 112, ..frame }, &stored), None, "the rounded length");
        assert!(check(&frame, &stored[..144]).is_some());
        assert!(verify(&frame, &stored[..8]).is_some());
        for byte in 0..stored.len() {
            stored[byte] ^= 0x10;
            assert_eq!(check(&frame, &stored), Some(Damage::Checksum));
            stored[byte] ^= 0x10;
        }
    }

    #[test]
    fn content_is_unpacked_and_verified() {
        let content = [9; 4000];
        let (compression, stored) = compress::compress(CompressionSetting::Lz4, &content).unwrap();
        let frame = Pointer {
            logical: 4000,
            compression,
            checksum_kind: ChecksumKind::Xxh3,
            pin: 0,
            checksum: checksum::structure(&content),
            ..pointer(&stored)
        };
        let mut target = vec![0; 4000];
        assert_eq!((unpack(&frame, &stored, &mut target), check(&frame, &stored)), (None, None));
        assert_eq!(target, content);
        assert_eq!(check(&frame, &stored[1..]), Some(Damage::Compression));
        assert_eq!(check(&Pointer { checksum: [0; 16], ..frame }, &stored), Some(Damage::Checksum));
    }
}
