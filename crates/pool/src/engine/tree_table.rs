//! The rows of a dataset, stored in a tree.
//!
//! Callers: files of a dataset, under the lock of their table. Invariant: the memory of nodes that
//! wait for a commit is counted.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::Cache;
use crate::error::PoolError;
use crate::files::{Absent, Change, Share, Table, Throttle};
use crate::frames::Frames;
use crate::pointer::{Pointer, Txg};
use crate::rows::keys;
use crate::tree::{Context, Frozen, Settings, Tree};

/// The rows of a dataset, stored in a tree.
pub struct TreeTable {
    pub(super) tree: Tree,
    frames: Arc<dyn Frames>,
    cache: Arc<Cache>,
    held: Share,
    /// The cache's misses when this table last looked, and the number of further looks for absent
    /// nodes.
    misses: AtomicU64,
    looks: AtomicU64,
}

/// Number of keys that are checked for absent nodes after a cache miss: each check descends the
/// tree, which a warm cache does not need.
const LOOKS: u64 = 512;

/// Most bytes of a leaf of names. Names are spread over a directory by their hash: a few thousand
/// change most of its leaves, and a commit writes all changed ones.
const NAMES_LEAF: usize = 4 << 10;

impl std::fmt::Debug for TreeTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TreeTable").field("tree", &self.tree).finish_non_exhaustive()
    }
}

impl TreeTable {
    /// Opens the tree with this root.
    pub(super) fn open(
        (dataset, root): (u64, Option<Pointer>),
        frames: &Arc<dyn Frames>,
        cache: &Arc<Cache>,
        throttle: &Arc<Throttle>,
    ) -> Self {
        Self {
            tree: Tree::open(root, dataset, Settings::default().with_scattered(keys::NAME, NAMES_LEAF)),
            frames: Arc::clone(frames),
            cache: Arc::clone(cache),
            held: Share::new(Arc::clone(throttle)),
            misses: AtomicU64::new(u64::MAX),
            looks: AtomicU64::new(LOOKS),
        }
    }

    /// Notes that a frozen tree was written.
    pub(super) fn settle(&mut self, frozen: &Frozen) -> Result<(), PoolError> {
        let settled = self.tree.settle(frozen);
        self.held.become_now(self.tree.dirty_bytes());
        settled
    }

    fn context(&self) -> Context<'_> {
        Context { frames: &*self.frames, cache: &self.cache }
    }
}

impl TreeTable {
    /// Whether the cache missed anything lately. Not exact: several threads count at once.
    fn may_miss(&self) -> bool {
        let misses = self.cache.misses();
        if self.misses.swap(misses, Ordering::Relaxed) != misses {
            self.looks.store(LOOKS, Ordering::Relaxed);
            return true;
        }
        let looks = self.looks.load(Ordering::Relaxed);
        if looks > 0 {
            self.looks.store(looks - 1, Ordering::Relaxed);
        }
        looks > 0
    }
}

impl TreeTable {
    /// Reads everything that the changes need before the first one, so that read errors come first,
    /// and finds which of the rows to remove exist. Only the first change may still fail: nothing
    /// is half done by then.
    fn prepare(&mut self, txg: Txg, turns: &Turns<'_>) -> Result<FoundRows, PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let mut found = FoundRows::of(turns.changes.len());
        for (at, change) in turns.in_order().skip(1) {
            if self.tree.prepare(&context, txg, change.key, change.row)? {
                found.note(at);
            }
        }
        Ok(found)
    }

    fn change_prepared(&mut self, txg: Txg, turns: &Turns<'_>, found: &FoundRows) -> Result<(), PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        for (turn, (at, change)) in turns.in_order().enumerate() {
            let put_at = if change.row.is_none() { turns.last_put(change.key) } else { None };
            let changed = match change.row {
                Some(row) => self.tree.put(&context, txg, change.key, row),
                // The same batch puts it again.
                None if put_at > Some(at) => Ok(()),
                None if put_at.is_some() || found.has(at) => self.tree.remove_present(&context, txg, change.key),
                None if turn == 0 => self.tree.remove(&context, txg, change.key).map(drop),
                None => Ok(()),
            };
            if let Err(error) = changed {
                if turn > 0 {
                    // A part of the operation is in the tree: no commit may make that durable.
                    self.held.fail(&error);
                }
                return Err(error);
            }
        }
        Ok(())
    }
}

