//! Imports of a pool in a bucket that are refused or meet its writer, and the removal of a pool that is cut short.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use nacre_pool::backend::{Bucket, MemoryBucket, Put};
use nacre_pool::label::PoolState;
use parking_lot::Mutex;

use super::super::devices::Opened;
use super::super::in_bucket::{Remains, find};
use super::*;
use crate::failing::Failing;

/// No directory of this machine has files of a pool at it.
const ADDRESS: &str = "file:///nowhere";

/// Import parameters of one machine: its random numbers are its own.
fn opening_on(machine: u64) -> Opening {
    let count = AtomicU64::new(machine << 32);
    let entropy = Arc::new(move || count.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed));
    Opening { host: (machine, format!("machine {machine}")), entropy, ..opening() }
}

fn made(bucket: &Arc<MemoryBucket>) -> Imported {
    Imported::create_in((Arc::clone(bucket) as _, ADDRESS.to_owned()), None, "tank", &[], opening_on(1)).unwrap()
}

fn imported(bucket: Arc<dyn Bucket>, machine: u64) -> Result<Imported, Refusal> {
    Imported::open(Opened::Bucket(bucket, ADDRESS.to_owned()), Access::ReadWrite, None, opening_on(machine))
}

fn objects(bucket: &MemoryBucket) -> BTreeMap<String, Vec<u8>> {
    bucket.keys().into_iter().map(|key| (key.clone(), bucket.get(&key, None).unwrap().unwrap())).collect()
}

/// A bucket in which something happens before each read of a segment, so often.
struct Meddled {
    bucket: Arc<MemoryBucket>,
    times: Mutex<u64>,
    act: Box<dyn Fn() + Send + Sync>,
}

impl Bucket for Meddled {
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
        if key.starts_with("seg/") {
            let mut times = self.times.lock();
            if *times > 0 {
                *times -= 1;
                drop(times);
                (self.act)();
            }
        }
        self.bucket.get(key, range)
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

#[test]
fn an_import_that_is_refused_leaves_the_bucket_as_it_was() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    write(&pool, "file", 100_000);
    pool.export().unwrap();
    let catalog = pool.store.root().catalog.unwrap();
    let own = format!("-{}", catalog.segment);
    let lost: Vec<String> = bucket.keys().into_iter().filter(|key| key.ends_with(&own)).collect();
    assert_eq!(lost.len(), 1, "{:?}", bucket.keys());
    bucket.delete(&lost[0]).unwrap();
    let before = objects(&bucket);
    let refusal = imported(Arc::clone(&bucket) as _, 2).unwrap_err();
    assert!(refusal.what.contains("the catalog, which lists its file systems, is lost or damaged"), "{refusal}");
    let after = objects(&bucket);
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    assert!(after == before);
}

/// Work of a writer while its pool was imported on another machine.
#[derive(Clone, Copy, Default)]
struct WentOn {
    /// Files that it has synced.
    synced: u64,
    is_fenced: bool,
}

#[test]
fn a_pool_is_taken_over_from_a_writer_that_goes_on_meanwhile() {
    // After three times, the pool is taken over before its catalog is read.
    for commits in [1, 2, 6, 1000] {
        let bucket = Arc::new(MemoryBucket::new(1, 0));
        let writer = Arc::new(made(&bucket));
        write(&writer, "first", 1000);
        ask(&writer, PoolRequest::Sync).unwrap();
        let went_on = Arc::new(Mutex::new(WentOn::default()));
        let (behind, so_far) = (Arc::clone(&writer), Arc::clone(&went_on));
        let act = move || {
            // Threads of the import read at the same time.
            let mut so_far = so_far.lock();
            if so_far.is_fenced {
                return;
            }
            write(&behind, &format!("more{}", so_far.synced), 1000);
            match ask(&behind, PoolRequest::Sync) {
                Ok(_) => so_far.synced += 1,
                Err(_) => so_far.is_fenced = true,
            }
        };
        let meddled = Meddled { bucket: Arc::clone(&bucket), times: Mutex::new(commits), act: Box::new(act) };
        let taken = imported(Arc::new(meddled), 2).unwrap();
        let root = taken.pool.dataset(taken.pool.root().unwrap()).unwrap();
        let files = root.files();
        assert!(files.look_up(&files.root(), b"first").is_ok());
        let WentOn { synced, is_fenced } = *went_on.lock();
        for number in 0..synced {
            let name = format!("more{number}");
            assert!(files.look_up(&files.root(), name.as_bytes()).is_ok(), "{name} of {commits}");
        }
        write(&taken, "taken", 1000);
        ask(&taken, PoolRequest::Sync).unwrap();
        if !is_fenced {
            write(&writer, "late", 1000);
            assert!(ask(&writer, PoolRequest::Sync).is_err());
        }
    }
}

