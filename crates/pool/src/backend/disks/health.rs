//! Health of the devices: failures, offline and online, and their record in the labels.
//!
//! Callers: the backend of devices, where a write or a sync has failed; the store, for commands.
//!
//! Invariants:
//! - No device is given up if data would be lost with it.
//! - The labels record that a device is stale before the first root that it lacks data of, and until
//!   everything on it was verified.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::Layout;
use super::members::was_used_apart;
use super::{Again, Devices, Disks, Result, Rooms};
use crate::backend::Room;
use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};
use crate::label::{self, Identity, MemberRole, MemberState, MemberStatus};

/// Health of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceHealth {
    /// The device's group; 0 in pools without groups.
    pub group: usize,
    /// The device's role: a device of its group, a replacing device or a spare.
    pub role: MemberRole,
    /// The device's status as the labels record it.
    pub status: MemberStatus,
    /// Whether the device may lack data, and is to be resilvered.
    pub stale: bool,
    /// Whether the device is missing.
    pub absent: bool,
}

impl DeviceHealth {
    /// Whether it is a device of its group: not a spare, not a replacing device and not removed.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.role == MemberRole::Own && self.status.belongs()
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

impl Disks {
    /// Health of each device.
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

    /// The groups, each with the number of devices that it can lose now.
    #[must_use]
    pub fn groups(&self) -> Vec<(label::Group, usize)> {
        let layout = self.layout();
        layout.groups.iter().enumerate().map(|(number, group)| (*group, layout.tolerance(number))).collect()
    }

    /// The present devices that may lack data.
    #[must_use]
    pub fn stale(&self) -> Vec<u16> {
        let layout = self.layout();
        let stale = layout.devices.iter().enumerate().filter(|(_, device)| device.works() && device.stale);
        stale.map(|(number, _)| number as u16).collect()
    }

    /// The numbers by which locations name these devices.
    #[must_use]
    pub fn numbers_of(&self, devices: &[u16]) -> Vec<u16> {
        let layout = self.layout();
        devices.iter().map(|device| layout.number_of(*device)).collect()
    }

    /// Whether a location would become unreadable without a device.
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

    /// All devices by number, including missing ones.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.read().to_vec()
    }

    /// Counter that grows with each device that is added, removed or changes its state.
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

    /// Drops a device after a failed write, if its group has enough redundancy.
    ///
    /// # Errors
    /// The failure, if the group cannot lose the device.
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

    /// Drops a device as [`Self::lose`] after a failed write; if its group cannot lose it, the callback may retry the
    /// write ([`Self::on_needed_failure`]). Returns whether a retry succeeded.
    ///
    /// # Errors
    /// The failure, if neither was possible.
    pub(super) fn lose_or_write(&self, device: u16, error: &PoolError, again: Again<'_>) -> Result<bool> {
        let Err(error) = self.lose(device, error) else { return Ok(false) };
        if self.tell_needed(device, &error, Some(again)) { Ok(true) } else { Err(error) }
    }

    /// Notifies the callback of a failed device that its group cannot lose; returns whether a retry of the write
    /// succeeded.
    pub(super) fn tell_needed(&self, device: u16, error: &PoolError, again: Option<Again<'_>>) -> bool {
        let name = self.device(device).map(|device| device.name().to_owned()).unwrap_or_default();
        self.needed_failure.get().is_some_and(|tell| tell(&name, error, again))
    }

    /// Registers the callback for failed devices that their groups cannot lose. It gets the device's name, the error,
    /// and for a write, a function that retries it; it returns whether the retry succeeded.
    pub fn on_needed_failure(
        &self,
        hears: impl Fn(&str, &PoolError, Option<&dyn Fn() -> Result<()>>) -> bool + Send + Sync + 'static,
    ) {
        // A second registration is ignored, as in `on_failure`.
        let _ = self.needed_failure.set(Box::new(hears));
    }

    /// Registers the callback for failed devices; threads may wait for it, so it must be quick. Only the first
    /// registration counts.
    pub fn on_failure(&self, hears: impl Fn() + Send + Sync + 'static) {
        // A second registration does not happen: a pool is imported once.
        let _ = self.failure.set(Box::new(hears));
    }

    /// Fails with ENODEV unless a device, or another one of its pair, has all its data.
    pub(super) fn whole_device(&self, layout: &Layout, device: u16) -> Result<()> {
        if layout.is_whole(device) { Ok(()) } else { self.gone(device) }
    }

    pub(super) fn gone(&self, device: u16) -> Result<()> {
        let device = self.device(device)?;
        Err(failed(&*device, "reading", rustix::io::Errno::NODEV.into()))
    }

