//! Frames that several rows name: counted in the catalog, freed with the last row.
//!
//! Called by commits: what came to be shared in a txg is counted before anything of it is freed.
//!
//! Invariant: a frame that n rows name, each with its snapshots and clones as one, has n - 1 in its
//! row of the catalog, and none for 1. Each dataset is charged for its rows; what the pool saves by
//! that is room that the accounts may go beyond the pool's size by.

use super::{Admin, Pool};
use crate::catalog::rows::SharedRow;
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};

impl Pool {
    /// A row names the frame no more, and no snapshot holds the row: it is free, or one that shares
    /// it less.
    pub(super) fn release(&self, admin: &mut Admin, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        if admin.sharing && admin.unshare(dead)? { Ok(()) } else { self.free(dead, txg) }
    }

    /// A frame that is never shared is free.
    pub(super) fn free(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        self.storage.free(dead, txg)
    }
}

impl Admin {
    /// Rows have come to share these frames.
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

    /// Whether others name the frame still; they are one fewer then.
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

    /// Counts at an import what sharing saves.
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
