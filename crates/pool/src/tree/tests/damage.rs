//! Damaged frames are errors that name them.

use super::*;
use crate::error::Damage;
use crate::frames::{Frames, NewFrame, Owner, WriteStream};
use crate::pointer::FrameKind;
use crate::tree::walk::{Visitor, walk};

fn number(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

fn stored(bench: &Bench) -> (Tree, Pointer) {
    let mut tree = Tree::empty(1, Settings::with_page(512));
    for n in 0..2000 {
        tree.put(&bench.ctx(), Txg(1), &number(n), &[n as u8; 30]).unwrap();
    }
    let root = bench.commit(&mut tree, 1).root.unwrap();
    bench.cache.clear();
    (tree, root)
}

/// The leaf of a row and the rows in it.
fn leaf_of(bench: &Bench, root: Pointer, key: &[u8]) -> (Pointer, usize) {
    let mut pointer = root;
    loop {
        let node = bench.ctx().node(&pointer, None).unwrap();
        match &node.body {
            Body::Leaf(leaf) => return (pointer, leaf.len()),
            Body::Inner(inner) => pointer = inner.child(inner.find(key)).unwrap().pointer().unwrap(),
        }
    }
}

fn assert_names(error: &PoolError, wanted: Pointer) {
    assert!(matches!(error, PoolError::Frame { pointer, .. } if *pointer == wanted), "{error}");
}

#[test]
fn a_damaged_leaf_is_named_and_the_rest_is_there() {
    let bench = Bench::new();
    let (mut tree, root) = stored(&bench);
    let (leaf, lost) = leaf_of(&bench, root, &number(1000));
    bench.cache.clear();
    bench.frames.damage(leaf.index);
    let ctx = bench.ctx();
    assert_names(&tree.get(&ctx, &number(1000)).unwrap_err(), leaf);
    assert_names(&tree.put(&ctx, Txg(2), &number(1000), b"x").unwrap_err(), leaf);
    assert_names(&tree.remove(&ctx, Txg(2), &number(1000)).unwrap_err(), leaf);
    assert_eq!(tree.get(&ctx, &number(500)).unwrap().unwrap(), [500u32 as u8; 30]);
    let mut cursor = tree.view().cursor(ctx, &number(900), None).unwrap();
    let error = loop {
        match cursor.next() {
            Ok(row) => assert!(row.is_some(), "the damage comes first"),
            Err(error) => break error,
        }
    };
    assert_names(&error, leaf);
    assert!(cursor.next().unwrap().is_none());

    // A walk that accepts damage continues after it.
    struct Check(usize, Vec<Pointer>);
    impl Visitor for Check {
        fn frame(&mut self, _: &Pointer) -> Result<bool, PoolError> {
            Ok(true)
        }
        fn row(&mut self, _: &[u8], _: &[u8]) -> Result<(), PoolError> {
            self.0 += 1;
            Ok(())
        }
        fn damaged(&mut self, pointer: &Pointer, _: PoolError) -> Result<(), PoolError> {
            self.1.push(*pointer);
            Ok(())
        }
    }
    let mut check = Check(0, Vec::new());
    walk(&ctx, &root, Txg(0), &mut check).unwrap();
    assert_eq!((check.0, check.1), (2000 - lost, vec![leaf]));
    let mut nothing = Check(0, Vec::new());
    walk(&ctx, &root, Txg(1), &mut nothing).unwrap();
    assert_eq!((nothing.0, nothing.1.len()), (0, 0), "nothing was born later");

    // Removing the range around it does not need to read it.
    assert!(tree.remove_range(&ctx, Txg(2), &number(800), Some(&number(1200))).unwrap());
    assert_eq!(rows_of(ctx, &tree.view()).len(), 1600);
    assert_sound(ctx, &tree);
}

#[test]
fn a_failed_change_leaves_the_rows_as_they_were() {
    let bench = Bench::new();
    let (mut tree, root) = stored(&bench);
    let (leaf, _) = leaf_of(&bench, root, &number(1000));
    bench.frames.damage(leaf.index);
    bench.cache.clear();
    for _ in 0..3 {
        assert!(tree.put(&bench.ctx(), Txg(2), &number(1000), b"x").is_err());
    }
    assert_sound_above(&bench, &tree);
    bench.frames.damage(leaf.index);
    bench.cache.clear();
    assert_eq!(tree.get(&bench.ctx(), &number(1000)).unwrap().unwrap(), [1000u32 as u8; 30]);
    let written = bench.commit(&mut tree, 2);
    // The inner nodes on the path were copied, and each is dead once.
    assert_eq!(tree.take_dead(Txg(2)).len() as u64, written.frames);
    assert_eq!(rows_of(bench.ctx(), &tree.view()).len(), 2000);
}

fn assert_sound_above(bench: &Bench, tree: &Tree) {
    let frozen_cost = tree.dirty;
    let mut cost = 0;
    let mut child = tree.root.as_ref().unwrap();
    while let Child::Dirty(node) = child {
        cost += node.cost();
        let Body::Inner(inner) = &node.body else { break };
        child = inner.child(inner.find(&number(1000))).unwrap();
    }
    assert_eq!(cost, frozen_cost);
    let leaf = child.pointer().unwrap();
    assert_names(&bench.ctx().node(&leaf, Some(0)).unwrap_err(), leaf);
}

/// A frame with a valid checksum may have any content, if a faulty program wrote it.
#[test]
fn nodes_that_lead_in_circles_or_astray_are_refused() {
    let bench = Bench::new();
    let (_, root) = stored(&bench);
    let write = |kind, content: &[u8]| {
        bench
            .frames
            .write(&NewFrame {
                stream: WriteStream::Metadata,
                kind,
                owner: Owner::default(),
                birth: Txg(1),
                content,
                compression: CompressionSetting::Off,
                checksum: ChecksumKind::Xxh3,
            })
            .unwrap()
    };
    // An inner node of height 5 over the root, which is lower than 4.
    let mut content = Vec::new();
    node::Inner::over(5, Child::Clean(root)).encode(&[root], &mut content);
    let wrong = write(FrameKind::Inner, &content);
    let tree = Tree::open(Some(wrong), 1, Settings::default());
    let error = tree.get(&bench.ctx(), b"x").unwrap_err();
    assert!(matches!(error, PoolError::Frame { pointer, damage: Damage::Structure(_) } if pointer == root), "{error}");
    // A leaf referenced as an inner node, and the other way round.
    let leaf = leaf_of(&bench, root, b"").0;
    for mut pointer in [root, leaf] {
        bench.cache.clear();
        pointer.kind = if pointer.kind == FrameKind::Leaf { FrameKind::Inner } else { FrameKind::Leaf };
        let error = View::at(Some(pointer)).get(&bench.ctx(), b"x").unwrap_err();
        assert_names(&error, pointer);
    }
    // Not a node at all.
    let junk = write(FrameKind::Leaf, b"not a node");
    assert_names(&View::at(Some(junk)).first(&bench.ctx()).unwrap_err(), junk);
    // File content referenced as a node.
    bench.cache.insert_data(&root, Arc::from([1u8, 2].as_slice()));
    assert_names(&View::at(Some(root)).get(&bench.ctx(), b"x").unwrap_err(), root);
}
