//! Topology changes: segments in the old layout are moved, one by one, to where they would be allocated now; then the
//! change is complete. Rebalancing after adding devices works the same way.
//!
//! Callers: the background job of a topology change, and commands that ask for its effects.
//!
//! Invariants:
//! - Everything written after a change has begun is in the new layout, so the work ends.
//! - A change is complete, and devices leave, only when no retained root names anything in the old layout.
//! - Lost frames stay where they are, and delay the completion of the change until they are freed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::cleaning::{Cleaned, Outcome};
use super::space::Space;
use super::{Committed, Map, Result, Store};
use crate::backend::{Disks, Evenness, NewShape, SegmentAt};
use crate::device::Device;
use crate::error::PoolError;
use crate::frames::WriteStream;
use crate::label::{ChangeKind, Place, ShapeChange};
use crate::pointer::Pointer;
use crate::segment::cleaner::Pressure;
use crate::segment::table::Segment;
use crate::space::slop;

/// Devices are balanced when the fullest is at most this many thousandths above the emptiest.
const EVEN: u64 = 20;

/// Result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveStep {
    /// Number of moved bytes.
    pub bytes: u64,
    /// Nothing more can be moved now.
    pub idle: bool,
    /// There was no space for the frames to be moved.
    pub no_room: bool,
}

/// Remaining work of a topology change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Number of segments with live frames.
    pub segments: u64,
    /// Number of live bytes in them.
    pub bytes: u64,
}

/// Effects of a planned topology change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outlook {
    /// Capacity for file content, bytes: now and afterwards.
    pub usable: (u64, u64),
    /// Space available to ordinary writes: now and afterwards.
    pub available: (u64, u64),
    /// Number of bytes to be moved.
    pub moves: u64,
    /// Number of devices that the group can lose: now, meanwhile, afterwards.
    pub losses: (usize, usize, usize),
    /// Missing space for the change, bytes.
    pub lacking: u64,
}

impl Store {
    /// The topology change that is in progress.
    #[must_use]
    pub fn shape_change(&self) -> Option<ShapeChange> {
        self.disks.as_ref().and_then(|disks| disks.shape_change())
    }

    /// Begins a topology change; later writes are in the new layout. Existing segments have to be moved
    /// ([`Self::reshape_step`]). `guids` are random GUIDs of the new devices.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where there is too little space, or the change is impossible: nothing has changed then;
    /// errors of writing labels.
    pub fn begin_change(&self, new: &NewShape, devices: &[Arc<dyn Device>], guids: &[u64]) -> Result<()> {
        let lengths: Vec<u64> = devices.iter().map(|device| device.length()).collect();
        let outlook = self.outlook(new, &lengths)?;
        if outlook.lacking > 0 {
            return Err(PoolError::Refused(format!(
                "out of space: what is in use does not fit into what would be left, by {} MiB",
                outlook.lacking.div_ceil(1 << 20)
            )));
        }
        self.change_shape(false, |disks| {
            disks.begin_change(new, devices, guids, &|now| now(self.map.write().next_segment))
        })
    }

    /// Computes the effects of a change.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an impossible change.
    pub fn outlook(&self, new: &NewShape, lengths: &[u64]) -> Result<Outlook> {
        let disks = self.disks()?;
        disks.check_change(new)?;
        let Space { size, allocated, special, slack, copies, available, .. } = self.space();
        let after = disks.room_after(new, lengths).size;
        let moves = {
            let (map, moved_by) = (self.map.read(), disks.moved_by(new));
            let moved = |(id, segment): &(&u32, &Segment)| moved_by(at(**id, segment), segment.stream);
            map.table.segments().iter().filter(moved).map(|(_, segment)| bytes(segment)).sum()
        };
        // The special class uses nothing of this space, unless its metadata moves out of it.
        let comes = if disks.is_special_group(new.group) { disks.cost_of_metadata(moves) } else { 0 };
        let needed = allocated.saturating_sub(special) + comes + slack + copies + slop(after).min(self.slop_at_most);
        Ok(Outlook {
            usable: (size, after),
            available: (available, after.saturating_sub(needed)),
            moves,
            losses: disks.redundancy(new),
            lacking: needed.saturating_sub(after),
        })
    }

    /// Cancels the change that is in progress.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where no change can be cancelled; errors of writing labels.
    pub fn give_up_change(&self) -> Result<()> {
        self.change_shape(false, Disks::give_up_change)
    }

