//! Locks that are held for a few microseconds: a thread that finds one taken retries for a while
//! before it sleeps.
//!
//! Callers: everything in `files`. Sleeping and waking takes longer than the holder's work,
//! especially if the processor has halted meanwhile: two threads that created files in parallel
//! were slower together than one alone.
//!
//! Invariant: no thread retries on a single processor, and none for longer than [`LOOKS`] pauses:
//! the holder may not be running.

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::workers::processors;

/// Number of retries ...
const LOOKS: u32 = 40;
/// ... and the wait between two of them, in pause instructions: about 10 us in all on current
/// processors.
const PAUSES: u32 = 8;

fn soon<G>(attempt: impl Fn() -> Option<G>) -> Option<G> {
    let taken = attempt();
    if taken.is_some() || processors() < 2 {
        return taken;
    }
    (0..LOOKS).find_map(|_| {
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
        attempt()
    })
}

/// A spinning lock for several readers or one writer.
#[derive(Debug, Default)]
pub(super) struct SpinRwLock<T>(RwLock<T>);

impl<T> SpinRwLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self(RwLock::new(value))
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
        soon(|| self.0.try_read()).unwrap_or_else(|| self.0.read())
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, T> {
        soon(|| self.0.try_write()).unwrap_or_else(|| self.0.write())
    }

    #[cfg(test)]
    pub(super) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.0.try_write()
    }

    pub(super) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

/// A spinning lock for one holder.
#[derive(Debug, Default)]
pub(super) struct SpinMutex(Mutex<()>);

impl SpinMutex {
    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        soon(|| self.0.try_lock()).unwrap_or_else(|| self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn who_waits_long_sleeps_and_is_woken() {
        let (lock, turn, asked) = (SpinRwLock::new(0), SpinMutex::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (held, mut value) = (turn.lock(), lock.write());
            let waiting = scope.spawn(|| {
                asked.store(true, Ordering::Release);
                let _turn = turn.lock();
                *lock.write() += 1;
                *lock.read()
            });
            while !asked.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            *value = 7;
            drop((held, value));
            assert_eq!(waiting.join().unwrap(), 8);
        });
    }

    #[test]
    fn nothing_is_lost_between_many() {
        let (lock, turn) = (SpinRwLock::new(0_u64), SpinMutex::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let _turn = turn.lock();
                        let before = *lock.read();
                        *lock.write() = before + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.read(), 20_000);
    }
}
