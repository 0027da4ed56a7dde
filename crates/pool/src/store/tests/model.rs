//! Random work against a map: committed frames exist after every kind of end.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::device::Simulator;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit.max(1)
    }
}

type Alive = BTreeMap<u64, (Pointer, u64, usize)>;

struct Model {
    sims: Vec<Arc<Simulator>>,
    store: Store,
    random: Random,
    txg: u64,
    next: u64,
    now: Alive,
    /// The frames of each committed txg.
    states: BTreeMap<u64, Alive>,
    imports: u64,
    moved: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        let sims = simulators(1 + seed as usize % 2, 64 * MIB);
        let store = create(&sims);
        // In every second pool a third of the frames are sealed.
        if seed.is_multiple_of(2) {
            store.allow_sealed(1).unwrap();
        }
        let states = BTreeMap::from([(0, Alive::new())]);
        Self {
            sims,
            store,
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            txg: 1,
            next: 1,
            now: Alive::new(),
            states,
            imports: 0,
            moved: 0,
        }
    }

    fn write(&mut self) -> Result<()> {
        let key = self.random.below(400);
        let length = match self.random.below(10) {
            0 => 1 + self.random.below(60_000),
            1..4 => 20_000,
            _ => 1 + self.random.below(3000),
        } as usize;
        let number = self.next;
        self.next += 1;
        let pointer = if self.store.is_sealed() && number.is_multiple_of(3) {
            put_sealed(&self.store, self.txg, number, length)?
        } else {
            put(&self.store, self.txg, number, length)?
        };
        if let Some((old, ..)) = self.now.insert(key, (pointer, number, length)) {
            self.store.free(&old, Txg(self.txg));
        }
        Ok(())
    }

    fn delete(&mut self) {
        let key = self.random.below(400);
        if let Some((old, ..)) = self.now.remove(&key) {
            self.store.free(&old, Txg(self.txg));
        }
    }

    fn commit(&mut self) -> Result<()> {
        // The state may be durable even where the commit reported a failure.
        self.states.insert(self.txg, self.now.clone());
        self.txg += 1;
        commit(&self.store, self.txg - 1)
    }

    fn clean(&mut self) -> Result<()> {
        // Small pools are seldom short of slots: clean as if they were.
        let (map, durable) = (self.store.map.read(), self.store.durable().0);
        let some = crate::segment::cleaner::choose(
            &map.table,
            &|_| self.store.slot,
            durable,
            crate::segment::cleaner::Pressure::Some,
            &|_, _| false,
        );
        drop(map);
        if let Some(id) = some {
            let mut done = Cleaned::default();
            let budget = 1 + self.random.below(MIB);
            match self.store.move_out_for_tests(id, budget, &mut done) {
                Err(PoolError::NoSpace) | Ok(()) => {}
                Err(error) => return Err(error),
            }
            self.moved += done.frames;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        match self.random.below(40) {
            0 | 1 => self.commit(),
            2 | 3 => self.clean(),
            4..8 => {
                self.delete();
                Ok(())
            }
            8 => self.store.commit_moves(),
            _ => self.write(),
        }
    }

    /// All live frames are readable, including uncommitted ones.
    fn check_all(&self, every: usize) {
        for (pointer, number, length) in self.now.values().step_by(every) {
            let expected =
                if pointer.is_sealed() { sealed_bytes(*number, *length).1 } else { content(*number, *length) };
            assert_eq!(*self.store.read(pointer).unwrap(), *expected, "frame {pointer}");
        }
        let charged: u64 = self.now.values().map(|(pointer, ..)| pointer.charged()).sum();
        assert_eq!(used(&self.store), charged + self.store.space().freeing, "space is accounted to the byte");
    }

    fn end(&mut self, durable: u64) {
        for sim in &self.sims {
            sim.crash(self.random.next());
        }
        let (store, root) = open(&self.sims, Access::ReadWrite).unwrap();
        assert!(root.txg.0 >= durable, "txg {durable} was durable, {} is there", root.txg);
        self.store = store;
        self.imports += 1;
        self.now = self.states.get(&root.txg.0).expect("the state after a txg that was committed").clone();
        self.states.retain(|txg, _| *txg <= root.txg.0);
        self.txg = root.txg.0 + 1;
        self.check_all(if self.imports.is_multiple_of(8) { 1 } else { 7 });
        let charged: u64 = self.now.values().map(|(pointer, ..)| pointer.charged()).sum();
        assert_eq!(self.store.map.read().table.live_bytes(), charged, "the table's sums fit");
    }

    fn scrub(&self) {
        let mut names = BTreeSet::new();
        self.store
            .scrub(&mut |frame| {
                assert_eq!(frame.damage, None, "frame {:?}", frame.name);
                if frame.header.is_some() {
                    assert!(names.insert(frame.name), "twice");
                }
                true
            })
            .unwrap();
        let expected: BTreeSet<_> = self
            .states
            .last_key_value()
            .unwrap()
            .1
            .values()
            .map(|(pointer, ..)| (pointer.segment, pointer.index))
            .collect();
        assert!(expected.is_subset(&names), "a scrub sees every committed frame");
    }
}

fn run(seed: u64, rounds: u64) -> (u64, u64, u64) {
    let mut model = Model::new(seed);
    let mut steps = 0;
    for round in 0..rounds {
        let mut durable = model.states.last_key_value().map_or(0, |(txg, _)| *txg);
        let crash = round % 3 != 0;
        if crash {
            let allowed = model.random.below(120);
            model.sims[model.random.below(model.sims.len() as u64) as usize].fail_after(allowed);
        }
        for _ in 0..120 {
            let before = model.txg;
            steps += 1;
            match model.step() {
                Ok(()) if model.txg > before => durable = before,
                Ok(()) => {}
                Err(PoolError::Suspended { durable: told, .. }) => {
                    assert!(told.0 <= model.states.last_key_value().unwrap().0 + 1 && crash);
                    break;
                }
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        if !crash {
            model.commit().unwrap();
            durable = model.txg - 1;
            model.check_all(11);
            if round % 6 == 0 {
                model.scrub();
            }
            if round % 9 == 0 {
                model.store.close(false, 3).unwrap();
            }
        }
        model.end(durable);
    }
    (steps, model.imports, model.moved)
}

#[test]
fn random_work_and_crashes_keep_every_promise() {
    let (mut steps, mut imports, mut moved) = (0, 0, 0);
    let (seeds, rounds) = match std::env::var("NACRE_POOL_MODEL").ok().and_then(|seeds| seeds.parse().ok()) {
        Some(seeds) => (seeds, 60),
        None => (6, 30),
    };
    for seed in 1..=seeds {
        let (some, more, others) = run(seed, rounds);
        (steps, imports, moved) = (steps + some, imports + more, moved + others);
    }
    println!("campaign: {seeds} seeds, {steps} steps, {imports} imports, {moved} frames moved (NACRE_POOL_MODEL)");
    assert!(moved > 200, "the cleaner must have worked");
}
