//! Trees over frames in memory, against maps.

mod commits;
mod damage;
mod memory;
mod model;
mod ranges;
mod shape;
mod speed;

use std::collections::BTreeMap;

use super::commit::{Form, Written};
use super::node::{Body, Child, Node};
use super::*;
use crate::crypt::{PlainFrames, SealedFrames, SystemRandom};
use crate::device::Random;
use crate::frames::CompressionSetting;
use crate::pointer::ChecksumKind;
use memory::Memory;

type Map = BTreeMap<Vec<u8>, Vec<u8>>;

fn below(random: &mut Random, bound: usize) -> usize {
    random.below(bound as u64) as usize
}

/// Frames and a cache for a test.
struct Bench {
    frames: Arc<Memory>,
    /// The same frames, through the adapter of an encrypted file system.
    sealed: Option<SealedFrames>,
    cache: Cache,
}

impl Bench {
    fn new() -> Self {
        Self { frames: Arc::default(), sealed: None, cache: Cache::new(1 << 20) }
    }

    /// The bench of an encrypted file system.
    fn sealed() -> Self {
        let bench = Self::new();
        let below = Arc::clone(&bench.frames) as Arc<dyn Frames>;
        let keys = crate::crypt::family_for_tests(&[1]);
        let sealed =
            SealedFrames::new(below, keys, Arc::new(SystemRandom::default()), Arc::default(), PlainFrames::Refused);
        Self { sealed: Some(sealed), ..bench }
    }

    fn ctx(&self) -> Context<'_> {
        let frames: &dyn Frames = match &self.sealed {
            Some(sealed) => sealed,
            None => &*self.frames,
        };
        Context { frames, cache: &self.cache }
    }

    fn commit(&self, tree: &mut Tree, txg: u64) -> Written {
        let frozen = tree.freeze();
        let written = frozen.write_out(&self.ctx(), form(txg)).unwrap();
        tree.settle(&frozen).unwrap();
        written
    }
}

fn form(txg: u64) -> Form {
    Form { txg: Txg(txg), compression: CompressionSetting::Lz4, checksum: ChecksumKind::Xxh3 }
}

fn rows_of(ctx: Context<'_>, view: &View) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut cursor = view.cursor(ctx, &[], None).unwrap();
    let mut rows = Vec::new();
    while let Some((key, value)) = cursor.next().unwrap() {
        rows.push((key.to_vec(), value.to_vec()));
    }
    assert!(cursor.next().unwrap().is_none());
    rows
}

fn assert_rows(ctx: Context<'_>, view: &View, map: &Map, what: &str) {
    let rows = rows_of(ctx, view);
    assert_eq!(rows.len(), map.len(), "{what}");
    assert!(rows.iter().map(|(key, value)| (key, value)).eq(map.iter()), "{what}");
}

/// Checks every rule of a tree in memory: order, bounds, sizes, levels, generations, and the
/// accounting of dirty bytes to the byte.
fn assert_sound(ctx: Context<'_>, tree: &Tree) {
    let mut cost = 0;
    if let Some(root) = &tree.root {
        sound(ctx, tree, root, None, &[], None, u64::MAX, &mut cost);
    }
    assert_eq!(tree.dirty, cost, "the account of dirty bytes");
}

#[allow(clippy::too_many_arguments)]
fn sound(
    ctx: Context<'_>,
    tree: &Tree,
    child: &Child,
    level: Option<u8>,
    low: &[u8],
    high: Option<&[u8]>,
    above: u64,
    cost: &mut u64,
) {
    let (node, dirty) = match child {
        Child::Clean(pointer) => (ctx.node(pointer, level).unwrap(), false),
        Child::Dirty(node) => (Arc::clone(node), true),
    };
    let generation = if dirty { node.generation } else { 0 };
    assert!(generation <= above && generation <= tree.generation, "a child is not younger than its parent");
    if dirty && generation == tree.generation {
        assert!(node.stored.get().is_none());
        *cost += node.cost();
    }
    assert!(level.is_none_or(|level| level == node.level()));
    match &node.body {
        Body::Leaf(leaf) => {
            assert!(leaf.len() > 0 && leaf.used() <= tree.settings.page);
            let used: usize =
                (0..leaf.len()).map(|at| leaf.row(at).map(|(key, value)| page::row_length(key, value)).unwrap()).sum();
            assert_eq!(used + page::HEADER, leaf.used());
            assert!((1..leaf.len()).all(|at| leaf.key(at - 1) < leaf.key(at)));
            assert!(low <= leaf.key(0) && high.is_none_or(|high| leaf.key(leaf.len() - 1) < high));
        }
        Body::Inner(inner) => {
            assert!(inner.len() > 0 && inner.used() <= tree.settings.page && inner.key(0).is_empty());
            assert!(level.is_some() || inner.len() > 1, "a root over one child is needless");
            for at in 0..inner.len() {
                let low = if at == 0 { low } else { inner.key(at) };
                let high = if at + 1 < inner.len() { Some(inner.key(at + 1)) } else { high };
                assert!(high.is_none_or(|high| low < high));
                let above = if dirty { generation } else { 0 };
                sound(ctx, tree, inner.child(at).unwrap(), Some(inner.level() - 1), low, high, above, cost);
            }
        }
    }
}

fn height(ctx: Context<'_>, tree: &Tree) -> u8 {
    match &tree.root {
        None => 0,
        Some(Child::Clean(pointer)) => ctx.node(pointer, None).unwrap().level() + 1,
        Some(Child::Dirty(node)) => node.level() + 1,
    }
}

/// Bytes and number of all leaves.
fn leaves(ctx: Context<'_>, child: &Child) -> (usize, usize) {
    let node: Arc<Node> = match child {
        Child::Clean(pointer) => ctx.node(pointer, None).unwrap(),
        Child::Dirty(node) => Arc::clone(node),
    };
    match &node.body {
        Body::Leaf(leaf) => (leaf.used(), 1),
        Body::Inner(inner) => {
            inner.children.iter().map(|child| leaves(ctx, child)).fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
        }
    }
}
