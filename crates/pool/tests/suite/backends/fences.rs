//! What ends the turn of a writer that has lost the pool and does not know it: objects that stay.

use super::*;

fn commit(pool: &PoolInBucket, times: usize) {
    for _ in 0..times {
        pool.pool.commit().unwrap();
    }
}

/// A machine stands still with its clocks, another one takes the pool over, and its clock goes days ahead: what has
/// ended the turn of the first stays, whatever the clocks say, and is little.
#[test]
fn a_writer_whose_clocks_stood_still_acknowledges_nothing() {
    for log in [true, false] {
        let ground = InBucket::new(5, 0);
        let first = PoolInBucket::create(&ground);
        first.pool.commit().unwrap();
        first.write("synced").unwrap();
        let mut stood_still = vec![first];
        for _ in 0..3 {
            let then = (ground.clock.load(Ordering::Relaxed), ground.uptime.load(Ordering::Relaxed));
            let other = PoolInBucket::import(&ground);
            assert!(other.has("synced"));
            // A jump: the other one is at a root of a moment ago.
            for days in [2, 4] {
                ground.clock.store(then.0 + days * 86_400, Ordering::Relaxed);
                commit(&other, 520);
            }
            let roots = ground.bucket.keys().iter().filter(|key| key.starts_with("roots/")).count();
            assert!(roots < 1100, "{roots} roots are left");
            ground.clock.store(then.0, Ordering::Relaxed);
            for before in &stood_still {
                // By a block of the log, or by a root.
                let is_refused = if log { before.write("too late").is_err() } else { before.pool.commit().is_err() };
                assert!(is_refused, "acknowledged by a machine that has lost the pool");
            }
            assert!(!other.has("too late"));
            ground.clock.store(then.0 + 4 * 86_400, Ordering::Relaxed);
            stood_still.push(other);
        }
    }
}

/// Of many imports those that are newest have their fences.
#[test]
fn what_ends_turns_goes_after_many_imports() {
    let ground = InBucket::new(5, 0);
    drop(PoolInBucket::create(&ground));
    for _ in 0..270 {
        drop(PoolInBucket::import(&ground));
    }
    let last = PoolInBucket::import(&ground);
    for _ in 0..2 {
        ground.clock.fetch_add(2 * 86_400, Ordering::Relaxed);
        commit(&last, 300);
    }
    let keys = ground.bucket.keys();
    let count = |kind: &str| keys.iter().filter(|key| key.starts_with(kind)).count();
    assert!((250..260).contains(&count("log/")), "{} seals", count("log/"));
    assert!((400..900).contains(&count("roots/")), "{} roots", count("roots/"));
}

/// A root that cannot be read stays, and keeps neither other old roots nor logs that no root needs.
#[test]
fn an_unreadable_root_keeps_nothing_else() {
    for is_refused in [false, true] {
        let ground = InBucket::new(5, 0);
        let pool = PoolInBucket::create(&ground);
        commit(&pool, 20);
        let roots = || ground.bucket.keys().into_iter().filter(|key| key.starts_with("roots/")).collect::<Vec<_>>();
        let unreadable = roots()[10].clone();
        let (left, needed) = ("log/1/00000000000000009999", "log/2/00000000000000009999");
        ground.bucket.put(left, &[1; 40]).unwrap();
        drop(pool);
        if is_refused {
            ground.bucket.refuse(Some(&unreadable));
        } else {
            ground.bucket.put(&unreadable, b"damage").unwrap();
        }
        let pool = PoolInBucket::import(&ground);
        ground.bucket.put(needed, &[1; 40]).unwrap();
        commit(&pool, 520);
        assert!(ground.bucket.keys().iter().any(|key| key == left), "roots of today may need it");
        ground.clock.fetch_add(2 * 86_400, Ordering::Relaxed);
        commit(&pool, 520);
        let keys = ground.bucket.keys();
        let is_there = |wanted: &str| keys.iter().any(|key| key == wanted);
        assert!(is_there(&unreadable) && !is_there(left), "{is_refused}");
        assert!(is_there(needed), "the log of a root that stays");
        assert!(roots().len() < 600, "{} roots are left", roots().len());
    }
}

