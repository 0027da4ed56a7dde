//! Operations that create, move and remove names, and remove the file with its last name.
//!
//! Called by the layer. Invariants: an operation that creates, removes or replaces a name holds the
//! lock of that name ([`NameLocks`]), so that the file that was looked up is the file that is
//! removed; a file's link count is read under its lock, which every operation of the cage that adds
//! or removes one of its names holds.

use super::{
    CageShared,
    books::{Short, Source},
    inodes::{Inode, InodeState, lock_both},
    ledger::Owner,
    saved::SOMEWHERE,
};
use nacre_vfs::{AnyOpen, Attr, Caller, Entry, Errno, FileId, Kind, Name, Node, RenameFlags, Result};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;

/// Maximum number of blocks that a new name may cost its directory: a split makes two.
const GROWTH: u64 = 2;

/// Locks of names, by a digest of directory and name.
#[derive(Default)]
pub(super) struct NameLocks([Mutex<()>; 32]);

impl NameLocks {
    fn place(&self, parent: FileId, name: &[u8]) -> usize {
        // FNV-1a.
        let mut digest = 0xcbf2_9ce4_8422_2325_u64 ^ parent.ino;
        for byte in name {
            digest = (digest ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        usize::try_from(digest >> 32).unwrap_or(0) % self.0.len()
    }

    fn lock(&self, places: &[(FileId, Name<'_>)]) -> Vec<MutexGuard<'_, ()>> {
        let mut places: Vec<usize> = places.iter().map(|(parent, name)| self.place(*parent, name.bytes())).collect();
        places.sort_unstable();
        places.dedup();
        places.into_iter().filter_map(|place| self.0.get(place)).map(Mutex::lock).collect()
    }
}

/// Space booked for a file that is about to be created: released if it is not created.
pub(super) struct Reserve<'a> {
    shared: &'a CageShared,
    owner: Owner,
    bytes: u64,
    inodes: u64,
}

impl<'a> Reserve<'a> {
    pub(super) fn new(shared: &'a CageShared, owner: Owner, bytes: u64, inodes: u64) -> Result<Reserve<'a>> {
        shared.obtain(owner, bytes, inodes)?;
        Ok(Reserve { shared, owner, bytes, inodes })
    }

    /// Reserves space without waiting for write-back; `None` where dirty data would have to arrive
    /// first.
    fn at_once(shared: &'a CageShared, owner: Owner, bytes: u64) -> Result<Option<Reserve<'a>>> {
        let mut round = 0;
        loop {
            match shared.take(owner, bytes, 0, Source::Call) {
                Ok(()) => return Ok(Some(Reserve { shared, owner, bytes, inodes: 0 })),
                Err(Short::Unsettled) => return Ok(None),
                Err(short) => shared.relieve(short, owner, bytes, round)?,
            }
            round += 1;
        }
    }

    /// Converts the reservation into the booked cost of the created file: `bytes` of `owner`. The
    /// caller holds off checkpoints.
    fn become_file(mut self, owner: Owner, bytes: u64) {
        self.shared.ledger.force_transfer(self.owner, owner, self.bytes, self.inodes);
        self.shared.ledger.correct(owner, self.bytes, bytes);
        (self.bytes, self.inodes) = (0, 0);
    }
}

impl Drop for Reserve<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 || self.inodes > 0 {
            self.shared.ledger.release(self.owner, self.bytes, self.inodes);
        }
    }
}

/// A directory that is about to get or lose a name, where its cost can change by that.
pub(super) struct Changing<'a> {
    shared: &'a CageShared,
    node: &'a Node,
    inode: Option<Arc<Inode>>,
    _growth: Option<Reserve<'a>>,
}

impl<'a> Changing<'a> {
    /// Starts the change. `grows`: a name is to be added, for which there has to be room.
    pub(super) fn begin(shared: &'a CageShared, node: &'a Node, grows: bool) -> Result<Changing<'a>> {
        Changing::with(
            shared,
            node,
            |owner, bytes| if grows { Reserve::new(shared, owner, bytes, 0).map(Some) } else { Ok(None) },
        )
    }

    /// Starts the change for a new name of an existing file: the caller of such an operation holds
    /// the file's lock, which write-back may need. So this does not wait for write-back; the
    /// directory's growth is then booked afterwards, above any limit.
    pub(super) fn begin_with_file(shared: &'a CageShared, node: &'a Node, grows: bool) -> Result<Changing<'a>> {
        Changing::with(
            shared,
            node,
            |owner, bytes| if grows { Reserve::at_once(shared, owner, bytes) } else { Ok(None) },
        )
    }

    fn with(
        shared: &'a CageShared,
        node: &'a Node,
        growth: impl FnOnce(Owner, u64) -> Result<Option<Reserve<'a>>>,
    ) -> Result<Changing<'a>> {
        if !shared.directories_cost {
            return Ok(Changing { shared, node, inode: None, _growth: None });
        }
        let inode = shared.inodes.get(shared.below.id(node)?);
        if inode.id == shared.root {
            return Ok(Changing { shared, node, inode: None, _growth: None });
        }
        let owner = {
            let mut state = inode.lock();
            if !state.loaded {
                let attr = shared.below.getattr(&Caller::ROOT, node, None)?;
                shared.load(&mut state, node, &attr);
            }
            state.owner
        };
        let growth = growth(owner, GROWTH * shared.rule.unit)?;
        Ok(Changing { shared, node, inode: Some(inode), _growth: growth })
    }
}

