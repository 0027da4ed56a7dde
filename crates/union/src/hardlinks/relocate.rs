//! Moving a file with several names to another branch: all names together, or none.
//!
//! Called for a file with several names by `relocate.rs` of the crate, for drains, tiers and commands. The
//! names are found by one scan of the whole branch, which serves all files of a run; its result is verified
//! with all locks held. A file is not moved as long as one of its names is not visible in the union: outside of
//! the branch's directory, or hidden by a branch above. `hardlinks/journal.rs` describes how names change
//! branches.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    copy_up::{Built, Original, Pace},
    hardlinks::{index::write_count, journal::StandIn},
    identity::Identities,
    node::{NodePlace, Part, UnionNode, lock_names},
    relocate::{Goal, Stay},
};
use hashbrown::HashMap;
use nacre_vfs::{Attr, DirEntry, DirSink, Errno, FileId, Kind, Name, Node, Result};
use parking_lot::{RwLock, RwLockWriteGuard};
use std::sync::{Arc, atomic::Ordering};

/// Maximal number of names recorded from one branch.
const NAMES_MAX: usize = 1_000_000;
/// Maximal number of names that change branches at once.
const TOGETHER: usize = 10_000;
/// Names read in one call.
const PAGE: usize = 1024;

/// A name in a directory of the union.
pub(crate) struct HardlinkName {
    pub(crate) parent: Arc<UnionNode>,
    pub(crate) name: Vec<u8>,
}

/// Locks directories against listing, each once, in a fixed order.
pub(crate) fn lock_listings<'a>(directories: &[&'a Arc<UnionNode>]) -> Vec<RwLockWriteGuard<'a, ()>> {
    let mut locks: Vec<&'a RwLock<()>> = directories.iter().map(|directory| &directory.listing).collect();
    locks.sort_by_key(|lock| std::ptr::from_ref::<RwLock<()>>(lock));
    locks.dedup_by_key(|lock| std::ptr::from_ref::<RwLock<()>>(lock));
    locks.into_iter().map(RwLock::write).collect()
}

/// The names of a branch's files with several names.
#[derive(Default)]
pub(crate) struct LinkScan {
    names: HashMap<FileId, Vec<Vec<u8>>>,
    count: usize,
}

/// The scans of several branches, by slot.
pub(crate) type Scans = HashMap<u8, LinkScan>;

/// An entry of a directory as `readdir` reported it.
struct ScannedEntry {
    name: Vec<u8>,
    kind: Option<Kind>,
    file: Option<(Node, Attr)>,
}

#[derive(Default)]
struct ScanPage {
    entries: Vec<ScannedEntry>,
    next: u64,
}

impl DirSink for ScanPage {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.entries.len() == PAGE {
            return false;
        }
        self.next = entry.next;
        let file = entry.entry.map(|found| (found.node, found.attr));
        self.entries.push(ScannedEntry { name: entry.name.bytes().to_vec(), kind: entry.kind, file });
        true
    }
}

impl LinkScan {
    /// Scans a branch, for all files or for one by its own inode number; `None` if `go_on` returned false.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn of(
        branch: &Branch,
        only: Option<(&Identities, FileId)>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<LinkScan>> {
        let mut scan = LinkScan::default();
        let mut waiting = vec![(branch.root.clone(), Vec::new())];
        let mut page = ScanPage::default();
        while let Some((directory, path)) = waiting.pop() {
            page.next = 0;
            loop {
                if !go_on() {
                    return Ok(None);
                }
                page.entries.clear();
                match branch.layer.readdir(&OWN, &directory, page.next, true, &mut page) {
                    // Removed meanwhile.
                    Err(Errno::ENOENT | Errno::ESTALE) => break,
                    other => other?,
                }
                if page.entries.is_empty() {
                    break;
                }
                for entry in page.entries.drain(..) {
                    scan.entry(branch, only, &directory, &path, entry, &mut waiting)?;
                }
            }
        }
        Ok(Some(scan))
    }

    fn entry(
        &mut self,
        branch: &Branch,
        only: Option<(&Identities, FileId)>,
        directory: &Node,
        path: &[u8],
        ScannedEntry { name, kind, file }: ScannedEntry,
        waiting: &mut Vec<(Node, Vec<u8>)>,
    ) -> Result<()> {
        if crate::marks::is_reserved(&name) {
            return Ok(());
        }
        let (node, attr) = match file {
            Some(told) => told,
            None => match branch.layer.lookup(&OWN, directory, Name::new(&name)?) {
                Ok(found) => (found.node, found.attr),
                Err(Errno::ENOENT | Errno::ESTALE) => return Ok(()),
                Err(error) => return Err(error),
            },
        };
        let mut whole = path.to_vec();
        if !whole.is_empty() {
            whole.push(b'/');
        }
        whole.extend_from_slice(&name);
        if kind == Some(Kind::Directory) || attr.kind == Kind::Directory {
            waiting.push((node, whole));
            return Ok(());
        }
        let wanted = only.is_none_or(|(identities, own)| identities.of(attr.id) == own);
        if wanted && (attr.nlink > 1 || only.is_some()) && self.count < NAMES_MAX {
            self.count += 1;
            self.names.entry(attr.id).or_default().push(whole);
        }
        Ok(())
    }

