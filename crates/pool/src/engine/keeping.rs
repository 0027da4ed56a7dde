//! Survival of the pool's process: replay of the replay journal, which the next process then
//! continues.
//!
//! Called when a pool is created and when it is imported; the journal is [`crate::log::kept`], the
//! records that are appended to it are made in `files/keeping.rs`.
//!
//! Invariants:
//! - Replayed operations are in the memory of this process and in the journal until their commit,
//!   then in the commit alone. The journal notes the txg of that commit before it is made, and
//!   before other records are appended: a crash at any moment has the next process replay what is
//!   missing, and nothing twice.
//! - Until that commit nothing can be made durable by the intent log, which lacks the replayed
//!   operations.
//! - The crashed process's intent log is freed by the commit of all replayed operations, not by a
//!   commit of a part; except when a part must be committed to find room for the remainder.
//! - A replay needs neither a device that takes writes nor room: if a device fails, if a commit of
//!   a part fails, or if room is short and no device has grown, the pool is suspended, and replayed
//!   writes stay in memory as they were written, counted as dirty. All of them stay in the journal,
//!   from which the next process replays them. More than [`HELD_MOST`] in addition to what was held
//!   before ends the import.
//! - Orphan inodes are held as the crashed process held them, until [`Pool::let_left_go`].

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

/// Bytes of replayed content in memory at which it is written as frames.
const HELD_AT_ONCE: u64 = 64 << 20;
/// Bytes of reserved space at which it is written as frames: reservations exceed the need for
/// partial records.
const PROMISED_AT_ONCE: u64 = 1 << 30;
/// Most commits made to shorten the journal while others write: the first takes long, and as many
/// changes arrive meanwhile.
const SHORTENED_BY: u32 = 4;
/// Bytes in memory at which replayed operations are committed.
const COMMITTED_AT_ONCE: u64 = if cfg!(test) { 256 << 10 } else { 256 << 20 };
/// Most bytes in memory after the last moment at which a commit was possible: twice what a journal
/// can hold.
pub(super) const HELD_MOST: u64 = if cfg!(test) { 48 << 20 } else { 1 << 30 };

/// A running replay of the replay journal.
struct Replay<'p> {
    pool: &'p Pool,
    kept: &'p KeptLog,
    /// Numbers of the existing datasets.
    there: HashSet<u64>,
    /// The crashed process's intent log has records as well.
    is_logged: bool,
    skipped: ReplaySkip,
    /// End of the last record that was read.
    end: Option<u64>,
    /// Bytes in memory when content was last written as frames.
    held: u64,
    /// Bytes of reserved space at that time.
    promised: u64,
    /// Bytes in memory when the pool was suspended.
    held_before: u64,
}

