//! A cage that nobody asks: it hears of the files only that its door knows, and counts again before its books are used.
//!
//! The door says when (`Layer::rest`). While a cage rests, changes that others make to files that no door knows are missing in its books. So whatever
//! is booked, every look at the books, and every file opened for writing comes here first ([`Shared::attend`]): it waits until everything has been counted.
//! A count walks the tree, which wakes the layer below before anything is read, so that what is changed from then on is heard. Reading goes on without it.
//!
//! A count must cost little, then: a cage of more than [`FILES`] files goes on hearing everything, and so does one whose last count ended less than
//! [`RARELY`] times as long ago as it took, or into which somebody may be writing.
//!
//! Invariants: a cage begins its rest, and ends it, with [`Resting::counting`] held; one count runs at a time.

use super::{background, books::Shared, recount::Stopped};
use crate::vigil::{AWAKE, DROWSY, RESTING, Vigil};
use nacre_vfs::Node;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// The most files of a cage that rests. To look at so many takes 0.1 s where the kernel has them in memory, and a few seconds where a disk has to be asked.
const FILES: u64 = 10_000;

/// A rest begins at least so many times later than the last count ended as that took: what is counted because of rests costs a hundredth of a processor at most.
const RARELY: u32 = 100;
const RARELY_LEAST: Duration = Duration::from_secs(1);

/// See the file's head.
#[derive(Default)]
pub(super) struct Resting {
    vigil: Vigil,
    pub(super) counting: Mutex<Counting>,
}

/// The last count.
#[derive(Default)]
pub(super) struct Counting {
    pub(super) ended: Duration,
    pub(super) took: Duration,
}

impl Resting {
    /// Everything has been counted, and is heard of since before that began.
    pub(super) fn counted(&self, _counting: &mut Counting) {
        self.vigil.turns(RESTING, AWAKE);
    }
}

impl Shared {
    /// Called before the books are changed or looked at. No lock is held.
    pub(super) fn attend(self: &Arc<Shared>) {
        let vigil = &self.resting.vigil;
        if vigil.is(AWAKE) || vigil.turns(DROWSY, AWAKE) {
            return;
        }
        self.background.hurry();
        let mut counting = self.resting.counting.lock();
        if !vigil.is(RESTING) {
            return;
        }
        match background::count_next(self, &mut counting, true) {
            Ok(()) | Err(Stopped::Cancelled) => {}
            Err(error @ Stopped::Root(_)) => {
                tracing::warn!(cage = self.name, ?error, "the files of a cage cannot be counted after a rest");
                self.background.doubt();
            }
        }
        vigil.set(AWAKE);
    }

    /// See `Layer::rest`.
    pub(super) fn rest(&self, known: Option<&[Node]>) -> bool {
        let vigil = &self.resting.vigil;
        match known {
            None => {
                if self.resting.counting.try_lock().is_some_and(|counting| self.may_rest(&counting)) {
                    vigil.turns(AWAKE, DROWSY);
                }
                self.below.rest(None)
            }
            Some([]) => {
                // Whoever counts needs to hear everything.
                let Some(counting) = self.resting.counting.try_lock() else { return false };
                let begins = self.may_rest(&counting) && vigil.turns(DROWSY, RESTING);
                if !begins && !vigil.is(RESTING) {
                    return false;
                }
                let rests = self.below.rest(known);
                if begins && !rests {
                    vigil.set(AWAKE);
                }
                rests
            }
            Some(_) => !vigil.is(AWAKE) && self.below.rest(known),
        }
    }

    fn may_rest(&self, counting: &Counting) -> bool {
        let since = self.clock.now().saturating_sub(counting.ended);
        since >= RARELY_LEAST.max(counting.took * RARELY)
            && self.ledger.sums().whole.inodes <= FILES
            && !self.background.is_doubtful()
            && self.written.lock().is_empty()
            && self.collecting.get().is_none_or(|collecting| collecting.held() == 0)
    }
}
