//! Ends of listings, for layers that number names in the order of their creation.
//!
//! A reader that creates or renames names in the directory that it reads would find its own names
//! forever: each comes after all others. So a listing shows the names that were numbered before it
//! began, and no later ones. Front ends have no handle for a directory (the kernel opens it without
//! a request), so the position itself identifies the listing: its lowest bits are a slot of this
//! table. Called by `mem` and by file systems of pools. Invariants:
//! * the end of a slot only grows: where a slot is reused by another listing, a reader that
//!   continues the old one sees more names, never fewer;
//! * a position means the same name in all listings, and stays valid where this table is new: the
//!   listing then ends where the table began.

use parking_lot::Mutex;

/// Bits of a position that name a slot; the others are the name's number.
const BITS: u32 = 8;
/// Maximum number of concurrent listings with an end of their own.
const SLOTS: usize = 1 << BITS;

/// Ends of the listings of one layer.
#[derive(Debug)]
pub struct Ends {
    /// End of the listings that began before this table was made.
    first: u64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    /// Counter of uses, for eviction.
    clock: u64,
}

#[derive(Debug)]
struct Slot {
    end: u64,
    /// Number of listings that began with this slot and have not been read to their ends.
    open: u32,
    used: u64,
}

/// The part of a listing that starts at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Starts after the name with this number.
    pub behind: u64,
    /// Ends before this number.
    pub end: u64,
    slot: usize,
}

impl Span {
    /// The position after the name with this number.
    pub fn after(&self, number: u64) -> u64 {
        number << BITS | self.slot as u64
    }
}

impl Ends {
    /// Creates an empty table. Listings that began earlier show names below this number.
    pub fn new(first: u64) -> Ends {
        Ends { first, table: Mutex::default() }
    }

    /// Begins a listing (position 0), which shows the names below `next`, a number that never
    /// falls; or continues one from a position.
    pub fn enter(&self, from: u64, next: impl FnOnce() -> u64) -> Span {
        let mut table = self.table.lock();
        if from == 0 {
            let end = next();
            return Span { behind: 0, end, slot: table.begin(end) };
        }
        let slot = (from % SLOTS as u64) as usize;
        Span { behind: from >> BITS, end: table.touch(slot).map_or(self.first, |slot| slot.end), slot }
    }

    /// Marks a listing as read to its end.
    pub fn ended(&self, span: &Span) {
        if let Some(slot) = self.table.lock().slots.get_mut(span.slot) {
            slot.open = slot.open.saturating_sub(1);
        }
    }
}

impl Table {
    fn touch(&mut self, slot: usize) -> Option<&mut Slot> {
        self.clock += 1;
        let slot = self.slots.get_mut(slot)?;
        slot.used = self.clock;
        Some(slot)
    }

    /// Finds the slot of a listing that begins now: a slot with the same end, or else one whose
    /// listing seems abandoned.
    fn begin(&mut self, end: u64) -> usize {
        let same = self.slots.iter().position(|slot| slot.end == end);
        let at = same.or_else(|| if self.slots.len() < SLOTS { None } else { self.idle() }).unwrap_or(self.slots.len());
        if at == self.slots.len() {
            self.slots.push(Slot { end, open: 0, used: 0 });
        }
        if let Some(slot) = self.touch(at) {
            slot.open = if slot.end == end { slot.open.saturating_add(1) } else { 1 };
            slot.end = end;
        }
        at
    }

    /// Finds the slot to reuse: first those whose listings were read to their ends, and among
    /// equals the one unused for the longest time.
    fn idle(&self) -> Option<usize> {
        let slots = self.slots.iter().enumerate();
        slots.min_by_key(|(_, slot)| (slot.open > 0, slot.used)).map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_says_which_listing_it_is_of() {
        let ends = Ends::new(7);
        let first = ends.enter(0, || 100);
        let second = ends.enter(0, || 200);
        assert_eq!((first.behind, first.end, second.end), (0, 100, 200));
        let (one, other) = (first.after(42), second.after(42));
        assert_ne!(one, other);
        for (position, end) in [(one, 100), (other, 200)] {
            let span = ends.enter(position, || unreachable!("it goes on"));
            assert_eq!((span.behind, span.end, span.after(42)), (42, end, position));
        }
        // All listings of a directory without new names share one slot.
        assert_eq!(ends.enter(0, || 200).after(1), second.after(1));
        // A new table does not know this listing.
        assert_eq!(Ends::new(7).enter(one, || 100).end, 7);
        assert!(one > 255 && other > 255, "small positions are the door's");
    }

    #[test]
    fn who_goes_on_keeps_his_end_beside_those_who_ended() {
        let ends = Ends::new(0);
        let slow = ends.enter(0, || 10).after(1);
        for next in 11..5_000 {
            let quick = ends.enter(0, || next);
            ends.ended(&ends.enter(quick.after(2), || 0));
            assert_eq!(ends.enter(slow, || 0).end, 10);
        }
        // Listings that neither continue nor end are evicted, the oldest first.
        for next in 5_000..5_000 + SLOTS as u64 {
            ends.enter(0, || next);
        }
        assert!(ends.enter(slow, || 0).end >= 5_000);
        assert_eq!(ends.table.lock().slots.len(), SLOTS);
    }
}
