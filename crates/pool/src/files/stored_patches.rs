//! Patches according to their rows: the parts of a record that each holds, and those that a read
//! uses.
//!
//! Called by reads (`content`), by the functions that store patches and blocks (`patches`,
//! `split`), and by admission (`quota_check`). Invariant: if several patches hold a part, the
//! newest is read.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::pointer::Pointer;
use crate::rows::Patch;

/// Shortest block, bytes: the unit in which the kernel writes pages.
pub(super) const BLOCK_LEAST: usize = 4096;
/// Most blocks of a record.
pub(super) const BLOCKS_MOST: usize = 256;
/// A frame of zeros takes at most this fraction (1/n) of the record.
const ZEROS_SHARE: u64 = 64;

/// Whether a record with this length, whose extent's frame is charged so much, may be a split one:
/// the space of that frame does not count.
pub(super) fn is_split(charged: u64, base: usize) -> bool {
    charged <= base as u64 / ZEROS_SHARE
}

/// A stored patch.
#[derive(Clone, Debug)]
pub(super) struct StoredPatch {
    pub(super) record: u64,
    pub(super) number: u64,
    pub(super) patch: Patch,
}

impl StoredPatch {
    /// The parts of the record that it holds.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        self.patch.pieces.iter().map(|(from, length)| *from as usize..*from as usize + *length as usize)
    }
}

/// A part of a record that is read from a patch.
pub(super) struct Visible {
    /// Its end in the record, bytes.
    pub(super) end: usize,
    pub(super) pointer: Pointer,
    /// Its offset in the frame's content, bytes.
    pub(super) from: usize,
}

/// The patches of one record; `patches` are in the order of their records.
pub(super) fn of_record(patches: &[StoredPatch], record: u64) -> impl Iterator<Item = &StoredPatch> {
    let first = patches.partition_point(|patch| patch.record < record);
    patches.get(first..).unwrap_or_default().iter().take_while(move |patch| patch.record == record)
}

/// The parts of a piece of a record that patches hold, by their offsets in the record: if several
/// hold one, that of the newest.
pub(super) fn visible(patches: &[StoredPatch], record: u64, piece: &Range<usize>) -> BTreeMap<usize, Visible> {
    let mut found: BTreeMap<usize, Visible> = BTreeMap::new();
    let (first, last) = (piece.start, piece.end);
    for patch in of_record(patches, record) {
        let mut in_frame = 0;
        for part in patch.parts() {
            let (start, end) = (part.start.max(first), part.end.min(last));
            let from = in_frame + start.saturating_sub(part.start);
            in_frame += part.len();
            if start < end {
                cut_out(&mut found, start, end);
                found.insert(start, Visible { end, pointer: patch.patch.pointer, from });
            }
        }
    }
    found
}

/// Removes a range from the visible parts.
fn cut_out(found: &mut BTreeMap<usize, Visible>, start: usize, end: usize) {
    let before = found.range(..start).next_back().map(|(at, _)| *at);
    let touched: Vec<usize> = before.into_iter().chain(found.range(start..end).map(|(at, _)| *at)).collect();
    for at in touched {
        let Some(Visible { end: stop, pointer, from }) = found.remove(&at) else { continue };
        if at < start {
            found.insert(at, Visible { end: stop.min(start), pointer, from });
        }
        if stop > end {
            found.insert(end, Visible { end: stop, pointer, from: from + (end - at) });
        }
    }
}

/// Whether patches hold all of a piece.
pub(super) fn cover(patches: &[StoredPatch], record: u64, piece: &Range<usize>) -> bool {
    let mut at = piece.start;
    for (start, part) in visible(patches, record, piece) {
        if start != at {
            return false;
        }
        at = part.end;
    }
    at == piece.end
}
