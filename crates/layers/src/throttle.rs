//! The filter `throttle`: limits the rate of reading and of writing, with one token bucket per
//! direction for the whole mount.
//!
//! Made by the stack builder; rates can be replaced while it serves. Waiting happens in the read or
//! write itself, nowhere else: other operations continue (a front end with few threads ensures that
//! by [`Waiting`]). Every byte has to pass here, so open files offer no backing descriptor for
//! passthrough. Reads from the kernel's page cache are free.

mod bucket;
pub mod rate;
#[cfg(test)]
mod tests;

use crate::{
    clock::Clock,
    context::{Waiting, wait_for},
};
use bucket::Bucket;
use nacre_vfs::{Description, Filter, OpenFile, OpenFlags, Opened, Result, WriteOrigin};
use parking_lot::RwLock;
use rate::Rate;
use std::{any::Any, fmt, os::fd::BorrowedFd, sync::Arc};

/// Rate limits per direction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// For reading; `None` is unlimited.
    pub read: Option<Rate>,
    /// For writing; `None` is unlimited.
    pub write: Option<Rate>,
}

/// The filter.
pub struct Throttle {
    shared: Arc<ThrottleShared>,
}

struct ThrottleShared {
    read: Bucket,
    write: Bucket,
    rates: RwLock<Rates>,
    clock: Arc<dyn Clock>,
    waiting: Waiting,
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Throttle").field(&*self.shared.rates.read()).finish()
    }
}

impl Throttle {
    /// A filter with these limits.
    pub fn new(rates: Rates, clock: Arc<dyn Clock>, waiting: Waiting) -> Throttle {
        Throttle {
            shared: Arc::new(ThrottleShared {
                read: Bucket::default(),
                write: Bucket::default(),
                rates: RwLock::new(rates),
                clock,
                waiting,
            }),
        }
    }

    /// Replaces the limits, for open files as well. A wait in progress keeps its length.
    pub fn replace(&self, rates: Rates) {
        *self.shared.rates.write() = rates;
    }
}

impl ThrottleShared {
    fn charge(&self, bucket: &Bucket, rate: Option<Rate>, bytes: u64) -> Result<()> {
        let Some(rate) = rate else { return Ok(()) };
        let wait = bucket.charge(rate, bytes, self.clock.now());
        if wait.is_zero() {
            return Ok(());
        }
        // A caller who is interrupted transfers nothing, and would be charged again.
        let waited = wait_for(&self.waiting, || self.clock.pause(wait)).and_then(|paused| paused);
        waited.inspect_err(|_| bucket.refund(rate, bytes))
    }

    fn charge_read(&self, bytes: u64) -> Result<()> {
        let rate = self.rates.read().read;
        self.charge(&self.read, rate, bytes)
    }

    fn charge_write(&self, bytes: u64) -> Result<()> {
        let rate = self.rates.read().write;
        self.charge(&self.write, rate, bytes)
    }
}

impl Filter for Throttle {
    fn name(&self) -> &'static str {
        "throttle"
    }

    fn describe(&self) -> Description {
        let rates = *self.shared.rates.read();
        let mut description = Description::new("throttle");
        for (key, rate) in [("read-rate", rates.read), ("write-rate", rates.write)] {
            if let Some(rate) = rate {
                description = description.with(key, rate.to_string());
            }
        }
        description
    }

    fn file_up(&self, file: Opened, _flags: OpenFlags) -> Opened {
        Arc::new(ThrottledFile { below: file, shared: Arc::clone(&self.shared) })
    }
}

/// An open file whose reads and writes wait for the bucket.
struct ThrottledFile {
    below: Opened,
    shared: Arc<ThrottleShared>,
}

impl OpenFile for ThrottledFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let count = self.below.read(buffer, offset)?;
        self.shared.charge_read(count as u64)?;
        Ok(count)
    }

    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        // Before the write: a caller who is interrupted while waiting has written nothing.
        self.shared.charge_write(data.len() as u64)?;
        self.below.write(data, offset, origin)
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.shared.charge_write(data.len() as u64)?;
        self.below.append(data)
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        let length = self.copied_at_once(length);
        self.shared.charge_read(length)?;
        self.shared.charge_write(length)?;
        self.below.copy_to(offset, target, target_offset, length, flags)
    }

    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        None
    }

    nacre_vfs::forward_file! { inner flush fsync allocate seek test_lock set_lock flock ioctl left is_on_inner_mount }
}

impl ThrottledFile {
    /// Length of one step of a copy. A copy is charged before the available length is known: steps
    /// avoid an overcharge of a copy of "everything".
    fn copied_at_once(&self, length: u64) -> u64 {
        const STEP: u64 = 1 << 20;
        let rates = *self.shared.rates.read();
        if rates == Rates::default() { length } else { length.min(STEP) }
    }
}
