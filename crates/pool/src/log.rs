//! The intent log (like ZFS' ZIL): makes an fsync durable between two commits. The dataset layer records each
//! operation, an fsync flushes them, a commit makes its records obsolete, an import replays the log.
//!
//! ```text
//!  record()   operation -> the buffer in memory, in the order of the operations
//!  flush()    buffer -> one block -> written, durable; fsyncs that wait meanwhile share the next block
//!  committed  buffer and ring drop the records that the commit holds
//!  replay     blocks from the root's start on -> records, in order
//! ```
//!
//! Invariants: records become durable in the order in which they were recorded; a record of a txg is never durable in
//! the log while an earlier record of an uncommitted txg is missing: when the buffer overflows, a flush asks for a
//! commit until that has happened. The same holds for a block that could not be appended, where the medium can
//! continue after it: until a durable root names a start after it, nothing is appended.

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

/// Storage of a log's blocks: each is durable before the next is appended.
pub trait Blocks: Send {
    /// Starts an empty log at a position that was never used.
    ///
    /// # Errors
    /// [`PoolError::Format`] for an impossible position.
    fn begin(&mut self, start: Start) -> Result<(), PoolError>;

    /// Reads the blocks from a start on, and passes each record of a txg after `committed` to `visit`, in order. The
    /// next block is appended after them; they stay until [`Self::forget`].
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for an undamaged block with malformed records; errors of the
    /// visitor.
    fn replay(&mut self, start: Start, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError>;

    /// Appends a block durably. Returns `false` where there is no space; nothing was written then.
    ///
    /// # Errors
    /// [`PoolError::Device`]: it is unknown then whether the block is durable, and nothing may be appended any more
    /// except after [`Self::skip`]. [`PoolError::Refused`] where another process has taken over the pool.
    fn append(&mut self, txg: Txg, records: &[u8]) -> Result<bool, PoolError>;

    /// Skips the block that could not be appended, and returns the start after it. The block may exist all the same,
    /// or appear late, so nothing may be appended before a durable root names that start, or a later one. `None`
    /// where nothing can be appended any more.
    fn skip(&mut self) -> Option<Start> {
        None
    }

    /// Assigns all blocks so far to this txg, in whichever txg they were written: they are needed until it is
    /// durable, and no longer.
    fn settle(&mut self, txg: Txg);

    /// The start for a root that holds this txg: the first block with records of a later txg, or the position of the
    /// next block.
    fn start_after(&self, txg: Txg) -> Start;

    /// Drops the blocks before `start`, after a root that holds this txg and names this start has become durable. A
    /// block that was appended since may hold records of that txg only, but replay reads the chain from the start on,
    /// so it stays.
    fn forget(&mut self, txg: Txg, start: Start);

    /// Deletion of dropped blocks where it takes requests; to be run without the lock of the log.
    fn removal(&mut self) -> Option<Removal> {
        None
    }

    /// Number of bytes in use.
    fn used(&self) -> u64;

    /// Maximum number of bytes.
    fn length(&self) -> u64;
}

/// Deletes dropped blocks; a failed deletion is repeated with the next one.
pub type Removal = Box<dyn FnOnce() + Send>;

/// Visitor of the records of a log.
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

/// Position at which a replay begins, as a root record holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Position of the next block: in a ring a multiple of [`ring::BLOCK`].
    pub position: u64,
    /// Sequence number of the next block.
    pub sequence: u64,
    /// Checksum of the previous block.
    pub chain: u64,
}

/// Result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Number of undamaged blocks.
    pub blocks: u64,
    /// Number of records passed to the visitor.
    pub records: u64,
    /// Sequence number of a block that is damaged although a later one is not: from it on, acknowledged fsyncs are
    /// lost.
    pub lost: Option<u64>,
}

/// Passes the records of a block with a later txg than `committed` to the visitor; returns their number.
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

/// Maximum number of bytes of records in one flush; a commit is cheaper for more.
pub const FLUSH_MOST: usize = 4 << 20;

/// Position of a record in the order of all records. A flush up to it makes it durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Result of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LogFlush {
    /// Everything up to the ticket is durable.
    Durable,
    /// The log cannot hold it: it is durable once this txg is committed.
    NeedsCommit(Txg),
}

/// Records of one txg that are only in memory.
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
    /// The last txg with dropped records: nothing may be logged before it is committed.
    dropped: Option<Txg>,
    /// Start after a block that could not be appended: nothing may be logged before a root names it.
    skipped: Option<Start>,
    /// The last durable txg.
    committed: Txg,
    writing: bool,
    failed: Option<PoolError>,
}

impl LogState {
    /// Drops the records up to this txg: only the commit makes them durable.
    fn drop_through(&mut self, txg: Txg) {
        self.pending.clear();
        self.bytes = 0;
        self.dropped = self.dropped.max(Some(txg));
    }

    /// Drops all records so far, and those of the open txg to come if there are none.
    fn drop_to_open(&mut self) {
        self.drop_through(self.newest.max(Txg(self.committed.0.saturating_add(1))));
    }
}

/// Intent log of an imported pool.
#[derive(Debug)]
pub struct Log<B: Blocks> {
    state: Mutex<LogState>,
    done: Condvar,
    ring: Mutex<B>,
    half_full: AtomicBool,
}

impl<B: Blocks> Log<B> {
    /// A log that continues at the ring's current position.
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

    /// Records an operation of a txg as an [encoded record](LogRecord::encoded). It is in memory only until a flush
    /// or a commit. The caller holds the txg open meanwhile, so that records are in the order of their txgs.
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

    /// Notes that an operation of this txg has made a change that no record can hold: until the txg is committed, a
    /// flush asks for that commit. It counts as a record that does not fit the log, so that [`Self::newest`] includes
    /// it even where all real records are durable.
    pub fn cannot_record(&self, txg: Txg) {
        let mut state = self.state.lock();
        state.last.0 = state.last.0.wrapping_add(1);
        state.newest = state.newest.max(txg);
        state.drop_through(txg);
    }

    /// Ticket of the newest record: an fsync of everything waits for it.
    #[must_use]
    pub fn newest(&self) -> Ticket {
        self.state.lock().last
    }

    /// Makes everything up to a ticket durable. Callers that arrive while a block is being written share the next
    /// one.
    ///
    /// # Errors
    /// [`PoolError::Device`] where the log cannot continue after a failure, and [`PoolError::Refused`]: every later
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

    /// Start of a replay for a root that holds this txg: to be written into it. Blocks from there on stay until
    /// [`Self::committed`].
    #[must_use]
    pub fn start_after(&self, txg: Txg) -> Start {
        self.ring.lock().start_after(txg)
    }

    /// Notes that a txg is durable: its records are dropped, and waiting flushes of them return. `last` is the newest
    /// ticket that it holds, taken when the txg was closed; `start` is the one that the durable root names.
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
                // The commit took its start before the block failed: another commit is needed.
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

    /// Number of bytes of the ring in use: near its length, a commit is due.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.ring.lock().used()
    }

    /// Whether a commit is due before the ring is full. Does not wait for a lock.
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
