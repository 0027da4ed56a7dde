//! Draining: empties a branch while the union is in use, so that it can be removed without a visible change.
//!
//! Files are moved to the branches that the policy for new files chooses. Whiteouts and opaque directories of
//! the branch are first replaced by ones on another branch; directories are created on another branch with
//! their attributes, and removed from this one when they are empty. No step changes the visible tree, and the
//! replacement of a whiteout or directory is on stable storage before the old one is removed, so that a stop or
//! a crash costs nothing. Entries that cannot be moved are reported and stay.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    control::{ChangeError, Control},
    hardlinks::relocate::Scans,
    lookup::FoundFile,
    marks,
    node::{Part, Redirect, UnionNode, lock_names, path_in, source},
    relocate::{Goal, LEFT_MAX, Left, Stay},
    remove::holds_marks_only,
};
use nacre_vfs::{Attr, DirEntry, DirSink, Errno, FileId, Invalidation, Kind, Name, Result};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// How often a file is tried that is open or is changed meanwhile.
const ATTEMPTS: usize = 4;
/// The pause between two attempts: FUSE front ends close files that no process has open any more.
const REST: Duration = Duration::from_millis(20);

/// Progress of a drain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Files moved.
    pub moved: u64,
    /// Bytes moved, including those of the present file so far.
    pub bytes: u64,
    /// Number of entries that cannot be moved, so far.
    pub left: u64,
    /// Path of the present file, names divided by slashes.
    pub path: Vec<u8>,
}

/// Result of a drain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Files moved.
    pub moved: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Number of entries that stay.
    pub left: u64,
    /// The first 1,000 entries that stay.
    pub examples: Vec<Left>,
    /// Whether the drain was stopped before its end.
    pub stopped: bool,
}

/// A directory on the path of the walk.
struct Frame {
    directory: Arc<UnionNode>,
    names: std::vec::IntoIter<Vec<u8>>,
}

struct Drain<'a> {
    shared: &'a Arc<UnionShared>,
    branch: Arc<Branch>,
    report: DrainReport,
    scans: Scans,
    progress: &'a mut dyn FnMut(&DrainProgress) -> bool,
}

impl Control {
    /// Moves all movable entries off a branch; from then on no new files are created there, until
    /// [`Control::modify`] allows it. `progress` is called for each piece and returns whether to continue.
    ///
    /// # Errors
    /// ENOENT where there is no such branch; EINVAL where it is read-only, or no other branch takes files;
    /// EBUSY where operations never pause.
    pub fn drain(
        &self,
        slot: u8,
        progress: &mut dyn FnMut(&DrainProgress) -> bool,
    ) -> Result<DrainReport, ChangeError> {
        let branch = {
            let _slots = self.shared.membership.changing.lock();
            let branch = self.shared.in_slot(slot)?;
            let name = branch.name.display();
            if !branch.is_writable() {
                let text = format!(
                    "{name} is read-only: nothing can be moved off it, and nothing has to be before it is removed"
                );
                return Err(ChangeError::new(Errno::EINVAL, text));
            }
            if !self.shared.branches().iter().any(|other| other.slot != slot && other.creates()) {
                let text = format!("no other branch than {name} takes files; add one, or make one rw");
                return Err(ChangeError::new(Errno::EINVAL, text));
            }
            // Creations in progress end first, so that none adds a file behind the walk.
            let _alone = self.shared.alone()?;
            branch.set_draining(true);
            branch
        };
        let mut drain =
            Drain { shared: &self.shared, branch, report: DrainReport::default(), scans: Scans::default(), progress };
        drain.run();
        Ok(drain.report)
    }
}

