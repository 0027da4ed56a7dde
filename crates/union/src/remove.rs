//! Removing names: removes the file itself if it is on a writable branch, and creates a whiteout if a branch
//! below would show the name again.
//!
//! The whiteout comes first (a `.wh.` whiteout hides nothing on its own branch), or replaces the very name in
//! one step: at no moment is the file of a lower branch visible. Directories are moved to the work directory in
//! one step, and emptied of their whiteouts there.

use crate::{
    ATTEMPTS, OWN, UnionShared,
    branches::Branch,
    listing,
    lookup::FoundFile,
    marks::{self, Style},
    node::{Part, UnionNode, View, lock_names, source},
    options::Action,
    work::Temporary,
};
use nacre_vfs::{Caller, Errno, Kind, Name, Node, Protection, RenameFlags, Result};
use std::sync::Arc;

/// A removed directory that waits in the work directory for its deletion.
pub(crate) struct Leftover {
    branch: Arc<Branch>,
    temporary: Temporary,
}

impl Leftover {
    /// Refers to the directory under a temporary name in the work directory.
    pub(crate) fn new(branch: &Arc<Branch>, temporary: Temporary) -> Leftover {
        Leftover { branch: Arc::clone(branch), temporary }
    }

    /// Its name in the work directory.
    ///
    /// # Errors
    /// Never, as [`Temporary::name`].
    pub(crate) fn name(&self) -> Result<Name<'_>> {
        self.temporary.name()
    }
}

/// The result of a removal step.
pub(crate) enum Removal {
    Done(Vec<Leftover>),
    /// The parent directory has to be created on this branch first.
    Needs(Arc<Branch>),
}

impl UnionShared {
    pub(crate) fn unlink(self: &Arc<UnionShared>, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let parent = self.directory(parent)?;
        check_existing(name)?;
        self.settle();
        for _ in 0..ATTEMPTS {
            let branch = {
                let _names = parent.names.write();
                if parent.is_gone() {
                    return Err(Errno::ENOENT);
                }
                let view = parent.view();
                let found = self.sight(caller, &view, name)?.found.ok_or(Errno::ENOENT)?;
                if found.is_directory() {
                    return Err(Errno::EISDIR);
                }
                match self.remove_file(caller, &parent, &view, name, found)? {
                    Removal::Done(_) => return Ok(()),
                    Removal::Needs(branch) => branch,
                }
            };
            self.grow(&parent, &branch)?;
        }
        Err(Errno::EBUSY)
    }

    /// Removes a file that is no directory. The names of `parent` are locked.
    fn remove_file(
        &self,
        caller: &Caller,
        parent: &Arc<UnionNode>,
        view: &View,
        name: Name<'_>,
        found: FoundFile,
    ) -> Result<Removal> {
        let (top, attr) = (found.top()?.clone(), found.attr);
        // Its identity could not be read after its removal.
        let node = self.node_of(found)?;
        if self.hardlinks.journal.holds(node.id) {
            return Err(Errno::EIO);
        }
        let mut hidden = Vec::new();
        let branch = if top.branch.is_writable() {
            let mut shows = self.shows_below(view, name, top.branch.index())?;
            let part = view.on(&top.branch).ok_or(Errno::EIO)?;
            // Of a file that cannot be removed, the copies stay as well.
            if shows && self.options.duplicates && attr.protection == Protection::None {
                let copies = self.duplicates(caller, view, name, top.branch.index())?;
                match (self.changes_duplicates(Action::Unlink), copies.remains) {
                    (true, false) => {
                        self.remove_duplicates(caller, &copies.writable, name)?;
                        shows = false;
                    }
                    (true, true) => hidden = copies.writable,
                    (false, _) => shows = !copies.shows_writable,
                }
            }
            if !(shows && self.hide(parent, part, name)?)
                && let Err(error) = top.branch.layer.unlink(caller, &part.node, name)
            {
                if shows {
                    top.branch.marks().unhide(&*top.branch.layer, &part.node, name)?;
                }
                return Err(error);
            }
            Arc::clone(&top.branch)
        } else if attr.protection != Protection::None {
            // As on its branch, `chattr +i` or `+a` keeps it.
            return Err(Errno::EPERM);
        } else {
            let target = self.branch_for_copy(None, top.branch.index(), usize::MAX)?;
            let Some(part) = view.on(&target) else { return Ok(Removal::Needs(target)) };
            self.note_hidden(parent, name.bytes(), &top, None)?;
            self.hide(parent, part, name)?;
            target
        };
        self.name_is_gone(parent, name, &node, &top, attr.nlink, &branch)?;
        self.remove_hidden_duplicates(&hidden, name);
        Ok(Removal::Done(Vec::new()))
    }

