//! Whether a write is admitted, and what was promised to those that were.
//!
//! Callers: the desk of admission, before an operation is accepted, and when a commit has made of
//! promises what they have become.
//!
//! Invariant: what is promised is worst case, so what is admitted is within all limits whatever
//! becomes of it.

use super::{Change, Forest, Purpose, Shortage};
use crate::error::PoolError;

impl Forest {
    /// Whether the head may write so many bytes more, beside what is promised. What it frees by
    /// that is not known before the commit and does not help. Quotas hold for writes only: who is
    /// beyond one has to be able to delete.
    ///
    /// # Errors
    /// The [`Shortage`] inside `Ok`; [`PoolError::Refused`] for an unknown dataset.
    pub fn admits(&self, id: u64, bytes: u64, purpose: Purpose) -> Result<Result<(), Shortage>, PoolError> {
        let node = self.node(id)?;
        let writes = purpose == Purpose::Write && bytes > 0;
        let referenced = node.usage.referenced.saturating_add(node.promised).saturating_add(bytes);
        if writes && node.limits.refquota.is_some_and(|limit| referenced > limit) {
            return Ok(Err(Shortage::Refquota(id)));
        }
        let uncovered = node.limits.refreservation.saturating_sub(node.usage.unique.saturating_add(node.promised));
        let (mut id, mut growth) = (id, bytes.saturating_sub(uncovered));
        loop {
            let node = self.node(id)?;
            let used = node.used_promised()?;
            let wanted = used.saturating_add(growth);
            let writes = purpose == Purpose::Write && growth > 0;
            if writes && node.limits.quota.is_some_and(|quota| wanted > quota) {
                return Ok(Err(Shortage::Quota(id)));
            }
            let Some(parent) = node.parent else {
                let full = growth > 0 && wanted > self.line(purpose);
                return Ok(if full { Err(Shortage::Pool) } else { Ok(()) });
            };
            growth = wanted.max(node.limits.reservation) - used.max(node.limits.reservation);
            id = parent;
        }
    }

    /// Promises the head so many bytes, whatever the limits say.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn promise(&mut self, id: u64, bytes: u64) -> Result<(), PoolError> {
        let promised = self.node(id)?.promised.saturating_add(bytes);
        self.set_promised(id, promised)
    }

    /// So much of what was promised will not come, or has been charged.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn release(&mut self, id: u64, bytes: u64) -> Result<(), PoolError> {
        // A promise that is given back twice may not stop anybody: it is bounded at nothing.
        let promised = self.node(id)?.promised.saturating_sub(bytes);
        self.set_promised(id, promised)
    }

    /// Whether a dataset or one below it is promised anything that makes it use more.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn has_promises(&self, id: u64) -> Result<bool, PoolError> {
        let node = self.node(id)?;
        Ok(node.promised > 0 || node.children_promised != node.children)
    }

    /// A promise of so many bytes has become this change: both at the same moment.
    ///
    /// # Errors
    /// As [`Self::charge`].
    pub fn settle(&mut self, id: u64, promised: u64, change: Change) -> Result<(), PoolError> {
        self.charge(id, change)?;
        self.release(id, promised)
    }

    /// What the head references, with what it has been promised and may still write. Bytes.
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

    /// What the head may write more, beside what is promised: with its refreservation, within its
    /// refquota and all quotas above. Bytes.
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
