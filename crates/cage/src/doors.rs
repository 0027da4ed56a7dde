//! The doors of a cage: what they were promised, what they are told, and who waits for them.
//!
//! Part of [`super::CageShared`]. The layer attaches what a door brings; operations ask.

use super::writeback::WritebackPermit;
use nacre_layers::context::Waiting;
use nacre_vfs::{AttachedDoor, FileId, Invalidation};
use parking_lot::Mutex;
use std::{
    collections::HashSet,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc::Sender,
    },
    time::Duration,
};

/// See the file's head.
pub(super) struct Doors {
    /// Where a door collects writes.
    pub(super) writeback: OnceLock<Arc<WritebackPermit>>,
    /// Who knows which files are open.
    pub(super) closes: AttachedDoor,
    /// Files whose last name has gone while a door had them open. Where files are opened without
    /// requests, it has all that its kernel knows, and hears a moment later that one was closed.
    pub(super) nameless: Mutex<Nameless>,
    /// How many of them are being closed below at this moment.
    pub(super) freeing: AtomicUsize,
    /// Where changes that no door asked for are told.
    pub(super) notices: OnceLock<Mutex<Sender<Invalidation>>>,
    pub(super) waiting: Waiting,
    /// Who waits for a door to settle, but for announced writes.
    pub(super) waiters: Waiters,
}

/// See [`Doors::nameless`].
#[derive(Default)]
pub(super) struct Nameless {
    files: HashSet<FileId>,
    /// When the last one came to be.
    last: Duration,
}

/// How long a door is waited for that may be about to hear that such a file was closed, if the name
/// went so long ago at most.
const FORGETTING: Duration = Duration::from_millis(500);
/// How often so long, while such a file is being freed below: gigabytes take seconds.
const FREEING: usize = 120;
const LATELY: Duration = Duration::from_secs(1);

impl Doors {
    pub(super) fn new(waiting: Waiting) -> Doors {
        Doors {
            writeback: OnceLock::new(),
            closes: AttachedDoor::default(),
            nameless: Mutex::default(),
            freeing: AtomicUsize::new(0),
            notices: OnceLock::new(),
            waiting,
            waiters: Waiters::default(),
        }
    }

    /// A file has lost its last name while it is open.
    pub(super) fn lost_name(&self, id: FileId, now: Duration) {
        let mut nameless = self.nameless.lock();
        nameless.files.insert(id);
        nameless.last = now;
    }

    /// It is closed, or has a name again.
    pub(super) fn not_nameless(&self, id: &FileId) {
        self.nameless.lock().files.remove(id);
    }

    /// Waits for the close of a file whose last name has gone just now, for `all` of them or for any
    /// one; whether there was one. Without the lock of any file.
    pub(super) fn await_forgotten(&self, now: Duration, all: bool) -> bool {
        let unasked = self.writeback.get().is_some_and(|writeback| writeback.opens_unasked());
        let before = {
            let nameless = self.nameless.lock();
            let lately = now.saturating_sub(nameless.last) < LATELY;
            if unasked && lately { nameless.files.len() } else { 0 }
        };
        if before == 0 {
            return false;
        }
        let mut closed = || {
            let left = self.nameless.lock().files.len();
            left == 0 || !all && left < before
        };
        (0..FREEING)
            .any(|_| self.closes.wait_closed(&[], FORGETTING, &mut closed) || self.freeing.load(Ordering::Acquire) == 0)
            && closed()
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

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_vfs::{OpenFileHost, WritebackHost};
    use std::sync::{Weak, atomic::AtomicBool};

    /// A door that hears of no close while it is waited for, but at the last question.
    struct Late {
        doors: Weak<Doors>,
        asked: AtomicUsize,
        freed_after: usize,
        lets_go: AtomicBool,
    }

    impl OpenFileHost for Late {
        fn wait_closed(&self, _files: &[FileId], _most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
            let doors = self.doors.upgrade().unwrap();
            if self.asked.fetch_add(1, Ordering::SeqCst) + 1 == self.freed_after {
                if self.lets_go.load(Ordering::SeqCst) {
                    doors.not_nameless(&ID);
                }
                doors.freeing.store(0, Ordering::SeqCst);
            }
            closed()
        }
    }

    impl WritebackHost for Late {
        fn dirty_limit(&self, _files: usize) -> u64 {
            0
        }
        fn lets_in(&self) {}
        fn recall(&self) {}
        fn flush(&self) -> nacre_vfs::Result<()> {
            Ok(())
        }
        fn opens_unasked(&self) -> bool {
            true
        }
    }

    const ID: FileId = FileId { fs: 1, ino: 2, generation: 0 };

    /// Whether somebody who waits finds the file closed, and how often he waited.
    fn waited(freeing: usize, freed_after: usize, lets_go: bool) -> (bool, usize) {
        let doors = Arc::new(Doors::new(nacre_layers::context::simply_waiting()));
        let late = Arc::new(Late {
            doors: Arc::downgrade(&doors),
            asked: AtomicUsize::new(0),
            freed_after,
            lets_go: AtomicBool::new(lets_go),
        });
        let host: Arc<dyn OpenFileHost> = Arc::clone(&late) as Arc<dyn OpenFileHost>;
        doors.closes.attach(Arc::downgrade(&host));
        assert!(
            doors.writeback.set(Arc::new(WritebackPermit::new(Arc::clone(&late) as Arc<dyn WritebackHost>))).is_ok()
        );
        doors.lost_name(ID, Duration::ZERO);
        doors.freeing.store(freeing, Ordering::SeqCst);
        (doors.await_forgotten(Duration::ZERO, true), late.asked.load(Ordering::SeqCst))
    }

    #[test]
    fn a_file_that_is_being_freed_is_waited_for_and_one_that_others_have_open_is_not() {
        assert_eq!(waited(1, 5, true), (true, 5));
        assert_eq!(waited(0, 5, true), (false, 1));
        assert_eq!(waited(1, 5, false), (false, 5));
        assert_eq!(waited(1, FREEING + 1, true), (false, FREEING));
    }
}
