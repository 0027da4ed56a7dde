//! Commits during changes, and their errors.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::*;

fn number(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

#[test]
fn an_empty_tree_has_no_root_and_nothing_to_write() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::default());
    assert_eq!(bench.commit(&mut tree, 1), Written::default());
    assert!(
        tree.is_empty()
            && tree.get(&bench.ctx(), b"a").unwrap().is_none()
            && tree.first(&bench.ctx()).unwrap().is_none()
    );
    assert!(!tree.remove(&bench.ctx(), Txg(1), b"a").unwrap());
    assert!(bench.frames.written().is_empty());
}

#[test]
fn an_unchanged_tree_is_not_written_again() {
    let bench = Bench::new();
    let mut tree = Tree::empty(9, Settings::with_page(512));
    for n in 0..500 {
        tree.put(&bench.ctx(), Txg(1), &number(n), b"value").unwrap();
    }
    let first = bench.commit(&mut tree, 1);
    assert!(
        first.frames > 10
            && first.bytes == bench.frames.written().iter().map(|(pointer, _)| pointer.charged()).sum::<u64>()
    );
    assert!(bench.frames.written().iter().all(|(pointer, owner)| owner.dataset == 9 && pointer.birth == Txg(1)));
    assert_eq!(bench.commit(&mut tree, 2), Written { root: first.root, bytes: 0, logical: 0, frames: 0 });
    assert!(!tree.remove(&bench.ctx(), Txg(3), &number(1000)).unwrap());
    assert_eq!(tree.stored_root(), Some(first.root), "removing nothing changes nothing");
    assert!(tree.take_dead(Txg(3)).is_empty());

    // One row: the nodes on its path are written and the old ones are dead.
    tree.put(&bench.ctx(), Txg(3), &number(250), b"other").unwrap();
    let third = bench.commit(&mut tree, 3);
    let levels = u64::from(height(bench.ctx(), &tree));
    assert_eq!((third.frames, tree.take_dead(Txg(3)).len() as u64), (levels, levels));
}

#[test]
fn a_row_changed_between_freeze_and_settle_kills_what_the_freeze_wrote() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::default());
    tree.put(&bench.ctx(), Txg(1), b"k", b"1").unwrap();
    let frozen = tree.freeze();
    tree.put(&bench.ctx(), Txg(2), b"k", b"2").unwrap();
    assert!(tree.settle(&frozen).is_err(), "not written out");
    let written = frozen.write_out(&bench.ctx(), form(1)).unwrap();
    tree.settle(&frozen).unwrap();
    assert!(tree.take_dead(Txg(1)).is_empty());
    assert_eq!(tree.take_dead(Txg(2)), vec![written.root.unwrap()]);
    assert_eq!(View::at(written.root).get(&bench.ctx(), b"k").unwrap().unwrap(), b"1");
    assert_eq!(tree.get(&bench.ctx(), b"k").unwrap().unwrap(), b"2");
}

/// After a removal the root may be a node that is stored already: then it changes although nothing
/// is written.
#[test]
fn a_removal_that_writes_nothing_is_a_change_all_the_same() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::with_page(512));
    for n in 0..100 {
        tree.put(&bench.ctx(), Txg(1), &number(n), &[1; 30]).unwrap();
    }
    let first = bench.commit(&mut tree, 1);
    assert!(!tree.freeze().is_dirty());
    assert!(tree.remove_range(&bench.ctx(), Txg(2), &number(13), None).unwrap());
    let frozen = tree.freeze();
    assert!(frozen.is_dirty());
    let second = frozen.write_out(&bench.ctx(), form(2)).unwrap();
    assert!(second.root != first.root);
    tree.settle(&frozen).unwrap();
    assert_eq!(rows_of(bench.ctx(), &View::at(second.root)).len(), 13);
    // Everything is removed: no root, nothing to write, all frames dead.
    assert!(tree.remove_range(&bench.ctx(), Txg(3), &[], None).unwrap());
    let frozen = tree.freeze();
    assert!(frozen.is_dirty());
    assert_eq!(frozen.write_out(&bench.ctx(), form(3)).unwrap(), Written::default());
    tree.settle(&frozen).unwrap();
    assert_eq!(tree.take_dead(Txg(3)).len(), bench.frames.written().len());
}

#[test]
fn a_failed_write_out_goes_on_where_it_stopped() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::with_page(512));
    for n in 0..300 {
        tree.put(&bench.ctx(), Txg(1), &number(n), b"value").unwrap();
    }
    let frozen = tree.freeze();
    bench.frames.fail_writes.store(true, Ordering::Relaxed);
    assert!(matches!(frozen.write_out(&bench.ctx(), form(1)), Err(PoolError::NoSpace)));
    assert!(frozen.is_dirty() && tree.settle(&frozen).is_err());
    bench.frames.fail_writes.store(false, Ordering::Relaxed);
    let written = frozen.write_out(&bench.ctx(), form(1)).unwrap();
    tree.settle(&frozen).unwrap();
    assert_eq!(rows_of(bench.ctx(), &View::at(written.root)).len(), 300);
    assert_eq!(bench.frames.written().len() as u64, written.frames);
    assert_eq!(tree.dirty_bytes(), 0);
}

