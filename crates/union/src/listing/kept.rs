//! Merges between two calls of the same listing.
//!
//! Invariant: a kept merge is used by one call at a time (it is taken out meanwhile); two readers of one directory have one each.

use super::{Request, Source, merge::Merge};
use nacre_vfs::FileId;
use parking_lot::Mutex;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// The most merges that are kept.
const KEPT_MAX: usize = 64;

/// How long a reader may pause. What a merge knows of upper branches is as old as the listing, as natively; but it must not serve somebody who
/// comes much later to the same position.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Whoever has gone on within this time is at it, and would have to read the upper branches anew if his merge were gone: two readers of large
/// directories must not take each other's away in turn.
const AT_IT: Duration = Duration::from_secs(1);

/// Names that were taken ahead are handed out only as long as a native listing might do so.
const AHEAD_FOR: Duration = Duration::from_secs(2);

/// Which directory, made of which branches, at which moment, and who reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) key: FileId,
    pub(super) token: Option<u64>,
    pub(super) slots: Box<[u8]>,
    /// The thread that reads: of two that have come to the same position, each has its own past.
    reader: u32,
}

impl Ticket {
    pub(super) fn new(request: &Request<'_>, sources: &[Source<'_>]) -> Ticket {
        Ticket {
            key: request.key,
            token: request.token,
            slots: sources.iter().map(|source| source.slot).collect(),
            reader: request.caller.pid,
        }
    }

    /// Whether it is the same directory in the same state, whoever reads it.
    pub(super) fn is_same_state(&self, other: &Ticket) -> bool {
        (self.key, self.token, &self.slots) == (other.key, other.token, &other.slots)
    }

    /// Whether a listing of these branches can go on although the directory may be on more of them now. It must go on without the new ones: a file
    /// copied up meanwhile is still to be shown where it was found.
    fn is_part_of(&self, now: &Ticket) -> bool {
        let mut slots = now.slots.iter();
        self.key == now.key && self.slots.iter().all(|slot| slots.any(|known| known == slot))
    }
}

/// A merge between two calls.
pub(super) struct Kept {
    pub(super) ticket: Ticket,
    /// The position after the last name that was handed out.
    pub(super) reached: u64,
    since: Instant,
    changes: u64,
    pub(super) merge: Merge,
}

/// The merges of one union.
pub(super) struct KeptMerges {
    all: Mutex<Vec<Kept>>,
    /// For merges that nobody is at, bytes.
    budget: usize,
    /// How often names changed through the union.
    changes: AtomicU64,
}

impl KeptMerges {
    pub(super) fn new(budget: usize) -> KeptMerges {
        KeptMerges { all: Mutex::default(), budget, changes: AtomicU64::new(0) }
    }

    /// Names taken ahead are no longer good.
    pub(super) fn names_changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// The merge of the listing that was told `from` last, if one is kept.
    pub(super) fn take(&self, ticket: &Ticket, from: u64) -> Option<Kept> {
        let own = |kept: &Kept| kept.ticket.reader == ticket.reader && kept.ticket.is_part_of(ticket);
        self.take_where(|kept| own(kept) && kept.reached == from)
            .or_else(|| self.take_where(|kept| own(kept) && kept.merge.told(from)))
            // Another thread may go on where the first one stopped.
            .or_else(|| self.take_where(|kept| kept.ticket.is_part_of(ticket) && kept.reached == from))
    }

    /// Any merge of the directory in exactly this state.
    pub(super) fn take_equal(&self, ticket: &Ticket) -> Option<Kept> {
        ticket.token?;
        self.take_where(|kept| kept.ticket == *ticket)
    }

    fn take_where(&self, wanted: impl Fn(&Kept) -> bool) -> Option<Kept> {
        let (found, _stale) = {
            let mut all = self.all.lock();
            let stale: Vec<Kept> = all.extract_if(.., |kept| kept.since.elapsed() > KEPT_FOR).collect();
            (all.iter().rposition(wanted).map(|at| all.remove(at)), stale)
        };
        found
    }

    /// Lets go of names that were taken ahead and may be wrong by now.
    pub(super) fn refresh(&self, kept: &mut Kept, token: Option<u64>) {
        if kept.ticket.token != token || kept.changes != self.changes() || kept.since.elapsed() > AHEAD_FOR {
            kept.merge.outdated();
        }
    }

    /// How often names have changed: to be asked before names are taken.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Keeps a merge whose names were taken when `changes` was so; the oldest give way.
    pub(super) fn keep(&self, ticket: Ticket, reached: u64, changes: u64, merge: Merge) {
        let _evicted: Vec<Kept> = {
            let mut all = self.all.lock();
            all.push(Kept { ticket, reached, since: Instant::now(), changes, merge });
            let mut bytes: usize = all.iter().map(|kept| kept.merge.bytes()).sum();
            let mut evicted = Vec::new();
            while all.len() > KEPT_MAX || (bytes > self.budget && all.first().is_some_and(|oldest| oldest.since.elapsed() > AT_IT)) {
                let oldest = all.remove(0);
                bytes -= oldest.merge.bytes();
                evicted.push(oldest);
            }
            evicted
        };
    }

    /// How many are kept.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.lock().len()
    }
}
