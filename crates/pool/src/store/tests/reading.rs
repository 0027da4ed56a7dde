//! Which devices are read and written, and in what order: reads of copies, scrubs, content distributed over devices.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use super::*;
use crate::backend::NewGroup;
use crate::label::GroupKind;

/// A device that records its reads; in the waiting mode, a read waits until another one is in progress.
struct Watched {
    device: Arc<Simulator>,
    /// Offset and length of each read, and whether it went past caches.
    reads: Mutex<Vec<(u64, u64, bool)>>,
    meeting: Arc<Meeting>,
}

/// Reads that wait for each other.
#[derive(Default)]
struct Meeting {
    /// How many are awaited, if any.
    awaited: Mutex<Option<usize>>,
    changed: parking_lot::Condvar,
}

impl Meeting {
    fn join(&self) {
        let mut awaited = self.awaited.lock();
        let Some(left) = awaited.as_mut() else { return };
        *left = left.saturating_sub(1);
        self.changed.notify_all();
        while awaited.is_some_and(|left| left > 0) {
            let waited = self.changed.wait_for(&mut awaited, Duration::from_secs(30));
            assert!(!waited.timed_out(), "nobody else reads");
        }
    }
}

impl Device for Watched {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn length(&self) -> u64 {
        self.device.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reads.lock().push((offset, buffer.len() as u64, false));
        self.meeting.join();
        self.device.read_at(buffer, offset)
    }

