//! Devices that stand beside others: one that is to replace another, and spares. Both hold the same
//! in the same slots as the device whose number they stand by, which goes on being read and written
//! as long as it works. Nothing that was written names them: a place names that number.
//!
//! Callers: the store, for commands and when devices were made whole.
//!
//! Invariants:
//! - A device leaves its place only when another one there has everything, and the labels have said
//!   so before.
//! - Whoever takes a number has it in its own label before the labels of others give it to it.

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
    /// Has another device take the place of one, once it has everything that this should have.
    /// Until then it stands beside it, and both are written; if the old one works, nothing is
    /// lacking meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short, or where the other is no device of a group,
    /// or is being replaced already; [`PoolError::Device`]; those of writing labels.
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

    /// Has a device as a spare from now on.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short to stand in for any; [`PoolError::Device`];
    /// those of writing labels.
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

    /// Has spares stand in for devices that have failed or are not there, the shortest that fits
    /// first. Answers for whom: then a resilver has to follow.
    ///
    /// # Errors
    /// Those of writing labels.
    pub fn engage_spares(&self) -> Result<Vec<(u16, u16)>> {
        let mut engaged = Vec::new();
        self.change(|layout| {
            let needs = |standing: &Standing| {
                standing.status == MemberStatus::Faulted || standing.status == MemberStatus::Online && standing.absent
            };
            // The log is in the pool itself as long as none of its devices works: no spare is lost to it.
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

    /// Takes a spare that nobody needs out of the pool.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for any other device; those of writing labels.
    pub fn remove_spare(&self, number: u16) -> Result<()> {
        let is_spare = |standing: &Standing| standing.status.belongs() && standing.role == MemberRole::Spare;
        if !self.layout().standing(number).is_some_and(is_spare) {
            return refused("only inactive hot spares, cache, top-level, or log devices can be removed");
        }
        self.unseat(number)
    }

    /// Takes a device out of a pair: the one that was to replace the other, a spare, or the one that
    /// was to be replaced, if the other has everything.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where something would be lost; those of writing labels.
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

    /// Those that were to replace others and have everything take their places; spares that are not
    /// needed any more are given back.
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

    /// Whether a device is long enough to stand beside another.
    fn fits_beside(&self, number: u16, device: &dyn Device) -> Result<()> {
        let (needed, _) = self.rooms.lock().slots.of_device(usize::from(number));
        if u64::from(slots::count(device.length(), self.slot)) < needed {
            return refused(format!("{}: device is too small", device.name()));
        }
        Ok(())
    }

    /// The least length of a device that stands beside this one, bytes.
    fn length_of(&self, number: u16) -> u64 {
        self.identity.lock().members.get(usize::from(number)).map_or(u64::MAX, |member| member.length)
    }

    /// Gives a device a number of its own, under which nothing lies, and has the labels say what it
    /// is, and what has become of the groups with it. Its own label comes first: with that, it is a
    /// device of the pool; a crash before that leaves a pool that has never heard of it.
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
        // Refused before anything is done.
        told.check()?;
        if let Err(error) = label::write_first_identity(&*device, &told) {
            clear(&*device);
            return refused(error.to_string());
        }
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
        self.unwiped.lock().insert(number);
        self.change(change);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        // It has no root records.
        self.guard_rings()?;
        Ok(number)
    }

    /// Takes a device out of the pool by whose number nothing lies: the others' labels do not know it
    /// any more, and it has none.
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

    /// A spare stands in for nobody any more.
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

    /// A device that is alone at its number has all slots that it is long enough for.
    fn take_room(&self, number: u16) {
        if self.layout().holders(number).count() == 1 {
            let count = slots::count(self.length_of(number), self.slot);
            self.rooms.lock().slots.grow(usize::from(number), count);
            self.change(|_| {});
        }
    }

    /// A device that stands beside another takes its place; what stood there is no device of the pool
    /// any more.
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
        // It has the number in its own label first: where that fails, the other still has it.
        let own = Identity { index: number, revision: identity.revision + 1, ..identity.clone() };
        if let Err(error) = label::write_identity(&*new, &Self::labelled_by(&then, own)) {
            return self.lose(device, &error);
        }
        // The devices before what is said of them: nobody who believes the latter finds the old one.
        // It can be found by its former number as well, for those who go by what was said before.
        self.set_device(number, new)?;
        self.change(change);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        // The labels tell of the room before anything lies there.
        self.take_room(number);
        clear(&*old);
        Ok(())
    }
}

/// A device that was left belongs to no pool. One that cannot be written says so until it is: by its
/// number the others know that it is none of them.
pub(super) fn clear(device: &dyn Device) {
    if device.is_missing() {
        return;
    }
    if let Err(error) = label::clear(device) {
        tracing::warn!(device = device.name(), %error, "a device that was taken out of the pool keeps its labels");
    }
}
