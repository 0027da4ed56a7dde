//! Streams of frames: many read at once to where they are wanted, and requests to devices made
//! ahead of their readers.
//!
//! Callers: the store as [`Frames`](crate::frames::Frames), for content that is read from front to
//! back. Invariants:
//! - What is handed out was checked as by [`Frames::read`](crate::frames::Frames::read), which is
//!   asked for every frame that cannot be had in the short way.
//! - The thread that goes ahead holds devices only while it makes a request, and ends with the
//!   store.

use std::sync::{Arc, OnceLock};

use super::workers::Workers;
use super::{Result, Store};
use crate::device::Device;
use crate::error::{Damage, PoolError};
use crate::frames::{Frames, Wanted};
use crate::pointer::Pointer;
use crate::segment::slots;

/// Frames this near to each other are asked for in one request, bytes.
const NEAR: u64 = 64 << 10;
/// Requests that wait for the thread; what comes beyond is not asked for ahead.
const WAITING: usize = 64;

/// A part of a device.
type Range = (Arc<dyn Device>, u64, u64);

/// The thread that makes requests to devices ahead of readers.
#[derive(Default)]
pub(super) struct DeviceReadahead(OnceLock<Workers<Vec<Range>>>);

impl std::fmt::Debug for DeviceReadahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DeviceReadahead").field(&self.0.get().is_some()).finish()
    }
}

impl DeviceReadahead {
    /// Has the thread make the requests, unless it has enough to do; makes them itself where there
    /// is no thread.
    fn request(&self, ranges: Vec<Range>) {
        let thread = self.0.get_or_init(|| Workers::start("pool-ahead", 1, WAITING, ask));
        if thread.count() == 0 {
            ask(ranges);
        } else {
            drop(thread.offer(ranges));
        }
    }
}

fn ask(ranges: Vec<Range>) {
    ranges.into_iter().for_each(|(device, start, length)| device.expect(start, length));
}

impl Store {
    /// Where frames lie, neighbours together, in the order of the caller.
    fn ranges(&self, pointers: &[Pointer]) -> Vec<Range> {
        let mut ranges: Vec<(u16, u64, u64)> = Vec::with_capacity(pointers.len());
        {
            let map = self.map.read();
            for pointer in pointers {
                if let Some(found) = map.table.find(pointer.segment, pointer.index, pointer.offset) {
                    let start =
                        slots::start(found.place, self.slot) + u64::from(found.offset) * u64::from(Pointer::UNIT);
                    let end = start + pointer.charged();
                    match ranges.last_mut() {
                        Some((device, from, until))
                            if *device == found.place.device && *from <= start && start <= *until + NEAR =>
                        {
                            *until = end.max(*until);
                        }
                        _ => ranges.push((found.place.device, start, end)),
                    }
                }
            }
        }
        let devices = Arc::clone(&self.devices.read());
        let of_device = |(device, start, end): (u16, u64, u64)| {
            Some((Arc::clone(devices.get(usize::from(device))?), start, end - start))
        };
        ranges.into_iter().filter_map(of_device).collect()
    }

    /// Asks the devices for frames.
    pub(super) fn expect_now(&self, pointers: &[Pointer]) {
        ask(self.ranges(pointers));
    }

    /// Has another thread ask the devices for frames.
    pub(super) fn expect_soon(&self, pointers: &[Pointer]) {
        if !pointers.is_empty() {
            self.readahead.request(self.ranges(pointers));
        }
    }

    /// Reads frames to where they are wanted. By one thread: a stream's requests come several at a
    /// time, and each has its own.
    pub(super) fn read_wanted(&self, wanted: &mut [Wanted<'_>]) -> Result<()> {
        wanted.iter_mut().try_for_each(|wanted| self.read_to(wanted))
    }

    fn read_to(&self, Wanted { pointer, target }: &mut Wanted<'_>) -> Result<()> {
        if target.len() != pointer.logical as usize {
            return Err(PoolError::Frame {
                pointer: *pointer,
                damage: Damage::Structure("a frame of another length than expected"),
            });
        }
        let place = self.find(pointer)?;
        if self.fill(pointer, place, target).is_ok() {
            return Ok(());
        }
        // It may have been moved meanwhile; it may have a copy; and if it is damaged, that is to be
        // told.
        target.copy_from_slice(&self.read(pointer)?);
        Ok(())
    }
}
