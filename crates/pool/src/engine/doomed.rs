//! Roots that nobody uses any more, of destroyed datasets and of heads that were rolled back: their
//! frames are freed step by step, by the commits that follow, so that no commit takes long and a
//! crash loses no step.
//!
//! Called by administration (a root is doomed in the commit that lets it go) and by each commit.
//!
//! Invariant: how far a root has come is part of the commit that frees what lies before; a frame is
//! freed when nothing below it will be read again.

use super::{Admin, Pool};
use crate::catalog::rows::DoomedRow;
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};
use crate::rows::dead_of;
use crate::tree::{Context, walk::Reaped, walk::harvest};

/// How many frames and rows of doomed roots one commit frees; tests take many steps.
const FREED_AT_ONCE: u64 = if cfg!(test) { 50 } else { 100_000 };

impl Pool {
    /// What a root reaches that was born after a snapshot will be freed.
    pub(super) fn doom(&self, admin: &mut Admin, root: Option<Pointer>, since: Txg) -> Result<(), PoolError> {
        match root {
            Some(root) if root.birth > since => {
                admin.catalog.set_doomed(&root, Some(&DoomedRow { root, since, from: Vec::new() }))
            }
            _ => Ok(()),
        }
    }

    /// Frees a part of what is doomed; whether there is more.
    pub(super) fn free_doomed(&self, admin: &mut Admin, txg: Txg) -> Result<bool, PoolError> {
        let mut budget = FREED_AT_ONCE;
        for row in admin.catalog.doomed()? {
            if budget == 0 {
                return Ok(true);
            }
            let mut found = Vec::new();
            let paused = self.reap(&row, &mut budget, &mut |dead| found.push(dead))?;
            let left = paused.map(|from| DoomedRow { from, ..row.clone() });
            // Before anything is freed: what cannot be freed here is lost room, what is freed twice
            // would be worse.
            admin.catalog.set_doomed(&row.root, left.as_ref())?;
            let freed = found.iter().map(|dead| self.release(admin, dead, txg));
            freed.fold(Ok(()), Result::and)?;
            if left.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The frames of a doomed root from where it has come to; returns where it comes to with this
    /// budget.
    pub(super) fn reap(
        &self,
        row: &DoomedRow,
        budget: &mut u64,
        found: &mut dyn FnMut(Dead),
    ) -> Result<Option<Vec<u8>>, PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        harvest(&context, &row.root, row.since, &row.from, budget, &mut |reaped| {
            let dead = match reaped {
                Reaped::Frame(pointer) => Ok(Some(Dead::of(pointer, false))),
                Reaped::Row(key, value) => dead_of(key, value),
                Reaped::Damaged(pointer, error) => {
                    tracing::error!(%error, frame = %pointer, "what was destroyed cannot be freed below a damaged node: its room is lost");
                    Ok(None)
                }
            };
            // A row that cannot be read frees nothing: the same loss.
            let dead = dead.inspect_err(
                |error| tracing::error!(%error, "a row of what was destroyed cannot be read: its room is lost"),
            );
            dead.ok().flatten().filter(|dead| dead.birth > row.since).into_iter().for_each(&mut *found);
            Ok(())
        })
    }
}
