//! Streaming reads: many frames read at once into their targets, and readahead on devices.
//!
//! Callers: the store as [`Frames`](crate::frames::Frames), for content that is read sequentially. Invariants:
//! - Returned content was verified as by [`Frames::read`](crate::frames::Frames::read), which is used for every
//!   frame that the fast path cannot read.
//! - The readahead thread holds a backend only during a request, and ends with the store.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::blame::Reading;
use super::{Result, Store};
use crate::backend::{Backend, SegmentAt, Sources};
use crate::error::{Damage, PoolError};
use crate::frame::stored;
use crate::frames::{Frames, Wanted};
use crate::label::Place;
use crate::pointer::{Compression, Pointer};
use crate::workers::Workers;

/// Maximum gap between frames that are requested together, bytes.
const NEAR: u64 = 64 << 10;
/// Number of queued readahead requests; further ones are dropped.
const WAITING: usize = 64;

/// A range of a segment, with its backend.
struct Part {
    backend: Arc<dyn Backend>,
    segment: u32,
    place: Place,
    from: u64,
    until: u64,
}

/// The readahead thread.
#[derive(Default)]
pub(super) struct DeviceReadahead(OnceLock<Workers<Vec<Part>>>);

impl std::fmt::Debug for DeviceReadahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DeviceReadahead").field(&self.0.get().is_some()).finish()
    }
}

impl DeviceReadahead {
    /// Queues the requests for the thread, unless its queue is full; makes them itself where there is no thread.
    fn request(&self, ranges: Vec<Part>) {
        let thread = self.0.get_or_init(|| Workers::start("pool-ahead", 1, WAITING, ask));
        if thread.count() == 0 {
            ask(ranges);
        } else {
            drop(thread.offer(ranges));
        }
    }
}

fn ask(ranges: Vec<Part>) {
    for Part { backend, segment, place, from, until } in ranges {
        backend.expect(SegmentAt { segment, place: &place }, from, until - from);
    }
}

impl Store {
    /// Locations of frames in the caller's order, with neighbours merged.
    fn ranges(&self, pointers: &[Pointer]) -> Vec<Part> {
        let mut ranges: Vec<Part> = Vec::with_capacity(pointers.len());
        let map = self.map.read();
        for pointer in pointers {
            if let Some(found) = map.table.find(pointer.segment, pointer.index, pointer.offset) {
                let start = u64::from(found.offset) * u64::from(Pointer::UNIT);
                let end = start + pointer.charged();
                match ranges.last_mut() {
                    Some(last) if last.segment == found.segment && last.from <= start && start <= last.until + NEAR => {
                        last.until = end.max(last.until);
                    }
                    _ => ranges.push(Part {
                        backend: Arc::clone(&self.backend),
                        segment: found.segment,
                        place: found.place,
                        from: start,
                        until: end,
                    }),
                }
            }
        }
        ranges
    }

    /// Locations of a stream's frames, with neighbours merged, segment by segment: compression threads write the
    /// frames of a file in another order. Where a block holds little but the stream (with the frames `beyond`), the
    /// whole block is requested: the remainder is read next, and partial requests take longer.
    fn ranges_of_stream(&self, pointers: &[Pointer], beyond: &[Pointer]) -> Vec<Part> {
        let block = self.backend.ahead().block;
        let mut pointers = pointers.to_vec();
        pointers.sort_unstable_by_key(|pointer| (pointer.segment, pointer.index));
        let mut ranges = self.ranges(&pointers);
        if block == 0 {
            return ranges;
        }
        ranges.sort_unstable_by_key(|range| (range.segment, range.from));
        let mut held: HashMap<(u32, u64), u64> = HashMap::new();
        let map = self.map.read();
        for pointer in pointers.iter().chain(beyond) {
            if let Some(found) = map.table.find(pointer.segment, pointer.index, pointer.offset) {
                let start = u64::from(found.offset) * u64::from(Pointer::UNIT);
                *held.entry((found.segment, start / block)).or_default() += pointer.charged();
            }
        }
        let mut whole: Vec<Part> = Vec::with_capacity(ranges.len());
        for range in ranges {
            let length = map.table.segments().get(&range.segment).map_or(0, |segment| u64::from(segment.bytes));
            let is_held = |block_number: &u64| {
                let all = block.min(length.saturating_sub(block_number * block));
                held.get(&(range.segment, *block_number)).is_some_and(|held| held * 2 >= all)
            };
            let (first, last) = (range.from / block, range.until.saturating_sub(1) / block);
            let from = if is_held(&first) { first * block } else { range.from };
            let until = if is_held(&last) { ((last + 1) * block).min(length).max(range.until) } else { range.until };
            match whole.last_mut() {
                Some(before) if before.segment == range.segment && from <= before.until => {
                    before.until = before.until.max(until);
                }
                _ => whole.push(Part { from, until, ..range }),
            }
        }
        whole
    }

    /// Makes readahead requests for frames.
    pub(super) fn expect_now(&self, pointers: &[Pointer]) {
        ask(self.ranges(pointers));
    }

    /// Queues readahead requests for frames.
    pub(super) fn expect_soon(&self, pointers: &[Pointer], beyond: &[Pointer]) {
        if !pointers.is_empty() {
            self.readahead.request(self.ranges_of_stream(pointers, beyond));
        }
    }

    /// Reads frames into their targets, by one thread: a stream has several requests at a time, each with its own
    /// thread.
    pub(super) fn read_wanted(&self, wanted: &mut [Wanted<'_>]) -> Result<()> {
        wanted.iter_mut().try_for_each(|wanted| self.read_to(wanted))
    }

    /// Reads and verifies the stored bytes of a frame; `None` where it has to be read with its content.
    pub(super) fn read_packed(&self, pointer: &Pointer) -> Result<Option<Vec<u8>>> {
        let length = u64::from(pointer.stored).max(pointer.logical.into());
        if pointer.compression == Compression::Off || length > self.slot {
            return Ok(None);
        }
        let place = self.find(pointer)?;
        let mut bytes = vec![0; pointer.stored as usize];
        if self.read_stored_at(pointer, &place, None, &mut bytes, &mut Sources::default()).is_err() {
            return Ok(None);
        }
        let whole = stored::check(pointer, &bytes).is_none();
        // It may have been moved meanwhile, or be damaged: a reader of its content gets the error.
        Ok(whole.then_some(bytes))
    }

    fn read_to(&self, Wanted { pointer, target }: &mut Wanted<'_>) -> Result<()> {
        if target.len() != pointer.content_length() as usize {
            return Err(PoolError::Frame {
                pointer: *pointer,
                damage: Damage::Structure("a frame of another length than expected"),
            });
        }
        let place = self.find(pointer)?;
        let mut first = Reading::default();
        let Err(error) = self.fill(pointer, &place, None, target, &mut first) else { return Ok(()) };
        // It may have been moved meanwhile.
        if self.find(pointer)? == place
            && let Ok(content) = self.read_copy(pointer, &place, error, &first)
        {
            target.copy_from_slice(&content);
            return Ok(());
        }
        // Reports the damage, if it is damaged.
        target.copy_from_slice(&self.read(pointer)?);
        Ok(())
    }
}
