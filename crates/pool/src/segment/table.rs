//! The segment table: what is known of each segment, in memory. Which frames are alive, where
//! segments lie, where single frames have moved.
//!
//! Callers: the store, under its lock; [`super::table_log`] writes and reads it. Invariants:
//! - It changes only by [`Op`]s, which are recorded: a replay of them gives the same table.
//! - Impossible operations are refused before anything is changed, so a damaged record cannot make
//!   a wrong table.
//! - A frame is alive in exactly one place: in the segment that its name says, or where that
//!   segment's `moved` says.

use std::collections::{BTreeMap, BTreeSet};

use super::moved::Moved;
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::Place;
use crate::pointer::{Pointer, Txg};

/// A set of frame numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// Whether a number is in it.
    #[must_use]
    pub fn get(&self, at: u32) -> bool {
        self.words.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// Puts a number in.
    pub fn set(&mut self, at: u32) {
        let word = at as usize / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        if let Some(word) = self.words.get_mut(word) {
            *word |= 1 << (at % 64);
        }
    }

    /// How many numbers are in it.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// One segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which kind of frames it holds.
    pub stream: WriteStream,
    /// Whether nothing will be added.
    pub sealed: bool,
    /// Where it lies, once or twice; empty once its place was given to others.
    pub place: Place,
    /// The generation since which nothing at this place is used.
    pub dead_since: Option<u64>,
    /// Frames written to it.
    pub frames: u32,
    /// How far it is written, bytes.
    pub bytes: u32,
    /// Frames alive at this place.
    pub live_frames: u32,
    /// What these are charged, in units of 16 bytes.
    pub live_units: u32,
    /// The newest birth of a frame in it.
    pub newest: Txg,
    /// Frames not alive at this place: freed, or moved away. Not used for relocated frames: their
    /// names are those of other segments.
    pub dead: Bits,
    /// Frames of this name that live elsewhere: segment, and offset there in units of 16 bytes.
    pub moved: Moved,
}

/// A change of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// A segment begins.
    Open {
        /// Its number.
        id: u32,
        /// Its stream.
        stream: WriteStream,
        /// Where it lies.
        place: Place,
    },
    /// A segment was written further.
    Grow {
        /// Which.
        id: u32,
        /// Frames in it now.
        frames: u32,
        /// Bytes in it now.
        bytes: u32,
        /// What the added frames are charged, units; 0 for relocated ones, which come alive by
        /// [`Op::Move`].
        units: u32,
        /// The newest birth among them.
        newest: Txg,
    },
    /// Nothing more will be added to a segment.
    Seal {
        /// Which.
        id: u32,
    },
    /// Frames are not used any more.
    Free {
        /// The segment in their names.
        segment: u32,
        /// The first one's number.
        index: u32,
        /// How many, in a row; more than one only for frames that never moved.
        count: u32,
        /// What they were charged together, units.
        units: u32,
    },
    /// The cleaner has moved a frame.
    Move {
        /// The segment in its name.
        segment: u32,
        /// Its number.
        index: u32,
        /// Where it is now.
        to: u32,
        /// Its offset there, units.
        offset: u32,
        /// What it is charged, units.
        units: u32,
    },
    /// A segment has more copies.
    Widen {
        /// Which.
        id: u32,
        /// Where it lies now: where it lay, and further on.
        place: Place,
    },
    /// A segment's place was given back.
    Release {
        /// Which.
        id: u32,
    },
}

/// Where a frame is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameLocation {
    /// The segment that holds it.
    pub segment: u32,
    /// That segment's stream.
    pub stream: WriteStream,
    /// That segment's place.
    pub place: Place,
    /// The frame's offset in it, units.
    pub offset: u32,
}

/// The longest segment, bytes.
pub const LONGEST: u32 = 1 << 26;

/// All segments but those of the table itself.
#[derive(Clone, Debug, Default)]
pub struct SegmentTable {
    segments: BTreeMap<u32, Segment>,
    ops: Vec<Op>,
}

/// Whether a segment of this length can hold so many frames.
pub(super) fn fits(frames: u32, bytes: u32) -> bool {
    bytes <= LONGEST && frames <= bytes / Pointer::HEADER
}

fn wrong<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}

impl SegmentTable {
    /// A table with these segments and nothing recorded.
    #[must_use]
    pub fn with(segments: BTreeMap<u32, Segment>) -> Self {
        Self { segments, ops: Vec::new() }
    }

