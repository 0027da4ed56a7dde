//! Choice of the copy that a read goes to: the device with the least pending work, and a stream stays on a device for
//! a while.
//!
//! Callers: reads of copies, and readahead for these reads. Invariants:
//! - Only the choice of the copy depends on it, never the content that is returned.
//! - A range that was announced for a device is read from that device.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::patience;

/// A segment is divided into parts of this length, each read from one device, bytes.
const PART: u64 = 1 << 20;
/// Cost of a seek, bytes: a device could read this much in the time of a seek. Each running read counts as one seek.
const ELSEWHERE: u64 = 1 << 20;
/// Number of announced parts that are remembered.
const REMEMBERED: usize = 512;
/// An announced read that has not arrived within this time no longer counts as pending work.
const AWAITED: Duration = Duration::from_secs(1);

/// A copy that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    /// Number of the copy's column in the segment.
    pub(super) column: usize,
    /// Number of the copy's device.
    pub(super) device: u16,
    /// Offset of the segment on the device, bytes.
    pub(super) start: u64,
}

/// A part of a segment for which readahead was announced.
#[derive(Debug)]
struct Announced {
    segment: u32,
    part: u64,
    device: u16,
    /// Bytes of it that were not read yet.
    left: u64,
    at: Instant,
}

/// Pending work of a device.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    /// Bytes that are being read, or were announced.
    pending: u64,
    /// End of the last read or announced range.
    end: u64,
}

#[derive(Debug, Default)]
struct Loads {
    devices: Vec<Load>,
    announced: VecDeque<Announced>,
}

/// Pending work of all devices.
#[derive(Debug, Default)]
pub(super) struct Balance(Mutex<Loads>);

impl Loads {
    fn of(&mut self, device: u16) -> Option<&mut Load> {
        let at = usize::from(device);
        if self.devices.len() <= at {
            self.devices.resize(at + 1, Load::default());
        }
        self.devices.get_mut(at)
    }

    fn done(&mut self, device: u16, bytes: u64) {
        if let Some(load) = self.of(device) {
            load.pending = load.pending.saturating_sub(bytes);
        }
    }

    /// Removes announced reads that are overdue from the pending work; a reader that comes late is still sent to the
    /// announced device.
    fn give_up(&mut self) {
        let now = patience::now();
        let Self { devices, announced } = self;
        let too_many = announced.len().saturating_sub(REMEMBERED);
        for (number, late) in announced.iter_mut().enumerate() {
            if late.left > 0 && (number < too_many || now.duration_since(late.at) >= AWAITED) {
                let left = std::mem::take(&mut late.left);
                if let Some(load) = devices.get_mut(usize::from(late.device)) {
                    load.pending = load.pending.saturating_sub(left);
                }
            }
        }
        announced.drain(..too_many);
    }

    /// Chooses the copy to read a range of a segment from; returns it, and whether the range was announced there.
    fn choose(&self, segment: u32, range: &Range<u64>, copies: &[Copy]) -> Option<(Copy, bool)> {
        let part = range.start / PART;
        let known = self.announced.iter().rev().find(|known| known.segment == segment && known.part == part);
        if let Some(copy) = known.and_then(|known| copies.iter().find(|copy| copy.device == known.device)) {
            return Some((*copy, true));
        }
        let cost = |copy: &&Copy| {
            let load = self.devices.get(usize::from(copy.device)).copied().unwrap_or_default();
            let near = (0..ELSEWHERE).contains(&(copy.start + range.start).wrapping_sub(load.end));
            load.pending + if near { 0 } else { ELSEWHERE }
        };
        copies.iter().min_by_key(cost).map(|copy| (*copy, false))
    }
}

impl Balance {
    /// Announces a read (readahead); returns the copy that will be read.
    pub(super) fn announce(&self, segment: u32, range: &Range<u64>, copies: &[Copy]) -> Option<Copy> {
        let mut loads = self.0.lock();
        loads.give_up();
        let (copy, known) = loads.choose(segment, range, copies)?;
        let (bytes, part) = (range.end - range.start, range.start / PART);
        let load = loads.of(copy.device)?;
        load.pending += bytes;
        load.end = copy.start + range.end;
        let again = |other: &&mut Announced| known && other.segment == segment && other.part == part;
        match loads.announced.iter_mut().rev().find(again) {
            Some(there) => there.left += bytes,
            None => loads.announced.push_back(Announced {
                segment,
                part,
                device: copy.device,
                left: bytes,
                at: patience::now(),
            }),
        }
        Some(copy)
    }

