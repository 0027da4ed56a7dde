//! Allocation map: which slots of which device are in use, and by which segment.
//!
//! Callers: the backend of devices, under its lock. Invariant: a slot is claimed once; claiming a slot that is taken
//! or does not exist means that the segment table is damaged.

use std::collections::BTreeSet;

use crate::error::{Damage, PoolError};
use crate::label::{self, SlotAddress};

/// Allocation state of all slots of all devices.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    devices: Vec<Device>,
    /// Devices that are used only where no other has free slots.
    avoided: BTreeSet<usize>,
}

/// Owner of a free slot.
const FREE: u32 = 0;

/// Owner of a used slot without a segment: slots of the intent log, and slots that are being discarded. Segment
/// numbers start at 1 and never reach this value.
pub const NO_SEGMENT: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Device {
    /// Owner of each slot: a segment number.
    owners: Vec<u32>,
    free: usize,
    /// No slot before this one is free: the lowest is taken first, so that a pool on a file stays compact.
    next: usize,
}

/// Number of slots of a device of this length.
#[must_use]
pub fn count(length: u64, slot: u64) -> u32 {
    let whole = length / label::ENDS * label::ENDS;
    u32::try_from(whole.saturating_sub(2 * label::ENDS) / slot).unwrap_or(u32::MAX)
}

/// Slot length for devices of this total length: about five hundred slots, each 1 to 64 MiB; from 256 MiB on at least
/// 2 MiB, so that large frames leave little unused at the ends of slots.
#[must_use]
pub fn length(total: u64) -> u64 {
    let least = if total < 256 << 20 { 1 << 20 } else { 2 << 20 };
    (total / 512).clamp(least, 64 << 20).next_power_of_two()
}

/// Offset of a slot on its device, bytes.
#[must_use]
pub fn start(place: SlotAddress, slot: u64) -> u64 {
    label::ENDS + u64::from(place.slot) * slot
}

impl Slots {
    /// Adds a device with this many slots, all free.
    pub fn add_device(&mut self, count: u32) {
        self.devices.push(Device { owners: vec![FREE; count as usize], free: count as usize, next: 0 });
    }

    /// Grows a device to this many slots.
    pub fn grow(&mut self, device: usize, count: u32) {
        if let Some(device) = self.devices.get_mut(device) {
            let more = (count as usize).saturating_sub(device.owners.len());
            device.owners.resize(device.owners.len() + more, FREE);
            device.free += more;
        }
    }

    /// Removes all slots of a device number.
    pub fn forget(&mut self, device: usize) {
        if let Some(device) = self.devices.get_mut(device) {
            *device = Device { owners: Vec::new(), free: 0, next: 0 };
        }
    }

    /// Deprioritizes a device in allocations until the next import; returns `false` if it was so already.
    pub fn avoid(&mut self, device: u16) -> bool {
        self.avoided.insert(usize::from(device))
    }

