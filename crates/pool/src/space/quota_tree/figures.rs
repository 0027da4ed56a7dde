//! Figures of datasets for commands: as of the last commit.

use super::QuotaTree;
use crate::error::PoolError;
use crate::space::{Breakdown, Limits, Purpose, Usage};

impl QuotaTree {
    /// Space available to a dataset with its descendants, bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn available(&self, id: u64) -> Result<u64, PoolError> {
        let mut chain = self.chain(id)?;
        chain.reverse();
        let mut available = self.line(Purpose::Write);
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

    /// Space available to the head: with its refreservation, within its refquota. The property `available`. Bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn available_to_head(&self, id: u64) -> Result<u64, PoolError> {
        let node = self.node(id)?;
        let available = self.available(id)?.saturating_add(node.uncovered());
        Ok(available.min(node.limits.refquota.map_or(u64::MAX, |limit| limit.saturating_sub(node.usage.referenced))))
    }

    /// Space of a dataset by consumer.
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

    /// Space stored by a dataset and its descendants, charged and before compression, without reservations. Bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn stored_below(&self, id: u64) -> Result<(u64, u64), PoolError> {
        self.node(id)?;
        let (mut charged, mut logical) = (0u64, 0u64);
        for (other, node) in &self.nodes {
            if *other == id || self.chain(*other)?.contains(&id) {
                charged = charged.saturating_add(node.usage.dataset).saturating_add(node.usage.snapshots);
                logical = logical.saturating_add(node.usage.logical_used);
            }
        }
        Ok((charged, logical))
    }

    /// The dataset and its ancestors, the root last.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn ancestors(&self, id: u64) -> Result<Vec<u64>, PoolError> {
        self.chain(id)
    }

    /// Number of file systems below a dataset, and number of snapshots of it and below.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn counts(&self, id: u64) -> Result<(u64, u64), PoolError> {
        let node = self.node(id)?;
        Ok((node.filesystems, node.snapshots))
    }

    /// The usage of a dataset itself, as the catalog stores it.
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
}
