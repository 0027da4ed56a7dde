//! Notifies waiting threads of each close of a file: at RELEASE, at FORGET, or when the front end closes a kept file
//! itself.
//!
//! Notified by `ops/opens.rs` and `door.rs` when the layer's file is dropped; used by `door.rs` for layers and for
//! the owner of the mount. Costs one read of a counter while no thread waits. Invariant: a waiter that has seen a
//! file open after it registered is notified of its close.

use parking_lot::{Condvar, Mutex};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// Wait queue for closes of files.
#[derive(Default)]
pub(crate) struct Closes {
    waiting: AtomicUsize,
    heard: Mutex<u64>,
    again: Condvar,
}

impl Closes {
    /// Notifies the waiters: a file has been closed, and the layer's file has been dropped.
    pub fn heard(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            *self.heard.lock() += 1;
            self.again.notify_all();
        }
    }

    /// Waits until `closed` returns true, for `most` at most; calls it again after each close. Returns its last
    /// result.
    #[expect(clippy::disallowed_methods, reason = "the end of a wait for a condition")]
    pub fn wait(&self, most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        let until = Instant::now() + most;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let done = loop {
            let seen = *self.heard.lock();
            // Without the lock: `closed` may take locks of the layer.
            if closed() {
                break true;
            }
            let mut heard = self.heard.lock();
            let mut late = false;
            while *heard == seen && !late {
                late = self.again.wait_until(&mut heard, until).timed_out();
            }
            let unheard = *heard == seen;
            drop(heard);
            // Endless closes of other files do not prolong the wait.
            if unheard || Instant::now() >= until {
                break closed();
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32},
    };

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn who_waits_is_asked_after_each_close_and_at_the_end() {
        let (closes, open, asked) = (Arc::new(Closes::default()), AtomicU32::new(2), AtomicU32::new(0));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                closes.wait(LONG, &mut || {
                    asked.fetch_add(1, Ordering::SeqCst);
                    open.load(Ordering::SeqCst) == 0
                })
            });
            for left in [1, 0] {
                let before = asked.load(Ordering::SeqCst);
                while asked.load(Ordering::SeqCst) == before && left == 1 && before == 0 {
                    std::thread::yield_now();
                }
                open.store(left, Ordering::SeqCst);
                closes.heard();
            }
            assert!(waiting.join().unwrap());
        });
        assert!(asked.load(Ordering::SeqCst) >= 1);
        assert!(!closes.wait(Duration::ZERO, &mut || false));
        assert!(closes.wait(Duration::ZERO, &mut || true));
        assert_eq!(closes.waiting.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn closes_without_end_do_not_make_it_longer() {
        let closes = Closes::default();
        // Another file is closed at each check.
        assert!(!closes.wait(Duration::ZERO, &mut || {
            closes.heard();
            false
        }));
    }

    #[test]
    fn a_close_between_the_question_and_the_wait_is_heard() {
        let (closes, open) = (Closes::default(), AtomicBool::new(true));
        // The file is closed right after it was seen open.
        let closed = closes.wait(LONG, &mut || {
            let was_open = open.swap(false, Ordering::SeqCst);
            if was_open {
                closes.heard();
            }
            !was_open
        });
        assert!(closed);
    }
}
