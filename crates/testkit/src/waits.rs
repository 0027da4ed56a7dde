//! The one wait of tests: for a condition, with a deadline that no busy machine reaches.

use std::time::{Duration, Instant};

/// After this time a condition that does not come true is a failure: a machine with many times as many
/// programs as cores is slower than its figures by far.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Between two looks.
const LOOKS_EVERY: Duration = Duration::from_millis(2);

/// Waits until a condition is true, which is looked at again and again.
///
/// # Panics
/// Where it is not true within [`PATIENCE`].
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(LOOKS_EVERY);
    }
}
