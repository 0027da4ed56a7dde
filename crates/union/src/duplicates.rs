//! Copies of a file on lower writable branches (`duplicates=change`): if users have copied a file to several
//! branches of a pool, as mergerfs' users do, its copies are changed, renamed and removed with it.
//!
//! Called by `remove.rs`, `rename.rs`, `attributes.rs`, `create.rs` (links) and `interrupted.rs`. Which changes are made
//! on all copies is said by [`crate::UnionOptions::actions`]. Invariants:
//! * the file that is shown is changed first, and removed last: whatever happens in between, it is there under one of
//!   its names;
//! * a copy is removed only when the file that is shown has been, or is about to be, removed by the same call, or when its
//!   name has been given to another file; a rename that fails leaves all copies where they were, also where the process
//!   is killed in it and another one goes on;
//! * a copy that does not follow is hidden as in every union, so that no name comes back;
//! * a file that a whiteout hides is no copy of a file that gets its name: the whiteout stays beside that, and an exchange
//!   of names takes it along where anything is below the other name;
//! * nobody changes a copy through the union that he could not change on its branch: the kernel has judged the file that is
//!   shown alone, and branches are changed as root. A copy counts for root, and for its owner; it is removed or renamed by
//!   others where its directory has the owner and mode of the directory that the kernel has judged.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    marks::{self, Seen},
    node::{Part, UnionNode, View, uncover},
    options::Action,
    work::{Temporary, name_aside, name_kept},
};
use nacre_vfs::{Caller, Errno, FileId, Kind, Name, Node, RenameFlags, Result};
use std::sync::Arc;

/// Maximum number of files in a directory that earlier renames of one name have left under hidden names.
const KEPT_MOST: usize = 100;

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
}

/// The old and the new name of a rename, each with a view of its directory.
#[derive(Clone, Copy)]
pub(crate) struct BothNames<'a> {
    pub(crate) from: (&'a View, Name<'a>),
    pub(crate) to: (&'a View, Name<'a>),
    /// Position of the shown file's branch.
    pub(crate) index: usize,
}

/// The whiteouts beside two files that are to exchange their names.
#[derive(Default)]
pub(crate) struct ExchangedWhiteouts<'a> {
    made: Vec<(&'a Part, Name<'a>)>,
    /// Those that hide nothing after the exchange.
    needless: Vec<(&'a Part, Name<'a>)>,
}

impl ExchangedWhiteouts<'_> {
    /// Removes the whiteouts that were made, as the names are not exchanged.
    pub(crate) fn undo(&self) {
        self.made.iter().for_each(|(home, name)| uncover(home, *name));
    }

    /// Removes the whiteouts that hide nothing any more: they would hide the copies of the file that has the name now.
    pub(crate) fn finish(&self) {
        self.needless.iter().for_each(|(home, name)| uncover(home, *name));
    }
}

/// The copies of two files that are to exchange their names.
pub(crate) struct BothCopies {
    pub(crate) from: Duplicates,
    pub(crate) to: Duplicates,
}

/// A file or an empty directory that waits for the end of a rename under a hidden name beside its own. Each process
/// finds it there by its name: the next one gives it back its name, or finishes with it (`interrupted.rs`).
pub(crate) struct Aside {
    home: Part,
    name: Vec<u8>,
    pub(crate) hidden: Temporary,
}

