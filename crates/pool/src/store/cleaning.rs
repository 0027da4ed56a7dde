//! Cleaner: live frames are copied out of segments of low utilization, so that whole slots become free.
//!
//! Callers: a background thread of the engine (with a budget), and writers that find no slot. A moved frame is copied
//! with its header, is verified before, and counts at its new location only once it is on the device; the old
//! location is freed when the commit that names the new one is durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::PoolError;
use crate::frames::WriteStream;
use crate::pointer::{FrameKind, Pointer};
use crate::segment::cleaner::{self, Pressure};
use crate::segment::stream::Appender;
use crate::segment::table::{Op, Segment};

use super::scrub::{Walked, check};
use super::{Map, Result, Store};

/// Number of copied bytes after which the table is updated.
const BATCH: u64 = 4 << 20;

/// Result of a cleaning step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Number of moved frames.
    pub frames: u64,
    /// Charged size of the moved frames, bytes.
    pub bytes: u64,
    /// Number of emptied segments; their slots are free after the next commits.
    pub segments: u64,
    /// Whether more cleaning is due now.
    pub more: bool,
}

/// Number of dead segments that may remain in an idle pool: each commit leaves some of its own.
const LEFT: usize = 16;
/// The same while writers are short of slots.
const LEFT_IN_NEED: usize = 2;

/// A frame that is being moved.
struct Moving {
    segment: u32,
    index: u32,
    from: (u32, u32),
    to: (u32, u32),
    units: u32,
}

impl Store {
    /// Cleans victims as long as it pays, moving about this many bytes. Cheap when there is nothing to do.
    ///
    /// # Errors
    /// [`PoolError::Suspended`], [`PoolError::Device`] for a device that cannot be read.
    pub fn clean_step(&self, budget: u64) -> Result<Cleaned> {
        self.ready()?;
        let mut done = Cleaned::default();
        if let Some(mut uncleanable) = self.uncleanable.try_lock() {
            let pressure = |map: &Map| {
                let room = self.backend.room();
                match cleaner::pressure(room.empty() + self.coming(map, false), room.total) {
                    Pressure::None if cleaner::untidy(&map.table, &self.capacity()) => Pressure::Tidy,
                    pressure => pressure,
                }
            };
            self.clean(budget, false, &mut uncleanable, &mut done, &pressure)?;
            let special = |map: &Map| {
                let (free, all) = self.backend.special_room();
                match cleaner::pressure(free + self.coming(map, true), all) {
                    _ if all == 0 => Pressure::None,
                    Pressure::None if !cleaner::untidy(&map.table, &self.capacity()) => Pressure::None,
                    // When the special class is full, metadata goes to other groups: cleaning it urgently is not
                    // worth the cost.
                    _ => Pressure::Tidy,
                }
            };
            self.clean(budget, true, &mut uncleanable, &mut done, &special)?;
            let pressed = {
                // The lock is taken once: a second time would wait for a writer that waits for the first.
                let map = self.map.read();
                [pressure(&map), special(&map)] != [Pressure::None; 2]
            };
            if !pressed {
                self.double(budget, &mut uncleanable, &mut done)?;
            }
            done.more = done.bytes > 0 && (pressed || self.is_single(&uncleanable));
        }
        Ok(done)
    }

