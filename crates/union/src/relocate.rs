//! Relocation: moves visible files from one branch to another: off full branches, off branches that are being
//! drained, between tiers.
//!
//! The copy is built in the work directory of the new branch while users continue; then, with all locks held,
//! the move checks that the file has not been changed, gives the copy its name, and removes the old file. The
//! name shows the old file until the last step, and the new one after it, at every moment and after every
//! crash: a crash leaves behind a temporary file, or the old file hidden below the new one, or the new one
//! hidden below the old one. A file is not moved while it is open for writing, while it is under passthrough,
//! or while another process has it open or mapped on its branch.
//!
//! The names of a file with several names move together, as described in `hardlinks/relocate.rs`.
//!
//! For open files whose branch is full ([`crate::UnionOptions::move_when_full`]), writers wait: every change of
//! a file holds its `moving` lock for reading, and every open file switches to the copy.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    copy_up::{Built, Original, Pace, learn, move_in},
    duplicates::Duplicates,
    marks,
    node::{NodePlace, Part, UnionNode, uncover},
    policy::Placement,
};
use nacre_vfs::{Attr, Errno, Invalidation, Kind, Name, OpenFlags, Result};
use parking_lot::RwLockReadGuard;
use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

/// Maximal number of entries in a report that could not be moved.
pub(crate) const LEFT_MAX: usize = 1_000;

/// An entry that stays on the branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Path, names divided by slashes.
    pub path: Vec<u8>,
    /// The reason.
    pub why: String,
}

/// The reason why a file is not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// It is open for writing, or under passthrough.
    Open,
    /// Another program has it open or mapped on the branch itself.
    InUse,
    /// It has several names.
    Names(u32),
    /// Not all of its names are visible: they are outside of the branch, or hidden by another one.
    Elsewhere {
        /// Number of all names.
        names: u32,
        /// Number of the invisible ones.
        outside: u32,
    },
    /// It has several names, and its file system does not report its birth time: its inode number could be
    /// reused for another file.
    Unsure(u32),
    /// No other branch that takes it has enough space and would show it.
    NoRoom,
    /// It has been changed, renamed or removed meanwhile.
    Changed,
    /// The caller has stopped the move.
    Stopped,
    /// It is pinned to its branch.
    Pinned,
    /// Its branch cannot be changed.
    ReadOnly,
    /// The storage returned an error.
    Failed(Errno),
}

impl From<Errno> for Stay {
    fn from(error: Errno) -> Stay {
        match error {
            Errno::ENOSPC | Errno::EDQUOT | Errno::EROFS => Stay::NoRoom,
            Errno::ENOENT | Errno::ESTALE => Stay::Changed,
            other => Stay::Failed(other),
        }
    }
}

impl fmt::Display for Stay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stay::Open => f.write_str("it is open"),
            Stay::InUse => f.write_str("a program uses it on the branch itself, or has it mapped"),
            Stay::Names(names) => write!(f, "it has {names} names"),
            Stay::Elsewhere { names, outside } => {
                write!(
                    f,
                    "{outside} of its {names} names cannot be seen: outside of the branch, or hidden by another one"
                )
            }
            Stay::Unsure(names) => {
                write!(f, "it has {names} names, and its file system does not tell when it was made")
            }
            Stay::NoRoom => f.write_str("no other branch takes it and has room for it"),
            Stay::Changed => f.write_str("it was changed meanwhile"),
            Stay::Stopped => f.write_str("stopped"),
            Stay::Pinned => f.write_str("it is pinned"),
            Stay::ReadOnly => f.write_str("its branch is read-only"),
            Stay::Failed(error) => write!(f, "{error}"),
        }
    }
}

/// The destination of a move.
#[derive(Clone)]
pub(crate) enum Goal {
    /// The branch that the policy for new files chooses, or the branch with most space.
    Anywhere,
    /// This branch.
    Branch(Arc<Branch>),
}

impl UnionShared {
    /// Moves a file off a full branch in the middle of a write.
    ///
    /// # Errors
    /// ENOSPC where it cannot be moved: no branch with space on which it would be visible, or a file with
    /// several names.
    pub(crate) fn move_elsewhere(self: &Arc<UnionShared>, node: &Arc<UnionNode>) -> Result<()> {
        let _alone = node.copying.lock();
        let _unwritten = node.moving.write();
        let top = node.top()?;
        let place = node.place().filter(|_| !node.is_gone() && top.branch.is_writable()).ok_or(Errno::ENOSPC)?;
        let attr = self.attr_of_source(node, &top)?;
        if attr.nlink != 1 || self.hardlinks.knows(node.id) {
            return Err(Errno::ENOSPC);
        }
        let target = self.branch_when_full(&place, &top, attr.size)?;
        let parent = self.grow(&place.parent, &target)?;
        let built = self.build(Original { node, part: &top, attr: &attr }, &target, u64::MAX)?;
        let moved = self.switch(node, &place, &top, &parent, &built);
        if moved.is_err() {
            self.discard(&built);
        }
        moved
    }

