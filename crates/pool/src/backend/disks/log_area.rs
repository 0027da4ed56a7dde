//! The area of the intent log (like ZFS' ZIL): slots reserved when the pool is created. It is one address space from
//! 0 to its length; in groups it has as many copies on different devices as may be lost, and one more.
//!
//! Caller: the store's log module. Invariants: the area never grows; written and synced bytes are in all copies on
//! usable devices. A copy is added only on a device that counts as stale until a later commit, or on a dedicated log
//! device (like ZFS' SLOG). As long as one dedicated log device is whole, only these are written; when the last of
//! them fails, the log is not written until its lost entries are no longer needed, because later entries could not be
//! reached.

use std::sync::Arc;

use super::layout::{Layout, Standing};
use super::{Disks, Result};
use crate::device::failed;
use crate::error::{Damage, PoolError};
use crate::label::SlotAddress;
use crate::log::Area;

impl Area for Disks {
    fn length(&self) -> u64 {
        self.log_length()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<()> {
        self.log_read_any(offset, into)
    }

    fn copies(&self) -> usize {
        self.log_copies()
    }

    fn read_copy(&self, copy: usize, into: &mut [u8], offset: u64) -> Result<()> {
        self.log_read(copy, offset, into)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<()> {
        self.log_write(offset, from)
    }

    fn sync(&self) -> Result<()> {
        self.log_sync()
    }
}

impl Disks {
    /// Length of the log area, bytes.
    #[must_use]
    pub fn log_length(&self) -> u64 {
        let runs = self.log_runs();
        let lengths = runs.iter().map(|(_, count)| u64::from(*count) * self.slot);
        if self.layout().is_plain() { lengths.sum() } else { lengths.min().unwrap_or(0) }
    }

    /// Number of copies of the log area.
    #[must_use]
    pub fn log_copies(&self) -> usize {
        if self.layout().is_plain() { 1 } else { self.log_runs().len().max(1) }
    }

    /// Reads from one copy of the log area.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a range outside of the area.
    pub fn log_read(&self, copy: usize, position: u64, buffer: &mut [u8]) -> Result<()> {
        let layout = self.layout();
        let mut done = 0;
        for (slot, offset, length) in self.log_parts(&self.log_runs_of(copy), position, buffer.len() as u64)? {
            // A stale device has outdated blocks.
            self.whole_device(&layout, slot.device)?;
            if let Some(part) = buffer.get_mut(done..done + length) {
                self.read_held(slot, false, offset, part).map(drop)?;
            }
            done += length;
        }
        Ok(())
    }

    /// Reads from the first readable copy of the log area.
    ///
    /// # Errors
    /// As [`Self::log_read`].
    pub fn log_read_any(&self, position: u64, buffer: &mut [u8]) -> Result<()> {
        let mut read = self.log_read(0, position, buffer);
        for copy in 1..self.log_copies() {
            if read.is_ok() {
                break;
            }
            read = self.log_read(copy, position, buffer);
        }
        read
    }

    /// Writes to the log area; durable after [`Self::log_sync`].
    ///
    /// # Errors
    /// As [`Self::log_read`].
    pub fn log_write(&self, position: u64, bytes: &[u8]) -> Result<()> {
        if self.layout().is_plain() {
            return self.log_write_copy(0, position, bytes);
        }
        let (mut written, apart) = (false, self.logging.lock().apart);
        for (copy, (slot, _)) in self.log_runs().iter().enumerate() {
            let layout = self.layout();
            if !layout.is_used(slot.device) || apart && !layout.is_log_device(slot.device) {
                continue;
            }
            match self.log_write_copy(copy, position, bytes) {
                Err(error @ PoolError::Device { .. }) => {
                    let again = || self.log_write_copy(copy, position, bytes);
                    written |= self.lose_or_write(slot.device, &error, &again)?;
                }
                done => {
                    done?;
                    written = true;
                }
            }
        }
        if written { Ok(()) } else { Err(PoolError::Refused("no device has the intent log".to_owned())) }
    }

    /// Whether the log may be written now; otherwise an fsync has to wait for a commit.
    #[must_use]
    pub fn log_is_open(&self) -> bool {
        let logging = self.logging.lock();
        logging.awaited == 0 && !logging.held
    }

    /// Suspends or resumes writes to the log.
    pub fn hold_log(&self, held: bool) {
        self.logging.lock().held = held;
    }

    /// Notes that a transaction group was committed.
    pub fn log_committed(&self) {
        let mut logging = self.logging.lock();
        logging.awaited = logging.awaited.saturating_sub(1);
    }

    /// Switches the log to the dedicated log devices if one of them is whole; the labels and the newest root record
    /// this already.
    pub(super) fn use_log_devices(&self, layout: &Layout) {
        self.logging.lock().apart = self.has_log_device(layout);
    }

    /// Leaves the dedicated log devices after the last of them failed. The commit in progress may have read the log
    /// state before, so that only the commit after it makes the lost entries unnecessary.
    pub(super) fn leave_log_devices(&self, layout: &Layout) {
        let mut logging = self.logging.lock();
        if logging.apart && !self.has_log_device(layout) {
            (logging.apart, logging.awaited) = (false, 2);
        }
    }

    fn has_log_device(&self, layout: &Layout) -> bool {
        let runs = self.log_runs();
        runs.iter().any(|(first, _)| layout.is_log_device(first.device) && layout.is_whole(first.device))
    }

    fn log_write_copy(&self, copy: usize, position: u64, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for (slot, offset, length) in self.log_parts(&self.log_runs_of(copy), position, bytes.len() as u64)? {
            let (part, after) = rest.split_at(length.min(rest.len()));
            self.write_slot(slot, offset, part)?;
            rest = after;
        }
        Ok(())
    }

    /// Makes all writes to the log durable.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn log_sync(&self) -> Result<()> {
        let mut devices: Vec<u16> = self.log_runs().iter().map(|(place, _)| place.device).collect();
        devices.dedup();
        if !self.layout().is_plain() {
            let (layout, apart) = (self.layout(), self.logging.lock().apart);
            let written = devices.iter().filter(|number| !apart || layout.is_log_device(**number));
            let holders = written.flat_map(|number| layout.holders(*number));
            let used = holders.filter(|(_, standing)| standing.works());
            let used = used.map(|(number, _)| Ok((self.device(number)?, number))).collect::<Result<Vec<_>>>()?;
            let synced = self.sync_each(&used)?;
            let none = || Err(PoolError::Refused("no device has the intent log".to_owned()));
            return if synced.is_empty() { none() } else { Ok(()) };
        }
        devices.into_iter().try_for_each(|number| {
            let device = self.device(number)?;
            device.sync().map_err(|error| failed(&*device, "syncing", error))
        })
    }

    /// The runs of slots that the log occupies.
    pub(super) fn log_runs(&self) -> Arc<Vec<(SlotAddress, u32)>> {
        Arc::clone(&self.log.read())
    }

    /// The runs of slots of one copy.
    fn log_runs_of(&self, copy: usize) -> Vec<(SlotAddress, u32)> {
        let all = self.log_runs();
        if self.layout().is_plain() { all.to_vec() } else { all.get(copy..=copy).unwrap_or_default().to_vec() }
    }

    /// Adapts the log to the topology: as many copies as its group's devices may be lost, one more, and one on each
    /// dedicated log device. New devices of the group get a copy; copies on removed devices and surplus copies are
    /// dropped. Returns the log's new runs: the next root has to name them, and then [`Self::settled`] has to follow.
    #[must_use]
    pub fn settle_log(&self) -> Vec<(SlotAddress, u32)> {
        let mut rooms = self.rooms.lock();
        let layout = self.layout();
        let mut runs = self.log_runs().to_vec();
        runs.retain(|(first, _)| layout.standing(first.device).is_some_and(Standing::is_own));
        let group = log_group(&layout, &runs);
        let count = runs.iter().map(|(_, count)| *count).min().unwrap_or(0);
        let logs = (0..layout.groups.len()).filter(|group| layout.is_log(*group));
        let devices = std::iter::once(group).chain(logs).flat_map(|group| layout.takers(group));
        for (at, own) in devices {
            let device = at as u16;
            let copies = runs.iter().filter(|(first, _)| lasts(&layout, first.device)).count();
            let enough = own.group == group && copies > layout.parity(group);
            if enough || runs.iter().any(|(first, _)| first.device == device) {
                continue;
            }
            let Some(from) = rooms.slots.free_run(device, count) else { continue };
            if let Some((slot, _)) = rooms.slots.take_run(device, from, count, 0) {
                runs.push((SlotAddress { device, slot }, count));
            }
        }
        self.unlogged.lock().extend(give_up_surplus(&layout, group, &mut runs));
        *self.log.write() = Arc::new(runs.clone());
        runs
    }

    /// Drops log copies on leaving devices, and surplus copies. Returns the log's new runs: the next root has to name
    /// them, and then [`Self::settled`] has to follow.
    pub fn leave_log(&self) -> Vec<(SlotAddress, u32)> {
        let layout = self.layout();
        let mut runs = self.log_runs().to_vec();
        let mut given_up: Vec<_> =
            runs.extract_if(.., |(first, _)| layout.is_leaving(usize::from(first.device))).collect();
        given_up.extend(give_up_surplus(&layout, log_group(&layout, &runs), &mut runs));
        self.unlogged.lock().extend(given_up);
        *self.log.write() = Arc::new(runs.clone());
        runs
    }

    /// Frees the slots of dropped log copies, after a root that does not name them.
    pub(super) fn free_unlogged(&self) {
        let unlogged = std::mem::take(&mut *self.unlogged.lock());
        let mut rooms = self.rooms.lock();
        for (first, count) in unlogged {
            for number in 0..count {
                rooms.slots.release(SlotAddress { slot: first.slot + number, ..first });
            }
        }
    }

    /// The devices that hold the log.
    #[must_use]
    pub fn log_devices(&self) -> Vec<u16> {
        self.log_runs().iter().map(|(first, _)| first.device).collect()
    }

    /// Number of slots of one log copy.
    pub(super) fn log_slots(&self) -> u32 {
        self.log_runs().iter().map(|(_, count)| *count).min().unwrap_or(0)
    }

    /// Splits a range of the log into parts: slot, offset in the slot, length.
    fn log_parts(
        &self,
        runs: &[(SlotAddress, u32)],
        position: u64,
        length: u64,
    ) -> Result<Vec<(SlotAddress, u64, usize)>> {
        let end = position.checked_add(length).filter(|end| *end <= self.log_length());
        let end = end.ok_or(PoolError::Format(Damage::Structure("behind the end of the log area")))?;
        let (mut parts, mut begin) = (Vec::new(), 0);
        for (first, count) in runs {
            for number in 0..*count {
                let (from, to) = (position.max(begin), end.min(begin + self.slot));
                if from < to {
                    parts.push((
                        SlotAddress { slot: first.slot + number, ..*first },
                        from - begin,
                        (to - from) as usize,
                    ));
                }
                begin += self.slot;
            }
        }
        Ok(parts)
    }
}

/// Whether a log copy on a device is permanent: the device is neither leaving nor a dedicated log device.
fn lasts(layout: &Layout, device: u16) -> bool {
    !layout.is_log_device(device) && !layout.is_leaving(usize::from(device))
}

/// The data group that holds the log.
fn log_group(layout: &Layout, runs: &[(SlotAddress, u32)]) -> usize {
    let of_data = runs.iter().find(|(first, _)| lasts(layout, first.device));
    let group = of_data.and_then(|(first, _)| layout.standing(first.device)).map(|own| own.group);
    group.or_else(|| layout.taking_groups().next()).unwrap_or(0)
}

/// Removes surplus log copies if enough copies are on complete devices of the log's group; returns the removed ones.
fn give_up_surplus(layout: &Layout, group: usize, runs: &mut Vec<(SlotAddress, u32)>) -> Vec<(SlotAddress, u32)> {
    let counts = |device: u16| {
        let own = layout.standing(device).is_some_and(|own| own.group == group);
        own && lasts(layout, device) && layout.is_whole(device)
    };
    let needed = runs.iter().filter(|(first, _)| counts(first.device)).take(layout.parity(group) + 1);
    let kept: Vec<SlotAddress> = needed.map(|(first, _)| *first).collect();
    if kept.len() <= layout.parity(group) {
        return Vec::new();
    }
    let is_surplus = |(first, _): &mut (SlotAddress, u32)| lasts(layout, first.device) && !kept.contains(first);
    runs.extract_if(.., is_surplus).collect()
}
