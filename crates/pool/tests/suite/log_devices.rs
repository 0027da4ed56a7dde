//! Groups that are for a part of a pool alone. Devices that hold nothing but copies of the intent log:
//! what is promised is found again after a crash, whether they work, fail, come back or are taken out.
//! Groups for metadata: what lies there, and what it takes of the room.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nacre_pool::backend::NewGroup;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::label::GroupKind;
use nacre_pool::log::{Blocks, LogChange, LogRecord, Start};
use nacre_pool::store::{Access, Commit, Import, NewPool};
use nacre_pool::{
    ChecksumKind, CompressionSetting, FrameKind, Frames, NewFrame, Owner, Pointer, PoolError, Store, Txg, WriteStream,
};

const MIB: u64 = 1 << 20;

fn new_pool() -> NewPool {
    NewPool { name: "tank".into(), guid: 7, host: (1, "here".into()), time: 1_800_000_000, redundant_metadata: true }
}

fn new_groups(groups: &[(GroupKind, usize)]) -> Vec<NewGroup> {
    groups.iter().map(|(kind, devices)| NewGroup { kind: *kind, devices: *devices }).collect()
}

fn open(devices: &[&Arc<Simulator>], access: Access) -> Result<Store, PoolError> {
    let import = Import { access, name: None, host: (1, "here".into()), time: 1_800_000_001 };
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    Store::open(devices, &import).map(|(store, _)| store)
}

/// A device for the log: what is written to the log goes to it alone; if it fails, the log goes on
/// where it was, once nothing of what was on the other is needed; and nothing that was promised is
/// lost with a crash.
#[test]
fn a_log_device_has_the_log() {
    let devices: Vec<Arc<Simulator>> =
        (0..4).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), 64 * MIB))).collect();
    let given = |numbers: &[usize]| -> Vec<Arc<dyn Device>> {
        numbers.iter().map(|at| Arc::clone(&devices[*at]) as Arc<dyn Device>).collect()
    };
    let groups = new_groups(&[(GroupKind::Mirror, 2)]);
    let store = Arc::new(Store::create_groups(given(&[0, 1]), &groups, &new_pool()).unwrap().0);
    let mut pool = Logged { log: store.log().unwrap(), store, txg: 1, made: 0, promised: BTreeMap::new() };
    pool.log.begin(Start::default()).unwrap();
    pool.commit();
    assert!(pool.append());
    let rows = new_groups(&[(GroupKind::RaidZ(1), 2)]);
    assert!(pool.store.add_logs(&given(&[2, 3]), &[60, 61], &rows).is_err());
    pool.store.add_logs(&given(&[2]), &[60], &new_groups(&[(GroupKind::Plain, 1)])).unwrap();
    let written = || [0, 1, 2].map(|at: usize| devices[at].written());
    let before = written();
    assert!(pool.append() && pool.append());
    let after = written();
    assert_eq!((before[0], before[1]), (after[0], after[1]), "only the log device is written");
    assert!(after[2] > before[2]);
    pool = pool.crash(&devices, &[0, 1, 2]);
    assert!(pool.append());
    pool.commit();
    assert!(pool.append());
    // Without the log device what was promised last is not there: that is said.
    let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".into()), time: 1 };
    devices.iter().for_each(|device| device.crash(0));
    let refused = Store::open(given(&[0, 1]), &import).map(drop).unwrap_err().to_string();
    assert!(refused.contains("log device that is missing: sim2"), "{refused}");
    // It is given up where that is wanted, on copies of the others.
    let copy = |at: usize| Arc::new(Simulator::with_bytes(devices[at].name(), devices[at].bytes()));
    let (copies, committed) = ([copy(0), copy(1)], pool.txg - 1);
    let store = Arc::new(open(&copies.each_ref(), Access::WithoutLog).unwrap());
    assert_eq!(store.root().txg.0, committed);
    let mut alone = Logged { log: store.log().unwrap(), store, txg: pool.txg, made: 0, promised: BTreeMap::new() };
    alone.replay();
    assert!(alone.append());
    let alone = alone.crash(&copies, &[0, 1]);
    drop(alone);
    pool = pool.crash(&devices, &[0, 1, 2]);
    // It fails.
    assert!(pool.append());
    devices[2].fail_after(1);
    devices[2].fail_reads(true);
    assert!(!pool.append(), "it is durable with a commit");
    assert!(!pool.append());
    pool.commit();
    assert!(!pool.append());
    pool.commit();
    assert!(pool.append() && pool.append());
    pool = pool.crash(&devices, &[0, 1]);
    assert!(pool.append());
    // It comes back, and gets what comes from then on.
    devices[2].crash(4);
    pool.store.online(2, Arc::clone(&devices[2]) as _).unwrap();
    assert!(pool.append());
    let (stale, changes) = pool.store.stale_devices().unwrap();
    assert_eq!(stale, [2]);
    pool.store.resilver(&mut |_| true, &mut |_| {}).unwrap();
    pool.commit();
    pool.commit();
    assert!(pool.store.resilvered(&stale, changes).unwrap());
    let before = written();
    assert!(pool.append());
    assert_eq!(before[0], written()[0]);
    pool = pool.crash(&devices, &[0, 1, 2]);
    // It is taken out.
    assert!(pool.append());
    assert!(pool.store.remove_log(0).is_err());
    pool.store.hold_log(true).unwrap();
    assert!(!pool.append());
    pool.commit();
    pool.commit();
    pool.store.remove_log(2).unwrap();
    pool.store.hold_log(false).unwrap();
    assert!(pool.append());
    assert!(nacre_pool::label::probe(&*devices[2]).unwrap().is_none());
    pool = pool.crash(&devices, &[0, 1]);
    assert!(pool.append());
}

