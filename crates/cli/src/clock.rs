//! The only functions of this crate that read the clock or sleep.

use std::{
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Returns the current time, for rates per second and for deadlines of searches.
#[expect(clippy::disallowed_methods, reason = "rates between two looks, and the end of a search")]
pub fn now() -> Instant {
    Instant::now()
}

/// Returns the seconds since 1970, for records of when something was made.
#[expect(clippy::disallowed_methods, reason = "workspaces show their age")]
pub fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Sleeps between two samples or polls: for the interval that users asked for, or where no
/// notification exists.
#[expect(clippy::disallowed_methods, reason = "users say how often figures are shown")]
pub fn pause(time: Duration) {
    thread::sleep(time);
}