impl Drain<'_> {
    fn run(&mut self) {
        {
            let _branches = self.shared.gate.read();
            if let Err(error) = self.shared.finish_moves() {
                self.stays(
                    crate::work::LINKS.to_vec(),
                    format!("what was interrupted earlier cannot be ended: {error}"),
                );
            }
        }
        let root = Arc::clone(&self.shared.root);
        let mut frames = Vec::new();
        frames.extend(self.enter(root));
        while let Some(frame) = frames.last_mut() {
            if self.report.stopped || !self.branch.is_member() {
                self.report.stopped = true;
                return;
            }
            let Some(name) = frame.names.next() else {
                let directory = Arc::clone(&frame.directory);
                frames.pop();
                self.leave(&directory);
                continue;
            };
            let directory = Arc::clone(&frame.directory);
            match self.find(&directory, &name) {
                Ok(Some(node)) if node.kind == Kind::Directory => frames.extend(self.enter(node)),
                // A copy on another branch replaces the file that is still here.
                Ok(Some(node)) if !node.top().is_ok_and(|top| top.branch.slot == self.branch.slot) => {}
                Ok(Some(node)) => self.file(&node),
                Ok(None) | Err(Errno::ENOENT | Errno::ESTALE) => {}
                Err(error) => self.stays(path_in(&directory, &name), error.to_string()),
            }
        }
        self.index();
    }

    /// Handles the remaining entries of the branch's hard-link index.
    fn index(&mut self) {
        let records = {
            let _branches = self.shared.gate.read();
            self.shared.hardlinks.records_on(&self.branch)
        };
        for (id, counts_only) in records {
            if self.report.stopped || !self.branch.is_member() {
                self.report.stopped = true;
                return;
            }
            let done = if counts_only { self.count(id).map(|()| None) } else { self.shared.indexed_node(id) };
            match done {
                // Names on read-only branches lead to it.
                Ok(Some(node)) => self.file(&node),
                Ok(None) => {}
                Err(error) => self.stays(crate::work::LINKS.to_vec(), error.to_string()),
            }
        }
    }

    /// Moves a name count to another branch.
    fn count(&self, id: FileId) -> Result<()> {
        let _branches = self.shared.gate.read();
        let branches = self.shared.branches();
        let other =
            branches.iter().find(|other| other.creates() && other.slot != self.branch.slot).ok_or(Errno::EROFS)?;
        self.shared.hardlinks.move_counter(id, other)
    }

    fn stays(&mut self, path: Vec<u8>, why: String) {
        self.report.left += 1;
        if self.report.examples.len() < LEFT_MAX {
            self.report.examples.push(Left { path, why });
        }
    }

    fn find(&self, directory: &Arc<UnionNode>, name: &[u8]) -> Result<Option<Arc<UnionNode>>> {
        let _branches = self.shared.gate.read();
        self.shared.node_on(directory, name, &self.branch)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "others use files on the branches, and change the branches: neither tells when it is done"
    )]
    fn file(&mut self, node: &Arc<UnionNode>) {
        let path = node.path().unwrap_or_else(|| crate::work::LINKS.to_vec());
        let mut last = Stay::Changed;
        let mut attempt = 0;
        while attempt < ATTEMPTS {
            let (moved, stop) = {
                let _branches = self.shared.gate.read();
                let mut told = DrainProgress {
                    moved: self.report.moved,
                    bytes: self.report.bytes,
                    left: self.report.left,
                    path: path.clone(),
                };
                let mut stop = !(self.progress)(&told);
                let mut pace = |bytes: u64| {
                    told.bytes += bytes;
                    stop |= !(self.progress)(&told);
                    !stop
                };
                (self.shared.relocate_all(node, &Goal::Anywhere, &mut pace, &mut self.scans), stop)
            };
            match moved {
                Ok(bytes) => {
                    self.report.moved += 1;
                    self.report.bytes += bytes;
                    self.report.stopped |= stop;
                    return;
                }
                Err(_) if stop => {
                    self.report.stopped = true;
                    return;
                }
                // A change of the branches is waiting.
                Err(Stay::Stopped) => {
                    self.shared.membership.give_way();
                    continue;
                }
                Err(Stay::Changed)
                    if node.is_gone() || !node.top().is_ok_and(|top| top.branch.slot == self.branch.slot) =>
                {
                    return;
                }
                Err(Stay::Open) => {
                    last = Stay::Open;
                    if !self.shared.ask_to_close(node, REST) {
                        break;
                    }
                }
                Err(why @ (Stay::InUse | Stay::Changed)) => {
                    last = why;
                    if !self.shared.tell(&Invalidation::Content { id: node.id }) {
                        break;
                    }
                    std::thread::sleep(REST);
                }
                Err(why) => {
                    last = why;
                    break;
                }
            }
            attempt += 1;
        }
        self.stays(path, last.to_string());
    }

    /// Begins a directory.
    fn enter(&mut self, directory: Arc<UnionNode>) -> Option<Frame> {
        let begun = {
            let _branches = self.shared.gate.read();
            self.shared.revalidate(&directory).and_then(|()| {
                if directory.is_redirected() {
                    return Err(Errno::EXDEV);
                }
                self.shared.pass_opacity_on(&directory, &self.branch)?;
                self.shared.names_on(&directory, &self.branch)
            })
        };
        match begun {
            Ok(names) => Some(Frame { directory, names: names.into_iter() }),
            Err(Errno::ENOENT | Errno::ESTALE) => None,
            Err(error) => {
                let why = match error {
                    Errno::EXDEV => "it goes on below under another name".to_owned(),
                    other => other.to_string(),
                };
                self.stays(directory.path().unwrap_or_default(), why);
                None
            }
        }
    }

    /// Ends a directory: hides its hidden names on another branch, and removes the directory if it is empty.
    fn leave(&mut self, directory: &Arc<UnionNode>) {
        let done = {
            let _branches = self.shared.gate.read();
            self.shared.revalidate(directory).and_then(|()| self.shared.take_off(directory, &self.branch))
        };
        match done {
            Ok(()) | Err(Errno::ENOENT | Errno::ESTALE) => {}
            // Its entries have been reported.
            Err(Errno::ENOTEMPTY) => {}
            Err(Errno::EROFS | Errno::ENOSPC) => {
                let why = "no other branch takes it in a place where it would be seen, or what it hides".to_owned();
                self.stays(directory.path().unwrap_or_default(), why);
            }
            Err(error) => self.stays(directory.path().unwrap_or_default(), error.to_string()),
        }
    }
}

