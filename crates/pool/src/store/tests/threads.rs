//! Writers, readers, commits and the cleaner at once, on a pool that is short of slots: an import at the end finds
//! everything committed.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;

use super::*;

type Alive = HashMap<u64, (Pointer, u64)>;

const KEYS: u64 = 320;
const LENGTH: usize = 50_000;

struct Shared {
    store: Store,
    /// The open txg: shared while a frame is written and its predecessor freed, exclusive to go on
    /// to the next.
    txg: RwLock<u64>,
    alive: Vec<Mutex<Alive>>,
    stop: AtomicBool,
    numbers: AtomicU64,
}

impl Shared {
    fn work(&self, thread: usize, count: u64) {
        let mut random = thread as u64 + 77;
        for _ in 0..count {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = self.numbers.fetch_add(1, Ordering::Relaxed) * 5 + 1;
            let key = (random >> 33) % (KEYS / self.alive.len() as u64);
            let txg = self.txg.read();
            let content = content(number | 1, LENGTH);
            let written = self.store.write(&NewFrame {
                compression: CompressionSetting::Off,
                checksum: ChecksumKind::Xxh3,
                ..frame(WriteStream::Data, *txg, &content, 1)
            });
            let pointer = written.unwrap_or_else(|error| panic!("{error}: {:?}", self.store.space()));
            if let Some((old, _)) = self.alive[thread].lock().insert(key, (pointer, number)) {
                self.store.free(&old, Txg(*txg));
            }
        }
    }

    fn read(&self) {
        let mut at = 0usize;
        while !self.stop.load(Ordering::Relaxed) {
            let alive = self.alive[at % self.alive.len()].lock();
            if let Some((pointer, number)) = alive.values().nth(at % alive.len().max(1)) {
                assert_eq!(*self.store.read(pointer).unwrap(), *content(number | 1, LENGTH));
            }
            at += 1;
        }
    }

    /// Commits as an engine does: the state is frozen while no operation runs, and committed while
    /// they go on.
    fn commit(&self) -> (u64, Alive) {
        let (txg, frozen) = {
            let mut txg = self.txg.write();
            *txg += 1;
            (
                *txg - 1,
                self.alive.iter().flat_map(|alive| {
                    alive.lock().clone().into_iter().map(|(key, frame)| (key * 8, frame)).collect::<Vec<_>>()
                }),
            )
        };
        let mut state = Alive::new();
        for (at, (key, frame)) in frozen.enumerate() {
            state.insert(key * 1000 + at as u64, frame);
        }
        commit(&self.store, txg).unwrap();
        (txg, state)
    }
}

#[test]
fn everything_at_once() {
    let sims = simulators(2, 64 * MIB);
    let threads = 3;
    let shared = Shared {
        store: create(&sims),
        txg: RwLock::new(1),
        alive: (0..threads).map(|_| Mutex::default()).collect(),
        stop: AtomicBool::new(false),
        numbers: AtomicU64::new(0),
    };
    let (txg, state) = std::thread::scope(|scope| {
        let shared = &shared;
        let writers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || shared.work(thread, 900))).collect();
        scope.spawn(|| shared.read());
        scope.spawn(|| {
            while !shared.stop.load(Ordering::Relaxed) {
                let (map, durable) = (shared.store.map.read(), shared.store.durable().0);
                let some = crate::segment::cleaner::choose(
                    &map.table,
                    &|_| MIB,
                    durable,
                    crate::segment::cleaner::Pressure::Some,
                    &|_, _| false,
                );
                drop(map);
                match some.map_or(Ok(()), |id| shared.store.move_out_for_tests(id, MIB, &mut Cleaned::default())) {
                    Ok(()) | Err(PoolError::NoSpace) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let mut last = shared.commit();
        while writers.iter().any(|writer| !writer.is_finished()) {
            last = shared.commit();
        }
        // Uncommitted work on top: an import must not see it.
        shared.work(0, 20);
        shared.stop.store(true, Ordering::Relaxed);
        last
    });
    assert!(shared.store.traffic().relocated > 0 && shared.store.durable() == Txg(txg));
    drop(shared);
    sims.iter().for_each(|sim| sim.crash(2));
    let (store, root) = open(&sims, Access::ReadWrite).unwrap();
    assert_eq!(root.txg, Txg(txg));
    for (pointer, number) in state.values() {
        assert_eq!(*store.read(pointer).unwrap(), *content(number | 1, LENGTH));
    }
    assert_eq!(used(&store), state.values().map(|(pointer, _)| pointer.charged()).sum::<u64>());
    store
        .scrub(&mut |frame| {
            assert_eq!(frame.damage, None);
            true
        })
        .unwrap();
}
