//! Compression of frames.
//!
//! Callers: the store, outside of all locks. Invariant: decompression survives any bytes and never
//! writes more than it was told to expect.

use std::cell::RefCell;

use zstd::bulk::{Compressor, Decompressor};

use crate::frames::CompressionSetting;
use crate::pointer::Compression;

thread_local! {
    // Making a context costs more than to compress a small frame.
    static COMPRESSOR: RefCell<Option<(i8, Compressor<'static>)>> = const { RefCell::new(None) };
    // Content that does not compress must not cost an allocation and its zeros.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Buffers that each thread keeps are no longer than this, bytes.
const KEPT: usize = (1 << 20) + (64 << 10);

/// Compresses content; `None` where it is better stored as it is: compression saves less than an
/// eighth, or is switched off.
#[must_use]
pub fn compress(compression: CompressionSetting, content: &[u8]) -> Option<(Compression, Vec<u8>)> {
    let worth = content.len() - content.len().div_ceil(8);
    match compression {
        CompressionSetting::Off => None,
        CompressionSetting::Lz4 => Some((Compression::Lz4, lz4(content, worth)?)),
        CompressionSetting::Zstd(level) => Some((Compression::Zstd, zstd(level, content, worth)?)),
    }
}

/// Gives back what a few large records have made a thread's buffer grow to.
pub(crate) fn forget_much(buffer: &mut Vec<u8>) {
    if buffer.capacity() > KEPT {
        *buffer = Vec::new();
    }
}

fn lz4(content: &[u8], worth: usize) -> Option<Vec<u8>> {
    SCRATCH.with_borrow_mut(|scratch| {
        let longest = lz4_flex::block::get_maximum_output_size(content.len());
        if scratch.len() < longest {
            scratch.resize(longest, 0);
        }
        let length = lz4_flex::block::compress_into(content, scratch).ok()?;
        let compressed = scratch.get(..length).filter(|compressed| compressed.len() <= worth).map(<[u8]>::to_vec);
        forget_much(scratch);
        compressed
    })
}

fn zstd(level: i8, content: &[u8], worth: usize) -> Option<Vec<u8>> {
    let compressed = COMPRESSOR.with_borrow_mut(|cached| {
        if cached.as_ref().is_none_or(|(of, _)| *of != level) {
            *cached = Some((level, Compressor::new(i32::from(level)).ok()?));
        }
        let (_, compressor) = cached.as_mut()?;
        SCRATCH.with_borrow_mut(|scratch| {
            // A buffer that is too small for content that does not compress is an early "not worth
            // it", not a failure.
            let room = worth.max(16);
            if scratch.len() < room {
                scratch.resize(room, 0);
            }
            let target = scratch.get_mut(..room)?;
            let compressed = compressor
                .compress_to_buffer(content, target)
                .ok()
                .and_then(|length| scratch.get(..length).map(<[u8]>::to_vec));
            forget_much(scratch);
            compressed
        })
    })?;
    (compressed.len() <= worth).then_some(compressed)
}

/// Decompresses what is stored into the content's buffer, which must become exactly full; tells
/// whether it did.
#[must_use]
pub fn decompress(compression: Compression, stored: &[u8], content: &mut [u8]) -> bool {
    match compression {
        Compression::Off => {
            let fits = stored.len() == content.len();
            if fits {
                content.copy_from_slice(stored);
            }
            fits
        }
        Compression::Lz4 => {
            lz4_flex::block::decompress_into(stored, content).is_ok_and(|length| length == content.len())
        }
        Compression::Zstd => DECOMPRESSOR.with_borrow_mut(|cached| {
            if cached.is_none() {
                *cached = Decompressor::new().ok();
            }
            cached.as_mut().is_some_and(|decompressor| {
                decompressor.decompress_to_buffer(stored, content).is_ok_and(|length| length == content.len())
            })
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings() -> impl Strategy<Value = CompressionSetting> {
        prop_oneof![
            Just(CompressionSetting::Off),
            Just(CompressionSetting::Lz4),
            (1i8..=19).prop_map(CompressionSetting::Zstd),
            (-7i8..=-1).prop_map(CompressionSetting::Zstd)
        ]
    }

    proptest! {
        #[test]
        fn what_is_packed_unpacks(compression in settings(), seed: u8, length in 1usize..40_000, step in 1usize..9) {
            let content: Vec<u8> = (0..length).map(|at| (at / step % 251) as u8 ^ seed).collect();
            if let Some((compression, compressed)) = compress(compression, &content) {
                prop_assert!(compressed.len() <= content.len() - content.len() / 8);
                let mut back = vec![0; content.len()];
                prop_assert!(decompress(compression, &compressed, &mut back));
                prop_assert_eq!(&back, &content);
                let mut short = vec![0; content.len() - 1];
                prop_assert!(!decompress(compression, &compressed, &mut short));
                let mut long = vec![0; content.len() + 1];
                prop_assert!(!decompress(compression, &compressed, &mut long));
            }
        }

        /// What comes next to the target is never touched: damage that is almost right gets far
        /// into the decoder.
        #[test]
        fn damaged_packed_content_stays_in_its_target(
            compression in settings(), seed: u8, length in 1usize..40_000, step in 1usize..9, damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in 0usize..4
        ) {
            let content: Vec<u8> = (0..length).map(|at| ((at / step) * (at / 97 + 1) % 251) as u8 ^ seed).collect();
            if let Some((compression, mut compressed)) = compress(compression, &content) {
                for (at, byte) in damage {
                    let at = at.index(compressed.len());
                    compressed[at] = byte;
                }
                compressed.truncate(compressed.len() - cut.min(compressed.len() - 1));
                let mut room = vec![0xa5; content.len() + 128];
                let _ = decompress(compression, &compressed, &mut room[64..content.len() + 64]);
                prop_assert!(room[..64].iter().chain(&room[content.len() + 64..]).all(|byte| *byte == 0xa5));
            }
        }

        #[test]
        fn any_bytes_unpack_or_not(stored: Vec<u8>, length in 0usize..10_000, kind in 0u8..3) {
            let mut content = vec![0; length];
            let _ = decompress(kind.try_into().unwrap(), &stored, &mut content);
        }
    }

    #[test]
    fn what_does_not_pack_stays_as_it_is() {
        let mut random = 1u64;
        let noise: Vec<u8> = (0..100_000)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            })
            .collect();
        for compression in [
            CompressionSetting::Off,
            CompressionSetting::Lz4,
            CompressionSetting::Zstd(3),
            CompressionSetting::Zstd(-5),
        ] {
            assert!(compress(compression, &noise).is_none());
        }
        for compression in [CompressionSetting::Lz4, CompressionSetting::Zstd(1), CompressionSetting::Zstd(19)] {
            assert!(compress(compression, &[7; 100_000]).unwrap().1.len() < 1000);
            assert!(compress(compression, b"x").is_none());
        }
    }
}
