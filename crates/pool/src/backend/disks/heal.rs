//! Repair: rewrites damaged copies and columns of a segment from the right content.
//!
//! Caller: the store, by [`Backend::heal`](super::super::Backend::heal): readers, scrubs and the cleaner. Invariants:
//! - Undamaged blocks stay untouched: only blocks that differ are written.
//! - Each rewritten block is counted, with the device that should have held it.
//! - Parity is recomputed only for rows that are right as a whole: otherwise the old parity may be what
//!   other damaged parts of the row can be reconstructed from.

use std::ops::Range;

use super::columns::{RowShape, has, split};
use super::layout::Layout;
use super::{Columns, Disks, Healed, HealedPart, Result, SegmentAt, slots};
use crate::error::PoolError;
use crate::label::SlotAddress;

/// Devices are written in whole blocks of this length, bytes: a partial block would have to be read first, which is
/// what fails.
const BLOCK: u64 = 4096;
/// Number of bytes that are compared in one step.
const AT_ONCE: u64 = 1 << 20;
/// Minimum write for which writeback is started at once, while the next step is read, bytes.
const BEGUN: u64 = 128 << 10;
/// Number of bytes that are compared under the lock that keeps slots from being freed.
const LOCKED: u64 = 8 << 20;

/// Result of a repair so far.
#[derive(Default)]
struct Healing {
    columns: Columns,
    wrong: Vec<HealedPart>,
}

impl Healing {
    /// Adds a part; merges it with the previous one of the same device where they adjoin.
    fn add(&mut self, part: HealedPart) {
        match self.wrong.iter_mut().rev().find(|before| before.device == part.device) {
            Some(before) if before.range.end == part.range.start => {
                before.range.end = part.range.end;
                before.bytes += part.bytes;
            }
            _ => self.wrong.push(part),
        }
    }
}

/// A column of a segment under repair, on one of the devices that hold it.
struct HealedColumn<'a> {
    layout: &'a Layout,
    at: SegmentAt<'a>,
    column: usize,
    holder: u16,
    slot: SlotAddress,
}

