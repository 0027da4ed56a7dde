//! A segment table so large that a root record cannot name the segments that store it, and the part of it that
//! commits write.

use super::*;
use crate::backend::{MemoryBucket, Objects, WriterId};
use crate::label::{SlotAddress, UPPER_LIMIT};
use crate::segment::pages::TOP;
use crate::segment::table::Segment;

const SEGMENT: u64 = 16 << 10;

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed ^ (*seed >> 33)
}

fn objects(bucket: &Arc<MemoryBucket>, nonce: u64) -> Arc<Objects> {
    let writer = WriterId { nonce, host: "here".to_owned(), clock: Box::new(|| 1_800_000_000), uptime: Box::new(|| 1) };
    Arc::new(Objects::new(Arc::clone(bucket) as _, new_pool().guid, SEGMENT, 1 << 50, writer))
}

/// Segments of a pool are longer, so that the identity in the bucket would be refused.
fn reopened(bucket: &Arc<MemoryBucket>, identity: &mut Identity, access: Access) -> Result<(Store, Root)> {
    let nonce = 1 + identity.revision;
    let opened = Store::open_in(objects(bucket, nonce), identity.clone(), &import(access))?;
    opened.0.confirm()?;
    *identity = opened.0.identity();
    Ok(opened)
}

/// Segments without content, at locations that do not compress: only the table matters.
fn grow(store: &Store, segments: u32, seed: &mut u64) {
    let mut map = store.map.write();
    for _ in 0..segments {
        let id = map.next_segment;
        map.next_segment += 1;
        let place = vec![SlotAddress { device: random(seed) as u16, slot: random(seed) as u32 }].into();
        map.table.apply(Op::Open { id, stream: WriteStream::Data, place }).unwrap();
        let (frames, units) = (10 + random(seed) as u32 % 100, 1 + random(seed) as u32 % 8);
        let newest = Txg(random(seed) % 1000);
        let bytes = SEGMENT as u32 - random(seed) as u32 % 100;
        map.table.apply(Op::Grow { id, frames, bytes, units: frames * units, newest }).unwrap();
        map.table.apply(Op::Seal { id }).unwrap();
    }
}

fn free_some(store: &Store, times: usize, seed: &mut u64) {
    let mut map = store.map.write();
    for _ in 0..times {
        let id = 1 + random(seed) as u32 % (map.next_segment - 1);
        let index = random(seed) as u32 % 10;
        let _ = map.table.apply(Op::Free { segment: id, index, count: 1, units: 1 });
    }
}

fn table(store: &Store) -> BTreeMap<u32, Segment> {
    store.map.read().table.segments().clone()
}

/// Compares with the table after an import of a root, except for the segments that the import seals itself.
fn assert_is(store: &Store, before: &BTreeMap<u32, Segment>) {
    let now = table(store);
    assert_eq!(now.len(), before.len());
    for (id, segment) in before {
        let found = &now[id];
        assert_eq!(
            (&found.place, found.live_units, &found.dead, &found.moved, found.newest),
            (&segment.place, segment.live_units, &segment.dead, &segment.moved, segment.newest)
        );
    }
}

