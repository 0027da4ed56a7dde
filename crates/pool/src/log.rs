//! The intent log: what an fsync promised between two commits. The dataset layer records each
//! operation, fsync flushes, a commit makes what it holds obsolete, import replays.
//!
//! ```text
//!  record()   operation -> the buffer in memory, in the order of the operations
//!  flush()    buffer -> one block -> written, durable; all who wait meanwhile share the next block
//!  committed  buffer and ring forget what the commit holds
//!  replay     blocks from the root's start on -> records, in order
//! ```
//!
//! Invariants: records become durable in the order in which they were recorded; a record of a txg
//! is never durable in the log while an earlier record of a txg that is not committed is missing:
//! where the buffer overflows, a flush asks for a commit until that has happened. A block that cannot be appended is
//! like that, where the medium can go on behind it: until a durable root names a start behind it, nothing is appended.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::error::PoolError;
use crate::pointer::Txg;

pub mod kept;
pub mod record;
pub mod ring;

pub use kept::{KeptLog, VERSION as KEPT_VERSION};
pub use record::{LogChange, LogRecord};
pub use ring::{Area, Ring, newest_sequence};

/// The blocks of a log, wherever they lie: each is durable before the next is appended.
pub trait Blocks: Send {
    /// Forgets what it knows, and begins with no block at a start that was never used.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a start that cannot be.
    fn begin(&mut self, start: Start) -> Result<(), PoolError>;

    /// Reads the blocks from a start on, and shows each record of a txg after `committed`, in
    /// order. The next block comes behind them; they stay until [`Self::forget`].
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a whole block whose records are none; the
    /// visitor's.
    fn replay(&mut self, start: Start, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError>;

    /// Appends a block; it is durable then. `false`: there is no room, nothing was written.
    ///
    /// # Errors
    /// [`PoolError::Device`]: whether the block is durable is unknown then, nothing may be appended
    /// any more but after [`Self::skip`]. [`PoolError::Refused`] where the pool is another program's by now.
    fn append(&mut self, txg: Txg, records: &[u8]) -> Result<bool, PoolError>;

    /// Passes over the block that could not be appended: the start behind it. The block may be there all the same,
    /// or come late, so nothing may be appended before a durable root names that start, or a later one. `None`
    /// where nothing can be appended any more.
    fn skip(&mut self) -> Option<Start> {
        None
    }

    /// What the blocks so far say goes into this txg, whichever they were written in: they are needed until
    /// that is durable, and no longer.
    fn settle(&mut self, txg: Txg);

    /// The start for a root that holds this txg: the first block with records of a later one, or
    /// where the next block goes.
    fn start_after(&self, txg: Txg) -> Start;

    /// A root that holds this txg and names this start is durable: the blocks before the start are not
    /// needed. A block that was appended since may hold records of that txg alone, but replay reads the
    /// chain from the start on, so it stays.
    fn forget(&mut self, txg: Txg, start: Start);

    /// The removal of forgotten blocks, where that takes requests: run without the lock of the log.
    fn removal(&mut self) -> Option<Removal> {
        None
    }

    /// How much is in use, bytes.
    fn used(&self) -> u64;

    /// How much there can be, bytes.
    fn length(&self) -> u64;
}

/// Removes what was forgotten; what cannot be removed is part of the next removal.
pub type Removal = Box<dyn FnOnce() + Send>;

/// What is shown the records of a log.
pub type Visit<'a> = dyn FnMut(&LogRecord<'_>) -> Result<(), PoolError> + 'a;

impl<B: Blocks + ?Sized> Blocks for Box<B> {
    fn begin(&mut self, start: Start) -> Result<(), PoolError> {
        (**self).begin(start)
    }

    fn replay(&mut self, start: Start, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError> {
        (**self).replay(start, committed, visit)
    }

    fn append(&mut self, txg: Txg, records: &[u8]) -> Result<bool, PoolError> {
        (**self).append(txg, records)
    }

    fn skip(&mut self) -> Option<Start> {
        (**self).skip()
    }

    fn settle(&mut self, txg: Txg) {
        (**self).settle(txg);
    }

    fn start_after(&self, txg: Txg) -> Start {
        (**self).start_after(txg)
    }

    fn forget(&mut self, txg: Txg, start: Start) {
        (**self).forget(txg, start);
    }

    fn removal(&mut self) -> Option<Removal> {
        (**self).removal()
    }

    fn used(&self) -> u64 {
        (**self).used()
    }

    fn length(&self) -> u64 {
        (**self).length()
    }
}

/// Where a replay begins: what a root record holds of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The position of the next block: in a ring a multiple of [`ring::BLOCK`].
    pub position: u64,
    /// Its sequence.
    pub sequence: u64,
    /// The checksum of the block before.
    pub chain: u64,
}

