//! Replacing and spare devices, paired with a device of a group (as in ZFS' replacing and spare vdevs). Both devices
//! of a pair hold the same bytes in the same slots, and the original continues to be read and written as long as it
//! works. Stored structures never name the new device: a location names the number of the original.
//!
//! Callers: the store, for commands and after a resilver.
//!
//! Invariants:
//! - A device leaves a pair only when another device of the pair has all data and the labels have
//!   recorded that.
//! - A device that takes over a number records it in its own label before the labels of the others do.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::{Layout, Standing};
use super::members::{Missing, path_hint, vacate};
use super::{Devices, Disks, Result, slots};
use crate::device::Device;
use crate::error::PoolError;
use crate::label::{self, Identity, Member, MemberRole, MemberState, MemberStatus};

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

impl Disks {
    /// Replaces a device: the new one takes its number once it has all of its data. Until then both are a pair and
    /// both are written; if the old device works, redundancy is not reduced meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is too short, or where the other is not a device of a group or is
    /// being replaced already; [`PoolError::Device`]; errors of writing labels.
    pub fn replace(&self, number: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        let layout = self.layout();
        if !layout.standing(number).is_some_and(Standing::is_own) {
            return refused("only a device of a group is replaced");
        }
        let is_replaced = |(_, standing): (u16, &Standing)| matches!(standing.role, MemberRole::Successor(_));
        if layout.holders(number).any(is_replaced) {
            return refused("it is being replaced already: wait for the end of that, or detach the new device");
        }
        self.fits_beside(number, &*device)?;
        self.form_groups();
        let standing = Standing {
            group: layout.standing(number).map_or(0, |standing| standing.group),
            role: MemberRole::Successor(number),
            status: MemberStatus::Online,
            stale: true,
            absent: false,
        };
        self.seat(device, guid, standing, &|_| {}).map(drop)
    }

    /// Adds a hot spare.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short to replace any device; [`PoolError::Device`]; errors of
    /// writing labels.
    pub fn add_spare(&self, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        let layout = self.layout();
        let fits = |number: u16| self.fits_beside(number, &*device).is_ok();
        let groups = 0..layout.groups.len().max(1);
        if !groups.flat_map(|group| layout.members(group)).any(|(at, _)| fits(at as u16)) {
            return refused(format!("{}: device is too small", device.name()));
        }
        self.form_groups();
        let standing =
            Standing { group: 0, role: MemberRole::Spare, status: MemberStatus::Online, stale: false, absent: false };
        self.seat(device, guid, standing, &|_| {}).map(drop)
    }

    /// Activates spares for faulted and missing devices, the shortest spare that fits first. Returns pairs of device
    /// and spare: a resilver has to follow.
    ///
    /// # Errors
    /// Errors of writing labels.
    pub fn engage_spares(&self) -> Result<Vec<(u16, u16)>> {
        let mut engaged = Vec::new();
        self.change(|layout| {
            let needs = |standing: &Standing| {
                standing.status == MemberStatus::Faulted || standing.status == MemberStatus::Online && standing.absent
            };
            // Without working log devices the log is in the pool's data groups: no spare is used up for them.
            let holding = layout.data_groups().chain(layout.special_groups());
            let own = holding.flat_map(|group| layout.members(group));
            let wanting: Vec<u16> = own.filter(|(_, standing)| needs(standing)).map(|(at, _)| at as u16).collect();
            for number in wanting {
                if layout.holders(number).any(|(at, standing)| at != number && standing.works()) {
                    continue;
                }
                let devices = Arc::clone(&self.devices.read());
                let spares = devices.iter().enumerate().filter(|(at, device)| {
                    let standing = layout.devices.get(*at);
                    standing.is_some_and(|standing| standing.role == MemberRole::Spare && standing.works())
                        && slots::count(device.length(), self.slot) >= slots::count(self.length_of(number), self.slot)
                });
                let Some(spare) = spares.min_by_key(|(_, device)| device.length()).map(|(at, _)| at) else { continue };
                if let Some(standing) = layout.devices.get_mut(spare) {
                    (standing.role, standing.stale) = (MemberRole::SpareFor(number), true);
                    engaged.push((number, spare as u16));
                }
            }
        });
        if !engaged.is_empty() {
            self.unwiped.lock().extend(engaged.iter().map(|(_, spare)| *spare));
            self.relabel()?;
            self.guard_rings()?;
        }
        Ok(engaged)
    }

