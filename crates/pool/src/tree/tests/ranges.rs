//! Scans: views that persist, read-ahead, and the number of reads.

use super::*;

fn tree_of(bench: &Bench, rows: u32) -> Tree {
    let mut tree = Tree::empty(1, Settings::with_page(512));
    for n in 0..rows {
        tree.put(&bench.ctx(), Txg(1), &n.to_be_bytes(), &[3; 30]).unwrap();
    }
    bench.commit(&mut tree, 1);
    tree
}

#[test]
fn a_cursor_sees_its_moment() {
    let bench = Bench::new();
    let mut tree = tree_of(&bench, 1000);
    for n in 0..1000u32 {
        tree.put(&bench.ctx(), Txg(2), &n.to_be_bytes(), b"dirty").unwrap();
    }
    let view = tree.view();
    let mut cursor = view.cursor(bench.ctx(), &[], None).unwrap();
    for n in 0..1000u32 {
        let (key, value) = cursor.next().unwrap().unwrap();
        assert_eq!((key, value), (n.to_be_bytes().as_slice(), b"dirty".as_slice()));
        // All around it changes and is committed.
        tree.remove(&bench.ctx(), Txg(2), &(999 - n).to_be_bytes()).unwrap();
        tree.put(&bench.ctx(), Txg(2), &(n + 5000).to_be_bytes(), b"new").unwrap();
        if n % 300 == 0 {
            bench.commit(&mut tree, 2);
        }
    }
    assert!(cursor.next().unwrap().is_none());
    assert_eq!(rows_of(bench.ctx(), &tree.view()).len(), 1000);
    assert_sound(bench.ctx(), &tree);
}

#[test]
fn long_scans_read_ahead_and_short_ones_do_not() {
    let bench = Bench::new();
    let tree = tree_of(&bench, 20_000);
    let root = tree.stored_root().unwrap();
    bench.cache.clear();
    // 13 rows to a leaf: these five are in one.
    let mut cursor = View::at(root).cursor(bench.ctx(), &104u32.to_be_bytes(), None).unwrap();
    for _ in 0..5 {
        cursor.next().unwrap().unwrap();
    }
    drop(cursor);
    assert!(bench.frames.named.lock().is_empty(), "a few rows name nothing");

    bench.cache.clear();
    let before = bench.frames.reads();
    let rows = rows_of(bench.ctx(), &View::at(root));
    let reads = bench.frames.reads() - before;
    assert_eq!(rows.len(), 20_000);
    assert_eq!(reads as usize, bench.frames.written().len(), "each frame is read once");
    let named = std::mem::take(&mut *bench.frames.named.lock());
    let all: Vec<u32> = named.iter().flatten().map(|pointer| pointer.index).collect();
    let mut distinct = all.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), all.len(), "nothing is named twice");
    assert!(all.len() > reads as usize * 3 / 4, "{} of {reads} named", all.len());
    assert!(named.iter().all(|window| window.len() <= 65));

    // Cached leaves are not requested.
    let big = Cache::new(64 << 20);
    let ctx = Context { frames: &*bench.frames, cache: &big };
    rows_of(ctx, &View::at(root));
    bench.frames.named.lock().clear();
    let before = bench.frames.reads();
    rows_of(ctx, &View::at(root));
    assert!(bench.frames.named.lock().is_empty() && bench.frames.reads() == before);
}

#[test]
fn a_range_names_nothing_behind_its_end() {
    let bench = Bench::new();
    let tree = tree_of(&bench, 20_000);
    let last_in_range = 400u32;
    let mut cursor =
        View::at(tree.stored_root().unwrap()).cursor(bench.ctx(), &[], Some(&last_in_range.to_be_bytes())).unwrap();
    bench.cache.clear();
    let before = bench.frames.reads();
    let mut rows = 0u32;
    while cursor.next().unwrap().is_some() {
        rows += 1;
    }
    assert_eq!(rows, last_in_range);
    // The leaf of the first row and the inner nodes on its path were read before.
    let leaves = rows.div_ceil(13);
    assert!(bench.frames.reads() - before <= u64::from(leaves) + 8);
    let named: usize = bench.frames.named.lock().iter().map(Vec::len).sum();
    assert!(named <= leaves as usize + 8, "{named} named for {leaves} leaves");
}

#[test]
fn a_whole_scan_leaves_the_cache_alone() {
    let bench = Bench::new();
    let tree = tree_of(&bench, 5000);
    bench.cache.clear();
    let mut scan = tree.view().scan(bench.ctx()).unwrap();
    let mut rows = 0;
    while scan.next().unwrap().is_some() {
        rows += 1;
    }
    assert_eq!((rows, bench.cache.counters().frames), (5000, 0));
}

#[test]
fn a_diff_reads_only_what_changed() {
    let bench = Bench::new();
    let mut tree = tree_of(&bench, 50_000);
    let old = tree.view();
    for n in [7u32, 25_000, 25_001, 49_999] {
        tree.put(&bench.ctx(), Txg(2), &n.to_be_bytes(), b"changed").unwrap();
    }
    // Leaves in the middle are split, merged and removed.
    for n in 30_000..30_100u32 {
        tree.remove(&bench.ctx(), Txg(2), &n.to_be_bytes()).unwrap();
        let mut key = n.to_be_bytes().to_vec();
        key.push(1);
        tree.put(&bench.ctx(), Txg(2), &key, &[1; 60]).unwrap();
    }
    let written = bench.commit(&mut tree, 2);
    bench.cache.clear();
    let before = bench.frames.reads();
    let mut diff = old.diff(bench.ctx(), &View::at(written.root)).unwrap();
    let mut changed = 0;
    while diff.next().unwrap().is_some() {
        changed += 1;
    }
    assert_eq!(changed, 204);
    let reads = bench.frames.reads() - before;
    assert!(reads <= written.frames * 2 + 20, "{reads} reads, {} frames written", written.frames);
    assert!(old.diff(bench.ctx(), &old).unwrap().next().unwrap().is_none());
}

#[test]
fn removing_a_range_reads_no_leaf_that_goes_whole() {
    let bench = Bench::new();
    let mut tree = tree_of(&bench, 50_000);
    bench.cache.clear();
    let before = bench.frames.reads();
    assert!(tree.remove_range(&bench.ctx(), Txg(2), &100u32.to_be_bytes(), Some(&49_900u32.to_be_bytes())).unwrap());
    let reads = (bench.frames.reads() - before) as usize;
    let all = bench.frames.written().len();
    assert!(reads < all / 4, "{reads} of {all} frames read");
    assert_eq!(rows_of(bench.ctx(), &tree.view()).len(), 200);
    let written = bench.commit(&mut tree, 2);
    assert_sound(bench.ctx(), &tree);
    assert_eq!(
        tree.take_dead(Txg(2)).len() + written.frames as usize + unchanged(&bench, written.root.unwrap()),
        bench.frames.written().len()
    );
}

/// Frames of the first txg that a root still reaches.
fn unchanged(bench: &Bench, root: Pointer) -> usize {
    struct Old(usize);
    impl walk::Visitor for Old {
        fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
            self.0 += usize::from(pointer.birth == Txg(1));
            Ok(true)
        }
        fn row(&mut self, _: &[u8], _: &[u8]) -> Result<(), PoolError> {
            Ok(())
        }
    }
    let mut old = Old(0);
    walk::walk(&bench.ctx(), &root, Txg(0), &mut old).unwrap();
    old.0
}
