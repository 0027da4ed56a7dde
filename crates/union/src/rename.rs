//! Renaming, replacing and exchanging: decides what is done across branches.
//!
//! A rename happens on one branch, by one rename there. Its preconditions are established first, in steps that
//! do not change the visible tree; then everything is looked up again with all locks held, and if a
//! precondition does not hold yet, the rename starts over. Branches are counted from the top; the *limit* is
//! the lowest branch on which the new name would be visible.
//!
//! | renamed file | its branch | first step | function |
//! |---|---|---|---|
//! | a file | on a writable branch, down to the limit | nothing | `move_file` |
//! | a file | on a read-only one, or below the limit | it is copied up; one open on a writable branch cannot be: EXDEV | `raise_file`, `copy_up.rs` |
//! | a file, over a file of a writable branch above | on a writable branch | it gets the new name there, too; the one above is removed | `replace_above` |
//! | a file, with copies on lower branches that are changed with it | on a writable branch | each copy is renamed on its branch after it; copies of a replaced file have hidden names until the rename is done | `duplicates_follow`, `duplicates.rs` |
//! | a file that was copied up by another of its names | above this name | the copy gets this name, too | `name_copy` |
//! | a directory | on several branches, all writable, the new name free on all | it is renamed on each of them | `move_everywhere` |
//! | the same with `duplicates=change`, over an empty directory of writable branches | | the empty one gets a hidden name | `move_over_empty` |
//! | a directory | on one writable branch, down to the limit | nothing | `move_directory` |
//! | a directory | on several branches, or on a read-only one | its content is copied to one branch, as far as `directory_copy_limit` allows | `copy_up_dir`, `copy_up_dir.rs` |
//! | the same, with more in it | | with redirects, the upper part gets one; else EXDEV | `redirect_directory`, `redirect.rs` |
//! | a directory | on a writable branch that takes no new files, and another one does | EXDEV: programs copy by themselves | `whole` |
//! | both of an exchange | on the higher of their branches, each as above | one exchange there; copies that are changed with them are exchanged or renamed on their branches after it | `exchange`, `duplicates.rs` |
//!
//! In all of them: the parents are created on the branch; a directory over hidden names is opaque; where a
//! branch below would show the old name, a `.wh.` whiteout hides it. A file on another branch than the new name
//! is removed when that name is on stable storage. Whiteouts of the kernel's overlay file system have the very
//! name: they come with the rename itself where the storage supports that (`RENAME_WHITEOUT`), and otherwise
//! replace the `.wh.` whiteout after it.

use crate::{
    ATTEMPTS, OWN, UnionShared,
    branches::Branch,
    create::check_name,
    duplicates::{Aside, BothNames, Duplicates, ExchangedWhiteouts, put_back, set_aside},
    identity,
    lookup::{FoundFile, Sight},
    marks::{Marks, Style},
    node::{Part, Redirect, UnionNode, View, lock_names, uncover},
    options::Action,
    remove::{Leftover, check_existing, holds_marks_only},
    swap::Swap,
};
use nacre_vfs::{Caller, Errno, Kind, Name, Node, RenameFlags, Result};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// How long FUSE front ends get to close a file that no process has open any more.
const CLOSING: Duration = Duration::from_millis(200);

/// A directory and a name in it.
#[derive(Clone, Copy)]
struct NameIn<'a> {
    parent: &'a Arc<UnionNode>,
    name: Name<'a>,
}

/// A step that is needed before a rename.
enum RenameStep {
    Done(Vec<Leftover>),
    /// A file has changed meanwhile.
    Again,
    /// The directory has to be created on the branch.
    Grow(Arc<UnionNode>, Arc<Branch>),
    /// The file has to be on a writable branch, not below this.
    Raise(Arc<UnionNode>, usize),
    /// A name on a lower branch of a file that has been copied up under another name has to be created on the
    /// copy's branch.
    Name(Arc<UnionNode>, Vec<u8>, Arc<UnionNode>),
    /// The directory has to be complete on this branch.
    Whole(Arc<UnionNode>, Arc<Branch>),
}

/// One side of a rename, with all locks held.
struct Side {
    view: View,
    sight: Sight,
    node: Option<Arc<UnionNode>>,
}

/// The source of a rename, with all locks held.
#[derive(Clone, Copy)]
struct RenameSource<'a> {
    spot: NameIn<'a>,
    side: &'a Side,
    node: &'a Arc<UnionNode>,
}

/// The target of a rename.
#[derive(Clone, Copy)]
struct RenameTarget<'a> {
    spot: NameIn<'a>,
    side: &'a Side,
}

impl Side {
    fn found(&self) -> Option<&FoundFile> {
        self.sight.found.as_ref()
    }
}

