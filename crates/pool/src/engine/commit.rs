//! Commits: everything that was done becomes durable at one moment.
//!
//! Invariant: the order. Content and trees are written before the catalog that names them, the catalog before the store's root record; frames are freed by
//! the same commit that makes their owners unreachable.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::dataset::{Dataset, Taken};
use super::{Admin, Pool, as_pool_error};
use crate::deadlist::{Dead, Fate, killed};
use crate::error::PoolError;
use crate::frames::Packing;
use crate::pointer::{ChecksumKind, Pointer, Txg};
use crate::space::Change;
use crate::tree::{Context, commit::Form};

/// How many frames of destroyed snapshots and datasets one commit frees: so that none takes long.
const FREED_AT_ONCE: usize = 20_000;

impl Pool {
    /// Makes everything durable that was done before the call.
    ///
    /// # Errors
    /// Those of the store: the pool is suspended then.
    pub fn commit(&self) -> Result<Txg, PoolError> {
        self.commit_with(|_, txg| Ok(txg))
    }

    /// A commit of which `administer` is a part: it sees the datasets as this commit leaves them. Where it refuses, the commit is made without what it did,
    /// so it must not change anything before it refuses.
    pub(super) fn commit_with<R>(&self, administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>) -> Result<R, PoolError> {
        let mut admin = self.admin.lock();
        self.commit_under(&mut admin, administer)
    }

    /// The same under a lock that is held already.
    pub(super) fn commit_under<R>(
        &self,
        admin: &mut MutexGuard<'_, Admin>,
        administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        if let Some(failed) = &admin.failed {
            return Err(failed.clone());
        }
        match self.run_commit(admin, administer) {
            Ok(answer) => answer,
            Err(error) => {
                admin.failed = Some(error.clone());
                Err(error)
            }
        }
    }

    /// The outer result is the commit's, the inner one the administration's.
    fn run_commit<R>(
        &self,
        admin: &mut MutexGuard<'_, Admin>,
        administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>,
    ) -> Result<Result<R, PoolError>, PoolError> {
        let datasets: Vec<Arc<Dataset>> = self.datasets.read().values().cloned().collect();
        for dataset in &datasets {
            // Most of it while operations go on, so that they wait shortly.
            dataset.files().free_let_go().map_err(as_pool_error)?;
            let entered = self.gate.enter();
            dataset.files().flush(entered.txg()).map_err(as_pool_error)?;
        }
        let log = self.log.get();
        let (txg, taken, last) = self.gate.advance(|txg| {
            let taken = datasets.iter().map(|dataset| dataset.take(txg)).collect::<Result<Vec<Taken>, _>>();
            (txg, taken, log.map(|log| log.newest()))
        });
        admin.catalog.set_txg(txg);
        for taken in taken? {
            self.write_dataset(admin, txg, taken)?;
        }
        let answer = administer(admin, txg);
        self.free_some(admin, txg)?;
        let (written, dead) = admin.catalog.write_out(txg)?;
        for pointer in &dead {
            self.release(&Dead::of(pointer, false), txg)?;
        }
        let start = log.map_or_else(Default::default, |log| log.start_after(txg));
        self.storage.commit(txg, written.root, start)?;
        if let (Some(log), Some(last)) = (log, last) {
            log.committed(txg, last);
        }
        Ok(answer)
    }

    /// Writes a dataset's tree out and settles its accounts.
    fn write_dataset(&self, admin: &mut Admin, txg: Txg, taken: Taken) -> Result<(), PoolError> {
        let Taken { dataset, frozen, written, mut freed } = taken;
        if !frozen.is_dirty() && written == 0 && freed.is_empty() {
            dataset.files().with_table(|table| table.tree.settle(&frozen))?;
            return Ok(());
        }
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let tree = frozen.write_out(&context, Form { txg, packing: Packing::Lz4, checksum: ChecksumKind::Xxh3 })?;
        let dead = dataset.files().with_table(|table| {
            table.tree.settle(&frozen)?;
            Ok::<_, PoolError>(table.tree.take_dead(txg))
        })?;
        freed.extend(dead);
        let mut row = admin.catalog.dataset(dataset.id())?;
        row.root = tree.root;
        admin.catalog.set_dataset(dataset.id(), &row)?;
        self.account(admin, dataset.id(), txg, written + tree.bytes, &freed)
    }

    /// Applies the free rule to what a head does not reference any more, and counts what it has written.
    pub(super) fn account(&self, admin: &mut Admin, id: u64, txg: Txg, written: u64, freed: &[Pointer]) -> Result<(), PoolError> {
        let mut row = admin.catalog.dataset(id)?;
        let origin = row.origin.map_or(Txg(0), |(_, txg)| txg);
        let mut change = Change::written(i64::try_from(written).map_err(|_| too_much())?);
        let mut listed = Vec::new();
        for pointer in freed {
            let dead = Dead::of(pointer, false);
            let (fate, of_it) = killed(dead.birth, dead.charged, row.newest, origin)?;
            change = sum(change, of_it)?;
            match fate {
                Fate::Freed => self.release(&dead, txg)?,
                Fate::Listed => listed.push(dead),
            }
        }
        if !listed.is_empty() {
            let (points, _) = admin.catalog.history_of(id)?;
            let history: Vec<Txg> = points.iter().map(|point| point.txg).filter(|txg| *txg != crate::deadlist::Point::HEAD).collect();
            admin.catalog.deadlists().append(row.list, &history, &listed)?;
        }
        admin.forest.charge(id, change)?;
        row.usage = admin.forest.usage(id)?;
        admin.catalog.set_dataset(id, &row)
    }

    /// Frees a part of what destroyed snapshots and datasets have left.
    fn free_some(&self, admin: &mut Admin, txg: Txg) -> Result<(), PoolError> {
        let freeing = admin.catalog.head()?.freeing;
        for dead in admin.catalog.deadlists().drain(freeing, FREED_AT_ONCE)? {
            self.release(&dead, txg)?;
        }
        Ok(())
    }

    pub(super) fn release(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        self.storage.free(dead, txg)
    }
}

fn too_much() -> PoolError {
    PoolError::Format(crate::error::Damage::Structure("a space counter out of bounds"))
}

fn sum(a: Change, b: Change) -> Result<Change, PoolError> {
    let add = |a: i64, b: i64| a.checked_add(b).ok_or_else(too_much);
    Ok(Change {
        dataset: add(a.dataset, b.dataset)?,
        snapshots: add(a.snapshots, b.snapshots)?,
        referenced: add(a.referenced, b.referenced)?,
        unique: add(a.unique, b.unique)?,
    })
}
