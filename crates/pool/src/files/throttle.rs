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

use super::flush_pace::FlushPace;
use super::room_pace::{self, AGAIN, LONGEST, RoomPace, Turn};
use crate::error::PoolError;
use crate::patience;

/// Sum of the memory that waits for a commit.
#[derive(Debug)]
pub struct Throttle {
    held: AtomicU64,
    /// The part of `held` that is content of files.
    content: AtomicU64,
    /// Bytes at which a commit is due.
    begin: AtomicU64,
    /// Bytes at which operations wait.
    most: AtomicU64,
    failed: OnceLock<PoolError>,
    /// A replay continues in memory although the pool has failed: content is not written as frames.
    in_memory: AtomicBool,
    flush_pace: FlushPace,
    room_pace: RoomPace,
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
    /// The committer is at work.
    busy: bool,
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
            content: AtomicU64::new(0),
            begin: AtomicU64::new(u64::MAX),
            most: AtomicU64::new(u64::MAX),
            failed: OnceLock::new(),
            in_memory: AtomicBool::new(false),
            flush_pace: FlushPace::default(),
            room_pace: RoomPace::default(),
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

    /// Bytes of content of files that is held now.
    pub(super) fn content(&self) -> u64 {
        self.content.load(Ordering::Relaxed)
    }

    /// Room that content in memory needs, bytes; without content for which the last commit has found none.
    pub(super) fn needed_room(&self) -> u64 {
        self.room_pace.needed_now()
    }

    /// Slows writers while a flush is in progress, until the returned value is dropped: see the head of `flush_pace`.
    pub(super) fn slow_writers(&self) -> SlowedWriters<'_> {
        self.flush_pace.begin(self.content());
        SlowedWriters { throttle: self }
    }

    /// Waits while a flush is in progress and memory holds too much content. Not to be called under a lock that a
    /// flush needs, nor inside the gate.
    pub(super) fn await_flush(&self) {
        // After a failure nothing is flushed any more.
        self.flush_pace.await_turn(|| if self.failed.get().is_some() { 0 } else { self.content() });
    }

    /// Notes that a flush has stored so many bytes of content. Writers notice it at the next [`Self::flushed_part`].
    pub(super) fn stored_content(&self, bytes: u64) {
        self.flush_pace.stored(bytes);
    }

    /// Notes that a flush has read so many bytes into memory in order to store them.
    pub(super) fn filled_content(&self, bytes: u64) {
        self.flush_pace.filled(bytes);
    }

    /// Wakes writers that wait for a flush: a part of the content is stored.
    pub(super) fn flushed_part(&self) {
        self.flush_pace.wake();
    }

    /// Notes that a txg was closed, while no operation is running: content that its flush has left in memory found
    /// no room, and waits for later commits without slowing other writers; what the txg has replaced is being freed.
    pub fn closed_txg(&self) {
        self.room_pace.closed_txg();
        // What is written from now on belongs to the next txg, for which a commit can be requested.
        self.state.lock().busy = false;
    }

    /// Whether a committer runs that decides when txgs are closed, and memory for changes is left: content that finds
    /// no room can wait.
    pub(super) fn is_at_ease(&self) -> bool {
        self.most.load(Ordering::Relaxed) != u64::MAX && !self.is_full()
    }

    /// Slows a writer before it adds content, if there is little room for the content in memory: see the head of
    /// `room_pace`. `room` returns the bytes that can be stored before the cleaner has to make room. Not to be called
    /// under a lock that a commit needs. Without a committer it does not wait.
    pub(super) fn slow_down(&self, room: impl Fn() -> u64) {
        if self.room_pace.is_little() || self.most.load(Ordering::Relaxed) == u64::MAX {
            return;
        }
        let until = patience::now() + LONGEST;
        loop {
            let (needed, room) = (self.room_pace.needed_now(), room());
            if room_pace::is_due(needed, room) {
                self.ask_if_idle();
            }
            let now = patience::now();
            match room_pace::turn(needed, room) {
                Turn::Now => return,
                Turn::After(delay) => {
                    let at = self.room_pace.reserve(now, delay);
                    return patience::sleep(at.saturating_duration_since(now));
                }
                Turn::NoRoom if now >= until || self.failed.get().is_some() => return,
                Turn::NoRoom => patience::sleep(AGAIN),
            }
        }
    }

    /// Notes that so many stored bytes were replaced, which the commit of this txg frees: if that is much of the room
    /// that is left, the commit is due. `room` is as in [`Self::slow_down`], and is called rarely.
    pub(super) fn replaced(&self, bytes: u64, room: impl Fn() -> u64) {
        let Some(replaced) = self.room_pace.replaced(bytes) else { return };
        if self.most.load(Ordering::Relaxed) != u64::MAX && room_pace::is_due(replaced, room()) {
            self.ask_if_idle();
        }
    }

    /// Requests a commit, unless one is in progress.
    fn ask_if_idle(&self) {
        let mut state = self.state.lock();
        if !state.busy && !state.due {
            state.due = true;
            self.work.notify_all();
        }
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
        {
            let _state = self.state.lock();
            self.room.notify_all();
        }
        self.flush_pace.wake();
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
        state.busy = false;
        let woken = loop {
            if state.stop {
                break Woken::Stop;
            }
            if std::mem::take(&mut state.due) {
                break Woken::Due;
            }
            if self.work.wait_until(&mut state, until).timed_out() {
                break if state.stop { Woken::Stop } else { Woken::Time };
            }
        };
        state.busy = woken != Woken::Stop;
        woken
    }
}

/// Writers are slowed by a flush until this is dropped.
pub(crate) struct SlowedWriters<'a> {
    throttle: &'a Throttle,
}

