//! Directory redirects: renaming a directory that is partly on read-only branches without copying its content.
//! The upper part stores the directory's path on the branches below.
//!
//! Called by renames of directories that are too large to be copied
//! ([`crate::UnionOptions::directory_redirect`]). The attribute is that of the kernel's overlay file system;
//! other programs that read the branch see only the upper part. It is written while the directory still has its
//! old name, and resolves to exactly the parts that are merged there, so it changes nothing by itself. Only
//! where no branch below can be written: a path to a directory that may be moved or removed would lose files.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    node::{Redirect, UnionNode},
};
use nacre_vfs::{Errno, Result, XattrFlags};
use std::sync::Arc;

/// Maximal length of a path that the kernel's overlay file system follows.
const LENGTH_MAX: usize = 256;

impl UnionShared {
    /// Whether directories whose upper part is on a branch may get a redirect.
    pub(crate) fn may_redirect(&self, branch: &Branch) -> bool {
        self.options.directory_redirect
            && !self.branches().iter().skip(branch.index().saturating_add(1)).any(|below| below.is_writable())
    }

    /// Writes a redirect to the part of a directory on a branch.
    ///
    /// # Errors
    /// EXDEV where no redirect is possible, ENOENT where the directory has been removed, and errors of the
    /// storage.
    pub(crate) fn redirect_directory(&self, node: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<()> {
        self.grow(node, branch)?;
        let _tree = self.tree.lock()?;
        if node.is_gone() {
            // It has no path any more.
            return Err(Errno::ENOENT);
        }
        let view = node.view();
        let part = view.on(branch).ok_or(Errno::ESTALE)?;
        if part.redirect == Redirect::Path {
            return Ok(());
        }
        let path = self.path_below(node, branch)?;
        let below =
            self.resolve(&view, &path, branch.index().saturating_add(1))?.map(|found| found.parts).unwrap_or_default();
        let merged = view.parts.iter().filter(|part| part.branch.index() > branch.index());
        let leads_there = merged.clone().count() == below.len()
            && merged.zip(&below).all(|(old, new)| old.branch.index() == new.branch.index() && old.id == new.id);
        if !leads_there || path.len() > LENGTH_MAX {
            return Err(Errno::EXDEV);
        }
        let attribute = branch.marks().namespace.redirect();
        match branch.layer.setxattr(&OWN, &part.node, attribute, &path, XattrFlags::default()) {
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => return Err(Errno::EXDEV),
            other => other?,
        }
        node.goes_on_by_path(branch.index());
        Ok(())
    }

    /// The path of a directory on the branches below. The tree lock is held.
    fn path_below(&self, node: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut start = Vec::new();
        let mut at = Arc::clone(node);
        while let Some(place) = at.place() {
            let part = at.part_on(branch).ok_or(Errno::ESTALE)?;
            let redirect = if part.redirect == Redirect::None {
                None
            } else {
                branch.marks().opacity(&*branch.layer, &part.node)?.redirect
            };
            match redirect {
                Some(path) if path.starts_with(b"/") => {
                    start = path;
                    break;
                }
                Some(sibling) => names.push(sibling),
                None => names.push(place.name.to_vec()),
            }
            at = place.parent;
        }
        for name in names.iter().rev() {
            start.push(b'/');
            start.extend_from_slice(name);
        }
        Ok(start)
    }
}
