//! Devices and groups of a pool that is in use: others take the places of devices, mirrors get more or
//! fewer, groups and spares are added.
//!
//! Caller: commands. What is done here is durable when it returns; that segments follow is the work
//! of a resilver ([`Store::resilver`]). Invariant: commits wait meanwhile, so that no root names what
//! lies on a device before the labels know that.

use std::sync::Arc;

use super::{Result, Store};
use crate::backend::{Disks, NewGroup};
use crate::device::Device;
use crate::error::PoolError;
use crate::label::{GroupClass, Place};

impl Store {
    /// Makes a device one more copy of the mirror that the device `beside` is in; a device that is for
    /// itself is a mirror of two from then on. A resilver has to follow. `guid` is a random number. A
    /// pool without groups becomes one with groups, which older programs do not import.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short, or beside a device of rows; those of writing
    /// labels.
    pub fn attach(&self, beside: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        self.change_shape(false, |disks| disks.attach(beside, device, guid))
    }

    /// Takes a device out of its mirror; or out of a pair: the new device of a replacement that is
    /// given up, the old one that is not waited for, a spare that stands in. Its label is cleared.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for other devices, and where something would be lost ("no valid
    /// replicas"); those of writing labels.
    pub fn detach(&self, device: u16) -> Result<()> {
        self.ready()?;
        let disks = self.disks()?;
        disks.is_detachable(device)?;
        let is_alone = |place: &Place| disks.depends_on(place, device);
        let depends = {
            let map = self.map.read();
            map.table.segments().values().any(|segment| segment.live_frames > 0 && is_alone(&segment.place))
        };
        let of_table = self.root().table_segments;
        if depends || of_table.iter().any(|segment| segment.dead_since.is_none() && is_alone(&segment.place)) {
            return Err(PoolError::Refused("no valid replicas".to_owned()));
        }
        self.change_shape(true, |disks| disks.detach(device))
    }

    /// Has another device take the place of one, once it has everything that lies there: a resilver
    /// has to follow. Until then the old one is read and written as before.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short, or a device that is being replaced already;
    /// those of writing labels.
    pub fn replace(&self, number: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        self.change_shape(false, |disks| disks.replace(number, device, guid))
    }

    /// Adds groups of the next so many of these devices, each with a random number; what is written
    /// goes to them from then on.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are too short or cannot be written, and for groups
    /// that cannot be: nothing has changed then; those of writing labels.
    pub fn add_groups(&self, devices: &[Arc<dyn Device>], guids: &[u64], groups: &[NewGroup]) -> Result<()> {
        self.change_shape(false, |disks| disks.add_groups(devices, guids, groups, GroupClass::Data))
    }

    /// Adds groups for the intent log alone, mirrors or devices for themselves: from then on it is
    /// written to them only. If they fail, it is written where it was before.
    ///
    /// # Errors
    /// As [`Self::add_groups`].
    pub fn add_logs(&self, devices: &[Arc<dyn Device>], guids: &[u64], groups: &[NewGroup]) -> Result<()> {
        self.change_shape(false, |disks| disks.add_groups(devices, guids, groups, GroupClass::Log))
    }

    /// Adds groups for metadata alone, mirrors or devices for themselves: what is written of it goes
    /// there from then on, as long as they have room. Programs that do not know of such groups do not
    /// import the pool any more.
    ///
    /// # Errors
    /// As [`Self::add_groups`].
    pub fn add_special(&self, devices: &[Arc<dyn Device>], guids: &[u64], groups: &[NewGroup]) -> Result<()> {
        self.change_shape(false, |disks| disks.add_groups(devices, guids, groups, GroupClass::Special))
    }

    /// Keeps everybody from writing to the log, or lets them again: what is to be durable meanwhile
    /// waits for a commit.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a pool that does not lie on devices.
    pub fn hold_log(&self, held: bool) -> Result<()> {
        self.disks()?.hold_log(held);
        Ok(())
    }

    /// Takes the group of a device that is for the log alone out of the pool. Before that the log is
    /// held ([`Self::hold_log`]), and two transaction groups were committed since. Labels are cleared.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for any other device; those of writing labels.
    pub fn remove_log(&self, device: u16) -> Result<()> {
        self.change_shape(true, |disks| disks.remove_log(device))
    }

    /// Has a device as a spare.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is shorter than all others; those of writing labels.
    pub fn add_spare(&self, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        self.change_shape(false, |disks| disks.add_spare(device, guid))
    }

    /// Takes a spare that is not in use out of the pool. Its label is cleared.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for any other device; those of writing labels.
    pub fn remove_spare(&self, number: u16) -> Result<()> {
        self.ready()?;
        self.of_devices(|disks| disks.remove_spare(number))
    }

    /// Has spares stand in for devices that have failed or are not there. Answers which for whom (the
    /// device, the spare): where there are any, a resilver has to follow.
    ///
    /// # Errors
    /// Those of writing labels.
    pub fn engage_spares(&self) -> Result<Vec<(u16, u16)>> {
        self.ready()?;
        let mut engaged = Vec::new();
        self.of_devices(|disks| {
            engaged = disks.engage_spares()?;
            Ok(())
        })?;
        Ok(engaged)
    }

    /// Changes which devices there are, and has what is written next lie as they are now. Where a
    /// device goes for good, no older state is kept: it may have lain there.
    pub(super) fn change_shape(&self, gives_up: bool, change: impl FnOnce(&Disks) -> Result<()>) -> Result<()> {
        self.ready()?;
        let mut committed = self.committed.lock();
        self.change_devices(&mut committed, change)?;
        for appender in self.appenders.all() {
            self.end_segment(appender)?;
        }
        (committed.open_table, committed.renew) = (None, true);
        committed.root.log = self.disks()?.settle_log();
        self.commit_root(&mut committed, None, false, gives_up)?;
        self.disks()?.settled();
        self.guard(&mut committed).map_err(|error| self.suspend(&error))
    }
}
