//! Tests of the background threads: periodic commits, back-pressure, suspension, freeing during
//! operations, and the states that a rewind discards.

use std::time::Duration;

use super::*;
use crate::device::Simulator;

/// Waits for the effect of another thread.
fn until(what: impl Fn() -> bool) {
    while !what() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn new_pool() -> (Arc<MapStorage>, Arc<Pool>, Arc<Dataset>) {
    let storage = Arc::new(MapStorage::default());
    let pool = Arc::new(Pool::create(config(&storage), "tank").unwrap());
    let dataset = pool.dataset(pool.find("tank").unwrap().unwrap()).unwrap();
    (storage, pool, dataset)
}

#[test]
fn what_changes_becomes_durable_by_itself_and_nothing_is_written_for_nothing() {
    let (storage, pool, dataset) = new_pool();
    let committer = pool.start_committer(Pace { every: Duration::from_millis(1), ..Pace::default() }).unwrap();
    put(&dataset, "a", &[7; 300_000]);
    until(|| pool.held() == 0 && !dataset.has_changes());
    committer.stop().unwrap();
    assert_eq!(pool.held(), 0);
    let durable = storage.state.lock().durable.0;
    pool.commit_if_changed().unwrap();
    assert_eq!(storage.state.lock().durable.0, durable, "an idle pool is left alone");
    let pool = reopen(&storage);
    let dataset = pool.dataset(dataset.id()).unwrap();
    assert_eq!(contents(dataset.files()), Tree::from([("a".to_owned(), vec![7; 300_000])]));
}

#[test]
fn a_file_is_written_while_commits_store_it_part_by_part() {
    let (storage, pool, dataset) = new_pool();
    let mut expected = vec![1u8; 4 << 20];
    put(&dataset, "a", &expected);
    pool.commit().unwrap();
    let (file, _) = dataset.files().look_up(&dataset.files().root(), b"a").unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut state = 7u64;
            for step in 0..6000u32 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 33) as usize % (expected.len() + (64 << 10) - 5000);
                let data = step.to_le_bytes().repeat(1 + (state >> 60) as usize * 70);
                dataset.files().write(&file, Some(at as u64), &data).unwrap();
                if expected.len() < at + data.len() {
                    expected.resize(at + data.len(), 0);
                }
                expected[at..at + data.len()].copy_from_slice(&data);
            }
        });
        while !writer.is_finished() {
            pool.commit().unwrap();
        }
    });
    pool.commit().unwrap();
    check(&pool, &storage);
    assert!(contents(dataset.files())["a"] == expected);
    assert!(contents(reopen(&storage).dataset(dataset.id()).unwrap().files())["a"] == expected);
}

#[test]
fn a_commit_begins_before_content_needs_more_segments_than_are_empty() {
    let (storage, pool, dataset) = new_pool();
    storage.before_cleaning.store(16 << 20, std::sync::atomic::Ordering::Relaxed);
    let bounds = Pace { every: Duration::from_secs(3600), begin: 1 << 40, most: 1 << 40, ..Pace::default() };
    let file = make(&dataset, &dataset.files().root(), "parts", FileType::Regular);
    let committer = pool.start_committer(bounds).unwrap();
    let before = storage.state.lock().durable.0;
    for record in 0..64u64 {
        dataset.files().write(&file, Some(record << 17), &[3; 100_000]).unwrap();
    }
    until(|| storage.state.lock().durable.0 > before);
    // Whole records are stored at once: what they replace is freed by a commit as well.
    let before = storage.state.lock().durable.0;
    for _ in 0..8 {
        dataset.files().write(&file, Some(0), &[9; 1 << 20]).unwrap();
    }
    until(|| storage.state.lock().durable.0 > before);
    committer.stop().unwrap();
    check(&pool, &storage);
}

