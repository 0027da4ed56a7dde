//! The intent log of an imported pool: operations are recorded as they happen, an fsync flushes the
//! records, import replays them.
//!
//! Invariant: what cannot be recorded makes an fsync wait for a commit, never return early.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::replay_skip::{Adjusted, ReplaySkip};
use super::{Dataset, Durable, Pool, as_pool_error};
use crate::error::PoolError;
use crate::files::{self, FileError, Inode, Recorder};
use crate::log::{self, Blocks, Log, LogChange, LogFlush, LogRecord, Replayed, Ticket};
use crate::pointer::Txg;
use crate::properties::SyncMode;

/// The log, as the files of all datasets record into it.
pub(super) struct PoolLog {
    log: Log<Box<dyn Blocks>>,
    /// Nothing is recorded: an fsync waits for a commit.
    off: AtomicBool,
    /// Nor of this txg and those before it.
    after: AtomicU64,
}

/// So much of what is replayed waits in memory, or is promised, before it becomes frames. Bytes.
const REPLAYED_AT_ONCE: u64 = 32 << 20;

impl Recorder for PoolLog {
    fn record(&self, txg: Txg, record: Vec<u8>) -> Ticket {
        if self.off.load(Ordering::Relaxed) || txg.0 <= self.after.load(Ordering::Relaxed) {
            self.log.cannot_record(txg);
            return self.log.newest();
        }
        self.log.record(txg, record)
    }

    fn cannot_record(&self, txg: Txg) {
        self.log.cannot_record(txg);
    }
}

impl PoolLog {
    /// This txg has what was replayed, and is yet to be committed: nothing before that commit can be
    /// logged.
    pub(super) fn begin_after(&self, txg: Txg) {
        self.after.store(txg.0, Ordering::Relaxed);
        self.log.cannot_record(txg);
    }

    pub(super) fn newest(&self) -> Ticket {
        self.log.newest()
    }

    pub(super) fn start_after(&self, txg: Txg) -> log::Start {
        self.log.start_after(txg)
    }

    /// A commit is durable.
    pub(super) fn committed(&self, txg: Txg, last: Ticket, start: log::Start) {
        self.log.committed(txg, last, start);
    }

    /// Makes everything up to the ticket durable; or names the txg whose commit does.
    pub(super) fn flush(&self, through: Ticket) -> Result<Option<Txg>, PoolError> {
        Ok(match self.log.flush(through)? {
            LogFlush::Durable => None,
            LogFlush::NeedsCommit(txg) => Some(txg),
        })
    }
}

impl Pool {
    pub(super) fn start_log(&self, blocks: Box<dyn Blocks>) {
        let log = Arc::new(PoolLog { log: Log::new(blocks), off: AtomicBool::new(false), after: AtomicU64::new(0) });
        for dataset in self.datasets.read().values() {
            dataset.files().record_to(Arc::clone(&log) as Arc<dyn Recorder>);
        }
        // Called once, by whoever makes the pool.
        let _ = self.log.set(log);
    }

    /// Whether what is done from now on is recorded in the log; where it is not, an fsync waits for a
    /// commit.
    pub fn record(&self, on: bool) {
        if let Some(log) = self.log.get() {
            log.off.store(!on, Ordering::Relaxed);
        }
    }

    /// Applies what the log holds beyond the last commit, commits that, and goes on with the log.
    pub(super) fn replay_log(&self, mut blocks: Box<dyn Blocks>, durable: &Durable) -> Result<(), PoolError> {
        let (mut promised, mut skipped) = (0, ReplaySkip::default());
        let replayed = blocks.replay(durable.log, durable.txg, &mut |record| {
            let (dataset, _) = self.open_dataset(record.dataset)?;
            // What belongs to damaged rows keeps no pool from being imported. An operation is done
            // whole or not at all.
            let Some(adjusted) = judge(&skipped, &dataset, record)? else {
                skipped.leave_out(&dataset, record);
                return Ok(());
            };
            let replay = || replay_record(&dataset, record, &adjusted);
            if self.reservations.outstanding().max(self.held()) > REPLAYED_AT_ONCE.saturating_add(promised) {
                promised = self.store_replayed()?;
            }
            match replay() {
                // What is promised is more than what is needed: frames need no promises.
                Err(PoolError::NoSpace) => {
                    promised = self.store_replayed()?;
                    replay()
                }
                done => done,
            }
        })?;
        let Replayed { records, lost, .. } = replayed;
        if let Some(sequence) = lost {
            tracing::error!(
                sequence,
                "a block of the intent log is damaged, or builds on a state that is gone: what was synced from it on is lost"
            );
        }
        self.start_log(blocks);
        if records > 0 {
            // What was replayed leaves memory first: what waits there of an inode would come into
            // the table again after it was freed.
            self.commit()?;
            self.open_datasets().iter().try_for_each(|dataset| self.sweep(dataset))?;
        }
        Ok(())
    }

