//! The only functions of this crate that read the clock or sleep.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Returns the current time, for rates per second and for deadlines of searches.
#[expect(clippy::disallowed_methods, reason = "rates between two looks, and the end of a search")]
pub fn now() -> Instant {
    Instant::now()
}

/// Sleeps between two samples or polls: for the interval that users asked for, or where no
/// notification exists.
#[expect(clippy::disallowed_methods, reason = "users say how often figures are shown")]
pub fn pause(time: Duration) {
    thread::sleep(time);
}
