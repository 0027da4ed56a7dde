//! Writing anew what is damaged at one slot of a segment, from what is right.
//!
//! Caller: the store, by [`Backend::heal`](super::super::Backend::heal): whoever reads, a scrub, the
//! cleaner. Invariants:
//! - What was right stays as it is.
//! - Parity is computed again only of rows that are right as a whole: otherwise it is what other
//!   damaged parts of the row can be computed from.

use super::columns::{RowShape, split};
use super::layout::Layout;
use super::{Columns, Disks, Healed, Result, SegmentAt, slots};
use crate::error::PoolError;
use crate::label::SlotAddress;

/// Devices are written in whole blocks of this, bytes: a part of one would have to be read, which
/// is what fails.
const BLOCK: u64 = 4096;
/// So much is compared at once, bytes.
const AT_ONCE: u64 = 1 << 20;
/// So much may go to the medium at once, while what comes next is read, bytes.
const BEGUN: u64 = 128 << 10;
/// So much is compared while nobody can give places back, bytes.
const LOCKED: u64 = 8 << 20;

impl Disks {
    /// Compares all columns of a segment with what a range should be, and writes those that differ
    /// or cannot be read. Whoever gives places back waits for a part of it only.
    pub(super) fn mend(&self, at: SegmentAt<'_>, offset: u64, right: &[u8]) -> Result<Option<Healed>> {
        let layout = self.layout();
        let row = self.rows(&layout, at).map_or(BLOCK, |rows| rows.unit * rows.width as u64);
        let doubtful = self.doubtful(&layout, at);
        let step = (LOCKED / row).max(1) * row;
        let (end, mut from, mut mended) = (offset + right.len() as u64, offset, 0);
        loop {
            let to = ((from / step + 1) * step).min(end);
            let part = right.get((from - offset) as usize..(to - offset) as usize).unwrap_or_default();
            let Some(columns) = self.mend_part(at, from, part)? else { return Ok(None) };
            mended |= columns;
            from = to;
            if from >= end {
                let wrong = at.place.iter().enumerate().filter(|(column, _)| (mended & !doubtful) >> column & 1 == 1);
                let wrong = wrong.map(|(_, slot)| slot.device).collect();
                return Ok(Some(Healed { columns: mended.count_ones().into(), wrong }));
            }
        }
    }

