//! A cage that nobody asks: it hears of the files only that its door knows, and counts again before
//! its books are used.
//!
//! The door says when (`Layer::rest`). While a cage rests, changes that others make to files that
//! no door knows are missing in its books. So whatever is booked, every look at the books, and
//! every file opened for writing comes here first ([`CageShared::attend`]): it waits until
//! everything has been counted. A count walks the tree, which wakes the layer below before anything
//! is read, so that what is changed from then on is heard. Reading goes on without it.
//!
//! A count must cost little, then: a cage of more than [`FILES`] files goes on hearing everything,
//! and so does one that was counted less than [`RARELY`] times as long ago as the last count took
//! that somebody waited for, or into which somebody may be writing.
//!
//! What is reported while it rests is not booked, as the count will see it; from the beginning of
//! the count on it is. Invariants: a cage begins its rest, and ends it, with [`Resting::counting`]
//! held; one count runs at a time.

use super::{CageShared, background, recount::Stopped};
use nacre_layers::rest_state::{AWAKE, DROWSY, RESTING, RestState, WAKING};
use nacre_vfs::Node;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// The most files of a cage that rests. To look at so many takes 0.1 s where the kernel has them in
/// memory, and a few seconds where a disk has to be asked.
const FILES: u64 = 10_000;

/// A rest begins at least so many times as long after a count as whoever used the cage after a rest
/// had to wait for one: what is counted because of rests costs a hundredth of a processor at most.
const RARELY: u32 = 100;
const RARELY_LEAST: Duration = Duration::from_secs(1);

/// See the file's head.
#[derive(Default)]
pub(super) struct Resting {
    rest: RestState,
    pub(super) counting: Mutex<Counting>,
}

/// When counts have ended, by the cage's clock, and how long they took.
#[derive(Default)]
pub(super) struct Counting {
    pub(super) ended: Duration,
    pub(super) took: Duration,
    /// Of the last one that somebody waited for: others give way to whatever else the machine does.
    waited: Option<(Duration, Duration)>,
}

impl Counting {
    pub(super) fn note(&mut self, ended: Duration, took: Duration, waited: bool) {
        (self.ended, self.took) = (ended, took);
        if waited {
            self.waited = Some((ended, took));
        }
    }
}

impl Resting {
    /// Whether what is reported need not be booked: it will be counted.
    pub(super) fn books_are_old(&self) -> bool {
        self.rest.is(RESTING)
    }

    /// A count begins: what is reported from now on has to be booked.
    pub(super) fn wakes(&self) {
        self.rest.turns(RESTING, WAKING);
    }

    /// That count has ended; `counted` where everything was counted.
    pub(super) fn woke(&self, counted: bool) {
        self.rest.turns(WAKING, if counted { AWAKE } else { RESTING });
    }
}

impl CageShared {
    /// Called before the books are changed or looked at. No lock is held.
    pub(super) fn attend(self: &Arc<CageShared>) {
        let rest = &self.resting.rest;
        if rest.is(AWAKE) || rest.turns(DROWSY, AWAKE) {
            return;
        }
        self.background.hurry();
        let mut counting = self.resting.counting.lock();
        if rest.is(AWAKE) {
            return;
        }
        match background::count_next(self, &mut counting, true) {
            Ok(()) | Err(Stopped::Cancelled) => {}
            Err(error @ Stopped::Root(_)) => {
                tracing::warn!(cage = self.name, ?error, "the files of a cage cannot be counted after a rest");
                self.background.doubt();
            }
        }
        rest.set(AWAKE);
    }

    /// See `Layer::rest`.
    pub(super) fn rest(&self, known: Option<&[Node]>) -> bool {
        let rest = &self.resting.rest;
        match known {
            None => {
                if self.resting.counting.try_lock().is_some_and(|counting| self.may_rest(&counting)) {
                    rest.turns(AWAKE, DROWSY);
                }
                self.below.rest(None)
            }
            Some([]) => {
                // Whoever counts needs to hear everything.
                let Some(counting) = self.resting.counting.try_lock() else { return false };
                let begins = self.may_rest(&counting) && rest.turns(DROWSY, RESTING);
                if !begins && !rest.is(RESTING) {
                    return false;
                }
                let rests = self.below.rest(known);
                if rests {
                    // It is counted before it matters.
                    self.background.no_doubt();
                } else if begins {
                    rest.set(AWAKE);
                }
                rests
            }
            Some(_) => !rest.is(AWAKE) && self.below.rest(known),
        }
    }

    fn may_rest(&self, counting: &Counting) -> bool {
        let long_ago = |(ended, took): (Duration, Duration)| {
            self.clock.now().saturating_sub(ended) >= RARELY_LEAST.max(took * RARELY)
        };
        counting.waited.is_none_or(long_ago)
            && self.ledger.sums().whole.inodes <= FILES
            && self.written.lock().is_empty()
            && self.doors.writeback.get().is_none_or(|writeback| writeback.files() == 0)
    }
}