    /// All names found.
    pub(crate) fn into_names(self) -> impl Iterator<Item = Vec<u8>> {
        self.names.into_values().flatten()
    }
}

impl UnionShared {
    /// Moves a file with all its names, as [`UnionShared::relocate`] moves a file with one name.
    ///
    /// # Errors
    /// The reason why the file stays.
    pub(crate) fn relocate_all(
        self: &Arc<UnionShared>,
        node: &Arc<UnionNode>,
        goal: &Goal,
        pace: Pace<'_>,
        scans: &mut Scans,
    ) -> std::result::Result<u64, Stay> {
        match self.relocate(node, goal, pace) {
            Err(Stay::Names(_)) => {}
            other => return other,
        }
        let branch = node.top()?.branch;
        let scan = match scans.entry(branch.slot) {
            hashbrown::hash_map::Entry::Occupied(known) => known.into_mut(),
            hashbrown::hash_map::Entry::Vacant(place) => {
                let scan = LinkScan::of(&branch, None, &mut || !self.membership.is_wanted())?;
                place.insert(scan.ok_or(Stay::Stopped)?)
            }
        };
        self.relocate_linked(node, goal, pace, scan)
    }

    fn relocate_linked(
        self: &Arc<UnionShared>,
        node: &Arc<UnionNode>,
        goal: &Goal,
        pace: Pace<'_>,
        scan: &LinkScan,
    ) -> std::result::Result<u64, Stay> {
        self.settled(node.id)?;
        let (top, attr, changes) = {
            let _still = node.copying.lock();
            let top = node.top()?;
            let attr = self.free_to_go(node, &top)?;
            (top, attr, node.changes.load(Ordering::Acquire))
        };
        let original = Original { node, part: &top, attr: &attr };
        let below = self.indexed_names(node, &top, &attr)?;
        let homes = self.homes(original, scan, below.is_some())?;
        let target = self.target_of_all(&homes, &top, goal, &attr, below.is_some())?;
        for home in &homes {
            self.grow(&home.parent, &target)?;
        }
        let built = self.build_at_leisure(original, &target, pace)?;
        let counted = below.map_or(Ok(()), |below| write_count(&target, &built.part.node, below));
        let moved =
            counted.map_err(Stay::from).and_then(|()| self.switch_all(original, changes, &homes, &built, below));
        if moved.is_err() {
            self.discard(&built);
        }
        moved.map(|()| attr.size)
    }

    /// The node of a file whose copy is in the index.
    pub(crate) fn indexed_node(&self, id: FileId) -> Result<Option<Arc<UnionNode>>> {
        let _branches = self.gate.read();
        let Some(copy) = self.hardlinks.indexed(id) else { return Ok(None) };
        let kind = copy.branch.layer.getattr(&OWN, &copy.node, None)?.kind;
        let floor = copy.branch.index();
        let node = self.nodes.get(crate::node::Known { id, kind, parts: vec![copy], floor });
        self.tell_unheard(&node);
        Ok(Some(node))
    }

    /// The name count of a file in the hard-link index, if the index of its branch has it.
    fn indexed_names(&self, node: &UnionNode, top: &Part, attr: &Attr) -> std::result::Result<Option<u32>, Stay> {
        // Another file may get the same inode number later and must not be confused with this one.
        if top.id.generation == 0 {
            return Err(Stay::Unsure(attr.nlink));
        }
        match self.hardlinks.copy_on(node.id, &top.branch) {
            Some((below, true)) => Ok(Some(below)),
            Some((_, false)) => Err(Stay::Names(attr.nlink)),
            None => Ok(None),
        }
    }

