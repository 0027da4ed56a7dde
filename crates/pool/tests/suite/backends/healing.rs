//! What becomes of objects in a bucket that are damaged, or only seem to be.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use nacre_pool::backend::ObjectTag;

use super::*;

/// A bucket that answers one request for a part of a segment, and one for a whole one, with zeros.
struct Lying {
    bucket: Arc<MemoryBucket>,
    /// Number of parts of objects that will be wrong.
    parts: AtomicUsize,
    /// Number of whole objects that will be wrong.
    whole: AtomicUsize,
}

impl Lying {
    fn of(bucket: &Arc<MemoryBucket>) -> Self {
        Self { bucket: Arc::clone(bucket), parts: AtomicUsize::new(0), whole: AtomicUsize::new(0) }
    }

    fn answer(&self, key: &str, is_part: bool, mut body: Vec<u8>) -> Vec<u8> {
        let lies = if is_part { &self.parts } else { &self.whole };
        let one_less = |left: usize| left.checked_sub(1);
        if key.starts_with("seg/") && lies.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
            body.fill(0);
        }
        body
    }
}

impl Bucket for Lying {
    fn name(&self) -> &str {
        "lying"
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.bucket.put(key, body)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        self.bucket.put_new(key, body)
    }

    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        Ok(self.bucket.get_tagged(key)?.map(|(body, tag)| (self.answer(key, false, body), tag)))
    }

    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        self.bucket.put_if(key, body, tag)
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        let is_part = range.is_some();
        Ok(self.bucket.get(key, range)?.map(|body| self.answer(key, is_part, body)))
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

/// A store of which all is in the bucket, and what its frames are.
fn filled(ground: &InBucket) -> Vec<(u64, Pointer)> {
    let store = ground.create_store();
    let frames: Vec<(u64, Pointer)> = (0..60)
        .map(|number| {
            let frame = NewFrame {
                stream: WriteStream::Data,
                kind: FrameKind::Data,
                owner: Owner { dataset: 1, object: number, offset: 0 },
                birth: Txg(2),
                content: &[number as u8 + 1; 9000],
                compression: CompressionSetting::Off,
                checksum: ChecksumKind::Xxh3,
            };
            (number, store.write(&frame).unwrap())
        })
        .collect();
    store.commit(&Commit { txg: Txg(2), catalog: None, upper: &[], log_start: LogStart::default(), time: 1 }).unwrap();
    frames
}

fn segments(bucket: &MemoryBucket) -> BTreeMap<String, Vec<u8>> {
    let keys = bucket.keys().into_iter().filter(|key| key.starts_with("seg/"));
    keys.map(|key| (key.clone(), bucket.get(&key, None).unwrap().unwrap())).collect()
}

fn read_all(store: &Store, frames: &[(u64, Pointer)]) {
    for (number, pointer) in frames {
        assert!(*store.read(pointer).unwrap() == [*number as u8 + 1; 9000], "frame {number}");
    }
}

fn opened(ground: &InBucket, bucket: Arc<dyn Bucket>) -> Store {
    let identity = Objects::find(&*bucket).unwrap().unwrap();
    let objects = Arc::new(Objects::new(bucket, 7, MIB, 62 * MIB, ground.writer()));
    let (store, _) = Store::open_in(objects, identity, &import(Access::ReadWrite)).unwrap();
    store.confirm().unwrap();
    store
}

#[test]
fn wrong_replies_destroy_no_object() {
    let ground = InBucket::new(0, 0);
    let frames = filled(&ground);
    let before = segments(&ground.bucket);
    let (lying, directory) = (Arc::new(Lying::of(&ground.bucket)), tempfile::tempdir().unwrap());
    let cached = Cached::new(Arc::clone(&lying) as _, Parts::open(directory.path(), 64 * MIB).unwrap());
    let store = opened(&ground, Arc::new(cached));
    // A part that is wrong is read once more, and nothing is healed then; a whole object would be wrong as well.
    lying.parts.store(1, Ordering::Relaxed);
    lying.whole.store(1, Ordering::Relaxed);
    read_all(&store, &frames);
    assert_eq!(lying.parts.load(Ordering::Relaxed), 0, "a part was asked for");
    let after = segments(&ground.bucket);
    assert!(before.iter().all(|(key, body)| after.get(key) == Some(body)), "an object was replaced");
}

/// Also where nothing of the bucket is kept on the machine.
#[test]
fn one_wrong_reply_is_no_damage() {
    let ground = InBucket::new(0, 0);
    let frames = filled(&ground);
    ground.bucket.damage_replies("seg/", 1);
    let store = opened(&ground, ground.bucket());
    assert_eq!(ground.bucket.damage_replies("seg/", 1), 0, "the table was read");
    read_all(&store, &frames);
    assert_eq!(ground.bucket.damage_replies("", 0), 0, "content was read");
}

