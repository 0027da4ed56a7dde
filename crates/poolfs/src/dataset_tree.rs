//! Several file systems of a pool in one tree, each on a directory of another, as if they were
//! mounted below one another.
//!
//! For mounts of ordinary users: fusermount3 cannot mount below another mount of the same user.
//! Created by the process that has imported the pool, over the file system that is mounted; the
//! others are added ([`DatasetTree::graft`]) and removed while it is in use. Invariants:
//! * each file of all members has a number of its own, and keeps it: the upper bits identify the
//!   tree and the member (`inode_prefix.rs`); files of the first member have the numbers that they
//!   have in a mount of their own;
//! * a covered directory is replaced by the root of the member that covers it, in every look-up of
//!   its name, and can neither be removed nor renamed; no directory is covered while one is removed
//!   or renamed;
//! * no file of a removed member can be reached any more, even if it is still open.

mod inode_prefix;
mod layer;
mod listing;
#[cfg(test)]
mod tests;

use crate::{
    dataset::{Dataset, tell},
    generation,
};
use inode_prefix::{InodePrefixes, join, split};
use nacre_pool::engine::Changes;
use nacre_vfs::{
    Attr, Caller, Entry, Errno, FileId, GivenNumbers, Invalidation, Kind, Layer, Name, Node, Numbered, Result,
};
use parking_lot::{Mutex, RwLock};
use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::Sender,
    },
};

/// Inode number of a member's root directory in its live file system.
const ROOT: u64 = 1;

/// Rules for one member in addition to the properties of its file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// The member is read only.
    pub read_only: bool,
    /// Programs cannot be executed.
    pub no_exec: bool,
}

/// One file system of the tree.
struct Member {
    layer: Arc<Dataset>,
    /// The number of the dataset.
    dataset: u64,
    /// Upper bits of the numbers of its files, as users see them.
    prefix: u64,
    /// The directory that it covers; 0 for the first.
    covers: u64,
    rules: Mutex<Rules>,
    ended: AtomicBool,
}

/// A node of this layer: a file of a member.
struct TreeNode {
    member: Arc<Member>,
    node: Node,
}

/// The tree; see the head of this file.
pub struct DatasetTree {
    first: Arc<Member>,
    prefixes: RwLock<InodePrefixes<Member>>,
    /// The member that covers each covered directory.
    covers: RwLock<HashMap<u64, Arc<Member>>>,
    count: AtomicUsize,
    /// Held for reading while a directory is removed or renamed, for writing while one is covered.
    shape: RwLock<()>,
    /// Channel to the FUSE front end.
    changes: Mutex<Option<Sender<Invalidation>>>,
    /// Records the numbers that were given out permanently.
    noted: OnceLock<Arc<dyn GivenNumbers>>,
}

impl std::fmt::Debug for DatasetTree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DatasetTree")
            .field("first", &self.first.dataset)
            .field("others", &self.count)
            .finish_non_exhaustive()
    }
}

impl Member {
    /// Refuses a change if the member is read only.
    fn changeable(&self) -> Result<()> {
        if self.rules.lock().read_only { Err(Errno::EROFS) } else { Ok(()) }
    }
}

impl DatasetTree {
    /// Creates a tree with one member.
    #[must_use]
    pub fn new(first: Arc<Dataset>, rules: Rules) -> DatasetTree {
        let dataset = first.number();
        let first = Member {
            layer: first,
            dataset,
            prefix: 0,
            covers: 0,
            rules: Mutex::new(rules),
            ended: AtomicBool::new(false),
        };
        DatasetTree {
            first: Arc::new(first),
            prefixes: RwLock::default(),
            covers: RwLock::default(),
            count: AtomicUsize::new(0),
            shape: RwLock::new(()),
            changes: Mutex::new(None),
            noted: OnceLock::new(),
        }
    }

    /// Records the numbers that it gives out permanently, for a process that takes over later, and
    /// so do its members; recorded numbers are given out again unchanged. Called before members are
    /// added.
    #[must_use]
    pub fn noting(self, given: &Arc<dyn GivenNumbers>) -> DatasetTree {
        note_in(&self.first.layer, given);
        let mut prefixes = self.prefixes.write();
        prefixes.note_in(given);
        prefixes.take_left(self.first.dataset, &Arc::downgrade(&self.first));
        drop(prefixes);
        let _ = self.noted.set(Arc::clone(given));
        self
    }

