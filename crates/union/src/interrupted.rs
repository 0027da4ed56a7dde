//! Finishing a rename in whose middle the previous process was killed.
//!
//! Called when the kernel sends the rename again, before it would be executed as a new one. Visible states of a
//! rename in several steps (`rename.rs`), and the missing step:
//!
//! | old name | new name | missing |
//! |---|---|---|
//! | the file | the same file | copies are renamed, the old name is removed (`replace_above`) |
//! | the upper parts of a directory | its lower parts | the upper parts are renamed, too (`move_everywhere`) |
//! | the empty directory that was replaced | the directory | the empty one is removed (storage without attributes) |
//! | a copy of the file on a lower branch | the file | the copies are renamed, too (`duplicates.rs`) |
//! | nothing | the file | a replaced file of a lower branch is removed (`remove_replaced`) |
//! | the other file | the file | copies that wait under hidden names get the other names (`exchange_copies`) |
//!
//! Files that wait under hidden names beside their own ([`Aside`]) are removed, or get back their names where no step is
//! visible. Each step can be taken again by a later process, if this one is killed as well.
//!
//! In every other state no step is visible yet, or the rename is complete. Invariant: the kernel locks both
//! names as long as the caller of the rename waits, so no other process in the mount has made either. Files that
//! the rename has been allowed for are moved by the union; copies, which the kernel has not judged, by the caller's rights.

use crate::{
    OWN, Union, UnionShared,
    duplicates::{Aside, BothNames},
    lookup::FoundFile,
    node::{Part, UnionNode, View, lock_names},
    options::Action,
};
use nacre_vfs::{Errno, FileId, FinishRename, InterruptedRename, Kind, Layer, Name, RenameFlags, Result};
use std::sync::{Arc, atomic::Ordering};

/// How far a rename got.
enum Progress {
    /// No step is visible.
    Unseen,
    /// The file has both names.
    BothNames,
    /// The old name leads to the empty directory that was replaced.
    Replaced,
    Complete,
}

/// A name in a directory whose names are locked, and its look-up result.
struct Held<'a> {
    directory: &'a Arc<UnionNode>,
    view: View,
    name: Name<'a>,
    found: Option<FoundFile>,
}

impl FinishRename for Union {
    fn finish_rename(&self, rename: &InterruptedRename<'_>) -> Result<bool> {
        let shared = self.shared();
        let _branches = shared.gate.read();
        shared.finish_rename(rename)
    }

    fn undo_rename(&self, rename: &InterruptedRename<'_>) -> Result<()> {
        let shared = self.shared();
        let _branches = shared.gate.read();
        // The new name first: a copy that waits may need it.
        let undone = shared.undo_link(rename);
        shared.end_waiting(rename, false)?;
        undone
    }
}

impl UnionShared {
    fn finish_rename(self: &Arc<UnionShared>, rename: &InterruptedRename<'_>) -> Result<bool> {
        match self.progress(rename)? {
            Progress::Unseen => return Ok(false),
            Progress::BothNames => {
                // Copies that the caller may not move are hidden, not removed.
                let caller = if self.options.duplicates { rename.caller } else { &OWN };
                self.unlink(caller, rename.parent, rename.name)?;
            }
            Progress::Replaced => self.rmdir(&OWN, rename.parent, rename.name)?,
            Progress::Complete => {}
        }
        let rest = self.finish_rest(rename);
        self.end_waiting(rename, true)?;
        rest.map(|()| true)
    }

    /// Takes the steps that follow the change of names.
    fn finish_rest(&self, rename: &InterruptedRename<'_>) -> Result<()> {
        if rename.whiteout {
            self.leave_device(rename.caller, rename.parent, rename.name)?;
        }
        match rename.replaced.filter(|_| !rename.exchange) {
            Some(replaced) => self.remove_interrupted(rename, replaced),
            None => Ok(()),
        }
    }

