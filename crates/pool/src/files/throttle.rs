//! Accounting of the pool's memory that waits for a commit, and the throttle of operations if it is
//! too much.
//!
//! Callers: files (they report what they hold, and wait before an operation begins), the tables of
//! datasets (dirty nodes), the committer (it is woken here).
//!
//! Invariants:
//! - An operation that waits here holds neither the gate nor a lock: a commit needs them to make
//!   room.
//! - Without a committer no operation waits: a caller that runs the pool by hand commits by hand.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::PoolError;
use crate::patience;

/// Sum of the memory that waits for a commit.
#[derive(Debug)]
pub struct Throttle {
    held: AtomicU64,
    /// Bytes at which a commit is due.
    begin: AtomicU64,
    /// Bytes at which operations wait.
    most: AtomicU64,
    failed: OnceLock<PoolError>,
    /// A replay continues in memory although the pool has failed: content is not written as frames.
    in_memory: AtomicBool,
    state: Mutex<ThrottleState>,
    /// Operations wait here for room.
    room: Condvar,
    /// The committer waits here for work.
    work: Condvar,
}

#[derive(Debug, Default)]
struct ThrottleState {
    due: bool,
    stop: bool,
}

/// Why the committer was woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// A commit is due: memory holds much, or one was requested.
    Due,
    /// The interval is over.
    Time,
    /// The committer is to end.
    Stop,
}

impl Default for Throttle {
    fn default() -> Self {
        Self {
            held: AtomicU64::new(0),
            begin: AtomicU64::new(u64::MAX),
            most: AtomicU64::new(u64::MAX),
            failed: OnceLock::new(),
            in_memory: AtomicBool::new(false),
            state: Mutex::default(),
            room: Condvar::new(),
            work: Condvar::new(),
        }
    }
}

impl Throttle {
    /// Bytes held now.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Adds to the memory held.
    pub fn grow(&self, bytes: u64) {
        let before = self.held.fetch_add(bytes, Ordering::Relaxed);
        let begin = self.begin.load(Ordering::Relaxed);
        if before < begin && before.saturating_add(bytes) >= begin {
            self.ask();
        }
    }

    /// Subtracts from the memory held.
    pub fn shrink(&self, bytes: u64) {
        let before = self.held.fetch_sub(bytes, Ordering::Relaxed);
        let most = self.most.load(Ordering::Relaxed);
        if before >= most && before.saturating_sub(bytes) < most {
            // Under the lock, so that no operation goes to sleep between its check and this.
            let _state = self.state.lock();
            self.room.notify_all();
        }
    }

    /// Admits an operation: waits while too much memory is held.
    ///
    /// # Errors
    /// Why the pool accepts nothing any more.
    pub fn admit(&self) -> Result<(), PoolError> {
        if self.is_full() {
            let mut state = self.state.lock();
            while self.is_full() && self.failed.get().is_none() {
                state.due = true;
                self.work.notify_all();
                self.room.wait(&mut state);
            }
        }
        self.check()
    }

    /// Admits an operation that needs another kind of room, which commits make: waits until
    /// `has_room` returns true. Without a committer it does not wait.
    ///
    /// # Errors
    /// Why the pool accepts nothing any more.
    pub fn admit_when(&self, has_room: impl Fn() -> bool) -> Result<(), PoolError> {
        let mut state = self.state.lock();
        while !has_room() && self.failed.get().is_none() && self.most.load(Ordering::Relaxed) != u64::MAX {
            state.due = true;
            self.work.notify_all();
            self.room.wait(&mut state);
        }
        self.check()
    }

    /// Wakes operations in [`Self::admit_when`]: there may be room.
    pub fn made_room(&self) {
        // Under the lock, so that no operation goes to sleep between its check and this.
        let _state = self.state.lock();
        self.room.notify_all();
    }

    fn is_full(&self) -> bool {
        self.held() >= self.most.load(Ordering::Relaxed)
    }