    /// Mounts a file system on the directory with this number, which must belong to a live file
    /// system.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR; EBUSY if it is covered already, or is the root of the tree; EINVAL in a
    /// snapshot.
    pub fn graft(&self, layer: Arc<Dataset>, on: u64, rules: Rules) -> Result<()> {
        let shape = self.shape.write();
        let node = self.node(on)?;
        let tree_node = tree_node(&node)?;
        if on == ROOT || self.covers.read().contains_key(&on) {
            return Err(Errno::EBUSY);
        }
        if split(on).0 != tree_node.member.prefix {
            return Err(Errno::EINVAL);
        }
        let attr = tree_node.member.layer.getattr(&Caller::ROOT, &tree_node.node, None)?;
        match attr.kind {
            Kind::Directory if attr.nlink > 0 => {}
            Kind::Directory => return Err(Errno::ENOENT),
            _ => return Err(Errno::ENOTDIR),
        }
        let dataset = layer.number();
        let member = Arc::new_cyclic(|member| {
            self.noted.get().iter().for_each(|given| note_in(&layer, given));
            let mut prefixes = self.prefixes.write();
            prefixes.take_left(dataset, member);
            let prefix = prefixes.take(dataset, 0, member);
            Member { layer, dataset, prefix, covers: on, rules: Mutex::new(rules), ended: AtomicBool::new(false) }
        });
        {
            let mut covers = self.covers.write();
            covers.insert(on, member);
            self.count.store(covers.len(), Ordering::Release);
        }
        drop(shape);
        self.tell(on);
        Ok(())
    }

    /// Makes the FUSE front end drop the name that leads to a member, so that everything that is
    /// not in use is looked up again.
    pub fn forget(&self, dataset: u64) {
        if let Some(member) = self.member(dataset) {
            self.tell(member.covers);
        }
    }

    /// Whether files of a member are open, or other members cover directories of it.
    pub fn is_used(&self, dataset: u64) -> bool {
        let Some(member) = self.member(dataset) else { return false };
        member.layer.is_open() || self.covers.read().keys().any(|on| split(*on).0 == member.prefix)
    }

    /// Ranges of the numbers of a member's files.
    pub fn numbers(&self, dataset: u64) -> Vec<(u64, u64)> {
        self.prefixes.read().of(dataset).into_iter().map(|prefix| (join(prefix, 0), join(prefix, u64::MAX))).collect()
    }

    /// Range of the numbers in a member's live file system.
    pub fn numbers_of_head(&self, dataset: u64) -> Option<(u64, u64)> {
        self.member(dataset).map(|member| (join(member.prefix, 0), join(member.prefix, u64::MAX)))
    }

    /// Removes a member: the directory that it covered is visible again, and its open files return
    /// ESTALE. Its numbers are never given out again: the FUSE front end may still know some.
    pub fn take_out(&self, dataset: u64) {
        let Some(member) = self.member(dataset) else { return };
        {
            let mut covers = self.covers.write();
            covers.remove(&member.covers);
            self.count.store(covers.len(), Ordering::Release);
        }
        member.ended.store(true, Ordering::Release);
        member.layer.end();
        self.prefixes.write().give_up(dataset);
        self.tell(member.covers);
    }

    /// Returns the id of a member's root.
    pub fn root_of(&self, dataset: u64) -> Option<FileId> {
        self.member(dataset).map(|member| self.file_id(join(member.prefix, ROOT)))
    }

    /// Reports changes of a member's files by another machine to the FUSE front end.
    pub fn changed(&self, dataset: u64, changes: &Changes) {
        let (Some(member), Some(door)) = (self.member(dataset), &*self.changes.lock()) else { return };
        tell(changes, &|number| self.file_id(join(member.prefix, number)), door);
    }

    /// Changes the rules of a member.
    pub fn set_rules(&self, dataset: u64, rules: Rules) {
        if let Some(member) = self.member(dataset) {
            *member.rules.lock() = rules;
        }
    }

    fn member(&self, dataset: u64) -> Option<Arc<Member>> {
        if self.first.dataset == dataset {
            return Some(Arc::clone(&self.first));
        }
        self.covers.read().values().find(|member| member.dataset == dataset).cloned()
    }

