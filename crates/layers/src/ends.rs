//! Where listings end, for layers that number names in the order in which they are made.
//!
//! A reader that makes or renames names in the directory that he reads would meet his own names for
//! ever: each lies behind all others. So a listing shows the names that were numbered before it
//! began, and no later ones. Doors have no handle for a directory (the kernel opens it by itself),
//! so the position itself says which listing it is of: its lowest bits are a slot of this table.
//! Called by `mem` and by file systems of pools. Invariants:
//! * an end only moves on: where a slot is taken over by another listing, whoever goes on with the
//!   old one sees more names, never fewer;
//! * a position means the same name in all listings, and stays good where this table is new: the
//!   listing then ends where the table began.

use parking_lot::Mutex;

/// Bits of a position that name a slot; the others are the name's number.
const BITS: u32 = 8;
/// Listings that go on at once, each with an end of its own.
const SLOTS: usize = 1 << BITS;

/// The ends of the listings of one layer.
#[derive(Debug)]
pub struct Ends {
    /// Of listings that began before this table.
    first: u64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    /// Counts uses.
    clock: u64,
}

#[derive(Debug)]
struct Slot {
    end: u64,
    /// Listings that have begun with it and not been read to their ends.
    open: u32,
    used: u64,
}

/// A listing, from one position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Behind the name with this number.
    pub behind: u64,
    /// Up to this number, which is not in it.
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
    /// An empty table. Listings that began earlier show names below this number.
    pub fn new(first: u64) -> Ends {
        Ends { first, table: Mutex::default() }
    }

    /// A listing begins (0), and shows the names below `next`, which never falls; or goes on from a
    /// position.
    pub fn enter(&self, from: u64, next: impl FnOnce() -> u64) -> Span {
        let mut table = self.table.lock();
        if from == 0 {
            let end = next();
            return Span { behind: 0, end, slot: table.begin(end) };
        }
        let slot = (from % SLOTS as u64) as usize;
        Span { behind: from >> BITS, end: table.touch(slot).map_or(self.first, |slot| slot.end), slot }
    }

    /// Nothing is left of a listing.
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

    /// The slot of a listing that begins now: that of another one with the same end, or else one
    /// that nobody goes on with, as far as can be told.
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

    /// Listings that were read to their ends first, of them and of the others those that were not
    /// gone on with for the longest time.
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
        // As many listings as like of a layer in which nothing is made have one slot.
        assert_eq!(ends.enter(0, || 200).after(1), second.after(1));
        // The table is new to this one.
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
        // Of those who neither go on nor end, the first are overtaken.
        for next in 5_000..5_000 + SLOTS as u64 {
            ends.enter(0, || next);
        }
        assert!(ends.enter(slow, || 0).end >= 5_000);
        assert_eq!(ends.table.lock().slots.len(), SLOTS);
    }
}
