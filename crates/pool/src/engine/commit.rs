//! Commits: all changes become durable at one moment.
//!
//! Invariant: the order. Content and trees are written before the catalog that names them, the
//! catalog before the store's root record; frames are freed by the same commit that makes their
//! owners unreachable.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::commit_times::CommitFigures;
use super::dataset::{Dataset, Taken};
use super::{Admin, Pool, as_pool_error};
use crate::cache::Counters;
use crate::deadlist::{Dead, Fate, killed};
use crate::error::PoolError;
use crate::files::{StoredBytes, flush_most};
use crate::frames::CompressionSetting;
use crate::patience;
use crate::pointer::{ChecksumKind, Txg};
use crate::space::UsageChange;
use crate::tree::{Context, commit::Form};
use crate::workers::OnPanic;

/// Number of frames of destroyed snapshots and datasets that one commit frees: so that none takes
/// long.
const FREED_AT_ONCE: usize = 20_000;
/// Number of orphan inodes' rows that one commit frees; the remainder is freed by the next one, or
/// in between.
const RELEASED_AT_ONCE: u64 = 64 << 10;

/// Failure of a commit, or of the administrative operation in it.
enum CommitError {
    /// The commit is made; the administrative operation was refused and has changed nothing.
    Refused(PoolError),
    /// The commit has failed, and nothing further is accepted.
    Failed(PoolError),
}

impl From<PoolError> for CommitError {
    fn from(error: PoolError) -> Self {
        Self::Failed(error)
    }
}

impl Pool {
    /// Makes everything durable that was done before the call.
    ///
    /// # Errors
    /// Errors of the store: the pool is suspended then.
    pub fn commit(&self) -> Result<Txg, PoolError> {
        self.commit_with(|_, txg| Ok(txg))
    }