/// The names in a directory of a branch that may be whiteouts or other marks.
struct Marked {
    x: bool,
    names: Vec<Vec<u8>>,
    next: u64,
    seen: usize,
}

impl DirSink for Marked {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.seen == 4096 {
            return false;
        }
        self.seen += 1;
        self.next = entry.next;
        if marks::is_reserved(entry.name.bytes()) || marks::may_be_whiteout(entry.kind, self.x) {
            self.names.push(entry.name.bytes().to_vec());
        }
        true
    }
}

impl UnionShared {
    /// Returns the node of a name in a directory, if any part of it is on a branch.
    pub(crate) fn node_on(
        &self,
        directory: &Arc<UnionNode>,
        name: &[u8],
        branch: &Branch,
    ) -> Result<Option<Arc<UnionNode>>> {
        self.revalidate(directory)?;
        let _names = directory.names.read();
        let Some(found) = self.sight(&OWN, &directory.view(), Name::new(name)?)?.found else { return Ok(None) };
        let is_there = found.parts.iter().any(|part| part.branch.slot == branch.slot);
        let node = self.known(directory, Name::new(name)?, found)?;
        Ok(is_there.then_some(node))
    }

    /// The names in a directory that may be on a branch.
    pub(crate) fn names_on(&self, directory: &UnionNode, branch: &Branch) -> Result<Vec<Vec<u8>>> {
        let parts = directory.parts();
        let sources: Vec<_> = parts.iter().map(source).collect();
        let marks = parts.first().map(|part| part.branch.marks()).ok_or(Errno::EIO)?;
        let home = parts.iter().position(|part| part.branch.slot == branch.slot);
        self.listings.names(&marks, directory.id, &sources, |source, kind| {
            home == source || kind.is_none_or(|kind| kind == Kind::Directory)
        })
    }

    /// The names that a directory of a branch hides on lower branches.
    pub(crate) fn hidden_by(&self, part: &Part) -> Result<Vec<Vec<u8>>> {
        let (branch, layer) = (&part.branch, &*part.branch.layer);
        let mut marked = Marked { x: part.x_directory, names: Vec::new(), next: 0, seen: 0 };
        loop {
            marked.seen = 0;
            layer.readdir(&OWN, &part.node, marked.next, false, &mut marked)?;
            if marked.seen == 0 {
                break;
            }
        }
        let mut hidden = Vec::new();
        for bytes in marked.names {
            let name = Name::new(&bytes)?;
            match marks::listed(name) {
                marks::NameMark::Hides(name) => hidden.push(name.bytes().to_vec()),
                marks::NameMark::HidesLong => hidden.extend(marks::long_name(layer, &part.node, name)?),
                marks::NameMark::Private => {}
                marks::NameMark::Plain => match layer.lookup(&OWN, &part.node, name) {
                    Ok(entry) if branch.marks().is_whiteout(layer, &entry, part.x_directory)? => hidden.push(bytes),
                    Ok(_) | Err(Errno::ENOENT) => {}
                    Err(error) => return Err(error),
                },
            }
        }
        Ok(hidden)
    }

