//! Reservations of writes to one file, with their times.
//!
//! Kept by `writeback_group.rs` for each file that is open for cached writes. An admitted write may
//! take a while to begin: until then no settling can find it. So a reservation is kept for
//! [`GRACE`] at least, whatever a settling has found.
//!
//! Invariant: reservations are ordered by time, and few however many there were: those of one
//! moment are merged, and so are all old ones.

use std::time::{Duration, Instant};

/// Time within which an admitted writer may still wait for a processor.
pub(super) const GRACE: Duration = Duration::from_millis(60);
/// Reservations within this time are merged, with the time of the first.
const MOMENT: Duration = Duration::from_millis(15);

/// The reservations; see the head of this file.
#[derive(Clone, Debug, Default)]
pub(super) struct Promises(Vec<(Instant, u64)>);

impl Promises {
    /// Adds bytes.
    pub(super) fn add(&mut self, now: Instant, bytes: u64) {
        let old = self.0.iter().take_while(|(made, _)| is_old(*made, now)).count();
        if old > 1 {
            let sum = self.0.drain(1..old).map(|(_, bytes)| bytes).fold(0, u64::saturating_add);
            self.0.iter_mut().take(1).for_each(|(_, bytes)| *bytes = bytes.saturating_add(sum));
        }
        match self.0.last_mut().filter(|(made, _)| now.saturating_duration_since(*made) < MOMENT) {
            Some((_, there)) => *there = there.saturating_add(bytes),
            None => self.0.push((now, bytes)),
        }
    }

    /// Removes up to `most` arrived bytes; returns how many of them had been reserved.
    pub(super) fn take(&mut self, most: u64) -> u64 {
        let mut left = most;
        for (_, bytes) in &mut self.0 {
            let taken = left.min(*bytes);
            (*bytes, left) = (*bytes - taken, left - taken);
        }
        self.0.retain(|(_, bytes)| *bytes > 0);
        most - left
    }

    /// Ends old reservations; returns their bytes.
    pub(super) fn end_old(&mut self, now: Instant) -> u64 {
        let before = self.sum();
        self.0.retain(|(made, _)| !is_old(*made, now));
        before - self.sum()
    }

    /// Ends all reservations; returns their bytes.
    pub(super) fn end(&mut self) -> u64 {
        std::mem::take(&mut self.0).into_iter().map(|(_, bytes)| bytes).fold(0, u64::saturating_add)
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }
}

fn is_old(made: Instant, now: Instant) -> bool {
    now.saturating_duration_since(made) >= GRACE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_are_kept_until_they_are_old_and_are_few() {
        let start = Instant::now();
        let mut promises = Promises::default();
        for at in 0..10_000 {
            promises.add(start + Duration::from_millis(at), 1);
        }
        let now = start + Duration::from_millis(9_999);
        assert!(promises.0.len() < 9, "{}", promises.0.len());
        assert_eq!(promises.sum(), 10_000);
        let mut young = promises.clone();
        let old = young.end_old(now);
        assert!((9_920..=9_960).contains(&old), "{old}");
        // The oldest arrive first.
        assert_eq!(promises.take(old), old);
        assert_eq!(promises.end_old(now), 0);
        let young = young.sum();
        assert_eq!(promises.sum(), young);
        assert_eq!(promises.end_old(now + GRACE), young);
        assert_eq!(promises.take(5), 0);
        promises.add(now, 7);
        assert_eq!((promises.take(5), promises.end(), promises.sum()), (5, 2, 0));
    }
}