    /// Removes an inactive spare from the pool.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for any other device; errors of writing labels.
    pub fn remove_spare(&self, number: u16) -> Result<()> {
        let is_spare = |standing: &Standing| standing.status.belongs() && standing.role == MemberRole::Spare;
        if !self.layout().standing(number).is_some_and(is_spare) {
            return refused("only inactive hot spares, cache, top-level, or log devices can be removed");
        }
        self.unseat(number)
    }

    /// Detaches a device of a pair: the replacing device, the spare, or the original if the other has all data.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where data would be lost; errors of writing labels.
    pub(super) fn detach_of_pair(&self, device: u16) -> Result<()> {
        let layout = self.layout();
        if !layout.is_expendable(device) {
            return refused("no valid replicas");
        }
        match layout.standing(device).map(|standing| standing.role) {
            Some(MemberRole::Successor(_)) => self.unseat(device),
            Some(MemberRole::SpareFor(_)) => self.give_back(device),
            _ => {
                let whole = layout.holders(device).find(|(at, standing)| *at != device && standing.has_all());
                let Some((other, _)) = whole else { return refused("no valid replicas") };
                self.promote(other)?;
                self.relabel()
            }
        }
    }

    /// Completes pairs: replacing devices with all data take over their numbers, and spares whose original is whole
    /// again become inactive.
    pub(super) fn settle_pairs(&self) -> Result<()> {
        loop {
            let layout = self.layout();
            let all = || layout.devices.iter().enumerate().map(|(at, standing)| (at as u16, standing));
            let whole = |at: u16| layout.standing(at).is_some_and(Standing::has_all);
            let successor = all().find(|(_, standing)| {
                matches!(standing.role, MemberRole::Successor(_)) && standing.status.belongs() && standing.has_all()
            });
            let idle = all().find(|(_, standing)| {
                matches!(standing.role, MemberRole::SpareFor(number) if standing.status.belongs() && whole(number))
            });
            match (successor, idle) {
                (Some((successor, _)), _) => self.promote(successor)?,
                (None, Some((spare, _))) => self.give_back(spare)?,
                (None, None) => return Ok(()),
            }
        }
    }

    /// Checks that a device is long enough to be paired with another.
    fn fits_beside(&self, number: u16, device: &dyn Device) -> Result<()> {
        let (needed, _) = self.rooms.lock().slots.of_device(usize::from(number));
        if u64::from(slots::count(device.length(), self.slot)) < needed {
            return refused(format!("{}: device is too small", device.name()));
        }
        Ok(())
    }

    /// Minimum length of a device that is paired with this one, bytes.
    fn length_of(&self, number: u16) -> u64 {
        self.identity.lock().members.get(usize::from(number)).map_or(u64::MAX, |member| member.length)
    }

    /// Adds a device under a number of its own, under which no segment is stored, and records it and the groups' new
    /// topology in the labels. The device's own label is written first, which makes it a device of the pool; after a
    /// crash before that the pool is unchanged.
    pub(super) fn seat(
        &self,
        device: Arc<dyn Device>,
        guid: u64,
        standing: Standing,
        shape: &dyn Fn(&mut Layout),
    ) -> Result<u16> {
        let mut identity = self.identity();
        let is_vacant = |member: &Member| member.guid == 0 && member.state.status == MemberStatus::Removed;
        let at = identity.members.iter().position(is_vacant).unwrap_or(identity.members.len());
        let number = u16::try_from(at).or_else(|_| refused("too many devices"))?;
        let state = MemberState {
            group: standing.group as u8,
            role: standing.role,
            status: standing.status,
            stale: standing.stale,
        };
        let member = Member { guid, length: device.length(), path: path_hint(&*device), state };
        let own = if member.is_own() { slots::count(member.length, self.slot) } else { 0 };
        match identity.members.get_mut(at) {
            Some(vacant) => *vacant = member,
            None => identity.members.push(member),
        }
        let change = |layout: &mut Layout| {
            shape(layout);
            match layout.devices.get_mut(at) {
                Some(vacant) => *vacant = standing,
                None => layout.devices.push(standing),
            }
        };
        let mut then = Layout::clone(&self.layout());
        change(&mut then);
        let told = Identity { index: number, revision: identity.revision + 1, ..identity.clone() };
        let told = Self::labelled_by(&then, told);
        // Validated before anything is written.
        told.check()?;
        if let Err(error) = label::write_first_identity(&*device, &told) {
            clear(&*device);
            return refused(error.to_string());
        }
        // The number may be that of a device that has left: its slots may still be being discarded.
        let turn = self.trim_turn.lock();
        let mut devices = Devices::clone(&self.devices.read());
        match devices.get_mut(at) {
            Some(vacant) => *vacant = device,
            None => devices.push(device),
        }
        *self.devices.write() = Arc::new(devices);
        self.paces.forget(number);
        {
            let mut rooms = self.rooms.lock();
            if rooms.slots.devices() <= at {
                rooms.slots.add_device(own);
            } else {
                rooms.slots.grow(at, own);
            }
        }
        drop(turn);
        self.unwiped.lock().insert(number);
        self.change(change);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        // The new device has no root records yet.
        self.guard_rings()?;
        Ok(number)
    }

