//! Allocated blocks of a file in a range, as the file system below reports them.
//!
//! Asked only before an operation is refused for lack of room ([`CageShared::book_span`]): the
//! accounts know one range of a file's blocks, so a file with holes may already have the blocks
//! that are to be written or allocated. This is the case for every request that a killed process
//! has carried out and the next process gets again.

use super::{CageShared, charge_rule::Storage, inodes::InodeState};
use nacre_sys::ioctls;
use nacre_vfs::{OpenFile, Whence};
use std::ops::Range;

/// Maximum number of data ranges that are searched for where there is no map of extents.
const MAX_PIECES: usize = 4096;

/// A range of an open file that is to be written or allocated.
pub(super) struct Span<'a> {
    pub(super) file: &'a dyn OpenFile,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// End of the booked blocks; see [`CageShared::booked_end`].
    pub(super) booked_end: u64,
}

impl CageShared {
    /// End of the part of a file whose allocated blocks are booked: blocks beyond the file's end
    /// count only where they are kept.
    pub(super) fn booked_end(&self, state: &InodeState) -> u64 {
        if state.kept { u64::MAX } else { self.rule.whole(state.size) }
    }

    /// Returns the blocks in the span that are allocated and booked, as ordered ranges of bytes;
    /// none where the file system does not report them.
    pub(super) fn allocated(&self, span: &Span<'_>) -> Vec<Range<u64>> {
        let touched = self.rule.blocks(span.offset, span.length);
        let asked = touched.start..touched.end.min(span.booked_end);
        if self.rule.storage == Storage::Lagging || asked.is_empty() {
            return Vec::new();
        }
        let lowest = span.file.inner();
        let Some(file) = lowest.backing() else { return Vec::new() };
        let mut found = ioctls::extents(file, asked.clone()).unwrap_or_else(|_| data(lowest, &asked));
        for piece in &mut found {
            *piece = piece.start.max(asked.start)..piece.end.min(asked.end);
        }
        found
    }
}

/// Returns ranges with data. Blocks that are allocated and were never written are missing.
fn data(file: &dyn OpenFile, asked: &Range<u64>) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut at = asked.start;
    while at < asked.end && found.len() < MAX_PIECES {
        let Ok(start) = file.seek(at, Whence::Data) else { break };
        let Ok(end) = file.seek(start, Whence::Hole) else { break };
        if start >= asked.end {
            break;
        }
        found.push(start..end);
        at = end;
    }
    found
}

/// Number of bytes of whole blocks that lie both in `blocks` and in one of these ranges, which do
/// not overlap.
pub(super) fn bytes_in(ranges: &[Range<u64>], blocks: &Range<u64>) -> u64 {
    let within = |range: &Range<u64>| range.end.min(blocks.end).saturating_sub(range.start.max(blocks.start));
    ranges.iter().map(within).sum()
}
