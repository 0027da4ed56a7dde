//! What the pool holds in memory that no commit has made durable yet, and who waits because it is
//! too much.
//!
//! Callers: files (they say what they hold, and wait before an operation begins), the tables of
//! datasets (dirty nodes), the committer (it is woken here).
//!
//! Invariants:
//! - Nobody waits here who holds the gate or any lock: a commit needs them to make room.
//! - Without a committer nobody waits: whoever runs the pool by hand commits by hand.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::PoolError;
use crate::patience;

/// The sum of what waits in memory for a commit.
#[derive(Debug)]
pub struct Throttle {
    held: AtomicU64,
    /// From here on a commit is due, bytes.
    begin: AtomicU64,
    /// From here on operations wait, bytes.
    most: AtomicU64,
    failed: OnceLock<PoolError>,
    /// A replay goes on in memory although the pool has failed: content becomes no frames.
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

/// Why the committer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// A commit is due: much is held, or somebody has asked.
    Due,
    /// The time is over.
    Time,
    /// It is to end.
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
    /// What is held now, bytes.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// More is held.
    pub fn grow(&self, bytes: u64) {
        let before = self.held.fetch_add(bytes, Ordering::Relaxed);
        let begin = self.begin.load(Ordering::Relaxed);
        if before < begin && before.saturating_add(bytes) >= begin {
            self.ask();
        }
    }

    /// Less is held.
    pub fn shrink(&self, bytes: u64) {
        let before = self.held.fetch_sub(bytes, Ordering::Relaxed);
        let most = self.most.load(Ordering::Relaxed);
        if before >= most && before.saturating_sub(bytes) < most {
            // Under the lock, so that nobody goes to sleep between his look and this.
            let _state = self.state.lock();
            self.room.notify_all();
        }
    }

    /// Lets an operation begin: waits while too much is held.
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

    /// Lets an operation begin that needs room of another kind, which commits make: waits until `has_room`
    /// says so. Without a committer nobody waits.
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

    /// There may be room for who waits in [`Self::admit_when`].
    pub fn made_room(&self) {
        // Under the lock, so that nobody goes to sleep between his look and this.
        let _state = self.state.lock();
        self.room.notify_all();
    }

    fn is_full(&self) -> bool {
        self.held() >= self.most.load(Ordering::Relaxed)
    }

    /// Whether the pool accepts anything.
    ///
    /// # Errors
    /// Why it does not.
    pub fn check(&self) -> Result<(), PoolError> {
        match self.failed.get() {
            Some(error) if !self.is_in_memory() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Whether a replay goes on in memory: whatever has failed, operations are accepted, and content becomes
    /// no frames. Called by the replay, while nobody else uses the pool.
    pub fn set_in_memory(&self, on: bool) {
        self.in_memory.store(on, Ordering::Relaxed);
    }

    /// Whether that is so.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.in_memory.load(Ordering::Relaxed)
    }

    /// From now on nothing is accepted. The first reason stays.
    pub fn fail(&self, error: &PoolError) {
        let _ = self.failed.set(error.clone());
        let _state = self.state.lock();
        self.room.notify_all();
    }

    /// Why nothing is accepted any more, if it is so.
    #[must_use]
    pub fn failed(&self) -> Option<PoolError> {
        self.failed.get().cloned()
    }

    /// A committer works: operations may wait for it. Bytes at which a commit is due, and at which
    /// operations wait.
    pub fn arm(&self, begin: u64, most: u64) {
        self.state.lock().stop = false;
        self.begin.store(begin, Ordering::Relaxed);
        self.most.store(most.max(begin), Ordering::Relaxed);
    }

    /// Other bounds, where the committer has not ended meanwhile.
    pub fn rearm(&self, begin: u64, most: u64) {
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        self.begin.store(begin, Ordering::Relaxed);
        self.most.store(most.max(begin), Ordering::Relaxed);
        // Whoever waits may go on by that, and what is too much already asks for its commit.
        state.due |= self.held() >= begin;
        self.room.notify_all();
    }

    /// The committer ends: nobody waits from now on.
    pub fn disarm(&self) {
        let mut state = self.state.lock();
        self.begin.store(u64::MAX, Ordering::Relaxed);
        self.most.store(u64::MAX, Ordering::Relaxed);
        state.stop = true;
        self.room.notify_all();
        self.work.notify_all();
    }

    /// Asks for a commit.
    pub fn ask(&self) {
        self.state.lock().due = true;
        self.work.notify_all();
    }

    /// Whether nobody commits, or will for long.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.state.lock().stop
    }

    /// Waits so long, or until the committer ends.
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

/// A part of what a throttle counts, which is given back when it goes.
#[derive(Debug, Default)]
pub struct Share {
    throttle: std::sync::Arc<Throttle>,
    bytes: AtomicU64,
}

impl Share {
    /// Nothing yet.
    #[must_use]
    pub fn new(throttle: std::sync::Arc<Throttle>) -> Self {
        Self { throttle, bytes: AtomicU64::new(0) }
    }

    /// What it is, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// From now on nothing is accepted by whom it belongs to: what is in memory must not be
    /// committed.
    pub fn fail(&self, error: &PoolError) {
        self.throttle.fail(error);
    }

    /// It grows.
    pub fn grow(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.throttle.grow(bytes);
    }

    /// It shrinks.
    pub fn shrink(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.throttle.shrink(bytes);
    }

    /// It becomes this. By one thread at a time.
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
