//! The gate, a lock of the open transaction group: operations hold it shared while they change
//! something, a commit closes the txg while none does.
//!
//! Called by every operation that changes files, by commits, and by the watchdog
//! ([`crate::engine`]), which asks for the source locations of operations that do not end.

use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::keeping::KeptRoom;
use crate::pointer::Txg;

/// Interval in which a waiting commit checks whether it is to give up.
const LOOK: Duration = Duration::from_secs(1);

/// Source location of the operation that one thread has inside of a gate.
type PlaceOfThread = Mutex<Option<&'static Location<'static>>>;

/// The locations of all living threads.
static PLACES: Mutex<Vec<Weak<PlaceOfThread>>> = Mutex::new(Vec::new());

thread_local! {
    static PLACE: Arc<PlaceOfThread> = {
        let place = Arc::new(Mutex::new(None));
        let mut places = PLACES.lock();
        places.retain(|place| place.strong_count() > 0);
        places.push(Arc::downgrade(&place));
        place
    };
}

/// The open transaction group. Operations enter it; a commit advances it while no operation is
/// inside.
#[derive(Debug)]
pub struct Gate {
    open: RwLock<Txg>,
    /// Counts beginnings and ends of commits' waits for operations: odd while a commit waits.
    closings: AtomicU64,
    given_up: AtomicBool,
}

impl Gate {
    /// A gate with this first open txg.
    #[must_use]
    pub fn new(open: Txg) -> Self {
        Self { open: RwLock::new(open), closings: AtomicU64::new(0), given_up: AtomicBool::new(false) }
    }

    /// Holds the open txg open: changes under it belong to that txg. A thread must not enter twice:
    /// a commit may wait in between.
    #[track_caller]
    pub fn enter(&self) -> Entered<'_> {
        let open = self.open.read();
        Entered { open, _room: None, _inside: Inside::at(Location::caller()) }
    }

    /// Closes the open txg: runs `freeze` with it while no operation is inside, then opens the next
    /// one. `None` after [`Self::give_up`].
    pub fn advance<R>(&self, freeze: impl FnOnce(Txg) -> R) -> Option<R> {
        self.closings.fetch_add(1, Ordering::Relaxed);
        let mut open = loop {
            if let Some(open) = self.open.try_write_for(LOOK) {
                break open;
            }
            if self.given_up.load(Ordering::Acquire) {
                self.closings.fetch_add(1, Ordering::Relaxed);
                return None;
            }
        };
        self.closings.fetch_add(1, Ordering::Relaxed);
        let answer = freeze(*open);
        open.0 += 1;
        Some(answer)
    }

    /// Identifies the commit that waits for operations, while one does.
    #[must_use]
    pub fn closing(&self) -> Option<u64> {
        let closings = self.closings.load(Ordering::Relaxed);
        (closings % 2 == 1).then_some(closings)
    }

    /// Makes a waiting commit return without closing the txg.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }
}

/// Source locations of all operations that are inside of a gate.
#[must_use]
pub fn places() -> Vec<String> {
    let places: Vec<_> = PLACES.lock().iter().filter_map(Weak::upgrade).collect();
    let mut all: Vec<String> = places.iter().filter_map(|place| place.lock().map(|at| at.to_string())).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Holds the open txg open until it is dropped.
#[derive(Debug)]
pub struct Entered<'a> {
    open: RwLockReadGuard<'a, Txg>,
    /// Room in the replay journal for the operation; returned after the gate is left.
    _room: Option<KeptRoom<'a>>,
    _inside: Inside,
}

impl<'a> Entered<'a> {
    /// The open txg.
    #[must_use]
    pub fn txg(&self) -> Txg {
        *self.open
    }

    /// Attaches this room in the replay journal.
    pub(super) fn with_room(self, room: Option<KeptRoom<'a>>) -> Self {
        Self { _room: room, ..self }
    }
}

/// Marks this thread as inside of a gate.
#[derive(Debug)]
struct Inside;

impl Inside {
    fn at(place: &'static Location<'static>) -> Self {
        PLACE.with(|own| *own.lock() = Some(place));
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // A thread that is ending has no location any more.
        let _ = PLACE.try_with(|own| *own.lock() = None);
    }
}
