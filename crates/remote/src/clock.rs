//! Time and chance: the one place of this crate that reads the clock of the machine and draws
//! numbers, for waits between requests alone.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

/// Now, for deadlines and waits.
#[expect(clippy::disallowed_methods, reason = "deadlines of requests")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// A number from 0 to 1 that other machines do not draw at the same moment.
#[expect(clippy::disallowed_methods, reason = "so that many who wait do not come back at once")]
pub(crate) fn chance() -> f64 {
    let drawn = RandomState::new().hash_one(0_u8);
    drawn as f64 / u64::MAX as f64
}
