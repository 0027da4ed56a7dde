//! Replies of a store that are damaged, and requests that it refuses.

use super::*;

/// What is whole in the bucket is read again where a reply is not.
#[test]
fn a_damaged_reply_costs_no_state() {
    let ground = InBucket::new(5, 0);
    let first = PoolInBucket::create(&ground);
    first.pool.commit().unwrap();
    first.write("synced").unwrap();
    for kind in ["log/", "roots/", "pool/"] {
        ground.bucket.damage_replies(kind, 2);
        assert!(PoolInBucket::import(&ground).has("synced"), "{kind}");
        assert_eq!(ground.bucket.damage_replies(kind, 2), 0, "{kind} was not read");
        let (roots, lost) = Objects::readable_roots(&*ground.bucket, 7).unwrap();
        assert!(!roots.is_empty() && !lost);
        ground.bucket.damage_replies("", 0);
    }
    // What is never whole is damaged.
    ground.bucket.damage_replies("roots/", 3);
    let damaged = ground.open_store(Access::ReadWrite).map(drop).unwrap_err();
    assert!(matches!(damaged, PoolError::Lost { states: 1, .. }), "{damaged}");
}

/// What the log cannot take is answered by a commit, and the log begins anew after it.
#[test]
fn a_block_that_is_refused_is_answered_by_a_commit() {
    let ground = InBucket::new(5, 0);
    let first = PoolInBucket::create(&ground);
    first.pool.commit().unwrap();
    first.write("before").unwrap();
    ground.bucket.refuse(Some("log/"));
    first.write("refused").unwrap();
    first.write("refused as well").unwrap();
    ground.bucket.refuse(None);
    let roots = || ground.bucket.keys().iter().filter(|key| key.starts_with("roots/")).count();
    let before = roots();
    first.write("after").unwrap();
    assert_eq!(roots(), before, "it is in the log");
    drop(first);
    let next = PoolInBucket::import(&ground);
    for name in ["before", "refused", "refused as well", "after"] {
        assert!(next.has(name), "{name}");
    }
}

/// Where a block of the log is damaged, the newest root is not: what was committed is there without the log.
#[test]
fn a_damaged_log_costs_what_it_holds_alone() {
    let ground = InBucket::new(5, 0);
    let first = PoolInBucket::create(&ground);
    first.write("committed").unwrap();
    let txg = first.pool.commit().unwrap();
    first.write("synced").unwrap();
    drop(first);
    let block = ground.bucket.keys().into_iter().find(|key| key.starts_with("log/")).unwrap();
    ground.bucket.rot(&block, 20, 1);
    let Err(damaged) = PoolInBucket::open(ground.open_store(Access::ReadWrite).unwrap()) else { panic!("it is whole") };
    assert!(matches!(damaged, PoolError::Format(_)), "{damaged}");
    let back = PoolInBucket::open(ground.open_store(Access::Rewind(txg)).unwrap()).unwrap();
    assert!(back.has("committed") && !back.has("synced"));
}

/// A store that is away says nothing of what is there: only an object that is gone is damage.
#[test]
fn a_store_that_is_away_is_no_damage() {
    let ground = InBucket::new(1, 0);
    let store = ground.create_store();
    let frame = NewFrame {
        stream: WriteStream::Data,
        kind: FrameKind::Data,
        owner: Owner { dataset: 1, object: 1, offset: 0 },
        birth: Txg(1),
        content: &content(1),
        compression: CompressionSetting::Off,
        checksum: ChecksumKind::Xxh3,
    };
    let pointer = store.write(&frame).unwrap();
    let log_start = LogStart::default();
    store.commit(&Commit { txg: Txg(1), catalog: None, upper: &[], log_start, time: 1 }).unwrap();
    let (reader, _) = ground.open_store(Access::ReadOnly).unwrap();
    let found = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&found);
    reader.watch(move |damaged| hears.lock().unwrap().push(damaged.pointer));
    ground.bucket.fail_after(Some(0));
    reader.read(&pointer).map(drop).unwrap_err();
    assert_eq!(*found.lock().unwrap(), []);
    ground.bucket.fail_after(None);
    ground
        .bucket
        .keys()
        .iter()
        .filter(|key| key.starts_with("seg/"))
        .for_each(|key| ground.bucket.delete(key).unwrap());
    reader.read(&pointer).map(drop).unwrap_err();
    assert_eq!(*found.lock().unwrap(), [pointer]);
}

/// A reply that is wrong once is no damage of the object, and nothing is repaired.
#[test]
fn a_wrong_reply_is_no_repaired_damage() {
    let ground = InBucket::new(1, 0);
    let store = ground.create_store();
    let frame = NewFrame {
        stream: WriteStream::Metadata,
        kind: FrameKind::Data,
        owner: Owner { dataset: 1, object: 1, offset: 0 },
        birth: Txg(1),
        content: &content(1),
        compression: CompressionSetting::Off,
        checksum: ChecksumKind::Xxh3,
    };
    let pointer = store.write(&frame).unwrap();
    let log_start = LogStart::default();
    store.commit(&Commit { txg: Txg(1), catalog: None, upper: &[], log_start, time: 1 }).unwrap();
    drop(store);
    let (store, _) = ground.open_store(Access::ReadWrite).unwrap();
    let found = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&found);
    store.watch(move |damaged| hears.lock().unwrap().push(damaged.mended));
    ground.bucket.damage_replies("seg/", 1);
    assert_eq!(&*store.read(&pointer).unwrap(), content(1));
    assert_eq!(ground.bucket.damage_replies("", 0), 0, "it was read");
    assert_eq!(*found.lock().unwrap(), []);
    assert_eq!(store.mended(), 0);
}
