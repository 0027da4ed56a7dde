//! The journal of moves of files with several names to another branch: the copy replaces the original wherever
//! a name still leads to the original.
//!
//! The finished copy gets a name in the hard-link index of its branch (`NUMBER.m`, made of the original's own
//! inode number there): from that step on, which is atomic across crashes, every name shows the copy. Then each
//! name is created on the copy's branch and removed from the original's, and last the name in the index is
//! removed. A list of the names (`NUMBER.l`) is written before, so that a move interrupted by a crash or an
//! error is finished by the next mount, drain or move. Invariants:
//! * the copy is complete and durable before it replaces anything;
//! * the name in the index is removed when no name leads to the original any more, and that is durable.

use crate::{
    OWN, UnionShared,
    branches::{Branch, index_directory},
    duplicates::Duplicates,
    hardlinks::index::{HardlinkIndex, index_entry, remove},
    hardlinks::relocate::{HardlinkName, LinkScan, lock_listings},
    identity::Identities,
    marks,
    node::{Part, lock_names, uncover},
};
use hashbrown::HashMap;
use nacre_vfs::{Attr, Errno, FileId, Kind, Name, OpenFlags, RenameFlags, Result, WriteOrigin};
use parking_lot::RwLock;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Suffix of the index entry of a copy that replaces an original.
pub(crate) const COPY: &str = ".m";
/// Suffix of the index entry with the list of names.
pub(crate) const LIST: &str = ".l";
/// Maximal accepted size of a list, bytes.
const LIST_MAX: u64 = 64 << 20;

/// A file that is being moved.
#[derive(Clone)]
struct Moving {
    /// The file's identity in the union.
    id: FileId,
    copy: Part,
    /// Number of names that lead to the original, and not yet to the copy.
    left: u32,
    /// A thread is moving it, and holds the locks of the names.
    active: bool,
}

/// All files being moved, by the original's own identity.
#[derive(Default)]
pub(crate) struct Journal {
    any: AtomicBool,
    originals: RwLock<HashMap<FileId, Moving>>,
}

impl Journal {
    fn insert(&self, own: FileId, moving: Moving) {
        self.originals.write().insert(own, moving);
        self.any.store(true, Ordering::Release);
    }

    fn remove(&self, own: FileId) {
        let mut originals = self.originals.write();
        originals.remove(&own);
        self.any.store(!originals.is_empty(), Ordering::Release);
    }

    fn is_idle(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    fn linked(&self, own: FileId) {
        if let Some(moving) = self.originals.write().get_mut(&own) {
            moving.left = moving.left.saturating_sub(1);
        }
    }

    /// Sets whether a thread is moving the file; returns whether that has changed.
    pub(crate) fn set_active(&self, own: FileId, active: bool) -> bool {
        match self.originals.write().get_mut(&own) {
            Some(moving) => std::mem::replace(&mut moving.active, active) != active,
            None => false,
        }
    }

    fn set_left(&self, own: FileId, left: u32) {
        if let Some(moving) = self.originals.write().get_mut(&own) {
            moving.left = left;
        }
    }

    fn all(&self) -> Vec<(FileId, Moving)> {
        self.originals.read().iter().map(|(own, moving)| (*own, moving.clone())).collect()
    }

    /// Replaces the contents.
    pub(crate) fn replace(&self, other: Journal) {
        *self.originals.write() = other.originals.into_inner();
        self.any.store(other.any.into_inner(), Ordering::Release);
    }

    /// Whether a file has an unfinished move that no thread is working on.
    pub(crate) fn holds(&self, id: FileId) -> bool {
        !self.is_idle() && self.originals.read().values().any(|moving| moving.id == id && !moving.active)
    }

    /// Number of names of a file being moved whose copy has link count `count`.
    pub(crate) fn shown(&self, id: FileId, count: u32) -> u32 {
        if self.is_idle() {
            return count;
        }
        let left = self.originals.read().values().find(|moving| moving.id == id).map(|moving| moving.left);
        left.map_or(count, |left| count.saturating_sub(1).saturating_add(left))
    }
}

/// A copy that is to replace an original.
pub(crate) struct StandIn<'a> {
    /// The file's identity in the union.
    pub(crate) id: FileId,
    pub(crate) original: &'a Part,
    pub(crate) copy: &'a Part,
    /// The copy's name in the work directory of its branch.
    pub(crate) temporary: Name<'a>,
    /// Paths of all names of the original, from the union's root.
    pub(crate) paths: &'a [Vec<u8>],
    /// Number of names, including one in the hard-link index.
    pub(crate) names: u32,
    /// Whether every step is synced to stable storage.
    pub(crate) sync: bool,
}

