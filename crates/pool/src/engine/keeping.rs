//! A pool that outlives its process: what the kept log has is replayed, and kept on.
//!
//! Called by the making and the import of a pool; the log is [`crate::log::kept`], what is appended to it
//! `files/keeping.rs`.
//!
//! Invariants:
//! - What is replayed is in the memory of this process and in the log, until its commit; then in that
//!   alone. The log knows which commit that is before it is made, and before anything else goes into it: a
//!   death at any moment has the next process replay what is missing, and nothing twice.
//! - Until that commit nothing can be made durable by the intent log, which lacks what was replayed.
//! - What the intent log holds of the dead process is freed by the commit of all that is replayed, not by
//!   one of a part of it; but where a part must be committed to find room for the rest.
//! - A replay needs no device that takes writes: what is not written stays in memory, and in the log, from
//!   which the next process replays it.
//! - Files without a name are held as the dead process did, until [`Pool::let_left_go`].

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::commit::passed_over;
use super::logging::{judge, replay_record};
use super::replay_skip::ReplaySkip;
use super::{Dataset, Durable, Pool, as_pool_error};
use crate::error::PoolError;
use crate::files::Keeper;
use crate::log::{Blocks, KeptLog};
use crate::pointer::Txg;

/// So much of what is replayed is held in memory before it becomes frames, bytes.
const HELD_AT_ONCE: u64 = 64 << 20;
/// So much may be promised to it before, bytes: more than is needed, where parts of records are written.
const PROMISED_AT_ONCE: u64 = 1 << 30;
/// So many commits make the log short, while others write on: the first takes long, and as much comes meanwhile.
const SHORTENED_BY: u32 = 4;
/// So much is held in memory before it is committed, bytes.
const COMMITTED_AT_ONCE: u64 = if cfg!(test) { 256 << 10 } else { 256 << 20 };

impl Pool {
    /// From now on everything that is done to files is kept. Called once, by whoever makes the pool.
    pub(super) fn keep_with(&self, log: Arc<KeptLog>) {
        log.serve(Txg(self.committed.load(Ordering::Acquire)));
        self.keep_on(log);
    }

    fn keep_on(&self, log: Arc<KeptLog>) {
        let keeper = Arc::new(Keeper::new(log));
        for dataset in self.datasets.read().values() {
            dataset.files().keep_with(Arc::clone(&keeper));
        }
        let _ = self.keeper.set(keeper);
    }

    /// The kept log, where there is one.
    #[must_use]
    pub fn kept(&self) -> Option<&Arc<KeptLog>> {
        self.keeper.get().map(|keeper| &keeper.log)
    }

    /// Commits, so that who goes on from here finds little to replay: what came during the last of a few
    /// commits.
    ///
    /// # Errors
    /// Those of a commit.
    pub fn shorten_kept(&self) -> Result<(), PoolError> {
        let is_long = || self.kept().is_some_and(|kept| !kept.is_short());
        (0..SHORTENED_BY).try_for_each(|_| if is_long() { self.commit().map(drop) } else { Ok(()) })
    }

