//! Tree of datasets with usage, promises and limits: decides whether a write is admitted, by all quotas and
//! reservations from its dataset up to the pool.
//!
//! Callers: `engine/reservation.rs`, before an operation is accepted, and when a commit turns promises into usage;
//! administration, which changes limits and datasets.
//!
//! Invariants: promises are worst case, so an admitted operation stays within all limits whatever its outcome; a
//! change is applied to a whole chain of ancestors or not at all.

mod figures;
mod limits;

use std::collections::BTreeMap;

use super::{AccountError, Limits, Purpose, Shortage, Usage, UsageChange, impossible, usable};
use crate::error::PoolError;

#[derive(Clone, Debug)]
struct Node {
    parent: Option<u64>,
    usage: Usage,
    limits: Limits,
    /// Promised to the head and not in `usage` yet: at most this many more bytes will be written.
    promised: u64,
    /// Sum over the children of max(used, reservation): the space that they cost.
    children: u64,
    /// The children's sum of max(used, reservation) if all promises are written.
    children_promised: u64,
    /// Number of file systems below, at any depth.
    filesystems: u64,
    /// Number of snapshots here and below.
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

    /// Used space if everything promised is written.
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

/// Cost of a dataset for its parent: max(used, reservation), without and with promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    settled: u64,
    promised: u64,
}

/// All datasets of a pool, by number. There is one root.
#[derive(Clone, Debug)]
pub struct QuotaTree {
    nodes: BTreeMap<u64, Node>,
    /// Size of the pool less what belongs to no dataset, bytes.
    size: u64,
    /// Savings by sharing: charged to several datasets, stored once; the excess of the charges. Bytes.
    saved: u64,
    /// Charges of all datasets that the real free space allows: frames leave gaps, and the pool stores its own
    /// metadata. Bytes.
    reachable: u64,
}

impl QuotaTree {
    /// The tree of a pool of this size with a root dataset.
    #[must_use]
    pub fn new(root: u64, size: u64, usage: Usage, limits: Limits) -> Self {
        let node = Node::new(None, usage, limits);
        Self { nodes: BTreeMap::from([(root, node)]), size, saved: 0, reachable: u64::MAX }
    }

    /// Sets the size, after the pool has grown or the space of no dataset has changed. Bytes.
    pub fn resize(&mut self, size: u64) {
        self.size = size;
    }

    /// Savings by sharing between datasets: charged to several, stored once; the excess of the charges. Bytes.
    #[must_use]
    pub fn saved(&self) -> u64 {
        self.saved
    }

    /// Sets the value of [`Self::saved`].
    pub fn set_saved(&mut self, bytes: u64) {
        self.saved = bytes;
    }

    /// Maximum of the charges of all datasets.
    fn line(&self, purpose: Purpose) -> u64 {
        let usable = |purpose| usable(self.size, purpose);
        let reachable = self.reachable.saturating_add(usable(purpose) - usable(Purpose::Write));
        usable(purpose).saturating_add(self.saved).min(reachable)
    }

    /// Sets the free space for ordinary writes, in addition to what all datasets store now. Bytes.
    pub fn set_room(&mut self, bytes: u64) {
        let stored = self.nodes.values().map(|node| node.usage.dataset.saturating_add(node.usage.snapshots));
        self.reachable = stored.fold(bytes, u64::saturating_add);
    }

    /// Adds a dataset: as read from the catalog, parents before children, or created or cloned now.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown parent or a number that is taken; an error for counters out of bounds.
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

    /// Removes a destroyed dataset; its space becomes available to its parent.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for the root, an unknown dataset, and one with children.
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

