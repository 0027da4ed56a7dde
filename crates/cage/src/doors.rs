//! Connections of a cage to its FUSE front ends: write-back, notices of changes, and waits for
//! closes.
//!
//! Part of [`super::CageShared`]. The layer attaches the front end's interfaces; operations use
//! them.

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

/// Interfaces to the FUSE front ends; see the file's head.
pub(super) struct Doors {
    /// State of write-back, once a front end has offered it.
    pub(super) writeback: OnceLock<Arc<WritebackPermit>>,
    /// Reports closes of open files.
    pub(super) closes: AttachedDoor,
    /// Files whose last name was removed while a front end had them open. Where files are opened
    /// without requests, the front end treats all files that its kernel knows as open, and hears of
    /// a close a moment later.
    pub(super) nameless: Mutex<Nameless>,
    /// Number of such files that are being closed in the layer below at this moment.
    pub(super) freeing: AtomicUsize,
    /// Channel for changes that no front end requested.
    pub(super) notices: OnceLock<Mutex<Sender<Invalidation>>>,
    pub(super) waiting: Waiting,
    /// Callers that wait for write-back, except for reserved writes.
    pub(super) waiters: Waiters,
}

/// Open files without a name; see [`Doors::nameless`].
#[derive(Default)]
pub(super) struct Nameless {
    files: HashSet<FileId>,
    /// Time at which the last file was added.
    last: Duration,
}

/// Length of one wait for the close of a file without a name, if the last name was removed within
/// [`LATELY`].
const FORGETTING: Duration = Duration::from_millis(500);
/// Number of such waits while a file is being freed below: freeing gigabytes takes seconds.
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

    /// Records that an open file has lost its last name.
    pub(super) fn lost_name(&self, id: FileId, now: Duration) {
        let mut nameless = self.nameless.lock();
        nameless.files.insert(id);
        nameless.last = now;
    }

    /// Records that such a file is closed, or has a name again.
    pub(super) fn not_nameless(&self, id: &FileId) {
        self.nameless.lock().files.remove(id);
    }

    /// Waits for the close of recently unlinked files, of all of them with `all`, else of any one;
    /// returns whether this happened. Called without any file's lock.
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

    /// Notifies the front end of a change that no front end requested.
    pub(super) fn tell(&self, notice: Invalidation) {
        if let Some(door) = self.notices.get()
            && door.lock().send(notice).is_err()
        {
            tracing::debug!("nobody listens to a cage's notices any more");
        }
    }
}

/// Maximum number of callers that wait for write-back at once. Dirty data arrives in requests, and
/// a kernel has a limited number of requests in flight (the front end asks for more than this
/// number); if all of them were waiting, none could arrive.
const WAITERS: usize = 1536;

/// Counter of waiting callers.
#[derive(Default)]
pub(super) struct Waiters(AtomicUsize);

/// A waiting caller; counted until it is dropped.
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

    /// A front end that hears of no close during a wait, except at the last question.
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

    /// Runs a wait; returns whether it found the file closed, and how many waits it took.
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