    /// Checks that the pool accepts operations.
    ///
    /// # Errors
    /// Why it does not.
    pub fn check(&self) -> Result<(), PoolError> {
        match self.failed.get() {
            Some(error) if !self.is_in_memory() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Sets whether a replay continues in memory: operations are accepted after any failure, and
    /// content is not written as frames. Called by the replay, before the pool is used otherwise.
    pub fn set_in_memory(&self, on: bool) {
        self.in_memory.store(on, Ordering::Relaxed);
    }

    /// Whether a replay continues in memory.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.in_memory.load(Ordering::Relaxed)
    }

    /// Fails the pool: nothing is accepted from now on. The first reason is kept.
    pub fn fail(&self, error: &PoolError) {
        let _ = self.failed.set(error.clone());
        let _state = self.state.lock();
        self.room.notify_all();
    }

    /// Reason why nothing is accepted any more, if so.
    #[must_use]
    pub fn failed(&self) -> Option<PoolError> {
        self.failed.get().cloned()
    }

    /// Notes that a committer runs: operations may wait for it. `begin`: bytes at which a commit is
    /// due, `most`: at which operations wait.
    pub fn arm(&self, begin: u64, most: u64) {
        self.state.lock().stop = false;
        self.begin.store(begin, Ordering::Relaxed);
        self.most.store(most.max(begin), Ordering::Relaxed);
    }

    /// Sets other bounds, unless the committer has ended.
    pub fn rearm(&self, begin: u64, most: u64) {
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        self.begin.store(begin, Ordering::Relaxed);
        self.most.store(most.max(begin), Ordering::Relaxed);
        // Waiting operations may continue, and too much held memory asks for its commit.
        state.due |= self.held() >= begin;
        self.room.notify_all();
    }

    /// Notes that the committer ends: no operation waits from now on.
    pub fn disarm(&self) {
        let mut state = self.state.lock();
        self.begin.store(u64::MAX, Ordering::Relaxed);
        self.most.store(u64::MAX, Ordering::Relaxed);
        state.stop = true;
        self.room.notify_all();
        self.work.notify_all();
    }

    /// Requests a commit.
    pub fn ask(&self) {
        self.state.lock().due = true;
        self.work.notify_all();
    }

    /// Whether no committer runs, or it is about to end.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.state.lock().stop
    }

    /// Waits for so long, or until the committer ends.
    pub fn pause(&self, time: Duration) {
        let until = patience::now() + time;
        let mut state = self.state.lock();
        while !state.stop && !self.work.wait_until(&mut state, until).timed_out() {}
    }

    /// Waits until a commit is due or the time is over.
    pub fn wait(&self, time: Duration) -> Woken {
        let until = patience::now() + time;
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return Woken::Stop;
            }
            if std::mem::take(&mut state.due) {
                return Woken::Due;
            }
            if self.work.wait_until(&mut state, until).timed_out() {
                return if state.stop { Woken::Stop } else { Woken::Time };
            }
        }
    }
}

/// A part of a throttle's sum, which is subtracted when it is dropped.
#[derive(Debug, Default)]
pub struct Share {
    throttle: std::sync::Arc<Throttle>,
    bytes: AtomicU64,
}

impl Share {
    /// An empty share.
    #[must_use]
    pub fn new(throttle: std::sync::Arc<Throttle>) -> Self {
        Self { throttle, bytes: AtomicU64::new(0) }
    }

    /// Bytes in this share.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Fails the pool: the memory that this share counts must not be committed.
    pub fn fail(&self, error: &PoolError) {
        self.throttle.fail(error);
    }

    /// Adds bytes.
    pub fn grow(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.throttle.grow(bytes);
    }

    /// Subtracts bytes.
    pub fn shrink(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.throttle.shrink(bytes);
    }

    /// Sets the bytes. Called by one thread at a time.
    pub fn become_now(&self, bytes: u64) {
        let before = self.bytes();
        if bytes > before {
            self.grow(bytes - before);
        } else {
            self.shrink(before - bytes);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.throttle.shrink(self.bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn operations_wait_for_room_and_the_committer_for_work() {
        let throttle = Arc::new(Throttle::default());
        let share = Share::new(Arc::clone(&throttle));
        share.grow(1000);
        throttle.admit().unwrap();
        throttle.arm(100, 500);
        let waiting = {
            let throttle = Arc::clone(&throttle);
            std::thread::spawn(move || throttle.admit())
        };
        assert_eq!(throttle.wait(Duration::from_secs(600)), Woken::Due);
        share.shrink(501);
        waiting.join().unwrap().unwrap();
        assert_eq!(throttle.held(), 499);
        drop(share);
        assert_eq!(throttle.held(), 0);
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
        throttle.disarm();
        assert_eq!(throttle.wait(Duration::from_secs(600)), Woken::Stop);
    }

    #[test]
    fn wider_bounds_let_in_who_waits_unless_it_has_ended() {
        let throttle = Arc::new(Throttle::default());
        throttle.grow(100);
        throttle.arm(10, 50);
        let waiting = {
            let throttle = Arc::clone(&throttle);
            std::thread::spawn(move || throttle.admit())
        };
        assert_eq!(throttle.wait(Duration::from_secs(600)), Woken::Due);
        throttle.rearm(200, 300);
        waiting.join().unwrap().unwrap();
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
        throttle.rearm(20, 300);
        assert_eq!(throttle.wait(Duration::from_secs(600)), Woken::Due);
        throttle.disarm();
        throttle.rearm(1, 1);
        throttle.admit().unwrap();
    }

    #[test]
    fn whoever_waits_hears_of_a_failure() {
        let throttle = Arc::new(Throttle::default());
        throttle.arm(1, 1);
        throttle.grow(1);
        let waiting = {
            let throttle = Arc::clone(&throttle);
            std::thread::spawn(move || throttle.admit())
        };
        throttle.fail(&PoolError::NoSpace);
        assert!(matches!(waiting.join().unwrap(), Err(PoolError::NoSpace)));
        assert!(throttle.check().is_err());
    }
}
