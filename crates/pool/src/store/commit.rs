//! Commits: everything a root names is written and synced, then the root; then what no kept root
//! reaches is free.
//!
//! Besides the upper level's commits the store makes its own, of the same txg with the upper
//! level's part unchanged, to make moves of the cleaner durable and so to get slots back. Frames of
//! txgs that are not committed are named as uncommitted in the table's record: an import of this
//! root takes them for dead.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use crate::backend::{Backend, Copies, PutRoot, SegmentAt};
use crate::checksum;
use crate::compress;
use crate::error::{Damage, PoolError};
use crate::frame::Header;
use crate::frames::{CompressionSetting, Owner, WriteStream};
use crate::label::{LogStart, Place, PoolState, Root, TableSegment, UPPER_LIMIT};
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
use crate::segment::table::Op;
use crate::segment::{cleaner, table_log};

use super::{Committed, Freed, Map, Result, Store};

/// Roots that stay importable behind the newest.
const KEPT: u64 = 3;
/// Deltas between two full copies of the table.
pub const DELTAS: usize = 24;
/// With more segments of the table, older roots are given up.
pub const TABLE_SEGMENTS: usize = 12;
/// Frees done under one hold of the table's lock.
const FREES_AT_ONCE: usize = 4096;
/// Deltas may outgrow a small full copy up to this, bytes.
const SMALL_TABLE: u64 = 64 << 10;

/// What the upper level commits.
#[derive(Clone, Copy, Debug)]
pub struct Commit<'a> {
    /// The txg; later than the last one.
    pub txg: Txg,
    /// The root of its tree.
    pub catalog: Option<Pointer>,
    /// What it wants to find again; at most [`UPPER_LIMIT`] bytes.
    pub upper: &'a [u8],
    /// Where replay of the log begins.
    pub log_start: LogStart,
    /// Now, seconds since 1970.
    pub time: u64,
}

impl Store {
    /// Commits a txg: all frames of it were written, all frees of it were told. Durable when it
    /// returns.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] when anything fails; the last durable root is then what counts.
    /// [`PoolError::Refused`] for a txg that is not later.
    pub fn commit(&self, new: &Commit<'_>) -> Result<()> {
        self.usable()?;
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

    /// Makes moves of the cleaner durable, and gives back all that only older roots reach.
    pub(super) fn commit_moves(&self) -> Result<()> {
        self.usable()?;
        let mut committed = self.committed.lock();
        self.commit_root(&mut committed, None, false, true)
    }

    /// Leaves the pool in order: a last root, and the label's state when it is exported. Nothing is
    /// accepted afterwards.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn close(&self, exported: bool, time: u64) -> Result<()> {
        self.usable()?;
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
        (map.slack, map.copies) = (slack(&map, &*self.backend), copies(&map, &*self.backend));
        self.sums.copies.store(0, Ordering::Relaxed);
        map.special = special(&map, &root, &committed.pieces, &*self.backend);
        self.sums.special.store(0, Ordering::Relaxed);
        drop(map);
        self.backend.remove(&removed);
        committed.root = root;
        Ok(())
    }

    /// Makes everything durable that a root names, and then the root.
    pub(super) fn write_root(&self, root: &Root) -> Result<()> {
        self.backend.flush()?;
        match self.backend.put_root(root)? {
            PutRoot::Durable => Ok(()),
            PutRoot::Fenced { by } => Err(PoolError::Refused(format!("the pool was taken over by {by}"))),
        }
    }

    /// Makes sure that damage of the roots from the next on is seen.
    pub(super) fn guard(&self, committed: &mut Committed) -> Result<()> {
        committed.root.guarded = self.backend.guard()?;
        Ok(())
    }

    /// Marks dead what was freed up to this txg; returns how much, bytes.
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

    /// Writes what has changed in the table, or all of it, and puts that into the root.
    fn write_table(&self, committed: &mut Committed, root: &mut Root, urgent: bool) -> Result<()> {
        let longest = (self.slot / 4).min(8 << 20);
        let (body, is_delta) = {
            let mut map = self.map.write();
            let room = self.backend.room();
            let Map { table, arriving, .. } = &mut *map;
            // What was copied there the table learns later; until then the place is no other's.
            table.finish_but(root.generation, arriving);
            map.uncommitted.retain(|run| run.birth > root.txg);
            let short = urgent
                || cleaner::pressure(room.empty(), room.total) == cleaner::Pressure::Urgent
                || root.table_segments.len() > TABLE_SEGMENTS;
            root.kept = if short { root.generation } else { root.kept.max(root.generation.saturating_sub(KEPT)) };
            let delta = table_log::write_delta(root.generation, &map.table.take_ops(), &map.uncommitted);
            let grown = committed.delta_bytes + delta.len() as u64;
            let small = !std::mem::take(&mut committed.renew)
                && root.table.is_some()
                && root.deltas.len() < DELTAS
                && (self.backend.extends() || root.table_segments.len() <= TABLE_SEGMENTS)
                && grown <= committed.full_bytes.max(SMALL_TABLE);
            if small && delta.len() as u64 <= longest {
                (delta, true)
            } else {
                (table_log::write_full(root.generation, &map.table, &map.uncommitted), false)
            }
        };
        if let Some(open) =
            committed.open_table.and_then(|id| root.table_segments.iter_mut().find(|segment| segment.id == id))
        {
            open.bytes = open.bytes.next_multiple_of(4096);
        }
        if is_delta {
            let pointer = self.write_table_frame(committed, root, &body)?;
            root.deltas.push(pointer);
            committed.delta_bytes += body.len() as u64;
        } else {
            committed.pieces.clear();
            for piece in body.chunks(longest as usize) {
                let pointer = self.write_table_frame(committed, root, piece)?;
                committed.pieces.push(pointer);
            }
            let index = table_log::write_index(root.generation, &committed.pieces);
            root.table = Some(self.write_table_frame(committed, root, &index)?);
            root.deltas.clear();
            (committed.full_bytes, committed.delta_bytes) = (body.len() as u64, 0);
        }
        let used: Vec<&Pointer> = committed.pieces.iter().chain(&root.table).chain(&root.deltas).collect();
        self.sums.table.store(used.iter().map(|pointer| pointer.charged()).sum(), Ordering::Relaxed);
        let used: BTreeSet<u32> = used.iter().map(|pointer| pointer.segment).chain(committed.open_table).collect();
        for segment in root.table_segments.iter_mut().filter(|segment| !used.contains(&segment.id)) {
            segment.dead_since.get_or_insert(root.generation);
        }
        root.next_segment = self.map.read().next_segment;
        Ok(())
    }

