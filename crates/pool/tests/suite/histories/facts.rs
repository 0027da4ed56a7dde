//! What has happened in a history, and what must hold at each moment of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nacre_pool::label::Place;
use nacre_pool::store::{Access, Checked, Store};

use super::programs::open_store;
use super::store::{Change, Objects, OfOneMoment};

/// A root that was followed by another one can be read for so long, seconds.
pub const READABLE: u64 = 600;
pub const FILES: u64 = 10;

/// A version of a file; 0: it is not there.
pub type Version = u64;

/// Something that a program has done, or has tried to.
#[derive(Clone, Copy, Debug)]
struct Deed {
    /// Which import, by the generation that it began with, and its deeds in their order.
    order: (u64, u64),
    version: Version,
    promised: bool,
    /// It was refused: an error of a read, say.
    failed: bool,
}

/// What has happened so far.
#[derive(Clone, Default)]
pub struct Facts {
    deeds: BTreeMap<u64, Vec<Deed>>,
    pub versions: u64,
    pub nonces: u64,
    /// The newest import that was completed.
    pub newest: u64,
    /// Imports: their generations, and what they saw.
    imports: BTreeMap<u64, BTreeMap<u64, (u64, u64)>>,
    /// Whose root it is, by its generation: a nonce.
    makers: BTreeMap<u64, u64>,
    /// What was acknowledged, and to whom.
    acknowledged: BTreeMap<u64, u64>,
    /// Objects that roots need, and when the root was put.
    needed: Vec<(u64, u64, BTreeSet<String>)>,
    pub counts: Counts,
}

/// What histories have come across.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub requests: u64,
    pub imports: u64,
    pub taken: u64,
    pub acknowledged: u64,
    pub synced: u64,
    pub refused: u64,
    pub removed: u64,
    pub seals: u64,
    pub identities: u64,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.imports += other.imports;
        self.taken += other.taken;
        self.acknowledged += other.acknowledged;
        self.synced += other.synced;
        self.refused += other.refused;
        self.removed += other.removed;
        self.seals += other.seals;
        self.identities += other.identities;
    }
}

fn segment_key(id: u32, place: &Place) -> String {
    format!("seg/{:02x}/{}-{id}", id & 0xff, place[0].slot)
}

/// What a reader finds at this moment: the store, all of it read.
pub fn read_all(objects: &Objects) -> Store {
    let bucket = Arc::new(OfOneMoment(objects.clone()));
    let store = open_store(bucket, Access::ReadOnly, 0, Box::new(|| 0)).expect("a reader");
    let mut visit = |checked: &Checked| {
        assert!(checked.damage.is_none(), "a reader finds damage: {checked:?}");
        true
    };
    store.scrub(&mut visit).expect("a reader reads all of it");
    store
}

impl Facts {
    /// The same, to go on from.
    pub fn again(&self) -> Facts {
        Facts { counts: Counts::default(), ..self.clone() }
    }

    pub fn watch(&mut self, change: &Change<'_>) {
        let Change { key, removed, before, objects, clock, .. } = change;
        if let Some(generation) = key.strip_prefix("roots/") {
            let generation: u64 = generation.parse().unwrap();
            let newest = objects.keys().rfind(|key| key.starts_with("roots/"));
            if *removed {
                assert!(newest.is_some_and(|newest| newest.as_str() > *key), "the newest root was removed");
                return;
            }
            let body = &objects[*key];
            let nonce = u64::from_le_bytes(body[body.len() - 24..body.len() - 16].try_into().unwrap());
            if newest.map(String::as_str) != Some(*key) {
                // It has come late: its name was free again.
                return;
            }
            self.makers.insert(generation, nonce);
            let store = read_all(objects);
            let of_table = store.root().table_segments;
            let keys = store.segments().into_iter().map(|segment| segment_key(segment.id, &segment.place));
            let keys = keys.chain(of_table.iter().map(|segment| segment_key(segment.id, &segment.place))).collect();
            for key in &keys {
                assert!(objects.contains_key(key), "root {generation} names {key}, which is not there");
            }
            self.needed.push((generation, *clock, keys));
            // Whoever reads an older one has had his time.
            while self.needed.len() > 1 && self.needed[1].1 + READABLE < *clock {
                self.needed.remove(0);
            }
        } else if let Some(rest) = key.strip_prefix("log/").filter(|_| *removed) {
            let epoch: u64 = rest.split_once('/').unwrap().0.parse().unwrap();
            // Its own blocks a writer removes; seals and those of others only after a day.
            let is_seal = before.as_ref().is_some_and(|before| before.first() == Some(&2));
            if is_seal {
                assert!(epoch < read_all(objects).root().log_start.position, "a seal was removed that is needed");
                self.counts.seals += 1;
            }
        } else if key.starts_with("pool/") && *removed {
            let newest = objects.keys().rfind(|key| key.starts_with("pool/"));
            assert!(newest.is_some_and(|newest| newest.as_str() > *key), "what the pool is was removed");
            self.counts.identities += u64::from(before.is_some());
        } else if key.starts_with("seg/") {
            if *removed {
                self.counts.removed += u64::from(before.is_some());
                for (at, (generation, _, keys)) in self.needed.iter().enumerate() {
                    let followed = self.needed.get(at + 1).map(|(_, when, _)| *when);
                    let needed = followed.is_none_or(|when| when + READABLE >= *clock);
                    assert!(!needed || !keys.contains(*key), "{key} was removed, root {generation} needs it");
                }
            } else if let Some(before) = before {
                assert!(objects[*key].starts_with(before), "{key} lost what it had");
            }
        }
    }