impl UnionShared {
    pub(crate) fn rename(
        self: &Arc<UnionShared>,
        caller: &Caller,
        from: (&Node, Name<'_>),
        to: (&Node, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
        if flags.0 & !known != 0 || flags.has(RenameFlags::EXCHANGE) && flags.0 != RenameFlags::EXCHANGE {
            return Err(Errno::EINVAL);
        }
        if flags.has(RenameFlags::WHITEOUT) {
            return self.rename_leaving_device(caller, from, to, RenameFlags(flags.0 & !RenameFlags::WHITEOUT));
        }
        let (old, new) = (self.directory(from.0)?, self.directory(to.0)?);
        check_existing(from.1)?;
        if flags.has(RenameFlags::EXCHANGE) {
            check_existing(to.1)?
        } else {
            check_name(to.1)?
        }
        self.settle();
        for _ in 0..ATTEMPTS {
            match self.try_rename(
                caller,
                NameIn { parent: &old, name: from.1 },
                NameIn { parent: &new, name: to.1 },
                flags,
            )? {
                RenameStep::Done(leftovers) => {
                    self.clear(&leftovers);
                    return Ok(());
                }
                RenameStep::Again => {}
                RenameStep::Grow(directory, branch) => drop(self.grow(&directory, &branch)?),
                RenameStep::Raise(node, most) => self.raise_file(&node, most)?,
                RenameStep::Name(parent, name, node) => self.name_copy(&parent, Name::new(&name)?, &node)?,
                RenameStep::Whole(directory, branch) => self.make_movable(&directory, &branch)?,
            }
        }
        Err(Errno::EBUSY)
    }

    /// Renames and leaves a character device 0/0 under the old name, as the kernel's overlay file system
    /// requests from its upper file system: a device that users of the union see, and no whiteout of the
    /// union's own.
    fn rename_leaving_device(
        self: &Arc<UnionShared>,
        caller: &Caller,
        from: (&Node, Name<'_>),
        to: (&Node, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        check_existing(from.1)?;
        let parent = self.directory(from.0)?;
        let device = self.prepare_device(caller, &parent, from.1)?;
        let renamed = self.rename(caller, from, to, flags);
        if renamed.is_err() {
            self.drop_device(&device);
            return renamed;
        }
        let placed = self.place_device(caller, &parent, from.1, &device);
        if placed.is_ok() {
            return Ok(());
        }
        self.drop_device(&device);
        if let Err(error) = self.leave_device(caller, from.0, from.1) {
            // The replaced file is gone, but the renamed file keeps its old name.
            self.rename(caller, to, from, RenameFlags(RenameFlags::NOREPLACE))?;
            return Err(error);
        }
        Ok(())
    }

    /// Creates a character device 0/0 under a name, which belongs to the caller of the rename as natively.
    pub(crate) fn leave_device(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        match self.mknod(caller, parent, name, Kind::Character, 0, (0, 0)) {
            // The previous process was killed after this step.
            Ok(_) | Err(Errno::EEXIST) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes a directory on a branch independent of the branches below. No lock is held.
    fn make_movable(self: &Arc<UnionShared>, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<()> {
        if !self.may_redirect(branch) {
            return self.copy_up_dir(directory, branch);
        }
        if self.is_small(directory, branch)? {
            match self.copy_up_dir(directory, branch) {
                // It has grown since it was checked.
                Err(Errno::EXDEV) => {}
                done => return done,
            }
        }
        self.redirect_directory(directory, branch)
    }

    fn peek(&self, caller: &Caller, spot: NameIn<'_>) -> Result<Option<Arc<UnionNode>>> {
        let _names = spot.parent.names.read();
        if spot.parent.is_gone() {
            return Err(Errno::ENOENT);
        }
        let found = self.sight(caller, &spot.parent.view(), spot.name)?.found;
        found.map(|found| self.known(spot.parent, spot.name, found)).transpose()
    }

    /// Copies a file to a branch from which it can get the new name. A file open on a writable branch has to
    /// stay there; FUSE front ends hold files for a moment that no process has open any more, and are asked to
    /// close them. No lock is held.
    fn raise_file(self: &Arc<UnionShared>, node: &Arc<UnionNode>, most: usize) -> Result<()> {
        match self.copy_up(node, most, u64::MAX) {
            Err(Errno::EXDEV) => {}
            other => return other.map(drop),
        }
        self.ask_to_close(node, CLOSING);
        self.copy_up(node, most, u64::MAX).map(drop)
    }

    fn side(&self, caller: &Caller, spot: NameIn<'_>) -> Result<Side> {
        if spot.parent.is_gone() {
            return Err(Errno::ENOENT);
        }
        let view = spot.parent.view();
        let sight = self.sight(caller, &view, spot.name)?;
        let node = sight.found.clone().map(|found| self.known(spot.parent, spot.name, found)).transpose()?;
        Ok(Side { view, sight, node })
    }

    fn try_rename(
        self: &Arc<UnionShared>,
        caller: &Caller,
        from: NameIn<'_>,
        to: NameIn<'_>,
        flags: RenameFlags,
    ) -> Result<RenameStep> {
        let (first, second) = (self.peek(caller, from)?, self.peek(caller, to)?);
        if [&first, &second].into_iter().flatten().any(|node| self.hardlinks.journal.holds(node.id)) {
            return Err(Errno::EIO);
        }
        let is_directory =
            |node: &Option<Arc<UnionNode>>| node.as_ref().is_some_and(|node| node.kind == Kind::Directory);
        let _tree = if is_directory(&first) || is_directory(&second) { Some(self.tree.lock()?) } else { None };
        let mut locked = vec![from.parent, to.parent];
        let replaced = second.as_ref().filter(|node| node.kind == Kind::Directory && !flags.has(RenameFlags::EXCHANGE));
        // A directory inside the moved one cannot be its parent as well: the check below refuses that.
        locked.extend(replaced);
        let _names = lock_names(&locked);
        let target = self.side(caller, to)?;
        let source = self.side(caller, from)?;
        let same = |a: &Option<Arc<UnionNode>>, b: &Option<Arc<UnionNode>>| match (a, b) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        if !same(&first, &source.node) || !same(&second, &target.node) {
            return Ok(RenameStep::Again);
        }
        let node = Arc::clone(source.node.as_ref().ok_or(Errno::ENOENT)?);
        if check(from, to, &node, target.node.as_ref(), flags)? {
            return Ok(RenameStep::Done(Vec::new()));
        }
        // The source is copied up first, except for a further name of a file that has been; the target is replaced.
        for (spot, side) in [(from, &source), (to, &target)] {
            if let Some(found) = side.found() {
                self.note_hidden(spot.parent, spot.name.bytes(), found.top()?, None)?;
            }
        }
        let moving = RenameSource { spot: from, side: &source, node: &node };
        let destination = RenameTarget { spot: to, side: &target };
        match (&target.node, flags.has(RenameFlags::EXCHANGE)) {
            (Some(other), true) => self.exchange(caller, moving, RenameSource { spot: to, side: &target, node: other }),
            _ if node.kind == Kind::Directory => self.move_directory(caller, moving, destination),
            _ => self.move_file(caller, moving, destination),
        }
    }

    /// The step that a file needs before it can be renamed on its branch, not below `limit`.
    fn ready(&self, spot: NameIn<'_>, side: &Side, node: &Arc<UnionNode>, limit: usize) -> Result<Option<RenameStep>> {
        let seen = side.found().ok_or(Errno::ENOENT)?.top()?;
        let top = node.top()?;
        if !top.branch.is_writable() || top.branch.index() > limit {
            return Ok(Some(RenameStep::Raise(Arc::clone(node), limit)));
        }
        if seen.branch.index() != top.branch.index() {
            if side.view.on(&top.branch).is_none() {
                return Ok(Some(RenameStep::Grow(Arc::clone(spot.parent), Arc::clone(&top.branch))));
            }
            return Ok(Some(RenameStep::Name(Arc::clone(spot.parent), spot.name.bytes().to_vec(), Arc::clone(node))));
        }
        Ok(None)
    }

    /// Renames a file, and its copies on lower branches if these are changed with it.
    fn move_file(&self, caller: &Caller, from: RenameSource<'_>, to: RenameTarget<'_>) -> Result<RenameStep> {
        let top = from.node.top()?;
        let index = top.branch.index();
        let seen = from.side.found().ok_or(Errno::ENOENT)?.top()?.branch.index();
        if !self.options.duplicates || !top.branch.is_writable() || seen != index {
            return self.move_shown(caller, from, to, None);
        }
        let copies = self.duplicates(caller, &from.side.view, from.spot.name, index)?;
        if !self.changes_duplicates(Action::Rename) {
            let shows = self.shows_below(&from.side.view, from.spot.name, index)? && !copies.shows_writable;
            return self.move_shown(caller, from, to, Some(shows));
        }
        let (source, target) = (&from.side.view, &to.side.view);
        if let Some(branch) = copies.branches().find(|branch| target.on(branch).is_none()) {
            return Ok(RenameStep::Grow(Arc::clone(to.spot.parent), Arc::clone(branch)));
        }
        // Copies of the replaced file would hide the new one, or be taken for its copies. They come back where the
        // rename fails.
        let mut aside = Vec::new();
        if let Some(found) = to.side.found().filter(|found| !found.is_directory()) {
            let replaced = self.duplicates(caller, target, to.spot.name, found.top()?.branch.index())?;
            aside = set_aside(&replaced.writable, to.spot.name)?;
        }
        match self.move_shown(caller, from, to, Some(copies.remains)) {
            Ok(RenameStep::Done(leftovers)) => {
                let names = BothNames { from: (source, from.spot.name), to: (target, to.spot.name), index };
                let followed = self.duplicates_follow(caller, from.spot.parent, names);
                aside.iter().for_each(Aside::remove);
                let is_covered = to.side.sight.whiteout == Some(index);
                if let (true, true, Some(home)) = (followed.is_ok(), is_covered, target.on(&top.branch))
                    // Otherwise the copies are hidden as well.
                    && matches!(self.hides_others(target, to.spot.name, index, &copies), Ok(false))
                {
                    uncover(home, to.spot.name);
                }
                if let Err(error) = followed {
                    self.clear(&leftovers);
                    return Err(error);
                }
                Ok(RenameStep::Done(leftovers))
            }
            other => {
                let replaced = to.side.found();
                let shown = self.sight(&OWN, target, to.spot.name)?.found;
                if is_same_file(shown.as_ref(), replaced) {
                    put_back(&aside)?;
                } else {
                    // It was removed before another step failed: its copies would come in its place.
                    aside.iter().for_each(Aside::remove);
                }
                other
            }
        }
    }

    /// Renames the shown file. `shows` is whether a branch below would show the old name, if that is known.
    fn move_shown(
        &self,
        caller: &Caller,
        from: RenameSource<'_>,
        to: RenameTarget<'_>,
        shows: Option<bool>,
    ) -> Result<RenameStep> {
        let RenameSource { spot: old, side: source, node } = from;
        let RenameTarget { spot: new, side: target } = to;
        if let Some(step) = self.replace_above(caller, from, to, shows)? {
            return Ok(step);
        }
        if let Some(step) = self.ready(old, source, node, target.sight.limit)? {
            return Ok(step);
        }
        let top = node.top()?;
        let branch = &top.branch;
        let Some(new_home) = target.view.on(branch) else {
            return Ok(RenameStep::Grow(Arc::clone(new.parent), Arc::clone(branch)));
        };
        let home = source.view.on(branch).ok_or(Errno::EIO)?;
        let shows = match shows {
            Some(shows) => shows,
            None => self.shows_below(&source.view, old.name, branch.index())?,
        };
        if self.is_copy(node, &top) {
            self.mark_home(new.parent, new_home)?;
        }
        let is_covered = target.sight.whiteout == Some(branch.index());
        let keeps = is_covered && self.hides_others(&target.view, new.name, branch.index(), &Duplicates::default())?;
        self.move_and_hide(caller, old, home, new_home, new.name, shows)?;
        if is_covered && !keeps {
            uncover(new_home, new.name);
        }
        if let Some((found, replaced)) = target.found().zip(target.node.as_ref()) {
            let below = &found.top()?.branch;
            if below.index() != branch.index() && (below.is_writable() || self.hardlinks.knows(replaced.id)) {
                self.remove_replaced(&target.view, below, new_home, new.name);
            }
            self.name_is_gone(new.parent, new.name, replaced, found.top()?, found.attr.nlink, branch)?;
        }
        self.moved(node, &top, old, new, new_home)?;
        Ok(RenameStep::Done(Vec::new()))
    }

    /// Removes a replaced file from a lower branch. If the new name is not durable, the old file stays, hidden
    /// by it.
    pub(crate) fn remove_replaced(&self, target: &View, below: &Arc<Branch>, new_home: &Part, name: Name<'_>) {
        match self.make_durable(&new_home.branch, &new_home.node) {
            Ok(()) => self.remove_hidden(target, below, name),
            Err(error) => {
                tracing::warn!(branch = below.index(), ?error, "a file that has been replaced stays on a lower branch")
            }
        }
    }

    /// Replaces a file of a branch above without moving the new one there: the new file gets the name on its
    /// own branch as well, which is hidden until the name above is removed. Nothing is copied, and open files
    /// do not matter. After a crash the name leads to the old file, or both names to the new one: each step on
    /// one of the two branches is durable before the next one on the other. `None` where this is not possible.
    fn replace_above(
        &self,
        caller: &Caller,
        from: RenameSource<'_>,
        to: RenameTarget<'_>,
        shows: Option<bool>,
    ) -> Result<Option<RenameStep>> {
        let RenameSource { spot: old, side: source, node } = from;
        let RenameTarget { spot: new, side: target } = to;
        let (Some(found), Some(replaced)) = (target.found(), &target.node) else { return Ok(None) };
        let (above, top, seen) = (found.top()?, node.top()?, source.found().ok_or(Errno::ENOENT)?.top()?);
        let (branch, index) = (&top.branch, top.branch.index());
        let is_above = above.branch.index() < index
            && target.sight.limit == above.branch.index()
            && target.sight.whiteout.is_none();
        if !is_above || !above.branch.is_writable() || !branch.is_writable() || seen.branch.index() != index {
            return Ok(None);
        }
        let (Some(home), Some(new_home), Some(above_home)) =
            (source.view.on(branch), target.view.on(branch), target.view.on(&above.branch))
        else {
            return Ok(None);
        };
        // Without the name above, nothing may hide the new file, and no branch may show the old name.
        let under = self.sight_from(&OWN, &target.view, new.name, above.branch.index() + 1)?;
        if under.limit < index
            || under.whiteout.is_some_and(|whiteout| whiteout <= index)
            || shows.map_or_else(|| self.shows_below(&source.view, old.name, index), Ok)?
        {
            return Ok(None);
        }
        if self.is_copy(node, &top) {
            self.mark_home(new.parent, new_home)?;
        }
        // A hidden file may have the name there already: it is not removed before the new one is in place.
        let linked = match branch.layer.link(&OWN, &top.node, None, &new_home.node, new.name) {
            Ok(_) => true,
            // The previous process was killed after this step.
            Err(Errno::EEXIST) if is_named(&top, new_home, new.name)? => false,
            Err(error) => {
                tracing::debug!(branch = index, ?error, "a file is copied up to be renamed");
                return Ok(None);
            }
        };
        let uncovered = self
            .make_durable(branch, &new_home.node)
            .and_then(|()| above.branch.layer.unlink(caller, &above_home.node, new.name));
        if let Err(error) = uncovered {
            if linked {
                branch.layer.unlink(&OWN, &new_home.node, new.name)?;
            }
            return Err(error);
        }
        let left = self
            .make_durable(&above.branch, &above_home.node)
            .and_then(|()| branch.layer.unlink(&OWN, &home.node, old.name));
        self.name_is_gone(new.parent, new.name, replaced, above, found.attr.nlink, branch)?;
        // The file has both names in that case.
        left?;
        self.moved(node, &top, old, new, new_home)?;
        Ok(Some(RenameStep::Done(Vec::new())))
    }

    /// Renames a file or directory on its branch; with `shows`, a branch below would show the old name.
    fn move_and_hide(
        &self,
        caller: &Caller,
        old: NameIn<'_>,
        home: &Part,
        new_home: &Part,
        new_name: Name<'_>,
        shows: bool,
    ) -> Result<()> {
        let NameIn { parent: directory, name } = old;
        let branch = &home.branch;
        let rename =
            |flags: u32| branch.layer.rename(caller, &home.node, name, &new_home.node, new_name, RenameFlags(flags));
        if !shows {
            return rename(0);
        }
        if branch.marks().style == Style::Chardev && home.is_plain() {
            match rename(RenameFlags::WHITEOUT) {
                Err(Errno::EINVAL | Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS) => {}
                other => return other,
            }
        }
        self.hide_then(home, name, || rename(0))?;
        if branch.marks().style == Style::Wh {
            return Ok(());
        }
        // The `.wh.` whiteout that hides it is not known to other programs: the whiteout of their form replaces
        // the very name.
        match self.hide(directory, home, name) {
            Ok(true) => uncover(home, name),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(branch = branch.index(), ?error, "a whiteout keeps a form that only unions read")
            }
        }
        Ok(())
    }

    /// Creates the `.wh.` whiteout of a name, runs `act`, and removes the whiteout if that fails.
    pub(crate) fn hide_then(&self, home: &Part, name: Name<'_>, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let branch = &home.branch;
        let beside = Marks { style: Style::Wh, ..branch.marks() };
        let work = || branch.work_directory();
        beside.hide(&*branch.layer, &work, branch.work()?.temporary().name()?, &home.node, name)?;
        let done = act();
        if done.is_err() {
            home.branch.marks().unhide(&*home.branch.layer, &home.node, name)?;
        }
        done
    }

    /// Updates the nodes after a rename.
    fn moved(
        &self,
        node: &Arc<UnionNode>,
        top: &Part,
        old: NameIn<'_>,
        new: NameIn<'_>,
        new_home: &Part,
    ) -> Result<()> {
        let layer = &top.branch.layer;
        let fresh = layer.lookup(&OWN, &new_home.node, new.name)?;
        layer.adopt(&top.node, &fresh.node);
        if node.kind == Kind::Directory {
            self.tree.count.fetch_add(1, Ordering::Relaxed);
        }
        node.leave(old.parent, old.name.bytes(), false);
        node.arrive(new.parent, new.name.bytes());
        self.listings.forget(old.parent.id);
        self.listings.forget(new.parent.id);
        Ok(())
    }

    /// The step that a directory needs before it can be renamed on one branch.
    fn whole(&self, node: &Arc<UnionNode>, limit: usize) -> Result<Option<RenameStep>> {
        let parts = node.parts();
        let top = node.top()?;
        if top.branch.is_writable() && top.branch.index() <= limit {
            let is_ready = match top.redirect {
                Redirect::None => parts.len() == 1,
                Redirect::Sibling => false,
                Redirect::Path => true,
            };
            if is_ready || top.branch.creates() {
                return Ok((!is_ready).then(|| RenameStep::Whole(Arc::clone(node), Arc::clone(&top.branch))));
            }
        }
        match self.branch_for_copy(node.place().as_ref(), top.branch.index(), limit) {
            // It can be changed, but not moved there: programs copy by themselves, to a branch that takes new
            // files.
            Err(Errno::EROFS) if top.branch.is_writable() && self.branches().iter().any(|branch| branch.creates()) => {
                Err(Errno::EXDEV)
            }
            other => Ok(Some(RenameStep::Whole(Arc::clone(node), other?))),
        }
    }

    fn move_directory(&self, caller: &Caller, from: RenameSource<'_>, to: RenameTarget<'_>) -> Result<RenameStep> {
        let RenameSource { spot: old, side: source, node } = from;
        let RenameTarget { spot: new, side: target } = to;
        if let Some(replaced) = &target.node {
            self.check_empty(replaced)?;
        }
        if let Some(step) = self.move_over_empty(caller, from, to)? {
            return Ok(step);
        }
        if from.node.parts().len() > 1
            && let Some(step) = self.move_everywhere(caller, from, to)?
        {
            return Ok(step);
        }
        if let Some(step) = self.whole(node, target.sight.limit)? {
            return Ok(step);
        }
        let top = node.top()?;
        let (branch, layer) = (&top.branch, &top.branch.layer);
        let Some(new_home) = target.view.on(branch) else {
            return Ok(RenameStep::Grow(Arc::clone(new.parent), Arc::clone(branch)));
        };
        let home = source.view.on(branch).ok_or(Errno::EIO)?;
        let shows = self.shows_below(&source.view, old.name, branch.index())?;
        let covers = target.node.is_some()
            || target.sight.whiteout == Some(branch.index())
            || self.shows_below(&target.view, new.name, branch.index())?;
        if covers && top.redirect == Redirect::None {
            branch.marks().make_opaque(&**layer, &top.node)?;
        }
        if self.is_copy(node, &top) {
            self.mark_home(new.parent, new_home)?;
        }
        let mut leftovers = Vec::new();
        let in_the_way = match layer.lookup(&OWN, &new_home.node, new.name) {
            Ok(entry) => Some(entry),
            Err(Errno::ENOENT) => None,
            Err(error) => return Err(error),
        };
        let mut in_the_way = in_the_way;
        if let Some(replaced) = &target.node
            && in_the_way.is_some()
            && let Some(leftover) = self.empty_for_good(new, new_home, replaced)?
        {
            // A physically empty directory is replaced by the rename itself.
            leftovers.push(leftover);
            in_the_way = None;
        }
        match in_the_way {
            Some(entry) => {
                // A whiteout at the very name, or an empty directory that could not be replaced: it is
                // exchanged to the old name, and removed there.
                if entry.attr.kind == Kind::Directory && shows {
                    branch.marks().make_opaque(&**layer, &entry.node)?;
                }
                let (aside, work) = (branch.work()?.temporary(), branch.work_directory()?);
                Swap {
                    layer: &**layer,
                    caller,
                    from: &home.node,
                    from_name: old.name,
                    to: &new_home.node,
                    to_name: new.name,
                    work: &work,
                    aside: aside.name()?,
                }
                .run()?;
                self.clear_old_name(old, home, entry.attr.kind, shows, &mut leftovers)?;
            }
            None => self.move_and_hide(caller, old, home, new_home, new.name, shows)?,
        }
        if target.sight.whiteout == Some(branch.index()) {
            uncover(new_home, new.name);
        }
        if let Some(replaced) = &target.node {
            replaced.leave(new.parent, new.name.bytes(), true);
            self.listings.forget(replaced.id);
        }
        let floor = match target.sight.whiteout {
            _ if covers || top.redirect != Redirect::None => branch.index(),
            Some(index) if index > branch.index() => index - 1,
            _ => target.sight.limit,
        };
        node.settle(node.parts().to_vec(), floor);
        self.moved(node, &top, old, new, new_home)?;
        Ok(RenameStep::Done(leftovers))
    }

    /// Renames a directory on all of its branches, if all of them are writable and it neither hides anything
    /// nor needs a whiteout: a pool's directories move without copying a byte. `None` otherwise. A crash in
    /// between leaves part of the files under the old name and part under the new; if the request is sent
    /// again, `interrupted.rs` moves the remaining ones.
    fn move_everywhere(
        &self,
        caller: &Caller,
        from: RenameSource<'_>,
        to: RenameTarget<'_>,
    ) -> Result<Option<RenameStep>> {
        let RenameSource { spot: old, side: source, node } = from;
        let RenameTarget { spot: new, side: target } = to;
        let parts = node.parts();
        let last = parts.last().ok_or(Errno::EIO)?;
        let is_free = target.sight.found.is_none()
            && target.sight.whiteout.is_none()
            && target.sight.limit >= last.branch.index();
        if !is_free || !self.may_move_everywhere(from)? {
            return Ok(None);
        }
        if let Some(missing) = parts.iter().find(|part| target.view.on(&part.branch).is_none()) {
            return Ok(Some(RenameStep::Grow(Arc::clone(new.parent), Arc::clone(&missing.branch))));
        }
        let mut moved: Vec<(&Part, &Part, &Part)> = Vec::new();
        for part in parts.iter().rev() {
            let (home, new_home) =
                (source.view.on(&part.branch).ok_or(Errno::EIO)?, target.view.on(&part.branch).ok_or(Errno::EIO)?);
            if self.is_copy(node, part) {
                self.mark_home(new.parent, new_home)?;
            }
            let renamed =
                part.branch.layer.rename(caller, &home.node, old.name, &new_home.node, new.name, RenameFlags(0));
            if let Err(error) = renamed {
                for (part, home, new_home) in moved {
                    part.branch.layer.rename(caller, &new_home.node, new.name, &home.node, old.name, RenameFlags(0))?;
                }
                return Err(error);
            }
            moved.push((part, home, new_home));
        }
        for (part, _, new_home) in moved {
            self.moved(node, part, old, new, new_home)?;
        }
        // If a part is opaque, the merge ends where it did before.
        let floor = if node.view().floor == last.branch.index() { last.branch.index() } else { target.sight.limit };
        node.settle(parts.to_vec(), floor);
        Ok(Some(RenameStep::Done(Vec::new())))
    }

    /// Whether a directory is on writable branches alone, and hides nothing.
    fn may_move_everywhere(&self, from: RenameSource<'_>) -> Result<bool> {
        let RenameSource { spot: old, side: source, node } = from;
        let parts = node.parts();
        let last = parts.last().ok_or(Errno::EIO)?;
        Ok(parts.iter().all(|part| part.branch.is_writable())
            && !node.is_redirected()
            && !self.shows_below(&source.view, old.name, last.branch.index())?)
    }

    /// Renames a directory of a pool on each of its branches over one in which nothing can be seen. That one has a hidden
    /// name meanwhile ([`Aside`]), and comes back where the rename fails.
    /// `None` where one of both is not on writable branches alone.
    fn move_over_empty(
        &self,
        caller: &Caller,
        from: RenameSource<'_>,
        to: RenameTarget<'_>,
    ) -> Result<Option<RenameStep>> {
        let RenameTarget { spot: new, side: target } = to;
        let Some(replaced) = target.node.as_ref().filter(|_| self.options.duplicates) else { return Ok(None) };
        let empties = RenameSource { spot: new, side: target, node: replaced };
        if !self.may_move_everywhere(from)? || !self.may_move_everywhere(empties)? {
            return Ok(None);
        }
        if let Some(missing) = from.node.parts().iter().find(|part| target.view.on(&part.branch).is_none()) {
            return Ok(Some(RenameStep::Grow(Arc::clone(new.parent), Arc::clone(&missing.branch))));
        }
        let mut aside = Vec::new();
        let moved = self.set_aside(empties, &mut aside).and_then(|is_empty| {
            if !is_empty {
                return Ok(None);
            }
            let sight = self.sight(&OWN, &target.view, new.name)?;
            let free = Side { view: target.view.clone(), sight, node: None };
            self.move_everywhere(caller, from, RenameTarget { spot: new, side: &free })
        });
        if !matches!(moved, Ok(Some(_))) {
            put_back(&aside)?;
            return moved;
        }
        replaced.leave(new.parent, new.name.bytes(), true);
        self.listings.forget(replaced.id);
        let mut leftovers = Vec::with_capacity(aside.len());
        for empty in &aside {
            // The rename is done.
            match self.move_out(empty.branch(), empty.directory(), empty.hidden.name()?) {
                Ok(leftover) => leftovers.extend(leftover),
                Err(error) => empty.warn_of_hidden_name(error),
            }
        }
        Ok(Some(RenameStep::Done(leftovers)))
    }

    /// Gives a directory hidden names on its branches. False where there is a file in it then, which somebody has put
    /// there on a branch.
    fn set_aside(&self, empties: RenameSource<'_>, aside: &mut Vec<Aside>) -> Result<bool> {
        let RenameSource { spot, side, node } = empties;
        for part in &*node.parts() {
            let home = side.view.on(&part.branch).ok_or(Errno::EIO)?;
            aside.push(Aside::hide(&OWN, home, spot.name)?);
            if !holds_marks_only(part)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts a directory without anything in it, whiteouts included, in the place of one in which
    /// nothing can be seen. `None` where the branch cannot say by an attribute that it is opaque.
    fn empty_for_good(&self, at: NameIn<'_>, home: &Part, node: &Arc<UnionNode>) -> Result<Option<Leftover>> {
        let (branch, layer) = (&home.branch, &home.branch.layer);
        let (temporary, work) = (branch.work()?.temporary(), branch.work_directory()?);
        self.mark_home(at.parent, home)?;
        let made = layer.mkdir(&OWN, &work, temporary.name()?, 0o700)?;
        let part = Part::new(branch, made.node, made.attr.id);
        let leftover = Leftover::new(branch, temporary);
        let top = node.top()?;
        let attr = top.branch.layer.getattr(&OWN, &top.node, None)?;
        let ready = branch
            .marks()
            .make_opaque_by_attribute(&**layer, &part.node)
            .and_then(|is_opaque| if is_opaque { self.dress(&top, &attr, &part).map(|()| true) } else { Ok(false) })
            .and_then(|ready| {
                identity::set_origin(&self.identities, branch, &part.node, part.id, node.id).map(|()| ready)
            })
            .and_then(|ready| {
                if ready {
                    let aside = branch.work()?.temporary();
                    Swap {
                        layer: &**layer,
                        caller: &OWN,
                        from: &work,
                        from_name: leftover.name()?,
                        to: &home.node,
                        to_name: at.name,
                        work: &work,
                        aside: aside.name()?,
                    }
                    .run()?;
                }
                Ok(ready)
            });
        if !matches!(ready, Ok(true)) {
            self.clear(&[leftover]);
            return ready.map(|_| None);
        }
        let fresh = layer.lookup(&OWN, &home.node, at.name)?;
        layer.adopt(&part.node, &fresh.node);
        node.settle(vec![part], branch.index());
        Ok(Some(leftover))
    }

    /// Removes the entry that an exchange has moved to the old name.
    fn clear_old_name(
        &self,
        old: NameIn<'_>,
        home: &Part,
        kind: Kind,
        shows: bool,
        leftovers: &mut Vec<Leftover>,
    ) -> Result<()> {
        let (branch, name) = (&home.branch, old.name);
        if kind != Kind::Directory {
            return match shows {
                false => branch.layer.unlink(&OWN, &home.node, name),
                // A whiteout, which may stay where one is needed; one that only an attribute identifies needs a
                // mark on the directory as well.
                true if branch.marks().style == Style::Xattr => self.hide(old.parent, home, name).map(drop),
                true => Ok(()),
            };
        }
        if shows {
            let temporary = branch.work()?.temporary();
            if self.hide_leaving(old.parent, home, name, &temporary)? {
                leftovers.push(Leftover::new(branch, temporary));
                return Ok(());
            }
        }
        leftovers.extend(self.move_out(branch, &home.node, name)?);
        Ok(())
    }

    fn exchange(&self, caller: &Caller, from: RenameSource<'_>, to: RenameSource<'_>) -> Result<RenameStep> {
        let RenameSource { spot: old, side: source, node } = from;
        let RenameSource { spot: new, side: target, node: swapped } = to;
        let (one, other) = (node.top()?, swapped.top()?);
        // Both have to be on the higher of the two branches.
        let most = one.branch.index().min(other.branch.index());
        for RenameSource { spot, side, node } in [from, to] {
            let step = if node.kind == Kind::Directory {
                self.whole(node, most)?
            } else {
                self.ready(spot, side, node, most)?
            };
            if let Some(step) = step {
                return Ok(step);
            }
        }
        let branch = &one.branch;
        if branch.index() != other.branch.index() {
            return Ok(RenameStep::Again);
        }
        let names = BothNames { from: (&source.view, old.name), to: (&target.view, new.name), index: branch.index() };
        let copies = self.copies_of_both(caller, names)?;
        if let Some(branch) = copies.from.branches().find(|branch| target.view.on(branch).is_none()) {
            return Ok(RenameStep::Grow(Arc::clone(new.parent), Arc::clone(branch)));
        }
        if let Some(branch) = copies.to.branches().find(|branch| source.view.on(branch).is_none()) {
            return Ok(RenameStep::Grow(Arc::clone(old.parent), Arc::clone(branch)));
        }
        let layer = &branch.layer;
        let home = source.view.on(branch).ok_or(Errno::EIO)?;
        let new_home = target.view.on(branch).ok_or(Errno::EIO)?;
        for (moving, part, directory, home) in [(node, &one, new.parent, new_home), (swapped, &other, old.parent, home)]
        {
            if self.is_copy(moving, part) {
                self.mark_home(directory, home)?;
            }
        }
        for (moving, side, name) in [(node, target, new.name), (swapped, source, old.name)] {
            let merges = moving.kind == Kind::Directory && moving.top()?.redirect == Redirect::None;
            if merges && self.shows_below(&side.view, name, branch.index())? {
                branch.marks().make_opaque(&**layer, &moving.top()?.node)?;
                moving.settle(moving.parts().to_vec(), branch.index());
            }
        }
        let aside = self.set_copies_aside(caller, &copies, names)?;
        let flags = RenameFlags(RenameFlags::EXCHANGE);
        let mut whiteouts = ExchangedWhiteouts::default();
        let exchanged = self
            .whiteouts_of_both(names, &mut whiteouts)
            .and_then(|()| layer.rename(caller, &home.node, old.name, &new_home.node, new.name, flags));
        if let Err(error) = exchanged {
            whiteouts.undo();
            put_back(&aside)?;
            return Err(error);
        }
        self.exchange_copies(&aside, names);
        whiteouts.finish();
        node.leave(old.parent, old.name.bytes(), false);
        swapped.leave(new.parent, new.name.bytes(), false);
        self.moved(node, &one, old, new, new_home)?;
        self.moved(swapped, &other, new, old, home)?;
        Ok(RenameStep::Done(Vec::new()))
    }

    /// Gives a copy in the hard-link index a visible name that only lower branches have.
    pub(crate) fn name_copy(&self, parent: &Arc<UnionNode>, name: Name<'_>, node: &Arc<UnionNode>) -> Result<()> {
        let _names = parent.names.write();
        let view = parent.view();
        let found = self.sight(&OWN, &view, name)?.found.ok_or(Errno::ESTALE)?;
        let (seen, count) = (found.top()?.branch.index(), found.attr.nlink);
        let copy = node.top()?;
        if !Arc::ptr_eq(&self.node_of(found)?, node) || seen == copy.branch.index() {
            return Ok(());
        }
        let home = view.on(&copy.branch).ok_or(Errno::ESTALE)?;
        self.mark_home(parent, home)?;
        let linked = copy.branch.layer.link(&OWN, &copy.node, None, &home.node, name)?;
        copy.branch.layer.adopt(&copy.node, &linked.node);
        self.hardlinks.one_less(node.id, count, &copy.branch, || self.make_durable(&copy.branch, &home.node)).map(drop)
    }
}

/// Whether two look-ups have found the same file on the same branch.
fn is_same_file(one: Option<&FoundFile>, other: Option<&FoundFile>) -> bool {
    let place = |found: &FoundFile| found.parts.first().map(|top| (top.branch.slot, top.id));
    one.and_then(place) == other.and_then(place)
}

/// Whether a name on a file's branch leads to the file.
fn is_named(file: &Part, home: &Part, name: Name<'_>) -> Result<bool> {
    Ok(file.branch.layer.lookup(&OWN, &home.node, name)?.attr.id == file.id)
}

/// Makes the kernel's checks in their order; returns true where there is nothing to do.
fn check(
    from: NameIn<'_>,
    to: NameIn<'_>,
    node: &Arc<UnionNode>,
    target: Option<&Arc<UnionNode>>,
    flags: RenameFlags,
) -> Result<bool> {
    let exchange = flags.has(RenameFlags::EXCHANGE);
    if target.is_some() && flags.has(RenameFlags::NOREPLACE) {
        return Err(Errno::EEXIST);
    }
    if target.is_none() && exchange {
        return Err(Errno::ENOENT);
    }
    if node.kind == Kind::Directory && to.parent.is_within(node) {
        return Err(Errno::EINVAL);
    }
    let Some(target) = target else { return Ok(false) };
    if target.kind == Kind::Directory && from.parent.is_within(target) {
        return Err(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
    }
    if Arc::ptr_eq(node, target) {
        return Ok(true);
    }
    match (node.kind == Kind::Directory, target.kind == Kind::Directory) {
        _ if exchange => Ok(false),
        (true, false) => Err(Errno::ENOTDIR),
        (false, true) => Err(Errno::EISDIR),
        _ => Ok(false),
    }
}
