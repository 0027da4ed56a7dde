//! The failover of a pool after the death of its process, on a device whose power fails meanwhile.

use std::sync::atomic::Ordering;

use nacre_sys::shared_words::SharedWords;

use super::*;
use crate::device::{Device, Simulator};
use crate::label::Root;
use crate::log::KeptLog;
use crate::store::{Access, Import, NewPool, Store};

/// Words of the journal in addition to its records: its header, and one part more than its length.
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

/// The pool in a store, with a replay journal that survives its process.
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

/// The journal as a crashed process leaves it.
fn left(kept: &KeptLog) -> Arc<KeptLog> {
    let count = MORE + kept.length() as usize / 8;
    let from = SharedWords::taken_over(kept.descriptor().try_clone_to_owned().unwrap(), count).unwrap();
    let to = SharedWords::new(c"test", count).unwrap();
    for (to, from) in to.words().iter().zip(from.words()) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    KeptLog::taken_over(to.descriptor().try_clone_to_owned().unwrap()).unwrap()
}

/// An attribute whose value is a frame.
const LONG: &[u8] = b"user.long";

/// Contents by names, and long attributes.
fn content_of(pool: &Pool, id: u64) -> Tree {
    let dataset = pool.dataset(id).unwrap();
    let files = dataset.files();
    let mut all = contents(files);
    for entry in files.list(&files.root(), 0, true, usize::MAX).unwrap() {
        let (inode, _) = entry.file.unwrap();
        if let Ok(value) = files.attribute(&inode, LONG) {
            all.insert(format!("attribute of {}", String::from_utf8(entry.name).unwrap()), value);
        }
    }
    all
}

fn set_long(dataset: &Dataset, file: &Arc<Inode>, value: &[u8]) {
    dataset.files().set_attribute(file, LONG, value, None, None).unwrap();
}

/// A new file that fits the intent log as a whole: never truncated.
fn write_new(dataset: &Dataset, name: &str, content: &[u8]) -> Arc<Inode> {
    let new = |parent: &ParentView| {
        let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
        Ok(NewInode { row, target: None, attributes: Vec::new() })
    };
    let file = dataset.files().make(&dataset.files().root(), name.as_bytes(), b"", &new).unwrap().0;
    dataset.files().write(&file, Some(0), content).unwrap();
    file
}

