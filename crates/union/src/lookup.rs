//! Look-ups of names over all branches, and nodes and attributes of the found files.
//!
//! Called by every operation on names. Invariant: a [`Sight`] is valid as long as the directory's `names` lock
//! is held; nodes are updated from it only meanwhile.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    identity,
    listing::{Present, Presented, Request},
    marks,
    marks::Seen,
    node::{Known, Part, Redirect, UnionNode, View},
};
use nacre_vfs::{
    Attr, Caller, Coherence, DirEntry, DirSink, Entry, Errno, FileId, Invalidation, Kind, Name, Node, Result,
};
use std::sync::{Arc, atomic::Ordering};

/// A file found under a name.
#[derive(Clone)]
pub(crate) struct FoundFile {
    pub(crate) kind: Kind,
    /// Parts from the top; exactly one for a file that is no directory.
    pub(crate) parts: Vec<Part>,
    /// Attributes on the top branch.
    pub(crate) attr: Attr,
    /// The last branch that could show part of it.
    pub(crate) floor: usize,
}

impl FoundFile {
    /// The shown part.
    ///
    /// # Errors
    /// Never: there is at least one part.
    pub(crate) fn top(&self) -> Result<&Part> {
        self.parts.first().ok_or(Errno::EIO)
    }
}

/// The result of a look-up over the branches.
pub(crate) struct Sight {
    pub(crate) found: Option<FoundFile>,
    /// The branch whose whiteout ended the search.
    pub(crate) whiteout: Option<usize>,
    /// The last branch on which a new file of this name would be visible.
    pub(crate) limit: usize,
}

impl UnionShared {
    /// Looks a name up in a directory.
    pub(crate) fn sight(&self, caller: &Caller, directory: &View, name: Name<'_>) -> Result<Sight> {
        self.sight_from(caller, directory, name, 0)
    }

    /// Looks a name up as if there were no branches above `first`.
    pub(crate) fn sight_from(&self, caller: &Caller, directory: &View, name: Name<'_>, first: usize) -> Result<Sight> {
        let mut sight = Sight { found: None, whiteout: None, limit: directory.floor };
        for part in directory.parts.iter().filter(|part| part.branch.index() >= first) {
            let branch = &part.branch;
            let reads_marks = branch.reads_marks();
            let mut seen =
                branch.marks().look_at(&*branch.layer, caller, &part.node, name, reads_marks, part.x_directory)?;
            if matches!(seen, Seen::Absent)
                && reads_marks
                && self.whiteouts_matter(directory, part)
                && marks::stands_beside(&*branch.layer, &part.node, name)?
            {
                seen = Seen::WhitedOut;
            }
            match seen {
                Seen::Absent => {}
                Seen::WhitedOut => {
                    match &mut sight.found {
                        // A file found above stays visible: the whiteout hides only this branch and lower ones.
                        Some(found) => found.floor = branch.index().saturating_sub(1),
                        None => (sight.whiteout, sight.limit) = (Some(branch.index()), branch.index()),
                    }
                    break;
                }
                Seen::Found(entry) => {
                    if !self.merge(&mut sight, directory, part, name, entry)? {
                        break;
                    }
                }
            }
        }
        if let Some(found) = &sight.found {
            sight.limit = found.top()?.branch.index();
        }
        Ok(sight)
    }

    /// Whether a whiteout in one part of a directory can hide anything: there is a part below, or one may be
    /// created there.
    fn whiteouts_matter(&self, directory: &View, part: &Part) -> bool {
        let index = part.branch.index();
        let is_last = directory.parts.last().is_none_or(|last| last.branch.index() == index);
        !is_last
            || self
                .branches()
                .iter()
                .take(directory.floor.saturating_add(1))
                .skip(index + 1)
                .any(|branch| branch.creates())
    }