/// The changes of a batch in the order in which they are applied: rows are put before others are
/// removed. A leaf that becomes empty is removed, and its keys then belong to a neighbour, which
/// was not prepared to take a row.
struct Turns<'b> {
    changes: &'b [Change<'b>],
    /// The last put of each key, if there are many changes.
    puts: HashMap<&'b [u8], usize>,
}

/// Up to this many changes are searched one by one.
const FEW: usize = 32;

impl<'b> Turns<'b> {
    fn of(changes: &'b [Change<'b>]) -> Self {
        let mut puts = HashMap::new();
        if changes.len() > FEW && changes.iter().any(|change| change.row.is_none()) {
            puts.extend(
                changes
                    .iter()
                    .enumerate()
                    .filter(|(_, change)| change.row.is_some())
                    .map(|(at, change)| (change.key, at)),
            );
        }
        Self { changes, puts }
    }

    /// The changes in the order of application, with their positions in the batch.
    fn in_order(&self) -> impl Iterator<Item = (usize, &'b Change<'b>)> + use<'b> {
        let changes = self.changes;
        [false, true].into_iter().flat_map(move |removed| {
            changes.iter().enumerate().filter(move |(_, change)| change.row.is_none() == removed)
        })
    }

    fn last_put(&self, key: &[u8]) -> Option<usize> {
        if self.changes.len() > FEW {
            return self.puts.get(key).copied();
        }
        self.changes.iter().rposition(|change| change.row.is_some() && change.key == key)
    }
}

/// The rows of a batch that were found, one bit each.
struct FoundRows {
    first: u64,
    more: Vec<u64>,
}

impl FoundRows {
    fn of(changes: usize) -> Self {
        Self { first: 0, more: vec![0; changes / 64] }
    }

    fn note(&mut self, at: usize) {
        let word = match at / 64 {
            0 => Some(&mut self.first),
            word => self.more.get_mut(word - 1),
        };
        word.into_iter().for_each(|word| *word |= 1 << (at % 64));
    }

    fn has(&self, at: usize) -> bool {
        let word = match at / 64 {
            0 => Some(&self.first),
            word => self.more.get(word - 1),
        };
        word.is_some_and(|word| word >> (at % 64) & 1 == 1)
    }
}

impl Table for TreeTable {
    fn absent(&self, key: &[u8]) -> Result<Option<Absent>, PoolError> {
        if !self.may_miss() {
            return Ok(None);
        }
        let Some(fetch) = self.tree.needs(&self.cache, key)? else { return Ok(None) };
        let (frames, cache) = (Arc::clone(&self.frames), Arc::clone(&self.cache));
        Ok(Some(Box::new(move || Context { frames: &*frames, cache: &cache }.fetch(&fetch))))
    }

    fn absent_ahead(&self, range: &Range<Vec<u8>>, (near, far): (usize, usize)) -> Result<Option<Absent>, PoolError> {
        if !self.may_miss() {
            return Ok(None);
        }
        let (view, range) = (self.tree.view(), range.clone());
        if !view.lacks(&self.cache, &range.start, &range.end, near) {
            return Ok(None);
        }
        let (frames, cache) = (Arc::clone(&self.frames), Arc::clone(&self.cache));
        Ok(Some(Box::new(move || {
            let end = Some(range.end.as_slice()).filter(|end| !end.is_empty());
            let mut cursor = view.cursor(Context { frames: &*frames, cache: &cache }, &range.start, end)?;
            for _ in 1..far {
                if !cursor.skip_leaf()? {
                    break;
                }
            }
            Ok(())
        })))
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError> {
        self.tree.get(&self.context(), key)
    }

    fn scan(&self, range: Range<Vec<u8>>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), PoolError> {
        let Some(rest) = self.tree.scan_leaf(&self.context(), &range.start, &range.end, visit)? else { return Ok(()) };
        let end = Some(range.end.as_slice()).filter(|end| !end.is_empty());
        // The view is dropped before the table can be changed again: the lock is held until then.
        let mut cursor = self.tree.view().cursor(self.context(), &rest, end)?;
        while let Some((key, row)) = cursor.next()? {
            if !visit(key, row) {
                break;
            }
        }
        Ok(())
    }

    fn change(&mut self, txg: Txg, changes: &[Change<'_>]) -> Result<(), PoolError> {
        let turns = Turns::of(changes);
        let changed = self.prepare(txg, &turns).and_then(|found| self.change_prepared(txg, &turns, &found));
        self.held.become_now(self.tree.dirty_bytes());
        changed
    }

    fn dirty_bytes(&self) -> u64 {
        self.tree.dirty_bytes()
    }
}