#[test]
fn a_root_need_not_name_all_segments_of_the_table() {
    let bucket = Arc::new(MemoryBucket::new(1, 0));
    let (store, _) = Store::create_in(objects(&bucket, 1), &new_pool(), 1 << 50).unwrap();
    let (mut seed, mut txg, mut identity) = (7, 0, store.identity());
    grow(&store, 130_000, &mut seed);
    // The engine's own data uses its maximum of the record.
    let upper = vec![1; UPPER_LIMIT];
    let mut next = |store: &Store| {
        txg += 1;
        let (txg, log_start) = (Txg(txg), LogStart::default());
        store.commit(&Commit { txg, catalog: None, upper: &upper, log_start, time: 1 }).unwrap();
    };
    next(&store);
    let root = store.root();
    assert!(root.table_segments.len() > 160, "{} segments of the table", root.table_segments.len());
    assert!(!root.table_list.is_empty());
    let stored = store.space().table;
    // The size of a commit depends on the changes, not on the size of the table, wherever the changes are.
    let mut before = store.traffic().table;
    for step in 0..60 {
        let pointer = put(&store, txg_of(&store) + 1, step, 300).unwrap();
        free_some(&store, 3, &mut seed);
        next(&store);
        let now = store.traffic().table;
        assert!(now - before < stored / 4, "commit {step} has written {} bytes of {stored}", now - before);
        before = now;
        assert_eq!(*store.read(&pointer).unwrap(), *content(step, 300));
    }
    // Nothing was written twice that is kept twice.
    let segments = store.root().table_segments;
    let taken: u64 = segments.iter().map(|segment| u64::from(segment.bytes)).sum();
    assert!(taken < 3 * stored, "{taken} bytes in {} segments for {stored}", segments.len());
    let was = table(&store);
    drop(store);

    // Damage of one page is reported; nothing else is.
    let (store, root) = reopened(&bucket, &mut identity, Access::ReadOnly).unwrap();
    assert_is(&store, &was);
    assert_eq!(root.table_segments.iter().filter(|segment| segment.dead_since.is_none()).count(), live(&segments));
    let (mut checked, mut damaged) = (0, 0);
    assert!(store.scrub_table(&mut |frame| {
        checked += 1;
        damaged += u64::from(frame.damage.is_some());
        true
    }));
    assert!(checked > 3000 && damaged == 0, "{damaged} of {checked} damaged");
    drop(store);

    // Another writer continues, and so does one after that.
    let (store, _) = reopened(&bucket, &mut identity, Access::ReadWrite).unwrap();
    assert_is(&store, &was);
    for step in 0..30 {
        grow(&store, 20, &mut seed);
        free_some(&store, 20, &mut seed);
        put(&store, txg_of(&store) + 1, step, 300).unwrap();
        next(&store);
    }
    // All of it dies, and so do its pages.
    let was = table(&store);
    let middle = *was.keys().nth(was.len() / 2).unwrap();
    {
        let mut map = store.map.write();
        for (id, segment) in was.range(..middle).filter(|(_, segment)| segment.sealed && segment.live_frames > 0) {
            for index in (0..segment.frames).filter(|index| !segment.dead.get(*index)) {
                let now = &map.table.segments()[id];
                let units = if now.live_frames == 1 { now.live_units } else { 1.min(now.live_units - 1) };
                if units > 0 {
                    map.table.apply(Op::Free { segment: *id, index, count: 1, units }).unwrap();
                }
            }
        }
    }
    let frames = store.committed.lock().tree.len();
    for _ in 0..40 {
        put(&store, txg_of(&store) + 1, 1, 300).unwrap();
        next(&store);
    }
    let left = store.committed.lock().tree.len();
    assert!(left < frames * 2 / 3, "{left} of {frames} pages");
    let top = store.root().table_top;
    assert_eq!(store.committed.lock().tree.frames((TOP, 0)).unwrap(), top);
    let was = table(&store);
    drop(store);
    let (store, _) = reopened(&bucket, &mut identity, Access::ReadWrite).unwrap();
    assert_is(&store, &was);
}

fn live(segments: &[crate::label::TableSegment]) -> usize {
    segments.iter().filter(|segment| segment.dead_since.is_none()).count()
}

fn txg_of(store: &Store) -> u64 {
    store.durable().0
}

/// The bucket fails at each request of some commits with a list; the newest root then names a complete table.
#[test]
fn requests_that_fail_leave_a_whole_table() {
    let steps = |store: &Store, txg: &mut u64, seed: &mut u64| -> Result<()> {
        for _ in 0..4 {
            free_some(store, 40, seed);
            put(store, *txg + 1, 1, 300)?;
            commit(store, *txg + 1)?;
            *txg += 1;
        }
        Ok(())
    };
    for allowed in (0..u64::MAX).step_by(5) {
        let bucket = Arc::new(MemoryBucket::new(allowed, 0));
        let (store, _) = Store::create_in(objects(&bucket, 1), &new_pool(), 1 << 50).unwrap();
        let (mut seed, mut txg, mut identity) = (9, 0, store.identity());
        grow(&store, 600, &mut seed);
        steps(&store, &mut txg, &mut seed).unwrap();
        bucket.fail_after(Some(allowed));
        let ended = steps(&store, &mut txg, &mut seed);
        drop(store);
        bucket.fail_after(None);
        let (store, root) = reopened(&bucket, &mut identity, Access::ReadWrite).unwrap();
        assert!(root.txg.0 == txg || root.txg.0 == txg + 1);
        put(&store, root.txg.0 + 1, 1, 300).unwrap();
        commit(&store, root.txg.0 + 1).unwrap();
        assert!(store.scrub_table(&mut |frame| frame.damage.is_none()));
        let was = table(&store);
        drop(store);
        assert_is(&reopened(&bucket, &mut identity, Access::ReadOnly).unwrap().0, &was);
        if ended.is_ok() {
            assert!(allowed > 8);
            return;
        }
    }
}