/// The name of a copy or list in the index.
fn entry_name(identities: &Identities, own: FileId, ending: &str) -> Vec<u8> {
    let mut name = index_entry(identities, own);
    name.extend_from_slice(ending.as_bytes());
    name
}

impl HardlinkIndex {
    /// The copy that replaces a part, if its file is being moved.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn stand_in(&self, part: &Part) -> Result<Option<Part>> {
        if self.journal.is_idle() {
            return Ok(None);
        }
        let own = self.identities.of(part.id);
        let copy = self.journal.originals.read().get(&own).map(|moving| moving.copy.clone());
        let Some(copy) = copy else { return Ok(None) };
        // Looked up by its stable name, as other copies are.
        let entry = entry_name(&self.identities, own, COPY);
        match copy.branch.layer.lookup(&OWN, &index_directory(&copy.branch)?, Name::new(&entry)?) {
            Ok(found) if found.attr.id == copy.id => Ok(Some(Part::new(&copy.branch, found.node, copy.id))),
            Ok(_) | Err(Errno::ENOENT) => Ok(Some(copy)),
            Err(error) => Err(error),
        }
    }

    /// Loads a copy found in the index of a branch.
    pub(crate) fn load_moved(&self, branch: &Arc<Branch>, own: FileId, name: Name<'_>) -> Result<()> {
        let found = match branch.layer.lookup(&OWN, &index_directory(branch)?, name) {
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        let copy = Part::new(branch, found.node, found.attr.id);
        let id = crate::identity::origin(&self.identities, branch, &copy.node, copy.id)?
            .unwrap_or_else(|| self.identities.of(copy.id));
        self.journal.insert(own, Moving { id, copy, left: 0, active: false });
        Ok(())
    }

    /// Writes the list of the names that a copy will get.
    fn write_list(&self, branch: &Branch, own: FileId, paths: &[u8], sync: bool) -> Result<()> {
        let (layer, work) = (&branch.layer, branch.work_directory()?);
        let temporary = branch.work()?.temporary();
        let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::EXCL);
        let (_, file) = layer.create(&OWN, &work, temporary.name()?, 0o600, flags)?;
        let mut at = 0;
        let written = loop {
            match paths.get(at..).filter(|rest| !rest.is_empty()) {
                None => break if sync { file.fsync(false) } else { Ok(()) },
                Some(rest) => match file.write(rest, at as u64, WriteOrigin::Caller) {
                    Ok(0) => break Err(Errno::EIO),
                    Ok(some) => at += some,
                    Err(error) => break Err(error),
                },
            }
        };
        let name = entry_name(&self.identities, own, LIST);
        let placed = written.and_then(|()| {
            layer.rename(&OWN, &work, temporary.name()?, &index_directory(branch)?, Name::new(&name)?, RenameFlags(0))
        });
        if placed.is_err()
            && let Err(error) = layer.unlink(&OWN, &work, temporary.name()?)
        {
            tracing::debug!(?error, "a list of names stays in the work directory until the next start");
        }
        placed
    }

    /// Reads the list of the names that a copy will get, divided by NUL bytes.
    fn read_list(&self, branch: &Branch, own: FileId) -> Result<Vec<Vec<u8>>> {
        let name = entry_name(&self.identities, own, LIST);
        let layer = &branch.layer;
        let found = match layer.lookup(&OWN, &index_directory(branch)?, Name::new(&name)?) {
            Err(Errno::ENOENT) => return Ok(Vec::new()),
            other => other?,
        };
        let file = layer.open(&OWN, &found.node, OpenFlags::READ)?;
        let mut bytes = vec![0; usize::try_from(found.attr.size.min(LIST_MAX)).map_err(|_| Errno::EIO)?];
        let mut end = 0;
        while let Some(rest) = bytes.get_mut(end..).filter(|rest| !rest.is_empty()) {
            match file.read(rest, end as u64)? {
                0 => break,
                read => end += read,
            }
        }
        bytes.truncate(end);
        Ok(bytes.split(|byte| *byte == 0).filter(|path| !path.is_empty()).map(<[u8]>::to_vec).collect())
    }

    /// Makes a finished copy in the work directory of its branch replace its original: all names show the copy
    /// from then on.
    ///
    /// # Errors
    /// Errors of the storage: then nothing has changed.
    pub(crate) fn stand_for(&self, stand_in: &StandIn<'_>) -> Result<()> {
        let StandIn { id, original, copy, temporary, paths, names, sync } = *stand_in;
        let own = self.identities.of(original.id);
        let (branch, layer) = (&copy.branch, &copy.branch.layer);
        self.write_list(branch, own, &paths.join(&0), sync)?;
        let entry = entry_name(&self.identities, own, COPY);
        let (directory, entry) = (index_directory(branch)?, Name::new(&entry)?);
        let durable = if sync { layer.fsyncdir(&OWN, &directory, false) } else { Ok(()) };
        if let Err(error) = durable
            .and_then(|()| layer.rename(&OWN, &*branch.work_directory()?, temporary, &directory, entry, RenameFlags(0)))
        {
            remove(branch, &entry_name(&self.identities, own, LIST))?;
            return Err(error);
        }
        self.journal.insert(own, Moving { id, copy: copy.clone(), left: names, active: true });
        match layer.lookup(&OWN, &directory, entry) {
            Ok(fresh) => layer.adopt(&copy.node, &fresh.node),
            // The copy exists all the same: open files try again at their next use.
            Err(error) => tracing::warn!(?error, "a copy that has just been made cannot be looked up"),
        }
        Ok(())
    }

    /// Ends the move: no name leads to the original any more.
    pub(crate) fn stands_alone(&self, own: FileId, copy: &Part) -> Result<()> {
        remove(&copy.branch, &entry_name(&self.identities, own, COPY))?;
        self.journal.remove(own);
        remove(&copy.branch, &entry_name(&self.identities, own, LIST))
    }
}

