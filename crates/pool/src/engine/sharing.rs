//! Frames that several rows share (block cloning): counted in the catalog, freed with the last row.
//!
//! Called by commits: new sharing of a txg is counted before any frame of the txg is freed.
//!
//! Invariant: a frame with n rows, each counted once together with its copies in snapshots and
//! clones, has the count n - 1 in the catalog, and no row there for n = 1. Each dataset is charged
//! for its rows; the pool adds the space saved by sharing to the size that the accounts may use.

use super::{Admin, Pool};
use crate::catalog::rows::SharedRow;
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};

impl Pool {
    /// Drops a row's reference to a frame, if no snapshot holds the row: the frame is freed, or
    /// shared by one row fewer.
    pub(super) fn release(&self, admin: &mut Admin, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        if admin.sharing && admin.unshare(dead)? { Ok(()) } else { self.free(dead, txg) }
    }

    /// Frees a frame that is never shared.
    pub(super) fn free(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        self.storage.free(dead, txg)
    }
}

impl Admin {
    /// Counts one more row for each of these frames.
    pub(super) fn share(&mut self, pointers: &[Pointer]) -> Result<(), PoolError> {
        let mut saved = 0u64;
        for pointer in pointers {
            let mut row = self
                .catalog
                .shared(pointer.segment, pointer.index)?
                .unwrap_or(SharedRow { more: 0, charged: pointer.charged() });
            row.more += 1;
            self.catalog.set_shared(pointer.segment, pointer.index, Some(&row))?;
            saved = saved.saturating_add(pointer.charged());
            self.sharing = true;
        }
        if saved > 0 {
            let mut quotas = self.quota_tree();
            let before = quotas.saved();
            quotas.set_saved(before.saturating_add(saved));
        }
        Ok(())
    }

    /// Drops one reference of a shared frame; `false` if no other row references it.
    fn unshare(&mut self, dead: &Dead) -> Result<bool, PoolError> {
        let Some(mut row) = self.catalog.shared(dead.segment, dead.index)? else { return Ok(false) };
        row.more = row.more.saturating_sub(1);
        let left = Some(&row).filter(|row| row.more > 0);
        self.catalog.set_shared(dead.segment, dead.index, left)?;
        let mut quotas = self.quota_tree();
        let before = quotas.saved();
        quotas.set_saved(before.saturating_sub(dead.charged));
        Ok(true)
    }

    /// Counts the space saved by sharing; called at the import.
    pub(super) fn count_shared(&mut self) -> Result<(), PoolError> {
        let mut saved = 0u64;
        for row in self.catalog.all_shared()? {
            saved = saved.saturating_add(row.charged.saturating_mul(row.more));
            self.sharing = true;
        }
        self.quota_tree().set_saved(saved);
        Ok(())
    }
}
