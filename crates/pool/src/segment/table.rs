//! The segment table in memory: live frames, locations of segments, and locations of moved frames.
//!
//! Callers: the store, under its lock; [`super::table_log`] and [`super::pages`] write and read it. Invariants:
//! - It changes only by [`Op`]s, which are numbered and recorded: a replay of them gives the same table.
//! - The effect of an operation on a segment depends only on the operation and on that segment. So a segment in its
//!   state at some number, and all operations from that number on, give the same segment, regardless of the others.
//! - Impossible operations are refused before anything is changed, so a damaged record cannot make a wrong table.
//! - A frame is alive in exactly one location: in the segment of its name, or at the location in that segment's
//!   `moved` map.

use std::collections::{BTreeMap, BTreeSet};

use super::moved::Moved;
use super::table_log::NOT_SAID;
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::Place;
use crate::pointer::{Pointer, Txg};

/// A set of frame numbers, as a bitmap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// Whether a number is in the set.
    #[must_use]
    pub fn get(&self, at: u32) -> bool {
        self.words.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// Adds a number.
    pub fn set(&mut self, at: u32) {
        let word = at as usize / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        if let Some(word) = self.words.get_mut(word) {
            *word |= 1 << (at % 64);
        }
    }

    /// Number of frame numbers in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// State of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The stream of its frames.
    pub stream: WriteStream,
    /// Whether it is complete.
    pub sealed: bool,
    /// The segment's location, with one or more copies; empty once the location was freed.
    pub place: Place,
    /// The generation since which no frame at this location is used.
    pub dead_since: Option<u64>,
    /// Number of frames written to it.
    pub frames: u32,
    /// Written length, bytes.
    pub bytes: u32,
    /// Number of live frames at this location.
    pub live_frames: u32,
    /// Charged size of the live frames, in units of 16 bytes.
    pub live_units: u32,
    /// The newest birth txg of a frame in it.
    pub newest: Txg,
    /// Frames that are not alive at this location: freed or moved away. Not used for relocated frames, whose names
    /// are those of other segments.
    pub dead: Bits,
    /// Moved frames with this segment's name: segment, and offset there in units of 16 bytes.
    pub moved: Moved,
}

/// An operation on the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Opens a segment.
    Open {
        /// The segment's number.
        id: u32,
        /// The segment's stream.
        stream: WriteStream,
        /// The segment's location.
        place: Place,
    },
    /// Extends a segment.
    Grow {
        /// The segment's number.
        id: u32,
        /// Number of frames in it now.
        frames: u32,
        /// Written length now, bytes.
        bytes: u32,
        /// Charged size of the added frames, units; 0 for relocated ones, which become alive by [`Op::Move`].
        units: u32,
        /// The newest birth txg among them.
        newest: Txg,
    },
    /// Seals a segment.
    Seal {
        /// The segment's number.
        id: u32,
    },
    /// Frees frames. A moved frame is recorded as [`Op::FreeMoved`].
    Free {
        /// The segment in their names.
        segment: u32,
        /// Number of the first frame in that segment.
        index: u32,
        /// Number of consecutive frames; more than one only for frames that never moved.
        count: u32,
        /// Charged size of all these frames, units.
        units: u32,
    },
    /// Frees a moved frame.
    FreeMoved {
        /// The segment in its name.
        segment: u32,
        /// The frame's number in that segment.
        index: u32,
        /// The segment that held it.
        holder: u32,
        /// The frame's charged size, units.
        units: u32,
    },
    /// Moves a frame (by the cleaner).
    Move {
        /// The segment in its name.
        segment: u32,
        /// The frame's number in that segment.
        index: u32,
        /// The segment that held it, or [`NOT_SAID`].
        from: u32,
        /// The segment that holds it now.
        to: u32,
        /// The frame's offset there, units.
        offset: u32,
        /// The frame's charged size, units.
        units: u32,
    },
    /// Adds copies to a segment.
    Widen {
        /// The segment's number.
        id: u32,
        /// The segment's new location: the old one, extended.
        place: Place,
    },
    /// Marks a segment as dead: no frame at its location is used since this generation.
    Die {
        /// The segment's number.
        id: u32,
        /// The generation.
        since: u64,
    },
    /// Releases a dead segment's location.
    Release {
        /// The segment's number.
        id: u32,
    },
}