    /// Begins a read: returns the copy to read, and the bytes that were pending on its device before; `None` instead
    /// of the bytes where the range was announced and may be in the page cache. [`Self::end`] has to follow.
    pub(super) fn begin(&self, segment: u32, range: &Range<u64>, copies: &[Copy]) -> Option<(Copy, Option<u64>)> {
        let mut loads = self.0.lock();
        let (copy, known) = loads.choose(segment, range, copies)?;
        let (bytes, part) = (range.end - range.start, range.start / PART);
        let load = loads.of(copy.device)?;
        let before = load.pending;
        load.pending += bytes + ELSEWHERE;
        if known {
            let of = |other: &&mut Announced| other.segment == segment && other.part == part;
            let taken = loads.announced.iter_mut().rev().find(of).map_or(0, |there| {
                let taken = bytes.min(there.left);
                there.left -= taken;
                taken
            });
            loads.done(copy.device, taken);
        } else {
            load.end = copy.start + range.end;
        }
        Some((copy, (!known).then_some(before)))
    }

    /// Ends a read.
    pub(super) fn end(&self, copy: &Copy, bytes: u64) {
        self.0.lock().done(copy.device, bytes + ELSEWHERE);
    }

    /// Resets a device number that another device has taken.
    pub(super) fn forget(&self, device: u16) {
        let mut loads = self.0.lock();
        loads.announced.retain(|announced| announced.device != device);
        if let Some(load) = loads.of(device) {
            *load = Load::default();
        }
    }
}

/// Divides a range into parts, each of which is read from one device.
pub(super) fn parts(offset: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        let from = at;
        at = ((from / PART + 1) * PART).min(end);
        (from < end).then_some(from..at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPIES: [Copy; 2] =
        [Copy { column: 0, device: 3, start: 1 << 30 }, Copy { column: 1, device: 5, start: 7 << 30 }];

    fn part(number: u64) -> Range<u64> {
        number * PART..(number + 1) * PART
    }

    #[test]
    fn a_stream_that_is_announced_takes_both_and_is_read_where_it_was_announced() {
        let balance = Balance::default();
        let announced: Vec<u16> =
            (0..8).map(|number| balance.announce(1, &part(number), &COPIES).unwrap().device).collect();
        assert!((3..=5).contains(&announced.iter().filter(|device| **device == 3).count()), "{announced:?}");
        for (number, device) in (0..).zip(&announced) {
            for quarter in 0..4 {
                let from = number * PART + quarter * (PART / 4);
                let (copy, before) = balance.begin(1, &(from..from + PART / 4), &COPIES).unwrap();
                assert_eq!((copy.device, before), (*device, None));
                balance.end(&copy, PART / 4);
            }
        }
        assert!(balance.0.lock().devices.iter().all(|load| load.pending == 0));
    }

    #[test]
    fn readers_at_the_same_time_take_different_devices_and_one_alone_stays() {
        let balance = Balance::default();
        let far = COPIES.map(|copy| Copy { start: copy.start + (1 << 28), ..copy });
        let (one, _) = balance.begin(1, &(0..8192), &COPIES).unwrap();
        let (two, _) = balance.begin(2, &(0..8192), &far).unwrap();
        assert_eq!((one.device, two.device), (3, 5));
        balance.end(&one, 8192);
        balance.end(&two, 8192);
        // Where the last read of that device ended.
        let (copy, _) = balance.begin(2, &(8192..16384), &far).unwrap();
        assert_eq!(copy.device, 5);
        balance.end(&copy, 8192);
        // Far from both: the first.
        let (copy, _) = balance.begin(3, &(PART * 9..PART * 9 + 8192), &COPIES).unwrap();
        assert_eq!(copy.device, 3);
    }

    #[test]
    fn what_nobody_comes_for_is_forgotten() {
        let balance = Balance::default();
        for number in 0..4 * REMEMBERED as u64 {
            balance.announce(1, &part(number), &COPIES).unwrap();
        }
        let loads = balance.0.lock();
        assert!(loads.announced.len() <= REMEMBERED + 1);
        let pending: u64 = loads.devices.iter().map(|load| load.pending).sum();
        assert_eq!(pending, loads.announced.iter().map(|announced| announced.left).sum::<u64>());
    }

    #[test]
    fn ranges_are_taken_apart_where_parts_end() {
        assert_eq!(
            parts(PART - 10, PART + 20).collect::<Vec<_>>(),
            [PART - 10..PART, PART..2 * PART, 2 * PART..2 * PART + 10]
        );
        assert_eq!(parts(5, 0).count(), 0);
    }
}
