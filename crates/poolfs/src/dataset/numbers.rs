//! The files of a dataset by their numbers: the FUSE front end keeps numbers instead of nodes.
//!
//! Invariant: from the first look-up by number on, a file that loses its last name is kept until
//! the FUSE front end has forgotten it (lookup count 0), so that it is found by its number as long
//! as the kernel holds it without having it open (a working directory, `O_PATH`). After a failover
//! this also applies to the orphans of the previous process ([`Numbers::keep_nameless`]).

use super::control::Control;
use super::mounted_tree::{self, CurrentTree, FileNode, ListedNode, MountedTree, NodeKind};
use super::translate::{attr, errno};
use nacre_pool::files::{FileError, Inode};
use nacre_pool::properties::effective::SnapshotDirectory as Shown;
use nacre_vfs::{Attr, Entry, Errno, GivenNumbers, Node, Numbered, Result};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// Files by number; see the head of this file.
pub(super) struct Numbers {
    current: Arc<CurrentTree>,
    control: Option<Arc<Control>>,
    asked: AtomicBool,
    nameless: Mutex<HashMap<u64, Arc<Inode>>>,
    count: AtomicUsize,
    /// ACLs are on. The value of the property when the FUSE front end negotiated with the kernel,
    /// which cannot be changed later.
    pub(super) acls: AtomicBool,
}

impl Numbers {
    pub(super) fn new(current: &Arc<CurrentTree>, control: Option<&Arc<Control>>) -> Numbers {
        Numbers {
            current: Arc::clone(current),
            control: control.cloned(),
            asked: AtomicBool::new(false),
            nameless: Mutex::default(),
            count: AtomicUsize::new(0),
            acls: AtomicBool::new(current.files.behaviour().acl),
        }
    }

    /// Notes that a name of a file was removed; keeps the file if no names are left.
    pub(super) fn removed(&self, (inode, left): (Arc<Inode>, u32)) {
        if left == 0 && self.asked.load(Ordering::Relaxed) {
            self.keep(inode);
        }
    }

    /// Keeps orphan inodes of a previous process until the FUSE front end has forgotten them. All
    /// other orphans are freed.
    pub(super) fn keep_nameless(&self, numbers: &[u64]) -> Result<()> {
        self.asked.store(true, Ordering::Relaxed);
        let now = self.current.now();
        let files = now.files.files();
        numbers.iter().for_each(|number| self.keep(files.inode(*number)));
        files.adopt_orphans().map_err(errno)
    }

    /// Whether the number of a tree means the mounted tree: any number does for a single snapshot,
    /// since earlier versions gave its files the number of its tree.
    fn is_current(&self, tree: u64) -> bool {
        self.control.is_none() || self.current.now().is_tree(tree)
    }

    fn keep(&self, inode: Arc<Inode>) {
        let mut nameless = self.nameless.lock();
        nameless.insert(inode.number(), inode);
        self.count.store(nameless.len(), Ordering::Release);
    }

    /// Before a name is replaced: returns its file, if it may have to be kept.
    pub(super) fn before(&self, directory: &FileNode, name: &[u8]) -> Option<Arc<Inode>> {
        if !self.asked.load(Ordering::Relaxed) {
            return None;
        }
        directory.files().ok()?.look_up(&directory.inode, name).ok().map(|(inode, _)| inode)
    }

    /// After the replacement: keeps the file if that was its last name.
    pub(super) fn after(&self, inode: Option<Arc<Inode>>) -> Result<()> {
        let Some(inode) = inode else { return Ok(()) };
        if self.current.files.files().attributes(&inode).map_err(errno)?.links == 0 {
            self.keep(inode);
        }
        Ok(())
    }
}

