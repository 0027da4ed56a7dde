//! The file trees of one mounted dataset: the live file system, and each snapshot that was
//! accessed.
//!
//! Invariant: every file of all trees has an inode number of its own as users see it: programs (cp,
//! diff and tar do) take two files with the same number for one. The upper bits identify the tree;
//! they are zero in a snapshot that is mounted separately, on a device number of its own.

use super::passage::Passage;
use super::translate::{errno, time};
use crate::sync::RwLockReadGuard;
use arc_swap::ArcSwap;
use nacre_layers::ends::Ends;
use nacre_layers::locks::LockTable;
use nacre_pool::Txg;
use nacre_pool::engine::{Dataset as Files, Pool, TreeTable};
use nacre_pool::files::Inode;
use nacre_pool::properties::SyncMode;
use nacre_pool::rows::{InodeRow, keys};
use nacre_vfs::{Errno, Node, Result};
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

/// The engine's files of one tree.
pub(super) type Tree = nacre_pool::files::Files<TreeTable>;

/// Position of the tree's number in an inode number.
pub(super) const SHIFT: u32 = keys::NUMBER_BITS;
/// Inode number of a root directory in its tree.
pub(super) const ROOT: u64 = 1;
/// Number of tree numbers, from 1; 0 is the live file system.
const TREES: u64 = (1 << 22) - 1;
/// Inode number of `.zfs` as users see it, outside of all trees.
pub(super) const CONTROL: u64 = (1 << 62) | 1;
/// Inode number of `.zfs/snapshot`.
pub(super) const SNAPSHOTS: u64 = (1 << 62) | 2;

/// The preferred number of a snapshot's tree.
pub(super) fn tree_of(txg: Txg) -> u64 {
    txg.0 % TREES + 1
}

/// The next number to try if one is taken.
pub(super) fn tree_after(tree: u64) -> u64 {
    tree % TREES + 1
}

/// Splits an inode number as users see it into the number of the tree and the number in that tree.
pub(super) fn split(shown: u64) -> (u64, u64) {
    (shown >> SHIFT, shown & ((1 << SHIFT) - 1))
}

/// The generation ([`crate::generation`]) of a file with this number, as users see it: it includes
/// the snapshot, as another one may get the number of its tree after a restart. Files that exist in
/// every tree (the root of the dataset, `.zfs`) always have the same one.
pub(super) fn generation(snapshot: Option<Txg>, shown: u64, born: nacre_vfs::Time) -> u32 {
    let always = [ROOT, CONTROL, SNAPSHOTS].contains(&shown);
    if always { 0 } else { crate::generation::of_file(born, snapshot.map_or(0, |txg| txg.0)) }
}

/// One file tree.
pub(super) struct MountedTree {
    pub(super) files: Arc<Files>,
    /// The snapshot's name in the last look-up and its txg; `None` for the live file system.
    pub(super) snapshot: Option<(String, Txg)>,
    number: u64,
    pub(super) locks: LockTable,
    /// Ends of listings of its directories.
    pub(super) ends: Ends,
    /// Number of open files.
    pub(super) open: AtomicUsize,
    passage: Passage,
}

impl MountedTree {
    /// The live file system, or a snapshot whose tree has this number.
    pub(super) fn new(files: Arc<Files>, snapshot: Option<(String, Txg)>, tree: u64) -> MountedTree {
        let ends = Ends::new(files.files().next_sequence());
        MountedTree {
            files,
            snapshot,
            number: tree,
            ends,
            locks: LockTable::default(),
            open: AtomicUsize::new(0),
            passage: Passage::new(),
        }
    }

    /// With `sync=always`: makes a change of content durable before it is answered.
    pub(super) fn sync_if_always(&self, pool: &Pool, inode: &Arc<Inode>) -> Result<()> {
        if self.files.behaviour().sync == SyncMode::Always {
            pool.sync_file(&self.files, inode).map_err(errno)?;
        }
        Ok(())
    }

    /// An inode number as users see it.
    pub(super) fn shown(&self, number: u64) -> u64 {
        self.number << SHIFT | number
    }

    /// Whether it is a snapshot.
    pub(super) fn is_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// The [`generation`] of one of its files.
    pub(super) fn generation(&self, number: u64, row: &InodeRow) -> u32 {
        generation(self.snapshot.as_ref().map(|(_, txg)| *txg), self.shown(number), time(row.born))
    }

    /// Whether it is the snapshot with this name and txg.
    pub(super) fn is(&self, name: &str, txg: Txg) -> bool {
        self.snapshot.as_ref().is_some_and(|(known, at)| known == name && *at == txg)
    }

    /// Whether it has this number.
    pub(super) fn is_tree(&self, tree: u64) -> bool {
        self.number == tree
    }