    /// Fails with ENODEV unless a device, or another one of its pair, is usable.
    pub(super) fn usable_device(&self, layout: &Layout, device: u16) -> Result<()> {
        if layout.is_used(device) { Ok(()) } else { self.gone(device) }
    }

    /// The identity with the current device states, as the labels should record it.
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

    /// The identity as the labels record it.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity.lock().clone()
    }

    /// Writes the labels if they do not record the current device states.
    pub(super) fn write_labels(&self) -> Result<()> {
        if self.unlabelled.load(Ordering::Acquire) {
            let identity = self.identity();
            self.write_identities(&identity)?;
        }
        Ok(())
    }

    /// Writes the identity to all usable devices.
    pub(super) fn write_identities(&self, identity: &Identity) -> Result<()> {
        let devices = Arc::clone(&self.devices.read());
        let number = |index: usize| u16::try_from(index).or_else(|_| refused("too many devices"));
        if self.layout().is_plain() {
            for (index, device) in devices.iter().enumerate() {
                label::write_identity(&**device, &Identity { index: number(index)?, ..identity.clone() })?;
            }
            *self.identity.lock() = identity.clone();
            return devices.iter().try_for_each(|device| self.mend_erasable(&**device).map(drop));
        }
        let mut identity = identity.clone();
        // Each further device that fails meanwhile has to be recorded on all others.
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
                // A returning device gets the newest erasable keys before its label counts it again.
                let write = || {
                    self.mend_erasable(&**device)?;
                    label::write_identity(&**device, &Identity { index, ..identity.clone() })
                };
                let written = write();
                let written = match self.unwiped.lock().contains(&index) {
                    // Roots of an earlier, separate state of this device must not count as the newest.
                    true => written.and_then(|()| label::clear_roots(&**device)),
                    false => written,
                };
                match written {
                    Ok(()) => drop(self.unwiped.lock().remove(&index)),
                    Err(error) => {
                        self.lose_or_write(index, &error, &write)?;
                    }
                }
            }
            if !self.unlabelled.load(Ordering::Acquire) {
                return Ok(());
            }
        }
    }

    /// Takes a device offline. The last dedicated log device is only taken while the log is suspended
    /// ([`Self::hold_log`]) and none of its entries is needed any more.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where data would be lost without it; errors of writing labels.
    pub fn offline(&self, device: u16) -> Result<()> {
        let (mut done, held) = (false, self.logging.lock().held);
        self.change(|layout| {
            // Under the lock, since a device may fail meanwhile.
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

    /// Writes the current device states to the labels.
    pub(super) fn relabel(&self) -> Result<()> {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_labels()
    }

    /// Brings a device back: it is written from now on, and is stale until everything on it was verified.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a different device; [`PoolError::Device`]; errors of writing labels.
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
        if found.is_some_and(|found| was_used_apart(&found, &identity)) {
            return refused(format!(
                "{}: it was used without the pool, and has what the pool lacks: 'labelclear -f' gives that up, and \
                 'replace' fills it again",
                device.name()
            ));
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
        // The device has no current root records yet.
        self.guard_rings().map(drop)
    }

    /// Replaces the device of a number in the device table.
    pub(super) fn set_device(&self, number: u16, device: Arc<dyn Device>) -> Result<()> {
        let mut devices = Devices::clone(&self.devices.read());
        let there = devices.get_mut(usize::from(number));
        *there.ok_or(PoolError::Format(Damage::Structure("a device that the pool does not have")))? = device;
        *self.devices.write() = Arc::new(devices);
        self.paces.forget(number);
        self.balance.forget(number);
        Ok(())
    }

    /// Ends a resilver: marks these devices as complete after everything on them was verified, if the change counter
    /// is still `changes`; returns `false` where devices have changed since. Replacing devices take over their
    /// numbers, and spares that are no longer needed become inactive.
    ///
    /// # Errors
    /// Errors of writing labels.
    pub fn make_whole(&self, devices: &[u16], changes: u64) -> Result<bool> {
        if devices.is_empty() {
            return Ok(self.changes() == changes);
        }
        let mut same = false;
        self.change(|layout| {
            // Under the lock, since a device may fail meanwhile.
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

    /// Space of a pool with groups.
    pub(super) fn room_in(&self, layout: &Layout, rooms: &Rooms) -> Room {
        let (free, total) = layout.segments_of(layout.taking_groups(), &rooms.slots);
        let runs = self.log_runs();
        let log = |device: usize| {
            let here = runs.iter().filter(|(slot, _)| usize::from(slot.device) == device);
            here.map(|(_, count)| u64::from(*count)).sum()
        };
        let (size, free_size) = layout.usable_slots(&rooms.slots, self.slot, &log);
        // The log is on some devices only: segments may be narrower there, but not fewer.
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

    /// Syncs all devices that are used: everything written so far is durable.
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