    /// Goes on from where a process has died: applies what it kept beyond the last commit, and keeps on.
    /// That is durable with the next commit, which whoever calls this makes soon: the log has less room until
    /// then. The intent log has nothing that the kept one has not.
    pub(super) fn replay_kept(
        &self,
        mut blocks: Box<dyn Blocks>,
        kept: Arc<KeptLog>,
        durable: &Durable,
    ) -> Result<(), PoolError> {
        kept.begin_replay(durable.txg)?;
        // It has to know where its next block goes. What it says is kept as well, and goes into the next commit
        // with all that came after it: replayed once more on that, by an import after a power failure, it would
        // bring back what was.
        let is_logged = blocks.replay(durable.log, durable.txg, &mut |_| Ok(()))?.records > 0;
        blocks.settle(Txg(durable.txg.0 + 1));
        self.start_log(blocks);
        self.record(false);
        self.holds_left.store(true, Ordering::Release);
        let there = self.usable_datasets()?;
        let (mut promised, mut held, mut skipped, mut before) = (0, 0, ReplaySkip::default(), None);
        // A device that fails (`failmode=continue`) keeps nobody from what was acknowledged.
        self.storage.keep_unwritten(true);
        let replayed = kept.replay(&mut |record, place| {
            let begins = before.replace(place);
            // What was destroyed after the record takes it along.
            if !there.contains(&record.dataset) {
                return Ok(());
            }
            let dataset = self.left_dataset(record.dataset)?;
            let Some(adjusted) = judge(&skipped, &dataset, record)? else {
                skipped.leave_out(&dataset, record);
                return Ok(());
            };
            let is_much = self.held() > HELD_AT_ONCE.saturating_add(held)
                || self.reservations.outstanding() > PROMISED_AT_ONCE.saturating_add(promised);
            if is_much {
                promised = self.store_replayed()?;
                held = self.held();
            }
            // The first commit frees what the intent log has, and until then that alone survives a power
            // failure: it may be of all that is replayed only.
            if self.held() > COMMITTED_AT_ONCE
                && !is_logged
                && !self.storage.is_suspended()
                && let Some(begins) = begins
            {
                self.commit_replayed(&kept, begins)?;
                (promised, held) = (0, 0);
            }
            let replay = || replay_record(&dataset, record, &adjusted);
            let mut done = replay();
            if matches!(done, Err(PoolError::NoSpace)) {
                promised = self.store_replayed()?;
                done = replay();
            }
            if matches!(done, Err(PoolError::NoSpace))
                && let Some(begins) = begins
            {
                // What it frees may be had again. What was applied of the record is applied again.
                self.commit_replayed(&kept, begins)?;
                (promised, held) = (0, 0);
                done = replay();
            }
            done
        });
        self.storage.keep_unwritten(false);
        replayed?;
        if before.is_some() {
            // Nobody has to wait for its commit: who dies before it leaves all of it in the log.
            let txg = self.gate.enter().txg();
            kept.serve_before(txg);
            self.log.get().into_iter().for_each(|log| log.begin_after(txg));
        } else {
            kept.serve(durable.txg);
        }
        self.record(true);
        self.keep_on(kept);
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().find_cuts()).map_err(as_pool_error)
    }

    fn commit_replayed(&self, kept: &KeptLog, through: u64) -> Result<(), PoolError> {
        kept.commits_into(through, self.gate.enter().txg());
        self.commit()?;
        kept.settled();
        Ok(())
    }

    /// The datasets that there are, those that are half received left out.
    fn usable_datasets(&self) -> Result<HashSet<u64>, PoolError> {
        let admin = self.admin.lock();
        let mut usable = HashSet::new();
        for (id, _) in admin.catalog.datasets()? {
            if !admin.is_half(id)? {
                usable.insert(id);
            }
        }
        Ok(usable)
    }

    fn left_dataset(&self, id: u64) -> Result<Arc<Dataset>, PoolError> {
        let (dataset, opened) = self.open_dataset(id)?;
        if opened {
            dataset.files().hold_left().map_err(as_pool_error)?;
        }
        Ok(dataset)
    }

    /// What has no name in a dataset that was opened just now is freed by and by, or held as one that was
    /// left.
    pub(super) fn sweep(&self, dataset: &Dataset) -> Result<(), PoolError> {
        if !self.holds_left.load(Ordering::Acquire) {
            return dataset.sweep();
        }
        let held = dataset.files().hold_left().and_then(|()| dataset.files().find_cuts()).map_err(as_pool_error);
        held.or_else(|error| passed_over(error, "files without a name cannot be freed now"))
    }

    /// Whoever had files without a name from a process that has died has them from this one by now, or
    /// they are nobody's: they live as long as they are held here. Other ones than those of datasets that
    /// are open are freed when theirs is opened.
    ///
    /// # Errors
    /// Those of reading rows.
    pub fn let_left_go(&self) -> Result<(), PoolError> {
        self.holds_left.store(false, Ordering::Release);
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().let_all_left_go()).map_err(as_pool_error)
    }
}
