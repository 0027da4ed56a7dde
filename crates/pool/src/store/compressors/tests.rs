//! Compression by several threads gives the same result as by one.

use super::*;
use crate::frames::{Owner, WriteStream};
use crate::pointer::{FrameKind, Txg};

/// Text-like content, or noise.
fn content(seed: u64, length: usize, compresses: bool) -> Vec<u8> {
    let mut random = seed.wrapping_mul(2) + 1;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 56) as u8
    };
    (0..length).map(|_| if compresses { b"abcd"[usize::from(next() & 3)] } else { next() }).collect()
}

fn frame(content: &[u8]) -> NewFrame<'_> {
    NewFrame {
        stream: WriteStream::Data,
        kind: FrameKind::Data,
        owner: Owner::default(),
        birth: Txg(1),
        content,
        compression: CompressionSetting::Lz4,
        checksum: ChecksumKind::Xxh3,
    }
}

fn alone(contents: &[Vec<u8>]) -> Vec<Vec<Content>> {
    let frames: Vec<NewFrame<'_>> = contents.iter().map(|content| frame(content)).collect();
    frames.chunks(GROUP).map(compress_frames).collect()
}

fn together(running: &Running, contents: &[Vec<u8>]) -> Vec<Vec<Content>> {
    let frames: Vec<NewFrame<'_>> = contents.iter().map(|content| frame(content)).collect();
    running.compress(&frames.chunks(GROUP).collect::<Vec<_>>())
}

/// Threads, however many processors there are.
fn started(threads: usize, most: usize, run: fn(Job)) -> Running {
    Running { workers: Workers::start("pool-pack", threads, most, run), spare: Arc::default() }
}

#[test]
fn several_threads_compress_what_one_does_in_its_order() {
    let running = started(3, 9, Job::run);
    std::thread::scope(|scope| {
        for writer in 0..4u64 {
            let running = &running;
            scope.spawn(move || {
                for round in 0..6u64 {
                    let count = 1 + (writer + round * 5) % 9;
                    let of = |nth: u64| {
                        content(
                            writer * 100 + round * 10 + nth,
                            20_000 + 1000 * nth as usize,
                            !(nth + writer).is_multiple_of(4),
                        )
                    };
                    let contents: Vec<Vec<u8>> = (0..count).map(of).collect();
                    assert!(together(running, &contents) == alone(&contents));
                }
            });
        }
    });
    assert_eq!(running.workers.waiting(), 0);
}

#[test]
fn what_nobody_begins_or_somebody_loses_is_compressed_by_the_caller() {
    let contents: Vec<Vec<u8>> = (0..8).map(|nth| content(nth, 20_000, true)).collect();
    // There are no threads.
    let running = started(0, 9, Job::run);
    assert!(together(&running, &contents) == alone(&contents));
    assert_eq!(running.workers.waiting(), 0);
    // A thread that loses all that it takes.
    let running = started(1, 9, drop);
    for _ in 0..20 {
        assert!(together(&running, &contents) == alone(&contents));
    }
}
