//! Retries: how long to wait between attempts, and when to give up. Pure, except for the clock.

use std::time::{Duration, Instant};

use crate::clock;

/// The first wait.
const FIRST: Duration = Duration::from_millis(50);
/// The longest wait, unless the store requests a longer one.
const LONGEST: Duration = Duration::from_secs(5);
/// The longest wait that a store can request.
const ASKED_MOST: Duration = Duration::from_secs(60);
/// Deadline of a request, with all its attempts.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
/// Deadline of each page of a list: commands list objects while a user waits.
pub(crate) const OF_LISTS: Duration = Duration::from_secs(10);

/// The attempts of one request.
pub(crate) struct Attempts {
    until: Instant,
    made: u32,
}

impl Attempts {
    pub(crate) fn new(deadline: Duration) -> Self {
        Self { until: clock::now() + deadline, made: 0 }
    }

    /// Whether an attempt has already been made.
    pub(crate) fn again(&self) -> bool {
        self.made > 0
    }

    /// Returns the wait before the next attempt; `None` if the deadline has passed then. `asked` is the wait that
    /// the store requested.
    pub(crate) fn wait(&mut self, asked: Option<Duration>) -> Option<Duration> {
        let wait = wait(self.made, asked, clock::chance());
        self.made += 1;
        (clock::now() + wait < self.until).then_some(wait)
    }
}

/// Returns the wait after `made` attempts: it doubles each time, half of it is random, and it is not shorter than
/// the store has requested.
fn wait(made: u32, asked: Option<Duration>, chance: f64) -> Duration {
    let grown = FIRST.saturating_mul(1 << made.min(16)).min(LONGEST);
    let own = grown.mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0);
    own.max(asked.unwrap_or_default().min(ASKED_MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_a_limit_and_are_not_shorter_than_asked_for() {
        assert_eq!(wait(0, None, 1.0), FIRST);
        assert_eq!(wait(0, None, 0.0), FIRST / 2);
        assert_eq!(wait(3, None, 1.0), FIRST * 8);
        assert_eq!(wait(40, None, 1.0), LONGEST);
        assert_eq!(wait(0, Some(Duration::from_secs(7)), 0.5), Duration::from_secs(7));
        assert_eq!(wait(0, Some(Duration::from_secs(7000)), 0.5), ASKED_MOST);
    }

    #[test]
    fn an_end_comes() {
        let mut attempts = Attempts { until: clock::now() + Duration::from_secs(5), made: 0 };
        assert!(!attempts.again());
        assert!(attempts.wait(None).is_some() && attempts.again());
        assert!(attempts.wait(Some(Duration::from_secs(9))).is_none());
    }
}
