//! Listings between two calls of the same reader: the merge it is in, or the whole listing that it
//! reads from.
//!
//! Invariants:
//! * what is kept is used by one call at a time (it is taken out meanwhile), and nobody takes it
//!   from its reader: who has none of his own and comes to the same position gets a copy;
//! * a reader ends with what it began with. What was shown to it is in its merge or in its whole
//!   listing, and in no other: files that were copied up since stand at another place there, behind
//!   it or before it.

use super::{Request, Source, merge::Merge, merged::Merged};
use nacre_vfs::FileId;
use parking_lot::Mutex;
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The most merges that are kept.
const KEPT_MAX: usize = 64;

/// How long a reader may pause. What a merge knows of upper branches is as old as the listing, as
/// natively; but it must not serve somebody who comes much later to the same position.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Whoever has gone on within this time is at it, and would have to read the upper branches anew if
/// his merge were gone: two readers of large directories must not take each other's away in turn.
const AT_IT: Duration = Duration::from_secs(1);

/// Names that were taken ahead are handed out only as long as a native listing might do so.
const AHEAD_FOR: Duration = Duration::from_secs(2);

/// Which directory, made of which branches, at which moment, and who reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) key: FileId,
    pub(super) token: Option<u64>,
    pub(super) slots: Box<[u8]>,
    /// Of these slots, those whose branches have been removed since: a bit for each slot.
    gone: u128,
    /// The thread that reads: of two that have come to the same position, each has its own past.
    reader: u32,
}

impl Ticket {
    pub(super) fn new(request: &Request<'_>, sources: &[Source<'_>]) -> Ticket {
        Ticket {
            key: request.key,
            token: request.token,
            slots: sources.iter().map(|source| source.slot).collect(),
            gone: 0,
            reader: request.caller.pid,
        }
    }

    /// Whether it is the same directory in the same state, whoever reads it.
    pub(super) fn is_same_state(&self, other: &Ticket) -> bool {
        (self.key, self.token, &self.slots, self.gone) == (other.key, other.token, &other.slots, other.gone)
    }

    /// Whether a listing of these branches can go on although the directory may be on more of them
    /// now, and some may have been removed. It must go on without the new ones: a file copied up
    /// meanwhile is still to be shown where it was found.
    fn is_part_of(&self, now: &Ticket) -> bool {
        let mut slots = now.slots.iter();
        self.key == now.key
            && self.slots.iter().filter(|slot| !self.is_gone(**slot)).all(|slot| slots.any(|known| known == slot))
    }

    /// Whether the branch in a slot has been removed since.
    fn is_gone(&self, slot: u8) -> bool {
        self.gone & bit(slot) != 0
    }

    /// Where each of the branches is among the directory's present ones; `None` for those that have
    /// been removed.
    pub(super) fn places(&self, sources: &[Source<'_>]) -> Vec<Option<usize>> {
        let place =
            |slot: &u8| if self.is_gone(*slot) { None } else { sources.iter().position(|source| source.slot == *slot) };
        self.slots.iter().map(place).collect()
    }
}

fn bit(slot: u8) -> u128 {
    1_u128.checked_shl(u32::from(slot)).unwrap_or(0)
}

/// A reader's way through a whole listing.
#[derive(Clone)]
pub(super) struct Reading {
    pub(super) whole: Arc<Merged>,
    /// The part of it that was handed out in the last call, as offsets.
    pub(super) told: Range<usize>,
}

/// How a listing goes on.
pub(super) enum ListingWay {
    Merging(Box<Merge>),
    Whole(Reading),
}

impl ListingWay {
    fn bytes(&self) -> usize {
        match self {
            ListingWay::Merging(merge) => merge.bytes(),
            // The listing may be shared with other readers and with those who will come.
            ListingWay::Whole(reading) => reading.whole.bytes() / Arc::strong_count(&reading.whole),
        }
    }

    /// Whether the reader may come back to this position: it was told there in the last call.
    fn told(&self, position: u64) -> bool {
        match self {
            ListingWay::Merging(merge) => merge.told(position),
            ListingWay::Whole(reading) => reading.whole.find_between(reading.told.clone(), position).is_some(),
        }
    }

    /// Whether a reader can go on from here to any position that it was ever told.
    fn leads_to(&self, position: u64) -> bool {
        match self {
            ListingWay::Merging(_) => true,
            ListingWay::Whole(reading) => reading.whole.find(position).is_some(),
        }
    }

