//! Parts of objects that are kept: fetched once and ahead of readers, believed only where
//! they are whole, within their limit.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::bucket::{Bucket, MemoryBucket, Put};
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
    // Also by the next process.
    let second = cached(&bucket, directory.path(), 16);
    assert!(second.get("seg/01/1-1", Some(0..3 * PART)).unwrap().unwrap() == whole[..3 * PART as usize]);
    assert_eq!(bucket.requests(), requests);
    // Ranges beyond the end of an object, and of a missing object.
    assert!(second.get("seg/01/1-1", Some(PART..9 * PART)).unwrap().unwrap() == whole[PART as usize..]);
    assert_eq!(second.get("seg/03/1-3", Some(0..9)).unwrap(), None);
    // A directory belongs to one process.
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
    // Damage found later by a reader with the right content.
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
        let data = directory.path().join("data").metadata().unwrap();
        let taken = std::os::unix::fs::MetadataExt::blocks(&data) * 512;
        assert!(taken <= (parts + 1) * PART, "{taken} bytes for {parts} parts");
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

/// A bucket that records which parts are requested and how many requests run in parallel. A request for more than two
/// parts (readahead) waits until another one runs, too.
struct Noting {
    bucket: MemoryBucket,
    asked: Mutex<Asked>,
    came: Condvar,
}

#[derive(Default)]
struct Asked {
    parts: Vec<u64>,
    under_way: usize,
    most: usize,
    /// Requests of more than two parts fail.
    fails: bool,
    failed: u64,
}

impl Noting {
    fn holding(whole: &[u8]) -> Arc<Self> {
        let bucket = MemoryBucket::new(1, 0);
        bucket.put("seg/01/1-1", whole).unwrap();
        Arc::new(Self { bucket, asked: Mutex::default(), came: Condvar::new() })
    }

    /// Waits until this is so, but not for ever.
    fn wait(&self, is_so: impl Fn(&Asked) -> bool) {
        self.wait_with(&mut self.asked.lock(), is_so);
    }

    fn wait_with(&self, asked: &mut MutexGuard<'_, Asked>, is_so: impl Fn(&Asked) -> bool) {
        self.came.wait_while_for(asked, |asked| !is_so(asked), Duration::from_secs(60));
    }
}

impl Bucket for Noting {
    fn name(&self) -> &str {
        self.bucket.name()
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.bucket.put(key, body)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        self.bucket.put_new(key, body)
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        let parts = range.clone().map_or(0..0, |range| range.start / PART..range.end.div_ceil(PART));
        let is_ahead = parts.end - parts.start > 2;
        let fails = {
            let mut asked = self.asked.lock();
            asked.parts.extend(parts);
            asked.under_way += 1;
            asked.most = asked.most.max(asked.under_way);
            asked.failed += u64::from(is_ahead && asked.fails);
            self.came.notify_all();
            // One that has failed would keep the other one from being begun.
            if is_ahead {
                self.wait_with(&mut asked, |asked| asked.most > 1);
            }
            is_ahead && asked.fails
        };
        let found = if fails { Err(io::ErrorKind::TimedOut.into()) } else { self.bucket.get(key, range) };
        self.asked.lock().under_way -= 1;
        found
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

#[test]
fn what_comes_next_is_fetched_side_by_side_and_once() {
    let directory = tempfile::tempdir().unwrap();
    let whole = content(200 * PART);
    let bucket = Noting::holding(&whole);
    let cached = Cached::new(Arc::clone(&bucket) as _, Parts::open(directory.path(), 256 * PART).unwrap());
    // As a reader announces it: in steps that end anywhere.
    let mut told = 0;
    for at in 0..200 {
        if at * PART >= told {
            let until = (told + 64 * PART + 777).min(200 * PART);
            cached.expect("seg/01/1-1", told..until);
            told = until / PART * PART;
            bucket.wait(|asked| asked.most > 1);
        }
        let found = cached.get("seg/01/1-1", Some(at * PART..(at + 1) * PART)).unwrap().unwrap();
        assert!(found == whole[(at * PART) as usize..][..PART as usize]);
    }
    drop(cached);
    let mut asked = std::mem::take(&mut *bucket.asked.lock());
    asked.parts.sort_unstable();
    assert_eq!(asked.parts, (0..200).collect::<Vec<_>>());
    assert!(asked.most > 1);
}

#[test]
fn reads_at_random_fetch_what_they_read_and_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let whole = content(200 * PART);
    let bucket = Noting::holding(&whole);
    let cached = Cached::new(Arc::clone(&bucket) as _, Parts::open(directory.path(), 256 * PART).unwrap());
    let places: Vec<u64> = (0..50).map(|at| at * 67 % 200).collect();
    for _ in 0..2 {
        for part in &places {
            cached.get("seg/01/1-1", Some(part * PART + 9..part * PART + 4000)).unwrap().unwrap();
        }
    }
    assert_eq!(bucket.asked.lock().parts, places);
    // Readahead that evicts parts before they are read is not announced.
    assert_eq!(cached.ahead().most, 32 * PART);
}

#[test]
fn a_fetch_ahead_that_fails_harms_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let whole = content(64 * PART);
    let bucket = Noting::holding(&whole);
    bucket.asked.lock().fails = true;
    let cached = Cached::new(Arc::clone(&bucket) as _, Parts::open(directory.path(), 64 * PART).unwrap());
    cached.expect("seg/01/1-1", 0..64 * PART);
    bucket.wait(|asked| asked.failed == 2);
    for part in 0..64 {
        let found = cached.get("seg/01/1-1", Some(part * PART..(part + 1) * PART)).unwrap().unwrap();
        assert!(found == whole[(part * PART) as usize..][..PART as usize]);
    }
    assert_eq!(bucket.asked.lock().failed, 2);
    // The reader of an unavailable part gets the error, and the part once it is available again.
    bucket.bucket.fail_after(Some(0));
    let other = tempfile::tempdir().unwrap();
    let cold = Cached::new(Arc::clone(&bucket) as _, Parts::open(other.path(), 64 * PART).unwrap());
    cold.expect("seg/01/1-1", 0..64 * PART);
    assert_eq!(cold.get("seg/01/1-1", Some(0..9)).unwrap_err().kind(), io::ErrorKind::TimedOut);
    bucket.bucket.fail_after(None);
    assert!(cold.get("seg/01/1-1", Some(0..9)).unwrap().unwrap() == whole[..9]);
}

