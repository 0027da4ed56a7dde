//! Copying a directory completely to one branch: its whole visible content is copied there, and the directory
//! becomes opaque.
//!
//! Called before a directory that is merged, or on a read-only branch, is renamed. No step changes the visible
//! tree, so a crash in between costs nothing but space. Bounded by
//! [`crate::UnionOptions::directory_copy_limit`]: beyond it the error is EXDEV, upon which programs copy by
//! themselves.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    identity,
    lookup::FoundFile,
    node::{Part, Redirect, UnionNode, View, lock_names, source},
};
use nacre_vfs::{Errno, Kind, Name, Result};
use std::sync::Arc;

/// Maximal depth of the directory tree: each level takes some of the thread's stack.
const LEVELS: usize = 200;

/// The remaining limit of a copy.
struct Budget {
    entries: usize,
    levels: usize,
}

impl UnionShared {
    /// The visible names of a directory that may be, in whole or in part, on other branches than this one.
    fn names_elsewhere(&self, directory: &UnionNode, branch: &Branch) -> Result<Vec<Vec<u8>>> {
        let parts = directory.parts();
        let sources: Vec<_> = parts.iter().map(source).collect();
        let marks = parts.first().map(|part| part.branch.marks()).ok_or(Errno::EIO)?;
        let home = parts.iter().position(|part| part.branch.index() == branch.index());
        self.listings.names(&marks, directory.id, &sources, |source, kind| {
            home != source || kind.is_none_or(|kind| kind == Kind::Directory)
        })
    }

    /// Copies a directory completely to a branch.
    ///
    /// # Errors
    /// EXDEV where the limit is exceeded, and the errors of copying.
    pub(crate) fn copy_up_dir(self: &Arc<UnionShared>, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<()> {
        let mut budget = Budget { entries: self.options.directory_copy_limit, levels: LEVELS };
        self.copy_up_dir_within(directory, branch, &mut budget)
    }

    /// Whether copying a directory completely to a branch stays within the limit.
    pub(crate) fn is_small(&self, directory: &Arc<UnionNode>, branch: &Branch) -> Result<bool> {
        let mut left = self.options.directory_copy_limit;
        let mut waiting = vec![Arc::clone(directory)];
        while let Some(directory) = waiting.pop() {
            let _names = directory.names.read();
            let view = directory.view();
            for name in self.names_elsewhere(&directory, branch)? {
                let name = Name::new(&name)?;
                let Some(found) = self.sight(&OWN, &view, name)?.found.filter(|found| !is_complete_on(found, branch))
                else {
                    continue;
                };
                if left == 0 {
                    return Ok(false);
                }
                left -= 1;
                if found.is_directory() {
                    waiting.push(self.known(&directory, name, found)?);
                }
            }
        }
        Ok(true)
    }

    fn copy_up_dir_within(
        self: &Arc<UnionShared>,
        directory: &Arc<UnionNode>,
        branch: &Arc<Branch>,
        budget: &mut Budget,
    ) -> Result<()> {
        loop {
            let grown = self.grow(directory, branch)?;
            self.keep_number(directory, &grown)?;
            for name in self.names_elsewhere(directory, branch)? {
                self.bring(directory, Name::new(&name)?, branch, budget)?;
            }
            let _tree = self.tree.lock()?;
            let _names = lock_names(&[directory]);
            if directory.is_gone() {
                return Err(Errno::ENOENT);
            }
            let view = directory.view();
            let mut complete = true;
            for name in self.names_elsewhere(directory, branch)? {
                let found = self.sight(&OWN, &view, Name::new(&name)?)?.found;
                complete &= found.is_none_or(|found| is_complete_on(&found, branch));
            }
            if complete {
                let part = Part { redirect: Redirect::None, ..view.on(branch).cloned().ok_or(Errno::ESTALE)? };
                branch.marks().make_opaque(&*branch.layer, &part.node)?;
                directory.settle(vec![part], branch.index());
                return Ok(());
            }
        }
    }

    /// Stores the directory's present inode number, which is that of its lowest part, on the part that will be
    /// the only one.
    fn keep_number(&self, directory: &UnionNode, part: &Part) -> Result<()> {
        if !self.is_copy(directory, part) {
            return Ok(());
        }
        if let Some(place) = directory.place()
            && let Some(home) = place.parent.part_on(&part.branch)
        {
            self.mark_home(&place.parent, &home)?;
        }
        identity::set_origin(&self.identities, &part.branch, &part.node, part.id, directory.id)
    }

    /// Copies one entry to the branch.
    fn bring(
        self: &Arc<UnionShared>,
        directory: &Arc<UnionNode>,
        name: Name<'_>,
        branch: &Arc<Branch>,
        budget: &mut Budget,
    ) -> Result<()> {
        let node = {
            let _names = directory.names.read();
            let view: View = directory.view();
            let Some(found) = self.sight(&OWN, &view, name)?.found else { return Ok(()) };
            if is_complete_on(&found, branch) {
                return Ok(());
            }
            self.known(directory, name, found)?
        };
        budget.entries = budget.entries.checked_sub(1).ok_or(Errno::EXDEV)?;
        if node.kind == Kind::Directory {
            budget.levels = budget.levels.checked_sub(1).ok_or(Errno::EXDEV)?;
            self.copy_up_dir_within(&node, branch, budget)?;
            budget.levels += 1;
            return Ok(());
        }
        let copy = self.copy_up(&node, branch.index(), u64::MAX)?;
        if copy.branch.index() != branch.index() {
            return Err(Errno::EXDEV);
        }
        self.name_copy(directory, name, &node)
    }
}

/// Whether no part of a file is on another branch.
fn is_complete_on(found: &FoundFile, branch: &Branch) -> bool {
    matches!(found.parts.as_slice(), [part] if part.branch.index() == branch.index())
}