    /// Whether a part of a directory, in the directory `home`, is opaque.
    fn is_opaque(&self, home: &Part, part: &Part, name: Name<'_>) -> Result<bool> {
        let layer = &*part.branch.layer;
        Ok(part.branch.marks().opacity(layer, &part.node)?.opaque || marks::stands_beside(layer, &home.node, name)?)
    }

    /// Looks a name up on the branches below one.
    fn below(&self, parent: &UnionNode, name: Name<'_>, branch: &Branch) -> Result<Option<FoundFile>> {
        Ok(self.sight_from(&OWN, &parent.view(), name, branch.index().saturating_add(1))?.found)
    }

    /// If a branch makes a directory opaque, makes the directory opaque on a lower branch if possible, so that
    /// files moved there are visible.
    fn pass_opacity_on(&self, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<()> {
        let Some(place) = directory.place() else { return Ok(()) };
        let Some(part) = directory.part_on(branch) else { return Ok(()) };
        let name = Name::new(&place.name)?;
        let home = place.parent.part_on(branch).ok_or(Errno::ESTALE)?;
        if !self.is_opaque(&home, &part, name)? {
            return self.reach_over(directory, &part, name);
        }
        let below = {
            let _names = place.parent.names.read();
            self.below(&place.parent, name, branch)?
        };
        if let Some(below) = below.as_ref().filter(|below| below.is_directory()) {
            // No branch in between has this name, and the next one perhaps only marks, from an earlier attempt.
            let next = below.top()?;
            let between = branch.index().saturating_add(1)..next.branch.index();
            let other = self
                .branches()
                .iter()
                .find(|other| other.creates() && between.contains(&other.index()))
                .map(Arc::clone);
            let is_begun = next.branch.creates() && next.redirect == Redirect::None && holds_marks_only(next)?;
            let other = other.or_else(|| is_begun.then(|| Arc::clone(&next.branch)));
            // Else the part above becomes opaque, once this one is empty.
            let Some(other) = other else { return Ok(()) };
            let target = self.grow(directory, &other)?;
            other.marks().make_opaque(&*other.layer, &target.node)?;
            self.make_durable(&other, &target.node)?;
        }
        let _names = lock_names(&[&place.parent, directory]);
        if directory.is_gone() || !directory.place().is_some_and(|now| now.is(&place.parent, &place.name)) {
            return Err(Errno::ENOENT);
        }
        branch.marks().make_transparent(&*branch.layer, &part.node)?;
        branch.marks().unhide(&*branch.layer, &home.node, name)?;
        self.look_again(directory)
    }

    /// If a `.wh.` whiteout on a writable branch below hides a directory's name, creates an opaque directory
    /// there, so that files moved there are visible.
    fn reach_over(&self, directory: &Arc<UnionNode>, part: &Part, name: Name<'_>) -> Result<()> {
        let place = directory.place().ok_or(Errno::ENOENT)?;
        let whiteout = {
            let _names = place.parent.names.read();
            self.sight_from(&OWN, &place.parent.view(), name, part.branch.index().saturating_add(1))?
        };
        match (&whiteout.found, whiteout.whiteout) {
            (None, Some(at)) => match self.beside_whiteout(&place.parent, at, name)? {
                Some(target) => drop(self.grow(directory, &target)?),
                None => return Ok(()),
            },
            // An earlier attempt may have got this far and failed before the node was updated.
            (Some(found), _) if found.is_directory() => {}
            _ => return Ok(()),
        }
        let _names = lock_names(&[&place.parent, directory]);
        self.look_again(directory)
    }

    /// Looks the parts of a directory up again. Its names and those of its parent are locked.
    fn look_again(&self, directory: &Arc<UnionNode>) -> Result<()> {
        let place = directory.place().ok_or(Errno::ENOENT)?;
        let found = self.sight(&OWN, &place.parent.view(), Name::new(&place.name)?)?.found.ok_or(Errno::ENOENT)?;
        self.listings.forget(directory.id);
        if Arc::ptr_eq(&self.node_of(found)?, directory) { Ok(()) } else { Err(Errno::ESTALE) }
    }

    /// Hides on another branch the names that a directory of this branch hides.
    fn pass_whiteouts_on(&self, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<()> {
        let Some(part) = directory.part_on(branch) else { return Ok(()) };
        for bytes in self.hidden_by(&part)? {
            let name = Name::new(&bytes)?;
            let Some(lowest) = self.hides(directory, branch, name)? else { continue };
            let fits = |other: &&Arc<Branch>| other.slot != branch.slot && other.creates() && other.index() < lowest;
            let branches = self.branches();
            let known = branches.iter().filter(fits).find(|other| directory.part_on(other).is_some());
            let target = known.or_else(|| branches.iter().rev().find(fits)).ok_or(Errno::EROFS)?;
            let home = self.grow(directory, target)?;
            let _names = directory.names.write();
            // The name may have been created again meanwhile.
            if self.hides(directory, branch, name)?.is_some() {
                self.hide(directory, &home, name)?;
            }
        }
        Ok(())
    }

    /// If a name is hidden by this branch's whiteout alone, returns the highest branch below that has it. A
    /// directory above it is made opaque.
    fn hides(&self, directory: &UnionNode, branch: &Branch, name: Name<'_>) -> Result<Option<usize>> {
        let view = directory.view();
        let sight = self.sight(&OWN, &view, name)?;
        let below = self.sight_from(&OWN, &view, name, branch.index().saturating_add(1))?.found;
        let Some(below) = below else { return Ok(None) };
        match &sight.found {
            None if sight.whiteout == Some(branch.index()) => below.top().map(|top| Some(top.branch.index())),
            // A directory above would be merged with the one below.
            Some(found) if found.is_directory() && below.is_directory() => {
                let Some(last) = found.parts.last().filter(|last| last.branch.index() < branch.index()) else {
                    return Ok(None);
                };
                let home = directory.part_on(&last.branch).ok_or(Errno::ESTALE)?;
                if last.redirect == Redirect::None {
                    if !self.is_opaque(&home, last, name)? {
                        // This branch hides the lower directories already, so users see no difference.
                        last.branch.work()?;
                        last.branch.marks().make_opaque(&*last.branch.layer, &last.node)?;
                    }
                    if last.branch.is_writable() {
                        // The marks of an earlier attempt may not be durable yet.
                        self.make_durable(&last.branch, &last.node)?;
                    }
                }
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Removes an empty directory from a branch. The visible tree does not change.
    fn take_off(self: &Arc<UnionShared>, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<()> {
        let is_root = Arc::ptr_eq(directory, &self.root);
        for _ in 0..ATTEMPTS {
            self.pass_whiteouts_on(directory, branch)?;
            let Some(part) = directory.part_on(branch) else { return Ok(()) };
            if is_root {
                return self.sync_elsewhere(&directory.parts(), &part);
            }
            if !holds_marks_only(&part)? {
                return Err(Errno::ENOTEMPTY);
            }
            let changes = directory.changes.load(Ordering::Acquire);
            self.hand_attributes_on(directory, &part)?;
            let _unchanged = directory.moving.write();
            if directory.changes.load(Ordering::Acquire) == changes && self.remove_part(directory, &part)? {
                return Ok(());
            }
        }
        Err(Errno::EBUSY)
    }

    /// Makes sure that a directory's visible attributes stay the same without this part.
    fn hand_attributes_on(&self, directory: &Arc<UnionNode>, part: &Part) -> Result<()> {
        if directory.top()?.branch.slot != part.branch.slot {
            return Ok(());
        }
        let next = directory.parts().get(1).cloned();
        let limit = match &next {
            Some(next) if next.branch.is_writable() => {
                let attr = part.branch.layer.getattr(&OWN, &part.node, None)?;
                self.dress(part, &attr, next)?;
                return self.strip(part, next);
            }
            Some(next) => next.branch.index().checked_sub(1).ok_or(Errno::EROFS)?,
            None => self.limit_for_directory(directory, part)?,
        };
        let place = directory.place().ok_or(Errno::ENOENT)?;
        let chosen = self.branch_for_new(&place.parent, Some(Name::new(&place.name)?), true, limit);
        let chosen = chosen.ok().filter(|chosen| chosen.slot != part.branch.slot);
        let target = chosen.map_or_else(|| self.most_room(limit, &part.branch, 0), Ok)?;
        self.grow(directory, &target).map(drop)
    }

    /// The last branch on which a directory would be visible once it is removed from its only one.
    fn limit_for_directory(&self, directory: &UnionNode, part: &Part) -> Result<usize> {
        let place = directory.place().ok_or(Errno::ENOENT)?;
        let _names = place.parent.names.read();
        let name = Name::new(&place.name)?;
        let sight = self.sight_from(&OWN, &place.parent.view(), name, part.branch.index().saturating_add(1))?;
        let home = place.parent.part_on(&part.branch).ok_or(Errno::ESTALE)?;
        if self.is_opaque(&home, part, name)? {
            // Content below would not be visible.
            return part.branch.index().checked_sub(1).ok_or(Errno::EROFS);
        }
        match (&sight.found, sight.whiteout) {
            (None, None) => Ok(sight.limit),
            (None, Some(at)) if self.beside_whiteout(&place.parent, at, name)?.is_some() => Ok(at),
            _ => sight.limit.checked_sub(1).ok_or(Errno::EROFS),
        }
    }

    /// Removes extended attributes that only the lower part has.
    fn strip(&self, from: &Part, to: &Part) -> Result<()> {
        let names = |part: &Part| match crate::attributes::all_xattrs(&OWN, part) {
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(Vec::new()),
            other => other,
        };
        let kept = names(from)?;
        let is_kept = |name: &[u8]| kept.split(|byte| *byte == 0).any(|known| known == name);
        for name in names(to)?.split(|byte| *byte == 0) {
            let is_users = name.starts_with(b"user.") || name.starts_with(b"system.posix_acl");
            if is_users && !marks::is_private_xattr(name) && !is_kept(name) {
                to.branch.layer.removexattr(&OWN, &to.node, name)?;
            }
        }
        Ok(())
    }

    /// Removes a directory from one branch. Returns false if it has got entries meanwhile.
    fn remove_part(self: &Arc<UnionShared>, directory: &Arc<UnionNode>, part: &Part) -> Result<bool> {
        let leftover = {
            let _tree = self.tree.lock()?;
            let place = directory.place().filter(|_| !directory.is_gone()).ok_or(Errno::ENOENT)?;
            let _names = lock_names(&[&place.parent, directory]);
            if !directory.place().is_some_and(|now| now.is(&place.parent, &place.name)) {
                return Ok(false);
            }
            let parts = directory.parts();
            if parts.len() < 2 || !parts.iter().any(|known| known.branch.slot == part.branch.slot) {
                return Ok(false);
            }
            for hidden in self.hidden_by(part)? {
                if self.hides(directory, &part.branch, Name::new(&hidden)?)?.is_some() {
                    return Ok(false);
                }
            }
            if !holds_marks_only(part)? || !self.looks_the_same(&parts, part)? {
                return Ok(false);
            }
            let home = place.parent.part_on(&part.branch).ok_or(Errno::ESTALE)?;
            let name = Name::new(&place.name)?;
            if self.is_opaque(&home, part, name)?
                && self.below(&place.parent, name, &part.branch)?.is_some_and(|below| below.is_directory())
            {
                let above = parts.iter().rfind(|above| above.branch.index() < part.branch.index());
                let above = above.filter(|above| above.branch.is_writable()).ok_or(Errno::EROFS)?;
                above.branch.marks().make_opaque(&*above.branch.layer, &above.node)?;
            }
            self.sync_elsewhere(&parts, part)?;
            let before = part.branch.layer.getattr(&OWN, &home.node, None)?;
            let leftover = self.move_out(&part.branch, &home.node, name)?;
            self.tidy_parent(&home, &home, &before);
            self.look_again(directory)?;
            self.listings.forget(place.parent.id);
            leftover
        };
        self.clear(leftover.as_slice());
        Ok(true)
    }

    /// Syncs all other parts of a directory, with the marks and attributes that replace this part's. All of
    /// them: an earlier attempt may have ended before its sync.
    fn sync_elsewhere(&self, parts: &[Part], part: &Part) -> Result<()> {
        for other in parts.iter().filter(|other| other.branch.slot != part.branch.slot && other.branch.is_writable()) {
            self.make_durable(&other.branch, &other.node)?;
        }
        Ok(())
    }

    /// Whether a directory keeps its owner, mode and times without a part.
    fn looks_the_same(&self, parts: &[Part], part: &Part) -> Result<bool> {
        let [top, next, ..] = parts else { return Ok(false) };
        if top.branch.slot != part.branch.slot {
            return Ok(true);
        }
        let of = |part: &Part| part.branch.layer.getattr(&OWN, &part.node, None);
        let same = |attr: &Attr| (attr.mode, attr.uid, attr.gid, attr.mtime);
        Ok(same(&of(top)?) == same(&of(next)?))
    }
}
