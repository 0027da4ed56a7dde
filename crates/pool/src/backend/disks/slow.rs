//! Devices that answer much later than the others of their group: what lies there is read from the
//! others instead, as long as redundancy is left.
//!
//! Callers: reads of slots, which tell how long they took; whoever chooses the columns to read.
//! Invariant: only which copy is read depends on it, never what is answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use super::layout::{Layout, Standing};
use crate::patience;

/// An answer within this is never late.
const NEVER_LATE: Duration = Duration::from_micros(500);
/// A device is late that takes so many times as long as the one in the middle of the others.
const TIMES: u64 = 4;
/// So many reads are awaited before a device is judged.
const JUDGED_AFTER: u64 = 8;
/// A device that is left out is tried again after so long.
const TRIED_AGAIN: Duration = Duration::from_secs(5);
/// What takes about as long as beginning to read, bytes.
const BEGINNING: u64 = 64 << 10;

/// How late one device answers.
#[derive(Debug, Default)]
struct Pace {
    reads: AtomicU64,
    /// The time of a read of little, on average; nanoseconds.
    average: AtomicU64,
    is_slow: AtomicBool,
    /// When one that is slow was tried last.
    tried: parking_lot::Mutex<Option<Instant>>,
}

/// How late the devices answer, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Paces {
    devices: RwLock<Vec<Arc<Pace>>>,
    /// Whether any is slow: readers look at that first.
    any: AtomicBool,
}

impl Paces {
    fn of(&self, device: u16) -> Arc<Pace> {
        if let Some(pace) = self.devices.read().get(usize::from(device)) {
            return Arc::clone(pace);
        }
        let mut devices = self.devices.write();
        while devices.len() <= usize::from(device) {
            devices.push(Arc::default());
        }
        devices.get(usize::from(device)).map(Arc::clone).unwrap_or_default()
    }

    /// Another device has this number.
    pub(super) fn forget(&self, device: u16) {
        if let Some(pace) = self.devices.write().get_mut(usize::from(device)) {
            *pace = Arc::default();
        }
    }

    /// A device has answered to a read of so many bytes.
    pub(super) fn note(&self, layout: &Layout, device: u16, bytes: usize, began: Instant) {
        let pace = self.of(device);
        let time = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let time = time / (1 + bytes as u64 / BEGINNING);
        let reads = pace.reads.fetch_add(1, Ordering::Relaxed);
        let before = if reads == 0 { time } else { pace.average.load(Ordering::Relaxed) };
        // Two who write at once lose one of the two times, which is no loss.
        pace.average.store(before - before / 8 + time / 8, Ordering::Relaxed);
        if reads >= JUDGED_AFTER && (reads.is_multiple_of(16) || pace.is_slow.load(Ordering::Relaxed)) {
            self.judge(layout, device, &pace);
        }
    }

    fn judge(&self, layout: &Layout, device: u16, pace: &Pace) {
        let Some(group) = layout.standing(layout.number_of(device)).map(|standing| standing.group) else { return };
        let others = layout.members(group).map(|(at, _)| at as u16).filter(|at| *at != device);
        let paces = others.map(|at| self.of(at)).filter(|other| other.reads.load(Ordering::Relaxed) >= JUDGED_AFTER);
        let mut averages: Vec<u64> = paces.map(|other| other.average.load(Ordering::Relaxed)).collect();
        averages.sort_unstable();
        let Some(middle) = averages.get(averages.len() / 2) else { return };
        let average = pace.average.load(Ordering::Relaxed);
        let slow = u128::from(average) > NEVER_LATE.as_nanos() && average > middle.saturating_mul(TIMES);
        if pace.is_slow.swap(slow, Ordering::Relaxed) != slow {
            *pace.tried.lock() = slow.then(patience::now);
            tracing::info!(device, slow, average, middle, "a device answers late, or does not any more");
            let any = self.devices.read().iter().any(|pace| pace.is_slow.load(Ordering::Relaxed));
            self.any.store(any, Ordering::Release);
        }
    }

    /// How late a device answers that had better not be read.
    fn slow(&self, layout: &Layout, number: u16) -> Option<Arc<Pace>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let reader = layout.holders(number).find(|(_, standing)| Standing::has_all(standing));
        let pace = self.of(reader.map_or(number, |(holder, _)| holder));
        pace.is_slow.load(Ordering::Relaxed).then_some(pace)
    }

    /// Whether what lies on a device will most likely be read from others.
    pub(super) fn is_slow(&self, layout: &Layout, number: u16) -> bool {
        self.slow(layout, number).is_some()
    }

    /// Whether what lies on a device had better be read from others. Now and then it is not so: who
    /// asks then, and reads, finds out whether the device is faster again.
    pub(super) fn avoids(&self, layout: &Layout, number: u16) -> bool {
        let Some(pace) = self.slow(layout, number) else { return false };
        let mut tried = pace.tried.lock();
        let due = tried.is_none_or(|tried| tried.elapsed() >= TRIED_AGAIN);
        if due {
            *tried = Some(patience::now());
        }
        !due
    }
}
