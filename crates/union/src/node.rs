//! Inodes of the union in memory, one for each referenced file: identity, the branches that have it, and the
//! name it was last seen under.
//!
//! Made by look-ups and creations through [`Nodes`], which ensures that one file has one node. Invariants:
//! * `parts` is ordered from the top; a file that is no directory has exactly one part, the shown one; it is
//!   empty only where the branch that had the file has been removed;
//! * a name is created, moved or removed only with the directory's `names` lock held for writing, and `place`
//!   changes with it;
//! * lock order: `copying` of a file, the tree lock, `names` of directories by address, the state (never held
//!   over a call).

use crate::{branches::Branch, identity, listing::Source, open_file::UnionFile};
use hashbrown::HashMap;
use nacre_vfs::{Errno, FileId, Kind, LeftNumbers, Name, Node, Result};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use std::{
    ptr,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

/// A file on one branch.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) branch: Arc<Branch>,
    pub(crate) node: Node,
    /// The file's identity on the branch.
    pub(crate) id: FileId,
    /// Of a directory: files in it may be whiteouts that only their extended attribute identifies.
    pub(crate) x_directory: bool,
    /// Of a directory: it has copies, so files in it may have stored inode numbers of other files.
    pub(crate) impure: bool,
    /// Whether its directory is `impure`.
    pub(crate) in_impure: bool,
    /// Of a directory: its redirect to another name on the branches below.
    pub(crate) redirect: Redirect,
}

/// The redirect of a directory: its name on the branches below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// Under its own name.
    #[default]
    None,
    /// Under another name in the same directory: only as long as it stays there.
    Sibling,
    /// Under an absolute path.
    Path,
}

impl Part {
    /// Creates a part without marks.
    pub(crate) fn new(branch: &Arc<Branch>, node: Node, id: FileId) -> Part {
        Part {
            branch: Arc::clone(branch),
            node,
            id,
            x_directory: false,
            impure: false,
            in_impure: false,
            redirect: Redirect::None,
        }
    }

    /// Whether it is the same file. A branch that was added again has another slot.
    fn is_same(&self, other: &Part) -> bool {
        self.id == other.id && (self.branch.slot == other.branch.slot || !self.branch.is_member())
    }

    /// Whether it is the same file with the same marks.
    fn is_like(&self, other: &Part) -> bool {
        let circumstances = |part: &Part| (part.x_directory, part.impure, part.in_impure, part.redirect);
        self.branch.slot == other.branch.slot && self.id == other.id && circumstances(self) == circumstances(other)
    }

    /// Whether a device node in this directory would be read as a whiteout: where whiteouts are identified by
    /// extended attributes, device nodes are not.
    pub(crate) fn is_plain(&self) -> bool {
        !self.x_directory
    }
}

/// The directory and name under which a file was last seen.
#[derive(Clone)]
pub(crate) struct NodePlace {
    pub(crate) parent: Arc<UnionNode>,
    pub(crate) name: Box<[u8]>,
}

impl NodePlace {
    pub(crate) fn is(&self, parent: &Arc<UnionNode>, name: &[u8]) -> bool {
        Arc::ptr_eq(&self.parent, parent) && *self.name == *name
    }
}

/// A node of the union.
pub(crate) struct UnionNode {
    pub(crate) id: FileId,
    pub(crate) kind: Kind,
    /// Distinguishes the node from earlier nodes of the same file; changes between them were not notified.
    pub(crate) serial: u64,
    /// Of a directory: the lock of its names.
    pub(crate) names: RwLock<()>,
    /// Of a directory: held for reading by each call that lists it, and for writing while a file in it moves to
    /// another branch, because that call would otherwise show the file twice or not at all. Taken before
    /// `names`.
    pub(crate) listing: RwLock<()>,
    /// Held while the file is being copied up.
    pub(crate) copying: Mutex<()>,
    /// Held for reading during writes to a file that may have to move meanwhile; taken after `copying`.
    pub(crate) moving: RwLock<()>,
    /// Counts started changes, so that a copy made without locks can detect them.
    pub(crate) changes: AtomicU64,
    /// The epoch of the list of branches for which the parts are valid.
    epoch: AtomicU64,
    /// Of a directory: how many files in it have moved to another branch.
    pub(crate) relocations: AtomicU64,
    state: Mutex<NodeState>,
    table: Weak<Nodes>,
}

