//! Random histories against maps: rows, stored roots, and dead frames.

use std::collections::BTreeSet;

use super::*;
use crate::tree::walk::{Visitor, walk};

/// A stored root, like that of a snapshot.
struct Kept {
    root: Option<Pointer>,
    map: Map,
    reached: BTreeSet<u32>,
}

struct Reached<'a>(&'a mut BTreeSet<u32>);

impl Visitor for Reached<'_> {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        assert!(self.0.insert(pointer.index), "a frame is named twice in one tree");
        Ok(true)
    }

    fn row(&mut self, _: &[u8], _: &[u8]) -> Result<(), PoolError> {
        Ok(())
    }
}

fn reached(ctx: Context<'_>, root: Option<Pointer>) -> BTreeSet<u32> {
    let mut set = BTreeSet::new();
    if let Some(root) = root {
        walk(&ctx, &root, Txg(0), &mut Reached(&mut set)).unwrap();
    }
    set
}

struct History {
    bench: Bench,
    random: Random,
    tree: Tree,
    map: Map,
    txg: u64,
    /// Freezes that are not settled yet: the freeze, its txg, its rows.
    frozen: Vec<(Frozen, u64, Map)>,
    kept: Vec<Kept>,
    views: Vec<(View, Map)>,
    dead: BTreeSet<u32>,
    freed: BTreeSet<u32>,
    highest: u8,
    settings: Settings,
    keys: usize,
    /// Number of different first bytes of keys.
    kinds: u32,
    /// Largest difference in length between keys, bytes.
    extension: usize,
}

impl History {
    fn new(seed: u64, page: usize, keys: usize) -> Self {
        Self::with(seed, Settings::with_page(page), keys)
    }

    fn with(seed: u64, settings: Settings, keys: usize) -> Self {
        Self {
            bench: Bench::new(),
            random: Random(seed),
            tree: Tree::empty(5, settings),
            map: Map::new(),
            txg: 1,
            frozen: Vec::new(),
            kept: Vec::new(),
            views: Vec::new(),
            dead: BTreeSet::new(),
            freed: BTreeSet::new(),
            highest: 0,
            settings,
            keys,
            kinds: 1,
            extension: usize::MAX,
        }
    }

    fn key(&mut self) -> Vec<u8> {
        let number = below(&mut self.random, self.keys) as u32;
        // Numbers are small: their first byte is zero.
        let mut key = (number | (number % self.kinds) << 24).to_be_bytes().to_vec();
        // Keys of several lengths, some of them prefixes of others.
        key.extend(std::iter::repeat_n(b'x', number as usize % (self.settings.longest_key() - 4).min(self.extension)));
        key
    }

    fn value(&mut self, key: &[u8]) -> Vec<u8> {
        let room = self.settings.leaf(key) / 4 - page::ROW_HEADER - key.len();
        let length = if below(&mut self.random, 8) == 0 {
            below(&mut self.random, room + 1)
        } else {
            below(&mut self.random, room / 3 + 1)
        };
        let byte = self.random.next() as u8;
        vec![byte; length]
    }

    fn put(&mut self) {
        let key = self.key();
        let value = self.value(&key);
        self.tree.put(&self.bench.ctx(), Txg(self.txg), &key, &value).unwrap();
        self.map.insert(key, value);
    }

    fn remove(&mut self) {
        let key = self.key();
        if below(&mut self.random, 2) == 0 {
            let prepared = self.tree.prepare(&self.bench.ctx(), Txg(self.txg), &key, None).unwrap();
            assert_eq!(prepared, self.map.contains_key(&key));
        }
        let existed = self.tree.remove(&self.bench.ctx(), Txg(self.txg), &key).unwrap();
        assert_eq!(existed, self.map.remove(&key).is_some());
    }

    fn remove_range(&mut self) {
        let (a, b) = (self.key(), self.key());
        let (from, mut to) = if a < b { (a, Some(b)) } else { (b, Some(a)) };
        if below(&mut self.random, 10) == 0 {
            to = None;
        }
        let existed = self.tree.remove_range(&self.bench.ctx(), Txg(self.txg), &from, to.as_deref()).unwrap();
        let before = self.map.len();
        self.map.retain(|key, _| *key < from || to.as_ref().is_some_and(|to| key >= to));
        assert_eq!(existed, self.map.len() < before);
    }

    fn look(&mut self) {
        let key = self.key_of_look();
        let ctx = self.bench.ctx();
        assert_eq!(self.tree.get(&ctx, &key).unwrap().as_ref(), self.map.get(&key));
        let before = self.map.range(..key.clone()).next_back().map(|(key, value)| (key.clone(), value.clone()));
        assert_eq!(self.tree.before(&ctx, &key).unwrap(), before);
        let pair = |row: Option<(&Vec<u8>, &Vec<u8>)>| row.map(|(key, value)| (key.clone(), value.clone()));
        assert_eq!(self.tree.first(&ctx).unwrap(), pair(self.map.first_key_value()));
        assert_eq!(self.tree.last(&ctx).unwrap(), pair(self.map.last_key_value()));
    }

