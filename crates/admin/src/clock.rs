//! Time: the one place of this crate that reads clocks and waits.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, seconds since 1970: for people, and for what is kept.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "what is told and kept says when it was")]
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The moment that something is measured from.
#[expect(clippy::disallowed_methods, reason = "measures how long work takes; nothing else depends on it")]
pub(crate) fn moment() -> Instant {
    Instant::now()
}

/// Lets time go by.
#[expect(clippy::disallowed_methods, reason = "how often whoever waits for a pool to free is looked after")]
pub(crate) fn pause(time: Duration) {
    std::thread::sleep(time);
}