#[test]
fn writers_wait_for_room_and_lose_nothing() {
    let (storage, pool, dataset) = new_pool();
    let committer = pool
        .start_committer(Pace { every: Duration::from_secs(3600), begin: 100_000, most: 400_000, ..Pace::default() })
        .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3u8 {
            let (pool, dataset) = (&pool, &dataset);
            scope.spawn(move || {
                let file = make(dataset, &dataset.files().root(), &format!("f{thread}"), FileType::Regular);
                for at in 0..300u64 {
                    dataset.files().write(&file, Some(at * 7000), &[thread + 1; 7000]).unwrap();
                    // An operation that was admitted may finish; one write is at most a record.
                    assert!(pool.held() < 400_000 + 3 * 300_000, "{}", pool.held());
                }
            });
        }
    });
    committer.stop().unwrap();
    check(&pool, &storage);
    let all = contents(reopen(&storage).dataset(dataset.id()).unwrap().files());
    assert!((0..3u8).all(|thread| all[&format!("f{thread}")] == vec![thread + 1; 300 * 7000]));
}

#[test]
fn a_failed_commit_suspends_the_pool_and_tells_whoever_waits() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = Arc::new(on_device(&device, true));
    let dataset = pool.dataset(pool.find("tank").unwrap().unwrap()).unwrap();
    put(&dataset, "before", b"durable");
    pool.commit().unwrap();
    let committer = pool
        .start_committer(Pace { every: Duration::from_secs(3600), begin: 50_000, most: 100_000, ..Pace::default() })
        .unwrap();
    let file = make(&dataset, &dataset.files().root(), "file", FileType::Regular);
    device.fail_after(0);
    // A write eventually waits for room that never comes, or gets the failure itself.
    let error = (0..10_000u64).find_map(|at| dataset.files().write(&file, Some(at * 5000), &[1; 5000]).err());
    assert!(matches!(error, Some(crate::files::FileError::Pool(_))), "{error:?}");
    until(|| pool.suspended().is_some());
    assert!(dataset.files().unlink(&dataset.files().root(), b"before").is_err());
    assert!(pool.sync_file(&dataset, &file).is_err());
    assert!(committer.stop().is_err());
    drop((file, dataset, pool));
    device.crash(1);
    let pool = on_device(&device, false);
    let dataset = pool.dataset(pool.find("tank").unwrap().unwrap()).unwrap();
    assert_eq!(contents(dataset.files())["before"], b"durable");
}

#[test]
fn an_fsync_during_a_commit_waits_for_it_where_frames_are_what_was_written() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = on_device(&device, true);
    let dataset = pool.dataset(pool.find("tank").unwrap().unwrap()).unwrap();
    let files = dataset.files();
    let file = make(&dataset, &files.root(), "file", FileType::Regular);
    pool.sync_file(&dataset, &file).unwrap();
    for round in 1..3u8 {
        files.write(&file, Some(0), &vec![round; 256 << 10]).unwrap();
        // A commit has begun: no content of the file waits in memory any more, and no root
        // references it yet.
        files.flush_most().unwrap();
        let log = pool.log.get().unwrap();
        let ticket = match files.record_content(&file).unwrap() {
            crate::files::Durability::Committed => continue,
            crate::files::Durability::Logged(ticket) => ticket,
            crate::files::Durability::Recorded => log.newest(),
        };
        assert!(log.flush(ticket).unwrap().is_some(), "durable before any root has it");
        pool.commit().unwrap();
        assert!(log.flush(ticket).unwrap().is_none());
        pool.sync_file(&dataset, &file).unwrap();
    }
}

#[test]
fn files_without_a_name_are_freed_beside_operations() {
    let (storage, pool, dataset) = new_pool();
    let empty = { storage.state.lock().frames.len() };
    let files = dataset.files();
    let file = make(&dataset, &files.root(), "large", FileType::Regular);
    files.set_storing(Storing { record_shift: 9, ..pool.storing() });
    files.write(&file, Some(0), &(0..600_000u32).map(|at| (at / 100) as u8 | 1).collect::<Vec<_>>()).unwrap();
    pool.commit().unwrap();
    assert!(storage.state.lock().frames.len() > empty + 1000);
    files.unlink(&files.root(), b"large").unwrap();
    drop(file);
    // In steps, as the chores do it: each frees some rows, and the remaining orphans stay known.
    let mut steps = 0;
    while files.free_released(100).unwrap().more {
        steps += 1;
    }
    assert!(steps >= 1, "{steps}");
    check(&pool, &storage);
    assert_eq!(files.objects(), 1);
    let committer = pool.start_committer(Pace { every: Duration::from_millis(1), ..Pace::default() }).unwrap();
    let file = make(&dataset, &files.root(), "other", FileType::Regular);
    files.write(&file, Some(0), &[9; 100_000]).unwrap();
    files.unlink(&files.root(), b"other").unwrap();
    drop(file);
    until(|| files.objects() == 1);
    committer.stop().unwrap();
    check(&pool, &storage);
}