/// The original's entry under a name, on another branch than the copy's.
struct Old {
    home: Part,
    attr: Attr,
}

/// The original in the hard-link index of a branch: the branch, its name there, and its link count.
type Indexed = (Arc<Branch>, Vec<u8>, u32);

impl UnionShared {
    /// Finishes interrupted moves as far as possible, and checks that this file has none. No lock is held.
    ///
    /// # Errors
    /// EIO while the file has an unfinished move because its storage fails.
    pub(crate) fn settled(&self, id: FileId) -> Result<()> {
        self.settle();
        if self.hardlinks.journal.holds(id) { Err(Errno::EIO) } else { Ok(()) }
    }

    /// Finishes interrupted moves as far as possible; a failure is logged. No lock is held.
    pub(crate) fn settle(&self) {
        if let Err(error) = self.finish_moves() {
            tracing::warn!(?error, "a file with several names is still on its way to another branch");
        }
    }

    /// Finishes all interrupted moves. No lock is held.
    ///
    /// # Errors
    /// Errors of the storage; the names show the copies all the same.
    pub(crate) fn finish_moves(&self) -> Result<()> {
        if self.hardlinks.journal.is_idle() {
            return Ok(());
        }
        for (own, moving) in self.hardlinks.journal.all() {
            if self.hardlinks.journal.set_active(own, true) {
                let done = self.finish_move(own, &moving);
                self.hardlinks.journal.set_active(own, false);
                done?;
            }
        }
        Ok(())
    }

    /// Whether a copy on this branch still replaces an original.
    pub(crate) fn has_moves_to(&self, branch: &Branch) -> bool {
        self.hardlinks.journal.all().iter().any(|(_, moving)| moving.copy.branch.slot == branch.slot)
    }

    fn finish_move(&self, own: FileId, moving: &Moving) -> Result<()> {
        let mut paths = self.hardlinks.read_list(&moving.copy.branch, own)?;
        let mut looked_everywhere = false;
        loop {
            let mut homes = Vec::new();
            for path in &paths {
                homes.extend(self.home_of(path)?);
            }
            let parents: Vec<_> = homes.iter().map(|home| &home.parent).collect();
            let _unlisted = lock_listings(&parents);
            let _names = lock_names(&parents);
            if self.carry_names(own, &moving.copy, &homes)? || looked_everywhere {
                return self.hardlinks.stands_alone(own, &moving.copy);
            }
            // Names have changed since the list was written.
            paths = self.names_of_original(own, &moving.copy)?;
            looked_everywhere = true;
            if paths.is_empty() {
                return self.hardlinks.stands_alone(own, &moving.copy);
            }
        }
    }

