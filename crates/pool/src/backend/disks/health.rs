//! Devices of groups that fail, are taken offline, come back; and what the labels say of that.
//!
//! Callers: the backend of devices, where a write or a sync has failed; the store, for commands.
//!
//! Invariants:
//! - No device is given up without which something would be lost.
//! - Labels say that a device is stale before the first root that it lacks something of, and until
//!   everything on it was verified.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::Layout;
use super::{Again, Devices, Disks, Result, Rooms};
use crate::backend::Room;
use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};
use crate::label::{self, Identity, MemberRole, MemberState, MemberStatus};

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Its group; 0 in pools without.
    pub group: usize,
    /// What it is to the others.
    pub role: MemberRole,
    /// How it was left.
    pub status: MemberStatus,
    /// It may lack something, and is being made whole.
    pub stale: bool,
    /// It is not there.
    pub absent: bool,
}

impl DeviceHealth {
    /// Whether it is a device of its group: neither a spare nor one that stands beside another or is
    /// no part of the pool any more.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.role == MemberRole::Own && self.status.belongs()
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

impl Disks {
    /// How each device is.
    #[must_use]
    pub fn health(&self) -> Vec<DeviceHealth> {
        let of = |standing: &super::layout::Standing| DeviceHealth {
            group: standing.group,
            role: standing.role,
            status: standing.status,
            stale: standing.stale,
            absent: standing.absent,
        };
        self.layout().devices.iter().map(of).collect()
    }

    /// The groups, each with how many of its devices may be lost now.
    #[must_use]
    pub fn groups(&self) -> Vec<(label::Group, usize)> {
        let layout = self.layout();
        layout.groups.iter().enumerate().map(|(number, group)| (*group, layout.tolerance(number))).collect()
    }

    /// The devices that are there and may lack something.
    #[must_use]
    pub fn stale(&self) -> Vec<u16> {
        let layout = self.layout();
        let stale = layout.devices.iter().enumerate().filter(|(_, device)| device.works() && device.stale);
        stale.map(|(number, _)| number as u16).collect()
    }

    /// The numbers by which segments lie on these devices.
    #[must_use]
    pub fn numbers_of(&self, devices: &[u16]) -> Vec<u16> {
        let layout = self.layout();
        devices.iter().map(|device| layout.number_of(*device)).collect()
    }

    /// Whether what lies at a place could not be read any more without a device.
    #[must_use]
    pub fn depends_on(&self, place: &crate::label::Place, device: u16) -> bool {
        let layout = self.layout();
        let stays = |number: u16| match number == layout.number_of(device) {
            true => layout.holders(number).any(|(at, standing)| at != device && standing.has_all()),
            false => layout.is_whole(number),
        };
        let left = place.iter().filter(|slot| stays(slot.device)).count();
        place.iter().any(|slot| slot.device == layout.number_of(device)) && left < place.width()
    }

    /// All devices in their order, also those that are not there.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.read().to_vec()
    }

