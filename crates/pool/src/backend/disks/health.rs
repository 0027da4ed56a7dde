//! Devices of groups that fail, are taken offline, come back, are replaced; and what the labels say
//! of that.
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
use super::{Devices, Disks, Result, Rooms, slots};
use crate::backend::Room;
use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};
use crate::label::{self, Identity, MemberState, MemberStatus};

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Its group; 0 in pools without.
    pub group: usize,
    /// How it was left.
    pub status: MemberStatus,
    /// It may lack something, and is being made whole.
    pub stale: bool,
    /// It is not there.
    pub absent: bool,
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
            status: standing.status,
            stale: standing.stale,
            absent: standing.absent,
        };
        self.layout().devices.iter().map(of).collect()
    }

    /// The groups, each with how many of its devices may be lost.
    #[must_use]
    pub fn groups(&self) -> Vec<(label::Group, usize)> {
        let layout = self.layout();
        layout.groups.iter().enumerate().map(|(number, group)| (*group, layout.parity(number))).collect()
    }

    /// The devices that are there and may lack something.
    #[must_use]
    pub fn stale(&self) -> Vec<u16> {
        let layout = self.layout();
        let stale = layout.devices.iter().enumerate().filter(|(_, device)| device.is_used() && device.stale);
        stale.map(|(number, _)| number as u16).collect()
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

    fn change(&self, change: impl FnOnce(&mut Layout)) {
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
            if !layout.is_plain() && !layout.is_used(device) {
                return Ok(());
            }
            if layout.is_plain() || !layout.is_spare(device) {
                return Err(error.clone());
            }
            let mut new = Layout::clone(&layout);
            if let Some(standing) = new.devices.get_mut(usize::from(device)) {
                (standing.status, standing.stale) = (MemberStatus::Faulted, true);
            }
            *layout = Arc::new(new);
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        self.unlabelled.store(true, Ordering::Release);
        tracing::error!(%error, "a device is not used any more: its group does without it");
        Ok(())
    }

    /// Whether a device has everything.
    pub(super) fn whole_device(&self, layout: &Layout, device: u16) -> Result<()> {
        if layout.is_whole(device) { Ok(()) } else { self.gone(device) }
    }

    fn gone(&self, device: u16) -> Result<()> {
        let device = self.device(device)?;
        Err(failed(&*device, "reading", rustix::io::Errno::NODEV.into()))
    }

    /// Whether a device is read and written.
    pub(super) fn usable_device(&self, layout: &Layout, device: u16) -> Result<()> {
        if layout.is_used(device) { Ok(()) } else { self.gone(device) }
    }

    /// What the labels should say.
    fn labelled(&self, mut identity: Identity) -> Identity {
        let layout = self.layout();
        for (member, standing) in identity.members.iter_mut().zip(&layout.devices) {
            member.state = MemberState { group: standing.group as u8, status: standing.status, stale: standing.stale };
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
                if !layout.is_used(index) {
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
                    Err(error) => self.lose(index, &error)?,
                }
            }
            if !self.unlabelled.load(Ordering::Acquire) {
                return Ok(());
            }
        }
    }

    /// Takes a device offline.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where something would be lost without it; those of writing labels.
    pub fn offline(&self, device: u16) -> Result<()> {
        let layout = self.layout();
        if layout.is_plain() || !layout.is_spare(device) {
            return refused("no valid replicas");
        }
        self.change(|layout| {
            if let Some(standing) = layout.devices.get_mut(usize::from(device)) {
                (standing.status, standing.stale) = (MemberStatus::Offline, true);
            }
        });
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
        let same = found.as_ref().is_some_and(|found| found.pool == self.pool && found.index == number);
        if !same || own.map(|own| own.guid) != listed.map(|listed| listed.guid) {
            return refused(format!("{}: not the device of the pool that is missing", device.name()));
        }
        if listed.is_some_and(|listed| device.length() / label::ENDS < listed.length / label::ENDS) {
            return Err(PoolError::Short {
                device: device.name().to_owned(),
                length: device.length(),
                wanted: listed.map_or(0, |listed| listed.length),
            });
        }
        self.put_in(number, device, |_| {})
    }

    /// Another device takes the place of one, which is not the pool's any more: it is stale until
    /// everything was written to it.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short, or where something would be lost;
    /// [`PoolError::Device`]; those of writing labels.
    pub fn replace(&self, number: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        if self.layout().is_plain() || !self.layout().is_spare(number) {
            return refused("no valid replicas");
        }
        let (needed, _) = self.rooms.lock().slots.of_device(usize::from(number));
        let count = slots::count(device.length(), self.slot);
        if u64::from(count) < needed {
            return refused(format!("{}: device is too small", device.name()));
        }
        let length = device.length();
        self.put_in(number, device, |identity| {
            if let Some(member) = identity.members.get_mut(usize::from(number)) {
                (member.guid, member.length) = (guid, length);
            }
        })?;
        self.rooms.lock().slots.grow(usize::from(number), count);
        self.change(|_| {});
        Ok(())
    }

    fn put_in(&self, number: u16, device: Arc<dyn Device>, change: impl FnOnce(&mut Identity)) -> Result<()> {
        let at = usize::from(number);
        let mut identity = self.identity();
        change(&mut identity);
        if let Some(member) = identity.members.get_mut(at) {
            member.path = super::members::path_hint(&*device);
        }
        {
            let mut devices = Devices::clone(&self.devices.read());
            let there = devices.get_mut(at);
            *there.ok_or(PoolError::Format(Damage::Structure("a device that the pool does not have")))? = device;
            *self.devices.write() = Arc::new(devices);
        }
        self.unwiped.lock().insert(number);
        self.change(|layout| {
            if let Some(standing) = layout.devices.get_mut(at) {
                (standing.status, standing.stale, standing.absent) = (MemberStatus::Online, true, false);
            }
        });
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&identity)?;
        // It has no root records.
        self.guard_rings().map(drop)
    }

    /// Everything on these devices was verified since this number of changes: they are as good as the
    /// others. `false` where devices have come or gone since.
    ///
    /// # Errors
    /// Those of writing labels.
    pub fn make_whole(&self, devices: &[u16], changes: u64) -> Result<bool> {
        let mut same = false;
        self.change(|layout| {
            // Whoever is lost now is not whole: that is done under the same lock.
            same = self.changes() == changes;
            if !same {
                return;
            }
            for device in devices {
                if let Some(standing) = layout.devices.get_mut(usize::from(*device)).filter(|device| device.is_used()) {
                    standing.stale = false;
                }
            }
        });
        if same {
            self.unlabelled.store(true, Ordering::Release);
            self.write_labels()?;
        }
        Ok(same)
    }

    /// Segments that can be begun, and all that there is room for.
    pub(super) fn segments_in(&self, layout: &Layout, slots: &slots::Slots) -> (u64, u64) {
        let each = (0..layout.groups.len()).map(|group| layout.segments(slots, group));
        each.fold((0, 0), |(free, all), (more_free, more)| (free + more_free, all + more))
    }

    /// The room in groups.
    pub(super) fn room_in(&self, layout: &Layout, rooms: &Rooms) -> Room {
        let (free, total) = self.segments_in(layout, &rooms.slots);
        let log = |device: usize| {
            let runs = self.log.get().into_iter().flatten();
            runs.filter(|(slot, _)| usize::from(slot.device) == device).map(|(_, count)| u64::from(*count)).sum()
        };
        let (size, free_size) = layout.usable_slots(&rooms.slots, self.slot, &log);
        // The log lies on some devices only: segments may be narrower there, but not fewer.
        let left = layout.segments_without(&rooms.slots, &log);
        let (width, reserved) = ((size / left.max(1)).max(1), total.saturating_sub(left));
        let held_back = rooms.trimming.len() as u64 / width.saturating_add(1);
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
        let used: Vec<_> = devices.iter().cloned().zip(0..).filter(|(_, number)| layout.is_used(*number)).collect();
        self.sync_each(&used).map(drop)
    }
}