/// A pool with a log, and what it has promised since the last commit.
struct Logged {
    store: Arc<Store>,
    log: Box<dyn Blocks>,
    txg: u64,
    made: u64,
    promised: BTreeMap<u64, u64>,
}

impl Logged {
    /// Writes a record; answers whether it is durable.
    fn append(&mut self) -> bool {
        self.made += 1;
        let key = self.made.to_le_bytes();
        let changes = [LogChange::Delete { key: &key }];
        let record = LogRecord { txg: Txg(self.txg), dataset: 1, changes: changes.to_vec() }.encoded();
        let durable = self.log.append(Txg(self.txg), &record).unwrap();
        if durable {
            self.promised.insert(self.made, self.txg);
        }
        durable
    }

    fn commit(&mut self) {
        let txg = Txg(self.txg);
        self.txg += 1;
        let start = self.log.start_after(txg);
        self.store.commit(&Commit { txg, catalog: None, upper: &[], log_start: start.into(), time: 1 }).unwrap();
        self.log.forget(txg, start);
        self.promised.retain(|_, of| *of > txg.0);
    }

    /// The power fails; these devices are there afterwards, and all that was promised.
    fn crash(self, devices: &[Arc<Simulator>], there: &[usize]) -> Self {
        let Self { store, log, txg, made, promised } = self;
        drop((store, log));
        there.iter().for_each(|at| devices[*at].crash(made));
        let given: Vec<&Arc<Simulator>> = there.iter().map(|at| &devices[*at]).collect();
        let store = Arc::new(open(&given, Access::ReadWrite).unwrap());
        let txg = txg.max(store.root().txg.0 + 1);
        let mut pool = Self { log: store.log().unwrap(), store, txg, made, promised };
        let found = pool.replay();
        let promised = &pool.promised;
        assert!(promised.keys().all(|number| found.contains(number)), "{promised:?} of which {found:?} are there");
        pool
    }

    /// The records that are found again.
    fn replay(&mut self) -> BTreeSet<u64> {
        let (root, mut found) = (self.store.root(), BTreeSet::new());
        let mut visit = |record: &LogRecord<'_>| {
            found.extend(record.changes.iter().map(|change| match change {
                LogChange::Delete { key } => u64::from_le_bytes((*key).try_into().unwrap()),
                other => panic!("{other:?}"),
            }));
            Ok(())
        };
        let replayed = self.log.replay(root.log_start.into(), root.txg, &mut visit).unwrap();
        assert_eq!(replayed.lost, None);
        found
    }
}