#[test]
fn what_is_destroyed_is_freed_in_steps_over_crashes() {
    let (storage, pool, _) = new_pool();
    let top = pool.find("tank").unwrap().unwrap();
    let id = pool.create_dataset(&NewDataset::named(top, "large")).unwrap();
    let fill = |pool: &Pool, names: std::ops::Range<u32>| {
        let dataset = pool.dataset(id).unwrap();
        dataset.files().set_storing(Storing { record_shift: 9, ..pool.storing() });
        names.for_each(|number| put(&dataset, &format!("f{number}"), &vec![number as u8 | 1; 60_000]));
    };
    fill(&pool, 0..10);
    pool.snapshot(&[(id, "kept".to_owned())]).unwrap();
    fill(&pool, 5..20);
    pool.commit().unwrap();
    let full = storage.state.lock().frames.len();
    pool.roll_back(id, "kept").unwrap();
    let steps = |mut pool: Arc<Pool>| {
        let mut steps = 0;
        loop {
            let before = storage.state.lock().frames.len();
            pool.commit().unwrap();
            steps += usize::from(storage.state.lock().frames.len() < before);
            let more = pool.is_freeing();
            // The importer makes the next step.
            drop(pool);
            pool = Arc::new(reopen(&storage));
            if !more {
                return (pool, steps);
            }
        }
    };
    let (pool, after_rollback) = steps(pool);
    assert!(after_rollback > 1, "{after_rollback}");
    check(&pool, &storage);
    assert_eq!(contents(pool.dataset(id).unwrap().files()).len(), 10);
    pool.destroy_snapshot(id, "kept", false).unwrap();
    pool.destroy_dataset(id).unwrap();
    let (pool, after_destroying) = steps(pool);
    assert!(after_destroying > 1, "{after_destroying}");
    check(&pool, &storage);
    assert!(storage.state.lock().frames.len() < full / 10);
}

#[test]
fn a_rewind_replays_nothing_of_what_it_gives_up() {
    use crate::device::Device;
    use crate::store::{Access, Import, Store};
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = on_device(&device, true);
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    put(&dataset, "kept", b"one");
    let kept = pool.commit().unwrap();
    for round in 0..2u8 {
        put(&dataset, &format!("synced {round}"), &[round; 100]);
        let (file, _) = dataset.files().look_up(&dataset.files().root(), format!("synced {round}").as_bytes()).unwrap();
        pool.sync_file(&dataset, &file).unwrap();
        if round == 0 {
            pool.commit().unwrap();
        }
    }
    drop((dataset, pool));
    // As it is: everything that was synced.
    let whole = |device: &Arc<Simulator>| {
        let pool = on_device(device, false);
        contents(pool.dataset(id).unwrap().files()).into_keys().collect::<Vec<_>>()
    };
    let copy = Arc::new(Simulator::with_bytes("copy", device.bytes()));
    assert_eq!(whole(&copy), ["kept", "synced 0", "synced 1"]);
    // The rewind itself is one record: a crash right behind it, before anything else is done, finds
    // the state that was asked for.
    for finished in [false, true] {
        let copy = Arc::new(Simulator::with_bytes("copy", device.bytes()));
        let devices = vec![Arc::clone(&copy) as Arc<dyn Device>];
        let import = Import { access: Access::Rewind(kept), name: None, host: (1, "here".to_owned()), time: 3 };
        let (store, root) = Store::open(devices, &import).unwrap();
        assert_eq!(root.txg, kept);
        store.confirm().unwrap();
        if finished {
            let store = Arc::new(store);
            let log = Some(store.log().unwrap());
            let config = PoolConfig { log, storage: store, ..config(&Arc::new(MapStorage::default())) };
            let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
            let pool = Pool::open(config, &durable).unwrap();
            let dataset = pool.dataset(id).unwrap();
            put(&dataset, "new", b"after the rewind");
            let (file, _) = dataset.files().look_up(&dataset.files().root(), b"new").unwrap();
            pool.sync_file(&dataset, &file).unwrap();
        }
        copy.crash(5);
        assert_eq!(whole(&copy), if finished { vec!["kept", "new"] } else { vec!["kept"] });
    }
}