/// Incompressible content.
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
    files.iter().step_by(150).zip(0..).for_each(|(file, at)| set_long(&dataset, file, &random(at, 60_000)));
    let last = files.last().unwrap();
    // All of them are in the intent log then, and no commit was made for them.
    let committed = pool.committed.load(Ordering::Acquire);
    pool.sync_file(&dataset, last).unwrap();
    assert_eq!(pool.committed.load(Ordering::Acquire), committed);
    let synced = content_of(&pool, id);
    assert_eq!(synced.len(), 1510);
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
fn long_attributes_are_in_the_intent_log() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = import(&device, None, true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    let old = write_new(&dataset, "old", b"content");
    set_long(&dataset, &old, &random(1, 9000));
    pool.commit().unwrap();
    let committed = pool.committed.load(Ordering::Acquire);
    // A value replacing a committed frame, one of a new file, one that a file is created with, and
    // one that is removed again.
    set_long(&dataset, &old, &random(2, 65_536));
    let new = write_new(&dataset, "new", b"content");
    set_long(&dataset, &new, &random(3, 4097));
    let born = |parent: &ParentView| {
        let row = InodeRow::new(FileType::Regular, 0o640, parent.now);
        Ok(NewInode { row, target: None, attributes: vec![(LONG.to_vec(), random(4, 30_000))] })
    };
    let (born, _) = dataset.files().make(&dataset.files().root(), b"born", b"", &born).unwrap();
    let short = write_new(&dataset, "short", b"content");
    set_long(&dataset, &short, &random(5, 5000));
    set_long(&dataset, &short, b"short");
    let none = write_new(&dataset, "none", b"content");
    set_long(&dataset, &none, &random(6, 5000));
    dataset.files().remove_attribute(&none, LONG).unwrap();
    pool.sync_file(&dataset, &old).unwrap();
    let rows = |pool: &Pool| {
        let dataset = pool.dataset(id).unwrap();
        let files = dataset.files();
        let names: [&[u8]; 5] = [b"old", b"new", b"born", b"short", b"none"];
        names.map(|name| files.look_up(&files.root(), name).unwrap().1)
    };
    let (expected, rows_before) = (content_of(&pool, id), rows(&pool));
    assert_eq!(pool.committed.load(Ordering::Acquire), committed, "an fsync was a commit");
    drop((old, new, born, short, none, dataset));
    for seed in 0..4 {
        let disk = Arc::new(device.copy());
        disk.crash(seed);
        let again = import(&disk, None, false).unwrap();
        assert!(content_of(&again, id) == expected);
        assert_eq!(rows(&again), rows_before);
        again.commit().unwrap();
        drop(again);
        assert!(content_of(&import(&disk, None, false).unwrap(), id) == expected);
    }
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
        assert!(pool.suspended().is_some());
        let held = pool.held() >> 20;
        // A piece that is being filled is counted with the frames of the store.
        assert!(held + 2 >= 24 - allowed, "{held} MiB are counted after {allowed} writes");
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

#[test]
fn a_replay_goes_on_where_no_label_can_be_written() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let kept = KeptLog::new(4 << 20).unwrap();
    let pool = import(&device, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    write_new(&pool.dataset(id).unwrap(), "file", b"acknowledged");
    let acknowledged = content_of(&pool, id);
    let (disk, log) = (Arc::new(device.copy()), left(&kept));
    disk.fail_after(0);
    let next = import(&disk, Some(&log), false).unwrap();
    assert!(next.suspended().is_some());
    assert!(content_of(&next, id) == acknowledged);
    disk.fail_after(0);
    assert!(import(&disk, None, false).is_err(), "without a log there is nothing to go on with");
}

#[test]
fn a_replay_goes_on_where_the_commit_of_a_part_fails() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let kept = KeptLog::new(4 << 20).unwrap();
    let pool = import(&device, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    (0..800u32).for_each(|at| drop(write_new(&dataset, &format!("file {at}"), &[at as u8; 700])));
    let acknowledged = content_of(&pool, id);
    drop(dataset);
    let mut allowed = 0;
    loop {
        let (disk, log) = (Arc::new(device.copy()), left(&kept));
        let opened = store(&disk, false).unwrap();
        opened.store.confirm().unwrap();
        disk.fail_after(allowed);
        let pool = pool_in(opened, Some(&log)).unwrap_or_else(|error| panic!("after {allowed} operations: {error}"));
        assert!(content_of(&pool, id) == acknowledged, "after {allowed} operations");
        let has_failed = pool.suspended().is_some();
        let root = pool.dataset(id).unwrap().files().root();
        let removed = pool.dataset(id).unwrap().files().unlink(&root, b"file 1");
        assert_eq!(removed.is_err(), has_failed, "after {allowed} operations");
        let expected = content_of(&pool, id);
        drop(pool);
        // The next process has a device that works again.
        disk.fail_after(u64::MAX);
        let pool = import(&disk, Some(&left(&log)), false).unwrap();
        assert!(content_of(&pool, id) == expected, "after {allowed} operations, and another process");
        pool.commit().unwrap();
        drop(pool);
        let pool = import(&disk, None, false).unwrap();
        assert!(content_of(&pool, id) == expected, "after {allowed} operations, and a commit");
        if !has_failed {
            break;
        }
        allowed += 1;
    }
    assert!(allowed > 3, "{allowed}");
}

#[test]
fn a_replay_goes_on_where_room_is_short() {
    for is_suspended in [false, true] {
        let storage = Arc::new(MapStorage::default());
        let (kept, blocks) = (KeptLog::new(64 << 20).unwrap(), crate::log::tests::Memory::new(8 << 20));
        let with = |kept: &Arc<KeptLog>| PoolConfig {
            log: Some(super::damage::ring(&blocks)),
            kept: Some(Arc::clone(kept)),
            ..config(&storage)
        };
        let pool = Pool::create(with(&kept), "tank").unwrap();
        let id = pool.find("tank").unwrap().unwrap();
        let dataset = pool.dataset(id).unwrap();
        let files: Vec<_> =
            (0..20).map(|at| write_new(&dataset, &format!("file {at}"), &random(at, 1 << 20))).collect();
        // Whole records, parts of them, and what is shared.
        dataset.files().write(&files[3], Some(1000), &[7; 300_000]).unwrap();
        let range = crate::files::Range { from: 0, to: 0, length: 1 << 20 };
        dataset.files().share(&files[3], &files[4], range).unwrap();
        // Long attributes: replaced, removed, and many.
        files.iter().zip(0..).for_each(|(file, at)| set_long(&dataset, file, &random(at, 5000)));
        set_long(&dataset, &files[5], &random(7, 60_000));
        set_long(&dataset, &files[6], b"short");
        dataset.files().remove_attribute(&files[7], LONG).unwrap();
        let acknowledged = content_of(&pool, id);
        drop((files, dataset, pool));
        let durable = crash(&storage);
        storage.size.store(16 << 20, Ordering::Relaxed);
        if is_suspended {
            storage.suspend(&PoolError::Refused("a device failed".to_owned()));
        }
        let log = left(&kept);
        let pool = Pool::open(with(&log), &durable).unwrap();
        assert!(content_of(&pool, id) == acknowledged);
        assert!(pool.suspended().is_some() && pool.held() > 4 << 20);
        drop(pool);
        // There is room for the next process.
        storage.size.store(0, Ordering::Relaxed);
        *storage.suspended.lock() = None;
        let durable = crash(&storage);
        let pool = Pool::open(with(&left(&log)), &durable).unwrap();
        assert!(content_of(&pool, id) == acknowledged);
        pool.commit().unwrap();
        drop(pool);
        assert!(content_of(&reopen(&storage), id) == acknowledged);
    }
}

#[test]
fn a_replay_without_room_goes_on_where_the_device_has_become_longer() {
    let (large, small) = (Arc::new(Simulator::new("disk", 256 << 20)), Arc::new(Simulator::new("disk", 64 << 20)));
    let kept = KeptLog::new(128 << 20).unwrap();
    // The same pool with less room.
    drop(import(&small, None, true).unwrap());
    let pool = import(&large, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    for at in 0..70 {
        let file = write_new(&dataset, &format!("file {at}"), &random(at, 1 << 20));
        set_long(&dataset, &file, &random(at, 5000));
    }
    let acknowledged = content_of(&pool, id);
    drop((dataset, pool));
    let log = left(&kept);
    let pool = import(&small, Some(&log), false).unwrap();
    assert!(pool.suspended().is_some() && content_of(&pool, id) == acknowledged);
    drop(pool);
    let longer = [small.bytes(), vec![0; 64 << 20]].concat();
    let longer = Arc::new(Simulator::with_bytes("disk", longer));
    let pool = import(&longer, Some(&left(&log)), false).unwrap();
    assert!(pool.suspended().is_none() && content_of(&pool, id) == acknowledged);
    pool.commit().unwrap();
    drop(pool);
    assert!(content_of(&import(&longer, None, false).unwrap(), id) == acknowledged);
}

#[test]
fn what_was_held_before_the_pool_failed_is_not_bounded() {
    let device = Arc::new(Simulator::new("disk", 512 << 20));
    let kept = KeptLog::new(4 << 20).unwrap();
    let pool = import(&device, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    let files: Vec<_> = (0..800).map(|at| write_new(&dataset, &format!("file {at}"), &random(at, 100_000))).collect();
    pool.commit().unwrap();
    for file in &files {
        dataset.files().write(file, None, &[1; 100]).unwrap();
    }
    // With a block in the intent log no part is committed: as much is held as becomes frames at once.
    pool.sync_file(&dataset, &files[0]).unwrap();
    let acknowledged = content_of(&pool, id);
    drop((files, dataset));
    let (disk, log) = (Arc::new(device.copy()), left(&kept));
    let opened = store(&disk, false).unwrap();
    opened.store.confirm().unwrap();
    disk.fail_after(0);
    let next = pool_in(opened, Some(&log)).unwrap();
    assert!(next.suspended().is_some() && next.held() > super::super::keeping::HELD_MOST);
    assert!(content_of(&next, id) == acknowledged);
}

#[test]
fn what_cannot_be_written_is_held_within_bounds() {
    let device = Arc::new(Simulator::new("disk", 256 << 20));
    let kept = KeptLog::new(4 << 20).unwrap();
    let pool = import(&device, Some(&kept), true).unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    let files: Vec<_> = (0..600).map(|at| write_new(&dataset, &format!("file {at}"), &random(at, 100_000))).collect();
    pool.commit().unwrap();
    // Each has its last record read.
    for file in &files {
        dataset.files().write(file, None, &[1; 100]).unwrap();
    }
    let acknowledged = content_of(&pool, id);
    drop((files, dataset));
    let (disk, log) = (Arc::new(device.copy()), left(&kept));
    let opened = store(&disk, false).unwrap();
    opened.store.confirm().unwrap();
    disk.fail_after(0);
    let error = pool_in(opened, Some(&log)).unwrap_err().to_string();
    assert!(error.contains("too much memory"), "{error}");
    disk.fail_after(u64::MAX);
    let pool = import(&disk, Some(&left(&log)), false).unwrap();
    assert!(content_of(&pool, id) == acknowledged);
    pool.commit().unwrap();
}
