//! The conformance suite over a dataset of a pool in memory, and what a crash leaves.

use super::Dataset;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::engine::{Durable, Ground, Pool};
use nacre_pool::rows::Timestamp;
use nacre_pool::store::{Access, Import, LogArea, NewPool, Store};
use nacre_vfs::{Caller, Layer, Name, OpenFlags};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

fn ground(store: Store) -> Ground {
    let random = AtomicU64::new(1);
    let store = Arc::new(store);
    Ground {
        log: Some(Box::new(LogArea::new(Arc::clone(&store)))),
        guid: 7,
        storage: store,
        clock: Arc::new(|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
        }),
        entropy: Arc::new(move || random.fetch_add(0x9e37_79b9, Ordering::Relaxed)),
        cache: 64 << 20,
    }
}

fn create(device: &Arc<Simulator>) -> Arc<Pool> {
    let new = NewPool { name: "tank".to_owned(), guid: 7, host: (1, "here".to_owned()), time: 1 };
    let (store, _) = Store::create(vec![Arc::clone(device) as Arc<dyn Device>], &new).unwrap();
    Arc::new(Pool::create(ground(store), "tank").unwrap())
}

fn open(device: &Arc<Simulator>) -> Arc<Pool> {
    let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".to_owned()), time: 2 };
    let (store, root) = Store::open(vec![Arc::clone(device) as Arc<dyn Device>], &import).unwrap();
    let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
    Arc::new(Pool::open(ground(store), &durable).unwrap())
}

fn dataset(pool: &Arc<Pool>) -> Dataset {
    Dataset::open(pool, pool.find("tank").unwrap().unwrap()).unwrap()
}

#[test]
fn a_dataset_conforms() {
    nacre_testkit::conformance::run(|| {
        let device = Arc::new(Simulator::new("disk", 128 << 20));
        Arc::new(dataset(&create(&device)))
    });
}

#[test]
fn what_was_synced_is_there_after_a_crash() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    {
        let layer = dataset(&create(&device));
        let root = layer.root().unwrap().node;
        let (_, file) = layer.create(&Caller::ROOT, &root, name("kept"), 0o600, OpenFlags::READ_WRITE).unwrap();
        file.write(b"safe", 0).unwrap();
        file.fsync(false).unwrap();
        layer.create(&Caller::ROOT, &root, name("lost"), 0o600, OpenFlags::READ_WRITE).unwrap();
    }
    device.crash(3);
    let layer = dataset(&open(&device));
    let root = layer.root().unwrap().node;
    let kept = layer.lookup(&Caller::ROOT, &root, name("kept")).unwrap();
    let mut content = [0; 9];
    assert_eq!(layer.open(&Caller::ROOT, &kept.node, OpenFlags::READ).unwrap().read(&mut content, 0), Ok(4));
    assert_eq!(&content[..4], b"safe");
    assert!(layer.lookup(&Caller::ROOT, &root, name("lost")).is_err());
}
