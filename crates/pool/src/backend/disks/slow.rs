//! Slow devices: a device that answers much later than the others of its group is not read as long as redundancy
//! allows it.
//!
//! Callers: reads of slots, which report their latency; the code that chooses which columns to read. Invariant: only
//! the choice of the copy depends on it, never the content that is returned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use super::layout::{Layout, Standing};
use crate::patience;

/// A latency up to this is never slow.
const NEVER_LATE: Duration = Duration::from_micros(500);
/// A device is slow from this multiple of the median of the others on.
const TIMES: u64 = 4;
/// Number of reads before a device is judged.
const JUDGED_AFTER: u64 = 8;
/// A slow device is read again after this time, to see whether it has recovered.
const TRIED_AGAIN: Duration = Duration::from_secs(5);
/// Bytes that take about as long to transfer as one read takes to start.
const BEGINNING: u64 = 64 << 10;

/// Read latency of one device.
#[derive(Debug, Default)]
struct Pace {
    reads: AtomicU64,
    /// Moving average of the latency of a short read, nanoseconds.
    average: AtomicU64,
    is_slow: AtomicBool,
    /// Time of the last trial read of a slow device.
    tried: parking_lot::Mutex<Option<Instant>>,
}

/// Read latencies of the devices, by device number.
#[derive(Debug, Default)]
pub(super) struct Paces {
    devices: RwLock<Vec<Arc<Pace>>>,
    /// Whether any device is slow; readers check this first.
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

    /// Resets a device number that another device has taken.
    pub(super) fn forget(&self, device: u16) {
        if let Some(pace) = self.devices.write().get_mut(usize::from(device)) {
            *pace = Arc::default();
        }
    }

    /// Records the latency of a read of this many bytes.
    pub(super) fn note(&self, layout: &Layout, device: u16, bytes: usize, began: Instant) {
        let pace = self.of(device);
        let time = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let time = time / (1 + bytes as u64 / BEGINNING);
        let reads = pace.reads.fetch_add(1, Ordering::Relaxed);
        let before = if reads == 0 { time } else { pace.average.load(Ordering::Relaxed) };
        // Of two concurrent updates one may be lost, which does not matter.
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

    /// The latency record of the device that is read for this number, if it is slow.
    fn slow(&self, layout: &Layout, number: u16) -> Option<Arc<Pace>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let reader = layout.holders(number).find(|(_, standing)| Standing::has_all(standing));
        let pace = self.of(reader.map_or(number, |(holder, _)| holder));
        pace.is_slow.load(Ordering::Relaxed).then_some(pace)
    }

    /// Whether reads of this device will most likely go to others.
    pub(super) fn is_slow(&self, layout: &Layout, number: u16) -> bool {
        self.slow(layout, number).is_some()
    }

    /// Whether a read should go to another device. Returns `false` from time to time for a slow device: that read
    /// measures whether it has recovered.
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