/// Nodes by name.
type Directories = HashMap<Box<[u8]>, Weak<UnionNode>>;

struct NodeState {
    parts: Arc<[Part]>,
    /// Of a directory: the last branch that could still show part of it; whiteouts, opaque directories and
    /// files hide everything below.
    floor: usize,
    place: Option<NodePlace>,
    /// Whether its last name has been removed.
    gone: bool,
    open: Vec<Weak<UnionFile>>,
    /// Of a directory: the referenced directories in it. A directory that was moved outside of the union may
    /// still be here.
    directories: Option<Box<Directories>>,
}

/// A snapshot of a directory's parts.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) parts: Arc<[Part]>,
    pub(crate) floor: usize,
}

impl View {
    /// The part on a branch.
    pub(crate) fn on(&self, branch: &Branch) -> Option<&Part> {
        self.parts.iter().find(|part| part.branch.slot == branch.slot)
    }
}

impl UnionNode {
    pub(crate) fn parts(&self) -> Arc<[Part]> {
        Arc::clone(&self.state.lock().parts)
    }

    pub(crate) fn view(&self) -> View {
        let state = self.state.lock();
        View { parts: Arc::clone(&state.parts), floor: state.floor }
    }

    /// The shown part.
    ///
    /// # Errors
    /// ESTALE where the branch that had it has been removed.
    pub(crate) fn top(&self) -> Result<Part> {
        self.state.lock().parts.first().cloned().ok_or(Errno::ESTALE)
    }

    pub(crate) fn part_on(&self, branch: &Branch) -> Option<Part> {
        self.state.lock().parts.iter().find(|part| part.branch.slot == branch.slot).cloned()
    }