    fn key_of_look(&mut self) -> Vec<u8> {
        let mut key = self.key();
        if below(&mut self.random, 4) == 0 {
            key.truncate(below(&mut self.random, 5));
        }
        key
    }

    fn range(&mut self) {
        let (a, b) = (self.key_of_look(), self.key_of_look());
        let to = (below(&mut self.random, 5) > 0).then_some(b);
        let mut cursor = self.tree.view().cursor(self.bench.ctx(), &a, to.as_deref()).unwrap();
        let mut wanted = self.map.range(a.clone()..).take_while(|(key, _)| to.as_ref().is_none_or(|to| *key < to));
        while let Some((key, value)) = cursor.next().unwrap() {
            let (k, v) = wanted.next().expect("no more rows than in the map");
            assert_eq!((key, value), (k.as_slice(), v.as_slice()));
        }
        assert!(wanted.next().is_none());
        self.range_from_one_leaf(&a, to.as_deref().unwrap_or_default());
    }

    /// The rows of a range: those of its first leaf, and those that a cursor finds after it.
    fn range_from_one_leaf(&self, from: &[u8], to: &[u8]) {
        let (ctx, mut found) = (self.bench.ctx(), Vec::new());
        let mut visit = |key: &[u8], value: &[u8]| {
            found.push((key.to_vec(), value.to_vec()));
            true
        };
        let rest = self.tree.scan_leaf(&ctx, from, to, &mut visit).unwrap();
        if let Some(rest) = rest {
            let end = Some(to).filter(|to| !to.is_empty());
            let mut cursor = self.tree.view().cursor(ctx, &rest, end).unwrap();
            while let Some((key, value)) = cursor.next().unwrap() {
                found.push((key.to_vec(), value.to_vec()));
            }
        }
        let before = |key: &[u8]| to.is_empty() || key < to;
        let wanted = self.map.range(from.to_vec()..).take_while(|(key, _)| before(key));
        assert!(found.iter().map(|(key, value)| (key, value)).eq(wanted), "{from:?} to {to:?}");
    }

    fn freeze(&mut self) {
        if self.frozen.len() < 2 {
            let frozen = self.tree.freeze();
            assert_rows(self.bench.ctx(), &frozen.view(), &self.map, "a freeze");
            self.frozen.push((frozen, self.txg, self.map.clone()));
            self.txg += 1;
        }
    }

    fn settle(&mut self) {
        if self.frozen.is_empty() {
            return;
        }
        let (frozen, txg, map) = self.frozen.remove(0);
        let written = frozen.write_out(&self.bench.ctx(), form(txg)).unwrap();
        // Unsettled changes are read from the freeze and from the frames alike.
        assert_rows(self.bench.ctx(), &View::at(written.root), &map, "what was written out");
        self.tree.settle(&frozen).unwrap();
        for pointer in self.tree.take_dead(Txg(txg)) {
            assert!(self.dead.insert(pointer.index), "dead twice");
        }
        let ctx = self.bench.ctx();
        let live = reached(ctx, written.root);
        let frames = self.bench.frames.all();
        assert!(live.is_disjoint(&self.dead), "dead and reached");
        assert_eq!(
            live.union(&self.dead).copied().collect::<BTreeSet<_>>(),
            frames,
            "all that was written is live or dead"
        );
        if below(&mut self.random, 2) == 0 {
            self.kept.push(Kept { root: written.root, map, reached: live.clone() });
        }
        self.free(&live);
    }

    /// Frees dead frames that no root references, and drops a snapshot now and then.
    fn free(&mut self, live: &BTreeSet<u32>) {
        if self.kept.len() > 4 {
            let gone = below(&mut self.random, self.kept.len());
            self.kept.remove(gone);
        }
        if !self.views.is_empty() {
            // A view reads frames that died after it was taken: they are freed only after it is
            // dropped.
            return;
        }
        let kept: BTreeSet<u32> = self.kept.iter().flat_map(|kept| kept.reached.iter().copied()).collect();
        for index in &self.dead {
            if !kept.contains(index) && !live.contains(index) && self.freed.insert(*index) {
                self.bench.frames.free(*index);
            }
        }
        if below(&mut self.random, 3) == 0 {
            self.bench.cache.clear();
        }
    }

