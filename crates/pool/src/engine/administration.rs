//! What `fs` commands change: datasets, snapshots, clones, rollback, promote, destroy, rename, holds, bookmarks.
//!
//! Invariants: each is part of one commit, so it is durable when it returns and never seen in part; what is refused has changed nothing.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Admin, Dataset, Pool, find};
use crate::catalog::{BookmarkRow, DatasetRow, SnapshotRow};
use crate::deadlist::{Dead, ListId, Point};
use crate::error::PoolError;
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::{Extent, Xattr, keys};
use crate::space::{Change, Limits, Purpose, Usage};
use crate::tree::{Context, walk::Visitor, walk::walk};

/// A dataset that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDataset {
    /// The dataset above it.
    pub parent: u64,
    /// The last part of its name.
    pub name: String,
}

fn refused<T>(why: String) -> Result<T, PoolError> {
    Err(PoolError::Refused(why))
}

impl Pool {
    /// The dataset that has the pool's name.
    pub(super) fn create_root(&self, name: &str) -> Result<u64, PoolError> {
        self.make(0, name)
    }

    /// Makes an empty file system; answers its number.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the name exists.
    pub fn create_dataset(&self, new: &NewDataset) -> Result<u64, PoolError> {
        self.make(new.parent, &new.name)
    }

    fn make(&self, parent: u64, name: &str) -> Result<u64, PoolError> {
        // The files exist before the commit that enters them: it flushes and freezes them as those of any other dataset.
        let mut admin = self.admin.lock();
        if let Some(failed) = &admin.failed {
            return Err(failed.clone());
        }
        if parent != 0 && admin.catalog.child(parent, name)?.is_some() {
            return refused(format!("dataset '{name}' exists already"));
        }
        let id = admin.catalog.number()?;
        let dataset = Arc::new(Dataset::format(self, id)?);
        let list = admin.catalog.deadlists().create()?;
        let row = self.new_row(parent, name, list);
        admin.catalog.enter(id, &row)?;
        if parent == 0 {
            admin.forest = self.forest_of(&admin.catalog)?;
        } else {
            admin.forest.add(id, parent, Usage::default(), Limits::default())?;
        }
        self.datasets.write().insert(id, dataset);
        self.commit_under(&mut admin, |admin, txg| {
            let mut row = admin.catalog.dataset(id)?;
            row.created = txg;
            admin.catalog.set_dataset(id, &row)
        })?;
        Ok(id)
    }

    fn new_row(&self, parent: u64, name: &str, list: ListId) -> DatasetRow {
        DatasetRow {
            parent,
            name: name.to_owned(),
            guid: (self.entropy)(),
            created: Txg(0),
            created_at: (self.clock)().seconds,
            root: None,
            list,
            usage: Usage::default(),
            origin: None,
            newest: Txg(0),
        }
    }

    /// Takes snapshots of several datasets at the same moment. Names are those behind the `@`.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where one exists or is named twice; [`PoolError::NoSpace`] where a refreservation asks for more than there is.
    pub fn snapshot(&self, wanted: &[(u64, String)]) -> Result<Txg, PoolError> {
        self.commit_with(|admin, txg| {
            let mut seen = std::collections::HashSet::new();
            for (id, name) in wanted {
                if !seen.insert(*id) {
                    return refused("two snapshots of one dataset at the same moment".to_owned());
                }
                if admin.catalog.snapshot_named(*id, name)?.is_some() {
                    return refused(format!("snapshot '@{name}' exists already"));
                }
            }
            let ids: Vec<u64> = wanted.iter().map(|(id, _)| *id).collect();
            admin.forest.take_snapshots(&ids)?.map_err(|_| PoolError::NoSpace)?;
            for (id, name) in wanted {
                let mut row = admin.catalog.dataset(*id)?;
                let snapshot = SnapshotRow {
                    name: name.clone(),
                    guid: (self.entropy)(),
                    created_at: (self.clock)().seconds,
                    root: row.root,
                    list: row.list,
                    referenced: row.usage.referenced,
                    deferred: false,
                    holds: 0,
                    clones: 0,
                };
                admin.catalog.enter_snapshot(*id, txg, &snapshot)?;
                admin.forest.count_snapshots(*id, 1)?;
                row.list = admin.catalog.deadlists().create()?;
                row.newest = txg;
                row.usage = admin.forest.usage(*id)?;
                admin.catalog.set_dataset(*id, &row)?;
            }
            Ok(txg)
        })
    }

