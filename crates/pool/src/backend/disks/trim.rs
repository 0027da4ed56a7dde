//! TRIM: discards slots that hold nothing, so that a pool on a file uses no more of the host than it stores.
//!
//! Callers: the store, for the engine's background work. Invariant: neither a slot nor a device's number is reused
//! while slots are being discarded.

use crate::device::failed;
use crate::label::SlotAddress;
use crate::segment::cleaner;

use super::{Disks, Result, slots};

/// Number of slots discarded in one step.
const TRIMMED_AT_ONCE: usize = 16;

/// Number of bytes withheld from writers at once during a manual trim, at most.
const TOLD_AT_ONCE: u64 = 64 << 20;
/// Number of slots that stay free in addition to those below which the cleaner hurries.
const SPARE: u64 = 8;

/// Result of one step of a manual trim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimStep {
    /// Number of discarded bytes.
    pub bytes: u64,
    /// Slot at which the next step starts; `None` at the end of the device.
    pub next: Option<u32>,
}

impl Disks {
    /// Discards a run of free slots from this one on: slots that neither the current state nor a retained root uses.
    ///
    /// # Errors
    /// [`crate::PoolError::Device`]; [`crate::PoolError::Format`] for a device number that does not exist.
    pub fn trim_free(&self, device: u16, from: u32) -> Result<TrimStep> {
        let known = self.device(device)?;
        // A writer that finds no slot meanwhile waits for this lock.
        let _turn = self.trim_turn.lock();
        let most = (TOLD_AT_ONCE / self.slot.max(1)).clamp(1, TRIMMED_AT_ONCE as u64) as u32;
        let end = slots::count(known.length(), self.slot);
        // A slot that an older root still needs is not free: the commit after which no retained root names it
        // releases it.
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
        (first..first + count).for_each(|slot| rooms.slots.release_withheld(place(slot)));
        drop(rooms);
        let next = first + count;
        told.map(|()| TrimStep { bytes, next: (next < end).then_some(next) })
    }

    /// Enables or disables the discarding of freed slots (autotrim).
    pub fn set_autotrim(&self, on: bool) {
        self.rooms.lock().trims = on;
        if !on {
            self.give_untrimmed();
        }
    }

    /// Discards some freed slots; returns whether more are waiting. Where few other slots are free, as many as are
    /// short are first given to writers without being discarded.
    ///
    /// # Errors
    /// [`crate::PoolError::Device`]; the slots are free all the same.
    pub fn trim_step(&self) -> Result<bool> {
        // A writer that finds no slot meanwhile waits for this lock.
        let _turn = self.trim_turn.lock();
        let (places, more) = {
            let mut rooms = self.rooms.lock();
            let spare = cleaner::hurry(rooms.slots.total()) + SPARE;
            let lacking = usize::try_from(spare.saturating_sub(rooms.slots.free()))
                .unwrap_or(usize::MAX)
                .min(rooms.trimming.len());
            let given: Vec<_> = rooms.trimming.drain(..lacking).collect();
            given.into_iter().for_each(|place| rooms.slots.release_withheld(place));
            let from = rooms.trimming.len().saturating_sub(TRIMMED_AT_ONCE);
            (rooms.trimming.split_off(from), from > 0)
        };
        let told = places.iter().try_for_each(|place| self.tell(*place));
        let mut rooms = self.rooms.lock();
        places.iter().for_each(|place| rooms.slots.release_withheld(*place));
        told.map(|()| more)
    }

    /// Waits for a running discard, if there is one; returns whether it waited.
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

    /// Discards a range on all devices that hold this slot's content.
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

    /// Frees slots that were not discarded yet; returns whether there were any.
    pub(super) fn give_untrimmed(&self) -> bool {
        let mut rooms = self.rooms.lock();
        let places = std::mem::take(&mut rooms.trimming);
        places.iter().for_each(|place| rooms.slots.release_withheld(*place));
        !places.is_empty()
    }
}