    /// Moves a dataset with its descendants to another parent.
    ///
    /// # Errors
    /// A [`Shortage`] where the new ancestors have no space for it; [`PoolError::Refused`] for unknown datasets, the
    /// root, and a parent below the dataset.
    pub fn reparent(&mut self, id: u64, parent: u64) -> Result<(), AccountError<Shortage>> {
        if self.chain(parent)?.contains(&id) {
            return Err(PoolError::Refused("a dataset cannot be put below itself".to_owned()).into());
        }
        let node = self.node(id)?;
        let Some(old) = node.parent else {
            return Err(PoolError::Refused("the root of a pool has no parent".to_owned()).into());
        };
        let (cost, filesystems, snapshots) = (node.cost()?, node.filesystems + 1, node.snapshots);
        let mut next = self.clone();
        next.raise(Some(old), cost, Cost::default())?;
        next.raise(Some(parent), Cost::default(), cost)?;
        self.grown(&next, &self.chain(parent)?, Purpose::Write)?;
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
        Ok(())
    }

    /// Applies a past change to a dataset and its ancestors, regardless of the limits.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a counter out of bounds (nothing is changed then), [`PoolError::Refused`] for an
    /// unknown dataset.
    pub fn charge(&mut self, id: u64, change: UsageChange) -> Result<(), PoolError> {
        let node = self.node(id)?;
        let (parent, before) = (node.parent, node.cost()?);
        let mut next = node.clone();
        next.usage = change.applied(&node.usage)?;
        self.raise(parent, before, next.cost()?)?;
        *self.node_mut(id)? = next;
        Ok(())
    }

    /// Applies changes of several datasets if every ancestor with growing usage stays within its quota and the pool
    /// has space; otherwise none. Moving space between relatives costs their common ancestors nothing.
    ///
    /// # Errors
    /// A [`Shortage`]; otherwise as [`Self::charge`].
    pub fn charge_if_allowed(
        &mut self,
        changes: &[(u64, UsageChange)],
        purpose: Purpose,
    ) -> Result<(), AccountError<Shortage>> {
        let mut next = self.clone();
        let mut touched = Vec::new();
        for (id, change) in changes {
            next.charge(*id, *change)?;
            touched.extend(self.chain(*id)?);
        }
        self.grown(&next, &touched, purpose)?;
        *self = next;
        Ok(())
    }

    /// Accounts for snapshots of these datasets in one txg: their refreservations need space anew, which has to be
    /// available; otherwise no snapshot is taken.
    ///
    /// # Errors
    /// A [`Shortage`]; [`PoolError::Refused`] for an unknown dataset.
    pub fn take_snapshots(&mut self, ids: &[u64]) -> Result<(), AccountError<Shortage>> {
        let mut changes = Vec::new();
        for id in ids {
            let unique = i64::try_from(self.node(*id)?.usage.unique).map_err(|_| impossible())?;
            changes.push((*id, UsageChange { unique: -unique, ..UsageChange::default() }));
        }
        self.charge_if_allowed(&changes, Purpose::Write)
    }

    /// Space that a snapshot of a dataset would need: the part of its refreservation that the head's unique data
    /// covers now. Bytes.
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