    /// All segments by their numbers.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u32, Segment> {
        &self.segments
    }

    /// Where a frame is: its name, and the offset of its pointer for frames that never moved.
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

    /// Whether a frame of this name is alive where it was found: `holder` at `offset` units.
    #[must_use]
    pub fn lives_at(&self, segment: u32, index: u32, holder: u32, offset: u32) -> bool {
        let Some(home) = self.segments.get(&segment) else { return false };
        match home.moved.get(index) {
            Some(now) => now == (holder, offset),
            None => segment == holder && !home.stream.is_of_moved() && index < home.frames && !home.dead.get(index),
        }
    }

    /// What all living frames are charged, bytes.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.segments.values().map(|segment| u64::from(segment.live_units) * 16).sum()
    }

    /// Changes the table and records the change.
    ///
    /// # Errors
    /// [`PoolError::Format`] for what cannot be; nothing is changed then.
    pub fn apply(&mut self, op: Op) -> Result<(), PoolError> {
        self.replay(&op)?;
        self.ops.push(op);
        Ok(())
    }

    /// The changes recorded since this was called last.
    pub fn take_ops(&mut self) -> Vec<Op> {
        std::mem::take(&mut self.ops)
    }

    /// Changes the table without recording it.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn replay(&mut self, op: &Op) -> Result<(), PoolError> {
        match op {
            Op::Open { id, stream, place } => self.open(*id, *stream, place),
            Op::Grow { id, frames, bytes, units, newest } => self.grow(*id, (*frames, *bytes), *units, *newest),
            Op::Seal { id } => match self.segments.get_mut(id) {
                Some(segment) if !segment.sealed => {
                    segment.sealed = true;
                    Ok(())
                }
                _ => wrong("a segment is sealed that is not open"),
            },
            Op::Free { segment, index, count, units } => self.free(*segment, *index, *count, *units),
            Op::Move { segment, index, to, offset, units } => self.relocate(*segment, *index, (*to, *offset), *units),
            Op::Widen { id, place } => self.widen(*id, place),
            Op::Release { id } => self.release(*id),
        }
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
        if let Some((holder, _)) = segment.moved.get(index) {
            if count != 1 {
                return wrong("moved frames are freed in a row");
            }
            self.lose(holder, 1, units)?;
            if let Some(segment) = self.segments.get_mut(&id) {
                segment.moved.remove(index);
            }
            self.forget(id);
            return Ok(());
        }
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

    /// Takes frames from what is alive at a place.
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
        Ok(())
    }

    fn relocate(&mut self, id: u32, index: u32, to: (u32, u32), units: u32) -> Result<(), PoolError> {
        if !self.segments.get(&to.0).is_some_and(|target| target.stream.is_of_moved() && !target.place.is_empty()) {
            return wrong("a frame moves to where none can");
        }
        let Some(segment) = self.segments.get(&id) else {
            return wrong("a frame moves of a segment that is not there");
        };
        match segment.moved.get(index) {
            Some((holder, _)) => self.lose(holder, 1, units)?,
            None if !segment.stream.is_of_moved() && index < segment.frames && !segment.dead.get(index) => {
                self.lose(id, 1, units)?;
                if let Some(segment) = self.segments.get_mut(&id) {
                    segment.dead.set(index);
                }
            }
            None => return wrong("a dead frame moves"),
        }
        if let Some(target) = self.segments.get_mut(&to.0) {
            // A commit may have come after it was sealed, and before this frame.
            target.dead_since = None;
            target.live_frames = target.live_frames.saturating_add(1);
            target.live_units = target.live_units.saturating_add(units);
        }
        if let Some(segment) = self.segments.get_mut(&id) {
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
            Some(segment) if segment.dead_since.is_some() && segment.live_frames == 0 => {
                segment.place = Place::default();
                segment.dead_since = None;
            }
            _ => return wrong("a place is given back that is in use"),
        }
        self.forget(id);
        Ok(())
    }

    /// Removes a segment that has neither a place nor moved frames.
    fn forget(&mut self, id: u32) {
        if self.segments.get(&id).is_some_and(|segment| segment.place.is_empty() && segment.moved.is_empty()) {
            self.segments.remove(&id);
        }
    }

    /// Ends a commit: sealed segments in which nothing is alive are dead from this generation on.
    pub fn finish(&mut self, generation: u64) {
        self.finish_but(generation, &BTreeSet::new());
    }

    /// The same, but for segments to which frames are on their way.
    pub fn finish_but(&mut self, generation: u64, arriving: &BTreeSet<u32>) {
        for (_, segment) in self.segments.iter_mut().filter(|(id, _)| !arriving.contains(id)) {
            if segment.sealed && segment.live_frames == 0 && segment.dead_since.is_none() && !segment.place.is_empty() {
                segment.dead_since = Some(generation);
            }
        }
    }

    /// Segments whose places are free to be used again once this is the oldest generation kept.
    #[must_use]
    pub fn releasable(&self, kept: u64) -> Vec<(u32, Place)> {
        let old = |segment: &&Segment| segment.dead_since.is_some_and(|since| since <= kept);
        self.segments
            .iter()
            .filter(|(_, segment)| old(segment))
            .map(|(id, segment)| (*id, segment.place.clone()))
            .collect()
    }
}