impl Drop for SlowedWriters<'_> {
    fn drop(&mut self) {
        self.throttle.flush_pace.end();
    }
}

/// The sum of a throttle that a share is a part of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sum {
    /// Memory for changes.
    #[default]
    Held,
    /// The same, for content of files.
    Content,
    /// Room that content in memory needs on the devices.
    Room,
}

/// A part of a throttle's sum, which is subtracted when it is dropped.
#[derive(Debug, Default)]
pub struct Share {
    throttle: std::sync::Arc<Throttle>,
    sum: Sum,
    bytes: AtomicU64,
}

impl Share {
    /// An empty share.
    #[must_use]
    pub fn new(throttle: std::sync::Arc<Throttle>) -> Self {
        Self::of(Sum::Held, throttle)
    }

    /// An empty share of the memory for content of files.
    pub(super) fn of_content(throttle: std::sync::Arc<Throttle>) -> Self {
        Self::of(Sum::Content, throttle)
    }

    /// An empty share of the room that content in memory will need when a commit stores it.
    pub(super) fn of_room(throttle: std::sync::Arc<Throttle>) -> Self {
        Self::of(Sum::Room, throttle)
    }

    fn of(sum: Sum, throttle: std::sync::Arc<Throttle>) -> Self {
        Self { throttle, sum, bytes: AtomicU64::new(0) }
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
        match self.sum {
            Sum::Held => self.throttle.grow(bytes),
            Sum::Content => {
                self.throttle.content.fetch_add(bytes, Ordering::Relaxed);
                self.throttle.grow(bytes);
            }
            Sum::Room => self.throttle.room_pace.need(bytes),
        }
    }

    /// Subtracts bytes.
    pub fn shrink(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.take(bytes);
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

impl Share {
    /// Subtracts bytes from the throttle's sum.
    fn take(&self, bytes: u64) {
        match self.sum {
            Sum::Held => self.throttle.shrink(bytes),
            Sum::Content => {
                self.throttle.content.fetch_sub(bytes, Ordering::Relaxed);
                self.throttle.shrink(bytes);
            }
            Sum::Room => self.throttle.room_pace.met(bytes),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.take(self.bytes());
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
    fn a_flush_of_one_file_system_lets_writers_of_another_one_continue() {
        let throttle = Arc::new(Throttle::default());
        let [one, other] = [(), ()].map(|()| Share::of_content(Arc::clone(&throttle)));
        one.grow(40 << 20);
        other.grow(24 << 20);
        throttle.await_flush();
        let slowed = throttle.slow_writers();
        let waiting = |throttle: &Arc<Throttle>| {
            let throttle = Arc::clone(throttle);
            std::thread::spawn(move || throttle.await_flush())
        };
        let writer_of_other = waiting(&throttle);
        one.shrink(2 << 20);
        throttle.stored_content(2 << 20);
        throttle.flushed_part();
        writer_of_other.join().unwrap();
        other.grow(1 << 20);
        let second = waiting(&throttle);
        drop(slowed);
        second.join().unwrap();
        drop((one, other));
        assert_eq!((throttle.held(), throttle.content()), (0, 0));
    }

    #[test]
    fn a_writer_that_finds_little_room_asks_for_a_commit_once() {
        let throttle = Arc::new(Throttle::default());
        let needed = Share::of_room(Arc::clone(&throttle));
        needed.grow(100 << 20);
        throttle.slow_down(|| panic!("without a committer no room is looked at"));
        throttle.arm(u64::MAX - 1, u64::MAX - 1);
        let waiting = {
            let throttle = Arc::clone(&throttle);
            std::thread::spawn(move || throttle.slow_down(|| 50 << 20))
        };
        assert_eq!(throttle.wait(Duration::from_secs(600)), Woken::Due);
        // The commit is in progress.
        throttle.slow_down(|| 350 << 20);
        needed.shrink(98 << 20);
        waiting.join().unwrap();
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
        throttle.slow_down(|| panic!("little content needs no room"));
        throttle.disarm();
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Stop);
    }

    #[test]
    fn content_that_a_commit_has_left_in_memory_asks_for_no_further_commit() {
        let throttle = Arc::new(Throttle::default());
        throttle.arm(u64::MAX - 1, u64::MAX - 1);
        let needed = Share::of_room(Arc::clone(&throttle));
        needed.grow(100 << 20);
        throttle.closed_txg();
        throttle.slow_down(|| panic!("no room is looked at for content that found none"));
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
        needed.grow(10 << 20);
        // The committer waits for work from here on.
        throttle.state.lock().busy = false;
        throttle.slow_down(|| 40 << 20);
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Due);
        throttle.closed_txg();
        drop(needed);
        assert_eq!(throttle.room_pace.needed_now(), 0);
    }

    #[test]
    fn replaced_content_asks_for_a_commit_before_room_is_short() {
        let throttle = Throttle::default();
        throttle.replaced(100 << 20, || panic!("without a committer no room is looked at"));
        throttle.closed_txg();
        throttle.arm(u64::MAX - 1, u64::MAX - 1);
        throttle.replaced(1 << 20, || panic!("no room is looked at for little"));
        throttle.replaced(4 << 20, || 100 << 20);
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
        throttle.state.lock().busy = false;
        throttle.replaced(1 << 20, || panic!("room is looked at rarely"));
        throttle.replaced(20 << 20, || 100 << 20);
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Due);
        throttle.state.lock().busy = false;
        throttle.closed_txg();
        throttle.replaced(3 << 20, || panic!("the commit has freed the others"));
        assert_eq!(throttle.wait(Duration::ZERO), Woken::Time);
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
