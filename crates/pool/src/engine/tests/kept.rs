//! The failover of a pool after the death of its process, on a device whose power fails meanwhile.

use std::sync::atomic::Ordering;

use nacre_sys::shared_words::SharedWords;

use super::*;
use crate::device::{Device, Simulator};
use crate::label::Root;
use crate::log::KeptLog;
use crate::store::{Access, Import, NewPool, Store};

/// Words of the log beside what it holds: its head, and one part more than it is long.
const MORE: usize = 512 + (1 << 17);

/// A store, and the state that it was opened with.
struct OpenStore {
    store: Store,
    root: Root,
}

/// A store on a device.
fn store(device: &Arc<Simulator>, is_new: bool) -> Result<OpenStore, PoolError> {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let host = (1, "here".to_owned());
    let (store, root) = if is_new {
        let new = NewPool { name: "tank".to_owned(), guid: 7, host, time: 1, redundant_metadata: false };
        Store::create(devices, &new)?
    } else {
        Store::open(devices, &Import { access: Access::ReadWrite, name: None, host, time: 2 })?
    };
    Ok(OpenStore { store, root })
}

/// The pool in a store, with a log that outlives its process.
fn pool_in(opened: OpenStore, kept: Option<&Arc<KeptLog>>) -> Result<Arc<Pool>, PoolError> {
    let OpenStore { store, root } = opened;
    let store = Arc::new(store);
    let empty = Arc::new(MapStorage::default());
    let config = PoolConfig { log: Some(store.log()?), storage: store, kept: kept.cloned(), ..config(&empty) };
    let pool = match root.catalog {
        None => Pool::create(config, "tank")?,
        Some(catalog) => Pool::open(config, &Durable { txg: root.txg, catalog, log: root.log_start.into() })?,
    };
    Ok(Arc::new(pool))
}

fn import(device: &Arc<Simulator>, kept: Option<&Arc<KeptLog>>, is_new: bool) -> Result<Arc<Pool>, PoolError> {
    pool_in(store(device, is_new)?, kept)
}

/// The log as a dead process leaves it.
fn left(kept: &KeptLog) -> Arc<KeptLog> {
    let count = MORE + kept.length() as usize / 8;
    let from = SharedWords::taken_over(kept.descriptor().try_clone_to_owned().unwrap(), count).unwrap();
    let to = SharedWords::new(c"test", count).unwrap();
    for (to, from) in to.words().iter().zip(from.words()) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    KeptLog::taken_over(to.descriptor().try_clone_to_owned().unwrap()).unwrap()
}

fn content_of(pool: &Pool, id: u64) -> Tree {
    contents(pool.dataset(id).unwrap().files())
}

/// A new file, all of which the intent log can hold: without attributes that are frames, and never cut off.
fn write_new(dataset: &Dataset, name: &str, content: &[u8]) -> Arc<Inode> {
    let new = |parent: &ParentView| {
        let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
        Ok(NewInode { row, target: None, attributes: Vec::new() })
    };
    let file = dataset.files().make(&dataset.files().root(), name.as_bytes(), b"", &new).unwrap().0;
    dataset.files().write(&file, Some(0), content).unwrap();
    file
}

/// Content that does not become shorter.
fn random(seed: u64, length: usize) -> Vec<u8> {
    let mut random = seed;
    let bytes = std::iter::repeat_with(|| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 56) as u8
    });
    bytes.take(length).collect()
}

#[test]
fn power_may_fail_at_any_moment_of_a_replay() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let kept = KeptLog::new(4 << 20).unwrap();
    let pool = import(&device, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    let files: Vec<_> = (0..1500u32).map(|at| write_new(&dataset, &format!("file {at}"), &[at as u8; 700])).collect();
    let last = files.last().unwrap();
    // All of them are in the intent log then, and nothing was committed for it.
    let committed = pool.committed.load(Ordering::Acquire);
    pool.sync_file(&dataset, last).unwrap();
    assert_eq!(pool.committed.load(Ordering::Acquire), committed);
    let synced = content_of(&pool, id);
    assert_eq!(synced.len(), 1500);
    drop((files, dataset));
    let mut operations = 0;
    loop {
        let (disk, log) = (Arc::new(device.copy()), left(&kept));
        disk.fail_after(operations);
        let imported = import(&disk, Some(&log), false);
        let is_over = imported.as_ref().is_ok_and(|pool| pool.commit().is_ok());
        drop(imported);
        disk.fail_after(u64::MAX);
        disk.crash(operations);
        let after = import(&disk, None, false).unwrap();
        assert!(content_of(&after, id) == synced, "power failed after {operations} operations");
        if is_over {
            break;
        }
        operations += 1;
    }
    assert!(operations > 3, "{operations}");
}

#[test]
fn a_replay_needs_no_device_that_takes_writes() {
    let device = Arc::new(Simulator::new("disk", 256 << 20));
    let kept = KeptLog::new(64 << 20).unwrap();
    let pool = import(&device, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    // More than is held back before it is written.
    (0..24).for_each(|at| put(&dataset, &format!("file {at}"), &random(at, 1 << 20)));
    let acknowledged = content_of(&pool, id);
    drop(dataset);
    for allowed in [0, 1, 2, 5, 10, 20] {
        let (disk, log) = (Arc::new(device.copy()), left(&kept));
        let opened = store(&disk, false).unwrap();
        disk.fail_after(allowed);
        let pool = pool_in(opened, Some(&log)).unwrap_or_else(|error| panic!("after {allowed} writes: {error}"));
        assert!(content_of(&pool, id) == acknowledged, "after {allowed} writes");
        assert!(pool.commit().is_err(), "a commit succeeds on a device that takes nothing");
        assert!(content_of(&pool, id) == acknowledged, "after {allowed} writes and a commit that failed");
        drop(pool);
        // The next process has a device that works again.
        disk.fail_after(u64::MAX);
        let pool = import(&disk, Some(&left(&log)), false).unwrap();
        pool.commit().unwrap();
        drop(pool);
        let pool = import(&disk, None, false).unwrap();
        assert!(content_of(&pool, id) == acknowledged, "after {allowed} writes, and another process");
    }
}