    /// Removes a device under whose number no segment is stored: from the labels of the others first, then its own
    /// labels.
    pub(super) fn unseat(&self, number: u16) -> Result<()> {
        let at = usize::from(number);
        let mut identity = self.identity();
        if let Some(member) = identity.members.get_mut(at) {
            vacate(member);
        }
        let left = self.device(number)?;
        self.change(|layout| layout.vacate(number));
        self.set_device(number, Arc::new(Missing { name: left.name().to_owned(), length: 0 }))?;
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        clear(&*left);
        Ok(())
    }

    /// Makes an active spare inactive again.
    pub(super) fn give_back(&self, spare: u16) -> Result<()> {
        let number = self.layout().number_of(spare);
        self.change(|layout| {
            if let Some(standing) = layout.devices.get_mut(usize::from(spare)) {
                (standing.role, standing.stale, standing.group) = (MemberRole::Spare, false, 0);
            }
        });
        self.relabel()?;
        self.take_room(number);
        Ok(())
    }

    /// Gives an unpaired device all slots that its length allows.
    fn take_room(&self, number: u16) {
        if self.layout().holders(number).count() == 1 {
            let count = slots::count(self.length_of(number), self.slot);
            self.rooms.lock().slots.grow(usize::from(number), count);
            self.change(|_| {});
        }
    }

    /// Completes a replacement: the new device takes over the number, and the old one is no longer a device of the
    /// pool.
    fn promote(&self, device: u16) -> Result<()> {
        let layout = self.layout();
        let Some(number) = layout.standing(device).and_then(|standing| standing.role.beside()) else {
            return refused("it stands beside no other device");
        };
        let (new, old) = (self.device(device)?, self.device(number)?);
        let mut identity = self.identity();
        let taken = identity.members.get(usize::from(device)).cloned();
        if let (Some(place), Some(taken)) = (identity.members.get_mut(usize::from(number)), taken) {
            (place.guid, place.length, place.path) = (taken.guid, taken.length, taken.path);
        }
        if let Some(member) = identity.members.get_mut(usize::from(device)) {
            vacate(member);
        }
        let change = |layout: &mut Layout| {
            layout.vacate(device);
            if let Some(standing) = layout.devices.get_mut(usize::from(number)) {
                (standing.status, standing.stale, standing.absent) = (MemberStatus::Online, false, false);
            }
        };
        let mut then = Layout::clone(&layout);
        change(&mut then);
        // The device's own label gets the number first: where that write fails, the old device keeps it.
        let own = Identity { index: number, revision: identity.revision + 1, ..identity.clone() };
        if let Err(error) = label::write_identity(&*new, &Self::labelled_by(&then, own)) {
            return self.lose(device, &error);
        }
        // The device table changes before the layout: readers that see the new layout never find the old device. The
        // device stays reachable by its former number too, for readers with the old layout.
        self.set_device(number, new)?;
        self.change(change);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        // The labels record the larger size before anything is stored there.
        self.take_room(number);
        clear(&*old);
        Ok(())
    }
}

/// Clears the labels of a removed device. Where that write fails, the device still claims to be the pool's until it
/// succeeds; by its GUID the others know that it is not.
pub(super) fn clear(device: &dyn Device) {
    if device.is_missing() {
        return;
    }
    if let Err(error) = label::clear(device) {
        tracing::warn!(device = device.name(), %error, "a device that was taken out of the pool keeps its labels");
    }
}
