//! Wait for a condition in tests, with a deadline that no busy machine reaches.

use std::time::{Duration, Instant};

/// Deadline of a wait: a machine with many times as many programs as cores is much slower than its
/// measured speed.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Interval between two checks.
const LOOKS_EVERY: Duration = Duration::from_millis(2);

/// Waits until a condition is true, checking it repeatedly.
///
/// # Panics
/// If it is not true within [`PATIENCE`].
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(LOOKS_EVERY);
    }
}
