//! An open directory with a count of all open ones.
//!
//! Made by `directories.rs`, which keeps their number within its budget; referenced by a node.

use nacre_sys::descriptors::{self, Counted};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Descriptor of an open directory; see the file's head.
pub(super) struct Held {
    descriptor: OwnedFd,
    /// The directory is on another mount than the source's root; the descriptor keeps that mount
    /// from being unmounted.
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