    fn mend_part(&self, at: SegmentAt<'_>, offset: u64, right: &[u8]) -> Result<Option<Columns>> {
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
            return Ok(None);
        }
        match self.rows(&layout, at) {
            None => self.mend_copies(&layout, at, offset, right).map(Some),
            Some(rows) => self.mend_rows(&layout, at, rows, offset, right).map(Some),
        }
    }

    /// The devices that hold a slot's content, as far as they are written: of a group those that stand
    /// beside its device as well.
    fn written_of(layout: &Layout, slot: SlotAddress) -> Vec<u16> {
        if layout.is_plain() {
            return vec![slot.device];
        }
        layout.holders(slot.device).filter(|(_, standing)| standing.works()).map(|(holder, _)| holder).collect()
    }

    fn mend_copies(&self, layout: &Layout, at: SegmentAt<'_>, offset: u64, right: &[u8]) -> Result<Columns> {
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
                Self::written_of(layout, *slot).into_iter().map(move |holder| (column, holder, slot))
            })
        };
        let found: Vec<Option<Vec<u8>>> = used().map(|(_, holder, slot)| read(holder, slot)).collect();
        let is_right = |blocks: &Option<Vec<u8>>| {
            blocks.as_ref().is_some_and(|blocks| blocks.get(range.clone()).is_some_and(|part| part == right))
        };
        // Around a part that cannot be read lies what the other slot has there.
        let whole = found.iter().find(|blocks| is_right(blocks)).cloned().flatten();
        let mut mended = 0;
        for ((column, holder, slot), blocks) in used().zip(found) {
            if is_right(&blocks) {
                continue;
            }
            let Some(mut blocks) = blocks.or_else(|| whole.clone()) else { continue };
            if let Some(part) = blocks.get_mut(range.clone()) {
                part.copy_from_slice(right);
            }
            self.write_healed(layout, (holder, *slot), from, &blocks)?;
            mended |= 1 << column;
        }
        Ok(mended)
    }

    /// A device that cannot be written now is done without, where its group can.
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
        layout: &Layout,
        at: SegmentAt<'_>,
        rows: RowShape,
        offset: u64,
        right: &[u8],
    ) -> Result<Columns> {
        let row = rows.unit * rows.width as u64;
        let end = offset + right.len() as u64;
        let (first, last) = (offset.next_multiple_of(row), end / row * row);
        let part = |from: u64, to: u64| right.get((from - offset) as usize..(to - offset) as usize).unwrap_or_default();
        if first >= last {
            return self.mend_parts(layout, at, rows, offset, right);
        }
        let mut mended = self.mend_parts(layout, at, rows, offset, part(offset, first))?;
        let step = (AT_ONCE / row).max(1) * row;
        let mut from = first;
        while from < last {
            let to = (from + step).min(last);
            mended |= self.mend_whole(layout, at, rows, from, part(from, to))?;
            from = to;
        }
        Ok(mended | self.mend_parts(layout, at, rows, last, part(last, end))?)
    }

    /// Whole rows: all columns, also those of parity.
    fn mend_whole(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        rows: RowShape,
        offset: u64,
        right: &[u8],
    ) -> Result<Columns> {
        let length = right.len() / rows.width;
        let mut columns = vec![0; length * (rows.width + rows.parity)];
        split(rows, right, &mut columns)?;
        let offset = offset / rows.width as u64;
        let mut found = vec![0; length];
        let mut mended = 0;
        for (column, (slot, right)) in at.place.iter().zip(columns.chunks(length.max(1))).enumerate() {
            for holder in Self::written_of(layout, *slot) {
                if self.read_of(holder, *slot, offset, &mut found).is_err() || found != right {
                    self.write_healed(layout, (holder, *slot), offset, right)?;
                    mended |= 1 << column;
                }
            }
        }
        Ok(mended)
    }

    /// Parts of rows: only the columns that hold them.
    fn mend_parts(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        rows: RowShape,
        offset: u64,
        right: &[u8],
    ) -> Result<Columns> {
        let mut mended = 0;
        for part in rows.parts(offset, right.len()) {
            let Some(slot) = at.place.get(part.column) else { continue };
            let end = part.offset + part.range.len() as u64;
            let (from, to) = (part.offset / BLOCK * BLOCK, end.next_multiple_of(BLOCK));
            let (range, right) =
                ((part.offset - from) as usize..(end - from) as usize, right.get(part.range).unwrap_or_default());
            for holder in Self::written_of(layout, *slot) {
                let mut blocks = vec![0; (to - from) as usize];
                if self.read_of(holder, *slot, from, &mut blocks).is_err() {
                    // Around it lies what the others give.
                    let out = self.unused(layout, at) | 1 << part.column;
                    let Ok(columns) = self.whole_columns(at, rows, out, from, blocks.len()) else { continue };
                    let Some(column) = columns.get(part.column) else { continue };
                    blocks.copy_from_slice(column);
                } else if blocks.get(range.clone()).is_some_and(|found| found == right) {
                    continue;
                }
                if let Some(to) = blocks.get_mut(range.clone()) {
                    to.copy_from_slice(right);
                }
                self.write_healed(layout, (holder, *slot), from, &blocks)?;
                mended |= 1 << part.column;
            }
        }
        Ok(mended)
    }

    fn unused(&self, layout: &Layout, at: SegmentAt<'_>) -> Columns {
        let unused = at.place.iter().enumerate().filter(|(_, slot)| !layout.is_used(slot.device));
        unused.fold(0, |columns, (column, _)| columns | 1 << column)
    }
}
