//! Nodes per name for FUSE front ends, for mergerfs options under which the names of one file differ:
//! `link-cow` and `symlinkify`.
//!
//! A FUSE front end, and the kernel, know a file by its inode and open it by that: they do not report which of
//! its names was used. So here each name of a regular file has a node and an identity of its own; the inode
//! number that users see stays that of the file. If a name no longer leads to its file, the error is ESTALE,
//! upon which the kernel looks it up again and retries once. Files shown as symbolic links have other
//! identities than before, so that processes that have them open are not affected.
//!
//! Made by [`Union::layer`] for unions with one of these options only. Invariants:
//! * the name stored in a node is verified before it matters;
//! * `tables` is held for a moment only, and no code of the union is called and nothing dropped under it.

use crate::{
    ATTEMPTS, OWN, Union, UnionShared,
    node::{NodePlace, UnionNode},
    open_file::UnionFile,
};
use hashbrown::HashMap;
use nacre_vfs::{
    AnyOpen, Attr, Caller, Coherence, Created, Dev, DirEntry, DirSink, Entry, Errno, FileId, Invalidation, Ioctl, Kind,
    Layer, Name, Node, OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use parking_lot::Mutex;
use std::{
    hash::Hash,
    os::unix::ffi::OsStrExt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc::Sender,
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// The write bits of a mode.
const WRITE: u32 = 0o222;

/// A node of a file under one of its names.
struct Named {
    /// The union's node.
    below: Node,
    /// The union's inode in `below`.
    file: Arc<UnionNode>,
    id: FileId,
    /// Whether it is shown as a symbolic link.
    is_link: bool,
    /// The name it was last seen under.
    place: Mutex<NodePlace>,
    names: Weak<Names>,
}

/// A name: directory and name in it.
type Key = (FileId, Box<[u8]>);

/// All referenced nodes.
#[derive(Default)]
pub(crate) struct Names {
    /// Number of nodes created so far.
    made: AtomicU64,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    /// Several nodes where a name led to different files, some of which are still referenced.
    by_name: HashMap<Key, Vec<Weak<Named>>>,
    by_file: HashMap<FileId, Vec<Weak<Named>>>,
}

fn key(place: &NodePlace) -> Key {
    (place.parent.id, place.name.clone())
}

impl Named {
    fn place(&self) -> NodePlace {
        self.place.lock().clone()
    }
}

/// Removes unreferenced nodes from a table.
fn tidy<K: Eq + Hash>(table: &mut HashMap<K, Vec<Weak<Named>>>, key: &K) {
    if let Some(nodes) = table.get_mut(key) {
        nodes.retain(|weak| weak.strong_count() > 0);
        if nodes.is_empty() {
            table.remove(key);
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let Some(names) = self.names.upgrade() else { return };
        let key = key(self.place.get_mut());
        let mut tables = names.tables.lock();
        tidy(&mut tables.by_name, &key);
        tidy(&mut tables.by_file, &self.file.id);
    }
}

impl Names {
    /// The node of a name that leads to this file, which may be shown as a link: the known one or a new one.
    fn get(self: &Arc<Names>, place: NodePlace, below: &Node, file: &Arc<UnionNode>, is_link: bool) -> Arc<Named> {
        let key = key(&place);
        let mut tables = self.tables.lock();
        let others: Vec<Arc<Named>> =
            tables.by_name.get(&key).into_iter().flatten().filter_map(Weak::upgrade).collect();
        if let Some(known) = others.iter().find(|known| known.file.id == file.id && known.is_link == is_link) {
            let known = Arc::clone(known);
            // Other nodes may be dropped for good here.
            drop(tables);
            return known;
        }
        let named = Arc::new(Named {
            below: below.clone(),
            file: Arc::clone(file),
            id: FileId { generation: self.made.fetch_add(1, Ordering::Relaxed), ..file.id },
            is_link,
            place: Mutex::new(place),
            names: Arc::downgrade(self),
        });
        tables.by_name.entry(key).or_default().push(Arc::downgrade(&named));
        tables.by_file.entry(file.id).or_default().push(Arc::downgrade(&named));
        drop(tables);
        named
    }

    /// Updates the names of nodes after a rename.
    fn moved(&self, from: &NodePlace, to: &NodePlace, exchange: bool) {
        let mut left = Vec::new();
        let mut tables = self.tables.lock();
        let mut take = |place: &NodePlace| {
            let nodes = tables.by_name.remove(&key(place));
            nodes.into_iter().flatten().filter_map(|weak| weak.upgrade()).collect::<Vec<Arc<Named>>>()
        };
        let (moved, replaced) = (take(from), take(to));
        // Two names of one file: rename(2) does nothing.
        let stays = !exchange && moved.iter().any(|node| replaced.iter().any(|other| other.file.id == node.file.id));
        let (now_there, now_here) = if stays { (&replaced, &moved) } else { (&moved, &replaced) };
        for (nodes, place) in [(now_there, to), (now_here, from)] {
            if nodes.is_empty() || !stays && !exchange && std::ptr::eq(place, from) {
                continue;
            }
            for node in nodes {
                left.push(std::mem::replace(&mut *node.place.lock(), place.clone()));
            }
            tables.by_name.insert(key(place), nodes.iter().map(Arc::downgrade).collect());
        }
        drop(tables);
        drop((left, moved, replaced));
    }

    fn of(&self, file: FileId) -> Vec<Arc<Named>> {
        self.tables
            .lock()
            .by_file
            .get(&file)
            .map_or_else(Vec::new, |nodes| nodes.iter().filter_map(Weak::upgrade).collect())
    }
}

impl UnionShared {
    /// Notifies a FUSE front end of a change. A change of a file becomes one of each of its names. False if the
    /// front end is gone.
    pub(crate) fn send(&self, out: &Sender<Invalidation>, what: Invalidation) -> bool {
        if let (Some(names), Invalidation::Attributes { id } | Invalidation::Content { id }) = (&self.names, &what) {
            for named in names.of(*id) {
                let its = match what {
                    Invalidation::Content { .. } => Invalidation::Content { id: named.id },
                    _ => Invalidation::Attributes { id: named.id },
                };
                // It may be shown as a file again.
                let again = named.is_link.then(|| entry_of(&named.place()));
                if std::iter::once(its).chain(again).any(|what| out.send(what).is_err()) {
                    return false;
                }
            }
        }
        out.send(what).is_ok()
    }
}

fn entry_of(place: &NodePlace) -> Invalidation {
    Invalidation::Entry { parent: place.parent.id, name: place.name.clone() }
}

/// The layer of nodes per name; see the file's head.
pub(crate) struct PerName {
    below: Arc<Union>,
    names: Arc<Names>,
}

/// The node per name in a front end's node, if it is one.
fn named(node: &Node) -> Option<&Named> {
    node.get()
}

/// The union's node.
fn below(node: &Node) -> &Node {
    named(node).map_or(node, |named| &named.below)
}

/// A consumer that passes a listing on with nodes per name.
struct Shown<'a> {
    layer: &'a PerName,
    parent: Arc<UnionNode>,
    sink: &'a mut dyn DirSink,
}

impl DirSink for Shown<'_> {
    fn push(&mut self, mut entry: DirEntry<'_>) -> bool {
        match entry.entry.take() {
            Some(found) => {
                let found = self.layer.up(&self.parent, entry.name, found, true);
                entry.kind = Some(found.attr.kind);
                entry.entry = Some(found);
            }
            // The file may be shown as a link, which only its attributes show.
            None if self.layer.shared().options.symlinkify.is_some() => {
                entry.kind = entry.kind.filter(|kind| *kind != Kind::File)
            }
            None => {}
        }
        self.sink.push(entry)
    }

    fn room(&self, attributes: bool) -> usize {
        self.sink.room(attributes)
    }
}

impl PerName {
    pub(crate) fn new(below: Arc<Union>, names: Arc<Names>) -> PerName {
        PerName { below, names }
    }

    fn shared(&self) -> &Arc<UnionShared> {
        self.below.shared()
    }

    fn place(&self, parent: &Node, name: Name<'_>) -> Result<NodePlace> {
        Ok(NodePlace { parent: self.shared().held(parent)?, name: name.bytes().into() })
    }

    /// Whether a file with these attributes is to be shown as a link.
    #[expect(clippy::disallowed_methods, reason = "the age of a file, whose times are those of the system")]
    fn is_settled(&self, place: &NodePlace, file: &UnionNode, attr: &Attr) -> bool {
        let Some(age) = self.shared().options.symlinkify else { return false };
        if attr.kind != Kind::File || attr.mode & WRITE != 0 {
            return false;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let since = |sec: i64| i64::try_from(now).unwrap_or(i64::MAX).saturating_sub(sec);
        let age = i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
        since(attr.mtime.sec) > age && since(attr.ctime.sec) > age && self.target(place, file).is_some()
    }

    /// The path of a file on its branch; `None` where the branch is no path.
    fn target(&self, place: &NodePlace, file: &UnionNode) -> Option<Vec<u8>> {
        let branch = file.top().ok()?.branch;
        let home = place.parent.part_on(&branch)?;
        let (base, within) = (branch.name.as_os_str().as_bytes(), branch.layer.path(&home.node)?);
        let parts = [base, &within, &place.name];
        let parts: Vec<&[u8]> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        base.starts_with(b"/").then(|| parts.join(&b'/'))
    }

    /// The visible entry of a found file; `changes`: it may have become a link since its last look-up.
    fn up(&self, parent: &Arc<UnionNode>, name: Name<'_>, found: Entry, changes: bool) -> Entry {
        let Some(file) = found.node.arc::<UnionNode>().filter(|_| found.attr.kind == Kind::File) else { return found };
        let place = NodePlace { parent: Arc::clone(parent), name: name.bytes().into() };
        let is_link = changes && self.is_settled(&place, &file, &found.attr);
        self.entry(self.names.get(place, &found.node, &file, is_link), found.attr)
    }

    fn entry(&self, named: Arc<Named>, attr: Attr) -> Entry {
        let attr = self.attr_up(&named, attr);
        Entry { node: Node::new(named), attr }
    }

    fn attr_up(&self, named: &Named, mut attr: Attr) -> Attr {
        attr.id = named.id;
        if named.is_link {
            let size = self.target(&named.place(), &named.file).map_or(0, |target| target.len() as u64);
            attr = Attr { kind: Kind::Symlink, mode: 0o777, size, blocks: 0, ..attr };
        }
        attr
    }

    /// The visible attributes of a known node; if the file has to be shown differently, its name is
    /// invalidated.
    fn attr_of(&self, node: &Node, attr: Attr) -> Attr {
        let Some(named) = named(node) else { return attr };
        if self.shared().options.symlinkify.is_some() {
            let place = named.place();
            if self.is_settled(&place, &named.file, &attr) != named.is_link {
                self.shared().tell(&entry_of(&place));
            }
        }
        self.attr_up(named, attr)
    }

    /// Runs a call on a file. Its branch may know the file by a name that has just got a file of its own, and
    /// return ESTALE: then this name is looked up and the call retried, so that only users of the
    /// other name have to look it up again (the kernel does that once for each open).
    fn by_its_name<T>(&self, node: &Node, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
        let mut answer = ask();
        let Some(named) = named(node).filter(|_| self.shared().options.link_cow) else { return answer };
        for _ in 0..ATTEMPTS {
            if !matches!(answer, Err(Errno::ESTALE)) || !self.leads_to_it(named)? {
                break;
            }
            answer = ask();
        }
        answer
    }

    /// Looks a name up: returns whether it still leads to its file.
    fn leads_to_it(&self, named: &Named) -> Result<bool> {
        let place = named.place();
        match self.below.lookup(&OWN, &Node::new(place.parent), Name::new(&place.name)?) {
            Ok(found) => Ok(found.node.arc::<UnionNode>().is_some_and(|file| Arc::ptr_eq(&file, &named.file))),
            Err(Errno::ENOENT | Errno::ESTALE) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Called before a file is changed through a name: other names must keep the old content.
    ///
    /// # Errors
    /// ESTALE where the name leads to another file now.
    fn break_link(&self, node: &Node) -> Result<()> {
        let Some(named) = named(node).filter(|_| self.shared().options.link_cow) else { return Ok(()) };
        let _branches = self.shared().gate.read();
        let file = self.shared().node(&named.below)?;
        if self.shared().break_link(&named.place(), &file)? { Err(Errno::ESTALE) } else { Ok(()) }
    }
}

impl Layer for PerName {
    nacre_vfs::forward_layer!(root mkdir symlink unlink rmdir fsyncdir syncfs watch capabilities describe hold);

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let found = self.below.lookup(caller, parent, name)?;
        Ok(self.up(&self.shared().held(parent)?, name, found, true))
    }

    fn rest(&self, known: Option<&[Node]>) -> bool {
        let files: Option<Vec<Node>> = known.map(|known| known.iter().map(|node| below(node).clone()).collect());
        self.below.rest(files.as_deref())
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        named(node).map_or_else(|| self.below.id(node), |named| Ok(named.id))
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        let Some(named) = named(node) else { return self.below.path(node) };
        let place = named.place();
        let above = place.parent.path()?;
        Some(if above.is_empty() { place.name.to_vec() } else { [&above, &place.name[..]].join(&b'/') })
    }

    fn adopt(&self, known: &Node, fresh: &Node) {
        self.below.adopt(below(known), below(fresh));
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        let attr = self.by_its_name(node, || self.below.getattr(caller, below(node), file))?;
        Ok(self.attr_of(node, attr))
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        self.by_its_name(node, || self.below.access(caller, below(node), mask))
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        let open = file.and_then(|file| file.inner().as_any().downcast_ref::<UnionFile>());
        // A file open for writing has been handled when it was opened.
        if change.size.is_some() && !open.is_some_and(UnionFile::writes) {
            self.break_link(node)?;
        }
        let attr = self.by_its_name(node, || self.below.setattr(caller, below(node), file, change))?;
        Ok(self.attr_of(node, attr))
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        match named(node).filter(|named| named.is_link) {
            Some(named) => self.target(&named.place(), &named.file).ok_or(Errno::ESTALE),
            None => self.below.readlink(caller, below(node)),
        }
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        let (made, file) = self.below.create(caller, parent, name, mode, flags)?;
        Ok((self.up(&self.shared().held(parent)?, name, made, false), file))
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.below.tmpfile(caller, parent, mode, flags)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        let made = self.below.mknod(caller, parent, name, kind, mode, dev)?;
        Ok(self.up(&self.shared().held(parent)?, name, made, false))
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let made = self.below.link(caller, below(node), file, parent, name)?;
        let Some(source) = named(node).filter(|named| named.is_link) else {
            return Ok(self.up(&self.shared().held(parent)?, name, made, false));
        };
        // The kernel takes a new name of a symbolic link for that of the same link.
        let place = self.place(parent, name)?;
        Ok(self.entry(self.names.get(place, &source.below, &source.file, true), made.attr))
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new_parent: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.below.rename(caller, parent, name, new_parent, new_name, flags)?;
        let (from, to) = (self.place(parent, name)?, self.place(new_parent, new_name)?);
        if key(&from) != key(&to) {
            self.names.moved(&from, &to, flags.has(RenameFlags::EXCHANGE));
        }
        Ok(())
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        if named(node).is_some_and(|named| named.is_link) {
            return Err(Errno::ELOOP);
        }
        if flags.writes() || flags.truncates() {
            self.break_link(node)?;
        }
        self.by_its_name(node, || self.below.open(caller, below(node), flags))
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let parent = self.shared().held(node)?;
        self.below.readdir(caller, node, from, attributes, &mut Shown { layer: self, parent, sink })
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        self.below.statfs(caller, below(node))
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        self.by_its_name(node, || self.below.getxattr(caller, below(node), name, buffer))
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        self.by_its_name(node, || self.below.listxattr(caller, below(node), buffer))
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.below.setxattr(caller, below(node), name, value, flags)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.below.removexattr(caller, below(node), name)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        self.below.ioctl(caller, below(node), request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        let Scope::Attributes(node, attr) = scope else { return self.below.coherence(scope) };
        let options = &self.shared().options;
        // A change through one name invalidates nothing of the others; and no event is sent when a file gets
        // old enough.
        let is_shared = options.link_cow && attr.nlink > 1 || options.symlinkify.is_some() && attr.mode & WRITE == 0;
        match named(node) {
            Some(named) if named.is_link || is_shared => Coherence::Shared,
            _ => self.below.coherence(Scope::Attributes(below(node), attr)),
        }
    }
}
