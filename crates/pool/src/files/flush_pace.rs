//! Slows writers while a commit flushes content from memory: they may add half as much as the flush has stored. So
//! little content is left when all operations have to wait, and no write waits for the whole flush.
//!
//! Called by the flush (`content/flush.rs`), and by writes before they begin. Invariant: an operation that waits here
//! holds neither the gate nor a lock that a flush needs.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

/// Bytes that need not be flushed while operations continue.
pub(super) const LITTLE: u64 = 4 << 20;

/// The pace of all writers of a pool.
#[derive(Debug)]
pub(super) struct FlushPace {
    /// Bytes in memory at which writes wait; `u64::MAX` while no flush is in progress.
    most: AtomicU64,
    turn: Mutex<()>,
    moved: Condvar,
}

impl Default for FlushPace {
    fn default() -> Self {
        Self { most: AtomicU64::new(u64::MAX), turn: Mutex::default(), moved: Condvar::new() }
    }
}

impl FlushPace {
    /// Begins a flush of so many bytes.
    pub(super) fn begin(&self, held: u64) {
        self.most.store(held.saturating_add(LITTLE), Ordering::Relaxed);
    }

    /// Notes that so many bytes have left memory. Writers notice it at the next [`Self::wake`].
    pub(super) fn stored(&self, bytes: u64) {
        let less = |most: u64| (most != u64::MAX).then(|| most.saturating_sub(bytes / 2).max(LITTLE));
        // Without a flush nothing has to be noted.
        let _ = self.most.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Notes that so many bytes were read into memory in order to be stored: writers have not added them.
    pub(super) fn filled(&self, bytes: u64) {
        let more = |most: u64| (most != u64::MAX).then(|| most.saturating_add(bytes / 2).min(u64::MAX - 1));
        // Without a flush nothing has to be noted.
        let _ = self.most.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Ends the flush.
    pub(super) fn end(&self) {
        self.most.store(u64::MAX, Ordering::Relaxed);
        self.wake();
    }

    /// Waits while a flush is in progress and memory holds too much; `held` returns the bytes in memory.
    pub(super) fn await_turn(&self, held: impl Fn() -> u64) {
        let waits = || held() >= self.most.load(Ordering::Relaxed);
        if waits() {
            let mut turn = self.turn.lock();
            while waits() {
                self.moved.wait(&mut turn);
            }
        }
    }

    /// Wakes waiting writers: a part of the content is stored.
    pub(super) fn wake(&self) {
        // Under the lock, so that no writer goes to sleep between its check and this.
        let _turn = self.turn.lock();
        self.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn writers_add_half_as_much_as_is_stored() {
        let (pace, held) = (Arc::new(FlushPace::default()), Arc::new(AtomicU64::new(64 << 20)));
        pace.await_turn(|| u64::MAX - 1);
        pace.begin((64 << 20) - LITTLE);
        let (entered, entries) = channel();
        let writer = {
            let (pace, held) = (Arc::clone(&pace), Arc::clone(&held));
            std::thread::spawn(move || {
                for _ in 0..32 {
                    pace.await_turn(|| held.load(Ordering::Relaxed));
                    held.fetch_add(1 << 20, Ordering::Relaxed);
                    entered.send(()).unwrap();
                }
            })
        };
        for _ in 0..32 {
            assert!(entries.try_recv().is_err(), "one write for two stored pieces");
            held.fetch_sub(2 << 20, Ordering::Relaxed);
            pace.stored(2 << 20);
            pace.wake();
            entries.recv().unwrap();
            assert!(held.load(Ordering::Relaxed) >= pace.most.load(Ordering::Relaxed));
        }
        writer.join().unwrap();
        let waiting = {
            let pace = Arc::clone(&pace);
            std::thread::spawn(move || pace.await_turn(|| 1 << 40))
        };
        pace.end();
        waiting.join().unwrap();
    }
}