    /// Remaining work of the change in progress.
    #[must_use]
    pub fn left_to_move(&self) -> Left {
        let Some(disks) = self.disks.as_ref().filter(|disks| disks.shape_change().is_some()) else {
            return Left::default();
        };
        let map = self.map.read();
        let mut left = Left::default();
        for (id, segment) in map.table.segments().iter().filter(|(_, segment)| segment.live_frames > 0) {
            if !segment.place.is_empty() && disks.is_misplaced(at(*id, segment), segment.stream) {
                left.segments += 1;
                left.bytes += bytes(segment);
            }
        }
        left
    }

    /// Moves about `budget` bytes of the segments in the old layout, except those in `stuck`; segments that cannot be
    /// moved are added to it.
    ///
    /// # Errors
    /// [`PoolError::Suspended`], [`PoolError::Device`] for a device that cannot be read.
    pub fn reshape_step(&self, budget: u64, stuck: &mut BTreeSet<u32>) -> Result<MoveStep> {
        self.move_some(budget, stuck, &|stuck| self.next_misplaced(stuck))
    }

    /// Moves about `budget` bytes from the fullest device or group to others, as long as it is fuller than the
    /// emptiest; the step is idle when they are balanced.
    ///
    /// # Errors
    /// As [`Self::reshape_step`].
    pub fn even_step(&self, budget: u64, stuck: &mut BTreeSet<u32>) -> Result<MoveStep> {
        self.move_some(budget, stuck, &|stuck| self.next_uneven(stuck))
    }

    /// Approximate number of bytes to move until the fullest device or group is balanced with the emptiest.
    #[must_use]
    pub fn uneven(&self) -> u64 {
        let Some((most, least)) = self.evenness() else { return 0 };
        if most.taken <= least.taken + EVEN {
            return 0;
        }
        // Only content is moved; its copies and parity are written along with it.
        let (mut content, mut all) = (0, 0);
        for segment in self.map.read().table.segments().values().filter(|segment| !segment.place.is_empty()) {
            content += bytes(segment);
            all += bytes(segment) * segment.place.len() as u64 / segment.place.width() as u64;
        }
        let slots = most.slots.min(least.slots).max(1);
        let uneven = (most.taken - least.taken) * slots * self.slot / 2000;
        (u128::from(uneven) * content as u128 / (all as u128).max(1)) as u64
    }

    /// The fullest device or group, and the emptiest.
    #[must_use]
    pub fn evenness(&self) -> Option<(Evenness, Evenness)> {
        let mut living = BTreeMap::<u16, u64>::new();
        for segment in self.map.read().table.segments().values() {
            for slot in segment.place.iter() {
                *living.entry(slot.device).or_default() += bytes(segment) / segment.place.width() as u64;
            }
        }
        self.disks.as_ref()?.evenness(&living)
    }

