//! The log area: slots reserved for the intent log when the pool is created. One address space from 0 to its length.
//!
//! Callers: the intent log, which knows its content. Invariant: a failure suspends the store.

use std::sync::Arc;

use crate::backend::Disks;
use crate::error::{Damage, PoolError};
use crate::label::LogStart;
use crate::log::{Area, Blocks, Ring, Start};

use super::{Result, Store};

/// The log area for the intent log.
struct LogArea(Arc<Store>);

impl Area for LogArea {
    fn length(&self) -> u64 {
        self.0.log_length()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<()> {
        self.0.log_read(offset, into)
    }

    fn copies(&self) -> usize {
        self.0.disks.as_ref().map_or(1, |disks| disks.log_copies())
    }

    fn read_copy(&self, copy: usize, into: &mut [u8], offset: u64) -> Result<()> {
        self.0.log_disks()?.log_read(copy, offset, into)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<()> {
        self.0.log_write(offset, from)
    }

    fn sync(&self) -> Result<()> {
        self.0.log_sync()
    }

    fn is_open(&self) -> bool {
        self.0.disks.as_ref().is_none_or(|disks| disks.log_is_open())
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
    /// Opens the blocks of the intent log, on devices or in a bucket.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a pool without space for the log.
    pub fn log(self: &Arc<Self>) -> Result<Box<dyn Blocks>> {
        Ok(match self.backend.log()? {
            Some(blocks) => blocks,
            None => Box::new(Ring::new(LogArea(Arc::clone(self)), self.identity().pool, Start::default())?),
        })
    }

    /// Length of the log area, bytes; 0 where the log is not on devices.
    #[must_use]
    pub fn log_length(&self) -> u64 {
        self.disks.as_ref().map_or(0, |disks| disks.log_length())
    }

    /// Reads from the log area.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a range outside of the area.
    pub fn log_read(&self, position: u64, buffer: &mut [u8]) -> Result<()> {
        self.log_disks()?.log_read_any(position, buffer)
    }

    /// Writes to the log area; durable after [`Self::log_sync`].
    ///
    /// # Errors
    /// [`PoolError::Suspended`] when it fails, and from then on.
    pub fn log_write(&self, position: u64, bytes: &[u8]) -> Result<()> {
        self.ready()?;
        let disks = self.log_disks()?;
        match disks.log_write(position, bytes) {
            // A range outside of the area is not a failure of the store; nor is a failed dedicated log device.
            Err(error @ PoolError::Device { .. }) if disks.log_is_open() => Err(self.suspend(&error)),
            written => written,
        }
    }

    /// Makes everything written to the log area durable.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] when it fails, and from then on.
    pub fn log_sync(&self) -> Result<()> {
        self.usable()?;
        let disks = self.log_disks()?;
        disks.log_sync().map_err(|error| if disks.log_is_open() { self.suspend(&error) } else { error })
    }

    fn log_disks(&self) -> Result<&Disks> {
        self.disks.as_deref().ok_or(PoolError::Format(Damage::Structure("behind the end of the log area")))
    }
}
