//! Topology changes of a pool in use that take effect at once: replacing devices, attaching and detaching, adding
//! groups and spares.
//!
//! Caller: commands. Changes are durable when a function returns; copying the segments is the work of a resilver
//! ([`Store::resilver`]). Invariant: commits wait meanwhile, so that no root names a segment on a device before the
//! labels record that device.

use std::sync::Arc;

use super::{Result, Store};
use crate::backend::{Disks, NewGroup};
use crate::device::Device;
use crate::error::PoolError;
use crate::label::{GroupClass, Place};

impl Store {
    /// Attaches a device to the mirror of the device `beside`; a device without redundancy becomes a mirror of two. A
    /// resilver has to follow. `guid` is a random number. A pool without groups becomes one with groups, which older
    /// programs do not import.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is too short, or for a raidz device as `beside`; errors of writing
    /// labels.
    pub fn attach(&self, beside: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        self.change_shape(false, |disks| disks.attach(beside, device, guid))
    }

    /// Detaches a device from its mirror, or from a pair: the new device of a cancelled replacement, the old one
    /// without waiting for the resilver, or an active spare. Its label is cleared.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for other devices, and where data would be lost ("no valid replicas"); errors of
    /// writing labels.
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

    /// Replaces a device: the new one takes its number once a resilver, which has to follow, has copied everything.
    /// Until then the old one is read and written as before.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is too short, or one that is being replaced already; errors of
    /// writing labels.
    pub fn replace(&self, number: u16, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        self.change_shape(false, |disks| disks.replace(number, device, guid))
    }

    /// Adds groups of these devices in their order, each device with a random GUID; segments are allocated on them
    /// from then on.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are too short or cannot be written, and for invalid groups: nothing
    /// has changed then; errors of writing labels.
    pub fn add_groups(&self, devices: &[Arc<dyn Device>], guids: &[u64], groups: &[NewGroup]) -> Result<()> {
        self.change_shape(false, |disks| disks.add_groups(devices, guids, groups, GroupClass::Data))
    }

    /// Adds dedicated log devices (like ZFS' SLOG), as mirrors or single devices: the log is written only to them
    /// from then on. If they fail, it is written to the data groups again.
    ///
    /// # Errors
    /// As [`Self::add_groups`].
    pub fn add_logs(&self, devices: &[Arc<dyn Device>], guids: &[u64], groups: &[NewGroup]) -> Result<()> {
        self.change_shape(false, |disks| disks.add_groups(devices, guids, groups, GroupClass::Log))
    }

    /// Adds groups of the special class (metadata only), as mirrors or single devices: new metadata is stored there
    /// as long as they have space. Programs without this feature cannot import the pool any more.
    ///
    /// # Errors
    /// As [`Self::add_groups`].
    pub fn add_special(&self, devices: &[Arc<dyn Device>], guids: &[u64], groups: &[NewGroup]) -> Result<()> {
        self.change_shape(false, |disks| disks.add_groups(devices, guids, groups, GroupClass::Special))
    }

    /// Suspends or resumes writes to the log: an fsync waits for a commit meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a pool that is not on devices.
    pub fn hold_log(&self, held: bool) -> Result<()> {
        self.disks()?.hold_log(held);
        Ok(())
    }

    /// Removes the group of a dedicated log device. Before, the log has to be suspended ([`Self::hold_log`]), and two
    /// transaction groups committed since. Labels are cleared.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for any other device; errors of writing labels.
    pub fn remove_log(&self, device: u16) -> Result<()> {
        self.change_shape(true, |disks| disks.remove_log(device))
    }

    /// Adds a hot spare.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is shorter than all others; errors of writing labels.
    pub fn add_spare(&self, device: Arc<dyn Device>, guid: u64) -> Result<()> {
        self.change_shape(false, |disks| disks.add_spare(device, guid))
    }

    /// Removes an inactive spare. Its label is cleared.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for any other device; errors of writing labels.
    pub fn remove_spare(&self, number: u16) -> Result<()> {
        self.ready()?;
        self.of_devices(|disks| disks.remove_spare(number))
    }

    /// Activates spares for failed and missing devices. Returns pairs of device and spare: where there are any, a
    /// resilver has to follow.
    ///
    /// # Errors
    /// Errors of writing labels.
    pub fn engage_spares(&self) -> Result<Vec<(u16, u16)>> {
        self.ready()?;
        let mut engaged = Vec::new();
        self.of_devices(|disks| {
            engaged = disks.engage_spares()?;
            Ok(())
        })?;
        Ok(engaged)
    }

    /// Changes the topology, and moves all open segments to the new layout. Where a device is removed for good, no
    /// older state is retained: it may be stored there.
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
