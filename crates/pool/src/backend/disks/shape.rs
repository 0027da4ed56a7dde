//! Topology changes that take effect at once: attaching a device to a mirror, detaching one, adding groups.
//!
//! Caller: the store, which moves or copies the segments afterwards.
//!
//! Invariants:
//! - Devices of a new group have labels before the labels of other devices count on them: a crash
//!   before that leaves the pool without the group.
//! - An attached device is stale until it has a copy of everything.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::beside::clear;
use super::layout::{Layout, Standing};
use super::members::{Missing, NewGroup, path_hint};
use super::{Devices, Disks, Result, slots};
use crate::device::Device;
use crate::error::PoolError;
use crate::label::{self, Group, GroupClass, GroupKind, Identity, Member, MemberRole, MemberState, MemberStatus};
use crate::segment::stream::PIECE;
use crate::segment::table::LONGEST;

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

impl Disks {
    /// Converts a pool without groups into one with a single group of independent devices; the next label write
    /// records it.
    pub(super) fn form_groups(&self) {
        if !self.layout().is_plain() {
            return;
        }
        self.set_redundant();
        {
            let mut identity = self.identity.lock();
            identity.incompatible |= Identity::GROUPS | Identity::REDUNDANT_METADATA;
            identity.groups.push(Group::new(GroupKind::Plain));
        }
        self.change(|layout| layout.groups.push(Group::new(GroupKind::Plain)));
        self.unlabelled.store(true, Ordering::Release);
    }

    /// Attaches a device to the mirror of another device; a device without redundancy becomes a mirror with it.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is too short, and for devices of other kinds of groups;
    /// [`PoolError::Device`]; errors of writing labels.
    pub fn attach(&self, beside: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        let layout = self.layout();
        let Some(group) = layout.standing(beside).filter(|own| own.is_own()).map(|own| own.group) else {
            return refused("can only attach to mirrors and top-level disks");
        };
        let kind = layout.groups.get(group).map_or(GroupKind::Plain, |group| group.kind);
        if !matches!(kind, GroupKind::Mirror | GroupKind::Plain) {
            return refused("can only attach to mirrors and top-level disks");
        }
        if layout.is_changing(group) {
            return refused("its group is changing its shape: wait for the end of that");
        }
        let mirrored = |at: usize| kind == GroupKind::Mirror || at == usize::from(beside);
        let lengths = |at: usize| self.rooms.lock().slots.of_device(at).0;
        let needed = layout.members(group).filter(|(at, _)| mirrored(*at)).map(|(at, _)| lengths(at)).min();
        if u64::from(slots::count(device.length(), self.slot)) < needed.unwrap_or(0) {
            return refused(format!("{}: device is too small", device.name()));
        }
        if layout.members(group).count() >= label::MOST_COLUMNS || layout.groups.len() >= usize::from(u8::MAX) {
            return refused("too many devices in a group, or too many groups");
        }
        let alone = layout.members(group).count() == 1;
        self.form_groups();
        let own = if kind == GroupKind::Plain && !alone { self.layout().groups.len() } else { group };
        let standing =
            Standing { group: own, role: MemberRole::Own, status: MemberStatus::Online, stale: true, absent: false };
        let mirror = |layout: &mut Layout| match kind {
            GroupKind::Plain if alone => layout.set_kind(group, GroupKind::Mirror),
            GroupKind::Plain => {
                let class = layout.groups.get(group).map(|group| group.class).unwrap_or_default();
                layout.groups.push(Group { class, ..Group::new(GroupKind::Mirror) });
                layout.move_to(beside, own);
            }
            _ => {}
        };
        self.seat(device, guid, standing, &mirror).map(drop)
    }

