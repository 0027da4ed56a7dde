//! Copy-on-write B+trees whose nodes are frames. A tree maps keys (bytes, in their order) to
//! values; each dataset is one, and so is the catalog.
//!
//! Callers: the catalog and the files of datasets, which put rows; commits; snapshots, `check` and
//! destroying, which walk roots.
//!
//! ```text
//!  tree      a live tree, views of it, settings           here
//!  look      reads of rows by key, first and last ones    look
//!  change    put, remove, split, merge                    change
//!  commit    freeze, write out, settle                    commit
//!  cursor    scans with read-ahead                        cursor
//!  walk,diff all frames of a root; differing rows of two  walk, diff
//!  since     changes of a root since a txg                since
//!  load      sorted rows straight into full leaves        load
//!  node,page nodes in memory and on a device              node, page
//! ```
//!
//! # How to share a tree
//! A [`Tree`] is changed through `&mut` by one writer at a time and read through `&` by any number
//! of readers: put it behind a reader-writer lock. Look-ups take the lock for reading and borrow;
//! scans take a [`View`] and release the lock. A view costs the reader one reference count, and the
//! writer one copy of each node that it then changes for the first time: take one per scan, not one
//! per look-up. To avoid waiting for a device under the lock, call [`Tree::needs`] first and
//! [`Context::fetch`] for its result without the lock.
//!
//! # Commits
//! [`Tree::freeze`] under the same barrier as all trees of a txg, [`Frozen::write_out`] in the
//! background while the live tree is changed further, [`Tree::settle`] when it is written; freezes
//! are written out and settled in their order. [`Tree::take_dead`] then returns the frames that the
//! txg freed.
//!
//! # Invariants
//! - A frame is written once, and becomes dead once: when its node is replaced or dropped in the
//!   live tree.
//! - A node in a frozen tree is never changed; the live tree copies it.
//! - An error in an operation leaves the rows as they were (a range may be removed in part).

pub(crate) mod change;
pub mod commit;
pub mod cursor;
pub mod diff;
pub mod load;
mod look;
pub(crate) mod node;
pub(crate) mod page;
pub mod since;
pub mod walk;

use std::sync::Arc;

pub(crate) use node::MAX_LEVEL;
pub(crate) use page::{HEADER as NODE_HEADER, MAX_CONTENT};

pub use commit::{Frozen, Written};
pub use cursor::Cursor;
pub use load::Loader;
pub use look::Fetch;

use crate::cache::Cache;
use crate::error::PoolError;
use crate::frames::Frames;
use crate::pointer::{Pointer, Txg};
use change::{DeadNodes, TreeChange};
use node::{Child, Node};
use page::ROW_HEADER;

/// A row: key and value.
pub type Row<'a> = (&'a [u8], &'a [u8]);

/// Source of nodes: passed to every function that may have to read one.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The frames.
    pub frames: &'a dyn Frames,
    /// The cache in front of them.
    pub cache: &'a Cache,
}

impl std::fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context<'_> {
    pub(crate) fn node(&self, pointer: &Pointer, level: Option<u8>) -> Result<Arc<Node>, PoolError> {
        self.cache.node(self.frames, pointer, level)
    }

    /// Reads the node that [`Tree::needs`] returned into the cache.
    ///
    /// # Errors
    /// Errors of [`Frames::read`], and damage.
    pub fn fetch(&self, fetch: &Fetch) -> Result<(), PoolError> {
        self.node(&fetch.pointer, fetch.level).map(|_| ())
    }
}

/// Layout of a tree's nodes. Not stored: trees of other settings can be read as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    page: usize,
    /// First byte of keys with smaller leaves, and the size limit of these leaves.
    scattered: Option<(u8, usize)>,
}

impl Default for Settings {
    /// Nodes of 32 KiB.
    fn default() -> Self {
        Self { page: 32 << 10, scattered: None }
    }
}

impl Settings {
    /// Nodes of at most so many bytes, 256 to 65,536. Tests use small ones: deep trees of few rows.
    #[must_use]
    pub fn with_page(page: usize) -> Self {
        Self { page: page.clamp(256, MAX_CONTENT), scattered: None }
    }