    /// Whether its parts are valid for the present list of branches.
    pub(crate) fn is_current(&self, epoch: u64) -> bool {
        self.epoch.load(Ordering::Acquire) == epoch
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Release);
    }

    pub(crate) fn place(&self) -> Option<NodePlace> {
        self.state.lock().place.clone()
    }

    /// Records that no name is known to lead to it.
    pub(crate) fn has_no_name(&self) {
        self.state.lock().gone = true;
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.state.lock().gone
    }

    /// Sets the name under which it has been found or moved.
    pub(crate) fn arrive(self: &Arc<UnionNode>, parent: &Arc<UnionNode>, name: &[u8]) {
        let before = {
            let mut state = self.state.lock();
            state.gone = false;
            if state.place.as_ref().is_some_and(|place| place.is(parent, name)) {
                return;
            }
            state.place.replace(NodePlace { parent: Arc::clone(parent), name: name.into() })
        };
        if self.kind == Kind::Directory {
            parent.enter_directory(name, self);
            if let Some(before) = &before {
                before.parent.forget_directory(&before.name, self);
            }
        }
        drop(before);
    }

    fn enter_directory(&self, name: &[u8], directory: &Arc<UnionNode>) {
        self.state.lock().directories.get_or_insert_default().insert(name.into(), Arc::downgrade(directory));
    }

    /// Removes the entry of a directory under a name, unless it has been renamed back meanwhile.
    fn forget_directory(self: &Arc<UnionNode>, name: &[u8], directory: &Arc<UnionNode>) {
        self.forget_directory_if(name, |known| ptr::eq(known.as_ptr(), Arc::as_ptr(directory)));
        if directory.place().is_some_and(|place| place.is(self, name)) {
            self.enter_directory(name, directory);
        }
    }

    fn forget_directory_if(&self, name: &[u8], which: impl FnOnce(&Weak<UnionNode>) -> bool) {
        let mut state = self.state.lock();
        if let Some(directories) = &mut state.directories
            && directories.get(name).is_some_and(which)
        {
            directories.remove(name);
        }
    }

    /// The directory that was last seen in this one under a name, if it is referenced.
    pub(crate) fn directory(self: &Arc<UnionNode>, name: &[u8]) -> Option<Arc<UnionNode>> {
        let found = self.state.lock().directories.as_ref()?.get(name).and_then(Weak::upgrade)?;
        found.place().is_some_and(|place| place.is(self, name)).then_some(found)
    }

    /// All referenced directories in this one.
    pub(crate) fn directories(self: &Arc<UnionNode>) -> Vec<Arc<UnionNode>> {
        let known = {
            let state = self.state.lock();
            let all = state.directories.iter().flat_map(|directories| directories.iter());
            all.filter_map(|(name, node)| Some((name.clone(), node.upgrade()?))).collect::<Vec<_>>()
        };
        known
            .into_iter()
            .filter_map(|(name, node)| node.place().is_some_and(|place| place.is(self, &name)).then_some(node))
            .collect()
    }

    /// Removes a name; `last` if it was the last one.
    pub(crate) fn leave(self: &Arc<UnionNode>, parent: &Arc<UnionNode>, name: &[u8], last: bool) {
        let before = {
            let mut state = self.state.lock();
            state.gone |= last;
            if state.place.as_ref().is_some_and(|place| last || place.is(parent, name)) {
                state.place.take()
            } else {
                None
            }
        };
        if let Some(before) = before.filter(|_| self.kind == Kind::Directory) {
            before.parent.forget_directory(&before.name, self);
        }
    }

    /// Adds the part of one more branch that has a copy of this directory.
    pub(crate) fn grow(self: &Arc<UnionNode>, part: Part) {
        if let Some(table) = self.table.upgrade() {
            table.index(self, &part);
        }
        let mut state = self.state.lock();
        let mut parts: Vec<Part> =
            state.parts.iter().filter(|old| old.branch.slot != part.branch.slot).cloned().collect();
        let at = parts.iter().position(|old| old.branch.index() > part.branch.index()).unwrap_or(parts.len());
        parts.insert(at, part);
        state.parts = parts.into();
    }

    /// Whether a found file can be this one. A directory has to share a part with the found one: other
    /// processes may have separated its parts, and each of these directories may be found by itself.
    pub(crate) fn can_be(&self, kind: Kind, parts: &[Part]) -> bool {
        let own = self.parts();
        self.kind == kind
            && (kind != Kind::Directory
                || own.is_empty()
                || parts.iter().any(|part| own.iter().any(|old| old.is_same(part))))
    }

    /// Replaces the parts.
    pub(crate) fn settle(self: &Arc<UnionNode>, parts: Vec<Part>, floor: usize) {
        if let Some(table) = self.table.upgrade() {
            for part in &parts {
                table.index(self, part);
            }
        }
        let mut state = self.state.lock();
        state.parts = parts.into();
        state.floor = floor;
    }

    /// Records that the directory on that branch has whiteouts that only their attribute identifies.
    pub(crate) fn holds_attribute_marks(&self, branch: usize) {
        let mut state = self.state.lock();
        if state.parts.iter().any(|part| part.branch.index() == branch && !part.x_directory) {
            let mark =
                |part: &Part| Part { x_directory: part.x_directory || part.branch.index() == branch, ..part.clone() };
            state.parts = state.parts.iter().map(mark).collect();
        }
    }

    /// Records that the directory on that branch has a redirect by path.
    pub(crate) fn goes_on_by_path(&self, branch: usize) {
        let mut state = self.state.lock();
        let redirect = |part: &Part| if part.branch.index() == branch { Redirect::Path } else { part.redirect };
        state.parts = state.parts.iter().map(|part| Part { redirect: redirect(part), ..part.clone() }).collect();
        state.floor = branch;
    }

    /// Whether any part of the directory has a redirect.
    pub(crate) fn is_redirected(&self) -> bool {
        self.state.lock().parts.iter().any(|part| part.redirect != Redirect::None)
    }

    /// Records that the directory on that branch has copies.
    pub(crate) fn holds_copies(&self, branch: usize) {
        let mut state = self.state.lock();
        let mark = |part: &Part| Part { impure: part.impure || part.branch.index() == branch, ..part.clone() };
        state.parts = state.parts.iter().map(mark).collect();
    }

    pub(crate) fn opened(&self, file: &Arc<UnionFile>) {
        let mut state = self.state.lock();
        state.open.retain(|file| file.strong_count() > 0);
        state.open.push(Arc::downgrade(file));
    }

    /// The open files of this node.
    pub(crate) fn open_files(&self) -> Vec<Arc<UnionFile>> {
        self.state.lock().open.iter().filter_map(Weak::upgrade).collect()
    }

    /// The path from the root, names divided by `/`; `None` where no name is known.
    pub(crate) fn path(&self) -> Option<Vec<u8>> {
        let mut names: Vec<Box<[u8]>> = Vec::new();
        let mut at = match self.place() {
            Some(place) => place,
            None => return self.table.upgrade().filter(|table| table.is_root(self.id)).map(|_| Vec::new()),
        };
        loop {
            names.push(at.name);
            match at.parent.place() {
                Some(above) => at = above,
                None if at.parent.is_gone() => return None,
                None => break,
            }
        }
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// Whether this directory is `above` or inside it.
    pub(crate) fn is_within(self: &Arc<UnionNode>, above: &Arc<UnionNode>) -> bool {
        let mut at = Arc::clone(self);
        loop {
            if Arc::ptr_eq(&at, above) {
                return true;
            }
            match at.place() {
                Some(place) => at = place.parent,
                None => return false,
            }
        }
    }
}