    /// Makes the FUSE front end drop the name of a directory that is covered, or visible again.
    fn tell(&self, on: u64) {
        let Ok(Some((parent, name))) = self.name_of(on) else { return };
        let parent = self.file_id(parent);
        if let Some(changes) = &*self.changes.lock()
            && changes.send(Invalidation::Forget { parent, name: name.into_boxed_slice() }).is_err()
        {
            tracing::debug!("the door is gone");
        }
    }

    /// Returns the parent and the name of a directory, or of the directory that it covers.
    fn name_of(&self, mut on: u64) -> Result<Option<(u64, Vec<u8>)>> {
        loop {
            let node = self.node(on)?;
            let tree_node = tree_node(&node)?;
            if split(on).1 == ROOT && tree_node.member.covers != 0 {
                on = tree_node.member.covers;
                continue;
            }
            let Some(path) = tree_node.member.layer.path(&tree_node.node) else { return Ok(None) };
            let Some(name) = path.rsplit(|byte| *byte == b'/').next().filter(|name| !name.is_empty()) else {
                return Ok(None);
            };
            let above = tree_node
                .member
                .layer
                .capabilities()
                .numbered
                .map_or(ROOT, |numbered| numbered.parent(&tree_node.node));
            return Ok(Some((self.shown(&tree_node.member, above), name.to_vec())));
        }
    }

    fn file_id(&self, number: u64) -> FileId {
        FileId { fs: self.first.dataset, ino: number, generation: 0 }
    }

    /// Returns the number of a member's file as users see it.
    fn shown(&self, member: &Arc<Member>, number: u64) -> u64 {
        let (prefix, lower) = split(number);
        if prefix == 0 {
            return join(member.prefix, lower);
        }
        if let Some(known) = self.prefixes.read().get(member.dataset, prefix) {
            return join(known, lower);
        }
        join(self.prefixes.write().take(member.dataset, prefix, &Arc::downgrade(member)), lower)
    }

    /// Returns the member of a prefix, and the upper bits within that member.
    fn owner(&self, prefix: u64) -> Option<(Arc<Member>, u64)> {
        if prefix == 0 { Some((Arc::clone(&self.first), 0)) } else { self.prefixes.read().owner(prefix) }
    }

    /// Assigns prefixes to the trees of all snapshots, in the order of the file systems, as after
    /// every start.
    fn number_snapshots(&self) -> Result<()> {
        let mut members: Vec<Arc<Member>> = self.covers.read().values().cloned().collect();
        members.push(Arc::clone(&self.first));
        members.sort_unstable_by_key(|member| member.dataset);
        for member in members {
            let trees = member.layer.snapshot_trees()?;
            let mut prefixes = self.prefixes.write();
            for tree in trees {
                prefixes.take(member.dataset, tree, &Arc::downgrade(&member));
            }
        }
        Ok(())
    }

    fn attr(&self, member: &Arc<Member>, attr: Attr) -> Attr {
        Attr { id: self.file_id(self.shown(member, attr.id.ino)), ..attr }
    }

    fn wrap(&self, member: &Arc<Member>, entry: Entry) -> Entry {
        let attr = self.attr(member, entry.attr);
        Entry { attr, node: Node::new(Arc::new(TreeNode { member: Arc::clone(member), node: entry.node })) }
    }

    /// Returns the root of the member that covers a directory, if one does.
    fn over(&self, mut number: u64) -> Result<Option<Entry>> {
        let mut top = None;
        while self.count.load(Ordering::Acquire) > 0 {
            let Some(member) = self.covers.read().get(&number).cloned() else { break };
            let root = self.wrap(&member, member.layer.root()?);
            number = root.attr.id.ino;
            top = Some(root);
        }
        Ok(top)
    }

    /// Refuses to remove or rename a covered directory.
    fn uncovered(&self, parent: &TreeNode, name: Name<'_>) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        match parent.member.layer.lookup(&Caller::ROOT, &parent.node, name) {
            Ok(found) if self.covers.read().contains_key(&self.shown(&parent.member, found.attr.id.ino)) => {
                Err(Errno::EBUSY)
            }
            // Other errors of the name are reported by the operation itself.
            _ => Ok(()),
        }
    }

    /// Whether names in a directory are files: not in `.zfs`, where a change may wait for a
    /// command.
    fn holds_files(parent: &TreeNode) -> bool {
        parent.member.layer.id(&parent.node).is_ok_and(|id| split(id.ino).0 == 0)
    }
}