#[test]
fn another_machine_that_imports_meanwhile_has_the_pool() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    pool.export().unwrap();
    let (other, behind) = (Arc::new(Mutex::new(None)), Arc::clone(&bucket));
    let first = Arc::clone(&other);
    let act = move || *first.lock() = Some(imported(Arc::clone(&behind) as _, 3).unwrap());
    let meddled = Meddled { bucket: Arc::clone(&bucket), times: Mutex::new(1), act: Box::new(act) };
    let refusal = imported(Arc::new(meddled), 2).unwrap_err();
    assert!(refusal.what.contains("the pool was taken over by 'machine 3'"), "{refusal}");
    let other = other.lock().take().unwrap();
    write(&other, "file", 1000);
    ask(&other, PoolRequest::Sync).unwrap();
}

#[test]
fn the_removal_of_a_pool_goes_on_where_it_was_cut_short() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    for number in 0..3 {
        write(&pool, &format!("file{number}"), 100_000);
        ask(&pool, PoolRequest::Sync).unwrap();
    }
    pool.erase(&mut Silent).unwrap();
    assert!(bucket.keys().iter().any(|key| key.starts_with("seg/")), "a pool that is not destroyed is no remains");
    ask(&pool, PoolRequest::Destroy { force: true }).unwrap();
    bucket.fail_after(Some(0));
    let refusal = pool.erase(&mut Silent).unwrap_err();
    assert!(refusal.what.contains("'tank' is destroyed, but objects of it are still in the bucket"), "{refusal}");
    assert!(refusal.next.contains("`nacre pool destroy tank` removes them"), "{}", refusal.next);
    let number = pool.store.identity().pool;
    drop(pool);
    let rest = Remains { bucket: &*bucket, address: ADDRESS, pool: number, name: "tank", state: None };
    for requests in 0.. {
        bucket.fail_after(Some(requests));
        let removed = rest.remove(&mut Silent);
        bucket.fail_after(None);
        match find(&*bucket).unwrap() {
            Some(left) => assert_eq!(left.state, PoolState::Destroyed, "{:?}", bucket.keys()),
            None => assert!(bucket.keys().is_empty(), "{:?}", bucket.keys()),
        }
        if removed.is_ok() {
            assert!(requests > 4, "cut short {requests} times");
            return;
        }
    }
}

#[test]
fn the_removal_of_a_pool_leaves_one_that_was_made_since() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    ask(&pool, PoolRequest::Destroy { force: true }).unwrap();
    let number = pool.store.identity().pool;
    drop(pool);
    let rest = Remains { bucket: &*bucket, address: ADDRESS, pool: number, name: "tank", state: None };
    rest.remove(&mut Silent).unwrap();
    let at = (Arc::clone(&bucket) as _, ADDRESS.to_owned());
    let other = Imported::create_in(at, None, "other", &[], opening_on(2)).unwrap();
    other.export().unwrap();
    let before = objects(&bucket);
    let refusal = rest.remove(&mut Silent).unwrap_err();
    assert!(refusal.what.contains("pool 'other' is there now"), "{refusal}");
    assert!(objects(&bucket) == before);
}

#[test]
fn a_pool_that_is_destroyed_while_it_is_imported_stays_destroyed() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let writer = Arc::new(made(&bucket));
    write(&writer, "file", 1000);
    ask(&writer, PoolRequest::Sync).unwrap();
    let behind = Arc::clone(&writer);
    let act = move || drop(ask(&behind, PoolRequest::Destroy { force: true }).unwrap());
    let meddled = Meddled { bucket: Arc::clone(&bucket), times: Mutex::new(1), act: Box::new(act) };
    let refusal = imported(Arc::new(meddled), 2).unwrap_err();
    assert!(refusal.what.contains("was destroyed"), "{refusal}");
    assert_eq!(find(&*bucket).unwrap().unwrap().state, PoolState::Destroyed);
}

/// Returns once a request of this thread waits for the bucket.
fn until_waiting<T>(pool: &Failing, thread: &std::thread::ScopedJoinHandle<'_, T>) {
    while pool.waiting().is_none_or(|why| why.is_empty()) {
        assert!(!thread.is_finished(), "it does not wait");
        std::thread::yield_now();
    }
}

/// Has requests that wait tried again until the thread ends.
fn until_done<T>(pool: &Failing, thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    while !thread.is_finished() {
        pool.try_again();
        std::thread::yield_now();
    }
    thread.join().unwrap()
}

