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
//! - A replay needs no device that takes writes, and no room: where a device fails, a commit of a part fails, or
//!   room is short and no device has become longer, the pool is suspended, and what comes stays in memory as it was
//!   written, counted as what is dirty. All of it stays in the log, from which the next process replays it. More than
//!   [`HELD_MOST`] beside what was held before ends the import.
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
use crate::log::{Blocks, KeptLog, LogRecord};
use crate::pointer::Txg;
use crate::space::Purpose;

/// So much of what is replayed is held in memory before it becomes frames, bytes.
const HELD_AT_ONCE: u64 = 64 << 20;
/// So much may be promised to it before, bytes: more than is needed, where parts of records are written.
const PROMISED_AT_ONCE: u64 = 1 << 30;
/// So many commits make the log short, while others write on: the first takes long, and as much comes meanwhile.
const SHORTENED_BY: u32 = 4;
/// So much is held in memory before it is committed, bytes.
const COMMITTED_AT_ONCE: u64 = if cfg!(test) { 256 << 10 } else { 256 << 20 };
/// So much is held in memory after the last moment in which a commit could be made, bytes: twice what a log can hold.
pub(super) const HELD_MOST: u64 = if cfg!(test) { 48 << 20 } else { 1 << 30 };

/// A replay of the kept log.
struct Replay<'p> {
    pool: &'p Pool,
    kept: &'p KeptLog,
    /// Datasets that there are.
    there: HashSet<u64>,
    /// The intent log of the dead process holds something as well.
    is_logged: bool,
    skipped: ReplaySkip,
    /// Where the last record ends that was seen.
    end: Option<u64>,
    /// What memory held when content last became frames, bytes.
    held: u64,
    /// What was promised then, bytes.
    promised: u64,
    /// What memory held when the pool was suspended, bytes.
    held_before: u64,
}