impl Drop for UnionNode {
    /// Removes the node from the table, and drops the chain of parents iteratively: a recursion would be as
    /// deep as the tree.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if let Some(table) = self.table.upgrade() {
            table.forget(self.id, &state.parts);
        }
        let mut place = state.place.take();
        let mut kind = self.kind;
        while let Some(NodePlace { parent, name }) = place {
            if kind == Kind::Directory {
                // Unless another node has taken the entry by now.
                parent.forget_directory_if(&name, |known| known.strong_count() == 0);
            }
            (place, kind) = match Arc::into_inner(parent) {
                Some(mut node) => (node.state.get_mut().place.take(), node.kind),
                None => (None, kind),
            };
        }
    }
}

/// The result of a look-up or a creation.
pub(crate) struct Known {
    pub(crate) id: FileId,
    pub(crate) kind: Kind,
    pub(crate) parts: Vec<Part>,
    pub(crate) floor: usize,
}

/// All referenced nodes: one for each file.
pub(crate) struct Nodes {
    tables: RwLock<Tables>,
    left: Option<Arc<dyn LeftNumbers>>,
    /// Counts the changes of the list of branches.
    epoch: AtomicU64,
}

#[derive(Default)]
struct Tables {
    root: Option<FileId>,
    /// Number of nodes created so far.
    made: u64,
    by_id: HashMap<FileId, Weak<UnionNode>>,
    /// By slot of the branch and the file's identity there.
    by_part: HashMap<(u8, FileId), Weak<UnionNode>>,
}

impl Nodes {
    /// Creates the tables; `left` is notified of an inode number that cannot be handed to the next process.
    pub(crate) fn new(left: Option<Arc<dyn LeftNumbers>>) -> Nodes {
        Nodes { tables: RwLock::default(), left, epoch: AtomicU64::default() }
    }

