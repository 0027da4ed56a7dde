//! Epochs of writers: none is used twice, whichever roots are lost or given up.

use super::*;

/// The objects of kinds whose names contain an epoch.
fn of_epochs(ground: &InBucket) -> BTreeMap<String, Vec<u8>> {
    let keys = ground.bucket.keys().into_iter().filter(|key| key.starts_with("seg/") || key.starts_with("log/"));
    keys.map(|key| (key.clone(), ground.bucket.get(&key, None).unwrap().unwrap())).collect()
}

fn remove(ground: &InBucket, kind: &str, but: &[String]) {
    let keys = ground.bucket.keys().into_iter().filter(|key| key.starts_with(kind) && !but.contains(key));
    keys.for_each(|key| ground.bucket.delete(&key).unwrap());
}

/// An import of which all roots are lost leaves segments and a log. The next one writes over none of them, keeps what
/// it has synced and committed, and removes only what is not its own.
#[test]
fn what_an_import_without_roots_has_left_is_not_taken_for_the_next_ones() {
    for (is_older_version, commits) in [(false, 0), (false, 3), (true, 0), (true, 3)] {
        let ground = InBucket::new(6, 0);
        let first = PoolInBucket::create(&ground);
        first.write("first").unwrap();
        first.pool.commit().unwrap();
        drop(first);
        let before = ground.bucket.keys();
        let lost = PoolInBucket::import(&ground);
        for number in 0..6 {
            lost.write(&format!("lost {number}")).unwrap();
            if number < commits {
                lost.pool.commit().unwrap();
            }
        }
        drop(lost);
        remove(&ground, "roots/", &before);
        if is_older_version {
            remove(&ground, "epochs/", &[]);
        }
        let left = of_epochs(&ground);

        let next = PoolInBucket::import(&ground);
        assert_eq!(next.has("lost 5"), commits == 0, "it builds on nothing that is lost, or it is left out");
        next.write("committed").unwrap();
        next.pool.commit().unwrap();
        next.write("synced").unwrap();
        let now = of_epochs(&ground);
        assert!(left.iter().filter(|(key, _)| key.starts_with("seg/")).all(|(key, body)| now.get(key) == Some(body)));
        drop(next);
        let again = PoolInBucket::import(&ground);
        assert!(["first", "committed", "synced"].iter().all(|name| again.has(name)));
        for number in 0..3 {
            ground.clock.fetch_add(700, Ordering::Relaxed);
            again.write(&format!("later {number}")).unwrap();
            again.pool.commit().unwrap();
        }
        drop(again);
        let last = PoolInBucket::import(&ground);
        for name in ["first", "committed", "synced", "later 0", "later 2"] {
            assert!(last.has(name), "{name}; older version: {is_older_version}, commits: {commits}");
        }
    }
}

/// After a newest root that is damaged, a state before it is gone back to: what is synced from then on is durable.
#[test]
fn what_is_synced_after_a_rewind_past_a_damaged_root_is_there() {
    for is_older_version in [false, true] {
        let ground = InBucket::new(6, 0);
        let first = PoolInBucket::create(&ground);
        first.write("first").unwrap();
        first.pool.commit().unwrap();
        drop(first);
        let before = ground.bucket.keys();
        let lost = PoolInBucket::import(&ground);
        (0..4).for_each(|number| lost.write(&format!("lost {number}")).unwrap());
        drop(lost);
        for key in ground.bucket.keys().iter().filter(|key| key.starts_with("roots/") && !before.contains(key)) {
            ground.bucket.rot(key, 100, 1);
        }
        if is_older_version {
            remove(&ground, "epochs/", &[]);
        }
        let Err(PoolError::Lost { txg, .. }) = ground.open_store(Access::ReadWrite).map(|_| ()) else {
            panic!("the newest root is damaged")
        };
        let pool = PoolInBucket::open(ground.open_store(Access::Rewind(txg)).unwrap()).unwrap();
        assert!(pool.has("first"));
        pool.write("synced").unwrap();
        drop(pool);
        let pool = PoolInBucket::import(&ground);
        assert!(pool.has("first") && pool.has("synced") && !pool.has("lost 1"));
    }
}

/// An object that is there under the name of a new segment is not put over.
#[test]
fn an_object_of_unknown_origin_is_not_put_over() {
    let ground = InBucket::new(6, 0);
    let (backend, first) = ground.new_backend();
    backend.adopt(&first, &mut std::iter::empty()).unwrap();
    backend.begin_epoch(0).unwrap();
    let place = begin(&*backend, 1, WriteStream::Data);
    let key = backend.label_of(SegmentAt { segment: 1, place: &place });
    ground.bucket.put(&key, b"another's").unwrap();
    write(&*backend, 1, &place, WriteStream::Data, 0, &pattern(1, 4096));
    let refused = backend.flush().unwrap_err().to_string();
    assert!(refused.contains(&key), "{refused}");
    assert_eq!(ground.bucket.get(&key, None).unwrap().unwrap(), b"another's");
}

/// Two programs that import a pool at the same moment have two epochs.
#[test]
fn imports_at_the_same_moment_have_epochs_of_their_own() {
    let ground = InBucket::new(6, 3);
    let (backend, first) = ground.new_backend();
    backend.begin_epoch(0).unwrap();
    assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
    let writers: Vec<_> = (0..5).map(|_| ground.import().0).collect();
    let mut places = Vec::new();
    for writer in &writers {
        writer.newest_root().unwrap();
        writer.begin_epoch(0).unwrap();
        assert!(!writer.begin_epoch(0).unwrap(), "it has one");
        places.push(begin(&**writer, 1, WriteStream::Data).first().unwrap().slot);
    }
    assert!(places.is_sorted_by(|one, other| one < other), "{places:?}");
}
