//! How long a wait lasts: the one place of this crate that asks the machine for a clock, and that
//! sleeps.
//!
//! Callers: the committer and its throttle, whoever waits for something to become free, the
//! simulated device. Invariant: what is answered or stored never depends on it but for "not in
//! time". The time of day is passed in (`engine::PoolConfig`, or an argument).

use std::time::{Duration, Instant};

/// Now, to measure a wait or to say until when one lasts.
#[expect(clippy::disallowed_methods, reason = "the one place: monotonic, and good for nothing but waits")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Rests between two looks at what cannot tell when it changes.
#[expect(clippy::disallowed_methods, reason = "the one place: its callers poll, with a limit")]
pub(crate) fn sleep(time: Duration) {
    std::thread::sleep(time);
}
