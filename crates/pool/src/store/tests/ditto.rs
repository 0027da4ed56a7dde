//! Missing second copies: a write failed in one slot, or the pool had none before.

use std::io;

use super::*;
use crate::backend::slots;

/// A device to parts of which nothing can be written.
#[derive(Debug)]
struct Bad {
    device: Arc<Simulator>,
    parts: Mutex<Vec<Range<u64>>>,
}

impl Device for Bad {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn length(&self) -> u64 {
        self.device.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        if self.parts.lock().iter().any(|part| part.start < end && offset < part.end) {
            return Err(io::Error::from_raw_os_error(5));
        }
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

type Kept = Vec<(Pointer, u64, usize)>;

fn trees(store: &Store, birth: u64, numbers: Range<u64>) -> Kept {
    let one = |number: u64| {
        (put(store, birth, number * 5, 3000 + number as usize * 701).unwrap(), number * 5, 3000 + number as usize * 701)
    };
    numbers.map(one).collect()
}

fn all(store: &Store, frames: &Kept) {
    frames
        .iter()
        .for_each(|(pointer, number, length)| assert_eq!(*store.read(pointer).unwrap(), *content(*number, *length)));
}

fn bad(sims: &[Arc<Simulator>]) -> (Vec<Arc<Bad>>, Vec<Arc<dyn Device>>) {
    let bad: Vec<Arc<Bad>> =
        sims.iter().map(|device| Arc::new(Bad { device: Arc::clone(device), parts: Mutex::default() })).collect();
    let devices = bad.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    (bad, devices)
}

fn twice() -> NewPool {
    NewPool { redundant_metadata: true, ..new_pool() }
}

/// Cleans until there is no more to do.
fn tend(store: &Store, txg: &mut u64) {
    for _ in 0..50 {
        let more = store.clean_step(4 * MIB).unwrap().more;
        *txg += 1;
        commit(store, *txg).unwrap();
        if !more {
            return;
        }
    }
    panic!("there is always more");
}

#[test]
fn a_write_that_fails_at_one_of_two_places_stops_nobody() {
    for (count, copy) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
        let sims = simulators(count, 64 * MIB);
        let (bad, devices) = bad(&sims);
        let store = Store::create(devices, &twice()).unwrap().0;
        let mut frames = trees(&store, 1, 0..10);
        commit(&store, 1).unwrap();
        let id = frames[0].0.segment;
        let places = store.segments().iter().find(|info| info.id == id).unwrap().place.clone();
        let start = slots::start(places[copy], store.slot());
        bad[usize::from(places[copy].device)].parts.lock().push(start..start + store.slot());
        frames.extend(trees(&store, 2, 10..20));
        commit(&store, 2).unwrap();
        frames.extend(trees(&store, 3, 20..30));
        commit(&store, 3).unwrap();
        assert_eq!((store.suspended(), store.unwritten()), (None, 1));
        all(&store, &frames);
        assert_eq!(store.mended(), 0, "what is read is where it was written");
        // A crash now loses nothing.
        let copies: Vec<Arc<Simulator>> =
            sims.iter().map(|sim| Arc::new(Simulator::with_bytes("copy", sim.bytes()))).collect();
        all(&open(&copies, Access::ReadWrite).unwrap().0, &frames);
        // The copy is written elsewhere.
        assert!(store.lies_once() > 0);
        let mut txg = 3;
        tend(&store, &mut txg);
        assert_eq!(store.lies_once(), 0);
        all(&store, &frames);
        assert!(
            store
                .segments()
                .iter()
                .filter(|info| info.live_frames > 0)
                .all(|info| info.place.len() == 2 && info.id != id)
        );
        drop(store);
        let (store, _) = open(&sims, Access::ReadWrite).unwrap();
        all(&store, &frames);
        let mut damaged = 0;
        store
            .scrub(&mut |frame| {
                damaged += u64::from(frame.damage.is_some());
                true
            })
            .unwrap();
        assert_eq!(damaged, 0);
    }
}

#[test]
fn a_device_to_which_nothing_can_be_written_is_left_alone_as_long_as_it_holds_second_copies() {
    let sims = simulators(2, 64 * MIB);
    let (bad, devices) = bad(&sims);
    let store = Store::create(devices, &twice()).unwrap().0;
    let mut frames = trees(&store, 1, 0..10);
    commit(&store, 1).unwrap();
    let everything = 0..64 * MIB;
    bad[1].parts.lock().push(everything);
    for txg in 2..12 {
        frames.extend(trees(&store, txg, txg * 10..txg * 10 + 10));
        commit(&store, txg).unwrap();
    }
    assert!(store.suspended().is_none() && store.unwritten() > 0);
    let mut txg = 11;
    tend(&store, &mut txg);
    assert_eq!(store.lies_once(), 0);
    all(&store, &frames);
    drop(store);
    sims.iter().for_each(|sim| sim.crash(1));
    all(&open(&sims, Access::ReadWrite).unwrap().0, &frames);
}

#[test]
fn a_write_that_fails_at_both_places_suspends() {
    let sims = simulators(2, 64 * MIB);
    let (bad, devices) = bad(&sims);
    let store = Store::create(devices, &twice()).unwrap().0;
    let frames = trees(&store, 1, 0..10);
    commit(&store, 1).unwrap();
    trees(&store, 2, 10..20);
    bad.iter().for_each(|device| device.parts.lock().push(0..64 * MIB));
    assert!(matches!(commit(&store, 2), Err(PoolError::Suspended { .. })));
    drop(store);
    all(&open(&sims, Access::ReadWrite).unwrap().0, &frames);
}

#[test]
fn a_pool_without_second_copies_gets_them() {
    for crashed in [false, true] {
        let sims = simulators(2, 64 * MIB);
        let store = create(&sims);
        let mut frames: Kept = (0..60)
            .map(|number| {
                (put(&store, 1, number, 900 + number as usize * 701).unwrap(), number, 900 + number as usize * 701)
            })
            .collect();
        commit(&store, 1).unwrap();
        // Some tree nodes are among relocated file content, where the cleaner has moved them.
        for id in [frames[0].0.segment, frames[1].0.segment] {
            store.move_out_for_tests(id, 64 * MIB, &mut Cleaned::default()).unwrap();
        }
        commit(&store, 2).unwrap();
        frames.extend(trees(&store, 3, 60..70));
        commit(&store, 3).unwrap();
        assert_eq!((store.has_redundant_metadata(), store.lies_once(), store.space().copies), (false, 0, 0));
        assert!(store.upgrade(5).unwrap() && !store.upgrade(5).unwrap());
        assert!(store.lies_once() > 0);
        let mut txg = 3;
        let store = if crashed {
            commit(&store, 4).unwrap();
            store.clean_step(10_000).unwrap();
            drop(store);
            sims.iter().for_each(|sim| sim.crash(5));
            txg = 4;
            open(&sims, Access::ReadWrite).unwrap().0
        } else {
            store
        };
        assert!(store.has_redundant_metadata());
        // Segments that were open are sealed by the next commits.
        tend(&store, &mut txg);
        tend(&store, &mut txg);
        assert_eq!(store.lies_once(), 0);
        all(&store, &frames);
        let root = store.root();
        assert!(
            root.table_segments
                .iter()
                .filter(|segment| segment.dead_since.is_none())
                .all(|segment| segment.place.len() == 2)
        );
        drop(store);
        let (store, _) = open(&sims, Access::ReadWrite).unwrap();
        let trees: u64 = frames
            .iter()
            .filter(|(_, number, _)| number.is_multiple_of(5))
            .map(|(pointer, ..)| pointer.charged())
            .sum();
        assert_eq!(store.space().copies, trees);
        let twice: Vec<_> = store.segments().into_iter().filter(|info| info.place.len() == 2).collect();
        for info in &twice {
            let start = slots::start(info.place[0], store.slot());
            (0..60).for_each(|step| sims[usize::from(info.place[0].device)].rot(start + step * 997, 2));
        }
        all(&store, &frames);
        assert!(store.mended() > 0);
    }
}
