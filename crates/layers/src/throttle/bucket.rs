//! One direction's bucket. Pure but for its own state: the time is passed in.
//!
//! The bucket remembers when all that was charged so far will have been paid for. An idle bucket
//! keeps a credit of a fifth of a second, so that small requests do not wait at all.

use super::rate::Rate;
use parking_lot::Mutex;
use std::time::Duration;

const CREDIT: Duration = Duration::from_millis(200);
/// The longest single wait: rates so low that more would come out only ever mean "forever".
const FOREVER: f64 = 1e9;

/// A bucket for one direction.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    paid_until: Mutex<Duration>,
}

impl Bucket {
    /// Charges `bytes` at `now` and answers how long the one who is charged has to wait.
    pub(super) fn charge(&self, rate: Rate, bytes: u64, now: Duration) -> Duration {
        let cost = Duration::from_secs_f64((bytes as f64 / rate.per_second()).min(FOREVER));
        let mut paid_until = self.paid_until.lock();
        *paid_until = (*paid_until).max(now.saturating_sub(CREDIT)).saturating_add(cost);
        paid_until.saturating_sub(now)
    }
}