impl Numbered for Numbers {
    fn node(&self, number: u64) -> Result<Node> {
        self.asked.store(true, Ordering::Relaxed);
        let of = |tree: &Arc<MountedTree>, number| Ok(Node::new(Arc::new(ListedNode::new(tree, number))));
        let kind = match (number, mounted_tree::split(number)) {
            (mounted_tree::CONTROL, _) => NodeKind::Control,
            (mounted_tree::SNAPSHOTS, _) => NodeKind::Snapshots,
            (_, (tree, number)) if self.is_current(tree) => return of(&self.current.now(), number),
            (_, (tree, number)) => {
                return of(&self.control.as_ref().ok_or(Errno::ESTALE)?.snapshot_by_tree(tree)?, number);
            }
        };
        Ok(Node::new(Arc::new(kind)))
    }

    fn parent(&self, node: &Node) -> u64 {
        match mounted_tree::node_kind(node) {
            Some(NodeKind::File(file_node)) => {
                let own = file_node.inode.number();
                let hint = file_node
                    .files()
                    .ok()
                    .and_then(|files| files.attributes(&file_node.inode).ok())
                    .and_then(|row| row.hint);
                match hint {
                    None if file_node.tree.is_snapshot() && !Arc::ptr_eq(&file_node.tree, &self.current.now()) => {
                        mounted_tree::SNAPSHOTS
                    }
                    hint => file_node.tree.shown(hint.map_or(own, |hint| hint.directory)),
                }
            }
            Some(NodeKind::Snapshots) => mounted_tree::CONTROL,
            Some(NodeKind::Control) | None => mounted_tree::ROOT,
        }
    }

    fn look_up(&self, number: u64) -> Result<Entry> {
        self.asked.store(true, Ordering::Relaxed);
        let hidden = self.current.files.behaviour().snapdir == Shown::Disabled;
        let control = self.control.as_ref().filter(|_| !hidden).ok_or(Errno::ESTALE);
        let tree = match (number, mounted_tree::split(number)) {
            (mounted_tree::CONTROL, _) => return control?.entry(&self.current.now(), &NodeKind::Control),
            (mounted_tree::SNAPSHOTS, _) => return control?.entry(&self.current.now(), &NodeKind::Snapshots),
            (_, (tree, _)) if self.is_current(tree) => self.current.now(),
            (_, (tree, _)) => control?.look_up_tree(tree)?,
        };
        let inode = tree.files.files().inode(mounted_tree::split(number).1);
        let file_node = FileNode { tree, inode };
        let row = match file_node.files()?.attributes(&file_node.inode) {
            Ok(row) if row.links > 0 => row,
            Ok(_) | Err(FileError::NotFound) => return Err(Errno::ESTALE),
            Err(error) => return Err(errno(error)),
        };
        let attr = attr(self.current.files.id(), number, &row);
        Ok(Entry { attr, node: Node::new(Arc::new(NodeKind::File(file_node))) })
    }

    fn generation(&self, attr: &Attr) -> u32 {
        let number = attr.id.ino;
        let snapshot = match mounted_tree::split(number).0 {
            tree if self.is_current(tree) => self.current.now().snapshot.as_ref().map(|(_, txg)| *txg),
            tree => self.control.as_ref().and_then(|control| control.snapshot_of(tree)),
        };
        mounted_tree::generation(snapshot, number, attr.btime.unwrap_or_default())
    }

    fn is_unlisted(&self, node: &Node) -> bool {
        matches!(mounted_tree::node_kind(node), Some(NodeKind::Control))
            && self.current.files.behaviour().snapdir != Shown::Visible
    }

    fn folds(&self, _directory: &Node) -> bool {
        // Snapshots have the folding of their file system.
        !self.current.files.files().folding().is_exact()
    }

    fn kept(&self) -> Vec<u64> {
        self.nameless.lock().keys().copied().collect()
    }

    fn note_in(&self, given: &Arc<dyn GivenNumbers>) {
        self.control.iter().for_each(|control| control.note_in(given));
    }

    fn agreed_before(&self, acls: bool) {
        self.acls.store(acls, Ordering::Relaxed);
    }

    fn forgotten(&self, number: u64) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let gone = {
            let mut nameless = self.nameless.lock();
            let gone = nameless.remove(&number);
            self.count.store(nameless.len(), Ordering::Release);
            gone
        };
        // Freed outside of the lock.
        drop(gone);
    }
}
