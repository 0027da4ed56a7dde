//! The area of the intent log: slots set aside when the pool is made. One address space from 0 to
//! its length; in groups it lies on as many devices as may be lost, and on one more.
//!
//! Caller: the store's face of it. Invariants: the area never moves and never grows; what was
//! written and synced is in all copies on devices that are used.

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
    /// Its length, bytes.
    #[must_use]
    pub fn log_length(&self) -> u64 {
        let lengths = self.log_runs().iter().map(|(_, count)| u64::from(*count) * self.slot);
        if self.layout().is_plain() { lengths.sum() } else { lengths.min().unwrap_or(0) }
    }

    /// How many copies there are of it.
    #[must_use]
    pub fn log_copies(&self) -> usize {
        if self.layout().is_plain() { 1 } else { self.log_runs().len().max(1) }
    }

    /// Reads from one of its copies.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a range that is not in it.
    pub fn log_read(&self, copy: usize, position: u64, buffer: &mut [u8]) -> Result<()> {
        let layout = self.layout();
        let mut done = 0;
        for (slot, offset, length) in self.log_parts(self.log_runs_of(copy), position, buffer.len() as u64)? {
            // One that is stale has blocks of its own.
            self.whole_device(&layout, slot.device)?;
            if let Some(part) = buffer.get_mut(done..done + length) {
                self.read_slot(slot, offset, part)?;
            }
            done += length;
        }
        Ok(())
    }

    /// Reads from the first of its copies that can be read.
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

    /// Writes to it; durable after [`Self::log_sync`].
    ///
    /// # Errors
    /// As [`Self::log_read`].
    pub fn log_write(&self, position: u64, bytes: &[u8]) -> Result<()> {
        if self.layout().is_plain() {
            return self.log_write_copy(0, position, bytes);
        }
        let mut written = false;
        for (copy, (slot, _)) in self.log_runs().iter().enumerate() {
            if !self.layout().is_used(slot.device) {
                continue;
            }
            match self.log_write_copy(copy, position, bytes) {
                Err(error @ PoolError::Device { .. }) => self.lose(slot.device, &error)?,
                done => {
                    done?;
                    written = true;
                }
            }
        }
        if written { Ok(()) } else { Err(PoolError::Refused("no device has the intent log".to_owned())) }
    }

    fn log_write_copy(&self, copy: usize, position: u64, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for (slot, offset, length) in self.log_parts(self.log_runs_of(copy), position, bytes.len() as u64)? {
            let (part, after) = rest.split_at(length.min(rest.len()));
            self.write_slot(slot, offset, part)?;
            rest = after;
        }
        Ok(())
    }

    /// Makes everything written to it durable.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn log_sync(&self) -> Result<()> {
        let mut devices: Vec<u16> = self.log_runs().iter().map(|(place, _)| place.device).collect();
        devices.dedup();
        if !self.layout().is_plain() {
            let layout = self.layout();
            let used = devices.into_iter().filter(|number| layout.is_used(*number));
            let used = used.map(|number| Ok((self.device(number)?, number))).collect::<Result<Vec<_>>>()?;
            let synced = self.sync_each(&used)?;
            let none = || Err(PoolError::Refused("no device has the intent log".to_owned()));
            return if synced.is_empty() { none() } else { Ok(()) };
        }
        devices.into_iter().try_for_each(|number| {
            let device = self.device(number)?;
            device.sync().map_err(|error| failed(&*device, "syncing", error))
        })
    }

    fn log_runs(&self) -> &[(SlotAddress, u32)] {
        self.log.get().map_or(&[], Vec::as_slice)
    }

    /// The runs that a copy consists of.
    fn log_runs_of(&self, copy: usize) -> &[(SlotAddress, u32)] {
        let all = self.log_runs();
        if self.layout().is_plain() { all } else { all.get(copy..=copy).unwrap_or_default() }
    }

    /// The parts of a range of the area: slot, offset in it, length.
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