/// What a replay found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Whole blocks.
    pub blocks: u64,
    /// Records that were shown.
    pub records: u64,
    /// The sequence of a block that is damaged although a later one is whole: from it on, what was
    /// promised durable is lost.
    pub lost: Option<u64>,
}

/// Shows the records of one block that are of a later txg than `committed`; answers how many.
pub(crate) fn show(records: &[u8], committed: Txg, visit: &mut Visit<'_>) -> Result<u64, PoolError> {
    let (mut from, mut shown) = (crate::codec::Reader::new(records), 0);
    while !from.is_empty() {
        let record = LogRecord::decode(&mut from)?;
        if record.txg > committed {
            visit(&record)?;
            shown += 1;
        }
    }
    Ok(shown)
}

/// How many bytes of records one flush may write; what is larger is cheaper as a commit.
pub const FLUSH_MOST: usize = 4 << 20;

/// A record's place in the order of all records. A flush up to it makes it durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// What a flush came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LogFlush {
    /// Everything up to the ticket is durable.
    Durable,
    /// The log cannot hold it: it is durable once this txg is committed.
    NeedsCommit(Txg),
}

/// The records of one txg that are in memory only.
#[derive(Debug)]
struct Batch {
    txg: Txg,
    records: Vec<u8>,
    last: Ticket,
}

#[derive(Debug)]
struct LogState {
    pending: VecDeque<Batch>,
    bytes: usize,
    last: Ticket,
    newest: Txg,
    durable: Ticket,
    /// The last txg of which records were dropped: nothing may be logged before it is committed.
    dropped: Option<Txg>,
    /// A block before this start could not be appended: nothing may be logged before a root names it.
    skipped: Option<Start>,
    /// The last txg that is durable.
    committed: Txg,
    writing: bool,
    failed: Option<PoolError>,
}

impl LogState {
    /// Records of this txg and those before it go to nobody any more but the commit.
    fn drop_through(&mut self, txg: Txg) {
        self.pending.clear();
        self.bytes = 0;
        self.dropped = self.dropped.max(Some(txg));
    }

    /// The same of all records so far, and of the open txg where there are none.
    fn drop_to_open(&mut self) {
        self.drop_through(self.newest.max(Txg(self.committed.0.saturating_add(1))));
    }
}

/// The log of an imported pool.
#[derive(Debug)]
pub struct Log<B: Blocks> {
    state: Mutex<LogState>,
    done: Condvar,
    ring: Mutex<B>,
    half_full: AtomicBool,
}

impl<B: Blocks> Log<B> {
    /// A log that goes on where the ring stands.
    #[must_use]
    pub fn new(ring: B) -> Self {
        let state = LogState {
            pending: VecDeque::new(),
            bytes: 0,
            last: Ticket(0),
            newest: Txg(0),
            durable: Ticket(0),
            dropped: None,
            skipped: None,
            committed: Txg(0),
            writing: false,
            failed: None,
        };
        Self {
            state: Mutex::new(state),
            done: Condvar::new(),
            ring: Mutex::new(ring),
            half_full: AtomicBool::new(false),
        }
    }

    /// Notes an operation of a txg by its [record](LogRecord::encoded). It is in memory only until a
    /// flush or a commit. The caller holds the txg open meanwhile, so that records come in the order of
    /// their txgs.
    pub fn record(&self, txg: Txg, encoded: Vec<u8>) -> Ticket {
        let mut state = self.state.lock();
        state.last.0 = state.last.0.wrapping_add(1);
        let last = state.last;
        state.newest = state.newest.max(txg);
        if state.dropped.is_some_and(|dropped| dropped >= txg) {
            return last;
        }
        if state.bytes.saturating_add(encoded.len()) > FLUSH_MOST {
            state.drop_through(txg);
            return last;
        }
        state.bytes = state.bytes.saturating_add(encoded.len());
        match state.pending.back_mut() {
            Some(batch) if batch.txg == txg => {
                batch.records.extend_from_slice(&encoded);
                batch.last = last;
            }
            _ => state.pending.push_back(Batch { txg, records: encoded, last }),
        }
        last
    }

    /// An operation of this txg has changed what no record can hold: until it is committed, a flush
    /// asks for that commit. It counts as a record that the log cannot hold, so that it is among
    /// what [`Self::newest`] stands for even where all real records are durable.
    pub fn cannot_record(&self, txg: Txg) {
        let mut state = self.state.lock();
        state.last.0 = state.last.0.wrapping_add(1);
        state.newest = state.newest.max(txg);
        state.drop_through(txg);
    }

