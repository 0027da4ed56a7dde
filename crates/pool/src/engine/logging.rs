//! The intent log of an imported pool (like ZFS' ZIL): operations are recorded as they happen, an
//! fsync flushes the records, an import replays them.
//!
//! Invariant: an operation that cannot be recorded makes an fsync wait for a commit, never return
//! early.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::replay_skip::{Adjusted, ReplaySkip};
use super::{Dataset, Durable, Pool, as_pool_error};
use crate::error::PoolError;
use crate::files::{self, FileError, Inode, Recorder};
use crate::log::{self, Blocks, Log, LogChange, LogFlush, LogRecord, Replayed, Ticket};
use crate::pointer::Txg;
use crate::properties::SyncMode;

/// The intent log into which the files of all datasets record.
pub(super) struct PoolLog {
    log: Log<Box<dyn Blocks>>,
    /// Recording is switched off: an fsync waits for a commit.
    off: AtomicBool,
    /// Operations of this txg and of earlier ones are not recorded either.
    after: AtomicU64,
}

/// Bytes of replayed content in memory, or of reserved space, at which it is written as frames.
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
    /// Excludes this txg, which has the replayed operations and is not committed yet: nothing
    /// before that commit can be logged.
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

    /// Notes that a commit is durable.
    pub(super) fn committed(&self, txg: Txg, last: Ticket, start: log::Start) {
        self.log.committed(txg, last, start);
    }

    /// Makes everything up to the ticket durable, or returns the txg whose commit will.
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
        // Called once, when the pool is created or opened.
        let _ = self.log.set(log);
    }

    /// Sets whether operations are recorded in the log from now on; if not, an fsync waits for a
    /// commit.
    pub fn record(&self, on: bool) {
        if let Some(log) = self.log.get() {
            log.off.store(!on, Ordering::Relaxed);
        }
    }

    /// Applies the log's records after the last commit, commits them, and continues the log.
    pub(super) fn replay_log(&self, mut blocks: Box<dyn Blocks>, durable: &Durable) -> Result<(), PoolError> {
        let (mut promised, mut skipped) = (0, ReplaySkip::default());
        let replayed = blocks.replay(durable.log, durable.txg, &mut |record| {
            let (dataset, _) = self.open_dataset(record.dataset)?;
            // Damaged rows do not prevent an import: their records are skipped. An operation is
            // applied as a whole or not at all.
            let Some(adjusted) = judge(&skipped, &dataset, record)? else {
                skipped.leave_out(&dataset, record);
                return Ok(());
            };
            let replay = || replay_record(&dataset, record, &adjusted);
            if self.reservations.outstanding().max(self.held()) > REPLAYED_AT_ONCE.saturating_add(promised) {
                promised = self.store_replayed()?;
            }
            match replay() {
                // The reserved space exceeds the need: stored frames release it.
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
            // Replayed content leaves memory before orphans are freed: content that is still in
            // memory would enter the table again after its inode was freed.
            self.commit()?;
            self.open_datasets().iter().try_for_each(|dataset| self.sweep(dataset))?;
        }
        Ok(())
    }

    /// Writes replayed content as frames, so that neither memory nor reserved space grows with the
    /// log; returns the bytes that are still reserved.
    pub(super) fn store_replayed(&self) -> Result<u64, PoolError> {
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().flush_most()).map_err(as_pool_error)?;
        Ok(self.reservations.outstanding().max(self.held()))
    }

    /// Makes a file durable, and all earlier changes of names and attributes.
    ///
    /// # Errors
    /// Errors of the engine; the error of a commit that could not store content of the file.
    pub fn sync_file(&self, dataset: &Dataset, inode: &Arc<Inode>) -> files::Result<()> {
        inode.check_stored()?;
        if dataset.behaviour().sync == SyncMode::Disabled {
            // Durable with the next commit, as the property asks for.
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
        // The commit may have found that the content cannot be stored.
        inode.check_synced()
    }

    /// Makes all earlier changes of names and attributes durable.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn sync_names(&self) -> Result<(), PoolError> {
        self.sync_through(self.log.get().map(|log| log.newest()))
    }

    /// Makes a directory durable, and all earlier changes of names and attributes.
    ///
    /// # Errors
    /// Errors of the engine; the error of a commit that could not store the directory's attributes.
    pub fn sync_directory(&self, inode: &Inode) -> files::Result<()> {
        inode.check_stored()?;
        self.sync_names()?;
        inode.check_synced()
    }

    /// Makes all earlier changes of a file system durable.
    ///
    /// # Errors
    /// Errors of the engine; the reason if written content cannot be stored; once, the reason if
    /// content was given up.
    pub fn sync_all(&self, dataset: &Dataset) -> files::Result<()> {
        self.commit()?;
        dataset.files().check_all_stored()
    }

    /// Makes all earlier changes of the pool durable.
    ///
    /// # Errors
    /// As [`Self::sync_all`].
    pub fn sync_pool(&self) -> Result<(), PoolError> {
        self.commit()?;
        self.open_datasets().iter().try_for_each(|dataset| dataset.files().check_all_stored()).map_err(as_pool_error)
    }

    /// After a commit: number of files with content that cannot be stored, and the error of one of
    /// them.
    #[must_use]
    pub fn unstored(&self) -> Option<(usize, PoolError)> {
        let of = |dataset: &Arc<Dataset>| dataset.files().unstored();
        let add = |(sum, _): (usize, _), (more, error)| (sum + more, error);
        self.open_datasets().iter().filter_map(of).reduce(add).map(|(files, error)| (files, as_pool_error(error)))
    }

    fn sync_through(&self, through: Option<Ticket>) -> Result<(), PoolError> {
        let (Some(log), Some(ticket)) = (self.log.get(), through) else {
            // Changes before this call are in the open txg, or in an earlier one.
            let txg = self.gate.enter().txg();
            return self.commit_through(txg);
        };
        // The commit may be of an earlier txg than the record: it only has to end before anything
        // can be logged.
        while let Some(txg) = log.flush(ticket)? {
            self.commit_through(txg)?;
        }
        if log.log.is_half_full() {
            self.throttle.ask();
        }
        Ok(())
    }
}

/// Prepares a record for its replay; `None` if rows that it needs cannot be read or were skipped.
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
