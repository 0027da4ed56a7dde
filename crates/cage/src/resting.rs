//! The idle watch of a cage: it hears of changes only in files that its FUSE front end knows, and
//! recounts before its accounts are used.
//!
//! The front end decides when (`Layer::rest`). While a cage is idle, its accounts miss changes by
//! other processes to files that no front end knows. So every booking, every look at the accounts,
//! and every open for writing calls [`CageShared::attend`] first, which waits until everything has
//! been recounted. A recount walks the tree, which wakes the watch of the layer below before
//! anything is read, so that later changes are heard. Reading continues without it.
//!
//! Therefore a recount must be cheap. A cage keeps its full watch if it has more than [`FILES`]
//! files, if the last recount that a caller waited for ended less than [`RARELY`] times its
//! duration ago, or if files may be written to at the moment.
//!
//! Changes reported while the cage is idle are not booked, as the recount will see them; from the
//! start of the recount on they are. Invariants: a cage becomes idle, and ends that, with
//! [`Resting::counting`] held; one recount runs at a time.

use super::{CageShared, background, recount::Stopped};
use nacre_layers::rest_state::{AWAKE, DROWSY, RESTING, RestState, WAKING};
use nacre_vfs::Node;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// Maximum number of files of a cage that may become idle. Looking at so many takes 0.1 s where the
/// kernel has them in memory, and a few seconds where a disk has to be read.
const FILES: u64 = 10_000;

/// Minimum idle distance, in multiples of the last recount's duration that a caller waited for:
/// recounts because of idleness cost a hundredth of a processor at most.
const RARELY: u32 = 100;
const RARELY_LEAST: Duration = Duration::from_secs(1);

/// Idle state of a cage; see the file's head.
#[derive(Default)]
pub(super) struct Resting {
    rest: RestState,
    pub(super) counting: Mutex<Counting>,
}

/// Times of recounts: when the last one ended, by the cage's clock, and how long it took.
#[derive(Default)]
pub(super) struct Counting {
    pub(super) ended: Duration,
    pub(super) took: Duration,
    /// End and duration of the last recount that a caller waited for: other recounts run at low
    /// priority, so their duration means nothing.
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
    /// Whether the cage is idle: reported changes need not be booked, as a recount follows.
    pub(super) fn books_are_old(&self) -> bool {
        self.rest.is(RESTING)
    }

    /// Starts a recount: changes reported from now on have to be booked.
    pub(super) fn wakes(&self) {
        self.rest.turns(RESTING, WAKING);
    }

    /// Ends that recount; `counted` if everything was counted.
    pub(super) fn woke(&self, counted: bool) {
        self.rest.turns(WAKING, if counted { AWAKE } else { RESTING });
    }
}

impl CageShared {
    /// Ends idleness with a recount. Called without any lock before the accounts are changed or
    /// read.
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

    /// Implements `Layer::rest`.
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
                // A running recount needs to hear all changes.
                let Some(counting) = self.resting.counting.try_lock() else { return false };
                let begins = self.may_rest(&counting) && rest.turns(DROWSY, RESTING);
                if !begins && !rest.is(RESTING) {
                    return false;
                }
                let rests = self.below.rest(known);
                if rests {
                    // A recount precedes the next use of the accounts.
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