fn note_in(layer: &Dataset, given: &Arc<dyn GivenNumbers>) {
    layer.capabilities().numbered.iter().for_each(|numbered| numbered.note_in(given));
}

/// Returns a node of this layer.
fn tree_node(node: &Node) -> Result<&TreeNode> {
    let tree_node = node.get::<TreeNode>().ok_or(Errno::EIO)?;
    if tree_node.member.ended.load(Ordering::Acquire) { Err(Errno::ESTALE) } else { Ok(tree_node) }
}

impl Numbered for DatasetTree {
    fn node(&self, number: u64) -> Result<Node> {
        let (prefix, lower) = split(number);
        let (member, inner) = self.owner(prefix).ok_or(Errno::ESTALE)?;
        let node = member.layer.capabilities().numbered.ok_or(Errno::EIO)?.node(join(inner, lower))?;
        Ok(Node::new(Arc::new(TreeNode { member, node })))
    }

    fn parent(&self, node: &Node) -> u64 {
        let Ok(tree_node) = tree_node(node) else { return ROOT };
        let Some(numbered) = tree_node.member.layer.capabilities().numbered else { return ROOT };
        if tree_node.member.covers != 0 && tree_node.member.layer.id(&tree_node.node).is_ok_and(|id| id.ino == ROOT) {
            return self.node(tree_node.member.covers).map_or(ROOT, |covered| self.parent(&covered));
        }
        self.shown(&tree_node.member, numbered.parent(&tree_node.node))
    }

    fn look_up(&self, number: u64) -> Result<Entry> {
        let (prefix, lower) = split(number);
        if prefix != 0 && self.prefixes.read().owner(prefix).is_none() {
            self.number_snapshots()?;
        }
        let (member, inner) = self.owner(prefix).ok_or(Errno::ESTALE)?;
        if member.ended.load(Ordering::Acquire) {
            return Err(Errno::ESTALE);
        }
        let entry = member.layer.capabilities().numbered.ok_or(Errno::EIO)?.look_up(join(inner, lower))?;
        Ok(self.wrap(&member, entry))
    }

    fn generation(&self, attr: &Attr) -> u32 {
        let (prefix, lower) = split(attr.id.ino);
        let Some((member, inner)) = self.owner(prefix) else { return 0 };
        let within = Attr { id: FileId { ino: join(inner, lower), ..attr.id }, ..*attr };
        let own = member.layer.capabilities().numbered.map_or(0, |numbered| numbered.generation(&within));
        // After a restart the prefix may belong to another member.
        if prefix == 0 { own } else { generation::spread(u64::from(own) << 32 ^ member.dataset) }
    }

    fn is_unlisted(&self, node: &Node) -> bool {
        tree_node(node)
            .ok()
            .and_then(|tree_node| Some(tree_node.member.layer.capabilities().numbered?.is_unlisted(&tree_node.node)))
            .unwrap_or(false)
    }

    fn folds(&self, directory: &Node) -> bool {
        tree_node(directory)
            .ok()
            .and_then(|tree_node| Some(tree_node.member.layer.capabilities().numbered?.folds(&tree_node.node)))
            .unwrap_or(false)
    }

    fn kept(&self) -> Vec<u64> {
        let members: Vec<Arc<Member>> = self.covers.read().values().cloned().collect();
        let all = std::iter::once(&self.first).chain(&members);
        all.flat_map(|member| {
            let kept = member.layer.capabilities().numbered.map(Numbered::kept).unwrap_or_default();
            kept.into_iter().map(|number| join(member.prefix, number)).collect::<Vec<_>>()
        })
        .collect()
    }

    fn forgotten(&self, number: u64) {
        let (prefix, lower) = split(number);
        if let Some((member, inner)) = self.owner(prefix)
            && let Some(numbered) = member.layer.capabilities().numbered
        {
            numbered.forgotten(join(inner, lower));
        }
    }
}