    /// Destroys a snapshot; what only it holds is freed in the background. With `deferred` one that is held or has clones goes when the last of them does.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is not there, is held, or has clones.
    pub fn destroy_snapshot(&self, id: u64, name: &str, deferred: bool) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, name)? else { return refused(format!("there is no snapshot '@{name}'")) };
            let mut row = admin.catalog.snapshot(id, txg)?;
            if row.holds == 0 && row.clones == 0 {
                return admin.drop_snapshot(id, txg);
            }
            if !deferred {
                let why = if row.holds > 0 { "it is held" } else { "it has clones" };
                return refused(format!("snapshot '@{name}' cannot be destroyed: {why}"));
            }
            row.deferred = true;
            admin.catalog.set_snapshot(id, txg, &row)
        })
    }

    /// Sets or releases a hold. A snapshot whose destruction was deferred goes with its last hold.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the tag is there already, or is not.
    pub fn hold(&self, id: u64, name: &str, tag: &str, hold: bool) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, name)? else { return refused(format!("there is no snapshot '@{name}'")) };
            let there = admin.catalog.holds(id, txg)?.iter().any(|(there, _)| there == tag);
            if there == hold {
                return refused(if hold {
                    "tag already exists on this dataset".to_owned()
                } else {
                    "no such tag on this dataset".to_owned()
                });
            }
            admin.catalog.set_hold(id, txg, tag, hold.then(|| (self.clock)().seconds))?;
            admin.drop_if_due(id, txg)
        })
    }

    /// Makes a bookmark of a snapshot.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the snapshot is not there or the bookmark is.
    pub fn bookmark(&self, id: u64, snapshot: &str, name: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, snapshot)? else {
                return refused(format!("there is no snapshot '@{snapshot}'"));
            };
            if admin.catalog.bookmarks(id)?.iter().any(|(there, _)| there == name) {
                return refused(format!("bookmark '#{name}' exists already"));
            }
            let row = admin.catalog.snapshot(id, txg)?;
            admin.catalog.set_bookmark(id, name, Some(&BookmarkRow { txg, guid: row.guid, created_at: row.created_at }))
        })
    }

    /// Makes a file system that begins as a snapshot; answers its number. It takes no time and no space.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the snapshot is not there or the name is.
    pub fn clone_snapshot(&self, from: u64, snapshot: &str, new: &NewDataset) -> Result<u64, PoolError> {
        self.commit_with(|admin, txg| {
            let Some(origin) = admin.catalog.snapshot_named(from, snapshot)? else {
                return refused(format!("there is no snapshot '@{snapshot}'"));
            };
            if admin.catalog.child(new.parent, &new.name)?.is_some() {
                return refused(format!("dataset '{}' exists already", new.name));
            }
            let of = admin.catalog.snapshot(from, origin)?;
            let id = admin.catalog.number()?;
            let list = admin.catalog.deadlists().create()?;
            let usage = Usage { referenced: of.referenced, ..Usage::default() };
            let row = DatasetRow {
                created: txg,
                root: of.root,
                usage,
                origin: Some((from, origin)),
                newest: origin,
                ..self.new_row(new.parent, &new.name, list)
            };
            admin.catalog.enter(id, &row)?;
            admin.catalog.set_clone(from, origin, id, true)?;
            admin.forest.add(id, new.parent, usage, Limits::default())?;
            Ok(id)
        })
    }

    /// Makes a clone the owner of the snapshot that it came from, and of all older ones; what was the origin becomes the clone.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a dataset that is no clone, or where names of snapshots clash; [`PoolError::NoSpace`] where a quota above the clone
    /// cannot hold what moves.
    pub fn promote(&self, id: u64) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let mut row = admin.catalog.dataset(id)?;
            let Some((from, origin)) = row.origin else { return refused("not a cloned filesystem".to_owned()) };
            let mut old = admin.catalog.dataset(from)?;
            let moving: Vec<(Txg, SnapshotRow)> = admin.catalog.snapshots(from)?.into_iter().filter(|(txg, _)| *txg <= origin).collect();
            for (_, snapshot) in &moving {
                if admin.catalog.snapshot_named(id, &snapshot.name)?.is_some() {
                    return refused(format!("snapshot name '@{}' from origin conflicts with one of this dataset", snapshot.name));
                }
            }
            admin.charge_promotion(from, id, moving.len())?;
            for (txg, snapshot) in &moving {
                admin.move_snapshot(from, id, *txg, snapshot)?;
            }
            let count = i64::try_from(moving.len()).unwrap_or(i64::MAX);
            admin.forest.count_snapshots(from, -count)?;
            admin.forest.count_snapshots(id, count)?;
            admin.catalog.set_clone(id, origin, id, false)?;
            row.origin = old.origin;
            old.origin = Some((id, origin));
            admin.catalog.set_dataset(id, &row)?;
            admin.catalog.set_dataset(from, &old)?;
            admin.catalog.set_clone(id, origin, from, true)?;
            if let Some((above, txg)) = row.origin {
                admin.catalog.set_clone(above, txg, from, false)?;
                admin.catalog.set_clone(above, txg, id, true)?;
            }
            admin.note_usage(from)?;
            admin.note_usage(id)
        })
    }

    /// Makes a dataset what its newest snapshot is. Nobody may use it: it is closed before.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for another snapshot than the newest, or a dataset in use.
    pub fn roll_back(&self, id: u64, name: &str) -> Result<(), PoolError> {
        self.close_dataset(id)?;
        self.commit_with(|admin, txg| {
            let Some(to) = admin.catalog.snapshot_named(id, name)? else { return refused(format!("there is no snapshot '@{name}'")) };
            let mut row = admin.catalog.dataset(id)?;
            if row.newest != to {
                return refused(format!("'@{name}' is not the newest snapshot: those after it must be destroyed first"));
            }
            let snapshot = admin.catalog.snapshot(id, to)?;
            self.free_younger(row.root, to, txg)?;
            admin.catalog.deadlists().forget(row.list)?;
            row.root = snapshot.root;
            row.usage.referenced = snapshot.referenced;
            admin.catalog.set_dataset(id, &row)?;
            admin.recount(id)
        })
    }

    /// Destroys a dataset that has neither children nor snapshots. Nobody may use it: it is closed before.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where it has, is in use, or is the pool's own.
    pub fn destroy_dataset(&self, id: u64) -> Result<(), PoolError> {
        self.close_dataset(id)?;
        self.commit_with(|admin, txg| {
            if admin.catalog.head()?.root == id {
                return refused("the pool's own file system goes with the pool".to_owned());
            }
            if !admin.catalog.children(id)?.is_empty() {
                return refused("filesystem has children".to_owned());
            }
            if !admin.catalog.snapshots(id)?.is_empty() {
                return refused("filesystem has snapshots".to_owned());
            }
            let row = admin.catalog.dataset(id)?;
            self.free_younger(row.root, row.newest, txg)?;
            // What a clone let go of its origin's is the origin's.
            admin.catalog.deadlists().forget(row.list)?;
            let bookmarks = admin.catalog.bookmarks(id)?;
            for (name, _) in bookmarks {
                admin.catalog.set_bookmark(id, &name, None)?;
            }
            admin.forest.remove(id)?;
            admin.catalog.leave(id)?;
            if let Some((from, origin)) = row.origin {
                admin.catalog.set_clone(from, origin, id, false)?;
                admin.drop_if_due(from, origin)?;
            }
            Ok(())
        })
    }

    /// Gives a dataset another name or parent.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the name exists or the parent lies below it; [`PoolError::NoSpace`] for a quota of the new parent.
    pub fn rename_dataset(&self, id: u64, new: &NewDataset) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            if admin.catalog.child(new.parent, &new.name)?.is_some() {
                return refused(format!("dataset '{}' exists already", new.name));
            }
            if admin.catalog.dataset(id)?.parent != new.parent {
                admin.forest.reparent(id, new.parent)?.map_err(|_| PoolError::NoSpace)?;
            }
            admin.catalog.rename(id, new.parent, &new.name)
        })
    }

    /// Gives a snapshot another name.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the old one is not there or the new one is.
    pub fn rename_snapshot(&self, id: u64, old: &str, new: &str) -> Result<(), PoolError> {
        self.commit_with(|admin, _| {
            let Some(txg) = admin.catalog.snapshot_named(id, old)? else { return refused(format!("there is no snapshot '@{old}'")) };
            if admin.catalog.snapshot_named(id, new)?.is_some() {
                return refused(format!("snapshot '@{new}' exists already"));
            }
            let mut row = admin.catalog.snapshot(id, txg)?;
            admin.catalog.leave_snapshot(id, txg)?;
            new.clone_into(&mut row.name);
            admin.catalog.enter_snapshot(id, txg, &row)
        })
    }

    /// A dataset as the catalog has it, by its name.
    ///
    /// # Errors
    /// Those of the store.
    pub fn describe(&self, name: &str) -> Result<Option<(u64, DatasetRow)>, PoolError> {
        let admin = self.admin.lock();
        let Some(id) = find(&admin.catalog, name)? else { return Ok(None) };
        Ok(Some((id, admin.catalog.dataset(id)?)))
    }

    /// The snapshots of a dataset, the oldest first, each with what destroying it alone would free, bytes.
    ///
    /// # Errors
    /// Those of the store.
    pub fn snapshots(&self, id: u64) -> Result<Vec<(Txg, SnapshotRow, u64)>, PoolError> {
        let mut admin = self.admin.lock();
        let (history, own) = admin.catalog.history_of(id)?;
        let rows = admin.catalog.snapshots(id)?;
        let mut listed = Vec::new();
        for (position, (txg, row)) in rows.into_iter().enumerate() {
            let used = admin.catalog.deadlists().used_by_snapshot(&history, own + position)?;
            listed.push((txg, row, used));
        }
        Ok(listed)
    }

    /// What a dataset uses, and what it may still use, bytes.
    ///
    /// # Errors
    /// Those of the store.
    pub fn space(&self, id: u64) -> Result<(crate::space::Breakdown, Usage, u64), PoolError> {
        let admin = self.admin.lock();
        Ok((admin.forest.breakdown(id)?, admin.forest.usage(id)?, admin.forest.available(id)?))
    }

    /// Ends the use of a dataset.
    fn close_dataset(&self, id: u64) -> Result<(), PoolError> {
        self.commit()?;
        let mut datasets = self.datasets.write();
        if let Some(dataset) = datasets.remove(&id)
            && let Err(used) = Arc::try_unwrap(dataset)
        {
            datasets.insert(id, used);
            return refused("dataset is busy".to_owned());
        }
        Ok(())
    }

    /// Frees what a head has written since a snapshot.
    fn free_younger(&self, root: Option<Pointer>, since: Txg, txg: Txg) -> Result<(), PoolError> {
        let Some(root) = root else { return Ok(()) };
        let mut younger = Younger { since, found: HashMap::new() };
        walk(&Context { frames: &*self.frames, cache: &self.cache }, &root, since, &mut younger)?;
        for dead in younger.found.values() {
            self.release(dead, txg)?;
        }
        Ok(())
    }
}

