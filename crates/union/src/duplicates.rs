//! Copies of a file on lower writable branches (`duplicates=change`): if users have copied a file to several
//! branches of a pool, as mergerfs' users do, its copies are changed, renamed and removed with it.
//!
//! Called by `remove.rs`, `rename.rs`, `attributes.rs`, `create.rs` (links) and `interrupted.rs`. Which changes are made
//! on all copies is said by [`crate::UnionOptions::actions`]. Invariants:
//! * the file that is shown is changed first, and removed last: whatever happens in between, it is there under one of
//!   its names;
//! * a copy is removed only when the file that is shown has been, or is about to be, removed by the same call, or when its
//!   name has been given to another file; a rename that fails leaves all copies where they were, unless the process is
//!   killed in it;
//! * a copy that does not follow is hidden as in every union, so that no name comes back;
//! * nobody changes a copy through the union that he could not change on its branch: the kernel has judged the file that is
//!   shown alone, and branches are changed as root. A copy counts for root, and for its owner; it is removed or renamed by
//!   others where its directory has the owner and mode of the directory that the kernel has judged.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    marks::{self, Seen},
    node::{Part, UnionNode, View},
    options::Action,
    remove::Leftover,
};
use nacre_vfs::{Caller, Errno, FileId, Kind, Name, Node, RenameFlags, Result};
use std::sync::Arc;

/// A copy of a file on a lower branch.
pub(crate) struct Duplicate {
    /// The directory that has the copy on its branch.
    home: Part,
    node: Node,
    id: FileId,
    uid: u32,
    kind: Kind,
}

impl Duplicate {
    /// Whether a caller may change its content and attributes. Other writers than its owner are not judged here.
    fn is_changed_by(&self, caller: &Caller, kind: Kind) -> bool {
        self.kind == kind && (caller.uid == 0 || caller.uid == self.uid)
    }

    fn branch(&self) -> &Arc<Branch> {
        &self.home.branch
    }
}

/// The files on lower branches with the same name.
#[derive(Default)]
pub(crate) struct Duplicates {
    /// On writable branches, from the top.
    pub(crate) writable: Vec<Duplicate>,
    /// Whether a read-only branch's file or a directory would be shown without the file and its copies.
    pub(crate) remains: bool,
    /// Whether a copy on a writable branch would be shown without the file.
    pub(crate) shows_writable: bool,
}

impl Duplicates {
    /// The branches that have a copy.
    pub(crate) fn branches(&self) -> impl Iterator<Item = &Arc<Branch>> {
        self.writable.iter().map(Duplicate::branch)
    }

    /// The copy on a branch.
    fn on(&self, branch: &Branch) -> Option<&Duplicate> {
        self.writable.iter().find(|copy| copy.branch().slot == branch.slot)
    }

    /// The copies down to a branch, that one included.
    pub(crate) fn down_to(&self, index: usize) -> &[Duplicate] {
        let end = self.writable.iter().take_while(|copy| copy.branch().index() <= index).count();
        self.writable.get(..end).unwrap_or_default()
    }
}

/// The old and the new name of a rename, each with a view of its directory.
#[derive(Clone, Copy)]
pub(crate) struct BothNames<'a> {
    pub(crate) from: (&'a View, Name<'a>),
    pub(crate) to: (&'a View, Name<'a>),
    /// Position of the shown file's branch.
    pub(crate) index: usize,
}

/// The copies of two files that are to exchange their names.
pub(crate) struct BothCopies {
    pub(crate) from: Duplicates,
    pub(crate) to: Duplicates,
}

/// A copy in the work directory of its branch.
pub(crate) struct CopyAside {
    home: Part,
    leftover: Leftover,
}

impl CopyAside {
    /// The file to be deleted once the rename is done.
    pub(crate) fn into_leftover(self) -> Leftover {
        self.leftover
    }

    fn put_back(&self, name: Name<'_>) -> Result<()> {
        let (branch, work) = (self.leftover.branch(), self.leftover.branch().work_directory()?);
        branch.layer.rename(
            &OWN,
            &work,
            self.leftover.name()?,
            &self.home.node,
            name,
            RenameFlags(RenameFlags::NOREPLACE),
        )
    }
}

