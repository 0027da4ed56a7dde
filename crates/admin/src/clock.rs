//! Time: the only module of this crate that reads clocks and sleeps.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, seconds since 1970: for messages and for stored times.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "what is told and kept says when it was")]
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Starts a measurement of time.
#[expect(clippy::disallowed_methods, reason = "measures how long work takes; nothing else depends on it")]
pub(crate) fn moment() -> Instant {
    Instant::now()
}

/// Sleeps for this time.
#[expect(clippy::disallowed_methods, reason = "how often whoever waits for a pool to free is looked after")]
pub(crate) fn pause(time: Duration) {
    std::thread::sleep(time);
}
