//! Look-ups of known files after the list of branches has changed.
//!
//! Unused files are not touched: each file is looked up again, and its directories before it, when an operation
//! uses it (`lookup.rs`). A file that is no longer visible under its name keeps its parts, for processes that
//! have it open, and has no name.

use crate::{
    OWN, UnionShared,
    lookup::FoundFile,
    node::{UnionNode, lock_names},
};
use nacre_vfs::{Errno, Kind, Name, Result};
use std::sync::Arc;

impl UnionShared {
    /// Looks a file up again by the name it was last seen under. No lock is held.
    ///
    /// # Errors
    /// Errors of the branches.
    pub(crate) fn revalidate(&self, node: &Arc<UnionNode>) -> Result<()> {
        let epoch = self.nodes.epoch();
        let mut waiting = vec![Arc::clone(node)];
        while let Some(at) = waiting.last().cloned() {
            match at.place().filter(|_| !at.is_current(epoch)) {
                Some(place) if !place.parent.is_current(epoch) => waiting.push(place.parent),
                Some(_) => {
                    self.revalidate_one(&at, epoch)?;
                    // Renamed meanwhile: its new directory may be outdated.
                    if at.is_current(epoch) {
                        waiting.pop();
                    }
                }
                // The change of the branches itself looks the root directory up again; a file without a name
                // stays as it is.
                None => {
                    at.set_epoch(epoch);
                    waiting.pop();
                }
            }
        }
        Ok(())
    }

    fn revalidate_one(&self, node: &Arc<UnionNode>, epoch: u64) -> Result<()> {
        let Some(place) = node.place() else { return Ok(()) };
        let _names = lock_names(&[&place.parent, node]);
        let unchanged = node.place().is_some_and(|now| now.is(&place.parent, &place.name));
        if node.is_current(epoch) || !unchanged || !place.parent.is_current(epoch) {
            return Ok(());
        }
        let found = if place.parent.is_gone() {
            None
        } else {
            self.sight(&OWN, &place.parent.view(), Name::new(&place.name)?)?.found
        };
        let stays = match found {
            Some(found) => Arc::ptr_eq(&self.node_of(found)?, node),
            None => false,
        };
        if !stays {
            node.leave(&place.parent, &place.name, true);
        }
        node.set_epoch(epoch);
        Ok(())
    }

    /// The directory known before the branches changed that has a part in common with a directory found now.
    pub(crate) fn known_before(&self, found: &FoundFile) -> Option<Arc<UnionNode>> {
        if found.kind != Kind::Directory {
            return None;
        }
        let epoch = self.nodes.epoch();
        found.parts.iter().rev().find_map(|part| {
            let node = self.nodes.by_part(part.branch.slot, part.id)?;
            let has = node.parts().iter().any(|old| old.branch.slot == part.branch.slot && old.id == part.id);
            (node.kind == Kind::Directory && !node.is_current(epoch) && has).then_some(node)
        })
    }

    /// Updates the root directory to the present branches.
    ///
    /// # Errors
    /// Errors of the branches: then nothing has changed.
    pub(crate) fn renew_root(&self) -> Result<()> {
        let (parts, floor) = crate::lookup::root_parts(&self.branches())?;
        if parts.is_empty() {
            return Err(Errno::EINVAL);
        }
        self.root.settle(parts, floor);
        self.root.set_epoch(self.nodes.epoch());
        Ok(())
    }
}
