//! The open transaction group: operations are inside of it while they change something, a commit closes it while
//! nobody is.
//!
//! Called by every operation that changes files, by commits, and by the watchdog ([`crate::engine`]), which asks
//! for the places of operations that do not come out.

use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::keeping::KeptRoom;
use crate::pointer::Txg;

/// So often a commit that waits looks whether it is to give up.
const LOOK: Duration = Duration::from_secs(1);

/// Where one thread is inside of a gate.
type PlaceOfThread = Mutex<Option<&'static Location<'static>>>;

/// The places of all living threads.
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

/// The open transaction group. Operations enter it; a commit moves it on while nobody is inside.
#[derive(Debug)]
pub struct Gate {
    open: RwLock<Txg>,
    /// Beginnings and ends of waits of commits for operations inside: odd while a commit waits.
    closings: AtomicU64,
    given_up: AtomicBool,
}

impl Gate {
    /// A gate whose first open txg is this one.
    #[must_use]
    pub fn new(open: Txg) -> Self {
        Self { open: RwLock::new(open), closings: AtomicU64::new(0), given_up: AtomicBool::new(false) }
    }

    /// Holds the open txg open: what changes under it belongs to it. Not to be entered twice by one
    /// thread: a commit may wait in between.
    #[track_caller]
    pub fn enter(&self) -> Entered<'_> {
        let open = self.open.read();
        Entered { open, _room: None, _inside: Inside::at(Location::caller()) }
    }

    /// Closes the open txg: runs `freeze` with it while nobody is inside, then opens the next one. `None` after
    /// [`Self::give_up`].
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

    /// The number of the commit that waits for operations inside, while one does.
    #[must_use]
    pub fn closing(&self) -> Option<u64> {
        let closings = self.closings.load(Ordering::Relaxed);
        (closings % 2 == 1).then_some(closings)
    }

    /// Lets a commit that waits end without closing anything.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }
}

/// Where threads are inside of a gate, in the source.
#[must_use]
pub fn places() -> Vec<String> {
    let places: Vec<_> = PLACES.lock().iter().filter_map(Weak::upgrade).collect();
    let mut all: Vec<String> = places.iter().filter_map(|place| place.lock().map(|at| at.to_string())).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The open txg is held open.
#[derive(Debug)]
pub struct Entered<'a> {
    open: RwLockReadGuard<'a, Txg>,
    /// What the operation may append to the kept log; given back behind the gate.
    _room: Option<KeptRoom<'a>>,
    _inside: Inside,
}

impl<'a> Entered<'a> {
    /// Which txg it is.
    #[must_use]
    pub fn txg(&self) -> Txg {
        *self.open
    }

    /// With this much room in the kept log.
    pub(super) fn with_room(self, room: Option<KeptRoom<'a>>) -> Self {
        Self { _room: room, ..self }
    }
}

/// This thread is inside.
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
        // A thread that ends has no place.
        let _ = PLACE.try_with(|own| *own.lock() = None);
    }
}
