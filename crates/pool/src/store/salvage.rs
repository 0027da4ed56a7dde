//! Salvage: moves the readable frames of a segment that is partly unreadable. Undamaged frames behind a damaged
//! header or an unreadable range are found by their own headers.
//!
//! Callers: topology changes (`reshape.rs`), for segments on leaving devices; reports of frames that remain there.
//! Invariant: file content may look like a frame where the header before it is damaged. Frames that are found twice
//! with the same name are ignored, so no undamaged frame is confused with content.

use std::collections::{BTreeMap, BTreeSet};

use super::cleaning::{Cleaned, Mover};
use super::scrub::{WrittenSoFar, check};
use super::{Result, Store};
use crate::backend::SegmentAt;
use crate::pointer::Pointer;

/// Number of rows that are read at once where a device cannot read some of them.
const ROWS: usize = 4;

impl Store {
    /// Moves the undamaged frames out of a segment; returns whether no live frames remain.
    ///
    /// # Errors
    /// Errors of writing.
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
            // Frames copied before an error are published.
            mover.publish(done)?;
            walked?;
            if self.map.read().table.segments().get(&id).is_none_or(|segment| segment.live_frames == 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The live frames in segments that could not be emptied, each with its device.
    #[must_use]
    pub fn left_behind(&self, stuck: &BTreeSet<u32>) -> Vec<((u32, u32), u16)> {
        let each = stuck.iter().flat_map(|id| {
            let place = self.map.read().table.segments().get(id).map(|segment| segment.place.clone());
            let device = place.map_or(0, |place| self.backend.member(SegmentAt { segment: *id, place: &place }, 0));
            self.living(*id).into_iter().map(move |name| (name, device))
        });
        each.collect()
    }

    /// Reads a segment from copy or reconstruction `way`, with zeros for unreadable parts.
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
