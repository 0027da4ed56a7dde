//! Implements the engine's [`Storage`] for the [`Store`].

use super::{Storage, Work};
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::log::Start;
use crate::pointer::{Pointer, Txg};
use crate::rows::keys::Hashing;
use crate::space::Purpose;
use crate::store::{Commit, Space, Store};

impl Storage for Store {
    fn free(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        self.free_named(dead.segment, dead.index, dead.charged, txg);
        Ok(())
    }

    fn commit(&self, txg: Txg, catalog: Option<Pointer>, log: Start, time: u64) -> Result<(), PoolError> {
        self.commit(&Commit { txg, catalog, upper: &[], log_start: log.into(), time })
    }

    fn opened(&self) -> Result<(), PoolError> {
        self.confirm()
    }

    fn expand(&self, time: u64) -> bool {
        Self::expand(self, time).is_ok_and(|grown| !grown.is_empty())
    }

    fn keep_unwritten(&self, on: bool) {
        self.keep_unwritten(on);
    }

    fn held_unwritten(&self) -> u64 {
        self.held_unwritten()
    }

    fn suspended(&self) -> Option<PoolError> {
        let reason = self.suspended()?.to_owned();
        Some(PoolError::Suspended { durable: self.durable(), reason })
    }

    fn suspend(&self, error: &PoolError) -> PoolError {
        self.suspend(error)
    }

    fn size(&self) -> u64 {
        self.space().size
    }

    fn room(&self, purpose: Purpose) -> u64 {
        let Space { free, slop, .. } = self.space();
        free.saturating_sub(match purpose {
            Purpose::Write => slop,
            Purpose::Replace => slop / 4 * 3,
            Purpose::Free => slop / 2,
            Purpose::Destroy => slop / 4,
        })
    }

    fn room_before_cleaning(&self) -> u64 {
        Self::room(self)
    }

    fn largest_frame(&self) -> u64 {
        Self::largest_frame(self)
    }

    fn hashing(&self) -> Hashing {
        if self.has_ordered_names() { Hashing::Ordered } else { Hashing::Whole }
    }

    fn allow_folding(&self, time: u64) -> Result<(), PoolError> {
        self.allow_folding(time)
    }

    fn is_sealed(&self) -> bool {
        self.is_sealed()
    }

    fn tend(&self, budget: u64) -> Result<Work, PoolError> {
        let trimming = self.trim_step()?;
        let cleaned = self.clean_step(budget)?;
        if !cleaned.more {
            self.let_go()?;
        } else if self.let_go_in_need()? {
            return Ok(Work::Urgent);
        }
        Ok(if trimming || cleaned.more { Work::More } else { Work::None })
    }
}
