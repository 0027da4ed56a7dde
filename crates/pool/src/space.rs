//! Who uses how much, and who may use more: the accounting rules of datasets. The catalog keeps the
//! counters, the dataset layer asks before it accepts a write, commands show the figures and change
//! the limits.
//!
//! ```text
//!  used          = by dataset + by snapshots + by children + by refreservation
//!  by children   = sum over the children of max(used, reservation)
//!  by refreserv. = what of refreservation is not covered by data unique to the head
//!  available     = min(available of the parent + unused reservation, quota - used); at the root: size - slop - used
//! ```
//!
//! Invariants: counters are exact, in charged bytes; a change is applied to a whole chain of
//! ancestors or not at all; a counter never falls below zero: that would be a damaged catalog and
//! is an error.

use std::collections::HashMap;
use std::fmt;

use crate::error::{Damage, PoolError};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What of a pool is kept back from ordinary writes: 1/32, at least 128 MiB, at most 128 GiB, and
/// never more than half.
#[must_use]
pub fn slop(size: u64) -> u64 {
    (size / 32).clamp(128 * MIB, 128 * GIB).min(size / 2)
}

/// What space is wanted for: how much of the slop may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Writes: none.
    Write,
    /// Deletes and administration: half of it.
    Free,
    /// Destroying datasets and snapshots: three quarters.
    Destroy,
}

/// What all datasets together may use of a pool of this size, bytes.
#[must_use]
pub fn usable(size: u64, purpose: Purpose) -> u64 {
    let slop = slop(size);
    let kept = match purpose {
        Purpose::Write => slop,
        Purpose::Free => slop / 2,
        Purpose::Destroy => slop / 4,
    };
    size - kept
}

/// The limits of a dataset, bytes or numbers; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of what is used with snapshots and descendants.
    pub quota: Option<u64>,
    /// Of what the head references.
    pub refquota: Option<u64>,
    /// What is set aside for the dataset with snapshots and descendants; 0 is nothing.
    pub reservation: u64,
    /// What is set aside for the head; 0 is nothing.
    pub refreservation: u64,
    /// Of file systems below.
    pub filesystems: Option<u64>,
    /// Of snapshots here and below.
    pub snapshots: Option<u64>,
}

/// What a dataset itself uses, bytes. The catalog stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What the head references and does not share with its origin.
    pub dataset: u64,
    /// What only snapshots reference.
    pub snapshots: u64,
    /// What the head references.
    pub referenced: u64,
    /// What the head has written since its newest snapshot, or its origin.
    pub unique: u64,
    /// What `dataset` and `snapshots` are before packing.
    pub logical_used: u64,
    /// What `referenced` is before packing.
    pub logical_referenced: u64,
}

/// A change of a [`Usage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Of [`Usage::dataset`].
    pub dataset: i64,
    /// Of [`Usage::snapshots`].
    pub snapshots: i64,
    /// Of [`Usage::referenced`].
    pub referenced: i64,
    /// Of [`Usage::unique`].
    pub unique: i64,
    /// Of [`Usage::logical_used`].
    pub logical_used: i64,
    /// Of [`Usage::logical_referenced`].
    pub logical_referenced: i64,
}

impl Change {
    /// The head has written so much more, and that is so much before packing.
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

    /// This and another.
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

    /// The change from one state to another.
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

/// Why space is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// The quota of this dataset, which may be an ancestor (EDQUOT).
    Quota(u64),
    /// The refquota of the dataset itself (EDQUOT).
    Refquota(u64),
    /// The pool (ENOSPC).
    Pool,
}

/// Why a limit is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitRefusal {
    /// A quota below what is used or reserved already.
    BelowUse,
    /// A reservation that the parent, the quota or the pool cannot grant.
    BeyondAvailable,
}

impl fmt::Display for LimitRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BelowUse => "size is less than current used or reserved space",
            Self::BeyondAvailable => "size is greater than available space",
        })
    }
}

/// The figures that commands show, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// The sum of the four.
    pub used: u64,
    /// Of the head.
    pub by_dataset: u64,
    /// Of its snapshots.
    pub by_snapshots: u64,
    /// Of its children, their reservations included.
    pub by_children: u64,
    /// Of its refreservation.
    pub by_refreservation: u64,
}

