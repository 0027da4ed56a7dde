//! Devices of a pool: a device has a length and is read, written, synced and discarded; it knows nothing of its
//! content.
//!
//! Callers: labels and the store. Two kinds: files and block devices ([`FileDevice`]), and a simulator with crashes,
//! torn and reordered writes and bit rot ([`Simulator`]), by which every module above is tested.
//!
//! Invariants:
//! - A write is durable when a later [`Device::sync`] has returned, not before; until then any part of it may
//!   survive a crash.
//! - Reads and writes are complete or fail; there are no short reads.

mod file;
mod simulator;
#[cfg(test)]
mod tests;

pub use file::FileDevice;
pub use simulator::{Random, Simulator};

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::PoolError;

/// A storage device, or a file in its place.
pub trait Device: Send + Sync {
    /// The device's name for messages: its path.
    fn name(&self) -> &str;

    /// The device's length, bytes.
    fn length(&self) -> u64;

    /// Measures the device again, and returns its length in bytes. [`Self::length`] follows where it has grown; it
    /// never shrinks.
    ///
    /// # Errors
    /// Errors of the system.
    fn look_again(&self) -> io::Result<u64> {
        Ok(self.length())
    }

    /// Fills the buffer from an offset.
    ///
    /// # Errors
    /// Errors of the system; also where the range ends beyond the device.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Reads as [`Self::read_at`], from the medium and not from a cache where possible, and without filling one.
    /// Offset, length and memory have to be aligned to 4 KiB, otherwise it is an ordinary read.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn read_past_caches(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(buffer, offset)
    }

    /// Writes all bytes at an offset; not durable yet.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Writes as [`Self::write_at`] a large range that will not be read soon: it may bypass all caches. Offset,
    /// length and memory have to be aligned to 4 KiB, otherwise it is an ordinary write.
    ///
    /// # Errors
    /// As [`Self::write_at`].
    fn write_stream(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_at(bytes, offset)?;
        self.begin_sync(offset, bytes.len() as u64);
        Ok(())
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// Errors of the system. Everything written since the last sync is then in an unknown state.
    fn sync(&self) -> io::Result<()>;

    /// Discards a range whose content is not needed any more. It has arbitrary content afterwards.
    ///
    /// # Errors
    /// Errors of the system; a device that cannot discard returns `Ok`.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Whether [`Self::discard`] is supported, as far as known: a device without support is only recognized at the
    /// first discard.
    fn can_discard(&self) -> bool {
        true
    }

    /// Path at which a deleted file can still be read: it has no name any more, and vanishes when the last process
    /// closes it.
    fn deleted(&self) -> Option<PathBuf> {
        None
    }

    /// Whether this is a placeholder for a missing device.
    fn is_missing(&self) -> bool {
        false
    }

    /// The file descriptor that holds the device's lock, if any: in a failover, a process that shares the descriptor
    /// table adopts it ([`FileDevice::adopt`]).
    fn descriptor(&self) -> Option<i32> {
        None
    }

    /// Whether users other than root could have written the device's content, or could replace it under its path.
    fn is_anybodys(&self) -> bool {
        false
    }

    /// Announces that a range will be read soon (readahead).
    fn expect(&self, offset: u64, length: u64);

    /// Starts writeback of a range that was written and will be synced, so that the sync has little left to do.
    fn begin_sync(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }
}

/// Wraps a device's error with its name.
pub(crate) fn failed(device: &dyn Device, doing: &'static str, source: io::Error) -> PoolError {
    PoolError::Device { device: device.name().to_owned(), doing, source: Arc::new(source) }
}