    fn copy(&self) -> ListingWay {
        match self {
            ListingWay::Merging(merge) => ListingWay::Merging(Box::new(merge.copy())),
            ListingWay::Whole(reading) => ListingWay::Whole(reading.clone()),
        }
    }
}

/// A listing between two calls.
pub(super) struct Kept {
    pub(super) ticket: Ticket,
    /// The position after the last name that was handed out.
    pub(super) reached: u64,
    since: Instant,
    changes: u64,
    /// Another thread goes on with a copy: this one may be left for ever.
    copied: bool,
    pub(super) way: ListingWay,
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

    /// The listing that was told `from` last, if one is kept.
    pub(super) fn take(&self, ticket: &Ticket, from: u64) -> Option<Kept> {
        let own = |kept: &Kept| kept.ticket.reader == ticket.reader && kept.ticket.is_part_of(ticket);
        self.take_where(|kept| own(kept) && kept.reached == from)
            .or_else(|| self.take_where(|kept| own(kept) && kept.way.told(from)))
            // Another thread may go on where the first one stopped.
            .or_else(|| self.copy_where(|kept| kept.ticket.is_part_of(ticket) && kept.reached == from, ticket.reader))
    }

    /// Any listing of this reader, of the directory made of exactly these branches.
    pub(super) fn take_equal(&self, ticket: &Ticket, from: u64) -> Option<Kept> {
        ticket.token?;
        self.take_where(|kept| kept.ticket == *ticket && kept.way.leads_to(from))
    }

    fn take_where(&self, wanted: impl Fn(&Kept) -> bool) -> Option<Kept> {
        let (found, _stale) = {
            let mut all = self.all.lock();
            let stale: Vec<Kept> = all.extract_if(.., |kept| kept.since.elapsed() > KEPT_FOR).collect();
            (all.iter().rposition(wanted).map(|at| all.remove(at)), stale)
        };
        found
    }

    fn copy_where(&self, wanted: impl Fn(&Kept) -> bool, reader: u32) -> Option<Kept> {
        let mut all = self.all.lock();
        let found = all.iter_mut().rfind(|kept| wanted(kept))?;
        found.copied = true;
        let ticket = Ticket { reader, ..found.ticket.clone() };
        let Kept { reached, since, changes, .. } = *found;
        Some(Kept { ticket, reached, since, changes, copied: false, way: found.way.copy() })
    }

    /// The branch in a slot has been removed; another one may come to be there.
    pub(super) fn branch_is_gone(&self, slot: u8) {
        for kept in self.all.lock().iter_mut().filter(|kept| kept.ticket.slots.contains(&slot)) {
            kept.ticket.gone |= bit(slot);
        }
    }

    /// Lets go of names that were taken ahead and may be wrong by now.
    pub(super) fn refresh(&self, kept: &mut Kept, token: Option<u64>) {
        if (kept.ticket.token != token || kept.changes != self.changes() || kept.since.elapsed() > AHEAD_FOR)
            && let ListingWay::Merging(merge) = &mut kept.way
        {
            merge.outdated();
        }
    }

    /// How often names have changed: to be asked before names are taken.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Keeps a listing whose names were taken when `changes` was so; the oldest give way, those
    /// first that may have been left.
    #[expect(clippy::disallowed_methods, reason = "how long a listing is kept")]
    pub(super) fn keep(&self, ticket: Ticket, reached: u64, changes: u64, way: ListingWay) {
        let _evicted: Vec<Kept> = {
            let mut all = self.all.lock();
            all.push(Kept { ticket, reached, since: Instant::now(), changes, copied: false, way });
            let mut bytes: usize = all.iter().map(|kept| kept.way.bytes()).sum();
            let mut evicted = Vec::new();
            while all.len() > KEPT_MAX || bytes > self.budget {
                let left = all.iter().position(|kept| kept.copied);
                let idle = all.first().is_some_and(|oldest| oldest.since.elapsed() > AT_IT || all.len() > KEPT_MAX);
                let Some(at) = left.or(idle.then_some(0)) else { break };
                let given_up = all.remove(at);
                bytes = bytes.saturating_sub(given_up.way.bytes());
                evicted.push(given_up);
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