impl Aside {
    /// Gives a file its hidden name. A file that an earlier rename has left under it, whose only name that may be, keeps
    /// another hidden name.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn hide(caller: &Caller, home: &Part, name: Name<'_>) -> Result<Aside> {
        let hidden = name_aside(name.bytes());
        let mut done = rename_to_free(caller, (home, name), (home, hidden.name()?));
        for number in 0..KEPT_MOST {
            if done != Err(Errno::EEXIST) {
                break;
            }
            let other = name_kept(&hidden, number);
            match rename_to_free(&OWN, (home, hidden.name()?), (home, other.name()?)) {
                Ok(()) => {
                    let branch = home.branch.name.display();
                    tracing::warn!(%branch, %name, kept = %other.name()?, "a file of an earlier rename keeps a hidden name");
                }
                Err(Errno::EEXIST) => continue,
                Err(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
            done = rename_to_free(caller, (home, name), (home, hidden.name()?));
        }
        match done {
            Ok(()) => Ok(Aside { home: home.clone(), name: name.bytes().to_vec(), hidden }),
            // The caller's own name is no reason.
            Err(Errno::EEXIST) => Err(Errno::EIO),
            Err(error) => Err(error),
        }
    }

    /// Finds the file that an earlier process has hidden.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn find(home: &Part, name: Name<'_>) -> Result<Option<Aside>> {
        let hidden = name_aside(name.bytes());
        match home.branch.layer.lookup(&OWN, &home.node, hidden.name()?) {
            Ok(_) => Ok(Some(Aside { home: home.clone(), name: name.bytes().to_vec(), hidden })),
            Err(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn branch(&self) -> &Arc<Branch> {
        &self.home.branch
    }

    /// Logs that the file could get neither its name nor be removed.
    pub(crate) fn warn_of_hidden_name(&self, error: Errno) {
        tracing::warn!(branch = %self.branch().name.display(), ?error, "a file or empty directory keeps a hidden name");
    }

    /// Logs that the file has the other name of an exchange, and the other file does not have its name.
    fn warn_of_wrong_name(&self, error: Errno) {
        tracing::warn!(branch = %self.branch().name.display(), ?error, "a copy has the name of an exchanged file");
    }

    pub(crate) fn directory(&self) -> &Node {
        &self.home.node
    }

    /// Whether it is the file of this name in a directory.
    fn is_of(&self, directory: &View, name: Name<'_>) -> bool {
        self.name == name.bytes() && directory.on(self.branch()).is_some_and(|home| home.id == self.home.id)
    }

    /// Gives it a name that is free.
    pub(crate) fn take(&self, home: &Part, name: Name<'_>) -> Result<()> {
        rename_to_free(&OWN, (&self.home, self.hidden.name()?), (home, name))
    }

    /// Hides it again after [`Self::take`].
    fn hide_again(&self, home: &Part, name: Name<'_>) -> Result<()> {
        rename_to_free(&OWN, (home, name), (&self.home, self.hidden.name()?))
    }

    pub(crate) fn put_back(&self) -> Result<()> {
        self.take(&self.home, Name::new(&self.name)?)
    }

    /// Removes a file. One that cannot be removed only takes up space.
    pub(crate) fn remove(&self) {
        let removed = self.hidden.name().and_then(|hidden| self.branch().layer.unlink(&OWN, &self.home.node, hidden));
        if let Err(error) = removed {
            tracing::warn!(branch = %self.branch().name.display(), ?error, "a hidden copy of a replaced file stays");
        }
    }
}

/// Renames on a branch to a name that is free, also where the storage has no flags for that: the names of both
/// directories are locked.
fn rename_to_free(caller: &Caller, from: (&Part, Name<'_>), to: (&Part, Name<'_>)) -> Result<()> {
    let ((home, name), (new_home, new_name), layer) = (from, to, &from.0.branch.layer);
    let rename = |flags: u32| layer.rename(caller, &home.node, name, &new_home.node, new_name, RenameFlags(flags));
    match rename(RenameFlags::NOREPLACE) {
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => {}
        done => return done,
    }
    match layer.lookup(&OWN, &new_home.node, new_name) {
        Ok(_) => Err(Errno::EEXIST),
        Err(Errno::ENOENT) => rename(0),
        Err(error) => Err(error),
    }
}

/// Gives copies hidden names, all or none.
///
/// # Errors
/// Errors of the storage.
pub(crate) fn set_aside(copies: &[Duplicate], name: Name<'_>) -> Result<Vec<Aside>> {
    let mut aside = Vec::with_capacity(copies.len());
    for copy in copies.iter().rev() {
        match Aside::hide(&OWN, &copy.home, name) {
            Ok(one) => aside.push(one),
            Err(error) => {
                // What cannot be put back is in the log.
                let _ = put_back(&aside);
                return Err(error);
            }
        }
    }
    Ok(aside)
}

/// Gives files their names again.
///
/// # Errors
/// The first error of the storage: that file keeps its hidden name.
pub(crate) fn put_back(aside: &[Aside]) -> Result<()> {
    let mut all = Ok(());
    for one in aside {
        let done = one.put_back();
        if let Err(error) = &done {
            let branch = one.branch();
            tracing::warn!(branch = %branch.name.display(), ?error, "a file keeps a hidden name: it cannot get its own again");
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
        let shown = directory.parts.iter().find(|part| part.branch.index() == above);
        if let Some(home) = shown.filter(|home| home.branch.reads_marks())
            && marks::stands_beside(&*home.branch.layer, &home.node, name)?
        {
            // The file was made or moved where another one is hidden.
            return Ok(found);
        }
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

    /// Whether branches below `above` have files under a name that are not among `copies`: without a whiteout above they
    /// would be taken for copies of the shown file.
    pub(crate) fn hides_others(
        &self,
        directory: &View,
        name: Name<'_>,
        above: usize,
        copies: &Duplicates,
    ) -> Result<bool> {
        if !self.options.duplicates {
            return Ok(false);
        }
        for home in directory.parts.iter().filter(|part| part.branch.index() > above) {
            match home.branch.layer.lookup(&OWN, &home.node, name) {
                Ok(_) if copies.on(&home.branch).is_none() => return Ok(true),
                Ok(_) | Err(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
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

    /// Renames the copies of a file that has just been renamed; those of a replaced file have hidden names by now. The
    /// names of both directories are locked.
    ///
    /// # Errors
    /// A copy could be neither renamed nor removed nor hidden.
    pub(crate) fn duplicates_follow(&self, caller: &Caller, old: &UnionNode, names: BothNames<'_>) -> Result<()> {
        let BothNames { from: (source, from), to: (target, to), index } = names;
        let mut stays = false;
        for copy in &self.duplicates(caller, source, from, index)?.writable {
            let home = target.on(copy.branch()).map(|part| Home { part, directory: target, judged: index });
            if let Err(error) = follow(caller, copy, from, home, to) {
                tracing::warn!(branch = %copy.branch().name.display(), ?error, "a copy of a renamed file is removed");
                stays |= copy.branch().layer.unlink(&OWN, &copy.home.node, from).is_err();
            }
        }
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

    /// Gives the copies of two files hidden names before the files exchange theirs: each copy gets the other name after
    /// that, in this process or in the next one. A copy that cannot follow keeps its name, hidden by the file above.
    ///
    /// # Errors
    /// A copy that could not get back its name.
    pub(crate) fn set_copies_aside(
        &self,
        caller: &Caller,
        copies: &BothCopies,
        names: BothNames<'_>,
    ) -> Result<Vec<Aside>> {
        let BothNames { from: (source, from), to: (target, to), index: judged } = names;
        let mut aside = Vec::new();
        for (own, others, name, (directory, other_name)) in
            [(&copies.from, &copies.to, from, (target, to)), (&copies.to, &copies.from, to, (source, from))]
        {
            for copy in &own.writable {
                let branch = copy.branch();
                let hidden = match others.on(branch) {
                    // Two names of one file.
                    Some(other) if other.id == copy.id => continue,
                    Some(_) => Aside::hide(caller, &copy.home, name),
                    None => {
                        let home = directory.on(branch).map(|part| Home { part, directory, judged });
                        may_follow(caller, home, other_name).and_then(|()| Aside::hide(caller, &copy.home, name))
                    }
                };
                match hidden {
                    Ok(one) => aside.push(one),
                    Err(error) => warn_of_name(branch, &error),
                }
            }
        }
        Ok(aside)
    }

    /// Prepares the whiteouts that stand beside two files for an exchange of their names; the copies that follow have
    /// hidden names by now. A file beside a whiteout has no copies, so what is below its new name is hidden as well. What
    /// remains below its old name stays hidden.
    ///
    /// # Errors
    /// Errors of the storage; the caller undoes what is in `whiteouts`.
    pub(crate) fn whiteouts_of_both<'a>(
        &self,
        names: BothNames<'a>,
        whiteouts: &mut ExchangedWhiteouts<'a>,
    ) -> Result<()> {
        let BothNames { from: (source, from), to: (target, to), index } = names;
        if !self.changes_duplicates(Action::Rename) {
            return Ok(());
        }
        self.whiteout_of_one((source, from), (target, to), index, whiteouts)?;
        self.whiteout_of_one((target, to), (source, from), index, whiteouts)
    }

    /// Prepares the whiteout beside one of two files.
    fn whiteout_of_one<'a>(
        &self,
        (old, old_name): (&'a View, Name<'a>),
        (new, new_name): (&'a View, Name<'a>),
        index: usize,
        whiteouts: &mut ExchangedWhiteouts<'a>,
    ) -> Result<()> {
        let on_branch = |view: &'a View| view.parts.iter().find(|part| part.branch.index() == index);
        let (home, new_home) = (on_branch(old).ok_or(Errno::EIO)?, on_branch(new).ok_or(Errno::EIO)?);
        let layer = &*home.branch.layer;
        let is_file = layer.lookup(&OWN, &home.node, old_name)?.attr.kind != Kind::Directory;
        if !is_file || !home.branch.reads_marks() || !marks::stands_beside(layer, &home.node, old_name)? {
            return Ok(());
        }
        if !self.hides_others(old, old_name, index, &Duplicates::default())? {
            whiteouts.needless.push((home, old_name));
        }
        if self.hides_others(new, new_name, index, &Duplicates::default())?
            && !marks::stands_beside(layer, &new_home.node, new_name)?
        {
            self.hide_then(new_home, new_name, || Ok(()))?;
            whiteouts.made.push((new_home, new_name));
        }
        Ok(())
    }

    /// Gives copies with hidden names the names of the other file: on each branch all of them, or none.
    pub(crate) fn exchange_copies(&self, aside: &[Aside], names: BothNames<'_>) {
        let BothNames { from: (source, from), to: (target, to), .. } = names;
        let mut branches: Vec<&Arc<Branch>> = Vec::new();
        for copy in aside {
            if !branches.iter().any(|branch| branch.slot == copy.branch().slot) {
                branches.push(copy.branch());
            }
        }
        for branch in branches {
            let mut taken: Vec<(&Aside, &Part, Name<'_>)> = Vec::new();
            let mut done = Ok(());
            for copy in aside.iter().filter(|copy| copy.branch().slot == branch.slot) {
                let (view, name) = if copy.is_of(source, from) { (target, to) } else { (source, from) };
                let home = view.on(branch).ok_or(Errno::ENOENT);
                done = home.and_then(|home| copy.take(home, name).map(|()| taken.push((copy, home, name))));
                if done.is_err() {
                    break;
                }
            }
            let Err(error) = done else { continue };
            warn_of_name(branch, &error);
            for (copy, home, name) in taken {
                if let Err(error) = copy.hide_again(home, name) {
                    copy.warn_of_wrong_name(error);
                }
            }
            for copy in aside.iter().filter(|copy| copy.branch().slot == branch.slot) {
                // What cannot be put back is in the log.
                let _ = put_back(std::slice::from_ref(copy));
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

fn warn_of_name(branch: &Branch, error: &Errno) {
    tracing::warn!(branch = %branch.name.display(), ?error, "a copy of an exchanged file keeps its name");
}

/// Whether a copy may get a name that must be free on its branch.
fn may_follow(caller: &Caller, home: Option<Home<'_>>, name: Name<'_>) -> Result<()> {
    let home = home.ok_or(Errno::ENOENT)?;
    match home.part.branch.layer.lookup(&OWN, &home.part.node, name) {
        Err(Errno::ENOENT) => {}
        Ok(_) => return Err(Errno::EEXIST),
        Err(error) => return Err(error),
    }
    if home.may_change(caller, None)? { Ok(()) } else { Err(Errno::EPERM) }
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
