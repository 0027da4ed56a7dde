//! Locks and atomics of the code that loom checks in all interleavings (`writeback.rs`;
//! `poolfs/src/dataset/passage.rs`, whose crate builds this file, too): parking_lot's and the
//! standard library's, or, where `--cfg nacre_model` builds the tests, loom's with the same
//! signatures.
//!
//! Invariant: modelled code uses no other synchronization that threads wait for, and the product's
//! build does not contain loom.

// Each crate uses a part of them.
#![allow(unused_imports, dead_code)]

#[cfg(not(all(test, nacre_model)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};
#[cfg(not(all(test, nacre_model)))]
pub(crate) use std::sync::atomic;

#[cfg(all(test, nacre_model))]
pub(crate) use loom::sync::atomic;
#[cfg(all(test, nacre_model))]
pub(crate) use modelled::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};

#[cfg(all(test, nacre_model))]
mod modelled {
    use std::ops::Deref;
    use std::time::Duration;

    pub(crate) use loom::sync::RwLockReadGuard;

    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    /// Empty only while its thread waits.
    pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap()
        }

        pub(crate) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
            self.0.write().unwrap()
        }
    }

    pub(crate) struct Condvar(loom::sync::Condvar);

    /// Result of a wait with a time limit.
    pub(crate) struct Waited;

    impl Waited {
        pub(crate) fn timed_out(&self) -> bool {
            false
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = guard.0.take().map(|inner| self.0.wait(inner).unwrap());
        }

        /// Time limits never expire here: a thread that only a timeout would wake is a deadlock,
        /// which loom finds.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> Waited {
            self.wait(guard);
            Waited
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