    /// Checks whether a device can be detached at all, regardless of whether data would be lost.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if not.
    pub fn is_detachable(&self, device: u16) -> Result<()> {
        let layout = self.layout();
        let detachable = layout.standing(device).filter(|standing| standing.status.belongs()).is_some_and(|standing| {
            let paired = standing.role.beside().is_some() || layout.holders(device).count() > 1;
            let kind = layout.groups.get(standing.group).map(|group| group.kind);
            let mirrored = kind == Some(GroupKind::Mirror) && layout.members(standing.group).count() > 1;
            paired || standing.is_own() && mirrored
        });
        if detachable { Ok(()) } else { refused("only applicable to mirror and replacing vdevs") }
    }

    /// Detaches a device from its mirror, or from its replacing or spare pair.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for other devices, and where data would be lost; [`PoolError::Device`]; errors of
    /// writing labels.
    pub fn detach(&self, device: u16) -> Result<()> {
        self.is_detachable(device)?;
        let layout = self.layout();
        let group = layout.standing(device).map_or(0, |standing| standing.group);
        if layout.number_of(device) != device || layout.holders(device).count() > 1 {
            return self.detach_of_pair(device);
        }
        if layout.is_changing(group) {
            return refused("its group is changing its shape: wait for the end of that");
        }
        let runs = self.log_runs();
        let has_log = |number: u16| runs.iter().any(|(first, _)| first.device == number);
        if has_log(device) && !runs.iter().any(|(first, _)| first.device != device && layout.is_whole(first.device)) {
            return refused("no valid replicas");
        }
        let mut done = false;
        self.change(|layout| {
            // Under the lock, since a device may fail meanwhile.
            let others = layout.members(group).any(|(at, _)| at != usize::from(device) && layout.is_whole(at as u16));
            if !others {
                return;
            }
            if let Some(standing) = layout.devices.get_mut(usize::from(device)) {
                (standing.status, standing.stale) = (MemberStatus::Removed, false);
            }
            if layout.members(group).count() == 1 {
                layout.set_kind(group, GroupKind::Plain);
            }
            done = true;
        });
        if !done {
            return refused("no valid replicas");
        }
        let left = self.device(device)?;
        self.relabel()?;
        self.set_device(device, Arc::new(Missing { name: left.name().to_owned(), length: 0 }))?;
        self.guard_rings()?;
        clear(&*left);
        Ok(())
    }

    /// Adds groups of these devices in their order, to the data, special or log class.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are too short, and for invalid groups; [`PoolError::Device`] for a
    /// device that cannot be written, and then nothing has changed; errors of writing labels.
    pub fn add_groups(
        &self,
        devices: &[Arc<dyn Device>],
        guids: &[u64],
        groups: &[NewGroup],
        class: GroupClass,
    ) -> Result<()> {
        let layout = self.layout();
        let all: usize = groups.iter().map(|group| group.devices).sum();
        if all != devices.len() || all != guids.len() || layout.groups.len() + groups.len() > usize::from(u8::MAX) {
            return refused("devices that are in no group, or too many groups");
        }
        if groups.iter().any(|group| group.devices > label::MOST_COLUMNS || group.devices <= group.parity()) {
            return refused("a group of too few or too many devices");
        }
        let is_log = class == GroupClass::Log;
        if class != GroupClass::Data && groups.iter().any(|group| matches!(group.kind, GroupKind::RaidZ(_))) {
            return refused("devices for the log or for metadata are mirrors, or each for itself");
        }
        let slots = if is_log { u64::from(self.log_slots()) } else { 1 };
        let least = super::MINIMUM_DEVICE.max(self.slot * slots + 2 * label::ENDS);
        if let Some(short) = devices.iter().find(|device| device.length() < least) {
            return refused(format!("{}: too small for this pool: {} bytes", short.name(), short.length()));
        }
        let most = (u64::from(LONGEST) / self.slot).min(PIECE as u64 >> label::UNIT) as usize;
        if let Some(wide) = groups.iter().find(|group| group.width() > most) {
            return refused(format!(
                "rows of this pool lie across {most} devices and parity at most, not {}: its slots have {} MiB",
                wide.width(),
                self.slot >> 20
            ));
        }
        self.form_groups();
        let (layout, first) = (self.layout(), self.identity().members.len());
        let mut given = devices.iter().zip(guids);
        let (mut joining, mut standings) = (self.identity(), Vec::new());
        if class == GroupClass::Special {
            joining.incompatible |= Identity::CLASSES;
        }
        for (number, group) in (layout.groups.len()..).zip(groups) {
            for (device, guid) in given.by_ref().take(group.devices) {
                let standing = Standing {
                    group: number,
                    role: MemberRole::Own,
                    status: MemberStatus::Joining,
                    stale: false,
                    absent: false,
                };
                let state = MemberState { group: number as u8, status: standing.status, ..MemberState::default() };
                joining.members.push(Member {
                    guid: *guid,
                    length: device.length(),
                    path: path_hint(&**device),
                    state,
                });
                standings.push(standing);
            }
        }
        let new = |group: &NewGroup| Group { class, ..Group::new(group.kind) };
        joining.groups.extend(groups.iter().map(new));
        joining.revision += 1;
        // Validated before anything is written.
        joining.check()?;
        if joining.members.len() > usize::from(u16::MAX) {
            return refused("too many devices");
        }
        self.enlist(devices, first, &joining)?;
        self.change(|layout| {
            layout.groups.extend(groups.iter().map(new));
            let joined = standings.into_iter().map(|standing| Standing { status: MemberStatus::Online, ..standing });
            layout.devices.extend(joined);
        });
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.write_identities(&joining)
    }