    /// Adds one branch's entry to the result; returns whether branches below count.
    fn merge(&self, sight: &mut Sight, view: &View, home: &Part, name: Name<'_>, entry: Entry) -> Result<bool> {
        let branch = &home.branch;
        let kind = entry.attr.kind;
        if kind != Kind::Directory {
            if let Some(found) = &mut sight.found {
                found.floor = branch.index().saturating_sub(1);
                return Ok(false);
            }
            let part = Part { in_impure: home.impure, ..Part::new(branch, entry.node, entry.attr.id) };
            sight.found = Some(FoundFile { kind, parts: vec![part], attr: entry.attr, floor: branch.index() });
            return Ok(false);
        }
        let opacity = if branch.reads_marks() {
            branch.marks().opacity(&*branch.layer, &entry.node)?
        } else {
            marks::Opacity::default()
        };
        // A whiteout together with a directory hides the directory's lower parts, as in a layer that replaced
        // one directory by another; it does not apply to a directory with a redirect.
        let is_last = view.parts.last().is_none_or(|last| last.branch.index() == branch.index());
        let may_be_hidden = branch.reads_marks() && !is_last && opacity.redirect.is_none();
        let opaque = opacity.opaque || may_be_hidden && marks::stands_beside(&*branch.layer, &home.node, name)?;
        let redirect = match &opacity.redirect {
            _ if opaque => Redirect::None,
            Some(target) if target.starts_with(b"/") => Redirect::Path,
            Some(_) => Redirect::Sibling,
            None => Redirect::None,
        };
        let part = Part {
            x_directory: opacity.x,
            impure: opacity.impure,
            in_impure: home.impure,
            redirect,
            ..Part::new(branch, entry.node, entry.attr.id)
        };
        let floor = if opaque { branch.index() } else { sight.limit };
        match &mut sight.found {
            Some(found) => {
                found.parts.push(part);
                found.floor = floor;
            }
            None => sight.found = Some(FoundFile { kind, parts: vec![part], attr: entry.attr, floor }),
        }
        if opaque {
            return Ok(false);
        }
        if let Some(target) = opacity.redirect {
            self.redirect(sight, view, &target, branch.index())?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Adds the parts that a redirected directory has on the branches below `home`. Nothing can be created
    /// there under the name it has above.
    fn redirect(&self, sight: &mut Sight, directory: &View, target: &[u8], home: usize) -> Result<()> {
        let below = self.resolve(directory, target, home + 1)?;
        if let Some(found) = sight.found.as_mut() {
            found.floor = home;
            found.parts.extend(below.into_iter().flat_map(|below| below.parts));
        }
        Ok(())
    }

    /// Resolves a redirect on the branches from `first` down: a name in the same directory, or a path from the
    /// root.
    pub(crate) fn resolve(&self, directory: &View, target: &[u8], first: usize) -> Result<Option<FoundFile>> {
        let mut at = match target.strip_prefix(b"/") {
            Some(_) => self.root.view(),
            None => directory.clone(),
        };
        let mut below = None;
        for component in target.split(|byte| *byte == b'/').filter(|component| !component.is_empty()) {
            // An invalid name leads nowhere.
            let Ok(name) = Name::new(component) else { return Ok(None) };
            let found = self.sight_from(&OWN, &at, name, first)?.found.filter(FoundFile::is_directory);
            let Some(found) = found else { return Ok(None) };
            at = View { parts: found.parts.clone().into(), floor: found.floor };
            below = Some(found);
        }
        Ok(below)
    }

    /// Whether a branch below `above` would show the name if `above` and all branches over it did not have it.
    pub(crate) fn shows_below(&self, directory: &View, name: Name<'_>, above: usize) -> Result<bool> {
        Ok(self.sight_from(&OWN, directory, name, above + 1)?.found.is_some())
    }

    /// The node of a found file, which is updated with that name.
    pub(crate) fn known(&self, parent: &Arc<UnionNode>, name: Name<'_>, found: FoundFile) -> Result<Arc<UnionNode>> {
        let node = self.node_of(found)?;
        let moves = node.kind == Kind::Directory && !node.place().is_some_and(|place| place.is(parent, name.bytes()));
        if moves && parent.is_within(&node) {
            // A directory below itself: the branches contradict each other.
            return Err(Errno::ELOOP);
        }
        node.arrive(parent, name.bytes());
        Ok(node)
    }

    /// The node of a found file.
    pub(crate) fn node_of(&self, mut found: FoundFile) -> Result<Arc<UnionNode>> {
        // A directory's number is that of its lowest part, which stays when copies are created above.
        let id = self.number_of(&found)?;
        if found.kind != Kind::Directory {
            let part = found.parts.first().ok_or(Errno::EIO)?;
            if let Some(copy) = self.shown_for(id, part)? {
                found.parts = vec![copy];
            }
        }
        let (node, others) =
            self.nodes.get_compared(Known { id, kind: found.kind, parts: found.parts, floor: found.floor });
        if others {
            // Changes of its present parts may have been reported for no node, or missed during an idle watch
            // (`resting.rs`).
            self.listings.forget(node.id);
            self.tell(&Invalidation::Content { id: node.id });
        } else {
            self.tell_unheard(&node);
        }
        Ok(node)
    }

    /// The inode number of a found file.
    pub(crate) fn number_of(&self, found: &FoundFile) -> Result<FileId> {
        let last = found.parts.last().ok_or(Errno::EIO)?;
        let known = self.nodes.by_part(last.branch.slot, last.id).filter(|node| node.can_be(found.kind, &found.parts));
        match known.or_else(|| self.known_before(found)) {
            Some(node) => Ok(node.id),
            None => self.id_of(last),
        }
    }

    /// The inode number of a file that is on one branch.
    pub(crate) fn id_of(&self, part: &Part) -> Result<FileId> {
        if part.in_impure
            && let Some(origin) = identity::origin(&self.identities, &part.branch, &part.node, part.id)?
        {
            return Ok(origin);
        }
        Ok(self.identities.of(part.id))
    }

    /// Whether a part stores the inode number of another file.
    pub(crate) fn is_copy(&self, node: &UnionNode, part: &Part) -> bool {
        self.identities.of(part.id) != node.id
    }

    /// Makes sure, before a copy is placed in a directory of a branch, that look-ups there check for stored
    /// inode numbers.
    pub(crate) fn mark_home(&self, directory: &UnionNode, home: &Part) -> Result<()> {
        if !home.impure {
            identity::mark_impure(&home.branch, &home.node)?;
            directory.holds_copies(home.branch.index());
        }
        Ok(())
    }

    /// The visible entry of a found file: attributes are read again if another branch shows the file than the
    /// one that was looked up.
    pub(crate) fn entry(&self, parent: &Arc<UnionNode>, name: Name<'_>, found: FoundFile) -> Result<Entry> {
        let (seen, attr) = (found.top()?.id, found.attr);
        let node = self.known(parent, name, found)?;
        let top = node.top()?;
        let attr = if top.id == seen { attr } else { top.branch.layer.getattr(&OWN, &top.node, None)? };
        Ok(Entry { attr: self.attr_up(&node, attr), node: Node::new(node) })
    }

    /// Converts attributes to the visible ones.
    pub(crate) fn attr_up(&self, node: &UnionNode, mut attr: Attr) -> Attr {
        attr.id = node.id;
        if node.kind == Kind::Directory {
            // A link count of 1 means "unknown" to programs that count subdirectories by it.
            let parts = node.parts();
            if parts.len() > 1 || parts.first().is_some_and(|part| part.branch.is_root(part.id)) {
                attr.nlink = 1;
            }
            if self.rules().newest_times {
                self.newest_times(&parts, &mut attr);
            }
        } else {
            attr.nlink = self.hardlinks.shown(node, attr.nlink);
        }
        attr
    }

    pub(crate) fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let parent = self.directory(parent)?;
        if marks::is_reserved(name.bytes()) && !self.options.show_whiteouts {
            return Err(Errno::ENOENT);
        }
        let _names = parent.names.read();
        if parent.is_gone() {
            return Err(Errno::ENOENT);
        }
        let found = self.sight(caller, &parent.view(), name)?.found.ok_or(Errno::ENOENT)?;
        self.entry(&parent, name, found)
    }

    /// Returns an up-to-date node of this union; ENOTDIR if it is no directory.
    pub(crate) fn directory(&self, node: &Node) -> Result<Arc<UnionNode>> {
        let node = self.node(node)?;
        if node.kind == Kind::Directory { Ok(node) } else { Err(Errno::ENOTDIR) }
    }

    /// Returns a node of this union in its last known state: for queries that are no operations.
    pub(crate) fn held(&self, node: &Node) -> Result<Arc<UnionNode>> {
        node.arc::<UnionNode>().filter(|node| self.nodes.has(node)).ok_or(Errno::EIO)
    }

    /// Returns an up-to-date node of this union. The quiesce lock is held.
    pub(crate) fn node(&self, node: &Node) -> Result<Arc<UnionNode>> {
        let node = self.held(node)?;
        if !node.is_current(self.nodes.epoch()) {
            self.revalidate(&node)?;
        }
        Ok(node)
    }

    pub(crate) fn branch(&self, index: usize) -> Result<Arc<Branch>> {
        self.branches().get(index).cloned().ok_or(Errno::EIO)
    }
}

/// A consumer that passes a listing to the FUSE front end.
struct Shown<'a> {
    shared: &'a UnionShared,
    caller: &'a Caller,
    directory: &'a Arc<UnionNode>,
    view: View,
    attributes: bool,
    /// How many files in it had moved to other branches when the listing began.
    relocations: u64,
    /// The source of the last names, its file system, and the index of that in the union's inode numbers.
    home: Option<(usize, u64, u64)>,
    sink: &'a mut dyn DirSink,
}