    pub fn deed(&mut self, file: u64, order: (u64, u64), version: Version) {
        self.deeds.entry(file).or_default().push(Deed { order, version, promised: false, failed: false });
    }

    /// A program was told that what it did last was not done.
    pub fn fail(&mut self, order: (u64, u64)) {
        self.deeds.values_mut().flatten().filter(|deed| deed.order == order).for_each(|deed| deed.failed = true);
    }

    /// A program was told that its deeds up to here are durable.
    pub fn promise(&mut self, order: (u64, u64), only: Option<u64>) {
        let (generation, last) = order;
        let Self { deeds, imports, .. } = self;
        for (file, deeds) in deeds.iter_mut().filter(|(file, _)| only.is_none_or(|only| only == **file)) {
            for deed in
                deeds.iter_mut().filter(|deed| deed.order.0 == generation && deed.order.1 <= last && !deed.failed)
            {
                deed.promised = true;
                for (later, saw) in imports.range(generation + 1..) {
                    let seen = saw.get(file).copied().unwrap_or_default();
                    assert!(seen >= deed.order, "{deed:?} of file {file} was promised, import {later} has {seen:?}");
                }
            }
        }
    }

    /// What an import of this generation finds must hold what was promised.
    pub fn imported(&mut self, generation: u64, found: &BTreeMap<u64, Version>) {
        let mut saw = BTreeMap::new();
        for file in 0..FILES {
            let version = found.get(&file).copied().unwrap_or(0);
            let deeds: Vec<Deed> = self.deeds.get(&file).into_iter().flatten().copied().collect();
            let promised = deeds
                .iter()
                .filter(|deed| deed.promised && deed.order.0 < generation)
                .map(|deed| deed.order)
                .max()
                .unwrap_or_default();
            // Several may leave it as it is found: the latest of them is what it may be.
            let seen = deeds.iter().filter(|deed| deed.version == version && deed.order.0 < generation);
            let seen = seen.map(|deed| deed.order).max().unwrap_or_default();
            assert!(
                seen >= promised && (version == 0 || seen != (0, 0)),
                "import {generation} finds version {version} of file {file}: {deeds:?}"
            );
            saw.insert(file, seen);
        }
        assert!(self.imports.insert(generation, saw).is_none(), "two imports have begun with root {generation}");
        self.counts.imports += 1;
    }

    /// Whoever began this before the pool was taken from him may be told that it is done.
    pub fn may_be_told(&self, generation: u64) -> bool {
        self.newest <= generation
    }

    /// A program goes on with these roots of its own.
    pub fn acknowledged(&mut self, generation: u64, nonce: u64) {
        assert_eq!(self.makers.get(&generation), Some(&nonce), "root {generation} is another's");
        let before = self.acknowledged.insert(generation, nonce);
        assert!(before.is_none_or(|before| before == nonce), "generation {generation} was acknowledged twice");
        self.counts.acknowledged += u64::from(before.is_none());
    }
}
