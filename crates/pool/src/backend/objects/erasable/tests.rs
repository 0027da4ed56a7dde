//! Erasable keys in a bucket that loses requests and replies, with writers that overtake each other.

use std::sync::Arc;

use super::*;
use crate::backend::{MemoryBucket, WriterId};
use crate::store::{Access, Commit, Import, NewPool, Store};
use crate::{label::LogStart, pointer::Txg};

const POOL: u64 = 7;

fn key(byte: u8) -> SecretKey {
    SecretKey::take(&mut [byte; KEY])
}

/// The backend of a writer with this number.
fn objects(bucket: &Arc<MemoryBucket>, nonce: u64) -> Arc<Objects> {
    let writer =
        WriterId { nonce, host: format!("host{nonce}"), clock: Box::new(|| 1_800_000_000), uptime: Box::new(|| 1) };
    Arc::new(Objects::new(Arc::clone(bucket) as _, POOL, 1 << 20, 64 << 20, writer))
}

fn create(bucket: &Arc<MemoryBucket>) -> Store {
    let new = NewPool {
        name: "tank".to_owned(),
        guid: POOL,
        host: (1, "here".to_owned()),
        time: 1_800_000_000,
        redundant_metadata: false,
    };
    let (store, _) = Store::create_in(objects(bucket, 1), &new, 64 << 20).unwrap();
    store.allow_sealed(1_800_000_000).unwrap();
    store
}

/// Another machine takes the pool over.
fn import(bucket: &Arc<MemoryBucket>, nonce: u64) -> Store {
    let identity = Objects::find(&**bucket).unwrap().unwrap();
    let import =
        Import { access: Access::ReadWrite, name: None, host: (nonce, "there".to_owned()), time: 1_800_000_001 };
    let (store, _) = Store::open_in(objects(bucket, nonce), identity, &import).unwrap();
    store.confirm().unwrap();
    store
}

fn keys(store: &Store) -> Vec<(u64, u8)> {
    store.erasable_keys().unwrap().iter().map(|(sequence, key)| (*sequence, key.expose()[0])).collect()
}

fn commit(store: &Store, txg: u64) -> Result<()> {
    let log_start = LogStart::default();
    store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &[], log_start, time: 1_800_000_002 })
}

#[test]
fn keys_are_added_renewed_and_found_by_the_next_writer() {
    for seed in 0..30 {
        // Up to one in six of the requests or replies is lost.
        let bucket = Arc::new(MemoryBucket::new(seed, if seed == 0 { 0 } else { 5 + seed }));
        let store = create(&bucket);
        assert!(keys(&store).is_empty());
        assert_eq!(store.add_erasable(&key(0xaa)).unwrap(), 1);
        assert_eq!(store.add_erasable(&key(0xbb)).unwrap(), 2);
        assert_eq!(keys(&store), [(1, 0xaa), (2, 0xbb)]);
        assert!(store.keep_erasable(3).is_err());
        commit(&store, 1).unwrap();
        assert_eq!(store.keep_erasable(2).unwrap(), Vec::<String>::new());
        assert_eq!(keys(&store), [(2, 0xbb)]);
        let store = import(&bucket, 2);
        assert_eq!(keys(&store), [(2, 0xbb)]);
        assert_eq!(store.add_erasable(&key(0xcc)).unwrap(), 3);
        store.keep_erasable(2).unwrap();
        assert_eq!(keys(&store), [(2, 0xbb)], "a renewal that was given up");
        let objects = bucket.keys();
        assert_eq!(objects.iter().filter(|key| key.starts_with(KEYS)).count(), 1, "nothing else is left");
    }
}

/// A writer that has lost the pool neither adds nor destroys a key; one that it had left does no harm.
#[test]
fn an_overtaken_writer_destroys_nothing() {
    let bucket = Arc::new(MemoryBucket::new(5, 0));
    let first = create(&bucket);
    first.add_erasable(&key(0xaa)).unwrap();
    first.add_erasable(&key(0xbb)).unwrap();
    commit(&first, 1).unwrap();
    let second = import(&bucket, 2);
    assert_eq!(second.add_erasable(&key(0xcc)).unwrap(), 3);
    commit(&second, 2).unwrap();
    for _ in 0..2 {
        assert!(matches!(first.add_erasable(&key(0xdd)), Err(PoolError::Refused(_) | PoolError::Suspended { .. })));
        assert!(matches!(first.keep_erasable(1), Err(PoolError::Refused(_) | PoolError::Suspended { .. })));
        assert_eq!(keys(&second), [(1, 0xaa), (2, 0xbb), (3, 0xcc)]);
        assert!(commit(&first, 2).is_err());
    }
    second.keep_erasable(3).unwrap();
    assert_eq!(keys(&second), [(3, 0xcc)]);
}

#[test]
fn damaged_keys_and_names_of_others_are_no_keys() {
    let bucket = Arc::new(MemoryBucket::new(6, 0));
    let store = create(&bucket);
    store.add_erasable(&key(0xaa)).unwrap();
    store.add_erasable(&key(0xbb)).unwrap();
    for name in ["erase/1", "erase/x", "erase/00000000000000000000"] {
        assert!(make(&*bucket, name, b"of another program").unwrap());
    }
    // The key of another number, and one with a changed bit.
    let body = crate::backend::Bucket::get(&*bucket, &object_key(1), None).unwrap().unwrap();
    assert!(make(&*bucket, &object_key(9), &body).unwrap());
    assert_eq!(keys(&store), [(1, 0xaa), (2, 0xbb)]);
    for offset in [0, 31, 32, 47] {
        bucket.rot(&object_key(1), offset, 3);
        assert_eq!(keys(&store), [(2, 0xbb)]);
        assert!(store.keep_erasable(1).is_err(), "nothing is destroyed for a damaged key");
        bucket.rot(&object_key(1), offset, 3);
    }
    assert_eq!(keys(&store), [(1, 0xaa), (2, 0xbb)]);
    // A reply that is damaged on its way is read again.
    bucket.damage_replies("erase/", 1);
    assert_eq!(keys(&store), [(1, 0xaa), (2, 0xbb)]);
    store.keep_erasable(2).unwrap();
    assert_eq!(keys(&store), [(2, 0xbb)]);
}