impl Op {
    /// Maximum length in a delta, bytes.
    fn most_bytes(&self) -> u64 {
        match self {
            Self::Open { place, .. } | Self::Widen { place, .. } => 16 + 8 * place.len() as u64,
            // A byte, and five for each number of 32 bits.
            _ => 32,
        }
    }

    /// The segments that it changes.
    pub(super) fn changes(&self) -> [Option<u32>; 3] {
        match *self {
            Self::Open { id, .. }
            | Self::Grow { id, .. }
            | Self::Seal { id }
            | Self::Widen { id, .. }
            | Self::Die { id, .. }
            | Self::Release { id } => [Some(id), None, None],
            Self::Free { segment, .. } => [Some(segment), None, None],
            Self::FreeMoved { segment, holder, .. } => [Some(segment), Some(holder), None],
            Self::Move { segment, from, to, .. } => [Some(segment), Some(from), Some(to)],
        }
    }
}

/// The part of a segment's state that enters the space accounting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Whether the segment is sealed.
    pub sealed: bool,
    /// The segment's location.
    pub place: Place,
    /// Written length of the segment, bytes.
    pub bytes: u32,
    /// Number of live frames.
    pub live_frames: u32,
    /// Charged size of the live frames, in units of 16 bytes.
    pub live_units: u32,
}

impl Counted {
    /// The accounted state of a segment.
    #[must_use]
    pub fn of(segment: &Segment) -> Self {
        let Segment { sealed, place, bytes, live_frames, live_units, .. } = segment;
        let (sealed, bytes, live_frames, live_units) = (*sealed, *bytes, *live_frames, *live_units);
        Self { sealed, place: place.clone(), bytes, live_frames, live_units }
    }
}

/// Location of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameLocation {
    /// The segment that holds it.
    pub segment: u32,
    /// The holding segment's stream.
    pub stream: WriteStream,
    /// The holding segment's location.
    pub place: Place,
    /// The frame's offset in it, units.
    pub offset: u32,
}

/// Maximum length of a segment, bytes.
pub const LONGEST: u32 = 1 << 26;

/// All segments except those of the table itself.
#[derive(Clone, Debug, Default)]
pub struct SegmentTable {
    segments: BTreeMap<u32, Segment>,
    /// The recorded operations.
    ops: Vec<Op>,
    /// Maximum length of the recorded operations in a delta, bytes.
    recorded: u64,
    /// Number of the next operation.
    next: u64,
    /// Pages with changes that are not stored: number of the first such operation.
    dirty: BTreeMap<u32, u64>,
    /// The dirty pages, sorted by the number of their first unstored operation.
    oldest: BTreeSet<(u64, u32)>,
    /// Emptied segments: sealed, with a location, without live frames, not marked dead yet.
    emptied: BTreeSet<u32>,
    /// Dead segments, by the generation since which they are dead.
    dead: BTreeSet<(u64, u32)>,
    /// Segments changed since [`Self::take_counted`], with their accounted state at that time.
    counted: BTreeMap<u32, Option<Counted>>,
}

/// Number of segments that are stored together, as a page.
pub const PAGE: u32 = 32;

/// Whether a segment of this length can hold this many frames.
pub(super) fn fits(frames: u32, bytes: u32) -> bool {
    bytes <= LONGEST && frames <= bytes / Pointer::HEADER
}

fn wrong<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}

impl SegmentTable {
    /// A table with these segments and no recorded operations.
    #[must_use]
    pub fn with(segments: BTreeMap<u32, Segment>) -> Self {
        let mut table = Self { segments, ..Self::default() };
        for (id, segment) in &table.segments {
            match segment.dead_since {
                Some(since) => drop(table.dead.insert((since, *id))),
                None if is_emptied(segment) => drop(table.emptied.insert(*id)),
                None => {}
            }
        }
        table
    }

