//! A bucket that is not what a program of its pool takes it for: with another pool, without its last state, with a
//! damaged state, and with lists that lag.

use std::io;
use std::ops::Range;

use super::*;

fn key(generation: u64) -> String {
    format!("roots/{generation:020}")
}

/// A writer of pool 7 with roots 1 to `last`.
fn with_roots(last: u64) -> (InBucket, Arc<dyn Backend>) {
    let ground = InBucket::new(1, 0);
    let (backend, _) = ground.new_backend();
    for generation in 1..=last {
        assert_eq!(backend.put_root(&root(generation)).unwrap(), PutRoot::Durable);
    }
    (ground, backend)
}

/// Puts a root of pool 8, in the place of another one if there is any.
fn put_foreign(ground: &InBucket, generation: u64) {
    let other = InBucket::new(2, 0);
    let objects = Objects::new(other.bucket(), 8, MIB, 62 * MIB, other.writer());
    assert_eq!(objects.put_root(&Root { pool: 8, ..root(generation) }).unwrap(), PutRoot::Durable);
    let body = other.bucket.get(&key(generation), None).unwrap().unwrap();
    ground.bucket.put(&key(generation), &body).unwrap();
}

#[test]
fn a_reader_does_not_go_on_to_another_pool() {
    for (first, last) in [(4, 4), (4, 9)] {
        let (ground, _writer) = with_roots(3);
        let reader = ground.import().0;
        assert_eq!(reader.newer_root(2).unwrap().unwrap().generation, 3);
        (first..=last).for_each(|generation| put_foreign(&ground, generation));
        let refused = reader.newer_root(3).unwrap_err().to_string();
        assert!(refused.contains("another pool is in this bucket now"), "{refused}");
        // The next root is this pool's, and a later one is not.
        let refused = reader.newer_root(2).unwrap_err().to_string();
        assert!(refused.contains("another pool is in this bucket now"), "{refused}");
    }
}

#[test]
fn an_import_takes_no_root_of_another_pool() {
    let (ground, writer) = with_roots(3);
    put_foreign(&ground, 4);
    let newest = ground.import().0.newest_root().unwrap().unwrap();
    assert_eq!((newest.root, newest.lost), (root(3), 1));
    assert_eq!(writer.roots().unwrap().into_keys().collect::<Vec<_>>(), [1, 2, 3]);
    (1..=3).for_each(|generation| put_foreign(&ground, generation));
    let refused = ground.import().0.newest_root().map(drop).unwrap_err().to_string();
    assert!(refused.contains("another pool is in this bucket now"), "{refused}");
}

/// A writer whose bucket was exchanged puts nothing into the other one, also where the name of its next root is free.
#[test]
fn a_writer_looks_for_its_last_root_before_it_puts_the_next_one() {
    let put_next = |exchange: &dyn Fn(&InBucket)| {
        let (ground, writer) = with_roots(3);
        exchange(&ground);
        let put = writer.put_root(&root(4));
        assert!(!ground.bucket.keys().contains(&key(4)), "a root in another bucket");
        put.map(drop).unwrap_err().to_string()
    };
    let refused = put_next(&|ground| put_foreign(ground, 3));
    assert!(refused.contains("another pool is in this bucket now"), "{refused}");
    let refused = put_next(&|ground| ground.bucket.delete(&key(3)).unwrap());
    assert!(refused.contains("is gone, or another bucket is there"), "{refused}");
    // The same pool, as another writer has left it.
    let refused = put_next(&|ground| {
        (1..=3).for_each(|generation| ground.bucket.delete(&key(generation)).unwrap());
        let other = ground.import().0;
        (1..=3).for_each(|generation| drop(other.put_root(&root(generation)).unwrap()));
    });
    assert!(refused.contains("the bucket was exchanged"), "{refused}");
}

#[test]
fn a_damaged_root_is_a_gap() {
    let (ground, writer) = with_roots(4);
    let reader = ground.import().0;
    ground.bucket.rot(&key(4), 20, 1);
    let requests = || {
        let Requests { gets, lists, .. } = ground.bucket.requests();
        gets + lists
    };
    let before = requests();
    for _ in 0..200 {
        assert!(reader.newer_root(3).is_err(), "there is no whole one after it");
    }
    let polls = (requests() - before) / 8;
    assert!((2..20).contains(&polls), "{polls}");
    assert_eq!(writer.put_root(&root(5)).unwrap(), PutRoot::Durable, "a damaged root is still this writer's");
    let found = (0..64).find_map(|_| reader.newer_root(3).ok().flatten());
    assert_eq!(found, Some(root(5)));
}

/// A bucket whose lists lack what was made since.
struct Lagging {
    bucket: Arc<MemoryBucket>,
    listed: Vec<String>,
}

impl Bucket for Lagging {
    fn name(&self) -> &str {
        "lagging"
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
        let fits = |key: &&String| key.starts_with(prefix) && key.as_str() > after;
        Ok(self.listed.iter().filter(fits).cloned().collect())
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

#[test]
fn a_list_that_lags_hides_no_root() {
    let (ground, writer) = with_roots(2);
    let lagging = Arc::new(Lagging { bucket: Arc::clone(&ground.bucket), listed: ground.bucket.keys() });
    for generation in 3..=20 {
        assert_eq!(writer.put_root(&root(generation)).unwrap(), PutRoot::Durable);
    }
    let late = Objects::new(lagging, 7, MIB, 62 * MIB, ground.writer());
    let newest = late.newest_root().unwrap().unwrap();
    assert_eq!((newest.root.generation, newest.lost), (20, 0));
}
