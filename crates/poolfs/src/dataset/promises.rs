//! What announced writes to one file were promised, and when.
//!
//! Kept by `writeback_group.rs` for each file that is open for collected writes; nobody else uses
//! it. A write that was let in may take a while to begin: until then no settling can find it. So a
//! promise is kept for [`GRACE`] at least, whatever a settling has found.
//!
//! Invariant: promises are in the order of their times, few however many there were: those of one
//! moment are one, and so are all that are old.

use std::time::{Duration, Instant};

/// For so long a writer that was let in may not have got a processor.
pub(super) const GRACE: Duration = Duration::from_millis(60);
/// What is promised within this time counts as one promise, as old as the first.
const MOMENT: Duration = Duration::from_millis(15);

/// See the file's head.
#[derive(Clone, Debug, Default)]
pub(super) struct Promises(Vec<(Instant, u64)>);

impl Promises {
    /// So many bytes more.
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

    /// At most so many bytes have arrived; answers how many of them had been promised.
    pub(super) fn take(&mut self, most: u64) -> u64 {
        let mut left = most;
        for (_, bytes) in &mut self.0 {
            let taken = left.min(*bytes);
            (*bytes, left) = (*bytes - taken, left - taken);
        }
        self.0.retain(|(_, bytes)| *bytes > 0);
        most - left
    }

    /// Ends what is old; answers how many bytes that was.
    pub(super) fn end_old(&mut self, now: Instant) -> u64 {
        let before = self.sum();
        self.0.retain(|(made, _)| !is_old(*made, now));
        before - self.sum()
    }

    /// Ends all; answers how many bytes that was.
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
