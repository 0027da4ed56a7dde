//! Compression of frames.
//!
//! Callers: the store, outside of all locks. Invariant: decompression handles any input and never writes more than
//! the expected length.

use std::cell::RefCell;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch};

use crate::frames::CompressionSetting;
use crate::pointer::Compression;

thread_local! {
    // Creating a context costs more than compressing a small frame.
    static COMPRESSOR: RefCell<Option<(Coding, Compressor<'static>)>> = const { RefCell::new(None) };
    // Incompressible content must not cost an allocation and its zeroing.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Maximum length of the buffers that each thread keeps, bytes.
const KEPT: usize = (1 << 20) + (64 << 10);

/// Minimum length of content that `on` samples, bytes; shorter content is compressed by LZ4.
const EXAMINED: usize = 64 << 10;
/// Number and length of the samples for counting bytes.
const COUNTED: (usize, usize) = (16, 128);
/// Length of the samples for LZ4, and of the dictionary before each.
const TRIED: (usize, usize) = (1 << 10, 4 << 10);
/// Positions of these samples, in sixths of the content.
const TRIED_IN: [usize; 3] = [3, 1, 5];
/// Huffman coding has to be better by this factor, since LZ4 finds more in the whole content than in a sample.
const CLEARLY: f64 = 7.0 / 8.0;
/// Remaining share from which on bytes count as random; 2 KiB of random bytes have 0.989.
const RANDOM: f64 = 0.975;

/// Mode of zstd.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Coding {
    /// A full compression level.
    Level(i8),
    /// Huffman coding only: frequent bytes become short, repeats are not searched.
    Huffman,
}

/// Compresses content; `None` where it is better stored uncompressed: compression saves less than an eighth, or is
/// off.
#[must_use]
pub fn compress(compression: CompressionSetting, content: &[u8]) -> Option<(Compression, Vec<u8>)> {
    let worth = content.len() - content.len().div_ceil(8);
    match compression {
        CompressionSetting::Off => None,
        CompressionSetting::On => match sampled(content) {
            Sampled::Ordinary => Some((Compression::Lz4, lz4(content, worth)?)),
            Sampled::RepeatsLittle => zstd(Coding::Huffman, content, worth)
                .map(|compressed| (Compression::Zstd, compressed))
                .or_else(|| Some((Compression::Lz4, lz4(content, worth)?))),
            Sampled::Random => None,
        },
        CompressionSetting::Lz4 => Some((Compression::Lz4, lz4(content, worth)?)),
        CompressionSetting::Zstd(level) => Some((Compression::Zstd, zstd(Coding::Level(level), content, worth)?)),
    }
}

/// Classification of content by samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sampled {
    /// LZ4 is best, or the content is too short to tell.
    Ordinary,
    /// Huffman coding alone is better: numbers, base64, genomes, words in no order. In most of these LZ4 is at its
    /// slowest, and Huffman coding twice as fast.
    RepeatsLittle,
    /// Incompressible: compressed already, or encrypted.
    Random,
}

fn sampled(content: &[u8]) -> Sampled {
    if content.len() < EXAMINED {
        return Sampled::Ordinary;
    }
    let (mut coded, mut little, mut random) = (None, true, true);
    for sixth in TRIED_IN {
        // The first sample is enough for most content: where LZ4 leaves half of it or less, it has found the repeats.
        let Some(left) = tried(content, sixth).filter(|left| *left > 0.5) else { return Sampled::Ordinary };
        let coded = *coded.get_or_insert_with(|| entropy(content));
        little &= coded < left.min(1.0) * CLEARLY;
        random &= coded > RANDOM && left >= 1.0;
        if !little && !random {
            return Sampled::Ordinary;
        }
    }
    if random { Sampled::Random } else { Sampled::RepeatsLittle }
}

/// Entropy of the samples, as a share of their length: the size if each byte took as many bits as its frequency
/// requires.
fn entropy(content: &[u8]) -> f64 {
    let (pieces, length) = COUNTED;
    let mut counts = [0_u32; 256];
    for piece in content.chunks(content.len().div_ceil(pieces)) {
        for byte in piece.iter().take(length) {
            if let Some(count) = counts.get_mut(usize::from(*byte)) {
                *count += 1;
            }
        }
    }
    let all = f64::from(counts.iter().sum::<u32>());
    let bits = |count: &u32| f64::from(*count) * (all / f64::from(*count)).log2();
    counts.iter().filter(|count| **count > 0).map(bits).sum::<f64>() / all / 8.0
}

/// Compression ratio of LZ4 on a sample at this sixth of the content.
fn tried(content: &[u8], sixth: usize) -> Option<f64> {
    let (length, before) = TRIED;
    let (before, sample) = content.get(content.len() / 6 * sixth - before..)?.get(..before + length)?.split_at(before);
    let mut target = [0; TRIED.0 + TRIED.0 / 8];
    let compressed = lz4_flex::block::compress_into_with_dict(sample, &mut target, before).ok()?;
    Some(compressed as f64 / length as f64)
}

