//! Time and chance: the one place of this crate that reads the clock of the machine and draws
//! numbers, for waits between requests and for credentials that expire.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant, SystemTime};

/// Between two looks at a process that should end.
const LOOK: Duration = Duration::from_millis(10);

/// Now, for deadlines and waits.
#[expect(clippy::disallowed_methods, reason = "deadlines of requests")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The time of day, for what says until when it is good.
#[expect(clippy::disallowed_methods, reason = "credentials expire at a time of day")]
pub(crate) fn today() -> SystemTime {
    SystemTime::now()
}

/// Waits between two looks at a process.
#[expect(clippy::disallowed_methods, reason = "the standard library has no wait with a limit for a process")]
pub(crate) fn pause() {
    std::thread::sleep(LOOK);
}

/// A number from 0 to 1 that other machines do not draw at the same moment.
#[expect(clippy::disallowed_methods, reason = "so that many who wait do not come back at once")]
pub(crate) fn chance() -> f64 {
    let drawn = RandomState::new().hash_one(0_u8);
    drawn as f64 / u64::MAX as f64
}
