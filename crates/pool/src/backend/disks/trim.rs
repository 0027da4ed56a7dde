//! Giving room back: a device is told of slots that hold nothing any more, so that a pool on a file
//! takes no more than it holds.
//!
//! Callers: the store, for the engine's chores. Invariant: a slot is not used again while its device is being
//! told.

use crate::device::failed;
use crate::label::SlotAddress;
use crate::segment::cleaner;

use super::{Disks, Result, slots};

/// So many slots are told of in one step.
const TRIMMED_AT_ONCE: usize = 16;

/// So many bytes are taken away from writers at once, at most, while a device is told of free room.
const TOLD_AT_ONCE: u64 = 64 << 20;
/// So many slots more stay free than those with which the cleaner begins to hurry.
const SPARE: u64 = 8;

/// What a step of going through the free room of a device has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimStep {
    /// Bytes that the device was told of.
    pub bytes: u64,
    /// The slot to go on with; `None`: the device is at its end.
    pub next: Option<u32>,
}

impl Disks {
    /// Tells a device of some slots from this one on that hold nothing, neither now nor in a state
    /// that could be gone back to.
    ///
    /// # Errors
    /// [`crate::PoolError::Device`]; no such device is refused.
    pub fn trim_free(&self, device: u16, from: u32) -> Result<TrimStep> {
        let known = self.device(device)?;
        // Who finds no slot meanwhile waits for this.
        let _turn = self.trim_turn.lock();
        let most = (TOLD_AT_ONCE / self.slot.max(1)).clamp(1, TRIMMED_AT_ONCE as u64) as u32;
        let end = slots::count(known.length(), self.slot);
        // A slot that an older root still needs is not among the free ones: it is released by the
        // commit after which no root that is kept names it.
        let taken = {
            let mut rooms = self.rooms.lock();
            let spare = cleaner::hurry(rooms.slots.total()) + SPARE;
            rooms.slots.take_run(device, from, most, spare)
        };
        let Some((first, count)) = taken else {
            return Ok(TrimStep { bytes: 0, next: None });
        };
        let place = |slot| SlotAddress { device, slot };
        let bytes = u64::from(count) * self.slot;
        let told = self.discard(place(first), bytes);
        let mut rooms = self.rooms.lock();
        (first..first + count).for_each(|slot| rooms.slots.release(place(slot)));
        drop(rooms);
        let next = first + count;
        told.map(|()| TrimStep { bytes, next: (next < end).then_some(next) })
    }

    /// Whether devices are told of freed slots from now on.
    pub fn set_autotrim(&self, on: bool) {
        self.rooms.lock().trims = on;
        if !on {
            self.give_untrimmed();
        }
    }

    /// Tells the devices of some freed slots; answers whether there are more. Where little else is
    /// free, as many as lack are given to writers untold first.
    ///
    /// # Errors
    /// [`crate::PoolError::Device`]; the slots are free all the same.
    pub fn trim_step(&self) -> Result<bool> {
        // Who finds no slot meanwhile waits for this.
        let _turn = self.trim_turn.lock();
        let (places, more) = {
            let mut rooms = self.rooms.lock();
            let spare = cleaner::hurry(rooms.slots.total()) + SPARE;
            let lacking = usize::try_from(spare.saturating_sub(rooms.slots.free()))
                .unwrap_or(usize::MAX)
                .min(rooms.trimming.len());
            let given: Vec<_> = rooms.trimming.drain(..lacking).collect();
            given.into_iter().for_each(|place| rooms.slots.release(place));
            let from = rooms.trimming.len().saturating_sub(TRIMMED_AT_ONCE);
            (rooms.trimming.split_off(from), from > 0)
        };
        let told = places.iter().try_for_each(|place| self.tell(*place));
        let mut rooms = self.rooms.lock();
        places.iter().for_each(|place| rooms.slots.release(*place));
        told.map(|()| more)
    }

    /// Waits until a device was told of free slots, if one is told now; answers whether it was so.
    pub(super) fn wait_for_trim(&self) -> bool {
        if self.trim_turn.try_lock().is_some() {
            return false;
        }
        drop(self.trim_turn.lock());
        true
    }

    fn tell(&self, place: SlotAddress) -> Result<()> {
        self.discard(place, self.slot)
    }

    /// Tells all devices that hold what this one holds.
    fn discard(&self, place: SlotAddress, bytes: u64) -> Result<()> {
        let layout = self.layout();
        let holders: Vec<u16> = if layout.is_plain() {
            vec![place.device]
        } else {
            layout.holders(place.device).filter(|(_, standing)| standing.works()).map(|(holder, _)| holder).collect()
        };
        let mut told = Ok(());
        for holder in holders {
            let device = self.device(holder)?;
            let discarded = device.discard(slots::start(place, self.slot), bytes);
            told = told.and(discarded.map_err(|error| failed(&*device, "discarding on", error)));
        }
        told
    }

    /// Frees slots whose devices were not told yet; answers whether there were any.
    pub(super) fn give_untrimmed(&self) -> bool {
        let mut rooms = self.rooms.lock();
        let places = std::mem::take(&mut rooms.trimming);
        places.iter().for_each(|place| rooms.slots.release(*place));
        !places.is_empty()
    }
}
