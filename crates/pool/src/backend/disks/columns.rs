//! Segments as columns, one per slot: written to all columns, read from some. Columns are copies, or they hold rows:
//! a row (a raidz stripe) has one unit on each device, with parity in the last ones.
//!
//! Caller: the backend of devices. Invariants:
//! - Rows are written whole, once.
//! - One copy or reconstruction (`way`) leaves out the same columns for every range of a segment, as
//!   long as no device fails or returns meanwhile. Only number 0 depends on the states of the devices:
//!   a reader that tries all others has tried each set of columns, whatever happens to devices meanwhile.

use super::balance::{self, Copy};
use super::layout::{Layout, Standing};
use super::{Columns, Copies, Disks, Result, SegmentAt, Sources, slots};
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::SlotAddress;
use crate::parity;
use crate::patience;
use crate::segment::stream::{ALIGN, PIECE};
use crate::workers;

/// Number of reconstructions that are tried after the first one, at most.
const MOST_WAYS: usize = 400;

/// Geometry of a segment's rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowShape {
    pub(super) width: usize,
    pub(super) parity: usize,
    pub(super) unit: u64,
}

/// A part of a range in one column: the column, the offset in it, and the range of the buffer.
pub(super) struct Part {
    pub(super) column: usize,
    pub(super) offset: u64,
    pub(super) range: std::ops::Range<usize>,
}

impl RowShape {
    fn length(&self) -> u64 {
        self.unit * self.width as u64
    }

    pub(super) fn parts(&self, offset: u64, length: usize) -> Vec<Part> {
        let (mut parts, mut at) = (Vec::new(), 0);
        while at < length {
            let position = offset + at as u64;
            let (number, within) = (position / self.unit, position % self.unit);
            let part = ((self.unit - within) as usize).min(length - at);
            parts.push(Part {
                column: (number % self.width as u64) as usize,
                offset: number / self.width as u64 * self.unit + within,
                range: at..at + part,
            });
            at += part;
        }
        parts
    }

    /// Ranges of the columns that hold these parts: first byte and end, `None` for unused columns.
    fn extents(&self, parts: &[Part]) -> Vec<Option<(u64, u64)>> {
        let mut extents: Vec<Option<(u64, u64)>> = vec![None; self.width];
        for part in parts {
            let (from, to) = (part.offset, part.offset + part.range.len() as u64);
            if let Some(extent) = extents.get_mut(part.column) {
                *extent = Some(extent.map_or((from, to), |(first, last)| (first.min(from), last.max(to))));
            }
        }
        extents
    }
}

pub(super) fn has(columns: Columns, column: usize) -> bool {
    columns >> column & 1 == 1
}

/// Columns of copies in read order: in groups rotated by the segment number.
fn copies_by_turn(layout: &Layout, at: SegmentAt<'_>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..at.place.len()).collect();
    if !layout.is_plain() && !order.is_empty() {
        let turn = at.segment as usize % order.len();
        order.rotate_left(turn);
    }
    order
}

/// Buffer aligned to [`ALIGN`], as direct I/O needs it.
#[derive(Debug, Default)]
pub(super) struct Aligned {
    memory: Vec<u8>,
}

impl Aligned {
    pub(super) fn of(&mut self, length: usize) -> &mut [u8] {
        if self.memory.len() < length + ALIGN as usize {
            self.memory.resize(length + ALIGN as usize, 0);
        }
        let skip = self.memory.as_ptr().align_offset(ALIGN as usize).min(ALIGN as usize);
        self.memory.get_mut(skip..skip + length).unwrap_or_default()
    }
}

thread_local! {
    static COLUMNS: std::cell::RefCell<Aligned> = const { std::cell::RefCell::new(Aligned { memory: Vec::new() }) };
}

/// Splits whole rows into data columns, one after the other, and computes the parity columns after them.
pub(super) fn split(rows: RowShape, bytes: &[u8], columns: &mut [u8]) -> Result<()> {
    let (unit, length) = (rows.unit as usize, bytes.len() / rows.width.max(1));
    let (data, parity) = columns.split_at_mut((length * rows.width).min(columns.len()));
    let mut data: Vec<&mut [u8]> = data.chunks_mut(length.max(1)).collect();
    for (number, row) in bytes.chunks(unit * rows.width).enumerate() {
        for (part, column) in row.chunks(unit).zip(&mut data) {
            if let Some(to) = column.get_mut(number * unit..number * unit + part.len()) {
                to.copy_from_slice(part);
            }
        }
    }
    let mut parity: Vec<&mut [u8]> = parity.chunks_mut(length.max(1)).collect();
    parity::encode(&data, &mut parity).map_err(|_| PoolError::Format(Damage::Structure("columns that are no rows")))
}

