//! One live dataset: its files over its tree, and what a commit takes of it.

use std::ops::Range;
use std::sync::Arc;

use super::{Pool, as_pool_error};
use crate::cache::Cache;
use crate::error::PoolError;
use crate::files::{Batch, Files, Ground, Recorder, Table};
use crate::frames::Frames;
use crate::pointer::{Pointer, Txg};
use crate::tree::{Context, Frozen, Settings, Tree};

/// The rows of a dataset in its tree.
pub struct TreeTable {
    pub(super) tree: Tree,
    frames: Arc<dyn Frames>,
    cache: Arc<Cache>,
}

impl std::fmt::Debug for TreeTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TreeTable").field("tree", &self.tree).finish_non_exhaustive()
    }
}

impl Table for TreeTable {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError> {
        self.tree.get(&Context { frames: &*self.frames, cache: &self.cache }, key)
    }

    fn scan(&self, range: Range<Vec<u8>>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let end = Some(range.end.as_slice()).filter(|end| !end.is_empty());
        // The view is gone before the table can be changed again: the lock is held for as long.
        let mut cursor = self.tree.view().cursor(context, &range.start, end)?;
        while let Some((key, row)) = cursor.next()? {
            if !visit(key, row) {
                break;
            }
        }
        Ok(())
    }

    fn change(&mut self, txg: Txg, batch: &Batch) -> Result<(), PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        for change in batch.changes() {
            match &change.row {
                Some(row) => self.tree.put(&context, txg, &change.key, row)?,
                None => {
                    self.tree.remove(&context, txg, &change.key)?;
                }
            }
        }
        Ok(())
    }
}

/// A dataset that is in use.
#[derive(Debug)]
pub struct Dataset {
    id: u64,
    files: Files<TreeTable>,
}

/// What a commit takes of a dataset while nobody is inside.
pub(super) struct Taken {
    pub(super) dataset: Arc<Dataset>,
    pub(super) frozen: Frozen,
    /// What new content frames are charged, bytes.
    pub(super) written: u64,
    /// Content frames that no row names any more.
    pub(super) freed: Vec<Pointer>,
}

impl Dataset {
    fn ground(pool: &Pool, id: u64) -> Ground {
        Ground {
            dataset: id,
            gate: Arc::clone(&pool.gate),
            frames: Arc::clone(&pool.content),
            clock: Arc::clone(&pool.clock),
            storing: pool.storing(),
        }
    }

    fn table(pool: &Pool, id: u64, root: Option<Pointer>) -> TreeTable {
        let tree = Tree::open(root, id, Settings::default());
        TreeTable { tree, frames: Arc::clone(&pool.frames), cache: Arc::clone(&pool.cache) }
    }

    /// A dataset with an empty root directory.
    pub(super) fn format(pool: &Pool, id: u64) -> Result<Self, PoolError> {
        let files = Files::format(Self::ground(pool, id), Self::table(pool, id, None), (pool.entropy)())?;
        Ok(Self::recorded(pool, id, files))
    }

    /// The dataset with this root.
    pub(super) fn open(pool: &Pool, id: u64, root: Option<Pointer>) -> Result<Self, PoolError> {
        let files = Files::open(Self::ground(pool, id), Self::table(pool, id, root))?;
        Ok(Self::recorded(pool, id, files))
    }

    fn recorded(pool: &Pool, id: u64, files: Files<TreeTable>) -> Self {
        if let Some(log) = pool.log.get() {
            files.record_to(Arc::clone(log) as Arc<dyn Recorder>);
        }
        Self { id, files }
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its files.
    #[must_use]
    pub fn files(&self) -> &Files<TreeTable> {
        &self.files
    }

    /// Flushes and freezes. Called while nobody is inside.
    pub(super) fn take(self: &Arc<Self>, txg: Txg) -> Result<Taken, PoolError> {
        self.files.flush(txg).map_err(as_pool_error)?;
        let frozen = self.files.with_table(|table| table.tree.freeze());
        Ok(Taken { dataset: Arc::clone(self), frozen, written: self.files.take_written(), freed: self.files.take_freed() })
    }
}
