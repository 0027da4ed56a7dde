//! Segments of which a part cannot be read, moved as far as the rest can: whatever is whole behind a
//! damaged header or an unreadable range is found by its own header.
//!
//! Callers: changes of shape (`reshape.rs`), of segments that have to leave their devices; whoever tells
//! what is left of these. Invariant:
//! content may look like a frame where the header before it is damaged. What is found twice by the same
//! name is not believed, so nothing that is whole is taken for something else.

use std::collections::{BTreeMap, BTreeSet};

use super::cleaning::{Cleaned, Mover};
use super::scrub::{WrittenSoFar, check};
use super::{Result, Store};
use crate::backend::SegmentAt;
use crate::pointer::Pointer;

/// So much is read at once where a device refuses some of it, in rows of the segment.
const ROWS: usize = 4;

impl Store {
    /// Moves what is whole in a segment; answers whether nothing lives there any more.
    ///
    /// # Errors
    /// Those of writing.
    pub(super) fn salvage(&self, id: u32, done: &mut Cleaned) -> Result<bool> {
        let found = self
            .map
            .read()
            .table
            .segments()
            .get(&id)
            .map(|segment| (segment.place.clone(), segment.stream, WrittenSoFar::of(segment)));
        let Some((place, stream, written)) = found.filter(|(place, ..)| !place.is_empty()) else { return Ok(true) };
        let at = SegmentAt { segment: id, place: &place };
        let lives = |name: (u32, u32), offset: u32| self.map.read().table.lives_at(name.0, name.1, id, offset);
        for way in 0..self.backend.ways(at) {
            let image = self.readable(at, way, written.bytes as usize);
            let mut times: BTreeMap<(u32, u32), u32> = BTreeMap::new();
            self.walk_image(at, &image, &mut |frame| {
                let Pointer { segment, index, .. } = frame.header.pointer;
                if check(&frame).is_none() {
                    *times.entry((segment, index)).or_default() += 1;
                }
                Ok(true)
            })?;
            let mut mover = Mover::new(self, id, stream);
            let walked = self.walk_image(at, &image, &mut |frame| {
                let Pointer { segment, index, .. } = frame.header.pointer;
                let name = (segment, index);
                let whole = times.get(&name) == Some(&1) && check(&frame).is_none();
                if whole && lives(name, frame.offset / Pointer::UNIT) {
                    mover.copy(&frame, done)?;
                }
                Ok(true)
            });
            // What was copied before anything went wrong is copied.
            mover.publish(done)?;
            walked?;
            if self.map.read().table.segments().get(&id).is_none_or(|segment| segment.live_frames == 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The frames that live in segments that could not be emptied, each with the device that it lies on.
    #[must_use]
    pub fn left_behind(&self, stuck: &BTreeSet<u32>) -> Vec<((u32, u32), u16)> {
        let each = stuck.iter().flat_map(|id| {
            let place = self.map.read().table.segments().get(id).map(|segment| segment.place.clone());
            let device = place.map_or(0, |place| self.backend.member(SegmentAt { segment: *id, place: &place }, 0));
            self.living(*id).into_iter().map(move |name| (name, device))
        });
        each.collect()
    }

    /// What a segment holds, read in one way; zeros where that cannot be read.
    fn readable(&self, at: SegmentAt<'_>, way: usize, length: usize) -> Vec<u8> {
        let (mut image, mut unread) = (vec![0; length], 0);
        let step = self.backend.row(at.place).max(1) as usize * ROWS;
        for (number, part) in image.chunks_mut(step).enumerate() {
            if self.backend.read(at, way, (number * step) as u64, part).is_err() {
                part.fill(0);
                unread += part.len();
            }
        }
        if unread > 0 {
            tracing::warn!(segment = at.segment, way, bytes = unread, "a part of a segment cannot be read");
        }
        image
    }
}