impl Present for Shown<'_> {
    fn present(&mut self, of: Presented<'_>) -> Result<bool> {
        let Presented { source, name, ino, kind, found, next } = of;
        if !self.attributes {
            let Some(ino) = self.number(source, name, ino, kind)? else { return Ok(true) };
            return Ok(self.sink.push(DirEntry { name, ino, kind, next, entry: None }));
        }
        let entry = match self.entry(source, name, found) {
            Ok(entry) => Some(entry),
            // Removed meanwhile.
            Err(Errno::ENOENT | Errno::ESTALE | Errno::ENOTDIR) => return Ok(true),
            // A file that cannot be examined must not hide the others.
            Err(_) => None,
        };
        let ino = entry.as_ref().map_or(ino, |entry| entry.attr.id.ino);
        let kind = entry.as_ref().map(|entry| entry.attr.kind).or(kind);
        Ok(self.sink.push(DirEntry { name, ino, kind, next, entry }))
    }
}

impl Shown<'_> {
    fn entry(&self, source: Option<usize>, name: Name<'_>, found: Option<Entry>) -> Result<Entry> {
        let _names = self.directory.names.read();
        let found = match found {
            Some(entry)
                if entry.attr.kind != Kind::Directory
                    && self.relocations == self.directory.relocations.load(Ordering::Acquire) =>
            {
                let home = source.and_then(|source| self.view.parts.get(source)).ok_or(Errno::EIO)?;
                let branch = &home.branch;
                let part = Part { in_impure: home.impure, ..Part::new(branch, entry.node, entry.attr.id) };
                FoundFile { kind: entry.attr.kind, parts: vec![part], attr: entry.attr, floor: branch.index() }
            }
            _ => self.shared.sight(self.caller, &self.directory.view(), name)?.found.ok_or(Errno::ENOENT)?,
        };
        self.shared.entry(self.directory, name, found)
    }

    /// The inode number that a look-up would return; `None` where the name was removed with its branch.
    fn number(&mut self, source: Option<usize>, name: Name<'_>, ino: u64, kind: Option<Kind>) -> Result<Option<u64>> {
        if let Some((last, fs, index)) = self.home
            && Some(last) == source
            && kind.is_some_and(|kind| kind != Kind::Directory)
        {
            return Ok(Some(self.shared.identities.of_on(index, nacre_vfs::FileId { fs, ino, generation: 0 }).ino));
        }
        let home = source.map(|source| self.view.parts.get(source).ok_or(Errno::EIO)).transpose()?;
        let merges =
            kind != Some(Kind::File) && self.view.parts.len() > 1 && kind.is_none_or(|kind| kind == Kind::Directory);
        if let Some(part) = home.filter(|part| !merges && !part.impure) {
            let (fs, index) = (part.id.fs, self.shared.identities.file_system(part.id.fs));
            self.home = source.map(|source| (source, fs, index));
            return Ok(Some(self.shared.identities.of_on(index, nacre_vfs::FileId { fs, ino, generation: 0 }).ino));
        }
        let _names = self.directory.names.read();
        match self.shared.sight(self.caller, &self.directory.view(), name)?.found {
            Some(found) => Ok(Some(self.shared.id_of(found.parts.last().ok_or(Errno::EIO)?)?.ino)),
            None => Ok(home.map(|_| ino)),
        }
    }
}