    /// Commits in an idle pool where many dead segments wait for a commit in order to be freed.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn let_go(&self) -> Result<()> {
        let Some(waiting) = self.backend.waiting() else { return Ok(()) };
        let coming = self.coming(&self.map.read(), false) as usize;
        if waiting + coming < LEFT {
            return Ok(());
        }
        self.ready()?;
        self.commit_root(&mut self.committed.lock(), None, false, false)
    }

    /// Commits moves where writers are short of slots, and emptied segments wait for a commit in order to be freed.
    /// Returns whether writers are short of slots.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn let_go_in_need(&self) -> Result<bool> {
        if self.urgency() != Pressure::Urgent {
            return Ok(false);
        }
        let coming = self.coming(&self.map.read(), false) as usize;
        if coming >= LEFT_IN_NEED {
            self.commit_moves()?;
        }
        Ok(true)
    }

    /// Number of locations that become free with the next commits, in the special class or in the others.
    fn coming(&self, map: &Map, of_special: bool) -> u64 {
        cleaner::coming(&map.table, &|segment| self.backend.is_special(&segment.place) == of_special)
    }

    /// Capacity of a segment, by its location.
    fn capacity(&self) -> impl Fn(&Segment) -> u64 {
        |segment| self.backend.capacity(&segment.place)
    }

    /// Cleans segments of the special class, or of the others.
    pub(super) fn clean(
        &self,
        budget: u64,
        of_special: bool,
        uncleanable: &mut std::collections::BTreeSet<u32>,
        done: &mut Cleaned,
        pressure: &dyn Fn(&Map) -> Pressure,
    ) -> Result<()> {
        while done.bytes < budget {
            let durable = self.durable().0;
            let chosen = {
                let map = self.map.read();
                match pressure(&map) {
                    Pressure::None => None,
                    pressure => cleaner::choose(&map.table, &self.capacity(), durable, pressure, &|id, segment| {
                        uncleanable.contains(&id) || self.backend.is_special(&segment.place) != of_special
                    }),
                }
            };
            let Some(id) = chosen else { break };
            let outcome = match self.move_out(id, budget, false, done) {
                // A copy of the damaged part may be right.
                Ok(Outcome::Damaged) if self.mend_segment(id)? => self.move_out(id, budget, false, done),
                outcome => outcome,
            };
            match outcome {
                Ok(Outcome::Empty) => done.segments += 1,
                Ok(Outcome::Damaged) => {
                    uncleanable.insert(id);
                }
                Ok(Outcome::Budget) | Err(PoolError::NoSpace) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves the live frames out of a segment, within the budget; or only frames of trees.
    pub(super) fn move_out(&self, id: u32, budget: u64, only_trees: bool, done: &mut Cleaned) -> Result<Outcome> {
        let mut intact = true;
        let stream = self.map.read().table.segments().get(&id).map_or(WriteStream::Data, |segment| segment.stream);
        let mut mover = Mover::new(self, id, stream);
        let walked = self.walk(id, 0, true, &mut |frame| {
            let Pointer { segment, index, .. } = frame.header.pointer;
            let offset = frame.offset / Pointer::UNIT;
            let skip = only_trees && !is_of_trees(frame.header.pointer.kind);
            if skip || !self.map.read().table.lives_at(segment, index, id, offset) {
                return Ok(true);
            }
            if check(&frame).is_some() {
                intact = false;
                return Ok(true);
            }
            mover.copy(&frame, done)?;
            Ok(done.bytes < budget)
        });
        // Frames copied before an error are published.
        mover.publish(done)?;
        let complete = walked?;
        let left = self.map.read().table.segments().get(&id).is_some_and(|segment| segment.live_frames > 0);
        Ok(match left {
            false => Outcome::Empty,
            true if intact && done.bytes >= budget => Outcome::Budget,
            true if only_trees => Outcome::Empty,
            // A part could not be read, or the walk could not get past it.
            true => {
                tracing::warn!(segment = id, complete, "a segment cannot be cleaned: something in it is damaged");
                Outcome::Damaged
            }
        })
    }

    /// Appender for moved frames: frames of trees go to the redundant one, if metadata is written twice.
    fn relocated_appender(&self, from: WriteStream, kind: FrameKind) -> &Appender {
        let metadata = from.is_metadata() || is_of_trees(kind);
        if self.has_redundant_metadata() && metadata {
            &self.appenders.relocated_metadata
        } else {
            &self.appenders.relocated
        }
    }

    /// Publishes copied frames in the table, once they are on the device. Frames freed or moved meanwhile are left
    /// out.
    fn publish(&self, moving: &mut Vec<Moving>) -> Result<u64> {
        self.flush(&self.appenders.relocated)?;
        self.flush(&self.appenders.relocated_metadata)?;
        let mut map = self.map.write();
        let mut published = 0;
        for frame in moving.drain(..) {
            if map.table.lives_at(frame.segment, frame.index, frame.from.0, frame.from.1) {
                let op = Op::Move {
                    segment: frame.segment,
                    index: frame.index,
                    from: frame.from.0,
                    to: frame.to.0,
                    offset: frame.to.1,
                    units: frame.units,
                };
                map.table.apply(op)?;
                published += 1;
                self.sums
                    .written_relocated
                    .fetch_add(u64::from(frame.units) * u64::from(Pointer::UNIT), Ordering::Relaxed);
            }
        }
        // Only one thread moves frames at a time: no other frame is on its way to a sealed segment.
        let Map { table, arriving, .. } = &mut *map;
        arriving.retain(|id| table.segments().get(id).is_some_and(|segment| !segment.sealed));
        Ok(published)
    }

    /// Frees slots for a writer that found none: cleans, and commits the moves.
    pub(super) fn relieve(&self, stream: WriteStream) -> Result<()> {
        self.clean_until(|| self.backend.room().free > cleaner::reserve(stream))
    }

    /// Cleans, and commits the moves, until there are enough free slots.
    pub(super) fn clean_until(&self, enough: impl Fn() -> bool) -> Result<()> {
        let _one = self.relief.lock();
        let mut fruitless = 0;
        while !enough() {
            self.usable()?;
            let before = self.backend.room().free;
            let mut done = Cleaned::default();
            let pressure = |_: &Map| self.urgency();
            self.clean(self.longest * 8, false, &mut self.uncleanable.lock(), &mut done, &pressure)?;
            self.commit_moves()?;
            self.backend.reclaim();
            // Relocated frames may fill a whole slot before the first one is freed.
            fruitless = if self.backend.room().free > before { 0 } else { fruitless + 1 };
            if (done.bytes == 0 && fruitless > 1) || fruitless > 16 {
                break;
            }
        }
        if enough() { Ok(()) } else { Err(PoolError::NoSpace) }
    }
}

/// Copies frames out of a segment, and publishes them in the table.
pub(super) struct Mover<'a> {
    store: &'a Store,
    id: u32,
    stream: WriteStream,
    moving: Vec<Moving>,
    held: u64,
}

impl<'a> Mover<'a> {
    pub(super) fn new(store: &'a Store, id: u32, stream: WriteStream) -> Self {
        Self { store, id, stream, moving: Vec::new(), held: 0 }
    }

    /// Copies a live, verified frame.
    pub(super) fn copy(&mut self, frame: &Walked<'_>, done: &mut Cleaned) -> Result<()> {
        let Pointer { segment, index, birth, kind, .. } = frame.header.pointer;
        let charged = frame.header.pointer.charged();
        let put = |state: &mut crate::segment::stream::AppenderState, full: &mut Vec<Arc<_>>| {
            state.append_moved(frame.raw_header, frame.stored, birth, full)
        };
        let to = self.store.append(self.store.relocated_appender(self.stream, kind), charged, put)?;
        let (from, units) = ((self.id, frame.offset / Pointer::UNIT), (charged / u64::from(Pointer::UNIT)) as u32);
        self.moving.push(Moving { segment, index, from, to, units });
        done.bytes += charged;
        self.held += charged;
        if self.held >= BATCH { self.publish(done) } else { Ok(()) }
    }

    /// Publishes the copied frames in the table.
    pub(super) fn publish(&mut self, done: &mut Cleaned) -> Result<()> {
        self.held = 0;
        done.frames += self.store.publish(&mut self.moving)?;
        Ok(())
    }
}

/// Whether this kind of frame belongs to trees.
fn is_of_trees(kind: FrameKind) -> bool {
    matches!(kind, FrameKind::Leaf | FrameKind::Inner | FrameKind::Value)
}

/// Result of moving frames out of a segment.
pub(super) enum Outcome {
    Empty,
    Budget,
    Damaged,
}

impl<'a> Walked<'a> {
    /// A frame as it is stored, for a copy.
    pub(super) fn new(header: crate::frame::Header, offset: u32, raw_header: &'a [u8], stored: &'a [u8]) -> Self {
        Self { header, offset, raw_header, stored }
    }
}

#[cfg(test)]
impl Store {
    /// Moves the live frames out of a segment, whether it pays or not.
    pub(super) fn move_out_for_tests(&self, id: u32, budget: u64, done: &mut Cleaned) -> Result<()> {
        let _alone = self.uncleanable.lock();
        self.move_out(id, budget, false, done).map(|_| ())
    }
}
