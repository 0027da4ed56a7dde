//! The doors of a cage: what they were promised, what they are told, and who waits for them.
//!
//! Part of [`super::CageShared`]. The layer attaches what a door brings; operations ask.

use super::writeback::WritebackPermit;
use nacre_layers::context::Waiting;
use nacre_vfs::{AttachedDoor, Invalidation};
use parking_lot::Mutex;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering},
    mpsc::Sender,
};

/// See the file's head.
pub(super) struct Doors {
    /// Where a door collects writes.
    pub(super) writeback: OnceLock<Arc<WritebackPermit>>,
    /// Who knows which files are open.
    pub(super) closes: AttachedDoor,
    /// Where changes that no door asked for are told.
    pub(super) notices: OnceLock<Mutex<Sender<Invalidation>>>,
    pub(super) waiting: Waiting,
    /// Who waits for a door to settle, but for announced writes.
    pub(super) waiters: Waiters,
}

impl Doors {
    pub(super) fn new(waiting: Waiting) -> Doors {
        Doors {
            writeback: OnceLock::new(),
            closes: AttachedDoor::default(),
            notices: OnceLock::new(),
            waiting,
            waiters: Waiters::default(),
        }
    }

    /// Tells of a change that no door asked for.
    pub(super) fn tell(&self, notice: Invalidation) {
        if let Some(door) = self.notices.get()
            && door.lock().send(notice).is_err()
        {
            tracing::debug!("nobody listens to a cage's notices any more");
        }
    }
}

/// The most that wait for a door to settle at once. What settles arrives in requests of which a
/// kernel has only so many under way (the door asks for more than these); were all of them waiting,
/// none would arrive.
const WAITERS: usize = 1536;

/// Counts those who wait.
#[derive(Default)]
pub(super) struct Waiters(AtomicUsize);

/// One of them.
pub(super) struct Waiter<'a>(&'a AtomicUsize);

impl Waiters {
    pub(super) fn try_acquire(&self) -> Option<Waiter<'_>> {
        let place = Waiter(&self.0);
        if self.0.fetch_add(1, Ordering::AcqRel) < WAITERS { Some(place) } else { None }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