    /// Writes the labels of joining devices, which get the numbers from `first` on, and adds them to the device
    /// table. These labels do not count until the labels of the other devices name the new ones, and by then all new
    /// devices have theirs.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that cannot be written, and then none keeps a label.
    pub(super) fn enlist(&self, devices: &[Arc<dyn Device>], first: usize, joining: &Identity) -> Result<()> {
        for (device, index) in devices.iter().zip(first..) {
            let own = Identity { index: index as u16, ..joining.clone() };
            if let Err(error) = label::write_first_identity(&**device, &own) {
                devices.iter().for_each(|device| clear(&**device));
                return refused(error.to_string());
            }
        }
        let mut all = Devices::clone(&self.devices.read());
        all.extend(devices.iter().cloned());
        *self.devices.write() = Arc::new(all);
        let mut rooms = self.rooms.lock();
        devices.iter().for_each(|device| rooms.slots.add_device(slots::count(device.length(), self.slot)));
        Ok(())
    }

    /// Removes a group of dedicated log devices. The log is suspended meanwhile ([`Self::hold_log`]), and none of its
    /// entries is needed any more.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device of another group; errors of writing labels.
    pub fn remove_log(&self, device: u16) -> Result<()> {
        let layout = self.layout();
        let Some(own) = layout.standing(device).filter(|own| own.is_own() && layout.is_log(own.group)) else {
            return refused("only inactive hot spares, cache, top-level, or log devices can be removed");
        };
        let members = layout.members(own.group).flat_map(|(at, _)| layout.holders(at as u16));
        let numbers: Vec<u16> = members.map(|(at, _)| at).collect();
        let left = numbers.iter().map(|number| self.device(*number)).collect::<Result<Devices>>()?;
        self.change(|layout| {
            for number in &numbers {
                if let Some(standing) = layout.devices.get_mut(usize::from(*number)) {
                    (standing.status, standing.stale) = (MemberStatus::Removed, false);
                }
            }
        });
        self.relabel()?;
        for (number, device) in numbers.iter().zip(left) {
            self.set_device(*number, Arc::new(Missing { name: device.name().to_owned(), length: 0 }))?;
            clear(&*device);
        }
        Ok(())
    }

    /// Whether a device is a dedicated log device.
    #[must_use]
    pub fn is_log_device(&self, device: u16) -> bool {
        self.layout().is_log_device(device)
    }

    /// Notes that the newest root matches the layout on the devices: frees dropped log copies, and switches to
    /// dedicated log devices.
    pub fn settled(&self) {
        self.free_unlogged();
        self.use_log_devices(&self.layout());
    }
}
