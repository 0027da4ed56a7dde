//! Giving room back: a device is told of slots that hold nothing any more, so that a pool on a file takes no more than it holds.
//!
//! Callers: the engine's chores. Invariant: a slot is not used again while its device is being told.

use crate::device::failed;
use crate::label::Place;
use crate::segment::slots;

use super::{Result, Store};

/// So many slots are told of in one step.
const TRIMMED_AT_ONCE: usize = 16;

impl Store {
    /// Whether devices are told of freed slots from now on.
    pub fn set_autotrim(&self, on: bool) {
        self.map.write().trims = on;
        if !on {
            self.give_untrimmed();
        }
    }

    /// Tells the devices of some freed slots; answers whether there are more.
    ///
    /// # Errors
    /// [`crate::PoolError::Device`]; the slots are free all the same.
    pub fn trim_step(&self) -> Result<bool> {
        let (places, more) = {
            let mut map = self.map.write();
            let from = map.trimming.len().saturating_sub(TRIMMED_AT_ONCE);
            (map.trimming.split_off(from), from > 0)
        };
        let told = places.iter().try_for_each(|place| self.tell(*place));
        let mut map = self.map.write();
        places.iter().for_each(|place| map.slots.release(*place));
        told.map(|()| more)
    }

    fn tell(&self, place: Place) -> Result<()> {
        let device = self.device(place.device)?;
        device.discard(slots::start(place, self.slot), self.slot).map_err(|error| failed(&*device, "discarding on", error))
    }

    /// Frees slots whose devices were not told yet; answers whether there were any.
    pub(super) fn give_untrimmed(&self) -> bool {
        let mut map = self.map.write();
        let places = std::mem::take(&mut map.trimming);
        places.iter().for_each(|place| map.slots.release(*place));
        !places.is_empty()
    }
}