    /// Number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// Number of all slots.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.devices.iter().map(|device| device.owners.len() as u64).sum()
    }

    /// Number of free slots.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.devices.iter().map(|device| device.free as u64).sum()
    }

    /// Number of slots of a device, and how many of them are free.
    #[must_use]
    pub fn of_device(&self, device: usize) -> (u64, u64) {
        self.devices.get(device).map_or((0, 0), |device| (device.owners.len() as u64, device.free as u64))
    }

    /// Allocates the lowest free slot of a device.
    pub fn take_of(&mut self, number: usize, owner: u32) -> Option<SlotAddress> {
        let device = self.devices.get_mut(number)?;
        let slot = device.owners.iter().skip(device.next).position(|owner| *owner == FREE)? + device.next;
        *device.owners.get_mut(slot)? = owner;
        device.free -= 1;
        device.next = slot + 1;
        Some(SlotAddress { device: u16::try_from(number).ok()?, slot: u32::try_from(slot).ok()? })
    }

    /// Allocates a free slot for a segment on the device with the largest share of free slots.
    pub fn take(&mut self, owner: u32) -> Option<SlotAddress> {
        self.take_among(&|_| true, owner)
    }

    /// Allocates as [`Self::take`], on the devices selected by `among`.
    pub fn take_among(&mut self, among: &dyn Fn(usize) -> bool, owner: u32) -> Option<SlotAddress> {
        let share = |device: &Device| (device.free as u128 * 1_000_000) / (device.owners.len() as u128).max(1);
        let (number, device) = self
            .devices
            .iter_mut()
            .enumerate()
            .filter(|(at, device)| device.free > 0 && among(*at))
            .max_by_key(|(at, device)| (!self.avoided.contains(at), share(device), usize::MAX - at))?;
        let slot = device.owners.iter().skip(device.next).position(|owner| *owner == FREE)? + device.next;
        *device.owners.get_mut(slot)? = owner;
        device.free -= 1;
        device.next = slot + 1;
        Some(SlotAddress { device: u16::try_from(number).ok()?, slot: u32::try_from(slot).ok()? })
    }

    /// Allocates a slot for the second copy of a segment: on another device if one has a free slot, otherwise as far
    /// away as possible on the same device.
    pub fn take_apart(&mut self, from: SlotAddress, owner: u32) -> Option<SlotAddress> {
        self.take_apart_among(&|_| true, from, owner)
    }

    /// Allocates as [`Self::take_apart`], on the devices selected by `among`.
    pub fn take_apart_among(
        &mut self,
        among: &dyn Fn(usize) -> bool,
        from: SlotAddress,
        owner: u32,
    ) -> Option<SlotAddress> {
        let share = |device: &Device| (device.free as u128 * 1_000_000) / (device.owners.len() as u128).max(1);
        let others = self.devices.iter().enumerate().filter(|(at, device)| {
            device.free > 0 && *at != usize::from(from.device) && !self.avoided.contains(at) && among(*at)
        });
        let other = others.max_by_key(|(at, device)| (share(device), usize::MAX - at)).map(|(at, _)| at);
        let number = other.unwrap_or(usize::from(from.device));
        let device = self.devices.get_mut(number)?;
        let (total, free) = (device.owners.len(), |slot: &usize| device.owners.get(*slot) == Some(&FREE));
        // Search from half of the device away, wrapping around at its end.
        let begin = from.slot as usize + total / 2;
        let slot = (0..total).map(|step| (begin + step) % total).find(free)?;
        *device.owners.get_mut(slot)? = owner;
        device.free -= 1;
        Some(SlotAddress { device: u16::try_from(number).ok()?, slot: u32::try_from(slot).ok()? })
    }

    /// Allocates the next run of adjacent free slots of a device from this one on, at most `most`, as long as `spare`
    /// others stay free; returns the first and their number. `None` where there is no such run.
    pub fn take_run(&mut self, device: u16, from: u32, most: u32, spare: u64) -> Option<(u32, u32)> {
        let most = u64::from(most).min(self.free().saturating_sub(spare)) as usize;
        let device = self.devices.get_mut(usize::from(device))?;
        let first = device.owners.iter().skip(from as usize).position(|owner| *owner == FREE)? + from as usize;
        let mut count = 0;
        for owner in device.owners.iter_mut().skip(first).take(most).take_while(|owner| **owner == FREE) {
            *owner = NO_SEGMENT;
            count += 1;
        }
        device.free -= count;
        (count > 0).then_some(())?;
        Some((u32::try_from(first).ok()?, u32::try_from(count).ok()?))
    }

    /// Finds the lowest run of `count` adjacent free slots of a device; returns its first slot.
    #[must_use]
    pub fn free_run(&self, device: u16, count: u32) -> Option<u32> {
        let device = self.devices.get(usize::from(device))?;
        let mut found = 0;
        let last = device.owners.iter().position(|owner| {
            found = if *owner == FREE { found + 1 } else { 0 };
            found >= count.max(1)
        })?;
        u32::try_from(last + 1).ok()?.checked_sub(count.max(1))
    }

    /// Marks a slot as used by the segment that the segment table names.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a slot that is taken or does not exist.
    pub fn claim(&mut self, place: SlotAddress, owner: u32) -> Result<(), PoolError> {
        let device = self.devices.get_mut(usize::from(place.device));
        let Some(slot) = device.and_then(|device| device.claimable(place.slot)) else {
            return Err(PoolError::Format(Damage::Structure(
                "two segments in one slot, or a slot that does not exist",
            )));
        };
        *slot = owner;
        Ok(())
    }

    /// Owner of a slot; `None` where it is free or does not exist.
    #[must_use]
    pub fn owner(&self, place: SlotAddress) -> Option<u32> {
        let owner = self.devices.get(usize::from(place.device))?.owners.get(place.slot as usize)?;
        (*owner != FREE).then_some(*owner)
    }

    /// Detaches a slot from its segment without freeing it.
    pub fn disown(&mut self, place: SlotAddress) {
        let device = self.devices.get_mut(usize::from(place.device));
        let owner = device.and_then(|device| device.owners.get_mut(place.slot as usize));
        if let Some(owner) = owner.filter(|owner| **owner != FREE) {
            *owner = NO_SEGMENT;
        }
    }

    /// All slots of segments, with their owners: device by device, in slot order.
    pub fn owned(&self) -> impl Iterator<Item = (u32, SlotAddress)> {
        (0..).zip(&self.devices).flat_map(|(device, slots)| {
            let owned = (0..).zip(&slots.owners).filter(|(_, owner)| !matches!(**owner, FREE | NO_SEGMENT));
            owned.map(move |(slot, owner)| (*owner, SlotAddress { device, slot }))
        })
    }

    /// Frees a slot that was withheld from segments, unless it has become a segment's meanwhile.
    pub fn release_withheld(&mut self, place: SlotAddress) {
        if self.owner(place) == Some(NO_SEGMENT) {
            self.release(place);
        }
    }

    /// Frees a slot.
    pub fn release(&mut self, place: SlotAddress) {
        if let Some(device) = self.devices.get_mut(usize::from(place.device))
            && let Some(owner) = device.owners.get_mut(place.slot as usize)
            && *owner != FREE
        {
            *owner = FREE;
            device.free += 1;
            device.next = device.next.min(place.slot as usize);
        }
    }
}