/// A pool with groups for metadata, and what is in it.
struct Parted {
    devices: Vec<Arc<Simulator>>,
    store: Store,
    txg: u64,
    frames: BTreeMap<u64, (Pointer, Vec<u8>)>,
    made: u64,
}

impl Parted {
    /// Of these groups, and behind them these for metadata.
    fn new(groups: &[(GroupKind, usize)], special: &[(GroupKind, usize)]) -> Self {
        let (groups, special) = (new_groups(groups), new_groups(special));
        let count = |groups: &[NewGroup]| groups.iter().map(|group| group.devices).sum::<usize>();
        let (of_data, all) = (count(&groups), count(&groups) + count(&special));
        let devices: Vec<_> = (0..all).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), 64 * MIB))).collect();
        let given: Vec<Arc<dyn Device>> = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let store = Store::create_groups(given[..of_data].to_vec(), &groups, &new_pool()).unwrap().0;
        let guids: Vec<u64> = (90..).take(all - of_data).collect();
        store.add_special(&given[of_data..], &guids, &special).unwrap();
        Self { devices, store, txg: 1, frames: BTreeMap::new(), made: 0 }
    }

    fn write(&mut self, stream: WriteStream, length: usize) -> Result<u64, PoolError> {
        self.made += 1;
        let mut random = nacre_pool::device::Random(self.made);
        let content: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
        let frame = NewFrame {
            stream,
            kind: if stream == WriteStream::Data { FrameKind::Data } else { FrameKind::Leaf },
            owner: Owner { dataset: 1, object: self.made, offset: 0 },
            birth: Txg(self.txg),
            content: &content,
            compression: CompressionSetting::Off,
            checksum: ChecksumKind::Xxh3,
        };
        let pointer = self.store.write(&frame)?;
        self.frames.insert(self.made, (pointer, content));
        Ok(self.made)
    }

    fn free(&mut self, number: u64) {
        let (pointer, _) = self.frames.remove(&number).unwrap();
        self.store.free(&pointer, Txg(self.txg));
    }

    fn commit(&mut self) {
        let (txg, log_start) = (Txg(self.txg), Default::default());
        self.txg += 1;
        self.store.commit(&Commit { txg, catalog: None, upper: &[], log_start, time: 1 }).unwrap();
    }

    /// What lives on devices of these numbers, bytes.
    fn living(&self, of: std::ops::Range<u16>) -> u64 {
        let on = |place: &nacre_pool::label::Place| place.iter().any(|slot| of.contains(&slot.device));
        self.store.segments().iter().filter(|segment| on(&segment.place)).map(|segment| segment.live_bytes).sum()
    }

    fn verify(&self) {
        for (number, (pointer, content)) in &self.frames {
            assert!(*self.store.read(pointer).unwrap() == *content, "frame {number}");
        }
    }
}