    /// Finishes with the files that wait for the end of the rename under hidden names, or gives them back their names.
    fn end_waiting(&self, rename: &InterruptedRename<'_>, is_done: bool) -> Result<()> {
        if !self.options.duplicates {
            return Ok(());
        }
        let (old, new) = (self.directory(rename.parent)?, self.directory(rename.new_parent)?);
        let _names = lock_names(&[&old, &new]);
        let sides = [(&new, rename.new_name, &old, rename.name), (&old, rename.name, &new, rename.new_name)];
        let sides = if rename.exchange { &sides[..] } else { &sides[..1] };
        for (directory, name, other, other_name) in sides {
            for home in directory.view().parts.iter().filter(|home| home.branch.is_writable()) {
                let Some(waiting) = Aside::find(home, *name)? else { continue };
                if is_done && !rename.exchange {
                    self.remove_waiting(&waiting)?;
                    continue;
                }
                let view = other.view();
                let taken = match view.on(&home.branch).filter(|_| is_done) {
                    Some(home) => waiting.take(home, *other_name),
                    None => Err(Errno::ENOENT),
                };
                match taken.or_else(|_| waiting.put_back()) {
                    Ok(()) => {}
                    Err(error) => waiting.warn_of_hidden_name(error),
                }
            }
            self.listings.forget(directory.id);
        }
        Ok(())
    }

    /// Removes a replaced file, or an empty directory.
    fn remove_waiting(&self, waiting: &Aside) -> Result<()> {
        let (branch, directory, hidden) = (waiting.branch(), waiting.directory(), waiting.hidden.name()?);
        if branch.layer.lookup(&OWN, directory, hidden)?.attr.kind != Kind::Directory {
            waiting.remove();
            return Ok(());
        }
        // The rename is done.
        match self.move_out(branch, directory, hidden) {
            Ok(leftover) => self.clear(leftover.as_slice()),
            Err(error) => waiting.warn_of_hidden_name(error),
        }
        Ok(())
    }

    fn named<'a>(&self, directory: &'a Arc<UnionNode>, name: Name<'a>) -> Result<Held<'a>> {
        let view = directory.view();
        let found = self.sight(&OWN, &view, name)?.found;
        Ok(Held { directory, view, name, found })
    }

    /// Finds out how far a rename got. Parts of a directory that still have the old name are renamed at once.
    fn progress(&self, rename: &InterruptedRename<'_>) -> Result<Progress> {
        let (old, new) = (self.directory(rename.parent)?, self.directory(rename.new_parent)?);
        let _tree = self.tree.lock()?;
        let _names = lock_names(&[&old, &new]);
        let (from, to) = (self.named(&old, rename.name)?, self.named(&new, rename.new_name)?);
        let number = |found: &Option<FoundFile>| found.as_ref().map(|found| self.number_of(found)).transpose();
        let (at_old, at_new) = (number(&from.found)?, number(&to.found)?);
        // A copy on another writable branch may have another inode number than the file had.
        let is_copied = || to.found.iter().flat_map(|found| &found.parts).all(|part| part.branch.is_writable());
        let has_left = match rename.exchange {
            true => at_old.is_some() && at_old == rename.replaced,
            false => at_old.is_none() && at_new != rename.replaced && is_copied(),
        };
        if at_new.is_none() || rename.replaced == Some(rename.moving) || at_new != Some(rename.moving) && !has_left {
            return Ok(Progress::Unseen);
        }
        let (Some(source), Some(target)) = (&from.found, &to.found) else { return Ok(Progress::Complete) };
        if rename.exchange {
            return Ok(if at_old == Some(rename.moving) { Progress::Unseen } else { Progress::Complete });
        }
        let (above, below) = (source.top()?, target.top()?);
        match (source.is_directory(), target.is_directory()) {
            (true, true) if at_old == rename.replaced => Ok(Progress::Replaced),
            (true, true) => self.move_rest(&from, &to, rename.moving).map(|()| Progress::Complete),
            (false, false) if above.branch.slot == below.branch.slot && above.id == below.id => {
                // The file that was replaced on a branch above must not reappear once the old name is gone.
                let uncovered = to.view.parts.iter().filter(|part| part.branch.index() < below.branch.index());
                for part in uncovered.filter(|part| part.branch.is_writable()) {
                    self.make_durable(&part.branch, &part.node)?;
                }
                if self.changes_duplicates(Action::Rename) {
                    let index = below.branch.index();
                    let names = BothNames { from: (&from.view, rename.name), to: (&to.view, rename.new_name), index };
                    self.duplicates_follow(rename.caller, &old, names)?;
                }
                Ok(Progress::BothNames)
            }
            (false, false)
                if self.changes_duplicates(Action::Rename)
                    && above.branch.is_writable()
                    && above.branch.index() > below.branch.index() =>
            {
                let index = below.branch.index();
                let names = BothNames { from: (&from.view, rename.name), to: (&to.view, rename.new_name), index };
                self.duplicates_follow(rename.caller, &old, names)?;
                self.listings.forget(old.id);
                self.listings.forget(new.id);
                Ok(Progress::Complete)
            }
            // Another process has made it on a branch meanwhile.
            _ => Ok(Progress::Complete),
        }
    }