/// Moves copies to the work directories of their branches, all or none. A process that is killed meanwhile loses them: the
/// next one empties the work directories.
///
/// # Errors
/// Errors of the storage.
pub(crate) fn set_aside(copies: &[Duplicate], name: Name<'_>) -> Result<Vec<CopyAside>> {
    let mut aside = Vec::with_capacity(copies.len());
    for copy in copies.iter().rev() {
        match set_one_aside(copy, name) {
            Ok(one) => aside.push(one),
            // The directory is on a file system mounted inside the branch, or on a subvolume: its copy is lost where the
            // rename fails.
            Err(Errno::EXDEV) => copy.branch().layer.unlink(&OWN, &copy.home.node, name)?,
            Err(error) => {
                // What cannot be put back is in the log.
                let _ = put_back(&aside, name);
                return Err(error);
            }
        }
    }
    Ok(aside)
}

fn set_one_aside(copy: &Duplicate, name: Name<'_>) -> Result<CopyAside> {
    let branch = copy.branch();
    let (temporary, work) = (branch.work()?.temporary(), branch.work_directory()?);
    branch.layer.rename(&OWN, &copy.home.node, name, &work, temporary.name()?, RenameFlags(0))?;
    Ok(CopyAside { home: copy.home.clone(), leftover: Leftover::new(branch, temporary) })
}

/// Gives copies their name again.
///
/// # Errors
/// The first error of the storage: that copy stays in its work directory until the next start.
pub(crate) fn put_back(aside: &[CopyAside], name: Name<'_>) -> Result<()> {
    let mut all = Ok(());
    for copy in aside {
        let done = copy.put_back(name);
        if let Err(error) = &done {
            let branch = copy.leftover.branch();
            tracing::warn!(branch = %branch.name.display(), ?error, "a copy of a file is lost: it cannot get its name again");
        }
        all = all.and(done);
    }
    all
}

impl UnionShared {
    /// Whether an action on a file is made on all of its copies.
    pub(crate) fn changes_duplicates(&self, action: Action) -> bool {
        self.options.duplicates && self.rules().actions.are_everywhere(action)
    }

    /// What the branches below `above` have under a name, down to a whiteout. A copy that the caller may not remove from
    /// its directory remains.
    pub(crate) fn duplicates(
        &self,
        caller: &Caller,
        directory: &View,
        name: Name<'_>,
        above: usize,
    ) -> Result<Duplicates> {
        let mut found = Duplicates::default();
        for home in directory.parts.iter().filter(|part| part.branch.index() > above) {
            let (branch, layer) = (&home.branch, &*home.branch.layer);
            let reads_marks = branch.reads_marks();
            match branch.marks().look(layer, &OWN, &home.node, name, reads_marks, home.x_directory)? {
                Seen::Absent => continue,
                Seen::WhitedOut => break,
                Seen::Found(entry) if entry.attr.kind == Kind::Directory => {
                    found.remains = true;
                    break;
                }
                Seen::Found(entry)
                    if branch.is_writable()
                        && Home { part: home, directory, judged: above }
                            .may_change(caller, Some(entry.attr.uid))? =>
                {
                    found.shows_writable |= found.writable.is_empty() && !found.remains;
                    let (id, uid, kind) = (entry.attr.id, entry.attr.uid, entry.attr.kind);
                    found.writable.push(Duplicate { home: home.clone(), node: entry.node, id, uid, kind });
                }
                Seen::Found(_) => found.remains = true,
            }
            if reads_marks && marks::stands_beside(layer, &home.node, name)? {
                break;
            }
        }
        Ok(found)
    }

