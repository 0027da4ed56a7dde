//! The segment table: what is known of each segment, in memory. Which frames are alive, where
//! segments lie, where single frames have moved.
//!
//! Callers: the store, under its lock; [`super::table_log`] and [`super::pages`] write and read it.
//! Invariants:
//! - It changes only by [`Op`]s, which are numbered and recorded: a replay of them gives the same table.
//! - An operation changes each segment that it names by what it says and by what that segment is, and
//!   by nothing else. So a segment as it was at some number, and all operations from that number on,
//!   give the same segment, whatever is known of the others.
//! - Impossible operations are refused before anything is changed, so a damaged record cannot make
//!   a wrong table.
//! - A frame is alive in exactly one place: in the segment that its name says, or where that
//!   segment's `moved` says.

use std::collections::{BTreeMap, BTreeSet};

use super::moved::Moved;
use super::table_log::NOT_SAID;
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
    /// Frames are not used any more. What is recorded of one that has moved is [`Op::FreeMoved`].
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
    /// A frame that has moved is not used any more.
    FreeMoved {
        /// The segment in its name.
        segment: u32,
        /// Its number.
        index: u32,
        /// Where it was.
        holder: u32,
        /// What it was charged, units.
        units: u32,
    },
    /// The cleaner has moved a frame.
    Move {
        /// The segment in its name.
        segment: u32,
        /// Its number.
        index: u32,
        /// Where it was, or [`NOT_SAID`].
        from: u32,
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
    /// Nothing at a segment's place is used since this generation.
    Die {
        /// Which.
        id: u32,
        /// Since when.
        since: u64,
    },
    /// A segment's place was given back.
    Release {
        /// Which.
        id: u32,
    },
}

impl Op {
    /// What it takes in a delta at most, bytes.
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

/// What sums over all segments are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// As in [`Segment`].
    pub sealed: bool,
    /// As in [`Segment`].
    pub place: Place,
    /// As in [`Segment`].
    pub bytes: u32,
    /// As in [`Segment`].
    pub live_frames: u32,
    /// As in [`Segment`].
    pub live_units: u32,
}

impl Counted {
    /// Those of a segment.
    #[must_use]
    pub fn of(segment: &Segment) -> Self {
        let Segment { sealed, place, bytes, live_frames, live_units, .. } = segment;
        let (sealed, bytes, live_frames, live_units) = (*sealed, *bytes, *live_frames, *live_units);
        Self { sealed, place: place.clone(), bytes, live_frames, live_units }
    }
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
    /// The last operations.
    ops: Vec<Op>,
    /// What these take in a delta at most, bytes.
    recorded: u64,
    /// The number of the next one.
    next: u64,
    /// Pages of which more has changed than what is stored of them says: number of the first such
    /// operation.
    dirty: BTreeMap<u32, u64>,
    /// The same by that number.
    oldest: BTreeSet<(u64, u32)>,
    /// Sealed, with a place, nothing alive, not dead yet.
    emptied: BTreeSet<u32>,
    /// Dead ones, by the generation since which they are.
    dead: BTreeSet<(u64, u32)>,
    /// Those that have changed since [`Self::take_counted`], as they were then.
    counted: BTreeMap<u32, Option<Counted>>,
}

/// Segments of so many numbers are stored together, as a page.
pub const PAGE: u32 = 32;

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

    /// The number of the next operation.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The number of the first operation that is recorded here.
    #[must_use]
    pub fn first_recorded(&self) -> u64 {
        self.next.saturating_sub(self.ops.len() as u64)
    }

    /// What the recorded operations take in a delta at most, bytes.
    #[must_use]
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Pages whose first operation that is not stored has a number below this.
    #[must_use]
    pub fn dirty_before(&self, number: u64) -> Vec<u32> {
        self.oldest.range(..(number, 0)).map(|(_, page)| *page).collect()
    }

    /// All pages with segments, or with operations that are not stored.
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

    /// A page is stored as it is now.
    pub fn stored(&mut self, page: u32) {
        if let Some(first) = self.dirty.remove(&page) {
            self.oldest.remove(&(first, page));
        }
    }

    /// All operations before this one are in what is stored of the pages.
    #[must_use]
    pub fn first_needed(&self) -> u64 {
        self.oldest.first().map_or(self.next, |(first, _)| *first)
    }

    /// Forgets recorded operations that are in what is stored of the pages.
    pub fn forget_stored(&mut self) {
        let stored = self.first_needed().saturating_sub(self.first_recorded());
        let gone = self.ops.drain(..self.ops.len().min(stored as usize));
        self.recorded -= gone.map(|op| op.most_bytes()).sum::<u64>();
    }

    /// The segments that have changed since this was called last, as they were then.
    pub fn take_counted(&mut self) -> BTreeMap<u32, Option<Counted>> {
        std::mem::take(&mut self.counted)
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
        let op = self.resolve(op)?;
        self.replay(&op)?;
        self.recorded += op.most_bytes();
        self.ops.push(op);
        Ok(())
    }

    /// The changes recorded since this was called last.
    pub fn take_ops(&mut self) -> Vec<Op> {
        self.recorded = 0;
        std::mem::take(&mut self.ops)
    }

    /// What has to be recorded: says itself where frames are that have moved.
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

    /// Changes the table without recording it.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn replay(&mut self, op: &Op) -> Result<(), PoolError> {
        self.replay_of(op, &|_| true)
    }

    /// Changes those segments of which it is not known yet. All of what is refused is refused before
    /// anything is changed where that is true of all.
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

    /// Has a number that other operations have had before.
    pub(super) fn set_next(&mut self, next: u64) {
        self.next = next;
    }

    /// Puts a segment in its list again, after it has lost or got something.
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

    /// Removes a segment that has neither a place nor moved frames.
    fn forget(&mut self, id: u32) {
        if self.segments.get(&id).is_some_and(|segment| segment.place.is_empty() && segment.moved.is_empty()) {
            self.segments.remove(&id);
        }
    }

    /// Ends a commit: sealed segments in which nothing is alive are dead from this generation on, but
    /// for those to which frames are on their way.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn finish(&mut self, generation: u64, arriving: &BTreeSet<u32>) -> Result<(), PoolError> {
        let ended: Vec<u32> = self.emptied.difference(arriving).copied().collect();
        ended.into_iter().try_for_each(|id| self.apply(Op::Die { id, since: generation }))
    }

    /// Segments whose places are free to be used again once this is the oldest generation kept.
    #[must_use]
    pub fn releasable(&self, kept: u64) -> Vec<(u32, Place)> {
        let old = self.dead.range(..=(kept, u32::MAX)).map(|(_, id)| *id);
        old.filter_map(|id| Some((id, self.segments.get(&id)?.place.clone()))).collect()
    }

    /// Sealed segments with a place at which nothing lives.
    pub fn without_life(&self) -> impl Iterator<Item = &Segment> {
        let all = self.emptied.iter().chain(self.dead.iter().map(|(_, id)| id));
        all.filter_map(|id| self.segments.get(id))
    }
}

/// Whether nothing will live at a segment's place that is not known to be dead.
fn is_emptied(segment: &Segment) -> bool {
    segment.sealed && segment.live_frames == 0 && segment.dead_since.is_none() && !segment.place.is_empty()
}