    /// Number of the next operation.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Number of the first recorded operation.
    #[must_use]
    pub fn first_recorded(&self) -> u64 {
        self.next.saturating_sub(self.ops.len() as u64)
    }

    /// Maximum length of the recorded operations in a delta, bytes.
    #[must_use]
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Pages whose first unstored operation has a lower number than this.
    #[must_use]
    pub fn dirty_before(&self, number: u64) -> Vec<u32> {
        self.oldest.range(..(number, 0)).map(|(_, page)| *page).collect()
    }

    /// All pages with segments, or with unstored operations.
    #[must_use]
    pub fn pages(&self) -> BTreeSet<u32> {
        let mut pages: BTreeSet<u32> = self.dirty.keys().copied().collect();
        let mut next = 0;
        while let Some((id, _)) = self.segments.range(next..).next() {
            pages.insert(id / PAGE);
            match (id / PAGE + 1).checked_mul(PAGE) {
                Some(behind) => next = behind,
                None => break,
            }
        }
        pages
    }

    /// The segments of a page.
    pub fn page(&self, page: u32) -> impl Iterator<Item = (&u32, &Segment)> {
        let first = page.saturating_mul(PAGE);
        self.segments.range(first..=first.saturating_add(PAGE - 1))
    }

    /// Marks a page as stored in its current state.
    pub fn stored(&mut self, page: u32) {
        if let Some(first) = self.dirty.remove(&page) {
            self.oldest.remove(&(first, page));
        }
    }

    /// Number of the first operation that a stored page lacks.
    #[must_use]
    pub fn first_needed(&self) -> u64 {
        self.oldest.first().map_or(self.next, |(first, _)| *first)
    }

    /// Drops recorded operations that all stored pages contain.
    pub fn forget_stored(&mut self) {
        let stored = self.first_needed().saturating_sub(self.first_recorded());
        let gone = self.ops.drain(..self.ops.len().min(stored as usize));
        self.recorded -= gone.map(|op| op.most_bytes()).sum::<u64>();
    }

    /// Takes the segments that have changed since the last call, with their accounted state at that time.
    pub fn take_counted(&mut self) -> BTreeMap<u32, Option<Counted>> {
        std::mem::take(&mut self.counted)
    }

