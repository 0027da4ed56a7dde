//! Doomed roots: trees of destroyed datasets and of rolled-back live datasets. Their frames are
//! freed step by step by the commits that follow, so that no commit takes long and a crash loses no
//! step.
//!
//! Called by administration (a root becomes doomed in the commit that drops it) and by each commit.
//!
//! Invariant: the position reached in a root is stored by the same commit that frees the frames
//! before it; a frame is freed when nothing below it will be read again.

use super::{Admin, Pool};
use crate::catalog::rows::DoomedRow;
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};
use crate::rows::dead_of;
use crate::tree::{Context, walk::Reaped, walk::harvest};

/// Number of frames and rows of doomed roots that one commit frees; small in tests, for many steps.
const FREED_AT_ONCE: u64 = if cfg!(test) { 50 } else { 100_000 };

impl Pool {
    /// Schedules the frames that a root reaches and that were born after a snapshot for being
    /// freed.
    pub(super) fn doom(&self, admin: &mut Admin, root: Option<Pointer>, since: Txg) -> Result<(), PoolError> {
        match root {
            Some(root) if root.birth > since => {
                admin.catalog.set_doomed(&root, Some(&DoomedRow { root, since, from: Vec::new() }))
            }
            _ => Ok(()),
        }
    }

    /// Frees some of the frames of doomed roots; returns whether there are more.
    pub(super) fn free_doomed(&self, admin: &mut Admin, txg: Txg) -> Result<bool, PoolError> {
        let mut budget = FREED_AT_ONCE;
        for row in admin.catalog.doomed()? {
            if budget == 0 {
                return Ok(true);
            }
            let mut found = Vec::new();
            let paused = self.reap(&row, &mut budget, &mut |dead| found.push(dead))?;
            let left = paused.map(|from| DoomedRow { from, ..row.clone() });
            // Stored before anything is freed: a frame that cannot be freed is lost space, a frame
            // freed twice would be worse.
            admin.catalog.set_doomed(&row.root, left.as_ref())?;
            let freed = found.iter().map(|dead| self.release(admin, dead, txg));
            freed.fold(Ok(()), Result::and)?;
            if left.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Collects frames of a doomed root from the stored position on; returns the position that this
    /// budget reaches.
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