#[derive(Clone, Debug)]
struct Node {
    parent: Option<u64>,
    usage: Usage,
    limits: Limits,
    /// What the head has been promised and is not in `usage` yet: at most so many bytes more will
    /// be written.
    promised: u64,
    /// Sum over the children of max(used, reservation).
    children: u64,
    /// The same with what is promised.
    children_promised: u64,
    /// File systems below, at any depth.
    filesystems: u64,
    /// Snapshots here and below.
    snapshots: u64,
}

impl Node {
    fn new(parent: Option<u64>, usage: Usage, limits: Limits) -> Self {
        Self { parent, usage, limits, promised: 0, children: 0, children_promised: 0, filesystems: 0, snapshots: 0 }
    }

    /// The part of the refreservation that the head has not used yet.
    fn uncovered(&self) -> u64 {
        self.limits.refreservation.saturating_sub(self.usage.unique)
    }

    fn used(&self) -> Result<u64, PoolError> {
        [self.usage.snapshots, self.children, self.uncovered()]
            .iter()
            .try_fold(self.usage.dataset, |sum, part| sum.checked_add(*part))
            .ok_or_else(impossible)
    }

    /// What is used if everything that is promised is written.
    fn used_promised(&self) -> Result<u64, PoolError> {
        let uncovered = self.limits.refreservation.saturating_sub(self.usage.unique.saturating_add(self.promised));
        [self.usage.snapshots, self.children_promised, uncovered, self.promised]
            .iter()
            .try_fold(self.usage.dataset, |sum, part| sum.checked_add(*part))
            .ok_or_else(impossible)
    }

    fn cost(&self) -> Result<Cost, PoolError> {
        let reservation = self.limits.reservation;
        Ok(Cost { settled: self.used()?.max(reservation), promised: self.used_promised()?.max(reservation) })
    }
}

/// What a dataset costs its parent: max(used, reservation), as it is and with what is promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    settled: u64,
    promised: u64,
}

/// All datasets of a pool, by their numbers. There is one root.
#[derive(Clone, Debug)]
pub struct Forest {
    nodes: HashMap<u64, Node>,
    /// Size of the pool less what belongs to no dataset, bytes.
    size: u64,
    /// What is charged to several and is there once, beside that once. Bytes.
    saved: u64,
    /// What datasets may be charged by the room that there really is: frames leave gaps, and the
    /// pool keeps books. Bytes.
    reachable: u64,
}

impl Forest {
    /// A pool of this size whose root dataset has this number.
    #[must_use]
    pub fn new(root: u64, size: u64, usage: Usage, limits: Limits) -> Self {
        let node = Node::new(None, usage, limits);
        Self { nodes: HashMap::from([(root, node)]), size, saved: 0, reachable: u64::MAX }
    }

    /// The pool has grown, or what belongs to no dataset has changed. Bytes.
    pub fn resize(&mut self, size: u64) {
        self.size = size;
    }

    /// What is charged to several datasets and is there once, beside that once. Bytes.
    #[must_use]
    pub fn saved(&self) -> u64 {
        self.saved
    }

    /// Sets what [`Self::saved`] answers.
    pub fn set_saved(&mut self, bytes: u64) {
        self.saved = bytes;
    }

    /// What all datasets together may be charged.
    fn line(&self, purpose: Purpose) -> u64 {
        let usable = |purpose| usable(self.size, purpose);
        let reachable = self.reachable.saturating_add(usable(purpose) - usable(Purpose::Write));
        usable(purpose).saturating_add(self.saved).min(reachable)
    }

    /// There is so much room that ordinary writes may have, beside what all datasets store now.
    /// Bytes.
    pub fn set_room(&mut self, bytes: u64) {
        let stored = self.nodes.values().map(|node| node.usage.dataset.saturating_add(node.usage.snapshots));
        self.reachable = stored.fold(bytes, u64::saturating_add);
    }

    /// A dataset that exists: as read from the catalog, parents before children, or made or cloned
    /// now.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown parent or a number that is taken; counters out of
    /// bounds.
    pub fn add(&mut self, id: u64, parent: u64, usage: Usage, limits: Limits) -> Result<(), PoolError> {
        if self.nodes.contains_key(&id) {
            return Err(PoolError::Refused(format!("dataset {id} exists already")));
        }
        self.node(parent)?;
        let node = Node::new(Some(parent), usage, limits);
        let cost = node.cost()?;
        self.raise(Some(parent), Cost::default(), cost)?;
        self.nodes.insert(id, node);
        self.count(Some(parent), |node| node.filesystems.checked_add(1).map(|count| node.filesystems = count))
    }