    /// Makes a txg durable: by a commit, or by waiting for the one that holds it. Callers that wait
    /// meanwhile share that commit.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub(super) fn commit_through(&self, wanted: Txg) -> Result<(), PoolError> {
        let mut admin = self.admin.lock();
        if self.committed.load(Ordering::Acquire) >= wanted.0 {
            return Ok(());
        }
        self.commit_under(&mut admin, |_, _| Ok(()))
    }

    pub(super) fn open_datasets(&self) -> Vec<Arc<Dataset>> {
        self.datasets.read().values().cloned().collect()
    }

    /// Whether frames of something destroyed are still being freed.
    pub fn is_freeing(&self) -> bool {
        self.freeing.load(Ordering::Relaxed)
    }

    /// Makes a commit that includes the administrative operation `administer`, which sees the
    /// datasets as this commit writes them. If the operation refuses, the commit is made without
    /// it. If it refuses after it has changed something, nothing of it becomes durable: the commit
    /// fails.
    pub(super) fn commit_with<R>(
        &self,
        administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        let mut admin = self.admin.lock();
        self.commit_under(&mut admin, administer)
    }

    /// As [`Self::commit_with`], under a lock that is held already.
    pub(super) fn commit_under<R>(
        &self,
        admin: &mut MutexGuard<'_, Admin>,
        administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        self.commit_frozen(admin, None, administer)
    }

    /// As [`Self::commit_under`]; `frozen` is called when operations that begin later belong to the
    /// next commit. Their timestamps are later than those before.
    pub(super) fn commit_frozen<R>(
        &self,
        admin: &mut MutexGuard<'_, Admin>,
        frozen: Option<&mut dyn FnMut()>,
        administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        if let Some(failed) = admin.failed.clone().or_else(|| self.throttle.failed()) {
            return Err(failed);
        }
        let began = patience::now();
        let _guard = OnPanic(|| {
            let durable = Txg(self.committed.load(Ordering::Acquire));
            let error = PoolError::Suspended { durable, reason: "a commit was ended by a panic".to_owned() };
            tracing::error!(%error, "the pool is suspended");
            self.throttle.fail(&error);
        });
        let done = self.run_commit(admin, frozen, administer);
        self.commit_times.add(began.elapsed());
        done.map_err(|error| match error {
            CommitError::Refused(error) => error,
            CommitError::Failed(error) => {
                admin.failed = Some(error.clone());
                self.throttle.fail(&error);
                error
            }
        })
    }

    /// Returns the durations of commits so far.
    #[must_use]
    pub fn commit_figures(&self) -> CommitFigures {
        self.commit_times.figures()
    }

    /// Returns the counters of the cache, and what it holds.
    #[must_use]
    pub fn cache_figures(&self) -> Counters {
        self.cache.counters()
    }

    /// The clock's whole seconds since 1970.
    pub(super) fn seconds(&self) -> u64 {
        (self.clock)().seconds.try_into().unwrap_or(0)
    }

    /// Waits until the clock shows another time. It advances once a tick, like the kernel's clock
    /// for file times; changes since a snapshot are found by comparing times.
    fn await_tick(&self) {
        /// The longest tick, ms.
        const MOST: u32 = 10;
        let then = (self.clock)();
        for _ in 0..=MOST {
            if (self.clock)() != then {
                return;
            }
            patience::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn run_commit<R>(
        &self,
        admin: &mut MutexGuard<'_, Admin>,
        frozen: Option<&mut dyn FnMut()>,
        administer: impl FnOnce(&mut Admin, Txg) -> Result<R, PoolError>,
    ) -> Result<R, CommitError> {
        let datasets = self.open_datasets();
        for dataset in &datasets {
            if let Err(error) = dataset.files().free_released(RELEASED_AT_ONCE).map_err(as_pool_error) {
                passed_over(error, "a file without a name cannot be freed now")?;
            }
        }
        // Most of the content is written while operations continue, so that they wait only shortly.
        let slowed =
            flush_most(&self.throttle, datasets.iter().map(|dataset| dataset.files())).map_err(as_pool_error)?;
        let (log, keeper) = (self.log.get(), self.keeper.get());
        let closed = self.gate.advance(|txg| {
            // No operation is inside now: an error of one that broke off is known.
            if let Some(error) = self.throttle.failed() {
                return (txg, Err(error), None);
            }
            let taken = datasets.iter().map(|dataset| dataset.take(txg)).collect::<Result<Vec<Taken>, _>>();
            self.throttle.closed_txg();
            if frozen.is_some() {
                self.await_tick();
            }
            keeper.into_iter().for_each(|keeper| keeper.log.close(txg));
            (txg, taken, log.map(|log| log.newest()))
        });
        drop(slowed);
        let Some((txg, taken, last)) = closed else { return Err(self.stuck().into()) };
        if let Some(frozen) = frozen {
            frozen();
        }
        admin.catalog.set_txg(txg);
        let taken = taken?;
        // All new references to shared frames are counted before anything is freed.
        taken.iter().try_for_each(|taken| admin.share(&taken.shared))?;
        for taken in taken {
            self.write_dataset(admin, txg, taken)?;
        }
        let before = admin.catalog.changes();
        let answer = administer(admin, txg);
        if admin.catalog.changes() != before {
            for dataset in self.open_datasets() {
                // A dataset that was just destroyed has no row any more.
                let newest = admin.catalog.dataset(dataset.id()).map_or(Txg(u64::MAX), |row| row.newest);
                dataset.files().set_held_by_snapshots(newest);
            }
        }
        if let Err(error) = &answer
            && admin.catalog.changes() != before
        {
            // A part of the operation must not become durable.
            return Err(error.clone().into());
        }
        admin.catalog.note_snapshots_changed((self.clock)().seconds)?;
        if let Err(error) = self.free_some(admin, txg) {
            passed_over(error, "what was destroyed cannot be freed")?;
            self.freeing.store(false, Ordering::Relaxed);
        }
        let (written, dead) = admin.catalog.write_out(txg)?;
        for pointer in &dead {
            self.free(&Dead::of(pointer, false), txg)?;
        }
        let start = log.map_or_else(Default::default, |log| log.start_after(txg));
        self.storage.commit(txg, written.root, start, self.seconds())?;
        self.committed.store(txg.0, Ordering::Release);
        if let Some(keeper) = keeper {
            keeper.log.committed(txg);
            self.throttle.made_room();
        }
        self.reservations.measure();
        if let (Some(log), Some(last)) = (log, last) {
            log.committed(txg, last, start);
        }
        answer.map_err(CommitError::Refused)
    }

    /// Writes a dataset's tree out and settles its accounts.
    fn write_dataset(&self, admin: &mut Admin, txg: Txg, taken: Taken) -> Result<(), PoolError> {
        let Taken { dataset, frozen, written, mut freed, .. } = taken;
        if !frozen.is_dirty() && written == StoredBytes::default() && freed.is_empty() {
            dataset.files().with_table(|table| table.settle(&frozen))?;
            return admin.reservations.settle(dataset.id(), txg, UsageChange::default());
        }
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let tree = frozen
            .write_out(&context, Form { txg, compression: CompressionSetting::Lz4, checksum: ChecksumKind::Xxh3 })?;
        let dead = dataset.files().with_table(|table| {
            table.settle(&frozen)?;
            Ok::<_, PoolError>(table.tree.take_dead(txg))
        })?;
        freed.extend(dead.iter().map(|pointer| Dead::of(pointer, false)));
        let mut row = admin.catalog.dataset(dataset.id())?;
        row.root = tree.root;
        admin.catalog.set_dataset(dataset.id(), &row)?;
        let written = written.and(tree.bytes, tree.logical);
        self.account(admin, dataset.id(), txg, written, &freed)
    }

    /// Applies the free rule to frames that a live dataset does not reference any more, and counts
    /// the frames that it has written.
    pub(super) fn account(
        &self,
        admin: &mut Admin,
        id: u64,
        txg: Txg,
        written: StoredBytes,
        freed: &[Dead],
    ) -> Result<(), PoolError> {
        let mut row = admin.catalog.dataset(id)?;
        let origin = row.origin.map_or(Txg(0), |(_, txg)| txg);
        let bytes = |bytes: u64| i64::try_from(bytes).map_err(|_| too_much());
        let mut change = UsageChange::stored(bytes(written.charged)?, bytes(written.logical)?);
        let mut listed = Vec::new();
        for dead in freed {
            let (fate, of_it) = killed(dead, row.newest, origin)?;
            change = change.and(of_it)?;
            match fate {
                Fate::Freed => self.release(admin, dead, txg)?,
                Fate::Listed => listed.push(*dead),
            }
        }
        if !listed.is_empty() {
            let (points, _) = admin.catalog.history_of(id)?;
            let history: Vec<Txg> =
                points.iter().map(|point| point.txg).filter(|txg| *txg != crate::deadlist::Point::HEAD).collect();
            admin.catalog.deadlists().append(row.list, &history, &listed)?;
        }
        admin.reservations.settle(id, txg, change)?;
        row.usage = admin.quota_tree().usage(id)?;
        admin.catalog.set_dataset(id, &row)
    }

    /// Frees a part of the frames of destroyed snapshots and datasets.
    fn free_some(&self, admin: &mut Admin, txg: Txg) -> Result<(), PoolError> {
        let freeing = admin.catalog.head()?.freeing;
        let due = admin.catalog.deadlists().drain(freeing, FREED_AT_ONCE)?;
        due.iter().try_for_each(|dead| self.release(admin, dead, txg))?;
        // One look finds only a part of what is to be freed.
        let doomed = due.len() >= FREED_AT_ONCE || self.free_doomed(admin, txg)?;
        self.freeing.store(doomed || !due.is_empty(), Ordering::Relaxed);
        Ok(())
    }
}

/// Whether the error is unreadable data on a device, as opposed to a refusal or a lack of space.
pub(super) fn is_damage(error: &PoolError) -> bool {
    matches!(error, PoolError::Device { .. } | PoolError::Frame { .. } | PoolError::Format(_))
}

/// Skips unreadable data with a log line: reading it reports the error, and the remainder of the
/// pool keeps working.
///
/// # Errors
/// All errors that are not damage.
pub(super) fn passed_over(error: PoolError, what: &str) -> Result<(), PoolError> {
    if !is_damage(&error) {
        return Err(error);
    }
    tracing::error!(%error, "{what}");
    Ok(())
}

fn too_much() -> PoolError {
    PoolError::Format(crate::error::Damage::Structure("a space counter out of bounds"))
}
