//! Table of the inodes in memory: as long as an inode is held, all lookups return the same one;
//! when the last holder drops an orphan, its number goes to the list of inodes to free.
//!
//! Invariant: an entry of the table refers to a live inode, or is removed by the one whose last
//! reference was dropped.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::Inode;

/// The held inodes, and the orphans that are not held any more.
#[derive(Debug, Default)]
pub(super) struct Known {
    held: Mutex<HashMap<u64, Weak<Inode>, BuildHasherDefault<Spread>>>,
    released: Mutex<Vec<u64>>,
    some_released: Condvar,
    /// Files with rows after their end, which a truncation has not removed yet.
    cut: Mutex<BTreeSet<u64>>,
}

/// Hash of inode numbers, which are counted up and not chosen by users.
#[derive(Debug, Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // Multiplies by the golden ratio (Knuth, The Art of Computer Programming, 6.4), and folds
        // the upper half, which depends on all bits, into the lower one.
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

impl Known {
    /// Returns the inode of this number; all callers share one.
    pub(super) fn get(self: &Arc<Self>, number: u64) -> Arc<Inode> {
        let mut held = self.held.lock();
        if let Some(inode) = held.get(&number).and_then(Weak::upgrade) {
            return inode;
        }
        let inode = Arc::new(Inode::new(number, self));
        held.insert(number, Arc::downgrade(&inode));
        inode
    }

    /// Notes that the last reference of an inode was dropped; `nameless` if it had no name.
    pub(super) fn ended(&self, number: u64, nameless: bool) {
        {
            let mut held = self.held.lock();
            // A new inode of this number may have been created since the count fell to zero.
            if held.get(&number).is_some_and(|weak| weak.strong_count() == 0) {
                held.remove(&number);
            }
        }
        if nameless {
            self.put_released([number]);
        }
    }

    /// Whether an inode is held.
    pub(super) fn is_held(&self, number: u64) -> bool {
        self.held.lock().get(&number).is_some_and(|inode| inode.strong_count() > 0)
    }

    /// The inode of this number, if it is held.
    pub(super) fn held(&self, number: u64) -> Option<Arc<Inode>> {
        self.held.lock().get(&number).and_then(Weak::upgrade)
    }

    /// All held inodes.
    pub(super) fn all(&self) -> Vec<Arc<Inode>> {
        self.held.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Takes the list of orphans that are not held.
    pub(super) fn take_released(&self) -> Vec<u64> {
        std::mem::take(&mut *self.released.lock())
    }

    /// Adds inodes to be freed later.
    pub(super) fn put_released(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut released = self.released.lock();
        released.extend(numbers);
        if !released.is_empty() {
            self.some_released.notify_all();
        }
    }

    /// Waits until there are inodes to free, or were, at most until `until`.
    pub(super) fn wait_released(&self, until: Instant) {
        let mut released = self.released.lock();
        // Waits once: a commit may take them before this thread runs, which is equivalent.
        if released.is_empty() {
            self.some_released.wait_until(&mut released, until);
        }
    }

    /// Takes a file with rows after its end.
    pub(super) fn next_cut(&self) -> Option<u64> {
        self.cut.lock().pop_first()
    }

    /// Adds files whose rows after the end are to be removed.
    pub(super) fn put_cut(&self, numbers: impl IntoIterator<Item = u64>) {
        self.cut.lock().extend(numbers);
    }

    /// Whether there are files with rows after their end.
    pub(super) fn has_cut(&self) -> bool {
        !self.cut.lock().is_empty()
    }

    /// Whether there are inodes to be freed.
    pub(super) fn has_released(&self) -> bool {
        !self.released.lock().is_empty()
    }
}