impl Replay<'_> {
    /// Applies a record, which ends at `end`.
    fn apply(&mut self, record: &LogRecord<'_>, end: u64) -> Result<(), PoolError> {
        let begin = self.end.replace(end);
        // What was destroyed after the record takes it along.
        if !self.there.contains(&record.dataset) {
            return Ok(());
        }
        let dataset = self.pool.left_dataset(record.dataset)?;
        let Some(adjusted) = judge(&self.skipped, &dataset, record)? else {
            self.skipped.leave_out(&dataset, record);
            return Ok(());
        };
        if let Some(error) = self.pool.storage.suspended() {
            self.go_on_in_memory(&error);
        }
        self.bound_memory(begin)?;
        // What was applied of a record is applied again.
        let replay = || replay_record(&dataset, record, &adjusted);
        let mut done = replay();
        if self.is_short(&done) {
            self.store()?;
            done = replay();
        }
        if self.is_short(&done)
            && let Some(begin) = begin
        {
            // What it frees may be had again.
            self.commit(begin)?;
            done = replay();
        }
        while !self.pool.throttle.is_in_memory()
            && let Err(error) = &done
            && self.ends_writing(error)
        {
            self.take_room_or_stop(error);
            done = replay();
        }
        done
    }

    /// Keeps what is held in memory, and what is promised, within bounds.
    fn bound_memory(&mut self, begin: Option<u64>) -> Result<(), PoolError> {
        if self.pool.throttle.is_in_memory() {
            return self.check_held_in_memory();
        }
        let is_much = self.pool.held() > HELD_AT_ONCE.saturating_add(self.held)
            || self.pool.reservations.outstanding() > PROMISED_AT_ONCE.saturating_add(self.promised);
        if is_much {
            self.store()?;
        }
        // The first commit frees what the intent log has, and until then that alone survives a power
        // failure: it may be of all that is replayed only.
        match begin {
            Some(begin) if self.pool.held() > COMMITTED_AT_ONCE && !self.is_logged => self.commit(begin),
            _ => Ok(()),
        }
    }

    /// Whether an error is that of a pool that cannot be written to any more, or has no room.
    fn ends_writing(&self, error: &PoolError) -> bool {
        matches!(error, PoolError::NoSpace | PoolError::Suspended { .. }) || self.pool.storage.suspended().is_some()
    }

    /// Whether a record found no room that a commit may make.
    fn is_short(&self, done: &Result<(), PoolError>) -> bool {
        matches!(done, Err(PoolError::NoSpace)) && !self.pool.throttle.is_in_memory()
    }

    /// Makes frames of the content in memory.
    fn store(&mut self) -> Result<(), PoolError> {
        while !self.pool.throttle.is_in_memory() {
            match self.pool.store_replayed() {
                Ok(promised) => {
                    (self.promised, self.held) = (promised, self.pool.held());
                    break;
                }
                Err(error) if self.ends_writing(&error) => self.take_room_or_stop(&error),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Where room is short, takes the room that devices have got since; otherwise, or where there is none, goes on in
    /// memory.
    fn take_room_or_stop(&mut self, error: &PoolError) {
        if !(matches!(error, PoolError::NoSpace) && self.take_room()) {
            self.go_on_in_memory(error);
        }
    }

    /// Takes the room that devices have got; whether there was any.
    fn take_room(&self) -> bool {
        let time = u64::try_from((self.pool.clock)().seconds).unwrap_or(0);
        if !self.pool.storage.expand(time) {
            return false;
        }
        tracing::info!("the devices have become longer: what was acknowledged finds room there");
        self.pool.grown();
        true
    }

    /// Commits what was replayed up to this place in the log.
    fn commit(&mut self, through: u64) -> Result<(), PoolError> {
        if self.pool.throttle.is_in_memory() {
            return Ok(());
        }
        // A commit that finds no room is the last one: it gets what there is before.
        if self.pool.storage.room(Purpose::Write) < self.pool.held() {
            self.take_room();
        }
        self.kept.commits_into(through, self.pool.gate.enter().txg());
        match self.pool.commit() {
            Ok(_) => {
                self.kept.settled();
                (self.promised, self.held) = (0, 0);
            }
            // Whether it is durable is not known: the log says which it was.
            Err(error) => self.go_on_in_memory(&error),
        }
        Ok(())
    }

    /// Nothing is committed any more, for this reason: what is replayed from now on stays in memory as it was
    /// written. Frames of it could be many times as long, and take room.
    fn go_on_in_memory(&mut self, error: &PoolError) {
        let pool = self.pool;
        if pool.throttle.is_in_memory() {
            return;
        }
        let error = pool.storage.suspend(error);
        tracing::error!(%error, "what was acknowledged is replayed in memory: the next import writes it");
        pool.reservations.admit_everything();
        pool.throttle.set_in_memory(true);
        pool.unwritten.become_now(pool.storage.held_unwritten());
        self.held_before = pool.held();
    }

    /// Counts the frames in memory that devices did not take.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where more has come to memory since the pool was suspended than may be held.
    fn check_held_in_memory(&self) -> Result<(), PoolError> {
        let pool = self.pool;
        pool.unwritten.become_now(pool.storage.held_unwritten());
        if pool.held() <= self.held_before.saturating_add(HELD_MOST) {
            return Ok(());
        }
        let why = pool.storage.suspended().map_or_else(String::new, |error| error.to_string());
        Err(PoolError::Refused(format!("what was acknowledged takes too much memory without being written: {why}")))
    }
}

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
        let mut replay = Replay {
            pool: self,
            kept: &kept,
            there,
            is_logged,
            skipped: ReplaySkip::default(),
            end: None,
            held: 0,
            promised: 0,
            held_before: 0,
        };
        // A device that fails (`failmode=continue`) keeps nobody from what was acknowledged.
        self.storage.keep_unwritten(true);
        let replayed = kept.replay(&mut |record, place| replay.apply(record, place));
        let is_empty = replay.end.is_none();
        self.storage.keep_unwritten(false);
        replayed?;
        if let Some(error) = self.storage.suspended() {
            // The process after this one replays it once more: nothing is committed until then, nor accepted.
            self.unwritten.become_now(self.storage.held_unwritten());
            kept.serve_uncommitted();
            self.throttle.fail(&error);
            self.throttle.set_in_memory(false);
        } else if is_empty {
            kept.serve(durable.txg);
        } else {
            // Nobody has to wait for its commit: who dies before it leaves all of it in the log.
            let txg = self.gate.enter().txg();
            kept.serve_before(txg);
            self.log.get().into_iter().for_each(|log| log.begin_after(txg));
        }
        self.record(true);
        self.keep_on(kept);
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().find_cuts()).map_err(as_pool_error)
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
