//! The rows of a dataset in its tree.
//!
//! Callers: files of a dataset, under the lock of their table. Invariant: what the tree holds in memory for a commit to come is counted.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::Cache;
use crate::error::PoolError;
use crate::files::{Absent, Batch, Share, Table, Throttle};
use crate::frames::Frames;
use crate::pointer::{Pointer, Txg};
use crate::tree::{Context, Frozen, Settings, Tree};

/// The rows of a dataset in its tree.
pub struct TreeTable {
    pub(super) tree: Tree,
    frames: Arc<dyn Frames>,
    cache: Arc<Cache>,
    held: Share,
    /// The cache's misses when this table last looked, and how many more times it looks for what is missing.
    misses: AtomicU64,
    looks: AtomicU64,
}

/// After a miss of the cache so many keys are looked at for what is missing: each look is a way down the tree, which a warm cache does not need.
const LOOKS: u64 = 512;

impl std::fmt::Debug for TreeTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TreeTable").field("tree", &self.tree).finish_non_exhaustive()
    }
}

impl TreeTable {
    /// The tree with this root.
    pub(super) fn open(
        (dataset, root): (u64, Option<Pointer>),
        frames: &Arc<dyn Frames>,
        cache: &Arc<Cache>,
        throttle: &Arc<Throttle>,
    ) -> Self {
        Self {
            tree: Tree::open(root, dataset, Settings::default()),
            frames: Arc::clone(frames),
            cache: Arc::clone(cache),
            held: Share::new(Arc::clone(throttle)),
            misses: AtomicU64::new(u64::MAX),
            looks: AtomicU64::new(LOOKS),
        }
    }

    /// A freeze was written out.
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
    /// Whether anything was missing lately. Not exact: several threads count at once.
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
        let end = Some(range.end.as_slice()).filter(|end| !end.is_empty());
        // The view is gone before the table can be changed again: the lock is held for as long.
        let mut cursor = self.tree.view().cursor(self.context(), &range.start, end)?;
        while let Some((key, row)) = cursor.next()? {
            if !visit(key, row) {
                break;
            }
        }
        Ok(())
    }

    fn change(&mut self, txg: Txg, batch: &Batch) -> Result<(), PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        // What cannot be read is found before anything is changed. The first change may still find it: nothing is half done by then.
        let mut rest = batch.changes().iter().enumerate().skip(1);
        // Which of the first rows were found, a bit each: they need not be looked for again where they are to go.
        let mut found = 0_u64;
        let prepared = rest.try_for_each(|(at, change)| {
            let there = self.tree.prepare(&context, txg, &change.key, change.row.as_deref())?;
            found |= u64::from(there).checked_shl(u32::try_from(at).unwrap_or(u32::MAX)).unwrap_or(0);
            Ok(())
        });
        if prepared.is_err() {
            self.held.become_now(self.tree.dirty_bytes());
            return prepared;
        }
        let was_found = |at: usize| u32::try_from(at).ok().and_then(|at| found.checked_shr(at)).is_some_and(|bits| bits & 1 == 1);
        let mut changed = Ok(());
        for (at, change) in batch.changes().iter().enumerate() {
            changed = match &change.row {
                Some(row) => self.tree.put(&context, txg, &change.key, row),
                None if was_found(at) => self.tree.remove_present(&context, txg, &change.key),
                None => self.tree.remove(&context, txg, &change.key).map(drop),
            };
            if let Err(error) = &changed {
                if at > 0 {
                    // A part of the operation is in the tree: no commit may make that durable.
                    self.held.fail(error);
                }
                break;
            }
        }
        self.held.become_now(self.tree.dirty_bytes());
        changed
    }

    fn dirty_bytes(&self) -> u64 {
        self.tree.dirty_bytes()
    }
}