/// Ranges of blocks in which two buffers differ; adjacent blocks are merged.
fn differing(found: &[u8], right: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let block = BLOCK as usize;
    for (number, (found, right)) in found.chunks(block).zip(right.chunks(block)).enumerate() {
        if found == right {
            continue;
        }
        let (start, end) = (number * block, number * block + right.len());
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

/// Ranges of a segment that depend on a range of one of its columns; for parity, whole rows.
fn ranges_of(rows: RowShape, column: usize, range: &Range<u64>) -> Vec<Range<u64>> {
    let (unit, width) = (rows.unit, rows.width as u64);
    if column >= rows.width {
        let whole_rows = range.start / unit * unit * width..range.end.div_ceil(unit) * unit * width;
        return std::iter::once(whole_rows).collect();
    }
    let numbers = range.start / unit..range.end.div_ceil(unit);
    let part = |number: u64| {
        let (from, to) = (range.start.max(number * unit), range.end.min((number + 1) * unit));
        let start = (number * width + column as u64) * unit;
        start + (from - number * unit)..start + (to - number * unit)
    };
    numbers.map(part).collect()
}

impl Disks {
    /// Compares all columns of a segment with the right content of a range, and rewrites columns that differ or
    /// cannot be read. The lock against freeing slots is released between parts.
    pub(super) fn mend(&self, at: SegmentAt<'_>, offset: u64, right: &[u8]) -> Result<Option<Healed>> {
        let layout = self.layout();
        let row = self.rows(&layout, at).map_or(BLOCK, |rows| rows.unit * rows.width as u64);
        let step = (LOCKED / row).max(1) * row;
        let (end, mut from, mut healing) = (offset + right.len() as u64, offset, Healing::default());
        loop {
            let to = ((from / step + 1) * step).min(end);
            let part = right.get((from - offset) as usize..(to - offset) as usize).unwrap_or_default();
            if !self.mend_part(at, from, part, &mut healing)? {
                return Ok(None);
            }
            from = to;
            if from >= end {
                let Healing { columns, wrong } = healing;
                return Ok(Some(Healed { columns: columns.count_ones().into(), wrong }));
            }
        }
    }

    /// Repairs a part under the lock; returns whether the location still belongs to the segment.
    fn mend_part(&self, at: SegmentAt<'_>, offset: u64, right: &[u8], healing: &mut Healing) -> Result<bool> {
        let _giving = self.giving.lock();
        let layout = self.layout();
        let owned = || {
            let rooms = self.rooms.lock();
            let is_own = |slot: &SlotAddress| {
                let removed = layout.standing(slot.device).is_some_and(|device| !device.status.belongs());
                removed || rooms.slots.owner(*slot) == Some(at.segment)
            };
            !at.place.is_empty() && at.place.iter().all(is_own)
        };
        if !owned() {
            return Ok(false);
        }
        match self.rows(&layout, at) {
            None => self.mend_copies(&layout, at, offset, right, healing)?,
            Some(rows) => self.mend_rows((&layout, rows), at, offset, right, healing)?,
        }
        Ok(true)
    }

    /// Working devices that hold a slot's content; in groups including replacing and spare devices.
    fn written_of(layout: &Layout, slot: SlotAddress) -> Vec<u16> {
        if layout.is_plain() {
            return vec![slot.device];
        }
        layout.holders(slot.device).filter(|(_, standing)| standing.works()).map(|(holder, _)| holder).collect()
    }

    /// Whether a device holds all of this column: it is not known to lack data.
    pub(super) fn is_answerable(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        column: usize,
        slot: SlotAddress,
        device: u16,
    ) -> bool {
        let holds = Self::written_of(layout, slot).contains(&device) && layout.has_all(device);
        holds && !has(self.incomplete.of(at.segment), column)
    }

    fn mend_copies(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        healing: &mut Healing,
    ) -> Result<()> {
        let end = offset + right.len() as u64;
        let (from, to) = (offset / BLOCK * BLOCK, end.next_multiple_of(BLOCK).min(self.slot));
        let range = (offset - from) as usize..(end - from) as usize;
        let read = |holder: u16, slot: &SlotAddress| {
            let mut blocks = vec![0; (to - from) as usize];
            self.read_of(holder, *slot, from, &mut blocks).ok().map(|()| blocks)
        };
        let used = || {
            let columns = at.place.iter().enumerate();
            columns.flat_map(|(column, slot)| {
                Self::written_of(layout, *slot).into_iter().map(move |holder| (column, holder, *slot))
            })
        };
        let found: Vec<Option<Vec<u8>>> = used().map(|(_, holder, slot)| read(holder, &slot)).collect();
        let is_right = |blocks: &Option<Vec<u8>>| {
            blocks.as_ref().is_some_and(|blocks| blocks.get(range.clone()).is_some_and(|part| part == right))
        };
        // The surroundings of an unreadable part come from another copy, preferably from a right one.
        let whole =
            found.iter().find(|blocks| is_right(blocks)).or_else(|| found.iter().find(|blocks| blocks.is_some()));
        for ((column, holder, slot), blocks) in used().zip(&found) {
            if is_right(blocks) {
                continue;
            }
            let Some(mut target) = blocks.clone().or_else(|| whole.cloned().flatten()) else { continue };
            if let Some(part) = target.get_mut(range.clone()) {
                part.copy_from_slice(right);
            }
            let healed = HealedColumn { layout, at, column, holder, slot };
            self.write_differing(&healed, (from, None), (blocks.as_deref(), &target), healing)?;
        }
        Ok(())
    }

    /// Rewrites the blocks of a column that differ, or all where the column could not be read.
    fn write_differing(
        &self,
        healed: &HealedColumn<'_>,
        (offset, rows): (u64, Option<RowShape>),
        (found, right): (Option<&[u8]>, &[u8]),
        healing: &mut Healing,
    ) -> Result<()> {
        let &HealedColumn { layout, at, column, holder, slot } = healed;
        let runs = found.map_or_else(|| std::iter::once(0..right.len()).collect(), |found| differing(found, right));
        for run in runs {
            let (from, bytes) = (offset + run.start as u64, right.get(run).unwrap_or_default());
            self.write_healed(layout, (holder, slot), from, bytes)?;
            healing.columns |= 1 << column;
            if !self.is_answerable(layout, at, column, slot, holder) {
                continue;
            }
            let range = from..from + bytes.len() as u64;
            let ranges = rows.map_or_else(|| vec![range.clone()], |rows| ranges_of(rows, column, &range));
            let mut left = bytes.len() as u64;
            for range in ranges {
                let bytes = left.min(range.end - range.start);
                left -= bytes;
                healing.add(HealedPart { device: holder, range, bytes });
            }
        }
        Ok(())
    }

    /// Writes a block run; a device of a group that cannot be written drops out, where redundancy allows it.
    fn write_healed(
        &self,
        layout: &Layout,
        (holder, slot): (u16, SlotAddress),
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        match self.write_of(holder, slot, offset, bytes) {
            Ok(()) if bytes.len() as u64 >= BEGUN => {
                let device = self.device(holder)?;
                device.begin_sync(slots::start(slot, self.slot) + offset, bytes.len() as u64);
                Ok(())
            }
            Err(error @ PoolError::Device { .. }) if !layout.is_plain() => self.lose(holder, &error),
            written => written,
        }
    }

    fn mend_rows(
        &self,
        (layout, rows): (&Layout, RowShape),
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        healing: &mut Healing,
    ) -> Result<()> {
        let row = rows.unit * rows.width as u64;
        let end = offset + right.len() as u64;
        let (first, last) = (offset.next_multiple_of(row), end / row * row);
        let part = |from: u64, to: u64| right.get((from - offset) as usize..(to - offset) as usize).unwrap_or_default();
        if first >= last {
            return self.mend_parts((layout, rows), at, offset, right, healing);
        }
        self.mend_parts((layout, rows), at, offset, part(offset, first), healing)?;
        let step = (AT_ONCE / row).max(1) * row;
        let mut from = first;
        while from < last {
            let to = (from + step).min(last);
            self.mend_whole((layout, rows), at, from, part(from, to), healing)?;
            from = to;
        }
        self.mend_parts((layout, rows), at, last, part(last, end), healing)
    }

    /// Repairs whole rows: all columns, including parity.
    fn mend_whole(
        &self,
        (layout, rows): (&Layout, RowShape),
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        healing: &mut Healing,
    ) -> Result<()> {
        let length = right.len() / rows.width;
        let mut columns = vec![0; length * (rows.width + rows.parity)];
        split(rows, right, &mut columns)?;
        let offset = offset / rows.width as u64;
        let mut found = vec![0; length];
        for (column, (slot, right)) in at.place.iter().zip(columns.chunks(length.max(1))).enumerate() {
            for holder in Self::written_of(layout, *slot) {
                let read = self.read_of(holder, *slot, offset, &mut found).is_ok();
                let healed = HealedColumn { layout, at, column, holder, slot: *slot };
                let found = read.then_some(found.as_slice());
                self.write_differing(&healed, (offset, Some(rows)), (found, right), healing)?;
            }
        }
        Ok(())
    }

    /// Repairs parts of rows: only the columns that hold them.
    fn mend_parts(
        &self,
        (layout, rows): (&Layout, RowShape),
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        healing: &mut Healing,
    ) -> Result<()> {
        for part in rows.parts(offset, right.len()) {
            let Some(slot) = at.place.get(part.column) else { continue };
            let end = part.offset + part.range.len() as u64;
            let (from, to) = (part.offset / BLOCK * BLOCK, end.next_multiple_of(BLOCK));
            let (range, right) =
                ((part.offset - from) as usize..(end - from) as usize, right.get(part.range).unwrap_or_default());
            for holder in Self::written_of(layout, *slot) {
                let mut blocks = vec![0; (to - from) as usize];
                let read = self.read_of(holder, *slot, from, &mut blocks).is_ok();
                if !read {
                    // The surroundings of an unreadable part are reconstructed from the other columns.
                    let out = self.unused(layout, at) | 1 << part.column;
                    let Ok(whole) = self.whole_columns(at, rows, out, from, blocks.len()) else { continue };
                    let Some(column) = whole.columns.get(part.column) else { continue };
                    blocks.copy_from_slice(column);
                }
                let mut target = blocks.clone();
                if let Some(to) = target.get_mut(range.clone()) {
                    to.copy_from_slice(right);
                }
                let healed = HealedColumn { layout, at, column: part.column, holder, slot: *slot };
                let found = read.then_some(blocks.as_slice());
                self.write_differing(&healed, (from, Some(rows)), (found, &target), healing)?;
            }
        }
        Ok(())
    }

    fn unused(&self, layout: &Layout, at: SegmentAt<'_>) -> Columns {
        let unused = at.place.iter().enumerate().filter(|(_, slot)| !layout.is_used(slot.device));
        unused.fold(0, |columns, (column, _)| columns | 1 << column)
    }
}