    /// A dataset is gone; what it used is free for its parent.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for the root, an unknown one and one with children.
    pub fn remove(&mut self, id: u64) -> Result<(), PoolError> {
        let node = self.node(id)?;
        let Some(parent) = node.parent else {
            return Err(PoolError::Refused("the root of a pool stays as long as the pool".to_owned()));
        };
        if node.filesystems != 0 {
            return Err(PoolError::Refused(format!("dataset {id} has children")));
        }
        let (cost, snapshots) = (node.cost()?, node.snapshots);
        self.raise(Some(parent), cost, Cost::default())?;
        self.nodes.remove(&id);
        self.count(Some(parent), |node| {
            let (filesystems, rest) = (node.filesystems.checked_sub(1)?, node.snapshots.checked_sub(snapshots)?);
            (node.filesystems, node.snapshots) = (filesystems, rest);
            Some(())
        })
    }

    /// A dataset has got another parent. Its descendants come along.
    ///
    /// # Errors
    /// A [`Shortage`] where the new ancestors cannot hold it, inside `Ok`; [`PoolError::Refused`]
    /// for unknown ones, the root, and a parent below it.
    pub fn reparent(&mut self, id: u64, parent: u64) -> Result<Result<(), Shortage>, PoolError> {
        if self.chain(parent)?.contains(&id) {
            return Err(PoolError::Refused("a dataset cannot be put below itself".to_owned()));
        }
        let node = self.node(id)?;
        let Some(old) = node.parent else {
            return Err(PoolError::Refused("the root of a pool has no parent".to_owned()));
        };
        let (cost, filesystems, snapshots) = (node.cost()?, node.filesystems + 1, node.snapshots);
        let mut next = self.clone();
        next.raise(Some(old), cost, Cost::default())?;
        next.raise(Some(parent), Cost::default(), cost)?;
        if let Err(shortage) = self.grown(&next, &self.chain(parent)?, Purpose::Write)? {
            return Ok(Err(shortage));
        }
        next.count(Some(old), |node| {
            node.filesystems = node.filesystems.checked_sub(filesystems)?;
            node.snapshots = node.snapshots.checked_sub(snapshots)?;
            Some(())
        })?;
        next.count(Some(parent), |node| {
            node.filesystems = node.filesystems.checked_add(filesystems)?;
            node.snapshots = node.snapshots.checked_add(snapshots)?;
            Some(())
        })?;
        next.node_mut(id)?.parent = Some(parent);
        *self = next;
        Ok(Ok(()))
    }

    /// Applies a change that has happened, up the chain of ancestors, whatever the limits say.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a counter out of bounds (nothing is changed then),
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn charge(&mut self, id: u64, change: Change) -> Result<(), PoolError> {
        let node = self.node(id)?;
        let (parent, before) = (node.parent, node.cost()?);
        let mut next = node.clone();
        next.usage = change.applied(&node.usage)?;
        self.raise(parent, before, next.cost()?)?;
        *self.node_mut(id)? = next;
        Ok(())
    }

    /// Applies changes of several datasets if no ancestor whose use grows goes beyond its quota and
    /// the pool has room; otherwise none. Moving space between relatives costs their common
    /// ancestors nothing.
    ///
    /// # Errors
    /// The [`Shortage`] inside `Ok`; otherwise as [`Self::charge`].
    pub fn charge_if_allowed(
        &mut self,
        changes: &[(u64, Change)],
        purpose: Purpose,
    ) -> Result<Result<(), Shortage>, PoolError> {
        let mut next = self.clone();
        let mut touched = Vec::new();
        for (id, change) in changes {
            next.charge(*id, *change)?;
            touched.extend(self.chain(*id)?);
        }
        let allowed = self.grown(&next, &touched, purpose)?;
        if allowed.is_ok() {
            *self = next;
        }
        Ok(allowed)
    }

    /// Snapshots of these datasets in one txg: what their refreservations need anew has to be free,
    /// else none is taken.
    ///
    /// # Errors
    /// The [`Shortage`] inside `Ok`; [`PoolError::Refused`] for an unknown dataset.
    pub fn take_snapshots(&mut self, ids: &[u64]) -> Result<Result<(), Shortage>, PoolError> {
        let mut changes = Vec::new();
        for id in ids {
            let unique = i64::try_from(self.node(*id)?.usage.unique).map_err(|_| impossible())?;
            changes.push((*id, Change { unique: -unique, ..Change::default() }));
        }
        self.charge_if_allowed(&changes, Purpose::Write)
    }