    /// As `self`, with a smaller limit for leaves of keys that begin with this byte: scattered
    /// changes of such keys write a whole leaf each. Their rows are shorter than a quarter of that.
    #[must_use]
    pub fn with_scattered(self, first: u8, leaf: usize) -> Self {
        Self { scattered: Some((first, leaf.clamp(256, self.page))), ..self }
    }

    /// Largest size of a node, bytes.
    #[must_use]
    pub fn page(&self) -> usize {
        self.page
    }

    /// Largest size of the leaf into which this key is put, bytes.
    fn leaf(&self, key: &[u8]) -> usize {
        match self.scattered {
            Some((first, leaf)) if key.first() == Some(&first) => leaf,
            _ => self.page,
        }
    }

    /// Length of the longest key, bytes.
    #[must_use]
    pub fn longest_key(&self) -> usize {
        (self.page / 8).min(1024)
    }

    /// Largest length of key and value together, bytes.
    #[must_use]
    pub fn longest_row(&self) -> usize {
        self.page / 4 - ROW_HEADER
    }

    fn check(&self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        if key.len() > self.longest_key() {
            return Err(PoolError::Refused(format!("a key of {} bytes: at most {}", key.len(), self.longest_key())));
        }
        // Several rows fit into a leaf, so that each half of a split one has some.
        let longest = self.leaf(key) / 4 - ROW_HEADER;
        if key.len() + value.len() > longest {
            return Err(PoolError::Refused(format!("a row of {} bytes: at most {longest}", key.len() + value.len())));
        }
        Ok(())
    }
}

/// A tree that can be changed.
#[derive(Debug)]
pub struct Tree {
    root: Option<Child>,
    /// Number of the dataset, for the headers of its frames.
    dataset: u64,
    settings: Settings,
    /// Incremented by each freeze: nodes of older generations are shared with a frozen tree.
    generation: u64,
    /// Rows were put or removed since the last freeze.
    changed: bool,
    dead: DeadNodes,
    /// Memory of the dirty nodes of this generation, bytes.
    dirty: u64,
    /// The same for freezes that are not settled yet, by their generation.
    unsettled: Vec<(u64, u64)>,
}

/// A tree as it was at one moment: a stored root, or the live tree when the view was taken. Cheap
/// to clone and to send to other threads.
///
/// A view references frames and does not keep them: the space of dead frames must not be reused
/// before the views taken before their death are dropped.
#[derive(Clone, Debug, Default)]
pub struct View {
    root: Option<Child>,
}

impl Tree {
    /// A tree without rows.
    #[must_use]
    pub fn empty(dataset: u64, settings: Settings) -> Self {
        Self::open(None, dataset, settings)
    }

    /// Opens a stored tree; reads nothing yet.
    #[must_use]
    pub fn open(root: Option<Pointer>, dataset: u64, settings: Settings) -> Self {
        Self {
            root: root.map(Child::Clean),
            dataset,
            settings,
            generation: 1,
            changed: false,
            dead: DeadNodes::default(),
            dirty: 0,
            unsettled: Vec::new(),
        }
    }