    /// Whether files of it are open.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    /// Ends all use of it.
    pub(super) fn end(&self) {
        self.passage.end();
    }

    /// Blocks new operations until [`MountedTree::resume`] or [`MountedTree::end`]; waits for
    /// running changes of content.
    pub(super) fn pause(&self) {
        self.passage.pause();
    }

    /// Ends the block.
    pub(super) fn resume(&self) {
        self.passage.resume();
    }

    /// Checks that it can be used; ESTALE if it has ended.
    pub(super) fn usable(&self) -> Result<()> {
        self.passage.usable()
    }

    /// Whether a rollback has begun to block operations.
    #[cfg(test)]
    pub(super) fn is_paused(&self) -> bool {
        self.passage.is_paused()
    }

    /// Begins a change of content: the files are not replaced before it has ended.
    pub(super) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.passage.enter()
    }
}

/// The live file system of a mounted dataset. A rollback replaces it by another tree.
pub(super) struct CurrentTree {
    pub(super) files: Arc<Files>,
    now: ArcSwap<MountedTree>,
}

impl CurrentTree {
    pub(super) fn new(tree: MountedTree) -> CurrentTree {
        CurrentTree { files: Arc::clone(&tree.files), now: ArcSwap::from_pointee(tree) }
    }

    /// Returns the current tree.
    pub(super) fn now(&self) -> Arc<MountedTree> {
        self.now.load_full()
    }

    /// Replaces the tree after a rollback: the previous one cannot be used any more.
    pub(super) fn replace(&self) {
        let old = self.now();
        self.now.store(Arc::new(MountedTree::new(Arc::clone(&self.files), None, 0)));
        old.end();
    }
}

/// The kind of a node of this layer; `None` for a node of another layer.
pub(super) fn node_kind(node: &Node) -> Option<&NodeKind> {
    node.get::<NodeKind>().or_else(|| node.get::<ListedNode>().map(ListedNode::node_kind))
}

/// Whether a node is a file of a listing that was not used yet.
pub(super) fn is_listed(node: &Node) -> bool {
    node.get::<ListedNode>().is_some()
}

/// Whether a node is known to have no extended attributes, without reading the tree.
pub(super) fn is_bare(node: &Node) -> Result<bool> {
    node.get::<ListedNode>().map_or(Ok(false), ListedNode::is_bare)
}

/// The kinds of nodes in this layer.
pub(super) enum NodeKind {
    /// A file of a tree.
    File(FileNode),
    /// `.zfs`.
    Control,
    /// `.zfs/snapshot`.
    Snapshots,
}

/// A file of a listing, or one found by its number, as a node: most of them are never used, or only
/// for their number, and become a [`NodeKind`] when they are.
pub(super) struct ListedNode {
    tree: Arc<MountedTree>,
    number: u64,
    file: OnceLock<NodeKind>,
}

impl ListedNode {
    /// Creates the node of a file by its number.
    pub(super) fn new(tree: &Arc<MountedTree>, number: u64) -> ListedNode {
        ListedNode { tree: Arc::clone(tree), number, file: OnceLock::new() }
    }

    fn node_kind(&self) -> &NodeKind {
        let inode = || self.tree.files.files().inode(self.number);
        self.file.get_or_init(|| NodeKind::File(FileNode { tree: Arc::clone(&self.tree), inode: inode() }))
    }

    /// Whether it is known to have no extended attributes.
    fn is_bare(&self) -> Result<bool> {
        self.tree.usable()?;
        Ok(self.tree.files.files().is_bare(self.number))
    }
}

/// A file with its tree.
#[derive(Clone)]
pub(super) struct FileNode {
    pub(super) tree: Arc<MountedTree>,
    pub(super) inode: Arc<Inode>,
}

impl FileNode {
    /// Returns the files of its tree.
    pub(super) fn files(&self) -> Result<&Tree> {
        self.tree.usable()?;
        Ok(self.tree.files.files())
    }

    /// As [`Self::files`], for a change.
    pub(super) fn changeable(&self) -> Result<&Tree> {
        if self.tree.is_snapshot() { Err(Errno::EROFS) } else { self.files() }
    }

    /// Refuses two files of different trees (EXDEV).
    pub(super) fn beside(&self, other: &FileNode) -> Result<()> {
        if Arc::ptr_eq(&self.tree, &other.tree) { Ok(()) } else { Err(Errno::EXDEV) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_and_numbers_are_told_apart() {
        for (txg, number) in [(1, 1), (77, 5), (TREES, 9), (TREES - 1, keys::NUMBER_MOST)] {
            let tree = tree_of(Txg(txg));
            assert!((1..=TREES).contains(&tree));
            assert_eq!(split(tree << SHIFT | number), (tree, number));
            assert!(tree << SHIFT | number < CONTROL);
        }
    }
}