    /// Removes copies, from the bottom, before the shown file is removed.
    ///
    /// # Errors
    /// Errors of the storage; the file and the copies above are then still there.
    pub(crate) fn remove_duplicates(&self, caller: &Caller, copies: &[Duplicate], name: Name<'_>) -> Result<()> {
        for copy in copies.iter().rev() {
            match copy.branch().layer.unlink(caller, &copy.home.node, name) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes copies that are hidden by a higher branch. A copy that cannot be removed only takes up space.
    pub(crate) fn remove_hidden_duplicates(&self, copies: &[Duplicate], name: Name<'_>) {
        for copy in copies {
            match copy.branch().layer.unlink(&OWN, &copy.home.node, name) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(error) => {
                    tracing::warn!(branch = %copy.branch().name.display(), ?error, "a copy of a file stays on a lower branch");
                }
            }
        }
    }

    /// The copies of a file under the name it was last seen under, where that leads to it. A file without copies, the
    /// most frequent one, costs one look at each lower branch that has its directory.
    fn duplicates_of(&self, caller: &Caller, node: &Arc<UnionNode>) -> Result<Vec<Duplicate>> {
        let Some(place) = node.place().filter(|_| !node.is_gone()) else { return Ok(Vec::new()) };
        let (name, top) = (Name::new(&place.name)?, node.top()?);
        let _names = place.parent.names.read();
        let view = place.parent.view();
        // Whiteouts matter only where there is something to hide.
        if !is_below(&view, name, &top)? {
            return Ok(Vec::new());
        }
        let mut copies = self.duplicates(&OWN, &view, name, top.branch.index())?.writable;
        copies.retain(|copy| copy.is_changed_by(caller, node.kind));
        if copies.is_empty() {
            return Ok(copies);
        }
        let leads_there = match self.sight(&OWN, &view, name)?.found {
            Some(found) => found.top()?.id == top.id && found.top()?.branch.slot == top.branch.slot,
            None => false,
        };
        if !leads_there {
            copies.clear();
        }
        Ok(copies)
    }

    /// Does to the copies of a file what was done to the file. Where one cannot follow, the change stands all the same:
    /// users see the file that has it.
    pub(crate) fn on_duplicates(&self, caller: &Caller, node: &Arc<UnionNode>, change: impl Fn(&Part) -> Result<()>) {
        let copies = self.duplicates_of(caller, node).unwrap_or_else(|error| {
            tracing::warn!(?error, "copies of a file on lower branches are not found, and stay as they are");
            Vec::new()
        });
        for copy in copies {
            let (branch, id) = (Arc::clone(copy.branch()), copy.id);
            if let Err(error) = change(&Part::new(&branch, copy.node, id)) {
                tracing::warn!(branch = %branch.name.display(), ?error, "a copy of a file differs from the file from now on");
            }
        }
    }

    /// Gives the copies of a file its new name; `before` are the copies under its previous name.
    pub(crate) fn link_duplicates(
        self: &Arc<UnionShared>,
        caller: &Caller,
        before: &[Duplicate],
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        shown: usize,
    ) {
        for copy in before {
            let branch = copy.branch();
            let linked = self.grow(parent, branch).and_then(|home| {
                let _names = parent.names.write();
                let (directory, judged) = (&parent.view(), shown);
                if !(Home { part: &home, directory, judged }).may_change(caller, None)? {
                    return Err(Errno::EPERM);
                }
                branch.layer.link(caller, &copy.node, None, &home.node, name).map(drop)
            });
            match linked {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(error) => {
                    tracing::warn!(branch = %branch.name.display(), ?error, "a copy of a file does not get its new name");
                }
            }
        }
    }

    /// The copies of a file that is about to get another name.
    pub(crate) fn duplicates_before_link(&self, caller: &Caller, node: &Arc<UnionNode>) -> Result<Vec<Duplicate>> {
        if self.changes_duplicates(Action::Link) { self.duplicates_of(caller, node) } else { Ok(Vec::new()) }
    }

    /// Renames the copies of a file that has just been renamed, and removes the replaced file on branches where
    /// the file has no copy. The names of both directories are locked.
    ///
    /// # Errors
    /// A copy could be neither renamed nor removed nor hidden.
    pub(crate) fn duplicates_follow(&self, caller: &Caller, old: &UnionNode, names: BothNames<'_>) -> Result<()> {
        let BothNames { from: (source, from), to: (target, to), index } = names;
        let moving = self.duplicates(caller, source, from, index)?.writable;
        let replaced = self.duplicates(caller, target, to, index)?.writable;
        let (mut stays, mut followed) = (false, Vec::new());
        for copy in &moving {
            let home = target.on(copy.branch()).map(|part| Home { part, directory: target, judged: index });
            match follow(caller, copy, from, home, to) {
                Ok(()) => followed.push(copy.branch().slot),
                Err(error) => {
                    tracing::warn!(branch = %copy.branch().name.display(), ?error, "a copy of a renamed file is removed");
                    stays |= copy.branch().layer.unlink(&OWN, &copy.home.node, from).is_err();
                }
            }
        }
        let left: Vec<Duplicate> =
            replaced.into_iter().filter(|copy| !followed.contains(&copy.branch().slot)).collect();
        self.remove_hidden_duplicates(&left, to);
        if stays {
            let home = source.parts.iter().find(|part| part.branch.index() == index).ok_or(Errno::EIO)?;
            self.hide(old, home, from)?;
        }
        Ok(())
    }
}

impl UnionShared {
    /// The copies that are exchanged with the files of two names; none where copies do not follow renames.
    pub(crate) fn copies_of_both(&self, caller: &Caller, names: BothNames<'_>) -> Result<BothCopies> {
        let BothNames { from: (source, from), to: (target, to), index } = names;
        if !self.changes_duplicates(Action::Rename) {
            return Ok(BothCopies { from: Duplicates::default(), to: Duplicates::default() });
        }
        Ok(BothCopies {
            from: self.duplicates(caller, source, from, index)?,
            to: self.duplicates(caller, target, to, index)?,
        })
    }

