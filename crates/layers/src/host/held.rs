//! An open directory, counted while it lives.
//!
//! Made by `directories.rs`, which keeps the number of them within its budget; hangs off a node.

use nacre_sys::descriptors::{self, Counted};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// See the file's head.
pub(super) struct Held {
    descriptor: OwnedFd,
    /// It lies on another mount than the source's root, which it keeps from being unmounted.
    foreign: bool,
    count: Arc<AtomicUsize>,
    _counted: Counted,
}

impl Held {
    pub(super) fn new(descriptor: OwnedFd, foreign: bool, count: &Arc<AtomicUsize>) -> Arc<Held> {
        count.fetch_add(1, Ordering::Relaxed);
        Arc::new(Held { descriptor, foreign, count: Arc::clone(count), _counted: descriptors::DIRECTORIES.one() })
    }

    pub(super) fn is_foreign(&self) -> bool {
        self.foreign
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}