    fn read_past_caches(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reads.lock().push((offset, buffer.len() as u64, true));
        self.device.read_at(buffer, offset)
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

/// A pool on watched devices with this many frames of content, committed.
struct Pool {
    store: Store,
    devices: Vec<Arc<Watched>>,
    frames: Vec<(Pointer, u64)>,
}

const LENGTH: usize = 100_000;

impl Pool {
    fn new(groups: &[(GroupKind, usize)], length: u64, frames: u64) -> Self {
        let count = groups.iter().map(|(_, devices)| devices).sum();
        let meeting = Arc::new(Meeting::default());
        let watch = |device| Arc::new(Watched { device, reads: Mutex::default(), meeting: Arc::clone(&meeting) });
        let devices: Vec<Arc<Watched>> = simulators(count, length).into_iter().map(watch).collect();
        let given = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let groups: Vec<NewGroup> =
            groups.iter().map(|(kind, devices)| NewGroup { kind: *kind, devices: *devices }).collect();
        let (store, _) = match groups.iter().all(|group| group.kind == GroupKind::Plain) {
            true => Store::create(given, &new_pool()).unwrap(),
            false => Store::create_groups(given, &groups, &new_pool()).unwrap(),
        };
        let put = |number: u64| {
            let frame = NewFrame {
                stream: WriteStream::Data,
                kind: FrameKind::Data,
                owner: Owner { dataset: 1, object: number, offset: 0 },
                birth: Txg(1),
                content: &content(number, LENGTH),
                compression: CompressionSetting::Off,
                checksum: ChecksumKind::Xxh3,
            };
            (store.write(&frame).unwrap(), number)
        };
        let frames = (0..frames).map(put).collect();
        commit(&store, 1).unwrap();
        devices.iter().for_each(|device| device.reads.lock().clear());
        Self { store, devices, frames }
    }

    fn read(&self, (pointer, number): &(Pointer, u64)) {
        assert_eq!(*self.store.read(pointer).unwrap(), *content(*number, LENGTH));
    }

    /// Bytes read from each device since the last call.
    fn taken(&self) -> Vec<u64> {
        let of = |device: &Arc<Watched>| device.reads.lock().drain(..).map(|(_, length, _)| length).sum();
        self.devices.iter().map(of).collect()
    }
}

/// A stream that is announced is read from all devices of a mirror, each part of it once.
#[test]
fn a_stream_is_read_from_all_devices_of_a_mirror() {
    let pool = Pool::new(&[(GroupKind::Mirror, 2)], 64 * MIB, 200);
    let all: Vec<Pointer> = pool.frames.iter().map(|(pointer, _)| *pointer).collect();
    for (announced, frames) in all.chunks(50).zip(pool.frames.chunks(50)) {
        pool.store.expect(announced);
        frames.iter().for_each(|frame| pool.read(frame));
    }
    let taken = pool.taken();
    let sum: u64 = taken.iter().sum();
    assert_eq!(sum, 200 * LENGTH as u64);
    assert!(taken.iter().all(|bytes| *bytes > sum / 3), "{taken:?}");
}

/// Two concurrent readers read two devices, and so do as many as there are devices.
#[test]
fn readers_at_the_same_time_read_different_devices_of_a_mirror() {
    for count in [2, 3] {
        // So few that no device is judged by how long its reads wait for others here.
        let pool = Pool::new(&[(GroupKind::Mirror, count)], 64 * MIB, 16);
        for frames in pool.frames.chunks_exact(count) {
            *pool.devices[0].meeting.awaited.lock() = Some(count);
            std::thread::scope(|scope| frames.iter().for_each(|frame| drop(scope.spawn(|| pool.read(frame)))));
            let taken = pool.taken();
            assert!(taken.iter().all(|bytes| *bytes == LENGTH as u64), "{taken:?}");
        }
    }
}

/// A damaged copy is repaired from the other, whichever of them was read.
#[test]
fn a_damaged_copy_is_mended_whichever_was_chosen() {
    for bad in [0, 1] {
        let pool = Pool::new(&[(GroupKind::Mirror, 2)], 64 * MIB, 60);
        let of_bad = |segment: &SegmentInfo| segment.place.iter().find(|slot| usize::from(slot.device) == bad).copied();
        let slots: Vec<_> = pool
            .store
            .segments()
            .iter()
            .filter(|segment| segment.stream == WriteStream::Data)
            .map(|segment| (segment.id, of_bad(segment).unwrap()))
            .collect();
        for (pointer, _) in &pool.frames {
            let (_, slot) = slots.iter().find(|(id, _)| *id == pointer.segment).unwrap();
            let start = crate::backend::slots::start(*slot, pool.store.slot());
            pool.devices[bad].device.rot(start + u64::from(pointer.offset) * 16 + 5000, 3);
        }
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&told);
        pool.store.watch(move |damaged| hears.lock().push((damaged.device, damaged.mended)));
        let all: Vec<Pointer> = pool.frames.iter().map(|(pointer, _)| *pointer).collect();
        pool.store.expect(&all);
        pool.frames.iter().for_each(|frame| pool.read(frame));
        let told = told.lock().clone();
        assert!(!told.is_empty() && told.iter().all(|told| *told == (Some(bad as u16), true)), "{told:?}");
        // A copy that was not read is repaired by a scrub.
        pool.store.scrub(&mut |checked| checked.damage.is_none() || checked.mended).unwrap();
        for (pointer, number) in &pool.frames {
            let (_, slot) = slots.iter().find(|(id, _)| *id == pointer.segment).unwrap();
            let start = crate::backend::slots::start(*slot, pool.store.slot()) + u64::from(pointer.offset) * 16;
            let mut there = vec![0; LENGTH];
            pool.devices[bad].device.read_at(&mut there, start + Pointer::HEADER as u64).unwrap();
            assert_eq!(there, content(*number, LENGTH));
        }
    }
}

/// A scrub reads all live segments once, by direct I/O, in the order of their locations; copies and parity too.
#[test]
fn a_scrub_reads_each_device_once_in_the_order_of_places() {
    let layouts: [&[(GroupKind, usize)]; 4] = [
        &[(GroupKind::Mirror, 2)],
        &[(GroupKind::RaidZ(1), 4)],
        &[(GroupKind::RaidZ(2), 5), (GroupKind::Mirror, 2)],
        &[(GroupKind::Plain, 1), (GroupKind::Plain, 1), (GroupKind::Mirror, 3)],
    ];
    for groups in layouts {
        let pool = Pool::new(groups, 64 * MIB, 300);
        let expected: Vec<u64> = (0..pool.devices.len())
            .map(|device| {
                let columns = |segment: &SegmentInfo| {
                    let here = segment.place.iter().filter(|slot| usize::from(slot.device) == device).count() as u64;
                    here * u64::from(segment.bytes) / segment.place.width() as u64
                };
                pool.store.segments().iter().filter(|segment| segment.live_frames > 0).map(columns).sum()
            })
            .collect();
        let mut found = 0;
        pool.store
            .scrub(&mut |checked| {
                assert_eq!(checked.damage, None);
                found += usize::from(checked.header.is_some());
                true
            })
            .unwrap();
        assert_eq!(found, 300, "{groups:?}");
        for (device, expected) in pool.devices.iter().zip(expected) {
            let reads: Vec<_> = device.reads.lock().iter().filter(|(.., past)| *past).copied().collect();
            assert_eq!(reads.iter().map(|(_, length, _)| length).sum::<u64>(), expected, "{groups:?}");
            assert!(reads.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{groups:?}: {reads:?}");
        }
    }
}

/// A scrub resumes at its last position; and a visitor that stops it stops all lanes.
#[test]
fn a_scrub_goes_on_where_it_was_stopped() {
    let groups: &[(GroupKind, usize)] = &[(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 3)];
    let pool = Pool::new(groups, 64 * MIB, 300);
    for stop_after in [1, 40, 150, 299] {
        let (mut names, mut position) = (BTreeSet::new(), 0);
        let mut rounds = 0;
        loop {
            let (from, mut seen) = (position, 0);
            let mut visit = |checked: &Checked| {
                seen += 1;
                let go_on = seen <= stop_after || rounds > 20;
                if go_on && checked.header.is_some() {
                    names.insert(checked.name);
                }
                go_on
            };
            let ended = pool.store.scrub_from(from, &mut visit, &mut |reached| position = reached).unwrap();
            assert!(position >= from);
            if ended {
                break;
            }
            rounds += 1;
        }
        assert_eq!(names.len(), 300);
    }
}

/// Content is distributed over all independent devices, also after the next import; and the promised space can be
/// written, whichever segments are open.
#[test]
fn content_is_spread_over_devices() {
    let content = content(1, LENGTH);
    let put = |store: &Store, number: u64| {
        let owner = Owner { dataset: 1, object: 1, offset: number * LENGTH as u64 };
        let stream = WriteStream::Data;
        let (compression, checksum) = (CompressionSetting::Off, ChecksumKind::Xxh3);
        let (kind, birth) = (FrameKind::Data, Txg(store.durable().0 + 1));
        store.write(&NewFrame { stream, kind, owner, birth, content: &content, compression, checksum })
    };
    let pool = Pool::new(&[(GroupKind::Plain, 3)], 80 * MIB, 0);
    let of_devices = |store: &Store| {
        let mut bytes = [0; 3];
        for segment in store.segments().iter().filter(|segment| segment.stream == WriteStream::Data) {
            bytes[usize::from(segment.place[0].device)] += segment.bytes;
        }
        bytes
    };
    let open = |store: &Store| -> Vec<u32> {
        let open = |segment: &SegmentInfo| segment.stream == WriteStream::Data && !segment.sealed;
        store.segments().iter().filter(|segment| open(segment)).map(|segment| segment.id).collect()
    };
    let mut kept: Vec<Pointer> = (0..300).map(|number| put(&pool.store, number).unwrap()).collect();
    assert!(kept.iter().all(|pointer| *pool.store.read(pointer).unwrap() == *content), "from memory");
    commit(&pool.store, 2).unwrap();
    let bytes = of_devices(&pool.store);
    // Those with more room get more.
    assert!(bytes.iter().all(|bytes| *bytes > 4 << 20), "{bytes:?}");
    let before = open(&pool.store);
    assert_eq!(before.len(), 3);
    pool.store.close(true, 1).unwrap();
    let sims: Vec<Arc<Simulator>> = pool.devices.iter().map(|device| Arc::clone(&device.device)).collect();
    drop(pool.store);
    let (store, _) = self::open(&sims, Access::ReadWrite).unwrap();
    assert_eq!(open(&store), before);
    let room = store.room().min(store.space().available);
    let charged = kept[0].charged();
    // The remaining space at the ends of slots holds no frame of this length.
    let count = room / charged * 9 / 10;
    kept.extend((300..300 + count).map(|number| put(&store, number).unwrap()));
    commit(&store, 3).unwrap();
    assert!(kept.iter().all(|pointer| *store.read(pointer).unwrap() == *content));
    assert!(open(&store).len() <= 3);
}
