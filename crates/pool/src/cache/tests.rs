//! The cache: its limit, its counters, and that a frame is read once.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::frames::NewFrame;
use crate::pointer::{ChecksumKind, Compression, Txg};

#[derive(Default)]
struct Slow(AtomicU64);

impl Frames for Slow {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        if pointer.segment == 13 {
            return Err(PoolError::Frame { pointer: *pointer, damage: Damage::Checksum });
        }
        std::thread::yield_now();
        let first = if pointer.is_sealed() { pointer.checksum[0] } else { pointer.index as u8 };
        Ok(vec![first; pointer.logical as usize].into())
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, _: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        Err(PoolError::NoSpace)
    }
}

fn pointer(segment: u32, index: u32, logical: u32) -> Pointer {
    Pointer {
        segment,
        index,
        offset: 0,
        stored: logical,
        logical,
        kind: FrameKind::Data,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(1),
        checksum: [0; 16],
    }
}

#[test]
fn the_limit_holds() {
    for limit in [0, 100, 1 << 20, 64 << 20] {
        let (cache, frames) = (Cache::new(limit), Slow::default());
        for index in 0..3000 {
            let content = cache.data(&frames, &pointer(1, index, 40_000)).unwrap();
            assert_eq!((content.len(), content[0]), (40_000, index as u8));
            assert!(cache.counters().bytes <= limit, "{:?}", cache.counters());
        }
        let counters = cache.counters();
        assert_eq!((counters.data_misses, counters.data_hits), (3000, 0));
        if limit >= 1 << 20 {
            assert!(counters.bytes > limit / 2, "{counters:?}");
        }
        cache.set_limit(limit / 4);
        assert!(cache.counters().bytes <= limit / 4);
    }
}

#[test]
fn hits_are_counted_and_frames_forgotten() {
    let (cache, frames) = (Cache::new(1 << 20), Slow::default());
    let (a, b) = (pointer(1, 1, 10), pointer(2, 1, 10));
    for _ in 0..3 {
        cache.data(&frames, &a).unwrap();
        cache.data(&frames, &b).unwrap();
    }
    assert_eq!(frames.0.load(Ordering::Relaxed), 2);
    let counters = cache.counters();
    assert_eq!((counters.data_hits, counters.data_misses, counters.frames), (4, 2, 2));
    cache.forget(&a);
    assert!(!cache.holds(&a) && cache.holds(&b));
    cache.clear();
    assert_eq!((cache.counters().frames, cache.counters().bytes), (0, 0));
}

#[test]
fn errors_are_not_kept() {
    let (cache, frames) = (Cache::new(1 << 20), Slow::default());
    for _ in 0..3 {
        assert!(cache.data(&frames, &pointer(13, 1, 10)).is_err());
    }
    assert_eq!(frames.0.load(Ordering::Relaxed), 3);
    assert_eq!(cache.counters().frames, 0);
}

#[test]
fn readers_of_the_same_frame_read_it_once() {
    let (cache, frames) = (Cache::new(64 << 20), Slow::default());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for index in 0..500 {
                    assert_eq!(cache.data(&frames, &pointer(1, index, 1000)).unwrap()[0], index as u8);
                }
            });
        }
    });
    assert_eq!(frames.0.load(Ordering::Relaxed), 500);
}

fn sealed(index: u32, id: u8) -> Pointer {
    Pointer { checksum_kind: ChecksumKind::Sealed, pin: 1, stored: 80, checksum: [id; 16], ..pointer(1, index, 16) }
}

/// A forged address of a sealed frame never shows what the cache has of another frame.
#[test]
fn another_id_is_a_miss() {
    let (cache, frames) = (Cache::new(1 << 20), Slow::default());
    let (one, forged, plain) = (sealed(1, 7), sealed(1, 8), pointer(1, 1, 16));
    assert_eq!(cache.data(&frames, &one).unwrap()[0], 7);
    assert_eq!(cache.data(&frames, &one).unwrap()[0], 7);
    assert_eq!(frames.0.load(Ordering::Relaxed), 1);
    for other in [&forged, &plain] {
        assert!(cache.holds(&one) && !cache.holds(other));
        assert!(cache.cached_data(other).is_none() && cache.cached_node(other).is_none());
    }
    assert_eq!(cache.data(&frames, &forged).unwrap()[0], 8, "read, not the cached content of the other");
    assert_eq!(cache.data(&frames, &plain).unwrap()[0], 1);
    assert_eq!(cache.data(&frames, &one).unwrap()[0], 7);
    assert_eq!(frames.0.load(Ordering::Relaxed), 4);
    cache.insert_data(&one, vec![5; 16].into());
    assert_eq!(cache.data(&frames, &one).unwrap()[0], 5);
    assert_eq!(cache.data(&frames, &forged).unwrap()[0], 8);
    // Nodes as well: a node in the cache is none for another id, which is read, and is no node.
    let leaf = Pointer { kind: FrameKind::Leaf, ..one };
    let rows = [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, b'k'];
    let node = || Arc::new(Node::decode(rows.as_slice().into(), true).unwrap());
    cache.insert_node(&leaf, node());
    assert!(cache.cached_node(&leaf).is_some());
    let forged = Pointer { kind: FrameKind::Leaf, ..forged };
    assert!(cache.cached_node(&forged).is_none());
    assert!(cache.node_in_passing(&frames, &leaf, None).is_ok());
    assert!(cache.node_in_passing(&frames, &forged, None).is_err());
    assert!(cache.node(&frames, &forged, None).is_err());
    assert!(cache.node(&frames, &leaf, Some(0)).is_ok());
}