    fn names_of_original(&self, own: FileId, copy: &Part) -> Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        for branch in self.branches().iter().filter(|branch| branch.is_writable() && branch.slot != copy.branch.slot) {
            let scan = LinkScan::of(branch, Some((&self.identities, own)), &mut || true)?;
            names.extend(scan.into_iter().flat_map(LinkScan::into_names));
        }
        Ok(names)
    }

    /// The directory and the last component of a path; `None` where there is no such directory.
    pub(crate) fn home_of(&self, path: &[u8]) -> Result<Option<HardlinkName>> {
        let mut at = Arc::clone(&self.root);
        let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
        while let Some(name) = names.next() {
            if names.peek().is_none() {
                return Ok(Some(HardlinkName { parent: at, name: name.to_vec() }));
            }
            self.revalidate(&at)?;
            let _names = at.names.read();
            let found =
                self.sight(&OWN, &at.view(), Name::new(name)?)?.found.filter(crate::lookup::FoundFile::is_directory);
            let Some(found) = found else { return Ok(None) };
            let next = self.known(&at, Name::new(name)?, found)?;
            drop(_names);
            at = next;
        }
        Ok(None)
    }

    /// Gives a copy all names of its original and removes them from the original; returns whether no name leads
    /// to the original any more. The names of all homes are locked.
    pub(crate) fn carry_names(&self, own: FileId, copy: &Part, homes: &[HardlinkName]) -> Result<bool> {
        let target = &copy.branch;
        if self.options.sync {
            target.layer.fsyncdir(&OWN, &index_directory(target)?, false)?;
        }
        let olds = homes.iter().map(|home| self.old_name(own, copy, home)).collect::<Result<Vec<_>>>()?;
        let mut left = 0;
        for (home, old) in homes.iter().zip(&olds) {
            left += u32::from(old.is_some() && !self.has_name(copy, home)?);
        }
        let indexed = self.old_entry(own, copy, &olds)?;
        self.hardlinks.journal.set_left(own, left + u32::from(indexed.is_some()));
        for (home, _) in homes.iter().zip(&olds).filter(|(_, old)| old.is_some()) {
            self.link_copy(own, copy, home)?;
        }
        if let Some((_, entry, _)) = &indexed {
            self.index_copy(own, copy, entry)?;
        } else if let Some(id) = self.moving_id(own)
            && self.hardlinks.indexed(id).is_some_and(|known| self.identities.of(known.id) == own)
        {
            // An earlier attempt got this far.
            self.hardlinks.is_now_on(id, copy);
        }
        self.sync_homes(homes.iter().filter_map(|home| home.parent.part_on(target)))?;
        let (mut removed, mut count) = (0, 0);
        for (home, old) in homes.iter().zip(&olds) {
            let Some(old) = old else { continue };
            self.remove_old(copy, home, old)?;
            removed += 1;
            count = old.attr.nlink;
        }
        if let Some((branch, entry, nlink)) = &indexed {
            remove(branch, entry)?;
            removed += 1;
            count = *nlink;
        }
        self.sync_homes(olds.iter().flatten().map(|old| old.home.clone()))?;
        if removed > 0 {
            return Ok(removed == count);
        }
        // The original has no name here: done if every name leads to the copy.
        Ok(!homes.is_empty()
            && homes.iter().try_fold(true, |all, home| Ok::<_, Errno>(all && self.has_name(copy, home)?))?)
    }

    fn remove_old(&self, copy: &Part, home: &HardlinkName, old: &Old) -> Result<()> {
        let target = &copy.branch;
        let name = Name::new(&home.name)?;
        let new_home = home.parent.part_on(target).ok_or(Errno::ESTALE)?;
        let before = [&old.home, &new_home].map(|part| part.branch.layer.getattr(&OWN, &part.node, None));
        self.uncover_and_remove(&old.home, &old.home, name)?;
        let others = || self.hides_others(&home.parent.view(), name, target.index(), &Duplicates::default());
        if marks::stands_beside(&*target.layer, &new_home.node, name) == Ok(true) && others() == Ok(false) {
            uncover(&new_home, name);
        }
        for (part, before) in [&old.home, &new_home].into_iter().zip(before) {
            if let Ok(before) = before {
                self.tidy_parent(part, part, &before);
            }
        }
        home.parent.relocations.fetch_add(1, Ordering::Release);
        self.listings.forget(home.parent.id);
        Ok(())
    }

    fn moving_id(&self, own: FileId) -> Option<FileId> {
        self.hardlinks.journal.originals.read().get(&own).map(|moving| moving.id)
    }

    fn sync_homes(&self, homes: impl Iterator<Item = Part>) -> Result<()> {
        if !self.options.sync {
            return Ok(());
        }
        let mut done: Vec<(u8, FileId)> = Vec::new();
        for home in homes {
            if !done.contains(&(home.branch.slot, home.id)) {
                home.branch.layer.fsyncdir(&OWN, &home.node, false)?;
                done.push((home.branch.slot, home.id));
            }
        }
        Ok(())
    }

    fn old_name(&self, own: FileId, copy: &Part, home: &HardlinkName) -> Result<Option<Old>> {
        for part in
            home.parent.parts().iter().filter(|part| part.branch.is_writable() && part.branch.slot != copy.branch.slot)
        {
            match part.branch.layer.lookup(&OWN, &part.node, Name::new(&home.name)?) {
                Ok(found) if found.attr.kind != Kind::Directory && self.identities.of(found.attr.id) == own => {
                    return Ok(Some(Old { home: part.clone(), attr: found.attr }));
                }
                Ok(_) | Err(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The original's entry in the hard-link index of its branch.
    fn old_entry(&self, own: FileId, copy: &Part, olds: &[Option<Old>]) -> Result<Option<Indexed>> {
        let Some(id) = self.moving_id(own) else { return Ok(None) };
        let entry = index_entry(&self.identities, id);
        let known = olds.iter().flatten().map(|old| Arc::clone(&old.home.branch)).next();
        let branches = self.branches();
        let all =
            branches.iter().filter(|branch| branch.is_writable() && branch.slot != copy.branch.slot).map(Arc::clone);
        for branch in known.into_iter().chain(all) {
            let Some(directory) = branch.hardlink_index() else { continue };
            match branch.layer.lookup(&OWN, &directory, Name::new(&entry)?) {
                Ok(found) if self.identities.of(found.attr.id) == own => {
                    return Ok(Some((Arc::clone(&branch), entry, found.attr.nlink)));
                }
                Ok(_) | Err(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn has_name(&self, copy: &Part, home: &HardlinkName) -> Result<bool> {
        let Some(part) = home.parent.part_on(&copy.branch) else { return Ok(false) };
        match part.branch.layer.lookup(&OWN, &part.node, Name::new(&home.name)?) {
            Ok(found) => Ok(found.attr.id == copy.id),
            Err(Errno::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn link_copy(&self, own: FileId, copy: &Part, home: &HardlinkName) -> Result<()> {
        if self.has_name(copy, home)? {
            return Ok(());
        }
        let part = home.parent.part_on(&copy.branch).ok_or(Errno::ESTALE)?;
        let layer = &copy.branch.layer;
        let before = layer.getattr(&OWN, &part.node, None)?;
        self.mark_home(&home.parent, &part)?;
        let linked = layer.link(&OWN, &copy.node, None, &part.node, Name::new(&home.name)?)?;
        self.hardlinks.journal.linked(own);
        layer.adopt(&copy.node, &linked.node);
        self.tidy_parent(&part, &part, &before);
        Ok(())
    }

    /// Replaces the original's entry in the hard-link index by the copy.
    fn index_copy(&self, own: FileId, copy: &Part, entry: &[u8]) -> Result<()> {
        let (layer, directory, name) = (&copy.branch.layer, index_directory(&copy.branch)?, Name::new(entry)?);
        match layer.lookup(&OWN, &directory, name) {
            Ok(found) if found.attr.id == copy.id => {}
            // The entry of an older copy that no name shows any more.
            Ok(_) => {
                layer.unlink(&OWN, &directory, name)?;
                layer.link(&OWN, &copy.node, None, &directory, name)?;
            }
            Err(Errno::ENOENT) => drop(layer.link(&OWN, &copy.node, None, &directory, name)?),
            Err(error) => return Err(error),
        }
        self.hardlinks.journal.linked(own);
        if let Some(id) = self.moving_id(own) {
            self.hardlinks.is_now_on(id, copy);
        }
        Ok(())
    }

    /// The part that is shown instead of a part found by a look-up.
    pub(crate) fn shown_for(&self, id: FileId, part: &Part) -> Result<Option<Part>> {
        let stand_in = self.hardlinks.stand_in(part)?;
        match self.hardlinks.copy(id, part.branch.index())? {
            Some(copy) => Ok(Some(self.hardlinks.stand_in(&copy)?.unwrap_or(copy))),
            None => Ok(stand_in),
        }
    }
}
