//! Steps that change the content of a file that keeps its inode, because it has several names.

use super::{Execution, changed, with_suffix};
use crate::{Result, content, in_place::InPlace, meta::Meta, steps::Overwrite, trouble::During};
use rustix::fs::RenameFlags;
use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

/// Suffixes of a new content's name in its staging directory from the moment when the file in place may have parts of
/// it, and from when it has all of it.
const BEGUN: &str = ".begun";
const DONE: &str = ".done";

impl Execution<'_> {
    /// Replaces the content. What others write to the file before, meanwhile or afterwards stays: before and meanwhile, the
    /// step fails and has changed nothing.
    pub(super) fn overwrite(&mut self, overwrite: &Overwrite) -> Result<()> {
        let (new, shown) = (self.slot(overwrite.new)?, self.base.path_of(&overwrite.path));
        let (begun, done) = (with_suffix(&new, BEGUN), with_suffix(&new, DONE));
        if self.meta(&done)?.is_some() {
            return Ok(());
        }
        let is_begun = self.meta(&begun)?.is_some();
        let file = self.base.writable_file(&overwrite.path).during("open", &shown)?;
        let meta = || Meta::of_file(file.as_fd()).during("read", &shown);
        if meta()?.ino != overwrite.expected.ino {
            return Err(changed(&shown));
        }
        if !is_begun {
            if !overwrite.expected.is(&meta()?) {
                return Err(changed(&shown));
            }
            self.rename(&new, &begun, RenameFlags::NOREPLACE)?;
            self.sync_changed()?;
            (self.pause)()?;
            if !overwrite.expected.is(&meta()?) {
                self.rename(&begun, &new, RenameFlags::NOREPLACE)?;
                self.sync_changed()?;
                return Err(changed(&shown));
            }
        }
        let (old, copy) = (self.staged_file(&self.slot(overwrite.old)?, &shown)?, self.staged_file(&begun, &shown)?);
        let in_place = InPlace { file: file.as_fd(), old: old.as_fd(), new: copy.as_fd(), shown: &shown };
        let Some(bytes) = in_place.replace(&mut *self.pause)? else {
            in_place.take_back()?;
            self.rename(&begun, &new, RenameFlags::NOREPLACE)?;
            self.sync_changed()?;
            return Err(changed(&shown));
        };
        self.bytes += bytes;
        self.rename(&begun, &done, RenameFlags::NOREPLACE)?;
        self.sync_changed()
    }

    fn staged_file(&self, path: &Path, shown: &Path) -> Result<OwnedFd> {
        let (tree, place) = self.beneath(path);
        tree.file(place).during("open the copy of", shown)
    }

    /// Restores the old content; returns whether it did: a file that has not been overwritten, and one that others have
    /// written to afterwards, stay as they are.
    pub(super) fn restore(&mut self, overwrite: &Overwrite) -> Result<bool> {
        let (new, shown) = (self.slot(overwrite.new)?, self.base.path_of(&overwrite.path));
        let (begun, done) = (with_suffix(&new, BEGUN), with_suffix(&new, DONE));
        if self.meta(&done)?.is_some() {
            if !self.has_content_of(&overwrite.path, &done)? {
                return Ok(false);
            }
            self.rename(&done, &begun, RenameFlags::NOREPLACE)?;
            self.sync_changed()?;
        }
        if self.meta(&begun)?.is_none() {
            return Ok(false);
        }
        (self.pause)()?;
        let file = self.base.writable_file(&overwrite.path).during("open", &shown)?;
        if Meta::of_file(file.as_fd()).during("read", &shown)?.ino != overwrite.expected.ino {
            return Err(changed(&shown));
        }
        let (old, copy) = (self.staged_file(&self.slot(overwrite.old)?, &shown)?, self.staged_file(&begun, &shown)?);
        InPlace { file: file.as_fd(), old: old.as_fd(), new: copy.as_fd(), shown: &shown }.take_back()?;
        Ok(true)
    }

    fn has_content_of(&self, path: &Path, copy: &Path) -> Result<bool> {
        let shown = self.base.path_of(path);
        let copy = self.staged_file(copy, &shown)?;
        let file = self.base.file(path).during("open", &shown)?;
        let size = Meta::of_file(copy.as_fd()).during("read", &shown)?.size;
        let is_size = Meta::of_file(file.as_fd()).during("read", &shown)?.size == size;
        Ok(is_size && content::is_same(copy.as_fd(), file.as_fd(), size).during("read", &shown)?)
    }
}
