//! A full branch: the file that is being written moves to another one, and the write is tried again.
//!
//! Called by open files ([`crate::UnionOptions::move_when_full`]). Whoever changes a file holds its `moving` lock for reading meanwhile, so
//! nobody changes the old one once the copy begins. The name shows the old file until the last step, and the new one after it.

use crate::{
    branches::Branch,
    copy_up::{learn, move_in},
    marks,
    node::{Part, Place, UnionNode},
    union::{OWN, Shared},
};
use nacre_vfs::{Errno, Name, Result};
use parking_lot::RwLockReadGuard;
use std::sync::Arc;

impl Shared {
    /// Moves a file off its branch.
    ///
    /// # Errors
    /// ENOSPC where it cannot go anywhere else: no branch with room on which it would be seen, or a file with several names.
    pub(crate) fn move_elsewhere(self: &Arc<Shared>, node: &Arc<UnionNode>) -> Result<()> {
        let _alone = node.copying.lock();
        let _unwritten = node.moving.write();
        let top = node.top()?;
        let place = node.place().filter(|_| !node.is_gone() && top.branch.is_writable()).ok_or(Errno::ENOSPC)?;
        let attr = self.attr_of_source(node, &top)?;
        if attr.nlink != 1 || self.links.knows(node.id) {
            return Err(Errno::ENOSPC);
        }
        let target = self.branch_with_room(&place, &top, attr.size)?;
        let parent = self.grow(&place.parent, &target)?;
        let built = self.build(node, &top, &attr, &target, u64::MAX)?;
        let moved = self.switch(node, &place, &top, &parent, &built.part, built.name()?);
        if moved.is_err() {
            self.discard(&built);
        }
        moved
    }

    /// Keeps a file on its branch while something about it changes there. Taken before the names of any directory.
    pub(crate) fn hold_still<'a>(&self, node: &'a UnionNode) -> Option<RwLockReadGuard<'a, ()>> {
        self.options.move_when_full.then(|| node.moving.read())
    }

    /// The branch with most room on which the file would be seen once it is gone from its own.
    fn branch_with_room(&self, place: &Place, top: &Part, size: u64) -> Result<Arc<Branch>> {
        let _names = place.parent.names.read();
        let sight = self.sight_from(&OWN, &place.parent.view(), Name::new(&place.name)?, top.branch.index + 1)?;
        let limit = match (&sight.found, sight.whiteout) {
            (None, None) => sight.limit,
            // Something of this name is there: above it is free.
            _ => sight.limit.saturating_sub(1),
        };
        let mut best: Option<(u64, &Arc<Branch>)> = None;
        for branch in self.branches.iter().filter(|branch| branch.mode.creates() && branch.index <= limit) {
            if branch.index == top.branch.index {
                continue;
            }
            let figures = branch.layer.statfs(&OWN, &branch.root)?;
            let free = figures.available.saturating_mul(u64::from(figures.fragment)).saturating_sub(self.min_free(branch));
            if free > size && best.is_none_or(|(most, _)| free > most) {
                best = Some((free, branch));
            }
        }
        best.map(|(_, branch)| Arc::clone(branch)).ok_or(Errno::ENOSPC)
    }

    fn switch(&self, node: &Arc<UnionNode>, place: &Place, top: &Part, parent: &Part, built: &Part, from: Name<'_>) -> Result<()> {
        let _names = place.parent.names.write();
        if node.is_gone() || !node.place().is_some_and(|now| now.is(&place.parent, &place.name)) {
            return Err(Errno::ENOSPC);
        }
        let name = Name::new(&place.name)?;
        let view = place.parent.view();
        let old_home = view.on(&top.branch).ok_or(Errno::ESTALE)?;
        self.mark_home(&place.parent, parent)?;
        let (layer, work) = (&built.branch.layer, built.branch.work()?);
        move_in(&**layer, (&work.directory, from), (&parent.node, name))?;
        let removed = self.uncover_and_remove(top, old_home, name);
        if let Err(error) = removed {
            layer.unlink(&OWN, &parent.node, name)?;
            return Err(error);
        }
        let learnt = learn(built, parent, name);
        self.now_on(node, built);
        self.listings.forget(place.parent.id);
        learnt
    }

    /// Removes the old file, and first a whiteout beside it that would hide the new one as well.
    fn uncover_and_remove(&self, top: &Part, home: &Part, name: Name<'_>) -> Result<()> {
        let layer = &*top.branch.layer;
        if marks::stands_beside(layer, &home.node, name)? {
            top.branch.marks.unhide(layer, &home.node, name)?;
        }
        layer.unlink(&OWN, &home.node, name)
    }
}