    fn move_some(
        &self,
        budget: u64,
        stuck: &mut BTreeSet<u32>,
        next: &dyn Fn(&BTreeSet<u32>) -> Option<u32>,
    ) -> Result<MoveStep> {
        self.ready()?;
        let mut uncleanable = self.uncleanable.lock();
        let (mut done, mut moved, mut relieved) = (Cleaned::default(), MoveStep::default(), false);
        while done.bytes < budget {
            let Some(id) = next(stuck) else {
                moved.idle = true;
                break;
            };
            let outcome = match self.move_out(id, budget, false, &mut done) {
                // A copy of the damaged part may be right.
                Ok(Outcome::Damaged) if self.mend_segment(id)? => self.move_out(id, budget, false, &mut done),
                outcome => outcome,
            };
            // Undamaged frames do not wait for damaged ones.
            let outcome = match outcome {
                Ok(Outcome::Damaged) | Err(PoolError::Device { doing: "reading", .. }) => {
                    self.salvage(id, &mut done).map(|all| if all { Outcome::Empty } else { Outcome::Damaged })
                }
                outcome => outcome,
            };
            match outcome {
                Ok(Outcome::Empty) => relieved = false,
                Ok(Outcome::Damaged) => drop(stuck.insert(id)),
                Ok(Outcome::Budget) => break,
                Err(PoolError::NoSpace) if !relieved => {
                    // Moved segments release their locations, and so do dead ones.
                    relieved = true;
                    let mut cleaned = Cleaned::default();
                    let urgent = |_: &Map| Pressure::Urgent;
                    self.clean(self.longest * 4, false, &mut uncleanable, &mut cleaned, &urgent)?;
                    self.commit_moves()?;
                    self.backend.reclaim();
                }
                Err(PoolError::NoSpace) => {
                    moved.no_room = true;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        moved.bytes = done.bytes;
        Ok(moved)
    }

    /// The next movable segment in the old layout.
    fn next_misplaced(&self, stuck: &BTreeSet<u32>) -> Option<u32> {
        let disks = self.disks.as_ref()?;
        disks.shape_change()?;
        let (durable, map) = (self.durable().0, self.map.read());
        let is_next = |(id, segment): &(&u32, &Segment)| {
            is_settled(segment, durable)
                && !stuck.contains(*id)
                && disks.is_misplaced(at(**id, segment), segment.stream)
        };
        map.table.segments().iter().find(is_next).map(|(id, _)| *id)
    }

    /// The next movable segment of the fullest device or group.
    fn next_uneven(&self, stuck: &BTreeSet<u32>) -> Option<u32> {
        let (most, least) = self.evenness()?;
        if most.taken <= least.taken + EVEN {
            return None;
        }
        let (durable, map) = (self.durable().0, self.map.read());
        let is_next = |(id, segment): &(&u32, &Segment)| {
            let here = segment.place.iter().any(|slot| most.devices.contains(&slot.device));
            is_settled(segment, durable) && !stuck.contains(*id) && here
        };
        map.table.segments().iter().find(is_next).map(|(id, _)| *id)
    }

    /// Commits the moves; where slots are short, no older state is retained.
    ///
    /// # Errors
    /// [`PoolError::Suspended`].
    pub fn commit_moved(&self) -> Result<()> {
        self.ready()?;
        let mut committed = self.committed.lock();
        self.commit_root(&mut committed, None, false, false)
    }

    /// Completes the change in progress, if no segment is in the old layout any more; returns whether it is complete.
    /// Before, two transaction groups have to be committed since everything was moved, so that no log entry on a
    /// leaving device is needed.
    ///
    /// # Errors
    /// [`PoolError::Suspended`]; errors of writing labels.
    pub fn end_change(&self) -> Result<bool> {
        self.ready()?;
        let disks = self.disks()?;
        if self.left_to_move().segments > 0 {
            return Ok(false);
        }
        let mut committed = self.committed.lock();
        let Some(change) = disks.shape_change() else { return Ok(true) };
        if self.names_old_shape(&committed, disks, &change) {
            (committed.open_table, committed.renew) = (None, true);
        }
        committed.root.log = disks.leave_log();
        // The first commit rewrites the table elsewhere, the second retains no root that names its old location.
        for _ in 0..2 {
            self.commit_root(&mut committed, None, false, true)?;
        }
        if self.names_old_shape(&committed, disks, &change) {
            return Ok(false);
        }
        let mut left = Vec::new();
        self.change_devices(&mut committed, |disks| {
            left = disks.end_change()?;
            Ok(())
        })?;
        disks.settled();
        self.guard(&mut committed).map_err(|error| self.suspend(&error))?;
        drop(committed);
        left.iter().for_each(|device| Disks::clear_left(&**device));
        Ok(true)
    }

    /// Whether anything that the newest root names is in the old layout.
    fn names_old_shape(&self, committed: &Committed, disks: &Disks, change: &ShapeChange) -> bool {
        let leaves = |place: &Place| place.iter().any(|slot| change.leaving.contains(&slot.device));
        let map = self.map.read();
        let of_table = committed.root.table_segments.iter().any(|segment| {
            let at = SegmentAt { segment: segment.id, place: &segment.place };
            leaves(&segment.place) || disks.is_misplaced(at, WriteStream::Table)
        });
        let has_place = |(_, segment): &(&u32, &Segment)| !segment.place.is_empty();
        of_table
            || map
                .table
                .segments()
                .iter()
                .filter(has_place)
                .any(|(id, segment)| disks.is_misplaced(at(*id, segment), segment.stream))
            || change.kind == ChangeKind::Removal
                && committed.root.log.iter().any(|(slot, _)| change.leaving.contains(&slot.device))
    }
}

fn at(id: u32, segment: &Segment) -> SegmentAt<'_> {
    SegmentAt { segment: id, place: &segment.place }
}

fn is_settled(segment: &Segment, durable: u64) -> bool {
    segment.sealed && segment.live_frames > 0 && !segment.place.is_empty() && segment.newest.0 <= durable
}

fn bytes(segment: &Segment) -> u64 {
    u64::from(segment.live_units) * u64::from(Pointer::UNIT)
}
