//! Damage on one device: that one is blamed, all that is written anew is counted, nothing stays
//! different.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::*;
use crate::backend::{NewGroup, slots};
use crate::label::GroupKind;

const LENGTH: usize = 100_000;
const FRAMES: u64 = 60;

/// A device that flips a bit in some of its reads.
struct Flipping {
    device: Arc<Simulator>,
    /// One of this many reads; 0: none.
    every: AtomicU64,
    reads: AtomicU64,
}

impl Flipping {
    fn flip(&self, buffer: &mut [u8]) {
        let (every, number) = (self.every.load(Ordering::Relaxed), self.reads.fetch_add(1, Ordering::Relaxed));
        if every > 0 && number.is_multiple_of(every) && buffer.len() > 4096 {
            let at = (number as usize * 7919) % buffer.len();
            buffer[at] ^= 4;
        }
    }
}

impl Device for Flipping {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn length(&self) -> u64 {
        self.device.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.device.read_at(buffer, offset)?;
        self.flip(buffer);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.device.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.device.discard(offset, length)
    }

    fn expect(&self, _: u64, _: u64) {}
}

/// The damaged frames of a device, and how much of it was written anew.
#[derive(Debug, Default)]
struct Repaired {
    frames: BTreeSet<(u32, u32)>,
    bytes: u64,
}

struct Pool {
    store: Store,
    devices: Vec<Arc<Flipping>>,
    frames: Vec<(Pointer, u64)>,
}

impl Pool {
    fn new(kind: GroupKind, devices: usize) -> Self {
        let flipping = |device| Arc::new(Flipping { device, every: AtomicU64::new(0), reads: AtomicU64::new(0) });
        let all: Vec<Arc<Flipping>> = simulators(devices, 64 * MIB).into_iter().map(flipping).collect();
        let given = all.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let store = Store::create_groups(given, &[NewGroup { kind, devices }], &new_pool()).unwrap().0;
        let put = |number: u64| {
            let content = content(number, LENGTH);
            let data = frame(WriteStream::Data, 1, &content, number);
            (store.write(&NewFrame { compression: CompressionSetting::Off, ..data }).unwrap(), number)
        };
        let frames = (0..FRAMES).map(put).collect();
        commit(&store, 1).unwrap();
        Self { store, devices: all, frames }
    }

    /// Reports of a scrub: for each device, its damaged frames, and the repaired ones.
    fn scrub(&self) -> BTreeMap<Option<u16>, Repaired> {
        let mut found: BTreeMap<Option<u16>, Repaired> = BTreeMap::new();
        self.store
            .scrub(&mut |checked| {
                if checked.damage.is_some() {
                    assert!(checked.mended, "{checked:?}");
                    let of = found.entry(checked.device).or_default();
                    of.frames.insert(checked.name);
                    of.bytes += checked.repaired;
                } else {
                    assert_eq!(checked.repaired, 0);
                }
                true
            })
            .unwrap();
        found
    }

    /// The bytes of all content segments on a device.
    fn of_segments(&self, device: usize) -> Vec<Vec<u8>> {
        let segments = self.store.segments().into_iter().filter(|segment| segment.stream == WriteStream::Data);
        let read = |segment: SegmentInfo| {
            let slot = segment.place.iter().find(|slot| usize::from(slot.device) == device).copied()?;
            let mut bytes = vec![0; segment.bytes as usize / segment.place.width().max(1)];
            let at = slots::start(slot, self.store.slot());
            self.devices[device].device.read_at(&mut bytes, at).unwrap();
            Some(bytes)
        };
        segments.filter_map(read).collect()
    }
}

const KINDS: [(GroupKind, usize); 4] =
    [(GroupKind::Mirror, 2), (GroupKind::Mirror, 3), (GroupKind::RaidZ(1), 3), (GroupKind::RaidZ(2), 5)];

/// Each device in turn: overwritten ranges are rewritten, counted, and blamed on it alone, including copies that are
/// not read first and parity.
#[test]
fn a_scrub_reports_all_that_it_writes_anew() {
    for (kind, count) in KINDS {
        for bad in 0..count {
            let pool = Pool::new(kind, count);
            let before = pool.of_segments(bad);
            let mut blocks = 0;
            for segment in pool.store.segments().iter().filter(|segment| segment.stream == WriteStream::Data) {
                let Some(slot) = segment.place.iter().find(|slot| usize::from(slot.device) == bad) else { continue };
                let length = u64::from(segment.bytes) / segment.place.width().max(1) as u64;
                let start = slots::start(*slot, pool.store.slot());
                for number in (0..length / 4096).step_by(9) {
                    let at = start + number * 4096;
                    let mut there = vec![0; 4096];
                    pool.devices[bad].device.read_at(&mut there, at).unwrap();
                    there.iter_mut().for_each(|byte| *byte = !*byte);
                    pool.devices[bad].device.overwrite(at, &there);
                    blocks += 1;
                }
            }
            assert!(blocks > 0);
            let found = pool.scrub();
            assert_eq!(found.keys().copied().collect::<Vec<_>>(), [Some(bad as u16)], "{kind:?}");
            let repaired = &found[&Some(bad as u16)];
            assert_eq!(repaired.bytes, blocks * 4096, "{kind:?}, device {bad}");
            assert!(!repaired.frames.is_empty());
            assert!(pool.of_segments(bad) == before, "{kind:?}, device {bad}: something stays different");
            assert!(pool.scrub().is_empty(), "it is right now");
        }
    }
}

/// Bits that flip in reads of one device only: no other one is blamed, by readers or by a scrub.
#[test]
fn bits_that_flip_are_blamed_on_their_device() {
    for (kind, count) in KINDS {
        for bad in 0..count {
            let pool = Pool::new(kind, count);
            let told = Arc::new(Mutex::new(Vec::new()));
            let hears = Arc::clone(&told);
            pool.store.watch(move |damaged| hears.lock().push((damaged.device, damaged.mended)));
            pool.devices[bad].every.store(3, Ordering::Relaxed);
            let before = pool.devices[bad].reads.load(Ordering::Relaxed);
            for (pointer, number) in pool.frames.iter().cycle().take(3 * FRAMES as usize) {
                assert_eq!(*pool.store.read(pointer).unwrap(), *content(*number, LENGTH));
            }
            let told = told.lock().clone();
            // A slow device is read around: then it is not known which of several was wrong.
            let is_right = |device: Option<u16>| device.is_none_or(|device| device == bad as u16);
            let all = told.iter().all(|(device, mended)| is_right(*device) && *mended);
            assert!(all, "{kind:?}, device {bad}: {told:?}");
            let is_read = pool.devices[bad].reads.load(Ordering::Relaxed) > before + 10;
            assert!(!told.is_empty() || !is_read, "{kind:?}, device {bad}");
            let scrubbed = pool.scrub();
            assert!(scrubbed.keys().all(|device| is_right(*device)), "{kind:?}, device {bad}: {scrubbed:?}");
            pool.devices[bad].every.store(0, Ordering::Relaxed);
            pool.scrub();
            assert!(pool.scrub().is_empty(), "nothing is wrong on the devices");
        }
    }
}