    /// Locks a file against being moved while it is changed. Taken before the names of any directory.
    pub(crate) fn hold_still<'a>(&self, node: &'a UnionNode) -> Option<RwLockReadGuard<'a, ()>> {
        node.changes.fetch_add(1, Ordering::AcqRel);
        let is_alone = self.branches().len() < 2;
        (!is_alone).then(|| node.moving.read())
    }

    /// Moves a file that is no directory to another branch, while users continue; returns its bytes.
    ///
    /// # Errors
    /// The reason why it stays.
    pub(crate) fn relocate(
        self: &Arc<UnionShared>,
        node: &Arc<UnionNode>,
        goal: &Goal,
        pace: Pace<'_>,
    ) -> std::result::Result<u64, Stay> {
        let (top, place, attr, changes) = {
            let _still = node.copying.lock();
            let top = node.top()?;
            let place = node.place().filter(|_| !node.is_gone()).ok_or(Stay::Changed)?;
            let attr = self.movable(node, &top)?;
            (top, place, attr, node.changes.load(Ordering::Acquire))
        };
        self.remove_older(node, &place, &top)?;
        let target = self.target(&place, &top, goal, attr.size)?;
        let parent = self.grow(&place.parent, &target)?;
        let original = Original { node, part: &top, attr: &attr };
        let built = self.build_at_leisure(original, &target, pace)?;
        let moved = self.switch_unchanged(original, changes, &place, &parent, &built);
        if moved.is_err() {
            self.discard(&built);
        }
        moved.map(|()| attr.size)
    }

    /// Whether a file could be moved now. It cannot be opened meanwhile.
    pub(crate) fn movable(&self, node: &Arc<UnionNode>, top: &Part) -> std::result::Result<Attr, Stay> {
        let attr = self.free_to_go(node, top)?;
        if attr.nlink != 1 || self.hardlinks.knows(node.id) { Err(Stay::Names(attr.nlink)) } else { Ok(attr) }
    }

    /// As [`Self::movable`], for any number of names.
    pub(crate) fn free_to_go(&self, node: &Arc<UnionNode>, top: &Part) -> std::result::Result<Attr, Stay> {
        if !top.branch.is_writable() {
            return Err(Stay::ReadOnly);
        }
        if node.open_files().iter().any(|file| file.writes() || file.is_lent()) {
            return Err(Stay::Open);
        }
        let attr = self.attr_of_source(node, top)?;
        // The union's own readers have it open on the branch as well, and switch to the copy.
        if node.kind == Kind::File && node.open_files().is_empty() && self.is_used_by_others(top)? {
            return Err(Stay::InUse);
        }
        Ok(attr)
    }

    /// Whether a file is open or mapped on its branch by another program. If the storage cannot tell, the file
    /// counts as unused.
    fn is_used_by_others(&self, top: &Part) -> Result<bool> {
        let file = top.branch.layer.open(&OWN, &top.node, OpenFlags::READ)?;
        let Some(descriptor) = file.backing() else { return Ok(false) };
        match nacre_sys::lease::is_used_by_others(descriptor) {
            Ok(used) => Ok(used),
            Err(error) => {
                tracing::debug!(%error, "the storage of a branch does not tell whether a file is in use");
                Ok(false)
            }
        }
    }

    /// The branch to which a file can be moved.
    fn target(&self, place: &NodePlace, top: &Part, goal: &Goal, size: u64) -> std::result::Result<Arc<Branch>, Stay> {
        let fits = |branch: &Arc<Branch>| Ok::<_, Errno>(self.room(branch)? > size);
        match goal {
            Goal::Branch(branch) => {
                let limit = self.limit_elsewhere(place, top)?;
                let seen = branch.slot != top.branch.slot
                    && branch.is_member()
                    && branch.index() <= limit
                    && branch.is_writable();
                if seen && fits(branch)? { Ok(Arc::clone(branch)) } else { Err(Stay::NoRoom) }
            }
            Goal::Anywhere => {
                let limit = self.limit_elsewhere(place, top)?;
                match self.branch_for_new(&place.parent, Some(Name::new(&place.name)?), false, limit) {
                    Ok(branch) if branch.slot != top.branch.slot && fits(&branch)? => Ok(branch),
                    _ => Ok(self.branch_with_room(place, top, size)?),
                }
            }
        }
    }

    /// Removes an older version of the same file that is hidden below it: the remains of an interrupted move,
    /// or of a copy-up on open.
    fn remove_older(&self, node: &Arc<UnionNode>, place: &NodePlace, top: &Part) -> Result<()> {
        let _names = place.parent.names.write();
        let (view, name) = (place.parent.view(), Name::new(&place.name)?);
        if node.is_gone() || !node.place().is_some_and(|now| now.is(&place.parent, &place.name)) {
            return Err(Errno::ENOENT);
        }
        let Some(below) = self.sight_from(&OWN, &view, name, top.branch.index().saturating_add(1))?.found else {
            return Ok(());
        };
        let part = below.top()?;
        if below.kind == node.kind && below.attr.nlink == 1 && part.branch.is_writable() && self.id_of(part)? == node.id
        {
            self.remove_hidden(&view, &part.branch, name);
        }
        Ok(())
    }

    /// The last branch on which a file would be visible once it is removed from its own.
    pub(crate) fn limit_elsewhere(&self, place: &NodePlace, top: &Part) -> Result<usize> {
        let _names = place.parent.names.read();
        let name = Name::new(&place.name)?;
        let sight = self.sight_from(&OWN, &place.parent.view(), name, top.branch.index().saturating_add(1))?;
        Ok(match (&sight.found, sight.whiteout) {
            (None, None) => sight.limit,
            (None, Some(at)) if self.beside_whiteout(&place.parent, at, name)?.is_some() => at,
            // Another file or a whiteout has the name: the moved file is visible only above it.
            _ => sight.limit.saturating_sub(1),
        })
    }

    /// The branch at a position, if a file can be created there although its whiteout hides the name: a `.wh.`
    /// whiteout does not occupy the name.
    pub(crate) fn beside_whiteout(&self, parent: &UnionNode, at: usize, name: Name<'_>) -> Result<Option<Arc<Branch>>> {
        let branch = self.branch(at)?;
        let Some(home) = parent.part_on(&branch).filter(|_| branch.creates()) else { return Ok(None) };
        if !marks::stands_beside(&*branch.layer, &home.node, name)? {
            return Ok(None);
        }
        match branch.layer.lookup(&OWN, &home.node, name) {
            Err(Errno::ENOENT) => Ok(Some(branch)),
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Usable free bytes of a branch, queried now.
    pub(crate) fn room(&self, branch: &Branch) -> Result<u64> {
        let figures = branch.layer.statfs(&OWN, &branch.root)?;
        Ok(figures.available.saturating_mul(u64::from(figures.fragment)).saturating_sub(self.min_free(branch)))
    }

    /// The branch to which a file on a full branch is moved.
    fn branch_when_full(&self, place: &NodePlace, top: &Part, size: u64) -> Result<Arc<Branch>> {
        let policy = self.rules().move_when_full.ok_or(Errno::ENOSPC)?;
        let limit = self.limit_elsewhere(place, top)?;
        let branches = self.branches();
        let mut views = self.views_for(policy, &place.parent)?;
        for (view, branch) in views.iter_mut().zip(branches.iter()) {
            // The policy chooses among the branches that can take it.
            view.creates &= branch.index() <= limit && branch.slot != top.branch.slot && self.room(branch)? > size;
        }
        let placement = Placement { branches: &views, limit, directory: false };
        let chosen = policy.choose(&placement, &self.placing.policy).map_err(|_| Errno::ENOSPC)?;
        branches.get(chosen).map(Arc::clone).ok_or(Errno::EIO)
    }

    /// The branch with most space on which the file would be visible once it is removed from its own.
    fn branch_with_room(&self, place: &NodePlace, top: &Part, size: u64) -> Result<Arc<Branch>> {
        self.most_room(self.limit_elsewhere(place, top)?, &top.branch, size)
    }

    /// Of all branches except one, down to `limit`, the one with most space for a new file of this size.
    ///
    /// # Errors
    /// ENOSPC where there is none.
    pub(crate) fn most_room(&self, limit: usize, except: &Branch, size: u64) -> Result<Arc<Branch>> {
        let mut best: Option<(u64, &Arc<Branch>)> = None;
        let branches = self.branches();
        for branch in branches.iter().filter(|branch| branch.creates() && branch.index() <= limit) {
            if branch.slot == except.slot {
                continue;
            }
            let free = self.room(branch)?;
            if free > size && best.is_none_or(|(most, _)| free > most) {
                best = Some((free, branch));
            }
        }
        best.map(|(_, branch)| Arc::clone(branch)).ok_or(Errno::ENOSPC)
    }

    /// Builds the copy piece by piece, without holding locks.
    pub(crate) fn build_at_leisure(
        &self,
        original: Original<'_>,
        target: &Arc<Branch>,
        pace: Pace<'_>,
    ) -> std::result::Result<Built, Stay> {
        let mut stopped = false;
        let mut go_on = |bytes: u64| {
            let goes_on = !self.membership.is_wanted() && pace(bytes);
            stopped |= !goes_on;
            goes_on
        };
        let built = self.build_paced(original, target, &mut go_on);
        match built {
            Err(Errno::EINTR) if stopped => Err(Stay::Stopped),
            other => Ok(other?),
        }
    }

    /// Performs the last step of a move: with the file locked, nothing may have changed.
    fn switch_unchanged(
        &self,
        original: Original<'_>,
        changes: u64,
        place: &NodePlace,
        parent: &Part,
        built: &Built,
    ) -> std::result::Result<(), Stay> {
        let node = original.node;
        let _alone = node.copying.lock();
        let _unwritten = node.moving.write();
        let now = self.unchanged(original, changes, |now| self.movable(node, now))?;
        Ok(self.switch(node, place, &now, parent, built)?)
    }

    /// The visible attributes of a locked file, if it has not changed and can still be moved.
    pub(crate) fn unchanged(
        &self,
        Original { node, part: top, attr: before }: Original<'_>,
        changes: u64,
        free: impl FnOnce(&Part) -> std::result::Result<Attr, Stay>,
    ) -> std::result::Result<Part, Stay> {
        let now = node.top()?;
        if now.branch.slot != top.branch.slot || now.id != top.id || node.changes.load(Ordering::Acquire) != changes {
            return Err(Stay::Changed);
        }
        let same = |attr: &Attr| (attr.size, attr.mtime, attr.ctime, attr.mode, attr.uid, attr.gid, attr.nlink);
        if same(&free(&now)?) != same(before) {
            return Err(Stay::Changed);
        }
        Ok(now)
    }

    /// Whether a file would lose its inode number when it leaves its branch: the storage may reuse the number
    /// for another file, and the two could not be distinguished.
    pub(crate) fn loses_number(&self, node: &UnionNode, top: &Part) -> bool {
        top.id.generation == 0 && !self.is_copy(node, top)
    }

    fn switch(&self, node: &Arc<UnionNode>, place: &NodePlace, top: &Part, parent: &Part, built: &Built) -> Result<()> {
        let _unlisted = place.parent.listing.write();
        let _names = place.parent.names.write();
        if node.is_gone() || !node.place().is_some_and(|now| now.is(&place.parent, &place.name)) {
            return Err(Errno::ENOENT);
        }
        let name = Name::new(&place.name)?;
        let view = place.parent.view();
        let old_home = view.on(&top.branch).ok_or(Errno::ESTALE)?;
        // The directory may have grown or been replaced meanwhile.
        let parent = view.on(&parent.branch).ok_or(Errno::ESTALE)?;
        self.mark_home(&place.parent, parent)?;
        let part = &built.part;
        let (layer, work) = (&part.branch.layer, part.branch.work_directory()?);
        let before = [old_home, parent].map(|home| (home, home.branch.layer.getattr(&OWN, &home.node, None)));
        move_in(&**layer, (&work, built.name()?), (&parent.node, name))?;
        // The new name has to be on stable storage before the old one goes.
        let durable = if self.options.sync { layer.fsyncdir(&OWN, &parent.node, false) } else { Ok(()) };
        let removed = durable.and_then(|()| self.uncover_and_remove(top, old_home, name));
        if let Err(error) = removed {
            layer.unlink(&OWN, &parent.node, name)?;
            return Err(error);
        }
        let others = || self.hides_others(&view, name, parent.branch.index(), &Duplicates::default());
        if marks::stands_beside(&**layer, &parent.node, name) == Ok(true) && others() == Ok(false) {
            uncover(parent, name);
        }
        let learnt = learn(part, parent, name);
        if self.loses_number(node, top) {
            node.leave(&place.parent, &place.name, true);
            self.tell(&Invalidation::Entry { parent: place.parent.id, name: place.name.clone() });
        } else {
            self.now_on(node, part);
        }
        place.parent.relocations.fetch_add(1, Ordering::Release);
        for (home, before) in before {
            if let Ok(before) = before {
                self.tidy_parent(home, home, &before);
            }
        }
        self.listings.forget(place.parent.id);
        learnt
    }

    /// Removes the old file, and before it a `.wh.` whiteout of its name that would hide the new file as well.
    pub(crate) fn uncover_and_remove(&self, top: &Part, home: &Part, name: Name<'_>) -> Result<()> {
        let layer = &*top.branch.layer;
        if marks::stands_beside(layer, &home.node, name)? {
            top.branch.marks().unhide(layer, &home.node, name)?;
        }
        layer.unlink(&OWN, &home.node, name)
    }
}
