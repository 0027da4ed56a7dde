//! Commits: everything that a root names is written and synced, then the root; then space that no retained root
//! reaches is freed.
//!
//! In addition to the engine's commits the store makes its own, of the same txg with the engine's part unchanged, to
//! make moves of the cleaner durable and so to free slots. Frames of uncommitted txgs are recorded as uncommitted in
//! the table: an import of this root frees them.

use std::sync::atomic::Ordering;

use crate::backend::{Backend, PutRoot, SegmentAt};
use crate::error::PoolError;
use crate::label::{LogStart, Place, PoolState, Root, UPPER_LIMIT};
use crate::pointer::{Pointer, Txg};
use crate::segment::pages::PageTree;
use crate::segment::table::{Counted, Op};
use crate::workers::OnPanic;

use super::{Committed, Freed, Map, Result, Store};

/// Number of frees under one hold of the table's lock.
const FREES_AT_ONCE: usize = 4096;

/// Content of a commit by the engine.
#[derive(Clone, Copy, Debug)]
pub struct Commit<'a> {
    /// The txg; later than the last one.
    pub txg: Txg,
    /// The root of its catalog tree (like ZFS' MOS).
    pub catalog: Option<Pointer>,
    /// The engine's own data in the root; at most [`UPPER_LIMIT`] bytes.
    pub upper: &'a [u8],
    /// Position at which replay of the log begins.
    pub log_start: LogStart,
    /// Current time, seconds since 1970.
    pub time: u64,
}

impl Store {
    /// Commits a txg: all of its frames were written, and all of its frees were recorded. Durable when it returns.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] when anything fails; the last durable root is then the valid one. After a panic in it
    /// the store is suspended as well.
    /// [`PoolError::Refused`] for a txg that is not later.
    pub fn commit(&self, new: &Commit<'_>) -> Result<()> {
        self.ready()?;
        let mut committed = self.committed.lock();
        if new.txg <= committed.root.txg || new.upper.len() > UPPER_LIMIT {
            return Err(PoolError::Refused(format!(
                "txg {} cannot be committed after {}",
                new.txg, committed.root.txg
            )));
        }
        self.commit_root(&mut committed, Some(new), false, false)?;
        self.disks.iter().for_each(|disks| disks.log_committed());
        Ok(())
    }

    /// Makes moves of the cleaner durable, and frees everything that only older roots reach.
    pub(super) fn commit_moves(&self) -> Result<()> {
        self.ready()?;
        let mut committed = self.committed.lock();
        self.commit_root(&mut committed, None, false, true)
    }

    /// Closes the pool cleanly: a last root, and the exported state in the labels where it is exported. Nothing is
    /// accepted afterwards.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn close(&self, exported: bool, time: u64) -> Result<()> {
        self.ready()?;
        let mut committed = self.committed.lock();
        self.commit_root(&mut committed, None, true, false)?;
        self.closed.store(true, Ordering::Release);
        if exported {
            let mut identity = committed.identity.clone();
            (identity.state, identity.time, identity.revision) = (PoolState::Exported, time, identity.revision + 1);
            self.backend.put_identity(&identity).map_err(|error| self.suspend(&error))?;
            committed.identity = identity;
        }
        Ok(())
    }

    pub(super) fn commit_root(
        &self,
        committed: &mut Committed,
        new: Option<&Commit<'_>>,
        clean: bool,
        urgent: bool,
    ) -> Result<()> {
        self.usable()?;
        // What was applied to the table so far is in no later root.
        let _guard = OnPanic(|| drop(self.suspend(&PoolError::Refused("a commit was ended by a panic".to_owned()))));
        self.prepare_and_write(committed, new, clean, urgent).map_err(|error| self.suspend(&error))
    }

    fn prepare_and_write(
        &self,
        committed: &mut Committed,
        new: Option<&Commit<'_>>,
        clean: bool,
        urgent: bool,
    ) -> Result<()> {
        for appender in self.appenders.all() {
            if !self.backend.extends() {
                self.end_segment(appender)?;
            }
            self.flush(appender)?;
        }
        let mut root = Root { generation: committed.root.generation + 1, clean, ..committed.root.clone() };
        if let Some(new) = new {
            (root.txg, root.catalog, root.log_start, root.time) = (new.txg, new.catalog, new.log_start, new.time);
            root.upper = new.upper.to_vec();
        }
        let freed = self.apply_frees(root.txg)?;
        self.write_table(committed, &mut root, urgent)?;
        if !self.backend.extends() {
            committed.open_table = None;
        }
        for segment in root.table_segments.iter().filter(|segment| committed.open_table != Some(segment.id)) {
            let at = SegmentAt { segment: segment.id, place: &segment.place };
            self.backend.finish(at, u64::from(segment.bytes));
        }
        self.write_root(&root)?;
        self.durable.store(root.txg.0, Ordering::Release);
        let mut map = self.map.write();
        self.sums.allocated.fetch_sub(freed, Ordering::Relaxed);
        self.sums.freeing.fetch_sub(freed, Ordering::Relaxed);
        let removed = release(&mut map, &mut root)?;
        map.sum_up(committed.identity.revision, &committed.tree, &root, &*self.backend);
        self.sums.copies.store(0, Ordering::Relaxed);
        self.sums.special.store(0, Ordering::Relaxed);
        drop(map);
        self.backend.remove(&removed);
        committed.root = root;
        Ok(())
    }

    /// Flushes everything that a root names, and then writes the root.
    pub(super) fn write_root(&self, root: &Root) -> Result<()> {
        self.backend.flush()?;
        match self.backend.put_root(root)? {
            PutRoot::Durable => Ok(()),
            PutRoot::Fenced { by } => Err(PoolError::Refused(format!("the pool was taken over by {by}"))),
        }
    }

    /// Prepares for the detection of damage in later roots.
    pub(super) fn guard(&self, committed: &mut Committed) -> Result<()> {
        committed.root.guarded = self.backend.guard()?;
        Ok(())
    }

    /// Applies the frees up to this txg to the table; returns the freed bytes.
    fn apply_frees(&self, txg: Txg) -> Result<u64> {
        let mut all: Vec<Freed> = Vec::new();
        {
            let mut frees = self.frees.lock();
            let later = frees.split_off(&Txg(txg.0.saturating_add(1)));
            let now = std::mem::replace(&mut *frees, later);
            now.into_values().for_each(|freed| all.extend(freed));
        }
        all.sort_unstable();
        let mut bytes = 0;
        for batch in all.chunks(FREES_AT_ONCE) {
            let mut map = self.map.write();
            for freed in batch {
                bytes += u64::from(freed.units) * u64::from(Pointer::UNIT);
                map.table.apply(Op::Free {
                    segment: freed.segment,
                    index: freed.index,
                    count: 1,
                    units: freed.units,
                })?;
            }
        }
        Ok(bytes)
    }
}

