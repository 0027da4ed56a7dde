//! Clock and sleeping: the only module of this crate that reads a clock and sleeps.
//!
//! Callers: the committer and its throttle, waits with a deadline, the simulated device. Invariant: results and
//! stored data never depend on it, except for timeouts. The time of day is passed in (`engine::PoolConfig`, or an
//! argument).

use std::time::{Duration, Instant};

/// The current monotonic time, for measuring a wait or computing a deadline.
#[expect(clippy::disallowed_methods, reason = "the one place: monotonic, and good for nothing but waits")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Sleeps between two polls of a condition that has no notification.
#[expect(clippy::disallowed_methods, reason = "the one place: its callers poll, with a limit")]
pub(crate) fn sleep(time: Duration) {
    std::thread::sleep(time);
}