/// Metadata lies on its groups as long as there is room and takes none of that for content, then with
/// the others; content never lies there. What dies there is cleaned there.
#[test]
fn metadata_lies_on_groups_of_its_own() {
    let mut pool = Parted::new(&[(GroupKind::RaidZ(1), 3)], &[(GroupKind::Mirror, 2)]);
    let before = pool.store.space();
    for _ in 0..30 {
        pool.write(WriteStream::Metadata, 60_000).unwrap();
    }
    let (charged, open) =
        (|pool: &Parted| pool.frames.values().map(|(pointer, _)| pointer.charged()).sum::<u64>(), pool.store.space());
    assert_eq!((open.free, open.special), (before.free, before.special + charged(&pool)), "before a commit");
    pool.commit();
    assert_eq!((pool.living(0..3), pool.living(3..5)), (0, charged(&pool)));
    let space = pool.store.space();
    assert_eq!((space.free, space.size), (before.free, before.size));
    assert_eq!(space.special, charged(&pool) + space.table);
    pool.write(WriteStream::Data, 200_000).unwrap();
    pool.commit();
    assert!(pool.living(0..3) > 200_000 && pool.store.space().free < before.free - 200_000);
    // Half of what there is dies, again and again: it comes back by cleaning, and nothing is written
    // to the others.
    let content = pool.living(0..3);
    for _ in 0..12 {
        let trees: Vec<u64> = (0..150).map(|_| pool.write(WriteStream::Metadata, 60_000).unwrap()).collect();
        pool.commit();
        trees.iter().filter(|number| *number % 8 != 0).for_each(|number| pool.free(*number));
        pool.commit();
        while pool.store.clean_step(64 * MIB).unwrap().more {
            pool.commit();
        }
        // Until older states are not kept any more.
        (0..5).for_each(|_| pool.commit());
    }
    assert_eq!(pool.living(0..3), content);
    pool.verify();
    // They are full: what comes then lies with the content.
    while pool.living(0..3) < content + 4 * MIB {
        for _ in 0..20 {
            pool.write(WriteStream::Metadata, 60_000).unwrap();
        }
        pool.commit();
    }
    assert!(pool.store.space().free < space.free);
    pool.verify();
    // Content finds no room where only metadata has some.
    let trees: Vec<u64> = pool
        .frames
        .iter()
        .filter(|(_, (pointer, _))| pointer.kind == FrameKind::Leaf)
        .map(|(number, _)| *number)
        .collect();
    trees.into_iter().for_each(|number| pool.free(number));
    pool.commit();
    pool.commit();
    let full = loop {
        match pool.write(WriteStream::Data, 200_000) {
            Ok(_) => {}
            Err(error) => break error,
        }
        pool.commit();
    };
    assert!(matches!(full, PoolError::NoSpace), "{full}");
    let on_special = |(_, (pointer, _)): (&u64, &(Pointer, Vec<u8>))| {
        let at = pool.store.segments().into_iter().find(|segment| segment.id == pointer.segment);
        at.is_some_and(|at| at.place.iter().any(|slot| slot.device >= 3))
    };
    assert!(!pool.frames.iter().any(on_special));
    pool.write(WriteStream::Metadata, 60_000).unwrap();
    pool.commit();
    pool.verify();
}

/// One device of a mirror for metadata may be lost; without both the pool is not imported, and it is said
/// which are missing. Older programs are told of the feature.
#[test]
fn a_pool_needs_its_metadata() {
    for (groups, special) in [
        (&[(GroupKind::RaidZ(1), 3)][..], &[(GroupKind::Mirror, 2)][..]),
        (&[(GroupKind::Mirror, 2)], &[(GroupKind::Plain, 1), (GroupKind::Mirror, 2)]),
        (&[(GroupKind::Plain, 1)], &[(GroupKind::Mirror, 2)]),
    ] {
        let mut pool = Parted::new(groups, special);
        for at in 0..40 {
            pool.write(if at % 3 == 0 { WriteStream::Data } else { WriteStream::Metadata }, 30_000).unwrap();
        }
        pool.commit();
        let Parted { devices, store, frames, .. } = pool;
        drop(store);
        devices.iter().for_each(|device| device.crash(3));
        let identity = nacre_pool::label::probe(&*devices[0]).unwrap().unwrap();
        assert_ne!(identity.incompatible & nacre_pool::label::Identity::CLASSES, 0);
        let count = devices.len();
        let given = |missing: &[usize]| -> Vec<&Arc<Simulator>> {
            (0..count).filter(|at| !missing.contains(at)).map(|at| &devices[at]).collect()
        };
        let opened = open(&given(&[count - 1]), Access::ReadOnly).unwrap();
        for (pointer, content) in frames.values() {
            assert!(*opened.read(pointer).unwrap() == *content);
        }
        drop(opened);
        let refused = open(&given(&[count - 2, count - 1]), Access::ReadWrite).map(drop).unwrap_err().to_string();
        for at in [count - 2, count - 1] {
            assert!(refused.contains(&format!("device {at} is missing; it was at sim{at}")), "{refused}");
        }
    }
    let pool = Parted::new(&[(GroupKind::Mirror, 2)], &[(GroupKind::Mirror, 2)]);
    let rows: Vec<Arc<dyn Device>> =
        (0..3).map(|at| Arc::new(Simulator::new(&format!("row{at}"), 64 * MIB)) as _).collect();
    let refused = pool.store.add_special(&rows, &[1, 2, 3], &new_groups(&[(GroupKind::RaidZ(1), 3)]));
    assert!(refused.unwrap_err().to_string().contains("are mirrors, or each for itself"));
}