impl Drop for Changing<'_> {
    /// Books the directory's current cost after the change, successful or not, before the
    /// reservation is released.
    fn drop(&mut self) {
        if let Some(inode) = &self.inode {
            let mut state = inode.lock();
            if state.loaded && !state.gone {
                self.shared.refresh(inode, &mut state, self.node, None);
            }
        }
    }
}

impl CageShared {
    /// Books a file that has just been created, replacing its reservation.
    pub(super) fn born(&self, entry: &Entry, group: Option<usize>, named: bool, reserve: Reserve<'_>) -> Arc<Inode> {
        self.background.belongs(&entry.attr.id);
        let inode = self.inodes.get(entry.attr.id);
        let mut state = inode.lock();
        let changing = self.locks.changing.read();
        // Another thread may have found and changed the new file before this: then its content is
        // booked already, and only the file itself remains to be booked.
        let mut empty = entry.attr.kind == Kind::File;
        if !state.loaded {
            empty = false;
            let (handles, writers, appenders, writeback) =
                (state.handles, state.writers, state.appenders, state.writeback);
            let generation = state.generation;
            *state = InodeState { handles, writers, appenders, writeback, generation, ..InodeState::default() };
            state.loaded = true;
            state.node = Some(entry.node.clone());
            state.kind = Some(entry.attr.kind);
            state.owner = Owner { uid: entry.attr.uid, group };
            state.size = entry.attr.size;
            state.gone = !named;
            // Recorded as nonexistent before.
            self.touch(&inode, &mut state);
            state.kept = self.keeps(&entry.node, &entry.attr);
            state.cost = self.rule.cost(&entry.attr, state.kept);
        }
        state.counted = true;
        state.gone = !named;
        if !named {
            self.doors.lost_name(inode.id, self.clock.now());
        }
        reserve.become_file(state.owner, if empty { 0 } else { state.cost });
        self.settle_account(&inode, &state);
        drop(changing);
        drop(state);
        self.look_at_room();
        inode
    }

