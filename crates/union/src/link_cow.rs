//! Breaking hard links before a write (mergerfs: `link-cow`): a name of a file with several gets a
//! file of its own, and the others keep what was there.
//!
//! Called by `per_name.rs`, which knows the name that is about to be opened. The file is copied as a whole,
//! with its attributes, in the work directory, and the copy replaces the name in one step: after a crash the
//! name leads to one of the two. The other names lose nothing in any case, so that breaking the wrong name
//! costs only space.

use crate::{
    ATTEMPTS, OWN, UnionShared,
    copy_up::{Built, Original, move_in},
    lookup::FoundFile,
    node::{NodePlace, UnionNode},
};
use nacre_vfs::{Errno, Invalidation, Name, Node, RenameFlags, Result};
use std::sync::Arc;

/// Result of an attempt.
enum Outcome {
    /// The name leads to a file of its own from now on.
    Broken,
    /// The file has no other name.
    Alone,
    /// It leads to another file.
    Elsewhere,
    /// The file has changed meanwhile.
    Again,
}

impl UnionShared {
    /// Gives a name a file of its own if its file has several names. Returns whether the name leads to another
    /// file than `node` now.
    ///
    /// # Errors
    /// EROFS where no branch takes the copy, ENOSPC and other errors of the storages.
    pub(crate) fn break_link(self: &Arc<UnionShared>, place: &NodePlace, node: &Arc<UnionNode>) -> Result<bool> {
        // Its parts are those on the present branches.
        let parent = self.directory(&Node::new(Arc::clone(&place.parent)))?;
        let name = Name::new(&place.name)?;
        self.settle();
        for _ in 0..ATTEMPTS {
            match self.try_to_break(&parent, name, node) {
                Ok(Outcome::Broken) => {
                    self.tell(&Invalidation::Entry { parent: parent.id, name: place.name.clone() });
                    self.tell(&Invalidation::Attributes { id: node.id });
                    return Ok(true);
                }
                Ok(Outcome::Elsewhere) => return Ok(true),
                Ok(Outcome::Alone) => return Ok(false),
                // The branch knows the file by a name that has just been removed; it learns this one at the
                // next look-up.
                Ok(Outcome::Again) | Err(Errno::ESTALE) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Errno::EBUSY)
    }

    /// Looks a name up; `None` if it does not lead to this file. The names of the directory are locked.
    fn leading_to(&self, parent: &Arc<UnionNode>, name: Name<'_>, node: &Arc<UnionNode>) -> Result<Option<FoundFile>> {
        if parent.is_gone() {
            return Ok(None);
        }
        let Some(found) = self.sight(&OWN, &parent.view(), name)?.found.filter(|found| found.kind == node.kind) else {
            return Ok(None);
        };
        Ok(Arc::ptr_eq(&self.node_of(found.clone())?, node).then_some(found))
    }

    fn try_to_break(
        self: &Arc<UnionShared>,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        node: &Arc<UnionNode>,
    ) -> Result<Outcome> {
        // Every removal of a name of the file holds this lock.
        let _alone = node.copying.lock();
        let _unwritten = node.moving.write();
        let leads = {
            let _names = parent.names.read();
            self.leading_to(parent, name, node)?.is_some()
        };
        let top = node.top()?;
        let attr = match self.attr_of_source(node, &top) {
            Err(Errno::ESTALE | Errno::ENOENT) if !leads => return Ok(Outcome::Elsewhere),
            attr => attr?,
        };
        match (leads, self.hardlinks.shown(node, attr.nlink)) {
            // Only processes that have it open can change a file without a name.
            (true, 0 | 1) | (false, 0) => return Ok(Outcome::Alone),
            (true, _) => {}
            (false, _) => return Ok(Outcome::Elsewhere),
        }
        if self.hardlinks.journal.holds(node.id) {
            return Err(Errno::EIO);
        }
        let target = match top.branch.is_writable() {
            true => Arc::clone(&top.branch),
            false => {
                let place = NodePlace { parent: Arc::clone(parent), name: name.bytes().into() };
                self.branch_for_copy(Some(&place), top.branch.index(), usize::MAX)?
            }
        };
        self.grow(parent, &target)?;
        let built = self.build_another(Original { node, part: &top, attr: &attr }, &target)?;
        let put = self.put_another(parent, name, node, &built);
        if !matches!(put, Ok(Outcome::Broken)) {
            self.discard(&built);
        }
        put
    }

    /// Performs the last step: the copy replaces the name.
    fn put_another(
        &self,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        node: &Arc<UnionNode>,
        built: &Built,
    ) -> Result<Outcome> {
        let target = &built.branch;
        let _unlisted = parent.listing.write();
        let _names = parent.names.write();
        let Some(found) = self.leading_to(parent, name, node)? else { return Ok(Outcome::Again) };
        let view = parent.view();
        let Some(home) = view.on(target) else { return Ok(Outcome::Again) };
        let (layer, work) = (&target.layer, target.work_directory()?);
        let from = (&*work, built.name()?);
        if found.top()?.branch.slot == target.slot {
            layer.rename(&OWN, from.0, from.1, &home.node, name, RenameFlags(0))?;
        } else {
            move_in(&**layer, from, (&home.node, name))?;
        }
        if let Err(error) = self.name_is_gone(parent, name, node, found.top()?, found.attr.nlink, target) {
            tracing::warn!(
                branch = target.index(),
                ?error,
                "a file still counts a name that has been given another one"
            );
        }
        Ok(Outcome::Broken)
    }
}
