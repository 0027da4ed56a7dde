//! What owners (users and groups) use of a file system that its table does not say yet.
//!
//! Called by whatever changes files, and by `quota_check.rs`, which judges by it. Invariant: locks
//! here are held for a look or a sum only; that of what waits may be taken under that of the
//! changes, never the other way round.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::rows::{InodeRow, OwnerKind};

/// A user or a group.
pub(super) type OwnerId = (OwnerKind, u32);

/// By how much an owner's use has changed: bytes, objects.
pub(super) type UseChange = (i64, i64);

/// The owners of an inode.
pub(super) fn owners_of(row: &InodeRow) -> [OwnerId; 2] {
    [(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)]
}

/// What owners use beside what the table says.
#[derive(Debug, Default)]
pub(super) struct OwnerAccounts {
    /// What has changed since the last flush.
    changes: Mutex<BTreeMap<OwnerId, UseChange>>,
    /// What of each owner's waits in memory, worst case. Bytes.
    waiting: Mutex<BTreeMap<OwnerId, u64>>,
}

impl OwnerAccounts {
    /// Notes what has changed for some owners.
    pub(super) fn change(&self, changes: impl IntoIterator<Item = (OwnerId, UseChange)>) {
        let mut known = self.changes.lock();
        for (owner, (bytes, objects)) in changes {
            let change = known.entry(owner).or_default();
            *change = (change.0.saturating_add(bytes), change.1.saturating_add(objects));
        }
    }

    /// Whether anything has changed since the last flush.
    pub(super) fn has_changes(&self) -> bool {
        !self.changes.lock().is_empty()
    }

    /// Hands the changes to the table, one by one; those that it does not take stay.
    pub(super) fn flush(&self, mut take: impl FnMut(OwnerId, UseChange) -> bool) {
        self.changes.lock().retain(|owner, change| !take(*owner, *change));
    }

    /// Notes that so much more of an inode's waits in memory, or less. Bytes.
    pub(super) fn count_waiting(&self, row: &InodeRow, bytes: i64) {
        if bytes == 0 {
            return;
        }
        let mut waiting = self.waiting.lock();
        for owner in owners_of(row) {
            let sum = waiting.entry(owner).or_default();
            *sum = sum.saturating_add_signed(bytes);
            if *sum == 0 {
                waiting.remove(&owner);
            }
        }
    }

    /// Whether anything of anybody's waits in memory.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.lock().is_empty()
    }

    /// What has changed of an owner's use, and what of it waits in memory.
    pub(super) fn of(&self, owner: OwnerId) -> (UseChange, u64) {
        let changes = self.changes.lock();
        let change = changes.get(&owner).copied().unwrap_or_default();
        (change, self.waiting.lock().get(&owner).copied().unwrap_or_default())
    }

    /// The table is another one.
    pub(super) fn clear(&self) {
        self.changes.lock().clear();
        self.waiting.lock().clear();
    }
}
