//! Block-wise reconstruction: composes a range of a segment from pieces of different copies or reconstructions, where
//! none of them is right as a whole because different columns are damaged in different blocks.
//!
//! Caller: the store, by [`Backend::piece_together`](super::super::Backend::piece_together), after all copies and
//! reconstructions have failed. Where a block has spare redundancy, parity shows which columns are wrong in it;
//! otherwise the caller's check of the whole range decides.
//!
//! Invariants:
//! - A returned range was checked as a whole.
//! - The number of checks is limited: the most likely guesses come first, in which the left-out columns
//!   change seldom from one piece to the next.

use std::ops::Range;

use super::columns::RowShape;
use super::layout::{Layout, Standing};
use super::{Columns, Disks, Result, SegmentAt};
use crate::label::SlotAddress;
use crate::parity;

/// Devices lose whole blocks of this length, bytes: pieces are no shorter.
const BLOCK: usize = 4096;

/// Cost of extending a guess by one more piece, in bytes of the budget for checks.
const STEP: u64 = 64;

/// One variant of a piece: the set of columns that distinguishes it, its bytes for parts of the range, and the
/// devices that are wrong in this piece if the variant is right.
struct Source {
    id: Columns,
    parts: Vec<(Range<usize>, Vec<u8>)>,
    wrong: Vec<u16>,
}

/// A block with several differing variants.
struct Piece {
    block: usize,
    sources: Vec<Source>,
}

/// Adjacent pieces that share a variant.
struct Run {
    pieces: Range<usize>,
    ids: Vec<Columns>,
}

/// A range of a column as read, and which of its blocks were readable.
struct Found {
    bytes: Vec<u8>,
    readable: Vec<bool>,
}

impl Found {
    fn block(&self, block: usize) -> &[u8] {
        self.bytes.get(block * BLOCK..(block + 1) * BLOCK).unwrap_or_default()
    }

    fn has(&self, block: usize) -> bool {
        self.readable.get(block).copied().unwrap_or(false)
    }
}

/// The search for the combination of variants that passes the check.
struct Search<'a> {
    into: &'a mut [u8],
    pieces: Vec<Piece>,
    /// Remaining budget, bytes to check.
    left: &'a mut u64,
    is_right: &'a mut dyn FnMut(&[u8]) -> bool,
}

impl Search<'_> {
    /// Searches the right combination: if found, it is in the buffer, and the devices that are wrong somewhere are
    /// returned.
    fn run(mut self) -> Option<Vec<u16>> {
        let runs = self.runs();
        let each = (0..).zip(&self.pieces).map(|(at, piece)| Run { pieces: at..at + 1, ids: piece.ids() }).collect();
        let all = if runs.len() == self.pieces.len() { vec![runs] } else { vec![runs, each] };
        for (number, runs) in all.iter().enumerate() {
            // Damage in neighbouring blocks is more likely than not on one device.
            let kept = if number + 1 < all.len() { *self.left / 2 } else { 0 };
            for changes in 0..runs.len().max(1) {
                if let Some(chosen) = self.choose(runs, changes, kept, &mut Vec::new()) {
                    return Some(chosen);
                }
                if *self.left <= kept {
                    break;
                }
            }
        }
        None
    }

    /// Groups adjacent pieces that share a variant.
    fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (at, piece) in self.pieces.iter().enumerate() {
            let before = at.checked_sub(1).and_then(|before| self.pieces.get(before));
            let adjoins = before.is_some_and(|before| before.block + 1 == piece.block);
            if let Some(run) = runs.last_mut().filter(|_| adjoins) {
                let both: Vec<Columns> = run.ids.iter().copied().filter(|id| piece.source(*id).is_some()).collect();
                if !both.is_empty() {
                    (run.pieces.end, run.ids) = (at + 1, both);
                    continue;
                }
            }
            runs.push(Run { pieces: at..at + 1, ids: piece.ids() });
        }
        runs
    }

    /// Tries all variants for the remaining runs, with exactly `changes` changes of the variant between runs.
    fn choose(&mut self, runs: &[Run], changes: usize, kept: u64, chosen: &mut Vec<Columns>) -> Option<Vec<u16>> {
        *self.left = self.left.saturating_sub(STEP);
        let Some(run) = runs.get(chosen.len()) else {
            return if changes == 0 { self.judge(runs, chosen) } else { None };
        };
        if changes > runs.len() - chosen.len() {
            return None;
        }
        for id in &run.ids {
            let left = match chosen.last() {
                Some(before) if before != id => changes.checked_sub(1),
                _ => Some(changes),
            };
            let Some(left) = left else { continue };
            chosen.push(*id);
            let found = self.choose(runs, left, kept, chosen);
            chosen.pop();
            if found.is_some() || *self.left <= kept {
                return found;
            }
        }
        None
    }

    fn judge(&mut self, runs: &[Run], chosen: &[Columns]) -> Option<Vec<u16>> {
        *self.left = self.left.saturating_sub(self.into.len().max(BLOCK) as u64);
        let mut wrong = Vec::new();
        for (run, id) in runs.iter().zip(chosen) {
            for piece in self.pieces.get(run.pieces.clone()).unwrap_or_default() {
                let source = piece.source(*id)?;
                wrong.extend(&source.wrong);
                for (range, bytes) in &source.parts {
                    self.into.get_mut(range.clone())?.copy_from_slice(bytes);
                }
            }
        }
        (self.is_right)(self.into).then_some(wrong)
    }
}