/// Lists a directory.
///
/// # Errors
/// ENOTDIR, and errors of the branches.
pub(crate) fn list(
    shared: &Arc<UnionShared>,
    caller: &Caller,
    node: &Node,
    from: u64,
    attributes: bool,
    sink: &mut dyn DirSink,
) -> Result<()> {
    let directory = shared.directory(node)?;
    if directory.is_gone() {
        return Ok(());
    }
    if from == 0 {
        shared.rise_on_open(&directory);
    }
    let _unmoved = directory.listing.read();
    let view = directory.view();
    let token = (shared.coherence_of_names(&directory) <= Coherence::Watched).then_some(directory.serial);
    let sources: Vec<_> = view.parts.iter().map(crate::node::source).collect();
    let marks = view.parts.first().map(|part| part.branch.marks()).ok_or(Errno::EIO)?;
    let show_whiteouts = shared.options.show_whiteouts;
    let request = Request { key: directory.id, token, from, attributes, show_whiteouts, caller };
    let relocations = directory.relocations.load(Ordering::Acquire);
    let mut shown =
        Shown { shared, caller, directory: &directory, view: view.clone(), attributes, relocations, home: None, sink };
    shared.listings.list(&marks, &request, &sources, &mut shown)
}

/// The parts of the root directory, and the last branch that shows any of it.
pub(crate) fn root_parts(branches: &[Arc<Branch>]) -> Result<(Vec<Part>, usize)> {
    let mut parts = Vec::new();
    for branch in branches {
        let opacity = if branch.reads_marks() {
            branch.marks().opacity(&*branch.layer, &branch.root)?
        } else {
            Default::default()
        };
        parts.push(Part {
            x_directory: opacity.x,
            impure: opacity.impure,
            ..Part::new(branch, branch.root.clone(), branch.root_id)
        });
        if opacity.opaque {
            return Ok((parts, branch.index()));
        }
    }
    Ok((parts, branches.len().saturating_sub(1)))
}