/// Collects the frames of a tree that were born after a snapshot: its nodes, and what their rows name.
struct Younger {
    since: Txg,
    found: HashMap<(u32, u32), Dead>,
}

impl Younger {
    fn note(&mut self, pointer: &Pointer) {
        if pointer.birth > self.since {
            self.found.insert((pointer.segment, pointer.index), Dead::of(pointer, false));
        }
    }
}

impl Visitor for Younger {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        debug_assert!(matches!(pointer.kind, FrameKind::Leaf | FrameKind::Inner));
        self.note(pointer);
        Ok(true)
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        match key.first() {
            Some(&keys::EXTENT) => {
                if let Some(pointer) = Extent::decode(value)?.pointer() {
                    self.note(pointer);
                }
            }
            Some(&keys::XATTR) => {
                if let Xattr::Frame(pointer) = Xattr::decode(value)? {
                    self.note(&pointer);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Admin {
    /// Takes a snapshot out of its line; what only it held goes to what is being freed.
    fn drop_snapshot(&mut self, id: u64, txg: Txg) -> Result<(), PoolError> {
        let (history, _) = self.catalog.history_of(id)?;
        let position = history.iter().position(|point| point.txg == txg).unwrap_or_default();
        let previous = position.checked_sub(1).and_then(|previous| history.get(previous)).map_or(Txg(0), |point| point.txg);
        let (Some(point), Some(next)) = (history.get(position).copied(), history.get(position + 1).copied()) else {
            return refused("a snapshot that is not in its own line".to_owned());
        };
        let freeing = self.catalog.head()?.freeing;
        let (_, list) = self.catalog.deadlists().destroy_snapshot(previous, &point, next.list, freeing)?;
        if next.txg == Point::HEAD {
            let mut head = self.catalog.dataset(id)?;
            (head.list, head.newest) = (list, previous);
            self.catalog.set_dataset(id, &head)?;
        } else {
            let mut after = self.catalog.snapshot(id, next.txg)?;
            after.list = list;
            self.catalog.set_snapshot(id, next.txg, &after)?;
        }
        self.catalog.leave_snapshot(id, txg)?;
        self.forest.count_snapshots(id, -1)?;
        self.recount(id)
    }

    /// Destroys a snapshot whose destruction was deferred, where nothing holds it any more.
    fn drop_if_due(&mut self, id: u64, txg: Txg) -> Result<(), PoolError> {
        let row = self.catalog.snapshot(id, txg)?;
        if row.deferred && row.holds == 0 && row.clones == 0 { self.drop_snapshot(id, txg) } else { Ok(()) }
    }

    /// Charges a clone for the snapshots that it is about to own, and relieves their owner, where all quotas allow it. The lines of both stay what they
    /// are; only where each line's own part begins moves.
    fn charge_promotion(&mut self, from: u64, to: u64, snapshots: usize) -> Result<(), PoolError> {
        let mut changes = Vec::new();
        for (id, gains) in [(from, false), (to, true)] {
            let (history, own) = self.catalog.history_of(id)?;
            let own = if gains { own.saturating_sub(snapshots) } else { own + snapshots };
            let after = self.catalog.deadlists().usage(&history, own)?;
            changes.push((id, Change::between(&self.forest.usage(id)?, &after)?));
        }
        self.forest.charge_if_allowed(&changes, Purpose::Write)?.map_err(|_| PoolError::NoSpace)
    }

    /// Puts into the catalog what a head is counted to use.
    fn note_usage(&mut self, id: u64) -> Result<(), PoolError> {
        let mut row = self.catalog.dataset(id)?;
        row.usage = self.forest.usage(id)?;
        self.catalog.set_dataset(id, &row)
    }

    /// Counts anew what a head uses, from its line of deadlists.
    fn recount(&mut self, id: u64) -> Result<(), PoolError> {
        let (history, own) = self.catalog.history_of(id)?;
        let usage = self.catalog.deadlists().usage(&history, own)?;
        let before = self.forest.usage(id)?;
        self.forest.charge(id, Change::between(&before, &usage)?)?;
        self.note_usage(id)
    }

    /// Moves a snapshot from one dataset's line to another's, with its holds and clones.
    fn move_snapshot(&mut self, from: u64, to: u64, txg: Txg, row: &SnapshotRow) -> Result<(), PoolError> {
        let (holds, clones) = (self.catalog.holds(from, txg)?, self.catalog.clones(from, txg)?);
        for (tag, _) in &holds {
            self.catalog.set_hold(from, txg, tag, None)?;
        }
        for clone in &clones {
            self.catalog.set_clone(from, txg, *clone, false)?;
        }
        self.catalog.leave_snapshot(from, txg)?;
        self.catalog.enter_snapshot(to, txg, row)?;
        for (tag, at) in &holds {
            self.catalog.set_hold(to, txg, tag, Some(*at))?;
        }
        for clone in &clones {
            self.catalog.set_clone(to, txg, *clone, true)?;
            let mut cloned = self.catalog.dataset(*clone)?;
            cloned.origin = Some((to, txg));
            self.catalog.set_dataset(*clone, &cloned)?;
        }
        Ok(())
    }
}
