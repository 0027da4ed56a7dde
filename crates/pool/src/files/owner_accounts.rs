//! Changes of the space that owners (users and groups) use in a file system, as far as its table
//! does not have them yet.
//!
//! Called by every change of files, and by `quota_check.rs`, which checks quotas with them.
//! Invariant: locks here are held for one look or sum only; `waiting` may be locked under
//! `changes`, never the other way round.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::rows::{InodeRow, OwnerKind};

/// A user or a group.
pub(super) type OwnerId = (OwnerKind, u32);

/// Change of an owner's usage: bytes, objects.
pub(super) type UseChange = (i64, i64);

/// The user and the group of an inode.
pub(super) fn owners_of(row: &InodeRow) -> [OwnerId; 2] {
    [(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)]
}

/// Usage of owners in addition to the rows of the table.
#[derive(Debug, Default)]
pub(super) struct OwnerAccounts {
    /// Changes since the last flush.
    changes: Mutex<BTreeMap<OwnerId, UseChange>>,
    /// Content of each owner that waits in memory, as its largest possible charge. Bytes.
    waiting: Mutex<BTreeMap<OwnerId, u64>>,
}

impl OwnerAccounts {
    /// Adds changes for some owners.
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

    /// Passes the changes to `take` one by one; those that it does not take remain.
    pub(super) fn flush(&self, mut take: impl FnMut(OwnerId, UseChange) -> bool) {
        self.changes.lock().retain(|owner, change| !take(*owner, *change));
    }

    /// Adds to the content of an inode's owners that waits in memory. Bytes.
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

    /// Whether content of any owner waits in memory.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.lock().is_empty()
    }

    /// Returns an owner's changes since the last flush, and its content that waits in memory.
    pub(super) fn of(&self, owner: OwnerId) -> (UseChange, u64) {
        let changes = self.changes.lock();
        let change = changes.get(&owner).copied().unwrap_or_default();
        (change, self.waiting.lock().get(&owner).copied().unwrap_or_default())
    }

    /// Drops everything: the table was replaced.
    pub(super) fn clear(&self) {
        self.changes.lock().clear();
        self.waiting.lock().clear();
    }
}