    /// All segments by number.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u32, Segment> {
        &self.segments
    }

    /// Finds a frame by its name, and by the offset of its pointer if it never moved.
    #[must_use]
    pub fn find(&self, segment: u32, index: u32, offset: u32) -> Option<FrameLocation> {
        let home = self.segments.get(&segment)?;
        let (id, holder, offset) = match home.moved.get(index) {
            Some((to, offset)) => (to, self.segments.get(&to)?, offset),
            None => (segment, home, offset),
        };
        if holder.place.is_empty() {
            return None;
        }
        Some(FrameLocation { segment: id, stream: holder.stream, place: holder.place.clone(), offset })
    }

    /// Whether a frame of this name is alive in the segment `holder` at `offset` units.
    #[must_use]
    pub fn lives_at(&self, segment: u32, index: u32, holder: u32, offset: u32) -> bool {
        let Some(home) = self.segments.get(&segment) else { return false };
        match home.moved.get(index) {
            Some(now) => now == (holder, offset),
            None => segment == holder && !home.stream.is_of_moved() && index < home.frames && !home.dead.get(index),
        }
    }

    /// Charged size of all live frames, bytes.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.segments.values().map(|segment| u64::from(segment.live_units) * 16).sum()
    }

    /// Applies an operation and records it.
    ///
    /// # Errors
    /// [`PoolError::Format`] for an impossible operation; nothing is changed then.
    pub fn apply(&mut self, op: Op) -> Result<(), PoolError> {
        let op = self.resolve(op)?;
        self.replay(&op)?;
        self.recorded += op.most_bytes();
        self.ops.push(op);
        Ok(())
    }

    /// Takes the operations recorded since the last call.
    pub fn take_ops(&mut self) -> Vec<Op> {
        self.recorded = 0;
        std::mem::take(&mut self.ops)
    }

    /// Resolves an operation for recording: it names the current segment of moved frames itself.
    pub(super) fn resolve(&self, op: Op) -> Result<Op, PoolError> {
        let holder = |segment: u32, index: u32| Some(self.segments.get(&segment)?.moved.get(index)?.0);
        match op {
            Op::Free { segment, index, count, units } => match holder(segment, index) {
                Some(holder) if count == 1 => Ok(Op::FreeMoved { segment, index, holder, units }),
                Some(_) => wrong("moved frames are freed in a row"),
                None => Ok(Op::Free { segment, index, count, units }),
            },
            Op::Move { segment, index, from: NOT_SAID, to, offset, units } => {
                let from = holder(segment, index).unwrap_or(segment);
                Ok(Op::Move { segment, index, from, to, offset, units })
            }
            op => Ok(op),
        }
    }

    /// Applies an operation without recording it.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn replay(&mut self, op: &Op) -> Result<(), PoolError> {
        self.replay_of(op, &|_| true)
    }

    /// Applies an operation to those segments for which `is_new`. If that holds for all, a refused operation has
    /// changed nothing.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub(super) fn replay_of(&mut self, op: &Op, is_new: &dyn Fn(u32) -> bool) -> Result<(), PoolError> {
        for id in op.changes().into_iter().flatten().filter(|id| is_new(*id)) {
            let segment = self.segments.get(&id);
            self.counted.entry(id).or_insert_with(|| segment.map(Counted::of));
            let page = id / PAGE;
            if !self.dirty.contains_key(&page) {
                self.dirty.insert(page, self.next);
                self.oldest.insert((self.next, page));
            }
        }
        match op {
            Op::FreeMoved { segment, index, holder, units } => {
                self.free_moved((*segment, *index), *holder, *units, is_new)?;
            }
            Op::Move { segment, index, from, to, offset, units } => {
                self.relocate((*segment, *index), *from, (*to, *offset), *units, is_new)?;
            }
            op if !op.changes().into_iter().flatten().all(is_new) => {}
            Op::Open { id, stream, place } => self.open(*id, *stream, place)?,
            Op::Grow { id, frames, bytes, units, newest } => self.grow(*id, (*frames, *bytes), *units, *newest)?,
            Op::Seal { id } => self.seal(*id)?,
            Op::Free { segment, index, count, units } => self.free(*segment, *index, *count, *units)?,
            Op::Widen { id, place } => self.widen(*id, place)?,
            Op::Die { id, since } => self.die(*id, *since)?,
            Op::Release { id } => self.release(*id)?,
        }
        self.next += 1;
        Ok(())
    }

    /// Sets the number of the next operation, skipping numbers used before.
    pub(super) fn set_next(&mut self, next: u64) {
        self.next = next;
    }

    /// Updates the list of emptied segments after a segment has lost or got a frame.
    fn sort_in(&mut self, id: u32) {
        if self.segments.get(&id).is_some_and(is_emptied) {
            self.emptied.insert(id);
        } else {
            self.emptied.remove(&id);
        }
    }

    fn seal(&mut self, id: u32) -> Result<(), PoolError> {
        match self.segments.get_mut(&id) {
            Some(segment) if !segment.sealed => segment.sealed = true,
            _ => return wrong("a segment is sealed that is not open"),
        }
        self.sort_in(id);
        Ok(())
    }

    fn die(&mut self, id: u32, since: u64) -> Result<(), PoolError> {
        match self.segments.get_mut(&id) {
            Some(segment) if is_emptied(segment) => segment.dead_since = Some(since),
            _ => return wrong("a segment is dead in which something lives"),
        }
        self.emptied.remove(&id);
        self.dead.insert((since, id));
        Ok(())
    }

    fn open(&mut self, id: u32, stream: WriteStream, place: &Place) -> Result<(), PoolError> {
        if self.segments.contains_key(&id)
            || place.is_empty()
            || !place.is_possible()
            || place.parity() > 0 && stream.is_metadata()
            || stream == WriteStream::Table
        {
            return wrong("a segment begins that cannot");
        }
        let segment = Segment {
            stream,
            sealed: false,
            place: place.clone(),
            dead_since: None,
            frames: 0,
            bytes: 0,
            live_frames: 0,
            live_units: 0,
            newest: Txg(0),
            dead: Bits::default(),
            moved: Moved::default(),
        };
        self.segments.insert(id, segment);
        Ok(())
    }

    fn grow(&mut self, id: u32, (frames, bytes): (u32, u32), units: u32, newest: Txg) -> Result<(), PoolError> {
        let Some(segment) = self.segments.get_mut(&id) else { return wrong("a segment grows that is not there") };
        let Some(added) = frames.checked_sub(segment.frames) else { return wrong("a segment shrinks") };
        if segment.sealed || bytes < segment.bytes || !fits(frames, bytes) {
            return wrong("a segment grows that cannot");
        }
        if segment.stream.is_of_moved() {
            if units != 0 {
                return wrong("survivors grow alive");
            }
        } else {
            let Some(live) = segment.live_units.checked_add(units) else { return wrong("a segment is too large") };
            segment.live_units = live;
            segment.live_frames += added;
        }
        segment.frames = frames;
        segment.bytes = bytes;
        segment.newest = segment.newest.max(newest);
        Ok(())
    }

    fn free(&mut self, id: u32, index: u32, count: u32, units: u32) -> Result<(), PoolError> {
        let Some(segment) = self.segments.get_mut(&id) else {
            return wrong("a frame is freed of a segment that is not there");
        };
        let Some(end) = index.checked_add(count).filter(|end| *end <= segment.frames) else {
            return wrong("a frame is freed that is not there");
        };
        if segment.stream.is_of_moved() || (index..end).any(|at| segment.dead.get(at)) {
            return wrong("a frame is freed twice");
        }
        self.lose(id, count, units)?;
        if let Some(segment) = self.segments.get_mut(&id) {
            (index..end).for_each(|at| segment.dead.set(at));
        }
        Ok(())
    }

    fn free_moved(
        &mut self,
        (id, index): (u32, u32),
        holder: u32,
        units: u32,
        is_new: &dyn Fn(u32) -> bool,
    ) -> Result<(), PoolError> {
        let is_there = || self.segments.get(&id)?.moved.get(index).filter(|(at, _)| *at == holder);
        if is_new(id) && is_there().is_none() {
            return wrong("a moved frame is freed that is not there");
        }
        if is_new(holder) {
            self.lose(holder, 1, units)?;
        }
        if is_new(id) {
            if let Some(segment) = self.segments.get_mut(&id) {
                segment.moved.remove(index);
            }
            self.forget(id);
        }
        Ok(())
    }

    /// Removes frames from the live ones of a segment.
    fn lose(&mut self, id: u32, frames: u32, units: u32) -> Result<(), PoolError> {
        let Some(segment) = self.segments.get_mut(&id) else {
            return wrong("a frame is in a segment that is not there");
        };
        let (Some(live_frames), Some(live_units)) =
            (segment.live_frames.checked_sub(frames), segment.live_units.checked_sub(units))
        else {
            return wrong("more is freed of a segment than there is");
        };
        if (live_frames == 0) != (live_units == 0) {
            return wrong("the sums of a segment do not fit each other");
        }
        (segment.live_frames, segment.live_units) = (live_frames, live_units);
        if live_frames == 0 {
            self.sort_in(id);
        }
        Ok(())
    }

    fn relocate(
        &mut self,
        (id, index): (u32, u32),
        from: u32,
        to: (u32, u32),
        units: u32,
        is_new: &dyn Fn(u32) -> bool,
    ) -> Result<(), PoolError> {
        let takes = |target: &Segment| target.stream.is_of_moved() && !target.place.is_empty();
        if is_new(to.0) && !self.segments.get(&to.0).is_some_and(takes) {
            return wrong("a frame moves to where none can");
        }
        if is_new(id) {
            let Some(segment) = self.segments.get(&id) else {
                return wrong("a frame moves of a segment that is not there");
            };
            let lives = match segment.moved.get(index) {
                Some((holder, _)) => holder == from && holder != id,
                None => {
                    from == id && !segment.stream.is_of_moved() && index < segment.frames && !segment.dead.get(index)
                }
            };
            if !lives {
                return wrong("a dead frame moves");
            }
        }
        if is_new(from) {
            self.lose(from, 1, units)?;
        }
        if is_new(to.0)
            && let Some(target) = self.segments.get_mut(&to.0)
        {
            // A commit may have come after it was sealed, and before this frame.
            if let Some(since) = target.dead_since.take() {
                self.dead.remove(&(since, to.0));
            }
            target.live_frames = target.live_frames.saturating_add(1);
            target.live_units = target.live_units.saturating_add(units);
            self.emptied.remove(&to.0);
        }
        if is_new(id)
            && let Some(segment) = self.segments.get_mut(&id)
        {
            if from == id {
                segment.dead.set(index);
            }
            segment.moved.insert(index, to);
        }
        Ok(())
    }

    fn widen(&mut self, id: u32, place: &Place) -> Result<(), PoolError> {
        match self.segments.get_mut(&id) {
            Some(segment)
                if !segment.place.is_empty()
                    && place.len() > segment.place.len()
                    && place.starts_with(&segment.place)
                    && place.parity() == 0
                    && segment.place.parity() == 0
                    && place.is_possible() =>
            {
                segment.place = place.clone();
                Ok(())
            }
            _ => wrong("a segment has more copies that cannot"),
        }
    }

    fn release(&mut self, id: u32) -> Result<(), PoolError> {
        match self.segments.get_mut(&id) {
            Some(segment) if segment.live_frames == 0 => {
                let Some(since) = segment.dead_since.take() else {
                    return wrong("a place is given back that is in use");
                };
                segment.place = Place::default();
                self.dead.remove(&(since, id));
            }
            _ => return wrong("a place is given back that is in use"),
        }
        self.forget(id);
        Ok(())
    }

    /// Removes a segment without a location and without moved frames.
    fn forget(&mut self, id: u32) {
        if self.segments.get(&id).is_some_and(|segment| segment.place.is_empty() && segment.moved.is_empty()) {
            self.segments.remove(&id);
        }
    }

    /// Ends a commit: sealed segments without live frames are dead from this generation on, except those to which
    /// frames are being moved.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn finish(&mut self, generation: u64, arriving: &BTreeSet<u32>) -> Result<(), PoolError> {
        let ended: Vec<u32> = self.emptied.difference(arriving).copied().collect();
        ended.into_iter().try_for_each(|id| self.apply(Op::Die { id, since: generation }))
    }

    /// Segments whose locations are free once `kept` is the oldest retained generation.
    #[must_use]
    pub fn releasable(&self, kept: u64) -> Vec<(u32, Place)> {
        let old = self.dead.range(..=(kept, u32::MAX)).map(|(_, id)| *id);
        old.filter_map(|id| Some((id, self.segments.get(&id)?.place.clone()))).collect()
    }

    /// Sealed segments with a location and without live frames.
    pub fn without_life(&self) -> impl Iterator<Item = &Segment> {
        let all = self.emptied.iter().chain(self.dead.iter().map(|(_, id)| id));
        all.filter_map(|id| self.segments.get(id))
    }
}

/// Whether a segment can be marked as dead: it will never hold live frames again.
fn is_emptied(segment: &Segment) -> bool {
    segment.sealed && segment.live_frames == 0 && segment.dead_since.is_none() && !segment.place.is_empty()
}
