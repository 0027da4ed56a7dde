//! Setting the limits of datasets: checks which sizes are accepted, for `nacre fs set` and `create -o`.
//!
//! Invariant: a refused limit changes nothing.

use super::QuotaTree;
use crate::error::{LimitRefusal, PoolError};
use crate::space::AccountError;

type Outcome = Result<(), AccountError<LimitRefusal>>;

impl QuotaTree {
    /// Sets `quota`; it must not be below the used and reserved space.
    ///
    /// # Errors
    /// A [`LimitRefusal`]; [`PoolError::Refused`] for an unknown dataset.
    pub fn set_quota(&mut self, id: u64, quota: Option<u64>) -> Outcome {
        let node = self.node_mut(id)?;
        if quota.is_some_and(|quota| quota < node.limits.reservation) {
            return Err(AccountError::Refused(LimitRefusal::BelowUse));
        }
        let used = node.used()?;
        if quota.is_some_and(|quota| quota < used) {
            return Err(AccountError::Refused(LimitRefusal::BelowUse));
        }
        node.limits.quota = quota;
        Ok(())
    }

    /// Sets `refquota`; it must not be below the referenced and reserved space.
    ///
    /// # Errors
    /// As [`Self::set_quota`].
    pub fn set_refquota(&mut self, id: u64, refquota: Option<u64>) -> Outcome {
        let node = self.node_mut(id)?;
        if refquota.is_some_and(|limit| limit < node.usage.referenced || limit < node.limits.refreservation) {
            return Err(AccountError::Refused(LimitRefusal::BelowUse));
        }
        node.limits.refquota = refquota;
        Ok(())
    }

    /// Sets `reservation`: the increase has to be available to the parent, and the reservation has to fit the quota.
    ///
    /// # Errors
    /// As [`Self::set_quota`].
    pub fn set_reservation(&mut self, id: u64, reservation: u64) -> Outcome {
        let node = self.node(id)?;
        let (parent, cost) = (node.parent, node.cost()?);
        let mut next = node.clone();
        next.limits.reservation = reservation;
        let (before, after) = (cost.settled, next.cost()?.settled);
        let grant = match parent {
            Some(parent) => self.available(parent)?,
            None => self.available(id)?,
        };
        let beyond_quota = node.limits.quota.is_some_and(|quota| reservation > quota);
        if after > before && (after - before > grant || beyond_quota) {
            return Err(AccountError::Refused(LimitRefusal::BeyondAvailable));
        }
        self.raise(parent, cost, next.cost()?)?;
        *self.node_mut(id)? = next;
        Ok(())
    }

    /// Sets `refreservation`: the increase has to be available, and the reservation has to fit the refquota.
    ///
    /// # Errors
    /// As [`Self::set_quota`].
    pub fn set_refreservation(&mut self, id: u64, refreservation: u64) -> Outcome {
        let node = self.node(id)?;
        let mut next = node.clone();
        next.limits.refreservation = refreservation;
        let (before, after) = (node.uncovered(), next.uncovered());
        let beyond_refquota = node.limits.refquota.is_some_and(|limit| refreservation > limit);
        if after > before && (after - before > self.available(id)? || beyond_refquota) {
            return Err(AccountError::Refused(LimitRefusal::BeyondAvailable));
        }
        let (parent, cost) = (node.parent, node.cost()?);
        self.raise(parent, cost, next.cost()?)?;
        *self.node_mut(id)? = next;
        Ok(())
    }

    /// Sets `filesystem_limit`. A limit below the current number only prevents further file systems.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn set_filesystem_limit(&mut self, id: u64, limit: Option<u64>) -> Result<(), PoolError> {
        self.node_mut(id)?.limits.filesystems = limit;
        Ok(())
    }

    /// Sets `snapshot_limit`. A limit below the current number only prevents further snapshots.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn set_snapshot_limit(&mut self, id: u64, limit: Option<u64>) -> Result<(), PoolError> {
        self.node_mut(id)?.limits.snapshots = limit;
        Ok(())
    }
}
