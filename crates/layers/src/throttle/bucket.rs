//! The token bucket of one direction. Pure except for its own state: the time is passed in.
//!
//! The bucket stores the time until which all charged bytes are paid for. An idle bucket keeps a
//! credit of a fifth of a second, so that small requests do not wait at all.

use super::rate::Rate;
use parking_lot::Mutex;
use std::time::Duration;

const CREDIT: Duration = Duration::from_millis(200);
/// Maximum length of a single wait, seconds: a lower rate means "forever".
const FOREVER: f64 = 1e9;

/// A token bucket for one direction.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    paid_until: Mutex<Duration>,
}

impl Bucket {
    /// Charges `bytes` at `now` and returns how long the caller has to wait.
    pub(super) fn charge(&self, rate: Rate, bytes: u64, now: Duration) -> Duration {
        let cost = cost(rate, bytes);
        let mut paid_until = self.paid_until.lock();
        *paid_until = (*paid_until).max(now.saturating_sub(CREDIT)).saturating_add(cost);
        paid_until.saturating_sub(now)
    }

    /// Takes a charge back.
    pub(super) fn refund(&self, rate: Rate, bytes: u64) {
        let mut paid_until = self.paid_until.lock();
        *paid_until = paid_until.saturating_sub(cost(rate, bytes));
    }
}

/// Time in which `bytes` may be transferred.
fn cost(rate: Rate, bytes: u64) -> Duration {
    Duration::from_secs_f64((bytes as f64 / rate.per_second()).min(FOREVER))
}