/// Roots that were put while the clock was months ahead go with later ones that are old.
#[test]
fn roots_of_a_clock_that_was_ahead_are_removed() {
    let ground = InBucket::new(5, 0);
    let then = ground.clock.load(Ordering::Relaxed);
    let pool = PoolInBucket::create(&ground);
    ground.clock.store(then + 90 * 86_400, Ordering::Relaxed);
    commit(&pool, 300);
    ground.clock.store(then + 60, Ordering::Relaxed);
    commit(&pool, 300);
    let roots = || ground.bucket.keys().iter().filter(|key| key.starts_with("roots/")).count();
    assert!(roots() > 550, "{} roots, of which none is a day old", roots());
    ground.clock.store(then + 3 * 86_400, Ordering::Relaxed);
    commit(&pool, 300);
    assert!(roots() < 350, "{} roots are left", roots());
    drop(pool);
    PoolInBucket::import(&ground);
}

/// A store that is full of segments that no root has named for ten minutes takes the next commit.
#[test]
fn a_full_store_gets_room_from_what_no_root_needs() {
    let ground = InBucket::new(1, 0);
    let (backend, first) = ground.new_backend();
    backend.adopt(&first, &mut std::iter::empty()).unwrap();
    backend.begin_epoch(0).unwrap();
    let place = begin(&*backend, 1, WriteStream::Data);
    write(&*backend, 1, &place, WriteStream::Data, 0, &pattern(1, 4096));
    backend.flush().unwrap();
    assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
    backend.remove(&[(1, place.clone())]);
    ground.clock.fetch_add(1, Ordering::Relaxed);
    assert_eq!(backend.put_root(&root(2)).unwrap(), PutRoot::Durable);
    ground.bucket.limit(Some(ground.bucket.size()));
    let new = begin(&*backend, 2, WriteStream::Data);
    write(&*backend, 2, &new, WriteStream::Data, 0, &pattern(2, 4096));
    assert!(backend.flush().is_err());
    assert_eq!(backend.list_unknown(&|_, _| false).unwrap().segments, [(1, place)], "a reader may be at it");
    ground.clock.fetch_add(700, Ordering::Relaxed);
    backend.flush().unwrap();
    assert_eq!(backend.list_unknown(&|_, _| false).unwrap().segments, [(2, new)]);
}

/// Nothing is removed by a writer that is not the newest any more, nor before its root is there.
#[test]
fn a_stalled_writer_removes_nothing() {
    let ground = InBucket::new(1, 0);
    let (backend, first) = ground.new_backend();
    backend.adopt(&first, &mut std::iter::empty()).unwrap();
    backend.begin_epoch(0).unwrap();
    let place = begin(&*backend, 1, WriteStream::Data);
    write(&*backend, 1, &place, WriteStream::Data, 0, &pattern(1, 4096));
    backend.flush().unwrap();
    assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
    backend.remove(&[(1, place.clone())]);
    assert_eq!(backend.list_unknown(&|_, _| false).unwrap().segments.len(), 1, "there is no root without it yet");
    // Another program takes the pool over.
    let (other, _) = ground.import();
    assert_eq!(other.newest_root().unwrap().unwrap().root, first);
    other.adopt(&first, &mut std::iter::empty()).unwrap();
    other.begin_epoch(0).unwrap();
    assert_eq!(other.put_root(&root(2)).unwrap(), PutRoot::Durable);
    assert_eq!(backend.put_root(&root(2)).unwrap(), PutRoot::Fenced { by: "'here'".into() });
    assert_eq!(backend.list_unknown(&|_, _| false).unwrap().segments, [(1, place.clone())]);
    // A segment of the same number does not meet the other's.
    let own = begin(&*other, 1, WriteStream::Data);
    assert_ne!(own, place);
    write(&*other, 1, &own, WriteStream::Data, 0, &pattern(2, 4096));
    other.flush().unwrap();
    assert!(read(&*backend, 1, &place, 4096) == pattern(1, 4096));
    other.remove(&[(1, place)]);
    assert_eq!(other.put_root(&root(3)).unwrap(), PutRoot::Durable);
    assert_eq!(other.list_unknown(&|_, _| false).unwrap().segments.len(), 2, "readers may be at the root before");
    ground.clock.fetch_add(700, Ordering::Relaxed);
    let asked = ground.bucket.requests().lists;
    assert_eq!(other.put_root(&root(4)).unwrap(), PutRoot::Durable);
    assert_eq!(other.list_unknown(&|_, _| false).unwrap().segments, [(1, own)]);
    assert_eq!(other.put_root(&root(5)).unwrap(), PutRoot::Durable);
    assert_eq!(ground.bucket.requests().lists - asked, 2, "one, and that of this test");
}
