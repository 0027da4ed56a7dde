//! Space accounting of datasets, with quotas and reservations. The catalog stores the counters, the dataset layer
//! asks before it accepts a write, commands show the figures and change the limits.
//!
//! ```text
//!  used          = by dataset + by snapshots + by children + by refreservation
//!  by children   = sum over the children of max(used, reservation)
//!  by refreserv. = the part of refreservation not covered by data unique to the head
//!  available     = min(available of the parent + unused reservation, quota - used); at the root: size - slop - used
//! ```
//!
//! Invariants: counters are exact, in charged bytes; a change is applied to a whole chain of ancestors or not at all;
//! a counter never falls below zero: that would be a damaged catalog and is an error. The *head* of a dataset is its
//! current, writable state, without its snapshots.

mod owner;
mod quota_tree;
#[cfg(test)]
mod tests;

pub use owner::{OwnerQuota, OwnerQuotas, OwnerShortage};
pub use quota_tree::QuotaTree;
#[cfg(test)]
pub(crate) use tests::judged;

use crate::error::{Damage, PoolError};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Slop space of a pool, which ordinary writes cannot use: 1/32, at least 128 MiB, at most 128 GiB, and never more
/// than half.
#[must_use]
pub fn slop(size: u64) -> u64 {
    (size / 32).clamp(128 * MIB, 128 * GIB).min(size / 2)
}

/// Purpose of an allocation, which decides how much of the slop space may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Writes: nothing.
    Write,
    /// Overwrites, which free as much with the next commit: a quarter.
    Replace,
    /// Deletions and administration: half.
    Free,
    /// Destroying datasets and snapshots: three quarters.
    Destroy,
}

/// Space of a pool of this size that all datasets together may use, bytes.
#[must_use]
pub fn usable(size: u64, purpose: Purpose) -> u64 {
    let slop = slop(size);
    let kept = match purpose {
        Purpose::Write => slop,
        Purpose::Replace => slop / 4 * 3,
        Purpose::Free => slop / 2,
        Purpose::Destroy => slop / 4,
    };
    size - kept
}

/// Limits of a dataset, in bytes or numbers; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limit of the used space including snapshots and descendants.
    pub quota: Option<u64>,
    /// Limit of the space that the head references.
    pub refquota: Option<u64>,
    /// Space reserved for the dataset including snapshots and descendants; 0 is none.
    pub reservation: u64,
    /// Space reserved for the head; 0 is none.
    pub refreservation: u64,
    /// Limit of the number of descendant file systems.
    pub filesystems: Option<u64>,
    /// Limit of the number of snapshots of the dataset and its descendants.
    pub snapshots: Option<u64>,
}

/// Space used by a dataset itself, bytes. The catalog stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Referenced by the head and not shared with its origin.
    pub dataset: u64,
    /// Referenced by snapshots only.
    pub snapshots: u64,
    /// Referenced by the head.
    pub referenced: u64,
    /// Written by the head since its newest snapshot, or its origin.
    pub unique: u64,
    /// `dataset` and `snapshots` before compression.
    pub logical_used: u64,
    /// `referenced` before compression.
    pub logical_referenced: u64,
}

/// A change of a [`Usage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageChange {
    /// Change of [`Usage::dataset`].
    pub dataset: i64,
    /// Change of [`Usage::snapshots`].
    pub snapshots: i64,
    /// Change of [`Usage::referenced`].
    pub referenced: i64,
    /// Change of [`Usage::unique`].
    pub unique: i64,
    /// Change of [`Usage::logical_used`].
    pub logical_used: i64,
    /// Change of [`Usage::logical_referenced`].
    pub logical_referenced: i64,
}

impl UsageChange {
    /// The change for this many more bytes written by the head, and their size before compression.
    #[must_use]
    pub fn stored(bytes: i64, logical: i64) -> Self {
        Self {
            dataset: bytes,
            snapshots: 0,
            referenced: bytes,
            unique: bytes,
            logical_used: logical,
            logical_referenced: logical,
        }
    }

    /// Sum of two changes.
    ///
    /// # Errors
    /// [`PoolError::Format`] for counters beyond 63 bits.
    pub fn and(self, other: Self) -> Result<Self, PoolError> {
        let add = |a: i64, b: i64| a.checked_add(b).ok_or_else(impossible);
        Ok(Self {
            dataset: add(self.dataset, other.dataset)?,
            snapshots: add(self.snapshots, other.snapshots)?,
            referenced: add(self.referenced, other.referenced)?,
            unique: add(self.unique, other.unique)?,
            logical_used: add(self.logical_used, other.logical_used)?,
            logical_referenced: add(self.logical_referenced, other.logical_referenced)?,
        })
    }

    /// Difference between two states.
    ///
    /// # Errors
    /// [`PoolError::Format`] for counters beyond 63 bits.
    pub fn between(before: &Usage, after: &Usage) -> Result<Self, PoolError> {
        let difference = |before: u64, after: u64| {
            let (before, after) = (i64::try_from(before).ok(), i64::try_from(after).ok());
            after.zip(before).and_then(|(after, before)| after.checked_sub(before)).ok_or_else(impossible)
        };
        Ok(Self {
            dataset: difference(before.dataset, after.dataset)?,
            snapshots: difference(before.snapshots, after.snapshots)?,
            referenced: difference(before.referenced, after.referenced)?,
            unique: difference(before.unique, after.unique)?,
            logical_used: difference(before.logical_used, after.logical_used)?,
            logical_referenced: difference(before.logical_referenced, after.logical_referenced)?,
        })
    }

    fn applied(&self, to: &Usage) -> Result<Usage, PoolError> {
        let add = |value: u64, change: i64| value.checked_add_signed(change).ok_or_else(impossible);
        Ok(Usage {
            dataset: add(to.dataset, self.dataset)?,
            snapshots: add(to.snapshots, self.snapshots)?,
            referenced: add(to.referenced, self.referenced)?,
            unique: add(to.unique, self.unique)?,
            logical_used: add(to.logical_used, self.logical_used)?,
            logical_referenced: add(to.logical_referenced, self.logical_referenced)?,
        })
    }
}

fn impossible() -> PoolError {
    PoolError::Format(Damage::Structure("a space counter out of bounds"))
}

/// Reason why space is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// The quota of this dataset, which may be an ancestor (EDQUOT).
    Quota(u64),
    /// The refquota of the dataset itself (EDQUOT).
    Refquota(u64),
    /// The pool (ENOSPC).
    Pool,
}

/// Reason why an account change fails: a rule forbids it (a [`Shortage`], a
/// [`LimitRefusal`](crate::error::LimitRefusal)), or the accounts are inconsistent.
#[derive(Clone, Debug)]
pub enum AccountError<R> {
    /// Forbidden by this rule; nothing is changed.
    Refused(R),
    /// An unknown dataset, or counters out of bounds.
    Pool(PoolError),
}

impl<R> From<PoolError> for AccountError<R> {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

impl<R> AccountError<R> {
    /// Converts to a pool error; `refused` converts a refusal.
    pub fn pool_error(self, refused: impl FnOnce(R) -> PoolError) -> PoolError {
        match self {
            Self::Refused(why) => refused(why),
            Self::Pool(error) => error,
        }
    }
}

/// Space of a dataset by consumer, as commands show it, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Sum of the four.
    pub used: u64,
    /// Used by the head.
    pub by_dataset: u64,
    /// Used by its snapshots.
    pub by_snapshots: u64,
    /// Used by its children, including their reservations.
    pub by_children: u64,
    /// Used by its refreservation.
    pub by_refreservation: u64,
}
