//! Time and random numbers: the only file of this crate that reads the clock of the machine and draws random
//! numbers, for waits between requests and for expiring credentials.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant, SystemTime};

/// Interval of polling a process that should end.
const LOOK: Duration = Duration::from_millis(10);

/// Returns the monotonic time, for deadlines and waits.
#[expect(clippy::disallowed_methods, reason = "deadlines of requests")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Returns the time of day, for expiration dates.
#[expect(clippy::disallowed_methods, reason = "credentials expire at a time of day")]
pub(crate) fn today() -> SystemTime {
    SystemTime::now()
}

/// Sleeps between two polls of a process.
#[expect(clippy::disallowed_methods, reason = "the standard library has no wait with a limit for a process")]
pub(crate) fn pause() {
    std::thread::sleep(LOOK);
}

/// Returns a random number from 0 to 1, which differs from those of other machines.
#[expect(clippy::disallowed_methods, reason = "so that many who wait do not come back at once")]
pub(crate) fn chance() -> f64 {
    let drawn = RandomState::new().hash_one(0_u8);
    drawn as f64 / u64::MAX as f64
}
