//! Moving files from one branch to another while they can be seen: off full branches, off branches
//! that are being drained, between tiers.
//!
//! The copy is built in the work directory of the new branch while users go on; then, with
//! everything held, it is made sure that nobody has changed the file, the copy gets the name there,
//! and the old file goes. The name shows the old file until the last step, and the new one after
//! it, at every moment and after every crash: what a crash leaves is a temporary file, or the old
//! file hidden below the new one, or the new one hidden below the old one. A file stays where it is
//! while it is open for writing, while the kernel reads it by itself, and while anybody holds it
//! open or mapped on its branch.
//!
//! Files with several names go together, as `hardlinks/relocate.rs` tells.
//!
//! For open files whose branch is full ([`crate::UnionOptions::move_when_full`]), writers wait:
//! whoever changes a file holds its `moving` lock for reading meanwhile, and every open file
//! follows.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    copy_up::{Built, Original, Pace, learn, move_in},
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

/// So many of what stays are told of, at most.
pub(crate) const LEFT_MAX: usize = 1_000;

/// Something that stays on the branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Names divided by slashes.
    pub path: Vec<u8>,
    /// Why.
    pub why: String,
}

/// Why a file stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// It is open for writing, or the kernel reads it by itself.
    Open,
    /// A program has it open on the branch itself, or holds a mapping of it.
    InUse,
    /// It has several names.
    Names(u32),
    /// Not all of its names are seen: they lie outside of the branch, or are hidden by another one.
    Elsewhere {
        /// All.
        names: u32,
        /// Those that are not seen.
        outside: u32,
    },
    /// It has several names, and its file system does not tell when it was made: its number could
    /// come to mean another file.
    Unsure(u32),
    /// No other branch may take it and has room for it, in a place where it would be seen.
    NoRoom,
    /// It has been changed, renamed or removed meanwhile.
    Changed,
    /// Whoever asked for the move wants no more.
    Stopped,
    /// It is pinned to its branch.
    Pinned,
    /// Its branch cannot be changed.
    ReadOnly,
    /// The storage says so.
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

/// Where a file is to go.
#[derive(Clone)]
pub(crate) enum Goal {
    /// Where the policy for new files puts it, or to the branch with most room.
    Anywhere,
    /// To this branch.
    Branch(Arc<Branch>),
}

impl UnionShared {
    /// Moves a file off a full branch in the middle of a write.
    ///
    /// # Errors
    /// ENOSPC where it cannot go anywhere else: no branch with room on which it would be seen, or a
    /// file with several names.
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