#[test]
fn an_object_is_replaced_where_all_of_it_is_known_and_nobody_else_has_replaced_it() {
    let ground = InBucket::new(0, 0);
    let (backend, _) = ground.new_backend();
    let (id, place) = write_whole(&*backend, 3).unwrap();
    backend.flush().unwrap();
    let at = SegmentAt { segment: id, place: &place };
    let before = segments(&ground.bucket);
    let (key, body) = before.first_key_value().unwrap();
    ground.bucket.rot(key, 5000, 3);
    let damaged = segments(&ground.bucket);
    let right = &body[4096..8192];
    let other = AtomicBool::new(false);
    let whole = |image: &[u8]| {
        if other.load(Ordering::Relaxed) {
            ground.bucket.rot(key, 9000, 1);
        }
        image == body.as_slice()
    };
    assert!(backend.heal(at, 4096, right, &|_| false).is_err());
    assert!(segments(&ground.bucket) == damaged, "it was not known to be right");
    other.store(true, Ordering::Relaxed);
    assert!(backend.heal(at, 4096, right, &whole).is_err(), "it has changed meanwhile");
    ground.bucket.rot(key, 9000, 1);
    assert!(segments(&ground.bucket) == damaged);
    other.store(false, Ordering::Relaxed);
    assert_eq!(backend.heal(at, 4096, right, &whole).unwrap().unwrap().columns, 1);
    assert!(segments(&ground.bucket) == before);
}

#[test]
fn a_scrub_goes_on_after_a_lost_object_and_names_what_is_hurt() {
    let ground = InBucket::new(0, 0);
    let (store, mut frames) = (ground.create_store(), Vec::new());
    for txg in 2..6 {
        for number in 0..20 {
            let frame = NewFrame {
                stream: WriteStream::Data,
                kind: FrameKind::Data,
                owner: Owner { dataset: 1, object: number, offset: 0 },
                birth: Txg(txg),
                content: &[txg as u8; 9000],
                compression: CompressionSetting::Off,
                checksum: ChecksumKind::Xxh3,
            };
            frames.push(store.write(&frame).unwrap());
        }
        let commit = Commit { txg: Txg(txg), catalog: None, upper: &[], log_start: LogStart::default(), time: 1 };
        store.commit(&commit).unwrap();
    }
    drop(store);
    let gone = frames[25].segment;
    let key = ground.bucket.keys().into_iter().find(|key| key.ends_with(&format!("-{gone}"))).unwrap();
    ground.bucket.delete(&key).unwrap();
    let store = ground.open_store(Access::ReadWrite).unwrap().0;
    let (mut whole, mut lost) = (0, BTreeMap::new());
    let visited = store.scrub(&mut |checked| {
        match &checked.damage {
            None => whole += 1,
            Some(damage) => drop(lost.insert(checked.name, damage.clone())),
        }
        true
    });
    visited.unwrap();
    let hurt: Vec<(u32, u32)> =
        frames.iter().filter(|frame| frame.segment == gone).map(|frame| (frame.segment, frame.index)).collect();
    assert!(!hurt.is_empty() && hurt.len() < frames.len(), "{} of {}", hurt.len(), frames.len());
    assert_eq!(lost.keys().copied().collect::<Vec<_>>(), hurt);
    assert!(whole >= frames.len() - hurt.len());
    // A store that answers nothing says nothing of its objects.
    ground.bucket.fail_after(Some(0));
    assert!(store.scrub(&mut |_| true).is_err());
}

/// A bucket that answers the making of the first root by "it exists", as after a reply that was lost, and then shows
/// it damaged so many times.
struct Damaging {
    bucket: Arc<MemoryBucket>,
    times: AtomicU64,
}

impl Bucket for Damaging {
    fn name(&self) -> &str {
        "damaging"
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.bucket.put(key, body)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let put = self.bucket.put_new(key, body)?;
        Ok(if key.starts_with("roots/") { Put::Exists } else { put })
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        let mut found = self.bucket.get(key, range)?;
        let left = self.times.load(Ordering::Relaxed);
        if let Some(body) = found.as_mut().filter(|_| key.starts_with("roots/") && left > 0) {
            self.times.store(left - 1, Ordering::Relaxed);
            body[10] ^= 1;
        }
        Ok(found)
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.bucket.delete(key)
    }
}

#[test]
fn an_own_root_that_is_read_damaged_is_nobody_elses() {
    for (times, is_durable) in [(0, true), (1, true), (1000, false)] {
        let ground = InBucket::new(0, 0);
        let bucket = Arc::new(Damaging { bucket: Arc::clone(&ground.bucket), times: AtomicU64::new(times) });
        let objects = Objects::new(bucket, 7, MIB, 62 * MIB, ground.writer());
        match objects.put_root(&root(1)) {
            Ok(PutRoot::Durable) => assert!(is_durable, "{times}"),
            Ok(PutRoot::Fenced { by }) => panic!("taken over by {by}"),
            Err(error) => assert!(!is_durable, "{times}: {error}"),
        }
    }
}