    /// Makes frames of the content that was replayed, so that neither memory nor promises grow with
    /// the log; answers what is promised still.
    pub(super) fn store_replayed(&self) -> Result<u64, PoolError> {
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().flush_most()).map_err(as_pool_error)?;
        Ok(self.reservations.outstanding().max(self.held()))
    }

    /// Makes a file durable, and everything that was done before to names and attributes.
    ///
    /// # Errors
    /// Those of the engine; that of a commit which could not store what was written to the file.
    pub fn sync_file(&self, dataset: &Dataset, inode: &Arc<Inode>) -> files::Result<()> {
        inode.check_stored()?;
        if dataset.behaviour().sync == SyncMode::Disabled {
            // Durable with the next commit, as whoever set the property wants it.
            return Ok(self.throttle.check()?);
        }
        let through = match self.log.get() {
            None => None,
            Some(log) => match dataset.files().record_content(inode)? {
                files::Durability::Committed => None,
                files::Durability::Logged(ticket) => Some(ticket),
                files::Durability::Recorded => Some(log.newest()),
            },
        };
        self.sync_through(through)?;
        // The commit may have found that it cannot be stored.
        inode.check_synced()
    }

    /// Makes everything durable that was done to names and attributes.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn sync_names(&self) -> Result<(), PoolError> {
        self.sync_through(self.log.get().map(|log| log.newest()))
    }

    /// Makes a directory durable, and everything that was done to names and attributes.
    ///
    /// # Errors
    /// Those of the engine; that of a commit which could not store the directory's attributes.
    pub fn sync_directory(&self, inode: &Inode) -> files::Result<()> {
        inode.check_stored()?;
        self.sync_names()?;
        inode.check_synced()
    }

    /// Makes everything durable that was done to a file system before the call.
    ///
    /// # Errors
    /// Those of the engine; where something that was written cannot be stored, why, and once where
    /// it was given up.
    pub fn sync_all(&self, dataset: &Dataset) -> files::Result<()> {
        self.commit()?;
        dataset.files().check_all_stored()
    }

    /// Makes everything durable that was done to the pool before the call.
    ///
    /// # Errors
    /// As [`Self::sync_all`].
    pub fn sync_pool(&self) -> Result<(), PoolError> {
        self.commit()?;
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().check_all_stored()).map_err(as_pool_error)
    }

    /// After a commit: how many files hold what cannot be stored, and why one of them does.
    #[must_use]
    pub fn unstored(&self) -> Option<(usize, PoolError)> {
        let of = |dataset: &Arc<Dataset>| dataset.files().unstored();
        let add = |(sum, _): (usize, _), (more, error)| (sum + more, error);
        self.open_datasets().iter().filter_map(of).reduce(add).map(|(files, error)| (files, as_pool_error(error)))
    }

    fn sync_through(&self, through: Option<Ticket>) -> Result<(), PoolError> {
        let (Some(log), Some(ticket)) = (self.log.get(), through) else {
            // What was done before this call is in the open txg, or in one before.
            let txg = self.gate.enter().txg();
            return self.commit_through(txg);
        };
        // The commit may be of an earlier txg than the record: it only has to be over before
        // anything may be logged.
        while let Some(txg) = log.flush(ticket)? {
            self.commit_through(txg)?;
        }
        if log.log.is_half_full() {
            self.throttle.ask();
        }
        Ok(())
    }
}

/// What a record is to be applied with; none where something that it needs cannot be read, or was
/// left out.
pub(super) fn judge(
    skipped: &ReplaySkip,
    dataset: &Dataset,
    record: &LogRecord<'_>,
) -> Result<Option<Adjusted>, PoolError> {
    let unreadable =
        record.changes.iter().find_map(|change| dataset.files().look_at(change).err().filter(FileError::is_rotten));
    match unreadable.map_or_else(|| skipped.judge(dataset, record), Err) {
        Ok(None) => {
            tracing::error!(dataset = record.dataset, "something that was synced builds on what is lost, and is lost");
            Ok(None)
        }
        Err(error) if error.is_rotten() => {
            tell_lost(record, &error);
            Ok(None)
        }
        judged => judged.map_err(as_pool_error),
    }
}

pub(super) fn replay_record(dataset: &Dataset, record: &LogRecord<'_>, adjusted: &Adjusted) -> Result<(), PoolError> {
    let one = |(at, change): (usize, &LogChange<'_>)| {
        let done = match (change, adjusted.get(&at)) {
            (LogChange::Put { key, .. }, Some(value)) => dataset.files().replay(&LogChange::Put { key, value }),
            _ => dataset.files().replay(change),
        };
        match done {
            Err(error) if error.is_rotten() => {
                tell_lost(record, &error);
                Ok(())
            }
            done => done,
        }
    };
    record.changes.iter().enumerate().try_for_each(one).map_err(as_pool_error)
}

fn tell_lost(record: &LogRecord<'_>, error: &FileError) {
    tracing::error!(dataset = record.dataset, %error, "something that was synced belongs to what is damaged, and is lost");
}