    /// The ticket of the newest record: what an fsync of everything waits for.
    #[must_use]
    pub fn newest(&self) -> Ticket {
        self.state.lock().last
    }

    /// Makes everything up to a ticket durable. Those who come while a block is being written share
    /// the next.
    ///
    /// # Errors
    /// [`PoolError::Device`] where the blocks cannot go on after a failure, and [`PoolError::Refused`]: every further
    /// flush fails with it.
    pub fn flush(&self, through: Ticket) -> Result<LogFlush, PoolError> {
        let mut state = self.state.lock();
        loop {
            if state.durable >= through {
                return Ok(LogFlush::Durable);
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if let Some(txg) = state.dropped {
                return Ok(LogFlush::NeedsCommit(txg));
            }
            if !state.writing {
                break;
            }
            self.done.wait(&mut state);
        }
        let batches = std::mem::take(&mut state.pending);
        let Some((txg, last)) = batches.back().map(|batch| (batch.txg, batch.last)) else {
            return Ok(LogFlush::NeedsCommit(state.newest));
        };
        state.bytes = 0;
        state.writing = true;
        drop(state);
        let payload: Vec<u8> = batches.iter().flat_map(|batch| batch.records.iter().copied()).collect();
        let (written, skipped) = {
            let mut ring = self.ring.lock();
            let written = ring.append(txg, &payload);
            let is_skipped = matches!(written, Err(PoolError::Device { .. }));
            (written, is_skipped.then(|| ring.skip()).flatten())
        };
        self.note_used();
        let mut state = self.state.lock();
        state.writing = false;
        self.done.notify_all();
        match written {
            Ok(true) => state.durable = state.durable.max(last),
            // A commit may have been faster.
            Ok(false) if state.committed >= txg => {}
            Ok(false) => state.dropped = state.dropped.max(Some(txg)),
            Err(error) if skipped.is_some() => {
                tracing::warn!(%error, "the log cannot be written: what is synced waits for a commit");
                state.skipped = skipped;
                state.drop_to_open();
            }
            Err(error) => {
                state.failed = Some(error.clone());
                return Err(error);
            }
        }
        Ok(match state.dropped {
            _ if state.durable >= through => LogFlush::Durable,
            Some(dropped) => LogFlush::NeedsCommit(dropped),
            None => LogFlush::NeedsCommit(txg),
        })
    }

    /// Where replay has to begin for a root that holds this txg: to be written into it. Blocks from
    /// there on stay until [`Self::committed`].
    #[must_use]
    pub fn start_after(&self, txg: Txg) -> Start {
        self.ring.lock().start_after(txg)
    }

    /// This txg is durable: its records need no log any more, and those who wait for them are done.
    /// `last` is the newest ticket that it holds, taken when the txg was closed; `start` the one that the
    /// durable root names.
    pub fn committed(&self, txg: Txg, last: Ticket, start: Start) {
        let removal = {
            let mut ring = self.ring.lock();
            ring.forget(txg, start);
            ring.removal()
        };
        self.note_used();
        self.note_committed(txg, last, start);
        if let Some(remove) = removal {
            remove();
        }
    }

    fn note_committed(&self, txg: Txg, last: Ticket, start: Start) {
        let mut state = self.state.lock();
        state.durable = state.durable.max(last);
        state.committed = state.committed.max(txg);
        if let Some(skipped) = state.skipped {
            if (start.position, start.sequence) >= (skipped.position, skipped.sequence) {
                state.skipped = None;
            } else {
                // The commit had its start before the block failed: another one has to be made.
                state.drop_to_open();
            }
        }
        while state.pending.front().is_some_and(|batch| batch.txg <= txg) {
            if let Some(batch) = state.pending.pop_front() {
                state.bytes = state.bytes.saturating_sub(batch.records.len());
            }
        }
        if state.dropped.is_some_and(|dropped| dropped <= txg) {
            state.dropped = None;
        }
        self.done.notify_all();
    }

    /// How many bytes of the ring are in use: near its length, a commit is due.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.ring.lock().used()
    }

    /// Whether a commit is due before the ring is full. Waits for nobody.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        self.half_full.load(Ordering::Relaxed)
    }

    fn note_used(&self) {
        let ring = self.ring.lock();
        self.half_full.store(ring.used() > ring.length() / 2, Ordering::Relaxed);
    }
}

#[cfg(test)]
pub(crate) mod tests;
