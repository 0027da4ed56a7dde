//! The blocks that a file already has in a range, by the file system below.
//!
//! Asked only before something is refused for lack of room ([`CageShared::book_span`]): the books know one range of a
//! file's blocks, so a file with holes may have what is to be written there, or allocated. That is so for every request
//! that a killed process has carried out and the next one gets again.

use super::{CageShared, charge_rule::Storage, inodes::InodeState};
use nacre_sys::ioctls;
use nacre_vfs::{OpenFile, Whence};
use std::ops::Range;

/// Pieces of data that are looked for where there is no map of extents.
const MAX_PIECES: usize = 4096;

/// A range of an open file that is to be written or allocated.
pub(super) struct Span<'a> {
    pub(super) file: &'a dyn OpenFile,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// See [`CageShared::booked_end`].
    pub(super) booked_end: u64,
}

impl CageShared {
    /// Up to where a file's allocated blocks are booked: what is allocated behind its end is where it is kept.
    pub(super) fn booked_end(&self, state: &InodeState) -> u64 {
        if state.kept { u64::MAX } else { self.rule.whole(state.size) }
    }

    /// Blocks in the span that the file has and that are booked, as ranges of bytes in their order; none where the
    /// file system does not say.
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

/// Ranges with data. What is allocated and was never written is not found so.
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

/// How many bytes of whole blocks lie both in `blocks` and in one of these ranges, which do not overlap.
pub(super) fn bytes_in(ranges: &[Range<u64>], blocks: &Range<u64>) -> u64 {
    let within = |range: &Range<u64>| range.end.min(blocks.end).saturating_sub(range.start.max(blocks.start));
    ranges.iter().map(within).sum()
}
