//! The file trees that one mounted dataset consists of: the dataset as it is, and each of its snapshots that somebody has looked into.
//!
//! Invariant: every file of all trees has an inode number of its own as users see it: programs take two files with the same number for one (cp, diff and
//! tar do). The upper bits say which tree.

use super::file::LockTable;
use nacre_pool::Txg;
use nacre_pool::engine::{Dataset as Files, TreeTable};
use nacre_pool::files::Inode;
use nacre_vfs::{Errno, Result};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// The files of one tree, as the engine has them.
pub(super) type Tree = nacre_pool::files::Files<TreeTable>;

/// Where the tree's number begins in an inode number.
pub(super) const SHIFT: u32 = 40;
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

/// One tree.
pub(super) struct Volume {
    pub(super) files: Arc<Files>,
    /// The snapshot's name in the last look-up and its txg; `None` for the dataset as it is.
    pub(super) snapshot: Option<(String, Txg)>,
    tree: u64,
    pub(super) locks: LockTable,
    /// Open files of a snapshot.
    pub(super) open: AtomicUsize,
    /// The snapshot is being destroyed: nothing of it is read any more.
    gone: AtomicBool,
}

impl Volume {
    /// The dataset as it is, or a snapshot whose tree has this number.
    pub(super) fn new(files: Arc<Files>, snapshot: Option<(String, Txg)>, tree: u64) -> Volume {
        Volume { files, snapshot, tree, locks: LockTable::default(), open: AtomicUsize::new(0), gone: AtomicBool::new(false) }
    }

    /// An inode number as users see it.
    pub(super) fn shown(&self, number: u64) -> u64 {
        self.tree << SHIFT | number
    }

    /// Whether it is a snapshot.
    pub(super) fn is_past(&self) -> bool {
        self.snapshot.is_some()
    }

    /// Whether it is the snapshot of this name and moment.
    pub(super) fn is(&self, name: &str, txg: Txg) -> bool {
        self.snapshot.as_ref().is_some_and(|(known, at)| known == name && *at == txg)
    }

    /// Whether it has this number.
    pub(super) fn is_tree(&self, tree: u64) -> bool {
        self.tree == tree
    }

    /// Nothing of it is read any more.
    pub(super) fn end(&self) {
        self.gone.store(true, Ordering::Release);
    }
}

/// What a node of this layer is.
pub(super) enum Place {
    /// A file of a tree.
    File(Placed),
    /// `.zfs`.
    Control,
    /// `.zfs/snapshot`.
    Snapshots,
}

/// A file with the tree that it is in.
#[derive(Clone)]
pub(super) struct Placed {
    pub(super) volume: Arc<Volume>,
    pub(super) inode: Arc<Inode>,
}

impl Placed {
    /// The files of its tree.
    pub(super) fn files(&self) -> Result<&Tree> {
        if self.volume.gone.load(Ordering::Acquire) { Err(Errno::ESTALE) } else { Ok(self.volume.files.files()) }
    }

    /// The same, for a change.
    pub(super) fn changeable(&self) -> Result<&Tree> {
        if self.volume.is_past() { Err(Errno::EROFS) } else { self.files() }
    }

    /// Whether both are in the same tree.
    pub(super) fn beside(&self, other: &Placed) -> Result<()> {
        if Arc::ptr_eq(&self.volume, &other.volume) { Ok(()) } else { Err(Errno::EXDEV) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_and_numbers_are_told_apart() {
        for (txg, number) in [(1, 1), (77, 5), (TREES, 9), (TREES - 1, (1 << 40) - 1)] {
            let tree = tree_of(Txg(txg));
            assert!((1..=TREES).contains(&tree));
            assert_eq!(split(tree << SHIFT | number), (tree, number));
            assert!(tree << SHIFT | number < CONTROL);
        }
    }
}
