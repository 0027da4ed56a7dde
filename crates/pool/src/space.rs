//! Who uses how much, and who may use more: the accounting rules of datasets. The catalog keeps the counters, the dataset layer asks before it
//! accepts a write, commands show the figures and change the limits.
//!
//! ```text
//!  used          = by dataset + by snapshots + by children + by refreservation
//!  by children   = sum over the children of max(used, reservation)
//!  by refreserv. = what of refreservation is not covered by data unique to the head
//!  available     = min(available of the parent + unused reservation, quota - used); at the root: size - slop - used
//! ```
//!
//! Invariants: counters are exact, in charged bytes; a change is applied to a whole chain of ancestors or not at all; a counter never falls
//! below zero: that would be a damaged catalog and is an error.

use std::collections::HashMap;
use std::fmt;

use crate::error::{Damage, PoolError};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What of a pool is kept back from ordinary writes: 1/32, at least 128 MiB, at most 128 GiB, and never more than half.
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
}

impl Change {
    /// The head has written so much more.
    #[must_use]
    pub fn written(bytes: i64) -> Self {
        Self { dataset: bytes, snapshots: 0, referenced: bytes, unique: bytes }
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
        })
    }

    fn applied(&self, to: &Usage) -> Result<Usage, PoolError> {
        let add = |value: u64, change: i64| value.checked_add_signed(change).ok_or_else(impossible);
        Ok(Usage {
            dataset: add(to.dataset, self.dataset)?,
            snapshots: add(to.snapshots, self.snapshots)?,
            referenced: add(to.referenced, self.referenced)?,
            unique: add(to.unique, self.unique)?,
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
    /// Sum over the children of max(used, reservation).
    children: u64,
    /// File systems below, at any depth.
    filesystems: u64,
    /// Snapshots here and below.
    snapshots: u64,
}

impl Node {
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

    fn cost(&self) -> Result<u64, PoolError> {
        Ok(self.used()?.max(self.limits.reservation))
    }
}

/// All datasets of a pool, by their numbers. There is one root.
#[derive(Clone, Debug)]
pub struct Forest {
    nodes: HashMap<u64, Node>,
    /// Size of the pool less what belongs to no dataset, bytes.
    size: u64,
}

impl Forest {
    /// A pool of this size whose root dataset has this number.
    #[must_use]
    pub fn new(root: u64, size: u64, usage: Usage, limits: Limits) -> Self {
        let node = Node { parent: None, usage, limits, children: 0, filesystems: 0, snapshots: 0 };
        Self { nodes: HashMap::from([(root, node)]), size }
    }

    /// The pool has grown, or what belongs to no dataset has changed. Bytes.
    pub fn resize(&mut self, size: u64) {
        self.size = size;
    }

    /// A dataset that exists: as read from the catalog, parents before children, or made or cloned now.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown parent or a number that is taken; counters out of bounds.
    pub fn add(&mut self, id: u64, parent: u64, usage: Usage, limits: Limits) -> Result<(), PoolError> {
        if self.nodes.contains_key(&id) {
            return Err(PoolError::Refused(format!("dataset {id} exists already")));
        }
        self.node(parent)?;
        let node = Node { parent: Some(parent), usage, limits, children: 0, filesystems: 0, snapshots: 0 };
        let cost = node.cost()?;
        self.raise(Some(parent), 0, cost)?;
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
        self.raise(Some(parent), cost, 0)?;
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
    /// A [`Shortage`] where the new ancestors cannot hold it, inside `Ok`; [`PoolError::Refused`] for unknown ones, the root, and a parent below it.
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
        next.raise(Some(old), cost, 0)?;
        next.raise(Some(parent), 0, cost)?;
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
    /// [`PoolError::Format`] for a counter out of bounds (nothing is changed then), [`PoolError::Refused`] for an unknown dataset.
    pub fn charge(&mut self, id: u64, change: Change) -> Result<(), PoolError> {
        let node = self.node(id)?;
        let (parent, before) = (node.parent, node.cost()?);
        let mut next = node.clone();
        next.usage = change.applied(&node.usage)?;
        self.raise(parent, before, next.cost()?)?;
        *self.node_mut(id)? = next;
        Ok(())
    }

    /// Applies changes of several datasets if no ancestor whose use grows goes beyond its quota and the pool has room; otherwise none. Moving
    /// space between relatives costs their common ancestors nothing.
    ///
    /// # Errors
    /// The [`Shortage`] inside `Ok`; otherwise as [`Self::charge`].
    pub fn charge_if_allowed(&mut self, changes: &[(u64, Change)], purpose: Purpose) -> Result<Result<(), Shortage>, PoolError> {
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

    /// Whether the head may write so many bytes more. What it frees by that is not known before the commit and does not help. Quotas hold for
    /// writes only: who is beyond one has to be able to delete.
    ///
    /// # Errors
    /// The [`Shortage`] inside `Ok`; [`PoolError::Refused`] for an unknown dataset.
    pub fn admits(&self, id: u64, bytes: u64, purpose: Purpose) -> Result<Result<(), Shortage>, PoolError> {
        let node = self.node(id)?;
        let writes = purpose == Purpose::Write && bytes > 0;
        if writes && node.limits.refquota.is_some_and(|limit| node.usage.referenced.saturating_add(bytes) > limit) {
            return Ok(Err(Shortage::Refquota(id)));
        }
        self.admits_use(id, bytes.saturating_sub(node.uncovered()), purpose)
    }

    /// Whether the use of a dataset may grow by so many bytes, for whatever reason.
    fn admits_use(&self, id: u64, bytes: u64, purpose: Purpose) -> Result<Result<(), Shortage>, PoolError> {
        let (mut id, mut growth) = (id, bytes);
        loop {
            let node = self.node(id)?;
            let used = node.used()?;
            let wanted = used.saturating_add(growth);
            let writes = purpose == Purpose::Write && growth > 0;
            if writes && node.limits.quota.is_some_and(|quota| wanted > quota) {
                return Ok(Err(Shortage::Quota(id)));
            }
            let Some(parent) = node.parent else {
                let full = growth > 0 && wanted > usable(self.size, purpose);
                return Ok(if full { Err(Shortage::Pool) } else { Ok(()) });
            };
            growth = wanted.max(node.limits.reservation) - used.max(node.limits.reservation);
            id = parent;
        }
    }

    /// What a dataset with its descendants may use more, bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn available(&self, id: u64) -> Result<u64, PoolError> {
        let mut chain = self.chain(id)?;
        chain.reverse();
        let mut available = usable(self.size, Purpose::Write);
        for id in chain {
            let node = self.node(id)?;
            let used = node.used()?;
            available = match node.parent {
                None => available.saturating_sub(used),
                Some(_) => available.saturating_add(node.limits.reservation.saturating_sub(used)),
            };
            available = available.min(node.limits.quota.map_or(u64::MAX, |quota| quota.saturating_sub(used)));
        }
        Ok(available)
    }

    /// What the head may write more: with its refreservation, within its refquota. The property `available`. Bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn available_to_head(&self, id: u64) -> Result<u64, PoolError> {
        let node = self.node(id)?;
        let available = self.available(id)?.saturating_add(node.uncovered());
        Ok(available.min(node.limits.refquota.map_or(u64::MAX, |limit| limit.saturating_sub(node.usage.referenced))))
    }

    /// The figures of a dataset.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn breakdown(&self, id: u64) -> Result<Breakdown, PoolError> {
        let node = self.node(id)?;
        Ok(Breakdown {
            used: node.used()?,
            by_dataset: node.usage.dataset,
            by_snapshots: node.usage.snapshots,
            by_children: node.children,
            by_refreservation: node.uncovered(),
        })
    }

    /// The counters of a dataset itself, as the catalog stores them.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn usage(&self, id: u64) -> Result<Usage, PoolError> {
        Ok(self.node(id)?.usage)
    }

    /// The limits of a dataset.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn limits(&self, id: u64) -> Result<Limits, PoolError> {
        Ok(self.node(id)?.limits)
    }

    /// Snapshots of these datasets in one txg: what their refreservations need anew has to be free, else none is taken.
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

    /// How much a snapshot of a dataset would need: the part of its refreservation that the head's unique data covers now. Bytes.
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
        self.limit_hit(id, |node| node.limits.snapshots.is_some_and(|limit| node.snapshots.saturating_add(more) > limit))
    }

    /// The dataset whose `filesystem_limit` so many more file systems below this one would exceed.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn filesystem_limit_hit(&self, id: u64, more: u64) -> Result<Option<u64>, PoolError> {
        self.limit_hit(id, |node| node.limits.filesystems.is_some_and(|limit| node.filesystems.saturating_add(more) > limit))
    }

    fn limit_hit(&self, id: u64, hit: impl Fn(&Node) -> bool) -> Result<Option<u64>, PoolError> {
        for id in self.chain(id)? {
            if hit(self.node(id)?) {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    fn raise(&mut self, id: Option<u64>, before: u64, after: u64) -> Result<(), PoolError> {
        let mut steps = Vec::new();
        let (mut next, mut before, mut after) = (id, before, after);
        while let Some(id) = next
            && before != after
        {
            let node = self.node(id)?;
            let mut changed = node.clone();
            changed.children = node.children.checked_sub(before).and_then(|rest| rest.checked_add(after)).ok_or_else(impossible)?;
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
            if grew && after.parent.is_none() && used > usable(self.size, purpose) {
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

mod limits;
mod owner;

pub use owner::{OwnerQuota, OwnerShortage};

#[cfg(test)]
mod tests;