/// Removes the segments that are dead in every retained root from the table; returns them for deletion.
pub(super) fn release(map: &mut Map, root: &mut Root) -> Result<Vec<(u32, Place)>> {
    let mut removed = map.table.releasable(root.kept);
    for (id, _) in &removed {
        map.table.apply(Op::Release { id: *id })?;
    }
    root.table_segments.retain(|segment| {
        let dead = segment.dead_since.is_some_and(|since| since <= root.kept);
        if dead {
            removed.push((segment.id, segment.place.clone()));
        }
        !dead
    });
    Ok(removed)
}

/// Additional space of segments beyond their live frames, and live frames in the special class; bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extra {
    /// Lost at the ends of filled segments, where the next frame did not fit. Segments sealed early are reclaimed by
    /// the cleaner.
    slack: u64,
    /// Additional space of live frames: copies, and parity where rows are narrow.
    copies: u64,
    special: u64,
}

impl Extra {
    fn of(segment: &Counted, backend: &dyn Backend) -> Self {
        let live = u64::from(segment.live_units) * u64::from(Pointer::UNIT);
        if segment.live_frames == 0 {
            return Self::default();
        }
        let capacity = backend.capacity(&segment.place);
        let is_filled = segment.sealed && u64::from(segment.bytes) * 4 >= capacity * 3;
        let slack = if is_filled {
            // In proportion to the live frames: the remainder of the segment is reclaimed by the cleaner, with its
            // tail.
            let rest = capacity.saturating_sub(u64::from(segment.bytes));
            let lost = u128::from(rest) * u128::from(live) / u128::from(segment.bytes.max(1));
            backend.cost(&segment.place, lost as u64)
        } else {
            0
        };
        let is_copied = segment.place.len() > 1;
        let copies = if is_copied { backend.cost(&segment.place, live).saturating_sub(live) } else { 0 };
        Self { slack, copies, special: if backend.is_special(&segment.place) { live } else { 0 } }
    }

    fn all(self) -> [u64; 3] {
        [self.slack, self.copies, self.special]
    }
}

impl Map {
    /// Sums up the additional space of segments: only changed segments, unless the pool's topology may have changed,
    /// which is recognized by the label revision.
    pub(super) fn sum_up(&mut self, revision: u64, tree: &PageTree, root: &Root, backend: &dyn Backend) {
        let changed = self.table.take_counted();
        let mut sums = self.living.all();
        let mut add = |extra: Extra, sign: fn(u64, u64) -> u64| {
            sums.iter_mut().zip(extra.all()).for_each(|(sum, one)| *sum = sign(*sum, one));
        };
        if self.summed_at == Some(revision) {
            for (id, was) in changed {
                was.iter().for_each(|was| add(Extra::of(was, backend), u64::saturating_sub));
                let now = self.table.segments().get(&id).map(Counted::of);
                now.iter().for_each(|now| add(Extra::of(now, backend), u64::saturating_add));
            }
        } else {
            sums = [0; 3];
            let mut add = |extra: Extra| sums.iter_mut().zip(extra.all()).for_each(|(sum, one)| *sum += one);
            self.table.segments().values().for_each(|segment| add(Extra::of(&Counted::of(segment), backend)));
            self.summed_at = Some(revision);
        }
        let [slack, copies, special] = sums;
        self.living = Extra { slack, copies, special };
        (self.slack, self.copies) = (slack, copies);
        self.special = special + special_of_table(tree, root, backend);
    }
}

/// The part of the segment table in the special class, bytes.
fn special_of_table(tree: &PageTree, root: &Root, backend: &dyn Backend) -> u64 {
    if backend.special_room().1 == 0 {
        return 0;
    }
    let others = root.deltas.iter().chain(&root.table_list).map(|pointer| (pointer.segment, pointer.charged()));
    let all = tree.charged().iter().map(|(id, charged)| (*id, *charged)).chain(others);
    let is_special = |id: u32| root.table_segment(id).is_some_and(|segment| backend.is_special(&segment.place));
    all.filter(|(id, _)| is_special(*id)).map(|(_, charged)| charged).sum()
}
