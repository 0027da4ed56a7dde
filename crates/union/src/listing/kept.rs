//! State of listings between two calls of the same reader: its merge, or the whole listing that it reads from.
//!
//! Invariants:
//! * the state is used by one call at a time (it is taken out meanwhile), and never taken from its reader:
//!   another reader that continues at the same position gets a copy;
//! * a reader continues with the state it began with. The names shown to it are recorded in its merge or its
//!   whole listing, and in no other: files that were copied up since have another position there, behind the
//!   reader's or before it.

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

/// Maximal number of kept listings.
const KEPT_MAX: usize = 64;

/// Maximal pause of a reader. A merge's knowledge of upper branches is as old as the listing, as on other file
/// systems; but it must not serve another reader that comes to the same position much later.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// A reader that continued within this time is active, and would have to read the upper branches again without
/// its merge: two readers of large directories must not evict each other's merge alternately.
const AT_IT: Duration = Duration::from_secs(1);

/// Names read ahead are handed out only as long as another file system's buffered listing would be.
const AHEAD_FOR: Duration = Duration::from_secs(2);

/// Key of a listing: the directory, its branches, its state, and the reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) key: FileId,
    pub(super) token: Option<u64>,
    pub(super) slots: Box<[u8]>,
    /// Bit set of the slots whose branches have been removed since.
    gone: u128,
    /// The reading thread: two readers at the same position have seen different names.
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

    /// Whether it is the same directory in the same state, for any reader.
    pub(super) fn is_same_state(&self, other: &Ticket) -> bool {
        (self.key, self.token, &self.slots, self.gone) == (other.key, other.token, &other.slots, other.gone)
    }

    /// Whether a listing of these branches can continue although the directory may be on more branches now, and
    /// some may have been removed. It must continue without the new ones: a file copied up meanwhile still has
    /// to be shown where it was found.
    fn is_part_of(&self, now: &Ticket) -> bool {
        let mut slots = now.slots.iter();
        self.key == now.key
            && self.slots.iter().filter(|slot| !self.is_gone(**slot)).all(|slot| slots.any(|known| known == slot))
    }

    /// Whether the branch in a slot has been removed since.
    fn is_gone(&self, slot: u8) -> bool {
        self.gone & bit(slot) != 0
    }

    /// The index of each of the branches among the directory's present ones; `None` for removed ones.
    pub(super) fn places(&self, sources: &[Source<'_>]) -> Vec<Option<usize>> {
        let place =
            |slot: &u8| if self.is_gone(*slot) { None } else { sources.iter().position(|source| source.slot == *slot) };
        self.slots.iter().map(place).collect()
    }
}

fn bit(slot: u8) -> u128 {
    1_u128.checked_shl(u32::from(slot)).unwrap_or(0)
}

/// A reader's position in a whole listing.
#[derive(Clone)]
pub(super) struct Reading {
    pub(super) whole: Arc<Merged>,
    /// The part that was handed out in the last call, as offsets.
    pub(super) told: Range<usize>,
}

/// The state with which a listing continues.
pub(super) enum ListingWay {
    Merging(Box<Merge>),
    Whole(Reading),
}

impl ListingWay {
    fn bytes(&self) -> usize {
        match self {
            ListingWay::Merging(merge) => merge.bytes(),
            // The listing may be shared with other readers, and with later ones.
            ListingWay::Whole(reading) => reading.whole.bytes() / Arc::strong_count(&reading.whole),
        }
    }

    /// Whether the reader may come back to this position: the last call handed it out.
    fn told(&self, position: u64) -> bool {
        match self {
            ListingWay::Merging(merge) => merge.told(position),
            ListingWay::Whole(reading) => reading.whole.find_between(reading.told.clone(), position).is_some(),
        }
    }

    /// Whether a reader can continue from here at any position that it ever got.
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
    /// Another thread continues with a copy: this one may never be used again.
    copied: bool,
    pub(super) way: ListingWay,
}

/// The kept listings of one union.
pub(super) struct KeptMerges {
    all: Mutex<Vec<Kept>>,
    /// Budget of inactive merges, bytes.
    budget: usize,
    /// Counts the name changes made through the union.
    changes: AtomicU64,
}

impl KeptMerges {
    pub(super) fn new(budget: usize) -> KeptMerges {
        KeptMerges { all: Mutex::default(), budget, changes: AtomicU64::new(0) }
    }

    /// Invalidates names that were read ahead.
    pub(super) fn names_changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// The listing whose last call handed out `from`, if it is kept.
    pub(super) fn take(&self, ticket: &Ticket, from: u64) -> Option<Kept> {
        let own = |kept: &Kept| kept.ticket.reader == ticket.reader && kept.ticket.is_part_of(ticket);
        self.take_where(|kept| own(kept) && kept.reached == from)
            .or_else(|| self.take_where(|kept| own(kept) && kept.way.told(from)))
            // Another thread may continue where the first one stopped.
            .or_else(|| self.copy_where(|kept| kept.ticket.is_part_of(ticket) && kept.reached == from, ticket.reader))
    }

    /// Any listing of this reader, of the directory with exactly these branches.
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

    /// The branch in a slot has been removed; another branch may get the slot.
    pub(super) fn branch_is_gone(&self, slot: u8) {
        for kept in self.all.lock().iter_mut().filter(|kept| kept.ticket.slots.contains(&slot)) {
            kept.ticket.gone |= bit(slot);
        }
    }

    /// Drops names that were read ahead and may be outdated.
    pub(super) fn refresh(&self, kept: &mut Kept, token: Option<u64>) {
        if (kept.ticket.token != token || kept.changes != self.changes() || kept.since.elapsed() > AHEAD_FOR)
            && let ListingWay::Merging(merge) = &mut kept.way
        {
            merge.outdated();
        }
    }

    /// The count of name changes, to be read before names are.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Keeps a listing whose names were read when the count was `changes`; evicts the oldest, first those that
    /// are probably abandoned.
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

    /// Number of kept listings.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.lock().len()
    }
}