    /// Writes sorted rows straight into full leaves, with the memory of one node per level; the
    /// root that [`Loader::finish`] returns is opened afterwards.
    pub fn load_sorted<'a>(ctx: Context<'a>, dataset: u64, settings: Settings, form: commit::Form) -> Loader<'a> {
        Loader::new(ctx, dataset, settings, form)
    }

    /// The settings it was opened with.
    #[must_use]
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Whether the tree has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// The stored root, if the tree is unchanged: outer `None` for a changed tree, inner `None` for
    /// an empty one.
    #[must_use]
    pub fn stored_root(&self) -> Option<Option<Pointer>> {
        match &self.root {
            None => Some(None),
            Some(Child::Clean(pointer)) => Some(Some(*pointer)),
            Some(Child::Dirty(_)) => None,
        }
    }

    /// Whether rows were put or removed since the last freeze.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        self.changed
    }

    /// A view of the current tree, for scans while it is changed.
    #[must_use]
    pub fn view(&self) -> View {
        View { root: self.root.clone() }
    }

    /// Memory of nodes that are not stored and settled, bytes.
    #[must_use]
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty + self.unsettled.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// Reads and copies every node that a change of this row will need. After that, and until the
    /// next freeze, putting the row meets no read error as long as no other row is removed, and
    /// removing it, if it exists, never does. The rows do not change. `value` is the one to be put;
    /// with `None` the row is only looked up. Returns whether there is anything to change.
    ///
    /// # Errors
    /// As [`Self::put`] and [`Self::remove`].
    pub fn prepare(
        &mut self,
        ctx: &Context<'_>,
        txg: Txg,
        key: &[u8],
        value: Option<&[u8]>,
    ) -> Result<bool, PoolError> {
        match value {
            Some(value) => self.settings.check(key, value)?,
            None => match self.root.as_ref().and_then(|root| change::is_in_own(root, self.generation, key)) {
                // Usually one descent shows that it exists, and that all nodes are prepared.
                Some(is_there) => return Ok(is_there),
                None if !self.get_with(ctx, key, |value| value.is_some())? => return Ok(false),
                None => {}
            },
        }
        let (mut change, root) = self.change(ctx, txg);
        root.as_mut().map_or(Ok(()), |root| change.hold(root, None, key)).map(|()| true)
    }

    /// Puts a row, replacing the one with the same key if there is one. `txg` must not be lower
    /// than in the previous call.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a row that is too long, and errors of reading nodes.
    pub fn put(&mut self, ctx: &Context<'_>, txg: Txg, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        self.settings.check(key, value)?;
        let (mut change, root) = self.change(ctx, txg);
        change.put_root(root, key, value)
    }

    /// Removes a row. Returns whether there was one; otherwise the tree is not changed.
    ///
    /// # Errors
    /// Errors of reading nodes.
    pub fn remove(&mut self, ctx: &Context<'_>, txg: Txg, key: &[u8]) -> Result<bool, PoolError> {
        if !self.get_with(ctx, key, |value| value.is_some())? {
            return Ok(false);
        }
        self.remove_present(ctx, txg, key)?;
        Ok(true)
    }

    /// Removes a row that is known to exist.
    ///
    /// # Errors
    /// Errors of reading nodes.
    pub fn remove_present(&mut self, ctx: &Context<'_>, txg: Txg, key: &[u8]) -> Result<(), PoolError> {
        let (mut change, root) = self.change(ctx, txg);
        change.remove_root(root, key)
    }

    /// Removes the rows from `from` up to before `to` (`None`: to the end). Leaves inside the range
    /// are dropped without being read. Returns whether there was a row.
    ///
    /// # Errors
    /// Errors of reading nodes; some of the rows may be removed then.
    pub fn remove_range(
        &mut self,
        ctx: &Context<'_>,
        txg: Txg,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> Result<bool, PoolError> {
        let mut cursor = self.view().cursor(*ctx, from, to)?;
        if cursor.next()?.is_none() {
            return Ok(false);
        }
        // The cursor references the root: it is dropped before the change, which would otherwise
        // copy nodes instead of changing them in place.
        drop(cursor);
        let (mut change, root) = self.change(ctx, txg);
        change.remove_range_root(root, from, to)?;
        Ok(true)
    }

    /// Takes the frames that this tree does not reference any more because of changes up to `txg`.
    /// Call it after the freeze of the previous txg is settled.
    pub fn take_dead(&mut self, txg: Txg) -> Vec<Pointer> {
        self.dead.take(txg)
    }

    fn change<'t>(&'t mut self, ctx: &'t Context<'t>, txg: Txg) -> (TreeChange<'t>, &'t mut Option<Child>) {
        self.changed = true;
        let change = TreeChange {
            ctx,
            txg,
            generation: self.generation,
            settings: self.settings,
            dead: &mut self.dead,
            dirty: &mut self.dirty,
        };
        (change, &mut self.root)
    }
}

impl View {
    /// A stored tree, for reading.
    #[must_use]
    pub fn at(root: Option<Pointer>) -> Self {
        Self { root: root.map(Child::Clean) }
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }
}

/// The first key after all keys with this prefix: the end of their range. `None` if there is none.
#[must_use]
pub fn after_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut key = prefix.get(..=last)?.to_vec();
    *key.last_mut()? += 1;
    Some(key)
}

#[cfg(test)]
mod tests;