    /// How much a snapshot of a dataset would need: the part of its refreservation that the head's
    /// unique data covers now. Bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn snapshot_needs(&self, id: u64) -> Result<u64, PoolError> {
        let node = self.node(id)?;
        Ok(node.usage.unique.min(node.limits.refreservation))
    }

    /// Notes that snapshots were made (positive) or destroyed, for the limits of their number.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a count below zero, [`PoolError::Refused`] for an unknown dataset.
    pub fn count_snapshots(&mut self, id: u64, change: i64) -> Result<(), PoolError> {
        self.node(id)?;
        self.count(Some(id), |node| node.snapshots.checked_add_signed(change).map(|count| node.snapshots = count))
    }

    /// The dataset whose `snapshot_limit` so many more snapshots of this one would exceed.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn snapshot_limit_hit(&self, id: u64, more: u64) -> Result<Option<u64>, PoolError> {
        self.limit_hit(id, |node| {
            node.limits.snapshots.is_some_and(|limit| node.snapshots.saturating_add(more) > limit)
        })
    }

    /// The dataset whose `filesystem_limit` so many more file systems below this one would exceed.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn filesystem_limit_hit(&self, id: u64, more: u64) -> Result<Option<u64>, PoolError> {
        self.limit_hit(id, |node| {
            node.limits.filesystems.is_some_and(|limit| node.filesystems.saturating_add(more) > limit)
        })
    }

    fn limit_hit(&self, id: u64, hit: impl Fn(&Node) -> bool) -> Result<Option<u64>, PoolError> {
        for id in self.chain(id)? {
            if hit(self.node(id)?) {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    fn raise(&mut self, id: Option<u64>, before: Cost, after: Cost) -> Result<(), PoolError> {
        let mut steps = Vec::new();
        let (mut next, mut before, mut after) = (id, before, after);
        while let Some(id) = next
            && before != after
        {
            let node = self.node(id)?;
            let mut changed = node.clone();
            let moved = |sum: u64, before, after| {
                sum.checked_sub(before).and_then(|rest| rest.checked_add(after)).ok_or_else(impossible)
            };
            changed.children = moved(node.children, before.settled, after.settled)?;
            changed.children_promised = moved(node.children_promised, before.promised, after.promised)?;
            (before, after) = (node.cost()?, changed.cost()?);
            next = node.parent;
            steps.push((id, changed));
        }
        self.nodes.extend(steps);
        Ok(())
    }

    fn count(&mut self, id: Option<u64>, mut change: impl FnMut(&mut Node) -> Option<()>) -> Result<(), PoolError> {
        let mut next = id;
        while let Some(id) = next {
            let node = self.node_mut(id)?;
            change(node).ok_or_else(impossible)?;
            next = node.parent;
        }
        Ok(())
    }

    /// Whether what has grown in the next state is within the quotas there.
    fn grown(&self, next: &Self, ids: &[u64], purpose: Purpose) -> Result<Result<(), Shortage>, PoolError> {
        for id in ids {
            let (before, after) = (self.node(*id)?, next.node(*id)?);
            let (used, grew) = (after.used()?, after.used()? > before.used()?);
            if grew && after.limits.quota.is_some_and(|quota| used > quota) {
                return Ok(Err(Shortage::Quota(*id)));
            }
            if grew && after.parent.is_none() && used > self.line(purpose) {
                return Ok(Err(Shortage::Pool));
            }
        }
        Ok(Ok(()))
    }

    /// The dataset and its ancestors, the root last.
    fn chain(&self, id: u64) -> Result<Vec<u64>, PoolError> {
        let mut chain = vec![id];
        let mut node = self.node(id)?;
        while let Some(parent) = node.parent {
            chain.push(parent);
            node = self.node(parent)?;
        }
        Ok(chain)
    }

    fn node(&self, id: u64) -> Result<&Node, PoolError> {
        self.nodes.get(&id).ok_or_else(|| PoolError::Refused(format!("there is no dataset {id}")))
    }

    fn node_mut(&mut self, id: u64) -> Result<&mut Node, PoolError> {
        self.nodes.get_mut(&id).ok_or_else(|| PoolError::Refused(format!("there is no dataset {id}")))
    }
}

mod admission;
mod figures;
mod limits;
mod owner;

pub use owner::{OwnerQuota, OwnerQuotas, OwnerShortage};

#[cfg(test)]
mod tests;
