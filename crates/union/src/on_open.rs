//! Copy-up and move-up on open (`+coo_reg`, `+coo_all`, `+moo`): a file opened on a slow branch is copied or
//! moved to the next branch above that takes files.
//!
//! Called before a file is opened and before a directory is listed from its start. If it fails, the file is
//! opened on its branch: no user asked for a copy.

use crate::{UnionShared, branch::CopyOnOpen, branches::Branch, copy_up::Original, node::UnionNode};
use nacre_vfs::{Errno, Kind, Result};
use std::sync::Arc;

impl UnionShared {
    /// Copies or moves a file up, if its branch's mode asks for it and the file can move.
    pub(crate) fn rise_on_open(self: &Arc<UnionShared>, node: &Arc<UnionNode>) {
        let Ok(top) = node.top() else { return };
        if !top.branch.copies_on_open() {
            return;
        }
        let risen = match (node.kind, top.branch.mode().copy_on_open) {
            (_, CopyOnOpen::No) => Ok(()),
            (Kind::File, _) => self.bring_up(node),
            (Kind::Directory, CopyOnOpen::All) => match self.next_above(&top.branch) {
                Some(target) => self.grow(node, &target).map(drop),
                None => Ok(()),
            },
            _ => Ok(()),
        };
        if let Err(error) = risen {
            tracing::debug!(
                ?error,
                branch = top.branch.index(),
                "a file is opened where it is instead of being copied up"
            );
        }
    }

    /// The nearest branch above that takes new files.
    fn next_above(&self, branch: &Branch) -> Option<Arc<Branch>> {
        self.branches().iter().rev().find(|other| other.index() < branch.index() && other.creates()).map(Arc::clone)
    }

    fn bring_up(self: &Arc<UnionShared>, node: &Arc<UnionNode>) -> Result<()> {
        let _alone = node.copying.lock();
        let _unwritten = node.moving.write();
        let top = node.top()?;
        let Some(target) = self.next_above(&top.branch).filter(|_| top.branch.copies_on_open()) else { return Ok(()) };
        let place = node.place().filter(|_| !node.is_gone()).ok_or(Errno::ENOENT)?;
        if top.branch.is_writable() {
            // A file that the kernel or a program may be writing to has to stay.
            self.movable(node, &top).map_err(|_| Errno::EBUSY)?;
        } else if node.open_files().iter().any(|file| file.is_lent()) {
            return Err(Errno::EBUSY);
        }
        let attr = self.attr_of_source(node, &top)?;
        if self.room(&target)? <= attr.size {
            return Err(Errno::ENOSPC);
        }
        let parent = self.grow(&place.parent, &target)?;
        let original = Original { node, part: &top, attr: &attr };
        let built = self.build(original, &target, u64::MAX)?;
        match self.put_in_place(original, &built, Some((&place, &parent))) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => {
                self.discard(&built);
                Err(Errno::ENOENT)
            }
            Err(error) => {
                self.discard(&built);
                Err(error)
            }
        }
    }
}