    /// The directories and names of a file, if every one is visible.
    fn homes(
        &self,
        Original { part: top, attr, .. }: Original<'_>,
        scan: &LinkScan,
        indexed: bool,
    ) -> std::result::Result<Vec<HardlinkName>, Stay> {
        let none = Vec::new();
        let paths = scan.names.get(&top.id).unwrap_or(&none);
        let total = attr.nlink.saturating_sub(u32::from(indexed));
        let mut homes = Vec::new();
        for path in paths.iter().take(TOGETHER) {
            let Some(home) = self.home_of(path)? else { continue };
            let is_plain =
                std::iter::successors(Some(Arc::clone(&home.parent)), |at| at.place().map(|place| place.parent));
            if is_plain.into_iter().any(|at| at.is_redirected()) {
                continue;
            }
            let is_seen = {
                let _names = home.parent.names.read();
                self.leads_to(&home, top)?
            };
            if is_seen {
                homes.push(home);
            }
        }
        let here = u32::try_from(homes.len()).unwrap_or(u32::MAX);
        if here == total {
            Ok(homes)
        } else {
            Err(Stay::Elsewhere { names: total, outside: total.saturating_sub(here) })
        }
    }

    /// Whether a name shows a part. The names of its directory are locked.
    fn leads_to(&self, home: &HardlinkName, part: &Part) -> Result<bool> {
        let found = self.sight(&OWN, &home.parent.view(), Name::new(&home.name)?)?.found;
        let seen = found.as_ref().map(|found| found.top()).transpose()?;
        Ok(seen.is_some_and(|seen| seen.branch.slot == part.branch.slot && seen.id == part.id))
    }

    /// The branch to which all names can move.
    fn target_of_all(
        &self,
        homes: &[HardlinkName],
        top: &Part,
        goal: &Goal,
        attr: &Attr,
        indexed: bool,
    ) -> std::result::Result<Arc<Branch>, Stay> {
        let mut limit = self.branches().len().saturating_sub(1);
        for home in homes {
            let place = NodePlace { parent: Arc::clone(&home.parent), name: home.name.clone().into() };
            limit = limit.min(self.limit_elsewhere(&place, top)?);
        }
        if indexed {
            // Names on read-only branches show only copies above them.
            let below = self
                .branches()
                .iter()
                .find(|branch| branch.index() > top.branch.index() && !branch.is_writable())
                .map(|low| low.index());
            limit = below.map_or(limit, |below| limit.min(below.saturating_sub(1)));
        }
        let fits = |branch: &Arc<Branch>| Ok::<_, Errno>(self.room(branch)? > attr.size);
        if let Goal::Branch(branch) = goal {
            let seen =
                branch.slot != top.branch.slot && branch.is_member() && branch.index() <= limit && branch.is_writable();
            return if seen && fits(branch)? { Ok(Arc::clone(branch)) } else { Err(Stay::NoRoom) };
        }
        if let Some(home) = homes.first()
            && let Ok(branch) = self.branch_for_new(&home.parent, Some(Name::new(&home.name)?), false, limit)
            && branch.slot != top.branch.slot
            && fits(&branch)?
        {
            return Ok(branch);
        }
        Ok(self.most_room(limit, &top.branch, attr.size)?)
    }

    /// Performs the last step: with all locks held, nothing may have changed.
    fn switch_all(
        self: &Arc<UnionShared>,
        original: Original<'_>,
        changes: u64,
        homes: &[HardlinkName],
        built: &Built,
        below: Option<u32>,
    ) -> std::result::Result<(), Stay> {
        let Original { node, part: top, .. } = original;
        let _alone = node.copying.lock();
        let _unwritten = node.moving.write();
        self.unchanged(original, changes, |now| self.free_to_go(node, now))?;
        let parents: Vec<_> = homes.iter().map(|home| &home.parent).collect();
        let _unlisted = lock_listings(&parents);
        let _names = lock_names(&parents);
        for home in homes {
            let is_there = !home.parent.is_gone() && home.parent.part_on(&built.part.branch).is_some();
            if !is_there || !self.leads_to(home, top)? {
                return Err(Stay::Changed);
            }
        }
        if self.hardlinks.copy_on(node.id, &top.branch).map(|(below, _)| below) != below {
            return Err(Stay::Changed);
        }
        let mut paths = Vec::with_capacity(homes.len());
        for home in homes {
            paths.push(crate::node::path_in(&home.parent, &home.name));
        }
        let names = u32::try_from(homes.len()).unwrap_or(u32::MAX).saturating_add(u32::from(below.is_some()));
        self.hardlinks.stand_for(&StandIn {
            id: node.id,
            original: top,
            copy: &built.part,
            temporary: built.name()?,
            paths: &paths,
            names,
            sync: self.options.sync,
        })?;
        // From now on every name shows the copy.
        self.now_on(node, &built.part);
        let own = self.identities.of(top.id);
        let done = self.carry_names(own, &built.part, homes).and_then(|all| match all {
            true => self.hardlinks.stands_alone(own, &built.part),
            // Some names were not among the counted ones.
            false => Err(Errno::EBUSY),
        });
        self.hardlinks.journal.set_active(own, false);
        Ok(done?)
    }
}