impl Replay<'_> {
    /// Applies a record, which ends at `end`.
    fn apply(&mut self, record: &LogRecord<'_>, end: u64) -> Result<(), PoolError> {
        let begin = self.end.replace(end);
        // The destruction of a dataset after the record includes the record.
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
        // A part of the record that was applied already is applied again.
        let replay = || replay_record(&dataset, record, &adjusted);
        let mut done = replay();
        if self.is_short(&done) {
            self.store()?;
            done = replay();
        }
        if self.is_short(&done)
            && let Some(begin) = begin
        {
            // The commit may free space.
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

    /// Keeps the memory held, and the reserved space, within bounds.
    fn bound_memory(&mut self, begin: Option<u64>) -> Result<(), PoolError> {
        if self.pool.throttle.is_in_memory() {
            return self.check_held_in_memory();
        }
        let is_much = self.pool.held() > HELD_AT_ONCE.saturating_add(self.held)
            || self.pool.reservations.outstanding() > PROMISED_AT_ONCE.saturating_add(self.promised);
        if is_much {
            self.store()?;
        }
        // The first commit frees the intent log, which until then is all that survives a power
        // failure: it must cover everything that is replayed.
        match begin {
            Some(begin) if self.pool.held() > COMMITTED_AT_ONCE && !self.is_logged => self.commit(begin),
            _ => Ok(()),
        }
    }

    /// Whether an error means that the pool cannot be written to any more, or has no room.
    fn ends_writing(&self, error: &PoolError) -> bool {
        matches!(error, PoolError::NoSpace | PoolError::Suspended { .. }) || self.pool.storage.suspended().is_some()
    }

    /// Whether a record failed for lack of room that a commit may make.
    fn is_short(&self, done: &Result<(), PoolError>) -> bool {
        matches!(done, Err(PoolError::NoSpace)) && !self.pool.throttle.is_in_memory()
    }

    /// Writes content in memory as frames.
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

    /// If room is short, takes the space by which devices have grown; otherwise, or if there is
    /// none, continues in memory.
    fn take_room_or_stop(&mut self, error: &PoolError) {
        if !(matches!(error, PoolError::NoSpace) && self.take_room()) {
            self.go_on_in_memory(error);
        }
    }

    /// Takes the space by which devices have grown; returns whether there was any.
    fn take_room(&self) -> bool {
        let time = u64::try_from((self.pool.clock)().seconds).unwrap_or(0);
        if !self.pool.storage.expand(time) {
            return false;
        }
        tracing::info!("the devices have become longer: what was acknowledged finds room there");
        self.pool.grown();
        true
    }

    /// Commits what was replayed up to this position in the journal.
    fn commit(&mut self, through: u64) -> Result<(), PoolError> {
        if self.pool.throttle.is_in_memory() {
            return Ok(());
        }
        // A commit that fails for lack of room is the last one: it gets all the space there is.
        if self.pool.storage.room(Purpose::Write) < self.pool.held() {
            self.take_room();
        }
        self.kept.commits_into(through, self.pool.gate.enter().txg());
        match self.pool.commit() {
            Ok(_) => {
                self.kept.settled();
                (self.promised, self.held) = (0, 0);
            }
            // Whether the commit is durable is unknown: the journal has its txg.
            Err(error) => self.go_on_in_memory(&error),
        }
        Ok(())
    }

    /// Ends all commits, for this reason: operations that are replayed from now on stay in memory
    /// as they were written. As frames they could take many times as much, and need room.
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
    /// [`PoolError::Refused`] if memory has grown by more than the limit since the pool was
    /// suspended.
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
    /// Starts the replay journal: all changes of files are appended to it from now on. Called once,
    /// when the pool is created or opened.
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

    /// The replay journal, if the pool has one.
    #[must_use]
    pub fn kept(&self) -> Option<&Arc<KeptLog>> {
        self.keeper.get().map(|keeper| &keeper.log)
    }

    /// Commits a few times, so that a process that takes over finds little to replay: the changes
    /// made during the last of these commits.
    ///
    /// # Errors
    /// Errors of a commit.
    pub fn shorten_kept(&self) -> Result<(), PoolError> {
        let is_long = || self.kept().is_some_and(|kept| !kept.is_short());
        (0..SHORTENED_BY).try_for_each(|_| if is_long() { self.commit().map(drop) } else { Ok(()) })
    }

    /// Takes over from a crashed process: applies the operations in its replay journal after the
    /// last commit, and continues the journal. They are durable with the next commit, which the
    /// caller makes soon: the journal has less room until then. The intent log has no records that
    /// the journal lacks.
    pub(super) fn replay_kept(
        &self,
        mut blocks: Box<dyn Blocks>,
        kept: Arc<KeptLog>,
        durable: &Durable,
    ) -> Result<(), PoolError> {
        kept.begin_replay(durable.txg)?;
        // The intent log has to know where its next block goes. Its records are in the journal too,
        // and go into the next commit together with all later ones: replayed on top of that commit,
        // by an import after a power failure, they would bring back old content.
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
        // A device that fails (`failmode=continue`) must not keep acknowledged operations from
        // being visible.
        self.storage.keep_unwritten(true);
        let replayed = kept.replay(&mut |record, place| replay.apply(record, place));
        let is_empty = replay.end.is_none();
        self.storage.keep_unwritten(false);
        replayed?;
        if let Some(error) = self.storage.suspended() {
            // The process after this one replays it again: nothing is committed or accepted until
            // then.
            self.unwritten.become_now(self.storage.held_unwritten());
            kept.serve_uncommitted();
            self.throttle.fail(&error);
            self.throttle.set_in_memory(false);
        } else if is_empty {
            kept.serve(durable.txg);
        } else {
            // Nothing has to wait for the commit: a crash before it leaves all operations in the
            // journal.
            let txg = self.gate.enter().txg();
            kept.serve_before(txg);
            self.log.get().into_iter().for_each(|log| log.begin_after(txg));
        }
        self.record(true);
        self.keep_on(kept);
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().find_cuts()).map_err(as_pool_error)
    }

    /// Numbers of the existing datasets, without partially received ones.
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

    /// Frees the orphan inodes of a dataset that was just opened, step by step in the background,
    /// or holds them after the crash of a process.
    pub(super) fn sweep(&self, dataset: &Dataset) -> Result<(), PoolError> {
        if !self.holds_left.load(Ordering::Acquire) {
            return dataset.sweep();
        }
        let held = dataset.files().hold_left().and_then(|()| dataset.files().find_cuts()).map_err(as_pool_error);
        held.or_else(|error| passed_over(error, "files without a name cannot be freed now"))
    }

    /// Ends the hold on orphan inodes of a crashed process: programs that had them open have opened
    /// them in this process by now, and the other ones are freed. Orphans of datasets that are not
    /// open are freed when their dataset is opened.
    ///
    /// # Errors
    /// Errors of reading rows.
    pub fn let_left_go(&self) -> Result<(), PoolError> {
        self.holds_left.store(false, Ordering::Release);
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().let_all_left_go()).map_err(as_pool_error)
    }
}
