//! Parts of objects that are kept: fetched once, believed only where they are whole, within their limit.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::bucket::{Bucket, MemoryBucket};
use super::parts::PART;
use super::{Cached, Parts};

fn content(length: u64) -> Vec<u8> {
    (0..length).map(|at| ((at * 31) >> 7) as u8).collect()
}

fn cached(bucket: &Arc<MemoryBucket>, directory: &Path, parts: u64) -> Cached {
    Cached::new(Arc::clone(bucket) as _, Parts::open(directory, parts * PART).unwrap())
}

#[test]
fn what_was_put_or_read_once_is_not_fetched_again() {
    let (bucket, directory) = (Arc::new(MemoryBucket::new(1, 0)), tempfile::tempdir().unwrap());
    let whole = content(3 * PART + 1000);
    bucket.put("seg/01/1-1", &whole).unwrap();
    let first = cached(&bucket, directory.path(), 16);
    for range in [0..10, PART - 5..PART + 5, 100..3 * PART + 1000, 3 * PART..3 * PART + 1000] {
        let found = first.get("seg/01/1-1", Some(range.clone())).unwrap().unwrap();
        assert!(found == whole[range.start as usize..range.end as usize]);
    }
    first.put("seg/02/1-2", &whole[7..]).unwrap();
    let requests = bucket.requests();
    assert!(first.get("seg/02/1-2", Some(0..2 * PART)).unwrap().unwrap() == whole[7..2 * PART as usize + 7]);
    assert_eq!(first.figures().misses, 4);
    drop(first);
    // Also by the next program.
    let second = cached(&bucket, directory.path(), 16);
    assert!(second.get("seg/01/1-1", Some(0..3 * PART)).unwrap().unwrap() == whole[..3 * PART as usize]);
    assert_eq!(bucket.requests(), requests);
    // As much as there is, and what there is not.
    assert!(second.get("seg/01/1-1", Some(PART..9 * PART)).unwrap().unwrap() == whole[PART as usize..]);
    assert_eq!(second.get("seg/03/1-3", Some(0..9)).unwrap(), None);
    // A directory is one program's.
    assert!(Parts::open(directory.path(), PART).is_err());
}

#[test]
fn an_object_that_has_grown_is_fetched_again() {
    let (bucket, directory) = (Arc::new(MemoryBucket::new(1, 0)), tempfile::tempdir().unwrap());
    let whole = content(PART);
    bucket.put("seg/01/1-1", &whole[..1000]).unwrap();
    let cached = cached(&bucket, directory.path(), 16);
    assert!(cached.get("seg/01/1-1", Some(0..1000)).unwrap().unwrap() == whole[..1000]);
    bucket.put("seg/01/1-1", &whole).unwrap();
    assert!(cached.get("seg/01/1-1", Some(10..2000)).unwrap().unwrap() == whole[10..2000]);
}

#[test]
fn damage_of_what_is_kept_is_fetched_again() {
    let (bucket, directory) = (Arc::new(MemoryBucket::new(1, 0)), tempfile::tempdir().unwrap());
    let whole = content(4 * PART);
    cached(&bucket, directory.path(), 16).put("seg/01/1-1", &whole).unwrap();
    for file in ["data", "index"] {
        let file = OpenOptions::new().write(true).open(directory.path().join(file)).unwrap();
        // In the second part, and in the entry of the first.
        file.write_all_at(&[0x55], if file.metadata().unwrap().len() > PART { PART + 17 } else { 9 }).unwrap();
    }
    let cached = cached(&bucket, directory.path(), 16);
    assert!(cached.get("seg/01/1-1", Some(5..4 * PART)).unwrap().unwrap() == whole[5..]);
    assert_eq!(cached.figures().misses, 2);
    // What is found wrong later by whoever knows what is right.
    let file = OpenOptions::new().write(true).open(directory.path().join("data")).unwrap();
    file.write_all_at(&[0x55], 3 * PART + 17).unwrap();
    assert!(cached.get("seg/01/1-1", Some(0..4 * PART)).unwrap().unwrap() != whole);
    assert!(
        cached.get_anew("seg/01/1-1", Some(3 * PART + 10..3 * PART + 20)).unwrap().unwrap()
            == whole[3 * PART as usize + 10..][..10]
    );
    assert!(cached.get_anew("seg/01/1-1", None).unwrap().unwrap() == whole);
    assert!(cached.get("seg/01/1-1", Some(0..4 * PART)).unwrap().unwrap() == whole);
}

#[test]
fn what_is_kept_stays_below_its_limit() {
    let (bucket, directory) = (Arc::new(MemoryBucket::new(1, 0)), tempfile::tempdir().unwrap());
    let whole = content(40 * PART);
    bucket.put("seg/01/1-1", &whole).unwrap();
    let first = cached(&bucket, directory.path(), 8);
    for round in 0..3 {
        for part in 0..40 {
            let range = part * PART + round..part * PART + 100;
            let found = first.get("seg/01/1-1", Some(range.clone())).unwrap().unwrap();
            assert!(found == whole[range.start as usize..range.end as usize]);
        }
    }
    assert!(first.figures().bytes <= 8 * PART);
    drop(first);
    // With a lower limit and with a higher one.
    for parts in [3, 20] {
        let next = cached(&bucket, directory.path(), parts);
        assert!(next.get("seg/01/1-1", Some(0..40 * PART)).unwrap().unwrap() == whole);
        assert!(next.figures().bytes <= parts * PART);
        assert_eq!(directory.path().join("data").metadata().unwrap().len(), parts * PART);
    }
}

#[test]
fn what_many_want_is_fetched_once() {
    let (bucket, directory) = (Arc::new(MemoryBucket::new(1, 0)), tempfile::tempdir().unwrap());
    let whole = content(64 * PART);
    bucket.put("seg/01/1-1", &whole).unwrap();
    let cached = cached(&bucket, directory.path(), 64);
    cached.expect("seg/01/1-1", 0..64 * PART);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (cached, whole) = (&cached, &whole);
            scope.spawn(move || {
                for part in 0..64 {
                    let from = (part * 7 + thread) % 64 * PART + 11;
                    let found = cached.get("seg/01/1-1", Some(from..from + 50)).unwrap().unwrap();
                    assert!(found == whole[from as usize..from as usize + 50]);
                }
            });
        }
    });
    assert_eq!(cached.figures().misses, 64);
}