    /// Locks one name. No thread waits for write-back or makes room while holding it.
    pub(super) fn lock_name(&self, parent: &Node, name: Name<'_>) -> Result<Vec<MutexGuard<'_, ()>>> {
        Ok(self.locks.names.lock(&[(self.below.id(parent)?, name)]))
    }

    /// Creates a file that is neither regular nor open.
    pub(super) fn make(
        &self,
        caller: &Caller,
        (parent, name): (&Node, Name<'_>),
        bytes: u64,
        call: impl FnOnce() -> Result<Entry>,
    ) -> Result<Entry> {
        let _naming = self.locks.naming.read();
        let group = self.group(parent);
        let _parent = Changing::begin(self, parent, true)?;
        let reserve = Reserve::new(self, Owner { uid: caller.uid, group }, bytes, 1)?;
        let _name = self.lock_name(parent, name)?;
        let entry = call()?;
        self.born(&entry, group, true, reserve);
        Ok(entry)
    }

    /// Looks up a name under its file's lock: returns the current attributes, and loads the state.
    fn settle_entry(
        &self,
        inode: &Inode,
        state: &mut InodeState,
        caller: &Caller,
        (parent, name): (&Node, Name<'_>),
    ) -> Result<Entry> {
        let entry = self.below.lookup(caller, parent, name)?;
        if entry.attr.id != inode.id {
            // Replaced from outside; the kernel looks again.
            return Err(Errno::ESTALE);
        }
        if !state.loaded {
            self.load(state, &entry.node, &entry.attr);
        }
        if state.node.is_none() {
            state.node = Some(entry.node.clone());
        }
        Ok(entry)
    }

    /// Books the removal of a name of a file that had `attr` before.
    fn lost_name(&self, inode: &Inode, state: &mut InodeState, attr: &Attr) {
        if attr.kind != Kind::Directory && attr.nlink > 1 {
            // The recorded path may be the removed name.
            if let Some(saved) = &self.saved {
                self.note(saved, inode.id, SOMEWHERE, state);
            }
            return;
        }
        state.gone = true;
        if state.handles == 0 {
            self.free(inode, state);
        } else {
            self.doors.lost_name(inode.id, self.clock.now());
        }
    }

    pub(super) fn remove(&self, caller: &Caller, parent: &Node, name: Name<'_>, directory: bool) -> Result<()> {
        self.remove_if(caller, parent, name, directory, |_, _| true)
    }

    /// Removes a name, unless another file has it by now, or `wanted` refuses the file's state and
    /// attributes.
    ///
    /// # Errors
    /// ESTALE if `wanted` refuses; else as the layer below.
    pub(super) fn remove_if(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        directory: bool,
        wanted: impl FnOnce(&InodeState, &Attr) -> bool,
    ) -> Result<()> {
        let call =
            || if directory { self.below.rmdir(caller, parent, name) } else { self.below.unlink(caller, parent, name) };
        self.background.own_name(name);
        let _name = self.lock_name(parent, name)?;
        let found = self.below.lookup(caller, parent, name)?;
        if (found.attr.kind == Kind::Directory) != directory {
            // The layer below refuses, with its own error.
            return call();
        }
        let _parent = Changing::begin(self, parent, false)?;
        let inode = self.inodes.get(found.attr.id);
        let mut state = inode.lock();
        let entry = self.settle_entry(&inode, &mut state, caller, (parent, name))?;
        if !wanted(&state, &entry.attr) {
            return Err(Errno::ESTALE);
        }
        self.touch(&inode, &mut state);
        call()?;
        self.lost_name(&inode, &mut state, &entry.attr);
        if directory {
            self.dirs.found.write().remove(&inode.id);
        }
        Ok(())
    }

    pub(super) fn add_link(
        &self,
        caller: &Caller,
        node: &Node,
        file: AnyOpen<'_>,
        parent: &Node,
        name: Name<'_>,
    ) -> Result<Entry> {
        self.background.own_name(name);
        let _naming = self.locks.naming.read();
        let group = self.group(parent);
        let _parent = Changing::begin_with_file(self, parent, true)?;
        let _name = self.lock_name(parent, name)?;
        let inode = self.inodes.get(self.below.id(node)?);
        let mut state = inode.lock();
        if !state.loaded {
            let attr = self.below.getattr(caller, node, file)?;
            self.load(&mut state, node, &attr);
        }
        if state.owner.group != group {
            if !state.gone {
                return Err(Errno::EXDEV);
            }
            // It had no name, so it belonged to the group of the directory in which it was created.
            let owner = Owner { group, ..state.owner };
            self.try_give(&inode, &mut state, owner).map_err(|full| self.refuse(full))?;
        }
        let entry = self.below.link(caller, node, file, parent, name)?;
        if state.gone {
            state.gone = false;
            self.doors.not_nameless(&inode.id);
            state.node = Some(entry.node.clone());
            // It has a path now that survives a crash.
            state.generation = None;
            let _changing = self.locks.changing.read();
            self.touch(&inode, &mut state);
        }
        Ok(entry)
    }

    pub(super) fn move_name(
        &self,
        caller: &Caller,
        (parent, name): (&Node, Name<'_>),
        (new_parent, new_name): (&Node, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let call = || self.below.rename(caller, parent, name, new_parent, new_name, flags);
        self.background.own_name(name);
        self.background.own_name(new_name);
        // Also for directories that move: a running recount learns of the move before it can end.
        let _naming = self.locks.naming.read();
        let groups = (self.group(parent), self.group(new_parent));
        let _old = Changing::begin(self, parent, false)?;
        // A rename within a directory (like log rotation) often happens because the cage is full:
        // growth of the directory by a longer name is booked afterwards, above any limit.
        let elsewhere = self.below.id(parent)? != self.below.id(new_parent)?;
        let _new = Changing::begin_with_file(self, new_parent, elsewhere)?;
        let whiteout = if flags.has(RenameFlags::WHITEOUT) {
            Some(Reserve::new(self, Owner { uid: caller.uid, group: groups.0 }, 0, 1)?)
        } else {
            None
        };
        let places = [(self.below.id(parent)?, name), (self.below.id(new_parent)?, new_name)];
        let _names = self.locks.names.lock(&places);
        let Ok(source) = self.below.lookup(caller, parent, name) else { return call() };
        let target = match self.below.lookup(caller, new_parent, new_name) {
            Ok(target) => Some(target),
            Err(Errno::ENOENT) => None,
            Err(_) => return call(),
        };
        let exchange = flags.has(RenameFlags::EXCHANGE);
        if target.is_none() && exchange || target.is_some() && flags.has(RenameFlags::NOREPLACE) {
            return call();
        }
        self.may_move(&source, groups, (new_parent, new_name))?;
        if let Some(target) = target.as_ref().filter(|_| exchange) {
            self.may_move(target, (groups.1, groups.0), (parent, name))?;
        }
        let inode = self.inodes.get(source.attr.id);
        let other = target.as_ref().map(|target| self.inodes.get(target.attr.id));
        {
            let mut both = lock_both(&inode, other.as_deref());
            self.settle_entry(&inode, &mut both.first, caller, (parent, name))?;
            let replaced = match (&mut both.second, &other) {
                (Some(state), Some(other)) => Some(self.settle_entry(other, state, caller, (new_parent, new_name))?),
                _ => None,
            };
            let other_collects = exchange && both.second.as_ref().is_some_and(|state| self.collects_appends(state));
            if groups.0 != groups.1 && (self.collects_appends(&both.first) || other_collects) {
                return Err(Errno::EXDEV);
            }
            self.touch(&inode, &mut both.first);
            if let (Some(state), Some(other)) = (&mut both.second, &other) {
                self.touch(other, state);
            }
            let (stays, moves) = (both.first.owner, Owner { group: groups.1, ..both.first.owner });
            self.try_give(&inode, &mut both.first, moves).map_err(|full| self.refuse(full))?;
            if exchange && let (Some(state), Some(other)) = (&mut both.second, &other) {
                let owner = Owner { group: groups.0, ..state.owner };
                if let Err(full) = self.try_give(other, state, owner) {
                    self.give(&inode, &mut both.first, stays);
                    return Err(self.refuse(full));
                }
            }
            if let Err(error) = call() {
                self.give(&inode, &mut both.first, stays);
                if exchange && let (Some(state), Some(other)) = (&mut both.second, &other) {
                    let owner = Owner { group: groups.1, ..state.owner };
                    self.give(other, state, owner);
                }
                return Err(error);
            }
            self.moved(&inode, &mut both.first, caller, (new_parent, new_name));
            if let (Some(state), Some(other), Some(replaced)) = (&mut both.second, &other, &replaced) {
                if exchange {
                    self.moved(other, state, caller, (parent, name));
                } else {
                    self.lost_name(other, state, &replaced.attr);
                }
            }
        }
        if let Some(reserve) = whiteout
            && let Ok(entry) = self.below.lookup(caller, parent, name)
        {
            self.born(&entry, groups.0, true, reserve);
        }
        Ok(())
    }

    /// Whether appends to a file may arrive that were booked in the whole cage alone: no limit of a directory or user
    /// would hold for them. Where the kernel opens files without requests, all writes are announced in a cage with such limits.
    pub(super) fn collects_appends(&self, state: &InodeState) -> bool {
        state.writeback > 0 && self.doors.writeback.get().is_some_and(|writeback| !writeback.opens_unasked())
    }

    /// Whether a file may get a name in another group. Directories and files with several names may
    /// not, like with project quotas, and a directory with a limit keeps its path, as do its
    /// parents.
    fn may_move(
        &self,
        entry: &Entry,
        (from, to): (Option<usize>, Option<usize>),
        (parent, name): (&Node, Name<'_>),
    ) -> Result<()> {
        if entry.attr.kind == Kind::Directory && !self.dirs.paths.is_empty() {
            let holds = |path: &[u8]| {
                let below = |dir: &Vec<u8>| {
                    dir.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
                };
                self.dirs.paths.iter().any(below)
            };
            if holds(&self.below.path(&entry.node).unwrap_or_default()) {
                return Err(Errno::EBUSY);
            }
            // Its content belongs to no limit, and would come under one. A copy is counted.
            let mut place = self.below.path(parent).unwrap_or_default();
            if !place.is_empty() {
                place.push(b'/');
            }
            place.extend_from_slice(name.bytes());
            if holds(&place) {
                return Err(Errno::EXDEV);
            }
        }
        if from != to && (entry.attr.kind == Kind::Directory || entry.attr.nlink > 1) {
            Err(Errno::EXDEV)
        } else {
            Ok(())
        }
    }

    /// Updates the recorded path of a moved file.
    fn moved(&self, inode: &Inode, state: &mut InodeState, caller: &Caller, (parent, name): (&Node, Name<'_>)) {
        let Ok(fresh) = self.below.lookup(caller, parent, name) else {
            self.background.doubt();
            return;
        };
        if let Some(saved) = &self.saved {
            let place = if fresh.attr.kind == Kind::Directory { None } else { self.below.path(&fresh.node) };
            self.note(saved, inode.id, place.as_deref().unwrap_or(SOMEWHERE), state);
        }
        state.node = Some(fresh.node.clone());
        if fresh.attr.kind == Kind::File {
            // Some file systems write out a file that replaces another one (ext4), which can cost
            // it a block.
            self.learn(inode, state, &fresh.node, &fresh.attr);
        }
        if fresh.attr.kind == Kind::Directory {
            // The paths of all files below have changed.
            self.background.directory_moved(&fresh.node, state.owner.group);
        }
    }

    /// Checks whether a new directory is one with a limit.
    pub(super) fn new_directory(&self, entry: &Entry) {
        if let Some(group) = self.group(&entry.node)
            && let Some(path) = self.below.path(&entry.node)
            && self.dirs.paths.get(group).is_some_and(|dir| *dir == path)
        {
            self.dirs.found.write().insert(entry.attr.id, group);
            let inode = self.inodes.get(entry.attr.id);
            let mut state = inode.lock();
            let owner = Owner { group: Some(group), ..state.owner };
            self.give(&inode, &mut state, owner);
        }
    }
}