    /// Exchanges the copies of two files that have just exchanged their names. A branch that has a copy of one of them only
    /// gives it the other name. A copy that cannot follow stays under its name, hidden by the file above.
    pub(crate) fn exchange_copies(&self, caller: &Caller, copies: &BothCopies, names: BothNames<'_>) {
        let BothNames { from: (source, from), to: (target, to), index: judged } = names;
        for copy in &copies.from.writable {
            let branch = copy.branch();
            let done = match copies.to.on(branch) {
                // Two names of one file.
                Some(other) if other.id == copy.id => Ok(()),
                Some(other) => {
                    let flags = RenameFlags(RenameFlags::EXCHANGE);
                    branch.layer.rename(caller, &copy.home.node, from, &other.home.node, to, flags)
                }
                None => {
                    let home = target.on(branch).map(|part| Home { part, directory: target, judged });
                    follow(caller, copy, from, home, to)
                }
            };
            warn_of_name(branch, done);
        }
        for copy in &copies.to.writable {
            let branch = copy.branch();
            if copies.from.on(branch).is_none() {
                let home = source.on(branch).map(|part| Home { part, directory: source, judged });
                warn_of_name(branch, follow(caller, copy, to, home, from));
            }
        }
    }
}

/// Whether a writable branch below a file's has anything under a name.
fn is_below(directory: &View, name: Name<'_>, file: &Part) -> Result<bool> {
    let below = directory.parts.iter().filter(|part| part.branch.index() > file.branch.index());
    for home in below.filter(|part| part.branch.is_writable()) {
        match home.branch.layer.lookup(&OWN, &home.node, name) {
            Ok(_) => return Ok(true),
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

fn warn_of_name(branch: &Branch, done: Result<()>) {
    if let Err(error) = done {
        tracing::warn!(branch = %branch.name.display(), ?error, "a copy of an exchanged file keeps its name");
    }
}

/// A directory on a lower branch, and the branch on which the kernel has judged the same directory.
struct Home<'a> {
    part: &'a Part,
    directory: &'a View,
    judged: usize,
}

impl Home<'_> {
    /// Whether a caller may change a name there whose file has this owner: root may; others where the directory has the owner
    /// and mode of the judged one, also by the sticky bit (`__check_sticky()`, Linux fs/namei.c). `None`: no file is there.
    fn may_change(&self, caller: &Caller, uid: Option<u32>) -> Result<bool> {
        if caller.uid == 0 {
            return Ok(true);
        }
        let judged = self.directory.parts.iter().find(|part| part.branch.index() == self.judged);
        let Some(judged) = judged else { return Ok(false) };
        let judged = judged.branch.layer.getattr(&OWN, &judged.node, None)?;
        let own = self.part.branch.layer.getattr(&OWN, &self.part.node, None)?;
        let is_alike = (judged.uid, judged.gid, judged.mode) == (own.uid, own.gid, own.mode);
        let is_sticky = own.mode & 0o1000 != 0;
        Ok(is_alike && (!is_sticky || caller.uid == own.uid || uid.is_none_or(|uid| uid == caller.uid)))
    }
}

/// Renames a copy on its branch.
fn follow(caller: &Caller, copy: &Duplicate, from: Name<'_>, home: Option<Home<'_>>, to: Name<'_>) -> Result<()> {
    let layer = &copy.branch().layer;
    let home = home.ok_or(Errno::ENOENT)?;
    let found = match layer.lookup(&OWN, &home.part.node, to) {
        Ok(found) => Some(found),
        Err(Errno::ENOENT) => None,
        Err(error) => return Err(error),
    };
    if !home.may_change(caller, found.as_ref().map(|found| found.attr.uid))? {
        return Err(Errno::EPERM);
    }
    match found {
        // Two names of one file: rename(2) leaves both.
        Some(found) if found.attr.id == copy.id => layer.unlink(caller, &copy.home.node, from),
        _ => layer.rename(caller, &copy.home.node, from, &home.part.node, to, RenameFlags(0)),
    }
}