    /// Keeps a file on its branch while something about it changes there. Taken before the names of
    /// any directory.
    pub(crate) fn hold_still<'a>(&self, node: &'a UnionNode) -> Option<RwLockReadGuard<'a, ()>> {
        node.changes.fetch_add(1, Ordering::AcqRel);
        let is_alone = self.branches().len() < 2;
        (!is_alone).then(|| node.moving.read())
    }

    /// Moves what is no directory to another branch, while users go on; answers its bytes.
    ///
    /// # Errors
    /// Why it stays.
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

    /// Whether a file could go now. Nobody can open it meanwhile.
    pub(crate) fn movable(&self, node: &Arc<UnionNode>, top: &Part) -> std::result::Result<Attr, Stay> {
        let attr = self.free_to_go(node, top)?;
        if attr.nlink != 1 || self.hardlinks.knows(node.id) { Err(Stay::Names(attr.nlink)) } else { Ok(attr) }
    }

    /// Whether a file could go now, however many names it has.
    pub(crate) fn free_to_go(&self, node: &Arc<UnionNode>, top: &Part) -> std::result::Result<Attr, Stay> {
        if !top.branch.is_writable() {
            return Err(Stay::ReadOnly);
        }
        if node.open_files().iter().any(|file| file.writes() || file.is_lent()) {
            return Err(Stay::Open);
        }
        let attr = self.attr_of_source(node, top)?;
        // Our own readers hold it open on the branch as well, and follow.
        if node.kind == Kind::File && node.open_files().is_empty() && self.is_used_by_others(top)? {
            return Err(Stay::InUse);
        }
        Ok(attr)
    }

    /// Whether a file is open on its branch by others than the union, or mapped. Where the storage
    /// cannot tell, nobody is believed to.
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

    /// The branch to which a file can go.
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

    /// Removes an older state of the very file that is hidden below it: what a move that was
    /// interrupted has left, or what was copied up on open.
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

    /// The last branch on which a file would be seen once it is gone from its own.
    pub(crate) fn limit_elsewhere(&self, place: &NodePlace, top: &Part) -> Result<usize> {
        let _names = place.parent.names.read();
        let name = Name::new(&place.name)?;
        let sight = self.sight_from(&OWN, &place.parent.view(), name, top.branch.index().saturating_add(1))?;
        Ok(match (&sight.found, sight.whiteout) {
            (None, None) => sight.limit,
            (None, Some(at)) if self.beside_whiteout(&place.parent, at, name)?.is_some() => at,
            // Something of this name is there: above it is free.
            _ => sight.limit.saturating_sub(1),
        })
    }

    /// The branch at a place, if something can be put there although a whiteout of it hides the
    /// name: the mark stands beside.
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

    /// Free bytes that a branch may use, asked for now.
    pub(crate) fn room(&self, branch: &Branch) -> Result<u64> {
        let figures = branch.layer.statfs(&OWN, &branch.root)?;
        Ok(figures.available.saturating_mul(u64::from(figures.fragment)).saturating_sub(self.min_free(branch)))
    }

    /// The branch to which a file goes whose own is full.
    fn branch_when_full(&self, place: &NodePlace, top: &Part, size: u64) -> Result<Arc<Branch>> {
        let policy = self.rules().move_when_full.ok_or(Errno::ENOSPC)?;
        let limit = self.limit_elsewhere(place, top)?;
        let branches = self.branches();
        let mut views = self.views_for(policy, &place.parent)?;
        for (view, branch) in views.iter_mut().zip(branches.iter()) {
            // Of those that can take it, the policy chooses.
            view.creates &= branch.index() <= limit && branch.slot != top.branch.slot && self.room(branch)? > size;
        }
        let placement = Placement { branches: &views, limit, directory: false };
        let chosen = policy.choose(&placement, &self.placing.policy).map_err(|_| Errno::ENOSPC)?;
        branches.get(chosen).map(Arc::clone).ok_or(Errno::EIO)
    }

    /// The branch with most room on which the file would be seen once it is gone from its own.
    fn branch_with_room(&self, place: &NodePlace, top: &Part, size: u64) -> Result<Arc<Branch>> {
        self.most_room(self.limit_elsewhere(place, top)?, &top.branch, size)
    }

    /// Of all branches but one, down to `limit`, the one with most room for something new of this
    /// size.
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

    /// Builds the copy piece by piece, with nothing held.
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

    /// The last step of a move at leisure: with the file held, everything must be as it was.
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

    /// What is shown of a file that is held, if nobody has changed it and it is still free to go.
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

    /// Whether a file cannot keep its number when it goes from its branch: the storage gives it to
    /// another file then, and nothing would tell the two apart.
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
        if marks::stands_beside(&**layer, &parent.node, name) == Ok(true) {
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

    /// Removes the old file, and first a whiteout beside it that would hide the new one as well.
    pub(crate) fn uncover_and_remove(&self, top: &Part, home: &Part, name: Name<'_>) -> Result<()> {
        let layer = &*top.branch.layer;
        if marks::stands_beside(layer, &home.node, name)? {
            top.branch.marks().unhide(layer, &home.node, name)?;
        }
        layer.unlink(&OWN, &home.node, name)
    }
}
