//! Time: the one place of this crate that reads the clock and waits.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Now: figures are told per second, and searches have an end.
#[expect(clippy::disallowed_methods, reason = "rates between two looks, and the end of a search")]
pub fn now() -> Instant {
    Instant::now()
}

/// The time between two looks: what users asked for, or how often somebody is asked who tells
/// nothing by himself.
#[expect(clippy::disallowed_methods, reason = "users say how often figures are shown")]
pub fn pause(time: Duration) {
    thread::sleep(time);
}