    /// The node of the file with identity `id` on the branch in a slot.
    pub(crate) fn by_part(&self, slot: u8, id: FileId) -> Option<Arc<UnionNode>> {
        self.tables.read().by_part.get(&(slot, id)).and_then(Weak::upgrade)
    }

    /// The epoch of the present list of branches.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Starts a new epoch: the list of branches has changed, and every file has to be looked up again.
    pub(crate) fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Removes all identities on the branch in a slot.
    pub(crate) fn forget_slot(&self, slot: u8) {
        self.tables.write().by_part.retain(|(known, _), _| *known != slot);
    }

    /// All nodes.
    pub(crate) fn all(&self) -> Vec<Arc<UnionNode>> {
        self.tables.read().by_id.values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn by_id(&self, id: FileId) -> Option<Arc<UnionNode>> {
        self.tables.read().by_id.get(&id).and_then(Weak::upgrade)
    }

    /// Whether a node belongs to this union.
    pub(crate) fn has(self: &Arc<Nodes>, node: &UnionNode) -> bool {
        std::ptr::eq(node.table.as_ptr(), Arc::as_ptr(self))
    }

    fn is_root(&self, id: FileId) -> bool {
        self.tables.read().root == Some(id)
    }

    pub(crate) fn set_root(&self, id: FileId) {
        self.tables.write().root = Some(id);
    }

    fn index(&self, node: &Arc<UnionNode>, part: &Part) {
        self.tables.write().by_part.insert((part.branch.slot, part.id), Arc::downgrade(node));
    }

    fn forget(&self, id: FileId, parts: &[Part]) {
        let mut tables = self.tables.write();
        // Another node may have taken the entries while this one was being dropped.
        if tables.by_id.get(&id).is_some_and(|weak| weak.strong_count() == 0) {
            tables.by_id.remove(&id);
        }
        for part in parts {
            let key = (part.branch.slot, part.id);
            if tables.by_part.get(&key).is_some_and(|weak| weak.strong_count() == 0) {
                tables.by_part.remove(&key);
            }
        }
    }

    /// The one node of a file: the known one, updated by the look-up, or a new one. A new one gets a number of
    /// its own where its number belongs to a different directory, also to one that was split off from this one.
    pub(crate) fn get(self: &Arc<Nodes>, found: Known) -> Arc<UnionNode> {
        self.get_compared(found).0
    }

    /// As [`Nodes::get`], and whether the known node had other files on the branches as parts.
    pub(crate) fn get_compared(self: &Arc<Nodes>, mut found: Known) -> (Arc<UnionNode>, bool) {
        if let Some(node) = self.by_id(found.id).filter(|node| node.can_be(found.kind, &found.parts)) {
            let others = self.refresh(&node, found);
            return (node, others);
        }
        let mut tables = self.tables.write();
        // Dropping the last reference to a node locks the tables, so it must not happen while they are locked.
        let known = tables.by_id.get(&found.id).and_then(Weak::upgrade);
        let holder = found
            .parts
            .last()
            .and_then(|part| tables.by_part.get(&(part.branch.slot, part.id)))
            .and_then(Weak::upgrade);
        let elsewhere = holder.clone().filter(|_| known.is_some() && found.kind == Kind::Directory);
        if let Some(node) =
            [known.clone(), elsewhere].into_iter().flatten().find(|node| node.can_be(found.kind, &found.parts))
        {
            drop(tables);
            let others = self.refresh(&node, found);
            return (node, others);
        }
        tables.made += 1;
        if known.as_ref().is_some_and(|node| node.kind == Kind::Directory && found.kind == Kind::Directory) {
            found.id = identity::of_its_own(tables.made);
            self.left.iter().for_each(|left| left.give_up("its branches contradict each other"));
        }
        let keys: Vec<_> = found.parts.iter().map(|part| (part.branch.slot, part.id)).collect();
        let node = Arc::new(UnionNode {
            id: found.id,
            kind: found.kind,
            serial: tables.made,
            names: RwLock::new(()),
            listing: RwLock::new(()),
            copying: Mutex::new(()),
            moving: RwLock::new(()),
            epoch: AtomicU64::new(self.epoch()),
            relocations: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            state: Mutex::new(NodeState {
                parts: found.parts.into(),
                floor: found.floor,
                place: None,
                gone: false,
                open: Vec::new(),
                directories: None,
            }),
            table: Arc::downgrade(self),
        });
        tables.by_id.insert(node.id, Arc::downgrade(&node));
        for key in keys {
            tables.by_part.insert(key, Arc::downgrade(&node));
        }
        drop(tables);
        drop((known, holder));
        (node, false)
    }

    /// Updates a known node by a look-up: where a branch has the same file as before, its node is kept and
    /// learns the name. Returns whether the node had other files as parts, a change that was not notified.
    fn refresh(&self, node: &Arc<UnionNode>, found: Known) -> bool {
        let known = node.view();
        let same = known.parts.len() == found.parts.len()
            && known.parts.iter().zip(&found.parts).all(|(old, new)| old.is_like(new));
        for new in &found.parts {
            if let Some(old) = known.parts.iter().find(|old| old.branch.slot == new.branch.slot && old.id == new.id) {
                new.branch.layer.adopt(&old.node, &new.node);
            }
        }
        let was_current = node.is_current(self.epoch());
        if same && known.floor == found.floor {
            node.set_epoch(self.epoch());
            return false;
        }
        // A listing may hand out an entry that it read before a copy-up. Files never move down without a change
        // of their parts.
        let rose = |(old, new): (&Part, &Part)| old.branch.index() < new.branch.index();
        if was_current
            && node.kind != Kind::Directory
            && !node.is_gone()
            && known.parts.first().zip(found.parts.first()).is_some_and(rose)
        {
            return false;
        }
        let files = |parts: &[Part]| parts.iter().map(|part| (part.branch.slot, part.id)).collect::<Vec<_>>();
        let others = was_current && files(&known.parts) != files(&found.parts);
        let parts = found
            .parts
            .into_iter()
            .map(|new| match known.parts.iter().find(|old| old.branch.slot == new.branch.slot && old.id == new.id) {
                Some(old) => Part { node: old.node.clone(), ..new },
                None => new,
            })
            .collect();
        node.settle(parts, found.floor);
        node.set_epoch(self.epoch());
        others
    }
}

/// Locks the names of several directories, each once, in a fixed order.
pub(crate) fn lock_names<'a>(directories: &[&'a Arc<UnionNode>]) -> Vec<RwLockWriteGuard<'a, ()>> {
    let mut locks: Vec<&'a RwLock<()>> = directories.iter().map(|directory| &directory.names).collect();
    locks.sort_by_key(|lock| std::ptr::from_ref::<RwLock<()>>(lock));
    locks.dedup_by_key(|lock| std::ptr::from_ref::<RwLock<()>>(lock));
    locks.into_iter().map(RwLock::write).collect()
}

/// Converts a part to a source of listings.
pub(crate) fn source(part: &Part) -> Source<'_> {
    Source {
        layer: &*part.branch.layer,
        shared: Some(&part.branch.layer),
        directory: &part.node,
        slot: part.branch.slot,
        reads_marks: part.branch.reads_marks(),
        x_directory: part.x_directory,
    }
}

/// The path of a name in a directory.
pub(crate) fn path_in(directory: &UnionNode, name: &[u8]) -> Vec<u8> {
    let mut path = directory.path().unwrap_or_default();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// Removes the `.wh.` whiteout of a name that exists now. If that fails, the whiteout hides nothing that is
/// visible.
pub(crate) fn uncover(home: &Part, name: Name<'_>) {
    if let Err(error) = home.branch.marks().unhide(&*home.branch.layer, &home.node, name) {
        tracing::warn!(branch = home.branch.index(), ?error, "a whiteout stays beside its name");
    }
}
