//! Devices: what a pool lies on. A device has a length and is read, written, synced and discarded;
//! it knows nothing of what it holds.
//!
//! Callers: labels and the store. Two kinds: files and block devices ([`FileDevice`]) and a
//! simulator that crashes, tears, reorders and rots ([`Simulator`]), by which every module above is
//! tested.
//!
//! Invariants:
//! - A write is durable when a later [`Device::sync`] has returned, not before; until then any part
//!   of it may be there after a crash.
//! - Reads and writes are whole or an error; nothing is read short.

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

/// Something that holds bytes.
pub trait Device: Send + Sync {
    /// How people call it: its path.
    fn name(&self) -> &str;

    /// Its length, bytes.
    fn length(&self) -> u64;

    /// Looks how long it is now, and answers that: bytes. Where it has become longer,
    /// [`Self::length`] follows; it never falls.
    ///
    /// # Errors
    /// The system's.
    fn look_again(&self) -> io::Result<u64> {
        Ok(self.length())
    }

    /// Fills the buffer from this place.
    ///
    /// # Errors
    /// The system's; also where the range ends behind the device.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// As [`Self::read_at`], from the medium and not from a cache of it where that can be, and without
    /// leaving anything in one. Offset, length and memory lie at multiples of 4 KiB, or it goes the
    /// ordinary way.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn read_past_caches(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(buffer, offset)
    }

    /// Writes all bytes at this place; not durable yet.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Writes all bytes at this place, as [`Self::write_at`], where it is much that will not be
    /// read soon: it may go to the medium past all caches. Offset, length and memory lie at
    /// multiples of 4 KiB, or it goes the ordinary way.
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
    /// The system's. What was written before is then in an unknown state.
    fn sync(&self) -> io::Result<()>;

    /// Tells that the content of a range is not needed any more. It reads as anything afterwards.
    ///
    /// # Errors
    /// The system's; a device that cannot discard returns `Ok`.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Whether it takes what [`Self::discard`] tells, as far as is known: one that cannot shows it
    /// when it is told first.
    fn can_discard(&self) -> bool {
        true
    }

    /// Where it can still be read, if it was deleted: it has no name any more, and is gone with
    /// whoever has it open.
    fn deleted(&self) -> Option<PathBuf> {
        None
    }

    /// Whether it stands for one that is not there.
    fn is_missing(&self) -> bool {
        false
    }

    /// The number of the descriptor that holds its lock, where there is one: a process that shares the
    /// table of descriptors goes on with it ([`FileDevice::adopt`]).
    fn descriptor(&self) -> Option<i32> {
        None
    }

    /// Whether others than root could have written what is on it, or could put something else at
    /// its path.
    fn is_anybodys(&self) -> bool {
        false
    }

    /// Tells that a range will be read soon.
    fn expect(&self, offset: u64, length: u64);

    /// Tells that a range was written that will be synced: it may go to the medium now, so that the
    /// sync has little left to do.
    fn begin_sync(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }
}

/// Wraps a device's error with the device's name.
pub(crate) fn failed(device: &dyn Device, doing: &'static str, source: io::Error) -> PoolError {
    PoolError::Device { device: device.name().to_owned(), doing, source: Arc::new(source) }
}