#[test]
fn a_commit_waits_for_a_store_that_reads_nothing_for_a_while() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    pool.failing.set("wait");
    write(&pool, "file", 1000);
    ask(&pool, PoolRequest::Sync).unwrap();
    write(&pool, "file", 2000);
    bucket.refuse(Some("roots/"));
    std::thread::scope(|threads| {
        let commit = threads.spawn(|| ask(&pool, PoolRequest::Sync));
        until_waiting(&pool.failing, &commit);
        bucket.refuse(None);
        until_done(&pool.failing, commit).unwrap();
    });
    assert_eq!(pool.suspended(), None);
}

/// Nothing waits for room, and the mark of a destroyed pool is put where a young pool has hardly anything to delete.
#[test]
fn a_pool_in_a_full_bucket_is_destroyed() {
    for commits in [1, 5, 20] {
        let bucket = Arc::new(MemoryBucket::new(1, 0));
        let pool = made(&bucket);
        pool.failing.set("wait");
        for number in 0..commits {
            write(&pool, &format!("file{number}"), 100_000);
            ask(&pool, PoolRequest::Sync).unwrap();
        }
        bucket.limit(Some(bucket.size()));
        write(&pool, "more", 1000);
        let done = ask(&pool, PoolRequest::Destroy { force: true });
        assert!(matches!(done, Ok(PoolAnswer::Done)), "{commits}: {done:?}");
        assert_eq!(find(&*bucket).unwrap().unwrap().state, PoolState::Destroyed, "{commits}");
        pool.erase(&mut Silent).unwrap();
        assert_eq!(bucket.keys(), Vec::<String>::new(), "{commits}");
    }
}

#[test]
fn the_destruction_of_a_pool_waits_for_a_store_that_is_away_for_a_while() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    pool.failing.set("wait");
    write(&pool, "file", 1000);
    ask(&pool, PoolRequest::Sync).unwrap();
    write(&pool, "file", 2000);
    bucket.refuse(Some("roots/"));
    std::thread::scope(|threads| {
        let destroy = threads.spawn(|| ask(&pool, PoolRequest::Destroy { force: true }));
        until_waiting(&pool.failing, &destroy);
        bucket.refuse(None);
        let done = until_done(&pool.failing, destroy);
        assert!(matches!(done, Ok(PoolAnswer::Done)), "{done:?}");
    });
    assert_eq!(find(&*bucket).unwrap().unwrap().state, PoolState::Destroyed);
}

#[test]
fn a_pool_in_a_full_bucket_that_another_machine_has_is_not_destroyed() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    write(&pool, "file", 1000);
    ask(&pool, PoolRequest::Sync).unwrap();
    let other = imported(Arc::clone(&bucket) as _, 2).unwrap();
    write(&other, "file", 2000);
    ask(&other, PoolRequest::Sync).unwrap();
    bucket.limit(Some(bucket.size()));
    let before = objects(&bucket);
    assert!(!matches!(ask(&pool, PoolRequest::Destroy { force: true }), Ok(PoolAnswer::Done)));
    assert!(objects(&bucket) == before);
}

/// A bucket whose next lists of the pool are empty.
struct Hiding {
    bucket: Arc<MemoryBucket>,
    lists: AtomicU64,
}

impl Bucket for Hiding {
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

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        let is_hidden = prefix == "pool/"
            && self.lists.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lists| lists.checked_sub(1)).is_ok();
        if is_hidden { Ok(Vec::new()) } else { self.bucket.list(prefix, after) }
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

#[test]
fn a_process_that_takes_over_waits_for_a_list_with_its_pool() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let pool = made(&bucket);
    write(&pool, "file", 1000);
    ask(&pool, PoolRequest::Sync).unwrap();
    let opening = Opening { after: pool.writer(), ..opening_on(1) };
    drop(pool);
    let (hiding, failing) = (Hiding { bucket, lists: AtomicU64::new(3) }, Arc::clone(&opening.failing));
    failing.be_patient(true);
    let opened = Opened::Bucket(Arc::new(hiding), ADDRESS.to_owned());
    std::thread::scope(|threads| {
        let opens = threads.spawn(|| Imported::open(opened, Access::WithoutLog, None, opening));
        until_waiting(&failing, &opens);
        assert!(failing.waiting().unwrap().contains("its list of objects has no pool"));
        let next = until_done(&failing, opens).unwrap();
        let root = next.pool.dataset(next.pool.root().unwrap()).unwrap();
        assert!(root.files().look_up(&root.files().root(), b"file").is_ok());
    });
}
