//! The file trees that one mounted dataset consists of: the dataset as it is, and each of its
//! snapshots that somebody has looked into.
//!
//! Invariant: every file of all trees has an inode number of its own as users see it: programs take
//! two files with the same number for one (cp, diff and tar do). The upper bits say which tree; they are zero
//! in a snapshot that is mounted by itself, on a device number of its own.

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

/// The files of one tree, as the engine has them.
pub(super) type Tree = nacre_pool::files::Files<TreeTable>;

/// Where the tree's number begins in an inode number.
pub(super) const SHIFT: u32 = keys::NUMBER_BITS;
/// The number of a root directory in its tree.
pub(super) const ROOT: u64 = 1;
/// Trees are told apart by this many numbers, from 1; 0 is the dataset as it is.
const TREES: u64 = (1 << 22) - 1;
/// `.zfs`, as users see it: of a tree that is none.
pub(super) const CONTROL: u64 = (1 << 62) | 1;
/// `.zfs/snapshot`.
pub(super) const SNAPSHOTS: u64 = (1 << 62) | 2;

/// The number of a snapshot's tree, unless another one has it.
pub(super) fn tree_of(txg: Txg) -> u64 {
    txg.0 % TREES + 1
}

/// The number that comes next where one is taken.
pub(super) fn tree_after(tree: u64) -> u64 {
    tree % TREES + 1
}

/// The number of the tree of an inode number as users see it, and the number in that tree.
pub(super) fn split(shown: u64) -> (u64, u64) {
    (shown >> SHIFT, shown & ((1 << SHIFT) - 1))
}

/// What [`crate::generation`] says of a file with this number, as users see it: also whose snapshot
/// it is, as another one may have the number of its tree after a restart. What is there in every
/// tree, whatever becomes of it (the root of the dataset, `.zfs`), is always the same.
pub(super) fn generation(snapshot: Option<Txg>, shown: u64, born: nacre_vfs::Time) -> u32 {
    let always = [ROOT, CONTROL, SNAPSHOTS].contains(&shown);
    if always { 0 } else { crate::generation::of_file(born, snapshot.map_or(0, |txg| txg.0)) }
}

/// One tree.
pub(super) struct MountedTree {
    pub(super) files: Arc<Files>,
    /// The snapshot's name in the last look-up and its txg; `None` for the dataset as it is.
    pub(super) snapshot: Option<(String, Txg)>,
    number: u64,
    pub(super) locks: LockTable,
    /// Where the listings of its directories end.
    pub(super) ends: Ends,
    /// Open files.
    pub(super) open: AtomicUsize,
    passage: Passage,
}

impl MountedTree {
    /// The dataset as it is, or a snapshot whose tree has this number.
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

    /// The content of a file has changed: with `sync=always` that is durable before it is answered.
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

    /// What [`generation`] says of a file of it.
    pub(super) fn generation(&self, number: u64, row: &InodeRow) -> u32 {
        generation(self.snapshot.as_ref().map(|(_, txg)| *txg), self.shown(number), time(row.born))
    }

    /// Whether it is the snapshot of this name and moment.
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

    /// Nothing of it is read any more.
    pub(super) fn end(&self) {
        self.passage.end();
    }

    /// Makes whoever begins something wait until [`MountedTree::resume`] or [`MountedTree::end`];
    /// changes of content that are under way are waited for.
    pub(super) fn pause(&self) {
        self.passage.pause();
    }

    /// Everything goes on.
    pub(super) fn resume(&self) {
        self.passage.resume();
    }

    /// Whether it can be used; ESTALE where not any more.
    pub(super) fn usable(&self) -> Result<()> {
        self.passage.usable()
    }

    /// Begins a change of content: the files do not become others before it has ended.
    pub(super) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.passage.enter()
    }
}

/// The tree that a mounted dataset begins with: the dataset as it is. It becomes another one when
/// the dataset is rolled back.
pub(super) struct CurrentTree {
    pub(super) files: Arc<Files>,
    now: ArcSwap<MountedTree>,
}

impl CurrentTree {
    pub(super) fn new(tree: MountedTree) -> CurrentTree {
        CurrentTree { files: Arc::clone(&tree.files), now: ArcSwap::from_pointee(tree) }
    }

    /// The tree at this moment.
    pub(super) fn now(&self) -> Arc<MountedTree> {
        self.now.load_full()
    }

    /// The files are others: nothing of the tree as it was can be used any more.
    pub(super) fn replace(&self) {
        let old = self.now();
        self.now.store(Arc::new(MountedTree::new(Arc::clone(&self.files), None, 0)));
        old.end();
    }
}

/// What a node of this layer is; none where the node is another layer's.
pub(super) fn node_kind(node: &Node) -> Option<&NodeKind> {
    node.get::<NodeKind>().or_else(|| node.get::<ListedNode>().map(ListedNode::node_kind))
}

/// Whether a node is a file of a listing that nobody has asked for anything.
pub(super) fn is_listed(node: &Node) -> bool {
    node.get::<ListedNode>().is_some()
}

/// Whether a node is known, without a look at what the tree has of it, to have no extended
/// attributes.
pub(super) fn is_bare(node: &Node) -> Result<bool> {
    node.get::<ListedNode>().map_or(Ok(false), ListedNode::is_bare)
}

/// What a node of this layer is.
pub(super) enum NodeKind {
    /// A file of a tree.
    File(FileNode),
    /// `.zfs`.
    Control,
    /// `.zfs/snapshot`.
    Snapshots,
}

/// A file of a listing, or one that was found by its number, which is a node as well: most of them
/// are asked for nothing, or for nothing that takes more than the number, and become a [`NodeKind`]
/// when they are.
pub(super) struct ListedNode {
    tree: Arc<MountedTree>,
    number: u64,
    file: OnceLock<NodeKind>,
}

impl ListedNode {
    /// The file of this number.
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

/// A file with the tree that it is in.
#[derive(Clone)]
pub(super) struct FileNode {
    pub(super) tree: Arc<MountedTree>,
    pub(super) inode: Arc<Inode>,
}

impl FileNode {
    /// The files of its tree.
    pub(super) fn files(&self) -> Result<&Tree> {
        self.tree.usable()?;
        Ok(self.tree.files.files())
    }

    /// The same, for a change.
    pub(super) fn changeable(&self) -> Result<&Tree> {
        if self.tree.is_snapshot() { Err(Errno::EROFS) } else { self.files() }
    }

    /// Whether both are in the same tree.
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