    /// Renames the parts of a directory that have not been renamed. A part that cannot belong to the directory
    /// was made by another process on its branch, and stays.
    fn move_rest(&self, from: &Held<'_>, to: &Held<'_>, moving: FileId) -> Result<()> {
        let (Some(source), Some(target)) = (&from.found, &to.found) else { return Ok(()) };
        let is_free = |slot: u8| target.parts.iter().all(|part| part.branch.slot != slot);
        let mut rest = Vec::with_capacity(source.parts.len());
        for part in source.parts.iter().rev() {
            let homes = from.view.on(&part.branch).zip(to.view.on(&part.branch));
            if !part.branch.is_writable() {
                return Err(Errno::EROFS);
            }
            match homes.filter(|_| is_free(part.branch.slot)) {
                Some((home, new_home)) => rest.push((&part.branch.layer, home, new_home)),
                None => return Ok(()),
            }
        }
        let last = source.parts.last().ok_or(Errno::EIO)?;
        let known = self.nodes.by_part(last.branch.slot, last.id);
        let mut moved: Vec<(&Arc<dyn Layer>, &Part, &Part)> = Vec::with_capacity(rest.len());
        for (layer, home, new_home) in rest {
            let renamed = layer.rename(&OWN, &home.node, from.name, &new_home.node, to.name, RenameFlags(0));
            if let Err(error) = renamed {
                for (layer, home, new_home) in moved {
                    layer.rename(&OWN, &new_home.node, to.name, &home.node, from.name, RenameFlags(0))?;
                }
                return Err(error);
            }
            moved.push((layer, home, new_home));
        }
        if let Some(known) = known {
            known.leave(from.directory, from.name.bytes(), known.id != moving);
            self.listings.forget(known.id);
        }
        self.tree.count.fetch_add(1, Ordering::Relaxed);
        let found = self.sight(&OWN, &to.view, to.name)?.found.ok_or(Errno::EIO)?;
        let node = self.known(to.directory, to.name, found)?;
        for id in [from.directory.id, to.directory.id, node.id] {
            self.listings.forget(id);
        }
        Ok(())
    }

    /// Removes the new name that `replace_above` has made below the name that it hides.
    fn undo_link(&self, rename: &InterruptedRename<'_>) -> Result<()> {
        let (old, new) = (self.directory(rename.parent)?, self.directory(rename.new_parent)?);
        let _names = lock_names(&[&old, &new]);
        let (from, to) = (self.named(&old, rename.name)?, self.named(&new, rename.new_name)?);
        let (Some(source), Some(target)) = (&from.found, &to.found) else { return Ok(()) };
        let (moving, above) = (source.top()?, target.top()?);
        if source.is_directory() || above.branch.index() >= moving.branch.index() {
            return Ok(());
        }
        let Some(home) = to.view.on(&moving.branch).filter(|_| moving.branch.is_writable()) else { return Ok(()) };
        match moving.branch.layer.lookup(&OWN, &home.node, rename.new_name) {
            Ok(hidden) if hidden.attr.id == moving.id && self.number_of(source)? == rename.moving => {
                moving.branch.layer.unlink(&OWN, &home.node, rename.new_name)
            }
            Ok(_) | Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Removes from a lower branch a file that the rename has replaced.
    fn remove_interrupted(&self, rename: &InterruptedRename<'_>, replaced: FileId) -> Result<()> {
        let new = self.directory(rename.new_parent)?;
        let _names = new.names.write();
        let to = self.named(&new, rename.new_name)?;
        let Some(found) = to.found.filter(|found| !found.is_directory()) else { return Ok(()) };
        let branch = &found.top()?.branch;
        let below = self.sight_from(&OWN, &to.view, to.name, branch.index().saturating_add(1))?.found;
        let Some(below) = below.filter(|below| !below.is_directory()) else { return Ok(()) };
        // A file that another process made on the branch since may have got the number of one that was removed there.
        let is_older = below.attr.btime.unwrap_or(below.attr.ctime) < rename.begun;
        if is_older
            && self.number_of(&below)? == replaced
            && let Some(home) = to.view.on(branch)
        {
            self.remove_replaced(&to.view, &below.top()?.branch, home, to.name);
        }
        Ok(())
    }
}