/// A bucket whose replies arrive in small pieces; the first reply breaks off, and starts again. No piece arrives
/// before the reader has got the earlier ones.
struct InPieces {
    bucket: MemoryBucket,
    broken: Mutex<bool>,
    read: Mutex<u64>,
    came: Condvar,
}

impl Bucket for InPieces {
    fn name(&self) -> &str {
        self.bucket.name()
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.bucket.put(key, body)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        self.bucket.put_new(key, body)
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        self.bucket.get(key, range)
    }

    fn get_by_pieces(&self, key: &str, range: Range<u64>, piece: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let Some(found) = self.bucket.get(key, Some(range.clone()))? else { return Ok(false) };
        let breaks = !std::mem::replace(&mut *self.broken.lock(), true);
        for attempt in u8::from(!breaks)..2 {
            let mut at = range.start;
            for bytes in found.chunks(50_000) {
                if attempt == 0 && at > range.start + 2 * PART {
                    break;
                }
                let mut read = self.read.lock();
                let before = (at / PART).saturating_sub(1);
                self.came.wait_while_for(&mut read, |read| *read < before, Duration::from_secs(60));
                assert!(*read >= before, "nobody reads what has come");
                drop(read);
                piece(at, bytes);
                at += bytes.len() as u64;
            }
        }
        Ok(true)
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

#[test]
fn what_arrives_is_read_before_the_reply_is_at_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let whole = content(7 * PART + 1000);
    let bucket = MemoryBucket::new(1, 0);
    bucket.put("seg/01/1-1", &whole).unwrap();
    let bucket = Arc::new(InPieces { bucket, broken: Mutex::default(), read: Mutex::default(), came: Condvar::new() });
    let cached = Cached::new(Arc::clone(&bucket) as _, Parts::open(directory.path(), 16 * PART).unwrap());
    cached.expect("seg/01/1-1", 0..8 * PART);
    for part in 0..8 {
        let range = part * PART..((part + 1) * PART).min(whole.len() as u64);
        let found = cached.get("seg/01/1-1", Some(range.clone())).unwrap().unwrap();
        assert!(found == whole[range.start as usize..range.end as usize], "{part}");
        *bucket.read.lock() += 1;
        bucket.came.notify_all();
    }
    assert_eq!((cached.figures().misses, bucket.bucket.requests().gets), (8, 1));
}
