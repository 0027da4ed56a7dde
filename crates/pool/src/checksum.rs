//! Checksums of frames and structures.
//!
//! Callers: frames (the kind that the dataset asks for) and every structure of labels and tables
//! (always XXH3).

use crate::pointer::ChecksumKind;

/// The checksum of a frame's content; `None` for sealed frames, whose content has none.
#[must_use]
pub fn content(kind: ChecksumKind, bytes: &[u8]) -> Option<[u8; 16]> {
    match kind {
        ChecksumKind::Xxh3 => Some(structure(bytes)),
        ChecksumKind::Blake3 => {
            let whole = blake3::hash(bytes);
            let mut first = [0; 16];
            first.copy_from_slice(whole.as_bytes().split_at(16).0);
            Some(first)
        }
        ChecksumKind::Sealed => None,
    }
}

/// The checksum of a structure: XXH3, 128 bits, little-endian.
#[must_use]
pub fn structure(bytes: &[u8]) -> [u8; 16] {
    xxhash_rust::xxh3::xxh3_128(bytes).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_the_published_ones() {
        // The empty input's XXH3-128 and BLAKE3, from their specifications.
        assert_eq!(u128::from_le_bytes(structure(b"")), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
        assert_eq!(content(ChecksumKind::Blake3, b"").unwrap()[..4], [0xaf, 0x13, 0x49, 0xb9]);
        assert_eq!(content(ChecksumKind::Sealed, b""), None);
        assert_ne!(content(ChecksumKind::Xxh3, b"a"), content(ChecksumKind::Xxh3, b"b"));
    }
}
