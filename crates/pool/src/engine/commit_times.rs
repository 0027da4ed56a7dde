//! Durations of a pool's commits, for its metrics.
//!
//! Written by each commit, read by status and metrics. The numbers of one reading may be one commit
//! apart.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets of the histogram: bucket `n` counts commits that took from 2^n to 2^(n+1) - 1
/// microseconds, the last one all longer ones.
const PLACES: usize = 30;

/// Counters of commit durations: total, last, and a histogram.
#[derive(Debug)]
pub(super) struct CommitTimes {
    total: AtomicU64,
    last: AtomicU64,
    places: [AtomicU64; PLACES],
}

/// Durations of commits since the import, microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitFigures {
    /// Sum of the durations of all commits.
    pub total: u64,
    /// Duration of the last commit.
    pub last: u64,
    /// Number of commits per bucket: bucket n from 2^n to 2^(n+1) - 1, the last one all longer
    /// ones.
    pub histogram: Vec<u64>,
}

impl Default for CommitTimes {
    fn default() -> Self {
        Self { total: AtomicU64::new(0), last: AtomicU64::new(0), places: [const { AtomicU64::new(0) }; PLACES] }
    }
}

impl CommitTimes {
    pub fn add(&self, time: Duration) {
        let time = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.total.fetch_add(time, Relaxed);
        self.last.store(time, Relaxed);
        let place = (time.max(1).ilog2() as usize).min(PLACES - 1);
        if let Some(place) = self.places.get(place) {
            place.fetch_add(1, Relaxed);
        }
    }

    pub fn figures(&self) -> CommitFigures {
        CommitFigures {
            total: self.total.load(Relaxed),
            last: self.last.load(Relaxed),
            histogram: self.places.iter().map(|place| place.load(Relaxed)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_land_in_their_places() {
        let times = CommitTimes::default();
        for micros in [0, 1, 1024, u64::MAX / 2] {
            times.add(Duration::from_micros(micros));
        }
        let figures = times.figures();
        assert_eq!(figures.last, u64::MAX / 2);
        assert_eq!([0, 10, PLACES - 1].map(|place| figures.histogram[place]), [2, 1, 1]);
    }
}
