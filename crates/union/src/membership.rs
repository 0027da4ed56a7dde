//! Changes of the list of branches, and the jobs that yield to them.
//!
//! `control.rs` changes the list while no operation is running; drains, tiers and moves, which run for long,
//! check whether a change is waiting and let it go first. Invariant: a job that yields holds no lock that the
//! change needs.

use crate::branches::Slots;
use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Coordinates changes of the list of branches.
pub(crate) struct Membership {
    /// Held while the list is being changed.
    pub(crate) changing: Mutex<Slots>,
    /// Number of changes that wait until no operation is running.
    wanted: Mutex<usize>,
    changed: Condvar,
}

/// Registers a waiting change for as long as this exists.
pub(crate) struct Wanted<'a>(&'a Membership);

impl Membership {
    pub(crate) fn new(slots: Slots) -> Membership {
        Membership { changing: Mutex::new(slots), wanted: Mutex::new(0), changed: Condvar::new() }
    }

    /// Asks all long jobs to yield.
    pub(crate) fn want(&self) -> Wanted<'_> {
        *self.wanted.lock() += 1;
        self.changed.notify_all();
        Wanted(self)
    }

    /// Whether a change is waiting: long jobs then abort their present step.
    pub(crate) fn is_wanted(&self) -> bool {
        *self.wanted.lock() > 0
    }

    /// Waits until no change is waiting.
    pub(crate) fn give_way(&self) {
        self.changed.wait_while(&mut self.wanted.lock(), |wanted| *wanted > 0);
    }

    /// Pauses; returns true, and at once, if a change is waiting.
    pub(crate) fn is_wanted_within(&self, pause: Duration) -> bool {
        let mut wanted = self.wanted.lock();
        self.changed.wait_while_for(&mut wanted, |wanted| *wanted == 0, pause);
        *wanted > 0
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        *self.0.wanted.lock() -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn whoever_is_at_something_long_gives_way_until_the_last_is_done() {
        let membership = Membership::new(Slots::default());
        membership.give_way();
        assert!(!membership.is_wanted_within(Duration::ZERO));
        let (one, other) = (membership.want(), membership.want());
        assert!(membership.is_wanted_within(Duration::MAX));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let long = scope.spawn(|| {
                membership.give_way();
                done.load(Ordering::SeqCst)
            });
            drop(one);
            std::thread::yield_now();
            done.store(true, Ordering::SeqCst);
            drop(other);
            assert!(long.join().unwrap(), "it did not wait for the last one");
        });
        assert!(!membership.is_wanted());
    }

    #[test]
    fn a_pause_ends_when_somebody_comes() {
        let membership = Membership::new(Slots::default());
        std::thread::scope(|scope| {
            let paused = scope.spawn(|| membership.is_wanted_within(Duration::MAX));
            let wanted = membership.want();
            assert!(paused.join().unwrap());
            drop(wanted);
        });
    }
}
