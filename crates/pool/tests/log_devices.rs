//! Devices that hold nothing but copies of the intent log: what is promised is found again after a
//! crash, whether they work, fail, come back or are taken out.

// A failed expectation in a test is what the test reports.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nacre_pool::backend::NewGroup;
use nacre_pool::codec::Writer;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::label::GroupKind;
use nacre_pool::log::{Blocks, LogChange, LogRecord, Start};
use nacre_pool::store::{Access, Commit, Import, NewPool};
use nacre_pool::{PoolError, Store, Txg};

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
        let mut records = Writer::default();
        LogRecord { txg: Txg(self.txg), dataset: 1, changes: changes.to_vec() }.encode(&mut records);
        let durable = self.log.append(Txg(self.txg), &records.finish()).unwrap();
        if durable {
            self.promised.insert(self.made, self.txg);
        }
        durable
    }

    fn commit(&mut self) {
        let txg = Txg(self.txg);
        self.txg += 1;
        let log_start = self.log.start_after(txg).into();
        self.store.commit(&Commit { txg, catalog: None, upper: &[], log_start, time: 1 }).unwrap();
        self.log.forget(txg);
        self.promised.retain(|_, of| *of > txg.0);
    }

    /// The power fails; these devices are there afterwards, and all that was promised.
    fn crash(self, devices: &[Arc<Simulator>], there: &[usize]) -> Self {
        let Self { store, log, txg, made, promised } = self;
        drop((store, log));
        there.iter().for_each(|at| devices[*at].crash(made));
        let given: Vec<&Arc<Simulator>> = there.iter().map(|at| &devices[*at]).collect();
        let store = Arc::new(open(&given, Access::ReadWrite).unwrap());
        let mut log = store.log().unwrap();
        let (root, mut found) = (store.root(), BTreeSet::new());
        let mut visit = |record: &LogRecord<'_>| {
            found.extend(record.changes.iter().map(|change| match change {
                LogChange::Delete { key } => u64::from_le_bytes((*key).try_into().unwrap()),
                other => panic!("{other:?}"),
            }));
            Ok(())
        };
        let replayed = log.replay(root.log_start.into(), root.txg, &mut visit).unwrap();
        assert_eq!(replayed.lost, None);
        assert!(promised.keys().all(|number| found.contains(number)), "{promised:?} of which {found:?} are there");
        Self { store, log, txg: txg.max(root.txg.0 + 1), made, promised }
    }
}