#[test]
fn dirty_bytes_count_what_waits_for_a_commit() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::default());
    assert_eq!(tree.dirty_bytes(), 0);
    for n in 0..2000 {
        tree.put(&bench.ctx(), Txg(1), &number(n), &[7; 100]).unwrap();
    }
    let full = tree.dirty_bytes();
    assert!((2000 * 108..2000 * 108 * 2).contains(&full), "{full}");
    let frozen = tree.freeze();
    assert_eq!(tree.dirty_bytes(), full, "a freeze keeps its nodes until it is settled");
    tree.put(&bench.ctx(), Txg(2), &number(1), b"new").unwrap();
    assert!(tree.dirty_bytes() > full);
    frozen.write_out(&bench.ctx(), form(1)).unwrap();
    tree.settle(&frozen).unwrap();
    assert!(tree.dirty_bytes() < 70 << 10, "one way down: {}", tree.dirty_bytes());
    assert_sound(bench.ctx(), &tree);
}

/// Writers, readers and commits as in a dataset: each at any time.
#[test]
fn commits_and_readers_beside_a_writer() {
    let bench = Bench::new();
    let tree = RwLock::new(Tree::empty(1, Settings::with_page(512)));
    let done = AtomicBool::new(false);
    let mut model = Map::new();
    let mut dead = 0;
    std::thread::scope(|scope| {
        let (bench, tree, done) = (&bench, &tree, &done);
        let committer = scope.spawn(move || {
            let (mut dead, mut commits) = (0, 0u64);
            while !done.load(Ordering::Acquire) || commits < 3 {
                commits += 1;
                // The txg of the writer below is open until the freeze.
                let (frozen, rows) = {
                    let mut tree = tree.write();
                    let frozen = tree.freeze();
                    (frozen, rows_of(bench.ctx(), &tree.view()))
                };
                let written = frozen.write_out(&bench.ctx(), form(commits)).unwrap();
                assert_eq!(rows_of(bench.ctx(), &View::at(written.root)), rows, "what was written is what was frozen");
                let mut tree = tree.write();
                tree.settle(&frozen).unwrap();
                dead += tree.take_dead(Txg(u64::MAX)).len();
            }
            dead
        });
        for reader in 0..2u64 {
            scope.spawn(move || {
                let mut random = Random(reader);
                while !done.load(Ordering::Acquire) {
                    let key = number(below(&mut random, 2000) as u32);
                    let value = loop {
                        let guard = tree.read();
                        let Some(fetch) = guard.needs(&bench.cache, &key).unwrap() else {
                            break guard.get(&bench.ctx(), &key).unwrap();
                        };
                        drop(guard);
                        bench.ctx().fetch(&fetch).unwrap();
                    };
                    assert!(value.is_none_or(|value| value.len() == 40 && value.starts_with(&key)));
                    let view = tree.read().view();
                    let mut cursor = view.cursor(bench.ctx(), &key, None).unwrap();
                    let mut last = Vec::new();
                    for _ in 0..50 {
                        let Some((key, _)) = cursor.next().unwrap() else { break };
                        assert!(last.as_slice() < key);
                        last = key.to_vec();
                    }
                }
            });
        }
        let mut random = Random(77);
        for _ in 0..30_000 {
            let key = number(below(&mut random, 2000) as u32);
            let mut tree = tree.write();
            if below(&mut random, 3) == 0 {
                assert_eq!(tree.remove(&bench.ctx(), Txg(1), &key).unwrap(), model.remove(key.as_slice()).is_some());
            } else {
                let mut value = key.to_vec();
                value.resize(40, random.next() as u8);
                tree.put(&bench.ctx(), Txg(1), &key, &value).unwrap();
                model.insert(key.to_vec(), value);
            }
        }
        done.store(true, Ordering::Release);
        dead = committer.join().unwrap();
    });
    let mut tree = tree.into_inner();
    let written = bench.commit(&mut tree, 1 << 40);
    dead += tree.take_dead(Txg(u64::MAX)).len();
    assert_rows(bench.ctx(), &View::at(written.root), &model, "at the end");
    assert_sound(bench.ctx(), &tree);
    let live = count(bench.ctx(), written.root.unwrap());
    assert_eq!(live + dead, bench.frames.written().len(), "every frame is live or dead");
}

fn count(ctx: Context<'_>, root: Pointer) -> usize {
    let node = ctx.node(&root, None).unwrap();
    match &node.body {
        Body::Leaf(_) => 1,
        Body::Inner(inner) => {
            1 + inner.children.iter().map(|child| count(ctx, child.pointer().unwrap())).sum::<usize>()
        }
    }
}