    /// Imports the pool again: only committed rows exist.
    fn reopen(&mut self) {
        while !self.frozen.is_empty() {
            self.settle();
        }
        self.freeze();
        self.settle();
        assert_eq!(self.tree.dirty_bytes(), 0);
        let root = self.tree.stored_root().expect("nothing is dirty");
        self.bench.cache.clear();
        self.views.clear();
        self.tree = Tree::open(root, 5, self.settings);
    }

    fn compare(&mut self) {
        let ctx = self.bench.ctx();
        assert_sound(ctx, &self.tree);
        assert_rows(ctx, &self.tree.view(), &self.map, "the live tree");
        for kept in &self.kept {
            assert_rows(ctx, &View::at(kept.root), &kept.map, "a kept root");
        }
        for (view, map) in &self.views {
            assert_rows(ctx, view, map, "a view");
        }
        self.highest = self.highest.max(height(ctx, &self.tree));
    }

    /// Two roots, stored or live: the diff equals the difference of the maps.
    fn diff(&mut self) {
        let mut sides: Vec<(View, &Map)> = self.kept.iter().map(|kept| (View::at(kept.root), &kept.map)).collect();
        sides.push((self.tree.view(), &self.map));
        let (a, b) = (below(&mut self.random, sides.len()), below(&mut self.random, sides.len()));
        let ((old, was), (new, is)) = (&sides[a], &sides[b]);
        let keys: BTreeSet<&Vec<u8>> = was.keys().chain(is.keys()).collect();
        let mut wanted = keys.into_iter().filter(|key| was.get(*key) != is.get(*key));
        let mut diff = old.diff(self.bench.ctx(), new).unwrap();
        while let Some(changed) = diff.next().unwrap() {
            let key = wanted.next().expect("no more than differ");
            assert_eq!(changed.key, key);
            assert_eq!((changed.old, changed.new), (was.get(key).map(Vec::as_slice), is.get(key).map(Vec::as_slice)));
        }
        assert!(wanted.next().is_none());
    }

    fn run(&mut self, steps: usize) {
        // Growing and shrinking alternate, so that a tree becomes high and low again.
        for step in 0..steps {
            let growing = (step / (steps / 6).max(1)).is_multiple_of(2);
            match below(&mut self.random, 100) {
                0..=49 if growing => self.put(),
                0..=19 => self.put(),
                20..=69 => self.remove(),
                70 => self.remove_range(),
                71..=79 => self.look(),
                80 | 81 => self.range(),
                82..=84 => self.freeze(),
                85..=87 => self.settle(),
                88 if self.views.len() < 3 => self.views.push((self.tree.view(), self.map.clone())),
                88 => {
                    self.views.remove(0);
                }
                89 => self.diff(),
                90 if below(&mut self.random, 5) == 0 => self.compare(),
                91 if below(&mut self.random, 20) == 0 => self.reopen(),
                _ => self.put(),
            }
        }
        self.compare();
        self.reopen();
        self.compare();
    }
}

#[test]
fn histories_on_tiny_pages() {
    let mut highest = 0;
    for seed in 0..12 {
        let mut history = History::new(seed, 256, 700);
        history.run(4000);
        highest = highest.max(history.highest);
    }
    assert!(highest >= 5, "trees of {highest} levels only");
}

/// All nodes are sealed by the adapter of an encrypted file system, and opened by it.
#[test]
fn histories_of_sealed_trees() {
    for (seed, page) in [(40, 256), (41, 300), (42, 1 << 10)] {
        let mut history = History::new(seed, page, 700);
        history.bench = Bench::sealed();
        history.run(2500);
        let written = history.bench.frames.written();
        assert!(written.len() > 100 && written.iter().all(|(pointer, _)| pointer.is_sealed()));
    }
}

#[test]
fn histories_on_middling_pages() {
    for seed in 100..106 {
        History::new(seed, 1 << 10, 1500).run(5000);
    }
}

#[test]
fn histories_of_several_kinds_of_keys_with_small_leaves_for_one() {
    for seed in 300..306 {
        let settings = Settings::with_page(4 << 10).with_scattered(1, 512);
        let mut history = History::with(seed, settings, 1500);
        (history.kinds, history.extension) = (3, 60);
        history.run(5000);
    }
}

#[test]
fn histories_on_whole_pages() {
    for seed in 200..202 {
        History::new(seed, 32 << 10, 4000).run(5000);
    }
}

/// Many more histories: `cargo test --release -p nacre-pool -- --ignored long_histories`.
#[test]
#[ignore = "takes minutes"]
fn long_histories() {
    for seed in 1000..1600 {
        let page = [256, 300, 512, 700, 1 << 10, 4 << 10][seed as usize % 6];
        History::new(seed, page, 200 + (seed as usize % 7) * 300).run(6000);
    }
}
