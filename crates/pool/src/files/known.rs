//! Which inodes are known: while somebody holds one, everybody gets the same; when the last holder
//! lets go of one that has no name left, its number goes to the list of those that are to be freed.
//!
//! Invariant: an entry of the table leads to an inode that lives, or is taken out by the one that
//! ends.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::Inode;

/// The inodes that somebody holds, and those without a name that nobody holds any more.
#[derive(Debug, Default)]
pub(super) struct Known {
    held: Mutex<HashMap<u64, Weak<Inode>, BuildHasherDefault<Spread>>>,
    released: Mutex<Vec<u64>>,
    some_released: Condvar,
    /// Files behind whose end something is left.
    cut: Mutex<BTreeSet<u64>>,
}

/// Spreads inode numbers over a table: they are counted up, nobody chooses them.
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
        // By the golden ratio (Knuth, The Art of Computer Programming, 6.4), with the upper half,
        // which depends on all bits, in the lower one too.
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

impl Known {
    /// The inode of this number; the same one for everybody.
    pub(super) fn get(self: &Arc<Self>, number: u64) -> Arc<Inode> {
        let mut held = self.held.lock();
        if let Some(inode) = held.get(&number).and_then(Weak::upgrade) {
            return inode;
        }
        let inode = Arc::new(Inode::new(number, self));
        held.insert(number, Arc::downgrade(&inode));
        inode
    }

    /// One has ended; `nameless` where it had no name left.
    pub(super) fn ended(&self, number: u64, nameless: bool) {
        {
            let mut held = self.held.lock();
            // A new one of this number may have been made since the count fell to zero.
            if held.get(&number).is_some_and(|weak| weak.strong_count() == 0) {
                held.remove(&number);
            }
        }
        if nameless {
            self.put_released([number]);
        }
    }

    /// Whether somebody holds this one.
    pub(super) fn is_held(&self, number: u64) -> bool {
        self.held.lock().get(&number).is_some_and(|inode| inode.strong_count() > 0)
    }

    /// The inode of this number, where somebody holds it.
    pub(super) fn held(&self, number: u64) -> Option<Arc<Inode>> {
        self.held.lock().get(&number).and_then(Weak::upgrade)
    }

    /// All that somebody holds.
    pub(super) fn all(&self) -> Vec<Arc<Inode>> {
        self.held.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Inodes without a name that nobody holds.
    pub(super) fn take_released(&self) -> Vec<u64> {
        std::mem::take(&mut *self.released.lock())
    }

    /// Inodes that are to be freed another time.
    pub(super) fn put_released(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut released = self.released.lock();
        released.extend(numbers);
        if !released.is_empty() {
            self.some_released.notify_all();
        }
    }

    /// Waits until there are inodes to be freed, or were, at most until then.
    pub(super) fn wait_released(&self, until: Instant) {
        let mut released = self.released.lock();
        // Once: who is told may find that a commit has taken them, which is as good.
        if released.is_empty() {
            self.some_released.wait_until(&mut released, until);
        }
    }

    /// A file behind whose end something is left.
    pub(super) fn next_cut(&self) -> Option<u64> {
        self.cut.lock().pop_first()
    }

    /// Files to be looked at behind their end.
    pub(super) fn put_cut(&self, numbers: impl IntoIterator<Item = u64>) {
        self.cut.lock().extend(numbers);
    }

    /// Whether there is any.
    pub(super) fn has_cut(&self) -> bool {
        !self.cut.lock().is_empty()
    }

    /// Whether there are inodes to be freed.
    pub(super) fn has_released(&self) -> bool {
        !self.released.lock().is_empty()
    }
}