    /// Records in node and index that a name no longer leads to its file.
    pub(crate) fn name_is_gone(
        &self,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        node: &Arc<UnionNode>,
        seen: &Part,
        count: u32,
        branch: &Arc<Branch>,
    ) -> Result<()> {
        self.listings.forget(parent.id);
        // The copy's own link count, or that of a name below that only shows the copy.
        let last = if seen.branch.is_writable() && node.top()?.branch.index() == seen.branch.index() {
            count <= 1
        } else if count <= 1 && !self.hardlinks.knows(node.id) {
            true
        } else {
            let lasting = || parent.part_on(branch).map_or(Ok(()), |part| self.make_durable(branch, &part.node));
            let left = self.hardlinks.one_less(node.id, count, branch, lasting).unwrap_or_else(|error| {
                // The name is removed all the same; the count stays too high, which loses nothing.
                tracing::warn!(branch = branch.index(), ?error, "the count of links of a file is too high");
                1
            });
            let copy = node.top()?;
            left == 0
                && (!copy.branch.is_writable()
                    || copy.branch.layer.getattr(&OWN, &copy.node, None).is_ok_and(|attr| attr.nlink == 0))
        };
        node.leave(parent, name.bytes(), last);
        Ok(())
    }

    /// Removes the file of a name from a writable branch when a file on a branch above has just replaced it. A
    /// file that cannot be removed only takes up space.
    pub(crate) fn remove_hidden(&self, view: &View, branch: &Arc<Branch>, name: Name<'_>) {
        let Some(part) = view.on(branch).filter(|_| branch.is_writable()) else { return };
        match branch.layer.unlink(&OWN, &part.node, name) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => {
                tracing::warn!(branch = branch.index(), ?error, "a file that has been replaced stays on a lower branch")
            }
        }
    }

    /// Hides a name on a branch; returns whether the whiteout has replaced the branch's own file.
    pub(crate) fn hide(&self, directory: &UnionNode, part: &Part, name: Name<'_>) -> Result<bool> {
        self.hide_leaving(directory, part, name, &part.branch.work()?.temporary())
    }

    /// As [`Self::hide`]; a directory of that name is then in the work directory under the temporary name.
    pub(crate) fn hide_leaving(
        &self,
        directory: &UnionNode,
        part: &Part,
        name: Name<'_>,
        temporary: &Temporary,
    ) -> Result<bool> {
        let branch = &part.branch;
        let work = || branch.work_directory();
        let replaced = branch.marks().hide(&*branch.layer, &work, temporary.name()?, &part.node, name)?;
        if branch.marks().style == Style::Xattr {
            directory.holds_attribute_marks(branch.index());
        }
        Ok(replaced)
    }

    pub(crate) fn rmdir(self: &Arc<UnionShared>, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let parent = self.directory(parent)?;
        check_existing(name)?;
        for _ in 0..ATTEMPTS {
            let node = {
                let _names = parent.names.read();
                if parent.is_gone() {
                    return Err(Errno::ENOENT);
                }
                let found = self.sight(caller, &parent.view(), name)?.found.ok_or(Errno::ENOENT)?;
                if !found.is_directory() {
                    return Err(Errno::ENOTDIR);
                }
                self.known(&parent, name, found)?
            };
            let outcome = {
                let _tree = self.tree.lock()?;
                let _names = lock_names(&[&parent, &node]);
                if node.is_gone() || !node.place().is_some_and(|place| place.is(&parent, name.bytes())) {
                    continue;
                }
                self.check_empty(&node)?;
                self.remove_directory(&parent, name, &node)?
            };
            match outcome {
                Removal::Done(leftovers) => {
                    self.clear(&leftovers);
                    return Ok(());
                }
                Removal::Needs(branch) => self.grow(&parent, &branch)?,
            };
        }
        Err(Errno::EBUSY)
    }

    /// Fails with ENOTEMPTY for a directory with visible names.
    pub(crate) fn check_empty(&self, node: &UnionNode) -> Result<()> {
        let parts = node.parts();
        let sources: Vec<_> = parts.iter().map(source).collect();
        let marks = parts.first().map(|part| part.branch.marks()).ok_or(Errno::EIO)?;
        if listing::is_empty(&marks, &sources)? { Ok(()) } else { Err(Errno::ENOTEMPTY) }
    }

    /// Removes a directory without visible names. The tree lock is held and the names of both directories are
    /// locked.
    pub(crate) fn remove_directory(
        &self,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        node: &Arc<UnionNode>,
    ) -> Result<Removal> {
        let view = parent.view();
        let mut parts = node.parts().to_vec();
        let mut leftovers = Vec::new();
        let top = parts.first().cloned().ok_or(Errno::EIO)?;
        let target = if top.branch.is_writable() {
            Arc::clone(&top.branch)
        } else {
            self.branch_for_copy(None, top.branch.index(), usize::MAX)?
        };
        let Some(home) = view.on(&target) else { return Ok(Removal::Needs(target)) };
        // From the bottom: a part with nothing below it that could become visible needs no whiteout.
        while let [_, .., last] = parts.as_slice() {
            // A redirected part below has another name.
            if node.is_redirected() {
                break;
            }
            // Files that a whiteout above hides must not be destroyed.
            if !last.branch.is_writable()
                || self.shows_below(&view, name, last.branch.index())?
                || !holds_marks_only(last)?
            {
                break;
            }
            let directory = view.on(&last.branch).ok_or(Errno::EIO)?;
            leftovers.extend(self.move_out(&last.branch, &directory.node, name)?);
            parts.pop();
        }
        let shows = parts.len() > 1 || !top.branch.is_writable() || self.shows_below(&view, name, target.index())?;
        if !top.branch.is_writable() {
            self.note_hidden(parent, name.bytes(), &top, None)?;
            self.hide(parent, home, name)?;
        } else if shows {
            let temporary = target.work()?.temporary();
            if self.hide_leaving(parent, home, name, &temporary)? {
                leftovers.push(Leftover { branch: Arc::clone(&target), temporary });
            } else {
                leftovers.extend(self.move_out(&target, &home.node, name)?);
            }
        } else {
            leftovers.extend(self.move_out(&target, &home.node, name)?);
        }
        self.listings.forget(parent.id);
        self.listings.forget(node.id);
        node.leave(parent, name.bytes(), true);
        Ok(Removal::Done(leftovers))
    }

    /// Moves a directory that has nothing but whiteouts and other marks to the work directory, with these.
    pub(crate) fn move_out(&self, branch: &Arc<Branch>, directory: &Node, name: Name<'_>) -> Result<Option<Leftover>> {
        match branch.layer.rmdir(&OWN, directory, name) {
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            other => return other.map(|()| None),
        }
        let (temporary, work) = (branch.work()?.temporary(), branch.work_directory()?);
        branch.layer.rename(&OWN, directory, name, &work, temporary.name()?, RenameFlags(0))?;
        Ok(Some(Leftover { branch: Arc::clone(branch), temporary }))
    }

    /// Deletes the directories that have been moved out. One that cannot be deleted stays in the work
    /// directory, invisible to users, until the next start.
    pub(crate) fn clear(&self, leftovers: &[Leftover]) {
        for leftover in leftovers {
            if let Err(error) = clear_one(leftover) {
                tracing::warn!(
                    branch = leftover.branch.index(),
                    ?error,
                    "a removed directory stays in the work directory until the next start"
                );
            }
        }
    }
}

/// Whether a directory of a branch has nothing but whiteouts and other marks.
pub(crate) fn holds_marks_only(part: &Part) -> Result<bool> {
    listing::is_empty(&part.branch.marks(), &[source(part)])
}

fn clear_one(leftover: &Leftover) -> Result<()> {
    let (layer, work) = (&leftover.branch.layer, leftover.branch.work_directory()?);
    let name = leftover.temporary.name()?;
    let found = layer.lookup(&OWN, &work, name)?;
    if found.attr.kind != Kind::Directory {
        return layer.unlink(&OWN, &work, name);
    }
    listing::purge(&**layer, &found.node)?;
    layer.rmdir(&OWN, &work, name)
}

/// Fails with ENOENT for the union's reserved names, which do not exist for users.
pub(crate) fn check_existing(name: Name<'_>) -> Result<()> {
    if marks::is_reserved(name.bytes()) { Err(Errno::ENOENT) } else { Ok(()) }
}
