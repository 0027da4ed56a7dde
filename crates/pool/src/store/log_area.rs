//! The log area: slots set aside when the pool is made, for the intent log. One address space from
//! 0 to its length.
//!
//! Callers: the intent log, which knows what is in it. Invariant: the area never moves and never
//! grows.

use std::ops::Deref;
use std::sync::Arc;

use crate::device::failed;
use crate::error::{Damage, PoolError};
use crate::label::{LogStart, SlotAddress};
use crate::log::{Area, Start};

use super::{Result, Store};

/// The log area as the intent log sees it; of a store that is not shared yet, `LogArea<&Store>`.
#[derive(Clone)]
pub struct LogArea<S = Arc<Store>>(pub(super) S);

impl LogArea {
    /// The area of this store.
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        Self(store)
    }
}

impl<S: Deref<Target = Store> + Send> Area for LogArea<S> {
    fn length(&self) -> u64 {
        self.0.log_length()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<()> {
        self.0.log_read(offset, into)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<()> {
        self.0.log_write(offset, from)
    }

    fn sync(&self) -> Result<()> {
        self.0.log_sync()
    }
}

impl From<Start> for LogStart {
    fn from(Start { position, sequence, chain }: Start) -> Self {
        Self { position, sequence, chain }
    }
}

impl From<LogStart> for Start {
    fn from(LogStart { position, sequence, chain }: LogStart) -> Self {
        Self { position, sequence, chain }
    }
}

impl Store {
    /// Length of the log area, bytes.
    #[must_use]
    pub fn log_length(&self) -> u64 {
        self.log.iter().map(|(_, count)| u64::from(*count) * self.slot).sum()
    }

    /// Reads from the log area.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a range that is not in it.
    pub fn log_read(&self, position: u64, buffer: &mut [u8]) -> Result<()> {
        let mut done = 0;
        for (place, offset, length) in self.log_parts(position, buffer.len() as u64)? {
            if let Some(part) = buffer.get_mut(done..done + length) {
                self.read_place(place, offset, part)?;
            }
            done += length;
        }
        Ok(())
    }

    /// Writes to the log area; durable after [`Self::log_sync`].
    ///
    /// # Errors
    /// [`PoolError::Suspended`] when it fails, and from then on.
    pub fn log_write(&self, position: u64, bytes: &[u8]) -> Result<()> {
        self.usable()?;
        self.confirm()?;
        let mut rest = bytes;
        for (place, offset, length) in self.log_parts(position, bytes.len() as u64)? {
            let (part, after) = rest.split_at(length.min(rest.len()));
            self.write_place(place, offset, part).map_err(|error| self.suspend(&error))?;
            rest = after;
        }
        Ok(())
    }

    /// Makes everything written to the log area durable.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] when it fails, and from then on.
    pub fn log_sync(&self) -> Result<()> {
        self.usable()?;
        let mut devices: Vec<u16> = self.log.iter().map(|(place, _)| place.device).collect();
        devices.dedup();
        for number in devices {
            let device = self.device(number)?;
            device.sync().map_err(|error| self.suspend(&failed(&*device, "syncing", error)))?;
        }
        Ok(())
    }

    /// The parts of a range of the area: slot, offset in it, length.
    fn log_parts(&self, position: u64, length: u64) -> Result<Vec<(SlotAddress, u64, usize)>> {
        let end = position.checked_add(length).filter(|end| *end <= self.log_length());
        let end = end.ok_or(PoolError::Format(Damage::Structure("behind the end of the log area")))?;
        let (mut parts, mut begin) = (Vec::new(), 0);
        for (first, count) in &self.log {
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