    fn write_table_frame(&self, committed: &mut Committed, root: &mut Root, content: &[u8]) -> Result<Pointer> {
        let compressed = compress::compress(CompressionSetting::Zstd(1), content);
        let (compression, stored) =
            compressed.as_ref().map_or((Compression::Off, content), |(how, compressed)| (*how, compressed.as_slice()));
        let pointer = Pointer {
            segment: 0,
            index: 0,
            offset: 0,
            stored: stored.len() as u32,
            logical: content.len() as u32,
            kind: FrameKind::Table,
            compression,
            checksum_kind: ChecksumKind::Xxh3,
            birth: root.txg,
            checksum: checksum::structure(content),
        };
        let fits = |segment: &TableSegment| {
            u64::from(segment.bytes) + pointer.charged() <= self.backend.capacity(&segment.place)
        };
        let open = committed
            .open_table
            .and_then(|id| root.table_segments.iter().position(|segment| segment.id == id && fits(segment)));
        let open = match open {
            Some(open) => open,
            None => {
                let segment = self.open_table_segment()?;
                committed.open_table = Some(segment.id);
                root.table_segments.push(segment);
                root.table_segments.len() - 1
            }
        };
        let missing = PoolError::Format(Damage::Structure("no open segment for the table"));
        let segment = root.table_segments.get_mut(open).ok_or(missing)?;
        let named = Pointer { segment: segment.id, index: segment.frames, ..pointer };
        let mut bytes = Header { pointer: named, owner: Owner::default() }.encode();
        bytes.extend_from_slice(stored);
        bytes.resize(pointer.charged() as usize, 0);
        let offset = segment.bytes;
        segment.frames += 1;
        segment.bytes += bytes.len() as u32;
        let at = SegmentAt { segment: segment.id, place: &segment.place };
        if self.backend.write(at, WriteStream::Table, u64::from(offset), &bytes)? == Copies::Fewer {
            // This frame has fewer copies: the next commit writes all of the table elsewhere.
            (committed.open_table, committed.renew) = (None, true);
        }
        self.sums.written_table.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(Pointer { offset: offset / Pointer::UNIT, ..named })
    }

    fn open_table_segment(&self) -> Result<TableSegment> {
        let begin = || self.begin_segment(&mut self.map.write(), WriteStream::Table, 0);
        let begun = match begin()? {
            None if self.backend.reclaim() => begin()?,
            begun => begun,
        };
        let (id, place) = begun.ok_or(PoolError::NoSpace)?;
        Ok(TableSegment { id, place, frames: 0, bytes: 0, dead_since: None })
    }
}

/// Takes all that is dead in every kept root out of the table; answers what it was, to be removed.
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

/// What is lost at the ends of segments that were filled: a frame did not fit any more. Segments
/// sealed early are won back by the cleaner.
pub(super) fn slack(map: &Map, backend: &dyn Backend) -> u64 {
    let filled = map.table.segments().values().filter(|segment| {
        let is_filled = || u64::from(segment.bytes) * 4 >= backend.capacity(&segment.place) * 3;
        segment.sealed && segment.live_frames > 0 && is_filled()
    });
    // In proportion to what lives: the rest of the segment goes with the cleaner, and its tail with
    // it.
    let lost = filled.map(|segment| {
        let live = u128::from(segment.live_units) * 16;
        let rest = backend.capacity(&segment.place).saturating_sub(u64::from(segment.bytes));
        backend.cost(&segment.place, (u128::from(rest) * live / u128::from(segment.bytes.max(1))) as u64)
    });
    lost.sum()
}

/// What living frames take besides themselves: as copies, as parity where rows are narrow.
pub(super) fn copies(map: &Map, backend: &dyn Backend) -> u64 {
    let copied = map.table.segments().values().filter(|segment| segment.place.len() > 1);
    let more = copied.map(|segment| {
        let bytes = u64::from(segment.live_units) * u64::from(Pointer::UNIT);
        backend.cost(&segment.place, bytes).saturating_sub(bytes)
    });
    more.sum()
}

/// What lies where metadata has groups of its own: living frames, and those of the segment table.
pub(super) fn special(map: &Map, root: &Root, pieces: &[Pointer], backend: &dyn Backend) -> u64 {
    if backend.special_room().1 == 0 {
        return 0;
    }
    let of_table = pieces
        .iter()
        .chain(&root.table)
        .chain(&root.deltas)
        .filter(|pointer| super::open::table_place(root, pointer).is_some_and(|at| backend.is_special(at.place)));
    let segments = map.table.segments().values();
    let living = segments.filter(|segment| segment.live_frames > 0 && backend.is_special(&segment.place));
    living.map(|segment| u64::from(segment.live_units) * u64::from(Pointer::UNIT)).sum::<u64>()
        + of_table.map(Pointer::charged).sum::<u64>()
}