impl Piece {
    fn ids(&self) -> Vec<Columns> {
        self.sources.iter().map(|source| source.id).collect()
    }

    fn source(&self, id: Columns) -> Option<&Source> {
        self.sources.iter().find(|source| source.id == id)
    }
}

fn has(columns: Columns, column: usize) -> bool {
    columns >> column & 1 == 1
}

impl Disks {
    /// Fills the buffer with a range of a segment, composed so that the check accepts it; returns the devices that
    /// are wrong somewhere in it, or `None` where it was not found within the budget.
    pub(super) fn put_together(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        into: &mut [u8],
        left: &mut u64,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Option<Vec<u16>>> {
        let layout = self.layout();
        let found = match self.rows(&layout, at) {
            None => self.pieces_of_copies(&layout, at, offset, into),
            Some(rows) => self.pieces_of_rows(&layout, at, rows, offset, into),
        };
        let Some((pieces, mut wrong)) = found else { return Ok(None) };
        wrong.extend(match (Search { into, pieces, left, is_right }).run() {
            Some(more) => more,
            None => return Ok(None),
        });
        wrong.sort_unstable();
        wrong.dedup();
        Ok(Some(wrong))
    }

    /// Reads a range of a slot; block by block where it cannot be read at once.
    fn read_blocks(&self, from: u64, length: usize, read: &dyn Fn(u64, &mut [u8]) -> Result<()>) -> Found {
        let mut bytes = vec![0; length];
        if read(from, &mut bytes).is_ok() {
            return Found { readable: vec![true; length.div_ceil(BLOCK)], bytes };
        }
        let each = bytes.chunks_mut(BLOCK).enumerate();
        let readable = each.map(|(block, bytes)| read(from + (block * BLOCK) as u64, bytes).is_ok()).collect();
        Found { bytes, readable }
    }

    /// Pieces of copies that differ; blocks in which all agree are put into the buffer. `None` where a block is
    /// unreadable in all copies.
    fn pieces_of_copies(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> Option<(Vec<Piece>, Vec<u16>)> {
        let from = offset / BLOCK as u64 * BLOCK as u64;
        let length = (offset - from) as usize + into.len();
        let holders = |slot: &SlotAddress| -> Vec<u16> {
            match layout.is_plain() {
                true => vec![slot.device],
                false => layout.holders(slot.device).filter(|(_, one)| one.works()).map(|(holder, _)| holder).collect(),
            }
        };
        let all = at.place.iter().flat_map(|slot| holders(slot).into_iter().map(move |holder| (holder, *slot)));
        let mut copies: Vec<(u16, SlotAddress)> = all.take(Columns::BITS as usize).collect();
        // Copies that may lack data come last.
        copies.sort_by_key(|(holder, _)| !layout.has_all(*holder));
        let read = |(holder, slot): &(u16, SlotAddress)| {
            self.read_blocks(from, length, &|offset, bytes| self.read_of(*holder, *slot, offset, bytes))
        };
        let found: Vec<Found> = copies.iter().map(read).collect();
        let mut pieces = Vec::new();
        for block in 0..length.div_ceil(BLOCK) {
            let start = (offset - from) as usize;
            let within = (block * BLOCK).max(start)..((block + 1) * BLOCK).min(length);
            let range = within.start - start..within.end - start;
            let there: Vec<usize> =
                (0..found.len()).filter(|copy| found.get(*copy).is_some_and(|it| it.has(block))).collect();
            let bytes_of =
                |copy: usize| found.get(copy).and_then(|found| found.bytes.get(within.clone())).unwrap_or_default();
            let first = bytes_of(*there.first()?);
            if there.iter().all(|copy| bytes_of(*copy) == first) {
                into.get_mut(range)?.copy_from_slice(first);
                continue;
            }
            let source = |copy: &usize| {
                let bytes = bytes_of(*copy);
                let others = there.iter().filter(|other| bytes_of(**other) != bytes);
                let wrong = others.filter_map(|other| copies.get(*other).map(|(holder, _)| *holder)).collect();
                Source { id: *copy as Columns, parts: vec![(range.clone(), bytes.to_vec())], wrong }
            };
            pieces.push(Piece { block, sources: there.iter().map(source).collect() });
        }
        Some((pieces, Vec::new()))
    }

    /// Pieces of rows for which parity does not show what is right; the other blocks are put into the buffer, and
    /// their wrong devices are returned. `None` where a block cannot be reconstructed.
    fn pieces_of_rows(
        &self,
        layout: &Layout,
        at: SegmentAt<'_>,
        rows: RowShape,
        offset: u64,
        into: &mut [u8],
    ) -> Option<(Vec<Piece>, Vec<u16>)> {
        let parts = rows.parts(offset, into.len());
        let from = parts.iter().map(|part| part.offset).min()? / BLOCK as u64 * BLOCK as u64;
        let to = parts.iter().map(|part| part.offset + part.range.len() as u64).max()?;
        let blocks = ((to - from) as usize).div_ceil(BLOCK);
        let read = |slot: &SlotAddress| {
            self.read_blocks(from, blocks * BLOCK, &|offset, bytes| {
                let read = self.usable_device(layout, slot.device).and_then(|()| self.read_slot(*slot, offset, bytes));
                read.map(drop)
            })
        };
        let columns: Vec<Found> = at.place.iter().map(read).collect();
        let is_stale = |slot: &SlotAddress| !layout.holders(slot.device).any(|(_, one)| Standing::has_all(one));
        let stale = (0..).zip(at.place.iter()).filter(|(_, slot)| is_stale(slot));
        let stale: Columns = stale.fold(0, |stale, (column, _): (usize, _)| stale | 1 << column);
        let devices = |set: Columns| -> Vec<u16> {
            at.place.iter().enumerate().filter(|(column, _)| has(set, *column)).map(|(_, slot)| slot.device).collect()
        };
        let (mut pieces, mut wrong) = (Vec::new(), Vec::new());
        for block in 0..blocks {
            let start = from + (block * BLOCK) as u64;
            // The parts of the range in this block, by column.
            let here: Vec<(usize, Range<usize>, Range<usize>)> = parts
                .iter()
                .filter_map(|part| {
                    let (first, last) =
                        (part.offset.max(start), (part.offset + part.range.len() as u64).min(start + BLOCK as u64));
                    let within = |at: u64| (at - start) as usize;
                    let range = |at: u64| part.range.start + (at - part.offset) as usize;
                    (first < last).then(|| (part.column, within(first)..within(last), range(first)..range(last)))
                })
                .collect();
            let wanted = here.iter().fold(0, |set: Columns, (column, ..)| set | 1 << column);
            let unread =
                (0..columns.len()).filter(|column| !columns.get(*column).is_some_and(|found| found.has(block)));
            let unread: Columns = unread.fold(0, |set, column| set | 1 << column);
            let mut sources: Vec<Source> = candidates(rows, &columns, block, unread, wanted)
                .into_iter()
                .map(|(set, data)| {
                    let part = |(column, within, range): &(usize, Range<usize>, Range<usize>)| {
                        Some((range.clone(), data.get(*column)?.get(within.clone())?.to_vec()))
                    };
                    let is_other = |column: &usize| {
                        let read = columns.get(*column).map(|found| found.block(block));
                        data.get(*column).map(Vec::as_slice) != read
                    };
                    let other = (0..columns.len()).filter(is_other).fold(0, |set: Columns, column| set | 1 << column);
                    Source {
                        id: set,
                        parts: here.iter().filter_map(part).collect(),
                        wrong: devices(other & set & !unread),
                    }
                })
                .collect();
            // Variants that leave out the stale columns come first.
            sources.sort_by_key(|source| source.id & stale != stale);
            if here.is_empty() {
                continue;
            }
            match (sources.pop(), sources.is_empty()) {
                (None, _) => return None,
                (Some(only), true) => {
                    wrong.extend(&only.wrong);
                    for (range, bytes) in only.parts {
                        into.get_mut(range)?.copy_from_slice(&bytes);
                    }
                }
                (Some(last), false) => {
                    sources.push(last);
                    pieces.push(Piece { block, sources });
                }
            }
        }
        Some((pieces, wrong))
    }
}

/// Sets of columns that may be wrong in a block, each with the resulting data columns. With spare parity, only the
/// sets that it confirms; otherwise all that parity can reconstruct, as far as wanted columns differ.
fn candidates(
    rows: RowShape,
    columns: &[Found],
    block: usize,
    unread: Columns,
    wanted: Columns,
) -> Vec<(Columns, Vec<Vec<u8>>)> {
    let count = rows.width + rows.parity;
    let sets = |size: u32| {
        let all = super::columns::sets_of(count, rows.parity);
        all.filter(move |set: &Columns| set & unread == unread && set.count_ones() == size)
    };
    let as_is =
        || -> Vec<Vec<u8>> { columns.iter().take(rows.width).map(|column| column.block(block).to_vec()).collect() };
    for size in unread.count_ones()..rows.parity as u32 {
        let fits =
            |set: Columns| rebuilt(rows, columns, block, set).filter(|(_, fits)| *fits).map(|(data, _)| (set, data));
        let found: Vec<_> = sets(size).filter_map(fits).collect();
        if !found.is_empty() {
            return found;
        }
    }
    let differs = |set: &Columns| set & wanted != 0;
    let given = |set: Columns| Some((set, rebuilt(rows, columns, block, set)?.0));
    let mut found: Vec<_> = sets(rows.parity as u32).filter(differs).filter_map(given).collect();
    if unread & wanted == 0 {
        found.insert(0, (0, as_is()));
    }
    found
}

/// All columns of a block, reconstructed as if the `wrong` ones were lost, and whether the remaining parity matches.
fn rebuilt(rows: RowShape, columns: &[Found], block: usize, wrong: Columns) -> Option<(Vec<Vec<u8>>, bool)> {
    let mut all: Vec<Vec<u8>> = columns.iter().map(|column| column.block(block).to_vec()).collect();
    let lost: Vec<usize> = (0..all.len()).filter(|column| has(wrong, *column)).collect();
    let mut slices: Vec<&mut [u8]> = all.iter_mut().map(Vec::as_mut_slice).collect();
    parity::reconstruct(&mut slices, rows.width, &lost).ok()?;
    let there = all.split_off(rows.width);
    let mut right: Vec<Vec<u8>> = vec![vec![0; BLOCK]; rows.parity];
    let mut slices: Vec<&mut [u8]> = right.iter_mut().map(Vec::as_mut_slice).collect();
    parity::encode(&all, &mut slices).ok()?;
    let fits = there == right;
    all.append(&mut right);
    Some((all, fits))
}