    /// The dataset whose `snapshot_limit` this many more snapshots would exceed.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn snapshot_limit_hit(&self, id: u64, more: u64) -> Result<Option<u64>, PoolError> {
        self.limit_hit(id, |node| {
            node.limits.snapshots.is_some_and(|limit| node.snapshots.saturating_add(more) > limit)
        })
    }

    /// The dataset whose `filesystem_limit` this many more file systems would exceed.
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

    /// Checks that all growing usage in the next state is within the quotas.
    fn grown(&self, next: &Self, ids: &[u64], purpose: Purpose) -> Result<(), AccountError<Shortage>> {
        for id in ids {
            let (before, after) = (self.node(*id)?, next.node(*id)?);
            let (used, grew) = (after.used()?, after.used()? > before.used()?);
            if grew && after.limits.quota.is_some_and(|quota| used > quota) {
                return Err(AccountError::Refused(Shortage::Quota(*id)));
            }
            if grew && after.parent.is_none() && used > self.line(purpose) {
                return Err(AccountError::Refused(Shortage::Pool));
            }
        }
        Ok(())
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

impl QuotaTree {
    /// Checks whether the head may write more bytes, in addition to its promises. Space freed by that is unknown
    /// before the commit and does not count. Quotas apply to writes only: a user beyond one has to be able to delete.
    ///
    /// # Errors
    /// A [`Shortage`]; [`PoolError::Refused`] for an unknown dataset.
    pub fn admits(&self, id: u64, bytes: u64, purpose: Purpose) -> Result<(), AccountError<Shortage>> {
        let node = self.node(id)?;
        let writes = purpose == Purpose::Write && bytes > 0;
        let referenced = node.usage.referenced.saturating_add(node.promised).saturating_add(bytes);
        if writes && node.limits.refquota.is_some_and(|limit| referenced > limit) {
            return Err(AccountError::Refused(Shortage::Refquota(id)));
        }
        let uncovered = node.limits.refreservation.saturating_sub(node.usage.unique.saturating_add(node.promised));
        let (mut id, mut growth) = (id, bytes.saturating_sub(uncovered));
        loop {
            let node = self.node(id)?;
            let used = node.used_promised()?;
            let wanted = used.saturating_add(growth);
            let writes = purpose == Purpose::Write && growth > 0;
            if writes && node.limits.quota.is_some_and(|quota| wanted > quota) {
                return Err(AccountError::Refused(Shortage::Quota(id)));
            }
            let Some(parent) = node.parent else {
                let full = growth > 0 && wanted > self.line(purpose);
                return if full { Err(AccountError::Refused(Shortage::Pool)) } else { Ok(()) };
            };
            growth = wanted.max(node.limits.reservation) - used.max(node.limits.reservation);
            id = parent;
        }
    }

    /// Promises the head this many bytes, regardless of the limits.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn promise(&mut self, id: u64, bytes: u64) -> Result<(), PoolError> {
        let promised = self.node(id)?.promised.saturating_add(bytes);
        self.set_promised(id, promised)
    }

    /// Releases a part of the promises that will not be written, or has been charged.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn release(&mut self, id: u64, bytes: u64) -> Result<(), PoolError> {
        // A promise that is released twice must not cause an error: the count stops at zero.
        let promised = self.node(id)?.promised.saturating_sub(bytes);
        self.set_promised(id, promised)
    }

    /// Whether a dataset or a descendant has promises that would increase its usage.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn has_promises(&self, id: u64) -> Result<bool, PoolError> {
        let node = self.node(id)?;
        Ok(node.promised > 0 || node.children_promised != node.children)
    }

    /// Replaces a promise by an actual change, atomically.
    ///
    /// # Errors
    /// As [`Self::charge`].
    pub fn settle(&mut self, id: u64, promised: u64, change: UsageChange) -> Result<(), PoolError> {
        self.charge(id, change)?;
        self.release(id, promised)
    }

    /// Space that the head references, including promises. Bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn expected(&self, id: u64) -> Result<u64, PoolError> {
        let node = self.node(id)?;
        Ok(node.usage.referenced.saturating_add(node.promised))
    }

    fn set_promised(&mut self, id: u64, promised: u64) -> Result<(), PoolError> {
        let node = self.node(id)?;
        let (parent, before) = (node.parent, node.cost()?);
        let mut next = node.clone();
        next.promised = promised;
        let after = next.cost()?;
        self.raise(parent, before, after)?;
        *self.node_mut(id)? = next;
        Ok(())
    }

    /// Space that the head may still write, in addition to its promises: with its refreservation, within its refquota
    /// and all quotas above. Bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn room(&self, id: u64) -> Result<u64, PoolError> {
        let mut chain = self.chain(id)?;
        chain.reverse();
        let mut room = self.line(Purpose::Write);
        for id in chain {
            let node = self.node(id)?;
            let used = node.used_promised()?;
            room = match node.parent {
                None => room.saturating_sub(used),
                Some(_) => room.saturating_add(node.limits.reservation.saturating_sub(used)),
            };
            room = room.min(node.limits.quota.map_or(u64::MAX, |quota| quota.saturating_sub(used)));
        }
        let node = self.node(id)?;
        let uncovered = node.limits.refreservation.saturating_sub(node.usage.unique.saturating_add(node.promised));
        let referenced = node.usage.referenced.saturating_add(node.promised);
        Ok(room
            .saturating_add(uncovered)
            .min(node.limits.refquota.map_or(u64::MAX, |limit| limit.saturating_sub(referenced))))
    }
}