impl Device {
    fn claimable(&mut self, slot: u32) -> Option<&mut u32> {
        let owner = self.owners.get_mut(slot as usize).filter(|owner| **owner == FREE)?;
        self.free -= 1;
        Some(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_given_once_and_devices_fill_evenly() {
        let mut slots = Slots::default();
        slots.add_device(30);
        slots.add_device(10);
        let mut taken = std::collections::BTreeSet::new();
        for at in 0..40 {
            let place = slots.take(1).unwrap();
            assert!(taken.insert(place), "given twice");
            assert!(slots.claim(place, 2).is_err());
            assert_eq!(slots.free(), 39 - at);
            if at == 19 {
                assert_eq!(taken.iter().filter(|place| place.device == 0).count(), 15);
            }
        }
        assert_eq!(slots.take(1), None);
        slots.release(SlotAddress { device: 0, slot: 20 });
        slots.release(SlotAddress { device: 0, slot: 7 });
        slots.release(SlotAddress { device: 0, slot: 12 });
        assert_eq!(
            [slots.take(1), slots.take(1), slots.take(1)].map(|place| place.map(|place| place.slot)),
            [Some(7), Some(12), Some(20)]
        );
        let place = SlotAddress { device: 1, slot: 4 };
        slots.release(place);
        slots.release(place);
        assert_eq!((slots.free(), slots.total()), (1, 40));
        slots.claim(place, 2).unwrap();
        assert!(slots.claim(SlotAddress { device: 2, slot: 0 }, 2).is_err());
        assert!(slots.claim(SlotAddress { device: 0, slot: 30 }, 2).is_err());
    }

    #[test]
    fn copies_lie_elsewhere() {
        let mut slots = Slots::default();
        slots.add_device(10);
        let first = slots.take(1).unwrap();
        assert_eq!(slots.take_apart(first, 1), Some(SlotAddress { device: 0, slot: 5 }));
        let second = slots.take(1).unwrap();
        assert_eq!((second.slot, slots.take_apart(second, 1)), (1, Some(SlotAddress { device: 0, slot: 6 })));
        slots.add_device(3);
        assert_eq!(slots.take_apart(first, 1).map(|place| place.device), Some(1), "another device");
        while slots.take(1).is_some() {}
        assert_eq!((slots.free(), slots.take_apart(first, 1)), (0, None));
    }

    #[test]
    fn lengths() {
        assert_eq!([64 << 20, 256 << 20, 4 << 30, 1 << 40].map(length), [1 << 20, 2 << 20, 8 << 20, 64 << 20]);
        assert_eq!(count(64 << 20, 1 << 20), 62);
        assert_eq!(count((64 << 20) - 1, 1 << 20), 61);
        assert_eq!(count(1, 1 << 20), 0);
        assert_eq!(start(SlotAddress { device: 0, slot: 2 }, 4 << 20), 9 << 20);
    }
}