impl Disks {
    /// Geometry of a segment's rows; `None` where its columns are copies.
    pub(super) fn rows(&self, layout: &Layout, at: SegmentAt<'_>) -> Option<RowShape> {
        let parity = at.place.parity();
        (parity > 0).then(|| RowShape { width: at.place.width(), parity, unit: layout.unit(at.place) })
    }

    /// Writes a piece to all columns that hold everything before it.
    pub(super) fn write_columns(
        &self,
        at: SegmentAt<'_>,
        stream: WriteStream,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Copies> {
        let layout = self.layout();
        let Some(rows) = self.rows(&layout, at) else {
            let columns: Vec<&[u8]> = at.place.iter().map(|_| bytes).collect();
            return self.write_each(&layout, at, (stream, bytes.len()), offset, &columns);
        };
        if !offset.is_multiple_of(rows.length()) || !(bytes.len() as u64).is_multiple_of(rows.length()) {
            return Err(PoolError::Format(Damage::Structure("a write of less than a row")));
        }
        COLUMNS.with_borrow_mut(|memory| {
            let length = bytes.len() / rows.width;
            let memory = memory.of(length * (rows.width + rows.parity));
            split(rows, bytes, memory)?;
            let columns: Vec<&[u8]> = memory.chunks(length.max(1)).collect();
            self.write_each(&layout, at, (stream, bytes.len()), offset / rows.width as u64, &columns)
        })
    }

    /// Writes each column's part of a piece.
    fn write_each(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        what: (WriteStream, usize),
        offset: u64,
        columns: &[&[u8]],
    ) -> Result<Copies> {
        let known = self.incomplete.of(at.segment);
        let mut lacking = known;
        let mut parts: Vec<(usize, SlotAddress, &[u8])> = Vec::with_capacity(columns.len());
        for (column, (slot, bytes)) in at.place.iter().zip(columns).enumerate() {
            if !has(known, column) && layout.is_used(slot.device) {
                parts.push((column, *slot, bytes));
            } else {
                lacking |= 1 << column;
            }
        }
        let write = |(_, slot, bytes): &(usize, SlotAddress, &[u8])| self.write_begun(what, *slot, offset, bytes);
        // Devices that are written by direct I/O are written in parallel.
        let written: Vec<Result<()>> = if parts.len() > 1 && what.1 >= PIECE / 2 && what.0 == WriteStream::Data {
            workers::in_threads(&parts, write)
        } else {
            parts.iter().map(write).collect()
        };
        let mut failed = None;
        for (part, written) in parts.iter().zip(written) {
            let (column, slot, _) = part;
            let Err(error) = written else { continue };
            if !matches!(error, PoolError::Device { .. }) || layout.is_plain() && at.place.len() < 2 {
                return Err(error);
            }
            let again = || write(part);
            let made = match (layout.is_single(slot.device), at.place.len() > 1) {
                (true, true) => {
                    self.avoid(slot.device, &error);
                    false
                }
                // In groups no other layer decides how long to wait for the device.
                (true, false) if self.tell_needed(slot.device, &error, Some(&again)) => true,
                (true, false) => return Err(error),
                (false, _) => self.lose_or_write(slot.device, &error, &again)?,
            };
            if !made {
                lacking |= 1 << *column;
                failed = Some(error);
            }
        }
        let spare = at.place.len().saturating_sub(at.place.width());
        if lacking.count_ones() as usize > spare {
            let error = failed.unwrap_or(PoolError::Refused("too many devices of a group are missing".to_owned()));
            let tried = parts.iter().fold(0, |tried, (column, ..)| tried | 1 << *column);
            let again = || parts.iter().filter(|(column, ..)| has(lacking, *column)).try_for_each(write);
            let device = at.place.first().map_or(0, |slot| slot.device);
            let hopeless = layout.is_plain() || (lacking & !tried).count_ones() as usize > spare;
            if hopeless || !self.tell_needed(device, &error, Some(&again)) {
                return Err(error);
            }
            lacking &= !tried;
        }
        let fewer = lacking != known && self.incomplete.note(at.segment, lacking);
        Ok(if fewer { Copies::Fewer } else { Copies::All })
    }

    /// Columns that should not be read if others are available: they lack data, or their device does.
    pub(super) fn doubtful(&self, layout: &Layout, at: SegmentAt<'_>) -> Columns {
        let lacking = self.incomplete.of(at.segment);
        if layout.is_plain() {
            return lacking;
        }
        let out = at.place.iter().enumerate().filter(|(_, slot)| !layout.is_whole(slot.device));
        out.fold(lacking, |columns, (column, _)| columns | 1 << column)
    }

    /// Columns of copies in the order in which they are read: complete ones first, in groups rotated by the segment
    /// number.
    fn copies_in_order(&self, layout: &Layout, at: SegmentAt<'_>) -> Vec<usize> {
        let doubtful = self.doubtful(layout, at);
        let mut order = copies_by_turn(layout, at);
        let late = |column: &usize| at.place.get(*column).is_some_and(|slot| self.is_late(layout, *slot));
        order.sort_by_cached_key(|column| (has(doubtful, *column), late(column)));
        order
    }

    /// Whether reads of this slot should go to another device because its device is slow.
    fn is_late(&self, layout: &Layout, slot: SlotAddress) -> bool {
        !layout.is_plain() && self.paces.avoids(layout, slot.device)
    }

    /// Columns that reconstruction `way` of rows leaves out; `None` after the last one.
    fn left_out(&self, layout: &Layout, at: SegmentAt<'_>, rows: RowShape, way: usize) -> Option<Columns> {
        match way.checked_sub(1) {
            None => Some(self.left_out_first(layout, at, rows, &|slot| self.is_late(layout, *slot))),
            Some(way) => sets(rows).take(MOST_WAYS).nth(way),
        }
    }

    /// Columns that the first reconstruction leaves out, where `late` selects slow devices.
    fn left_out_first(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        rows: RowShape,
        late: &dyn Fn(&SlotAddress) -> bool,
    ) -> Columns {
        let doubtful = self.doubtful(layout, at);
        let mut first = if doubtful.count_ones() as usize <= rows.parity { doubtful } else { 0 };
        for (column, slot) in at.place.iter().enumerate() {
            if (first.count_ones() as usize) < rows.parity && !has(first, column) && late(slot) {
                first |= 1 << column;
            }
        }
        first
    }

    /// Column that copy `way` reads.
    fn copy_of(&self, layout: &Layout, at: SegmentAt<'_>, way: usize) -> Option<usize> {
        match way.checked_sub(1) {
            Some(way) if !layout.is_plain() => Some(way).filter(|column| *column < at.place.len()),
            _ => self.copies_in_order(layout, at).get(way).copied(),
        }
    }

    pub(super) fn count_ways(&self, at: SegmentAt<'_>) -> usize {
        let layout = self.layout();
        match self.rows(&layout, at) {
            None if layout.is_plain() || at.place.len() < 2 => at.place.len().max(1),
            None => at.place.len() + 1,
            Some(rows) => sets(rows).take(MOST_WAYS).count() + 1,
        }
    }

    pub(super) fn first_column(&self, at: SegmentAt<'_>, way: usize) -> Option<SlotAddress> {
        let layout = self.layout();
        let column = match self.rows(&layout, at) {
            None => self.copy_of(&layout, at, way)?,
            Some(rows) => {
                let out = self.left_out(&layout, at, rows, way)?;
                (0..at.place.len()).find(|column| !has(out, *column))?
            }
        };
        at.place.get(column).copied()
    }

    pub(super) fn blamed_column(&self, at: SegmentAt<'_>, way: usize) -> Option<SlotAddress> {
        let layout = self.layout();
        let Some(rows) = self.rows(&layout, at) else { return self.first_column(at, 0) };
        let out = self.left_out(&layout, at, rows, way)?;
        let usual = self.left_out(&layout, at, rows, 0)?;
        let column = (0..at.place.len()).find(|column| has(out & !usual, *column));
        at.place.get(column.or_else(|| (0..at.place.len()).find(|column| has(usual, *column)))?).copied()
    }

    /// Equivalent copies of a segment, in read order: on different devices, complete, none of them slow; `None` where
    /// there are fewer than two.
    pub(super) fn copies_to_choose(&self, layout: &Layout, at: SegmentAt<'_>) -> Option<Vec<Copy>> {
        let late = |slot: &SlotAddress| !layout.is_plain() && self.paces.is_slow(layout, slot.device);
        self.copies_but(layout, at, &late)
    }

    /// Equivalent copies of a segment, without those that `late` selects.
    fn copies_but(&self, layout: &Layout, at: SegmentAt<'_>, late: &dyn Fn(&SlotAddress) -> bool) -> Option<Vec<Copy>> {
        let devices = || at.place.iter().map(|slot| slot.device);
        if at.place.parity() > 0 || at.place.len() < 2 || devices().skip(1).all(|other| devices().next() == Some(other))
        {
            return None;
        }
        let doubtful = self.doubtful(layout, at);
        let copies = copies_by_turn(layout, at).into_iter().filter_map(|column| {
            let slot = at.place.get(column).filter(|slot| !has(doubtful, column) && !late(slot))?;
            Some(Copy { column, device: slot.device, start: slots::start(*slot, self.slot) })
        });
        let copies: Vec<Copy> = copies.collect();
        (copies.len() > 1).then_some(copies)
    }

    /// Fills the buffer from the copies whose devices have the least pending work.
    pub(super) fn read_nearest(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        into: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        let layout = self.layout();
        let late = |slot: &SlotAddress| self.is_late(&layout, *slot);
        let Some(copies) = self.copies_but(&layout, at, &late) else {
            return self.read_columns(at, 0, offset, into, sources);
        };
        for range in balance::parts(offset, into.len() as u64) {
            let base = (range.start - offset) as usize;
            let Some(part) = into.get_mut(base..(range.end - offset) as usize) else { continue };
            let mut read_first =
                |part: &mut [u8]| sources.within(base, |sources| self.read_columns(at, 0, range.start, part, sources));
            let Some((copy, before)) = self.balance.begin(at.segment, &range, &copies) else {
                read_first(part)?;
                continue;
            };
            let began = patience::now();
            let reader = at.place.get(copy.column).map(|slot| (self.reader_of(&layout, *slot), *slot));
            let read = match reader {
                Some((reader, slot)) => self.read_of(reader, slot, range.start, part),
                None => self.gone(copy.device),
            };
            // The latency of an announced read is no measure of the device.
            if let (Some((reader, _)), Some(before), false) = (reader, before, layout.is_plain()) {
                self.paces.note(&layout, reader, before as usize + part.len(), began);
            }
            self.balance.end(&copy, range.end - range.start);
            // In groups another copy is read where this one fails with an I/O error.
            match read {
                Err(PoolError::Device { .. }) if !layout.is_plain() => read_first(part)?,
                read => {
                    read?;
                    sources.note(base..base + part.len(), reader.map(|(reader, _)| reader));
                }
            }
        }
        Ok(())
    }

    pub(super) fn expect_columns(&self, at: SegmentAt<'_>, offset: u64, length: u64) {
        let layout = self.layout();
        let Some(rows) = self.rows(&layout, at) else {
            if let Some(copies) = self.copies_to_choose(&layout, at) {
                for range in balance::parts(offset, length) {
                    let copy = self.balance.announce(at.segment, &range, &copies);
                    if let Some(slot) = copy.and_then(|copy| at.place.get(copy.column)) {
                        self.expect_slot(*slot, range.start, range.end - range.start);
                    }
                }
            } else if let Some(slot) = self.first_column(at, 0) {
                self.expect_slot(slot, offset, length);
            }
            return;
        };
        let parts = rows.parts(offset, length as usize);
        let extents = rows.extents(&parts);
        let unused = at.place.iter().enumerate().filter(|(_, slot)| !layout.is_used(slot.device));
        let first = self.left_out_first(&layout, at, rows, &|slot| self.paces.is_slow(&layout, slot.device));
        let out = unused.fold(first, |out, (column, _)| out | 1 << column);
        if !parts.iter().any(|part| has(out, part.column)) {
            for (slot, extent) in at.place.iter().zip(extents) {
                if let Some((from, to)) = extent {
                    self.expect_slot(*slot, from, to - from);
                }
            }
            return;
        }
        // Left-out columns are reconstructed from all others.
        let there = |column: &usize| !has(out, *column);
        let lost = (0..rows.width).filter(|column| !there(column)).count();
        let parity = (rows.width..rows.width + rows.parity).filter(there).take(lost);
        let extent = extents.into_iter().flatten().reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)));
        let Some((from, to)) = extent else { return };
        for slot in (0..rows.width).filter(there).chain(parity).filter_map(|column| at.place.get(column)) {
            self.expect_slot(*slot, from, to - from);
        }
    }

    /// The device of a pair that is read first for this slot.
    fn reader_of(&self, layout: &Layout, slot: SlotAddress) -> u16 {
        if !layout.has_pairs() {
            return slot.device;
        }
        let by_turn = [Standing::has_all, Standing::works].into_iter();
        let mut found = by_turn.filter_map(|may| layout.holders(slot.device).find(|(_, standing)| may(standing)));
        found.next().map_or(slot.device, |(holder, _)| holder)
    }

    fn expect_slot(&self, slot: SlotAddress, offset: u64, length: u64) {
        let holder = self.reader_of(&self.layout(), slot);
        if let Ok(device) = self.device(holder) {
            device.expect(slots::start(slot, self.slot) + offset, length);
        }
    }

    /// Fills the buffer from copy or reconstruction `way` of a segment.
    pub(super) fn read_columns(
        &self,
        at: SegmentAt<'_>,
        way: usize,
        offset: u64,
        into: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        let layout = self.layout();
        let missing = || PoolError::Format(Damage::Structure("a segment without a place"));
        let Some(rows) = self.rows(&layout, at) else {
            let first = self.copy_of(&layout, at, way).ok_or_else(missing)?;
            let others = if layout.is_plain() { Vec::new() } else { self.copies_in_order(&layout, at) };
            let mut read = Err(missing());
            // In groups an unreadable copy is replaced by another one, which the caller verifies as well.
            for column in std::iter::once(first).chain(others.into_iter().filter(|column| *column != first)) {
                let Some(slot) = at.place.get(column) else { continue };
                let tried = self.usable_device(&layout, slot.device).and_then(|()| self.read_slot(*slot, offset, into));
                read = tried.map(|holder| sources.note(0..into.len(), Some(holder)));
                if !matches!(read, Err(PoolError::Device { .. })) {
                    break;
                }
            }
            return read;
        };
        let mut out = self.left_out(&layout, at, rows, way).ok_or_else(missing)?;
        for (column, slot) in at.place.iter().enumerate() {
            if !layout.is_used(slot.device) {
                out |= 1 << column;
            }
        }
        self.read_rows(at, rows, out, offset, into, sources)
    }

    /// Fills the buffer from rows without reading the columns in `out`.
    fn read_rows(
        &self,
        at: SegmentAt<'_>,
        rows: RowShape,
        mut out: Columns,
        offset: u64,
        into: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        let parts = rows.parts(offset, into.len());
        let (mut failed, noted) = (None, sources.count());
        loop {
            sources.forget_behind(noted);
            let needs = parts.iter().any(|part| has(out, part.column));
            let read = if needs {
                self.read_around(at, rows, out, &parts, into, sources)
            } else {
                self.read_straight(at, rows, &parts, into, sources)
            };
            match read {
                // An unreadable column is left out, and the rows are reconstructed.
                Err((column, error @ PoolError::Device { .. })) if !has(out, column) => {
                    out |= 1 << column;
                    failed = Some(error);
                    if out.count_ones() as usize > rows.parity {
                        break;
                    }
                }
                Err((_, error)) => return Err(failed.unwrap_or(error)),
                Ok(()) => return Ok(()),
            }
        }
        Err(failed.unwrap_or(PoolError::Format(Damage::Structure("a segment without a place"))))
    }

    /// Reads a range from the columns that hold it; an error names the column that could not be read.
    fn read_straight(
        &self,
        at: SegmentAt<'_>,
        rows: RowShape,
        parts: &[Part],
        into: &mut [u8],
        sources: &mut Sources,
    ) -> std::result::Result<(), (usize, PoolError)> {
        let extents = rows.extents(parts);
        if parts.len() > rows.width {
            let mut buffer = Vec::new();
            for (column, slot) in at.place.iter().enumerate() {
                if let Some((from, to)) = extents.get(column).copied().flatten() {
                    self.expect_slot(*slot, from, to - from);
                }
            }
            for (column, slot) in at.place.iter().enumerate() {
                let Some((from, to)) = extents.get(column).copied().flatten() else { continue };
                buffer.resize((to - from) as usize, 0);
                let holder = self.read_slot(*slot, from, &mut buffer).map_err(|error| (column, error))?;
                for part in parts.iter().filter(|part| part.column == column) {
                    sources.note(part.range.clone(), Some(holder));
                    let start = (part.offset - from) as usize;
                    if let (Some(to), Some(from)) =
                        (into.get_mut(part.range.clone()), buffer.get(start..start + part.range.len()))
                    {
                        to.copy_from_slice(from);
                    }
                }
            }
            return Ok(());
        }
        if parts.len() > 1 {
            for part in parts {
                if let Some(slot) = at.place.get(part.column) {
                    self.expect_slot(*slot, part.offset, part.range.len() as u64);
                }
            }
        }
        for part in parts {
            if let (Some(slot), Some(to)) = (at.place.get(part.column), into.get_mut(part.range.clone())) {
                let holder = self.read_slot(*slot, part.offset, to).map_err(|error| (part.column, error))?;
                sources.note(part.range.clone(), Some(holder));
            }
        }
        Ok(())
    }

    /// Reads the available columns of the rows that hold a range, and reconstructs the others.
    fn read_around(
        &self,
        at: SegmentAt<'_>,
        rows: RowShape,
        out: Columns,
        parts: &[Part],
        into: &mut [u8],
        sources: &mut Sources,
    ) -> std::result::Result<(), (usize, PoolError)> {
        let (from, to) = rows
            .extents(parts)
            .into_iter()
            .flatten()
            .fold((u64::MAX, 0), |(from, to), (first, last)| (from.min(first), to.max(last)));
        let WholeColumns { columns, holders } = self.whole_columns(at, rows, out, from, (to - from) as usize)?;
        for part in parts {
            sources.note(part.range.clone(), holders.get(part.column).copied().flatten());
            let start = (part.offset - from) as usize;
            let source = columns.get(part.column).and_then(|column| column.get(start..start + part.range.len()));
            if let (Some(to), Some(from)) = (into.get_mut(part.range.clone()), source) {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }

    /// Reads a range of all data columns without the columns in `out`, and as many parity columns as reconstruction
    /// needs.
    pub(super) fn whole_columns(
        &self,
        at: SegmentAt<'_>,
        rows: RowShape,
        out: Columns,
        from: u64,
        length: usize,
    ) -> std::result::Result<WholeColumns, (usize, PoolError)> {
        let lost: Vec<usize> = (0..rows.width).filter(|column| has(out, *column)).collect();
        let whole: Vec<usize> =
            (rows.width..rows.width + rows.parity).filter(|column| !has(out, *column)).take(lost.len()).collect();
        let too_many = || (usize::MAX, PoolError::Refused("too many devices of a group are missing".to_owned()));
        if whole.len() < lost.len() {
            return Err(too_many());
        }
        let count = whole.last().map_or(rows.width, |last| last + 1);
        let is_read = |column: usize| if column < rows.width { !has(out, column) } else { whole.contains(&column) };
        for (column, slot) in at.place.iter().enumerate().take(count).filter(|(column, _)| is_read(*column)) {
            let _ = column;
            self.expect_slot(*slot, from, length as u64);
        }
        let (mut columns, mut holders) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (column, slot) in at.place.iter().enumerate().take(count) {
            let mut bytes = vec![0; length];
            holders.push(match is_read(column) {
                true => Some(self.read_slot(*slot, from, &mut bytes).map_err(|error| (column, error))?),
                false => None,
            });
            columns.push(bytes);
        }
        let lost: Vec<usize> = (0..count).filter(|column| !is_read(*column)).collect();
        let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(|column: &mut Vec<u8>| column.as_mut_slice()).collect();
        parity::reconstruct(&mut slices, rows.width, &lost).map_err(|_| too_many())?;
        Ok(WholeColumns { columns, holders })
    }
}

/// A range of all data columns, and for each that was not reconstructed, the device that it was read from.
pub(super) struct WholeColumns {
    pub(super) columns: Vec<Vec<u8>>,
    holders: Vec<Option<u16>>,
}

/// Sets of columns to leave out, smallest first, as far as parity can reconstruct them and a data column is among
/// them; the empty set is the first.
fn sets(rows: RowShape) -> impl Iterator<Item = Columns> {
    let data: Columns = (1 << rows.width) - 1;
    sets_of(rows.width + rows.parity, rows.parity).filter(move |set| *set == 0 || set & data != 0)
}

/// Sets of up to `most` columns (three at most), smallest first.
pub(super) fn sets_of(count: usize, most: usize) -> impl Iterator<Item = Columns> {
    let singles = (0..count).map(|column| 1 << column);
    let pairs = (0..count).flat_map(move |a| (a + 1..count).map(move |b| 1 << a | 1 << b));
    let threes = (0..count)
        .flat_map(move |a| (a + 1..count).flat_map(move |b| (b + 1..count).map(move |c| 1 << a | 1 << b | 1 << c)));
    let all = std::iter::once(0).chain(singles).chain(pairs).chain(threes);
    all.filter(move |set: &Columns| set.count_ones() as usize <= most)
}