#[test]
fn nobody_waits_at_the_table_for_a_device() {
    let (storage, pool, dataset) = new_pool();
    let id = dataset.id();
    let files = dataset.files();
    let name = |at: u32| format!("a name that is long enough for many leaves {at}");
    (0..4000).for_each(|at| drop(make(&dataset, &files.root(), &name(at), FileType::Regular)));
    files.set_storing(Storing { record_shift: 9, ..pool.storing() });
    let (large, _) = files.look_up(&files.root(), name(7).as_bytes()).unwrap();
    files.write(&large, Some(0), &(0..1_000_000u32).map(|at| (at / 100) as u8 | 1).collect::<Vec<_>>()).unwrap();
    let number = large.number();
    pool.commit().unwrap();
    drop((large, dataset, pool));

    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    let counted = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let (counting, looking) = (Arc::clone(&counted), Arc::clone(&dataset));
    *storage.on_read.lock() = Some(Box::new(move || {
        counting.0.fetch_add(1, Ordering::Relaxed);
        // The thread of the listing readahead holds no lock: another thread may hold it meanwhile.
        let ahead = std::thread::current().name() == Some("pool-listing");
        counting.1.fetch_add(u64::from(!ahead && !looking.files().table_is_free()), Ordering::Relaxed);
    }));
    let files = dataset.files();
    assert_eq!(files.list(&files.root(), 0, true, usize::MAX).unwrap().len(), 4000);
    let large = files.inode(number);
    let mut content = vec![0; 100_000];
    for part in [0, 4, 9] {
        files.read(&large, part * 100_000, &mut content).unwrap();
        assert_eq!(content[0], (part * 1000) as u8 | 1);
    }
    *storage.on_read.lock() = None;
    let (reads, waited) = (counted.0.load(Ordering::Relaxed), counted.1.load(Ordering::Relaxed));
    assert!(reads > 20 && waited == 0, "{waited} of {reads} reads under the table's lock");
}

#[test]
fn a_commit_that_waits_for_an_operation_without_end_is_reported_and_suspends() {
    let (_, pool, dataset) = new_pool();
    put(&dataset, "a", &[7; 3000]);
    let pace = Pace { every: Duration::from_secs(3600), stuck: Duration::from_millis(60), ..Pace::default() };
    let committer = pool.start_committer(pace).unwrap();
    let (asked, reasons) = (Mutex::new(0), Arc::new(Mutex::new(Vec::new())));
    let kept = Arc::clone(&reasons);
    pool.when_stuck(move |why| {
        kept.lock().push(why.to_owned());
        *asked.lock() += 1;
        // A device answers late; then all operations are to wait.
        match *asked.lock() {
            1 => Stuck::Excused,
            2 => Stuck::Wait,
            _ => Stuck::Suspend,
        }
    });
    let entered = pool.gate.enter();
    let committing = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || pool.commit()
    });
    let failed = committing.join().unwrap();
    assert!(matches!(failed, Err(PoolError::Suspended { .. })), "{failed:?}");
    assert!(pool.suspended().is_some());
    let reasons = reasons.lock();
    assert!(reasons.len() >= 3 && reasons[0].contains("running.rs"), "{reasons:?}");
    // All other operations get an error.
    assert!(dataset.files().unlink(&dataset.files().root(), b"a").is_err());
    drop(entered);
    assert!(committer.stop().is_err());
}