/// Frees a thread's buffer that a few large records have made grow.
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

fn compressor(coding: Coding) -> std::io::Result<Compressor<'static>> {
    match coding {
        Coding::Level(level) => Compressor::new(i32::from(level)),
        Coding::Huffman => {
            // The lowest level looks for a repeat once in 128 KiB. By default it would omit the Huffman coding, too.
            let mut compressor = Compressor::new(*zstd::compression_level_range().start())?;
            compressor.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
            Ok(compressor)
        }
    }
}

fn zstd(coding: Coding, content: &[u8], worth: usize) -> Option<Vec<u8>> {
    let compressed = COMPRESSOR.with_borrow_mut(|cached| {
        if cached.as_ref().is_none_or(|(of, _)| *of != coding) {
            *cached = Some((coding, compressor(coding).ok()?));
        }
        let (_, compressor) = cached.as_mut()?;
        SCRATCH.with_borrow_mut(|scratch| {
            // A buffer that is too small for incompressible content is an early exit, not a failure.
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

/// Decompresses stored bytes into the content's buffer, which must become exactly full; returns whether it did.
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
            Just(CompressionSetting::On),
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

        /// Bytes behind the target are never touched: nearly right damage gets far into the decoder.
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

    /// Content with bytes chosen by the caller from random numbers.
    fn made(length: usize, mut more: impl FnMut(&mut dyn FnMut() -> usize) -> Vec<u8>) -> Vec<u8> {
        let mut random = 1u64;
        let mut numbers = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 40) as usize
        };
        let mut content = Vec::new();
        while content.len() < length {
            content.extend(more(&mut numbers));
        }
        content.truncate(length);
        content
    }

    #[test]
    fn on_takes_what_makes_less() {
        let lz4 =
            |content: &[u8]| compress(CompressionSetting::Lz4, content).map_or(content.len(), |(_, out)| out.len());
        for symbols in
            ["ACGT", "0123456789.,", "0123456789abcdef", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        {
            let content = made(128 << 10, |random| vec![symbols.as_bytes()[random() % symbols.len()]]);
            let (compression, out) = compress(CompressionSetting::On, &content).unwrap();
            assert!(compression == Compression::Zstd && out.len() < lz4(&content) * 9 / 10, "{symbols}: {}", out.len());
            let mut back = vec![0; content.len()];
            assert!(decompress(compression, &out, &mut back) && back == content);
            // Too short to be sampled.
            assert!(!matches!(compress(CompressionSetting::On, &content[..1000]), Some((Compression::Zstd, _))));
        }
        let lines =
            |random: &mut dyn FnMut() -> usize| format!("INFO request {} answered with 200\n", random() % 10_000);
        let few =
            |random: &mut dyn FnMut() -> usize| vec![if random().is_multiple_of(100) { random() as u8 } else { 0 }];
        let alike =
            |random: &mut dyn FnMut() -> usize| b"It was the best of times, it was the worst"[random() % 30..].to_vec();
        for content in
            [made(128 << 10, |random| lines(random).into_bytes()), made(128 << 10, few), made(100_000, alike)]
        {
            let (compression, out) = compress(CompressionSetting::On, &content).unwrap();
            assert_eq!((compression, out.len()), (Compression::Lz4, lz4(&content)));
        }
    }

    #[test]
    fn what_samples_take_for_random_is() {
        let noise = made(128 << 10, |random| vec![random() as u8]);
        assert_eq!(sampled(&noise), Sampled::Random);
        assert_eq!(sampled(&noise[..EXAMINED - 1]), Sampled::Ordinary);
        // Saving an eighth is worth it, wherever the savings are.
        for hole in 0..5 {
            let mut holed = noise.clone();
            holed[hole * 20_000..][..20_000].fill(0);
            assert!(compress(CompressionSetting::On, &holed).is_some(), "a hole at {hole}");
        }
        let repeated: Vec<u8> = noise.chunks(1000).flat_map(|part| [part, part].concat()).collect();
        let (_, out) = compress(CompressionSetting::On, &repeated[..128 << 10]).unwrap();
        assert!(out.len() < 80 << 10);
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
            CompressionSetting::On,
            CompressionSetting::Lz4,
            CompressionSetting::Zstd(3),
            CompressionSetting::Zstd(-5),
        ] {
            assert!(compress(compression, &noise).is_none());
        }
        for compression in
            [CompressionSetting::On, CompressionSetting::Lz4, CompressionSetting::Zstd(1), CompressionSetting::Zstd(19)]
        {
            assert!(compress(compression, &[7; 100_000]).unwrap().1.len() < 1000);
            assert!(compress(compression, b"x").is_none());
        }
    }
}