    /// Grows with each device that comes or goes.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Layout)) {
        let rooms = self.rooms.lock();
        let mut layout = self.layout.write();
        let mut new = Layout::clone(&layout);
        change(&mut new);
        new.measure(&rooms.slots, self.slot);
        *layout = Arc::new(new);
    }

    /// A device has failed to write: it is not used any more, if its group can do without.
    ///
    /// # Errors
    /// The failure, if not.
    pub(super) fn lose(&self, device: u16, error: &PoolError) -> Result<()> {
        {
            let mut layout = self.layout.write();
            if !layout.is_plain() && !layout.works(device) {
                return Ok(());
            }
            if layout.is_plain() || !(layout.is_expendable(device) || layout.is_log_device(device)) {
                return Err(error.clone());
            }
            let mut new = Layout::clone(&layout);
            if let Some(standing) = new.devices.get_mut(usize::from(device)) {
                let holds = standing.role != MemberRole::Spare;
                (standing.status, standing.stale) = (MemberStatus::Faulted, holds);
            }
            self.leave_log_devices(&new);
            *layout = Arc::new(new);
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        self.unlabelled.store(true, Ordering::Release);
        tracing::error!(%error, "a device is not used any more: its group does without it");
        if let Some(hears) = self.failure.get() {
            hears();
        }
        Ok(())
    }

    /// As [`Self::lose`], where a write has failed: if its group cannot do without the device, whoever
    /// decides on that may have it tried again. Answers whether it was made then.
    ///
    /// # Errors
    /// The failure, if not.
    pub(super) fn lose_or_write(&self, device: u16, error: &PoolError, again: Again<'_>) -> Result<bool> {
        let Err(error) = self.lose(device, error) else { return Ok(false) };
        if self.tell_needed(device, &error, Some(again)) { Ok(true) } else { Err(error) }
    }

    /// A device has failed that its group cannot do without; answers whether the write was made that
    /// has failed.
    pub(super) fn tell_needed(&self, device: u16, error: &PoolError, again: Option<Again<'_>>) -> bool {
        let name = self.device(device).map(|device| device.name().to_owned()).unwrap_or_default();
        self.needed_failure.get().is_some_and(|tell| tell(&name, error, again))
    }

    /// Has this be told of failures of devices that their groups cannot do without: the device's name,
    /// the failure, and, of a write, how it is tried again; it answers whether that was made.
    pub fn on_needed_failure(
        &self,
        hears: impl Fn(&str, &PoolError, Option<&dyn Fn() -> Result<()>>) -> bool + Send + Sync + 'static,
    ) {
        // As for failures of others.
        let _ = self.needed_failure.set(Box::new(hears));
    }

    /// Has this be told of each device that fails, while others may wait for whoever met the failure;
    /// only the first who asks for it is told.
    pub fn on_failure(&self, hears: impl Fn() + Send + Sync + 'static) {
        // Who comes later is nobody: a pool is imported once.
        let _ = self.failure.set(Box::new(hears));
    }

    /// Whether a device has everything.
    pub(super) fn whole_device(&self, layout: &Layout, device: u16) -> Result<()> {
        if layout.is_whole(device) { Ok(()) } else { self.gone(device) }
    }

    pub(super) fn gone(&self, device: u16) -> Result<()> {
        let device = self.device(device)?;
        Err(failed(&*device, "reading", rustix::io::Errno::NODEV.into()))
    }

    /// Whether a device is read and written.
    pub(super) fn usable_device(&self, layout: &Layout, device: u16) -> Result<()> {
        if layout.is_used(device) { Ok(()) } else { self.gone(device) }
    }

    /// What the labels should say.
    fn labelled(&self, identity: Identity) -> Identity {
        Self::labelled_by(&self.layout(), identity)
    }

    pub(super) fn labelled_by(layout: &Layout, mut identity: Identity) -> Identity {
        identity.groups.clone_from(&layout.groups);
        identity.change.clone_from(&layout.change);
        for (member, standing) in identity.members.iter_mut().zip(&layout.devices) {
            member.state = MemberState {
                group: standing.group as u8,
                role: standing.role,
                status: standing.status,
                stale: standing.stale,
            };
        }
        identity
    }

    /// What the labels say.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity.lock().clone()
    }

    /// Writes how the devices are, if the labels do not say it yet.
    pub(super) fn write_labels(&self) -> Result<()> {
        if self.unlabelled.load(Ordering::Acquire) {
            let identity = self.identity();
            self.write_identities(&identity)?;
        }
        Ok(())
    }

    /// Writes who the pool is to all devices that are used.
    pub(super) fn write_identities(&self, identity: &Identity) -> Result<()> {
        let devices = Arc::clone(&self.devices.read());
        let number = |index: usize| u16::try_from(index).or_else(|_| refused("too many devices"));
        if self.layout().is_plain() {
            for (index, device) in devices.iter().enumerate() {
                label::write_identity(&**device, &Identity { index: number(index)?, ..identity.clone() })?;
            }
            *self.identity.lock() = identity.clone();
            return Ok(());
        }
        let mut identity = identity.clone();
        // Each device that fails has to be told of to all others.
        loop {
            self.unlabelled.store(false, Ordering::Release);
            identity = self.labelled(identity);
            identity.revision = identity.revision.max(self.identity.lock().revision + 1);
            identity.check()?;
            *self.identity.lock() = identity.clone();
            let layout = self.layout();
            for (index, device) in devices.iter().enumerate() {
                let index = number(index)?;
                if !layout.works(index) {
                    continue;
                }
                let written = label::write_identity(&**device, &Identity { index, ..identity.clone() });
                let written = match self.unwiped.lock().contains(&index) {
                    // Roots of a state that it had for itself must not count as newest.
                    true => written.and_then(|()| label::clear_roots(&**device)),
                    false => written,
                };
                match written {
                    Ok(()) => drop(self.unwiped.lock().remove(&index)),
                    Err(error) => {
                        let again = || label::write_identity(&**device, &Identity { index, ..identity.clone() });
                        self.lose_or_write(index, &error, &again)?;
                    }
                }
            }
            if !self.unlabelled.load(Ordering::Acquire) {
                return Ok(());
            }
        }
    }

    /// Takes a device offline. One for the log that has no other beside it is only taken while the log
    /// is held ([`Self::hold_log`]), and nothing of what is in it is needed any more.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where something would be lost without it; those of writing labels.
    pub fn offline(&self, device: u16) -> Result<()> {
        let (mut done, held) = (false, self.logging.lock().held);
        self.change(|layout| {
            // Whoever is lost now counts: that is done under the same lock.
            let expendable = layout.is_expendable(device) || held && layout.is_log_device(device);
            if layout.is_plain() || !expendable {
                return;
            }
            if let Some(standing) = layout.devices.get_mut(usize::from(device)).filter(|device| device.status.belongs())
            {
                let holds = standing.role != MemberRole::Spare;
                (standing.status, standing.stale) = (MemberStatus::Offline, holds);
                done = true;
            }
        });
        if !done {
            return refused("no valid replicas");
        }
        self.leave_log_devices(&self.layout());
        self.relabel()
    }

    /// Has the labels say how the devices are now.
    pub(super) fn relabel(&self) -> Result<()> {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_labels()
    }

    /// A device is there again: it is written to from now on, and stale until everything on it was
    /// verified.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is another; [`PoolError::Device`]; those of writing
    /// labels.
    pub fn online(&self, number: u16, device: Arc<dyn Device>) -> Result<()> {
        let identity = self.identity();
        let listed = identity.members.get(usize::from(number));
        let found = label::probe(&*device)?;
        let own = found.as_ref().and_then(|found| found.members.get(usize::from(found.index)));
        let same = found.as_ref().is_some_and(|found| found.pool == self.pool);
        let belongs = listed.is_some_and(|listed| listed.state.status.belongs());
        if !same || !belongs || own.map(|own| own.guid) != listed.map(|listed| listed.guid) {
            return refused(format!("{}: not the device of the pool that is missing", device.name()));
        }
        if listed.is_some_and(|listed| device.length() / label::ENDS < listed.length / label::ENDS) {
            return Err(PoolError::Short {
                device: device.name().to_owned(),
                length: device.length(),
                wanted: listed.map_or(0, |listed| listed.length),
            });
        }
        self.put_in(number, device)
    }

    fn put_in(&self, number: u16, device: Arc<dyn Device>) -> Result<()> {
        let at = usize::from(number);
        let mut identity = self.identity();
        if let Some(member) = identity.members.get_mut(at) {
            member.path = super::members::path_hint(&*device);
        }
        self.set_device(number, device)?;
        self.unwiped.lock().insert(number);
        self.change(|layout| {
            if let Some(standing) = layout.devices.get_mut(at) {
                let holds = standing.role != MemberRole::Spare;
                (standing.status, standing.stale, standing.absent) = (MemberStatus::Online, holds, false);
            }
        });
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        // It has no root records.
        self.guard_rings().map(drop)
    }

    /// From now on this is the device of that number.
    pub(super) fn set_device(&self, number: u16, device: Arc<dyn Device>) -> Result<()> {
        let mut devices = Devices::clone(&self.devices.read());
        let there = devices.get_mut(usize::from(number));
        *there.ok_or(PoolError::Format(Damage::Structure("a device that the pool does not have")))? = device;
        *self.devices.write() = Arc::new(devices);
        self.paces.forget(number);
        self.balance.forget(number);
        Ok(())
    }

    /// Everything on these devices was verified since this number of changes: they are as good as the
    /// others. `false` where devices have come or gone since. Those that stood beside others take their
    /// places, and spares that are not needed any more are given back.
    ///
    /// # Errors
    /// Those of writing labels.
    pub fn make_whole(&self, devices: &[u16], changes: u64) -> Result<bool> {
        if devices.is_empty() {
            return Ok(self.changes() == changes);
        }
        let mut same = false;
        self.change(|layout| {
            // Whoever is lost now is not whole: that is done under the same lock.
            same = self.changes() == changes;
            if !same {
                return;
            }
            for device in devices {
                if let Some(standing) = layout.devices.get_mut(usize::from(*device)).filter(|device| device.works()) {
                    standing.stale = false;
                }
            }
        });
        if same {
            self.unlabelled.store(true, Ordering::Release);
            self.write_labels()?;
            self.settle_pairs()?;
            self.settled();
        }
        Ok(same)
    }

    /// The room in groups.
    pub(super) fn room_in(&self, layout: &Layout, rooms: &Rooms) -> Room {
        let (free, total) = layout.segments_of(layout.taking_groups(), &rooms.slots);
        let runs = self.log_runs();
        let log = |device: usize| {
            let here = runs.iter().filter(|(slot, _)| usize::from(slot.device) == device);
            here.map(|(_, count)| u64::from(*count)).sum()
        };
        let (size, free_size) = layout.usable_slots(&rooms.slots, self.slot, &log);
        // The log lies on some devices only: segments may be narrower there, but not fewer.
        let left = layout.segments_without(&rooms.slots, &log);
        let (width, reserved) = ((size / left.max(1)).max(1), total.saturating_sub(left));
        let of_data = |slot: &&crate::label::SlotAddress| !layout.is_special_device(slot.device);
        let held_back = rooms.trimming.iter().filter(of_data).count() as u64 / width.saturating_add(1);
        Room {
            total,
            reserved,
            free,
            held_back,
            size: size * self.slot,
            free_size: (free_size + held_back * width) * self.slot,
        }
    }

    /// Makes everything written so far durable on all devices that are used.
    pub(super) fn sync_used(&self) -> Result<()> {
        let devices = Arc::clone(&self.devices.read());
        let layout = self.layout();
        if layout.is_plain() {
            return super::roots::sync_all(&devices);
        }
        let holds = |number: &u16| {
            layout.standing(*number).is_some_and(|standing| standing.works() && standing.role != MemberRole::Spare)
        };
        let used: Vec<_> = devices.iter().cloned().zip(0..).filter(|(_, number)| holds(number)).collect();
        self.sync_each(&used).map(drop)
    }
}
