//! The names that upper branches hide from lower ones, at a fixed cost per name however long the
//! names are.
//!
//! Each merge has one. Instead of a name, it stores 89 bits of a keyed hash of it (two runs of the standard
//! library's keyed hash with keys of this process): in a directory of a million names, two names are confused
//! once in 10^15 listings, and a program that cannot read our memory cannot construct colliding names. 7 more
//! bits have the source on which the name was seen first. The table is sorted by hash (linear probing,
//! ordered), so it grows in place and by small steps. Invariants:
//! * `slots` is in ascending order except for empty slots; every entry is at or behind its home, with no empty
//!   slot between;
//! * at most `LOAD_MAX` of the homes are used, and after growing not less than `LOAD_MAX / GROWTH`: 12 bytes a
//!   slot make 15.7 a name at most.

use std::hash::{BuildHasher, RandomState};

/// A slot: the bits of the hash, and in the lowest seven the source (counted from 1; 0 in an empty
/// slot).
type Slot = [u32; 3];

const EMPTY: Slot = [0; 3];

/// The bits of the source.
const SOURCE: u32 = 0x7f;

/// Number of homes of the smallest table.
const SMALLEST: usize = 64;

/// Maximal share of used homes, and growth, in hundredths.
const LOAD_MAX: usize = 92;
const GROWTH: usize = 120;

/// The keys of one table's hash functions.
#[derive(Clone, Default)]
struct Keys([RandomState; 2]);

impl Keys {
    fn first(&self, name: &[u8]) -> u64 {
        let Keys([first, _]) = self;
        first.hash_one(name)
    }

    fn slot(&self, name: &[u8], source: usize) -> Slot {
        let Keys([_, second]) = self;
        let (high, low) = (self.first(name), second.hash_one(name));
        // Sources are at most 127, as the caller's branches are.
        let source = u32::try_from(source + 1).unwrap_or(SOURCE) & SOURCE;
        [(high >> 32) as u32, high as u32, (low >> 32) as u32 & !SOURCE | source]
    }
}

/// The names hidden by sources from 0 on.
#[derive(Clone, Default)]
pub(super) struct Hidden {
    keys: Keys,
    slots: Vec<Slot>,
    homes: usize,
    count: usize,
    /// Whether the set is closed: no new names are entered, only those already in it matter.
    closed: bool,
}

/// The compared bits of a slot: all but the source.
fn bits(slot: Slot) -> (u64, u32) {
    let [a, b, c] = slot;
    (u64::from(a) << 32 | u64::from(b), c & !SOURCE)
}

/// Tests the source alone: an insertion scans many slots.
fn is_empty(slot: Slot) -> bool {
    let [_, _, last] = slot;
    last & SOURCE == 0
}

/// The home of a slot in a table of `homes`: ascending with the hash.
fn home(slot: Slot, homes: usize) -> usize {
    let scaled = (u128::from(bits(slot).0) * homes as u128) >> 64;
    usize::try_from(scaled).unwrap_or(0)
}

impl Hidden {
    /// Number of names.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Memory held, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    fn slot(&self, name: &[u8], source: usize) -> Slot {
        self.keys.slot(name, source)
    }

    /// Whether a name may be in the set, by the first half of its hash: enough for most names of a lower
    /// branch.
    fn may_hold(&self, name: &[u8]) -> bool {
        let high = self.keys.first(name);
        let wanted = [(high >> 32) as u32, high as u32, 0];
        let from = home(wanted, self.homes);
        let stops = self.slots.iter().skip(from).find(|slot| is_empty(**slot) || bits(**slot).0 >= high);
        stops.is_some_and(|slot| !is_empty(*slot) && bits(*slot).0 == high)
    }

    /// The index of an entry (true) or the index where it has to be inserted (false).
    fn find(&self, wanted: Slot) -> (usize, bool) {
        let from = home(wanted, self.homes).min(self.slots.len());
        for (index, slot) in self.slots.iter().enumerate().skip(from) {
            if is_empty(*slot) || bits(*slot) > bits(wanted) {
                return (index, false);
            }
            if bits(*slot) == bits(wanted) {
                return (index, true);
            }
        }
        (self.slots.len(), false)
    }

    /// Whether a name of this source is hidden by a source above it.
    pub(super) fn hides(&self, name: &[u8], source: usize) -> bool {
        if self.count == 0 || source == 0 || !self.may_hold(name) {
            return false;
        }
        let wanted = self.slot(name, source);
        let (index, found) = self.find(wanted);
        found && self.is_above(index, wanted)
    }

    /// Closes the set: no new names are entered from now on.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    /// Whether the set is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Undoes the entry of a name that was first seen on this source.
    pub(super) fn take_back(&mut self, name: &[u8], source: usize) {
        let wanted = self.slot(name, source);
        let (index, found) = self.find(wanted);
        if found && self.slots.get(index) == Some(&wanted) {
            let [high, low, last] = wanted;
            self.put(index, [high, low, last | SOURCE]);
        }
    }

    /// Undoes all entries that were first seen on this source: they no longer hide anything.
    pub(super) fn unhide(&mut self, source: usize) {
        let only = self.slot(&[], source).last().map_or(0, |last| last & SOURCE);
        for last in self.slots.iter_mut().filter_map(|slot| slot.last_mut()).filter(|last| **last & SOURCE == only) {
            // Below all sources.
            *last |= SOURCE;
        }
    }

    /// Hides a name from the sources below this one; returns whether it was already hidden from this one.
    pub(super) fn enter(&mut self, name: &[u8], source: usize) -> bool {
        let wanted = self.slot(name, source);
        if self.closed {
            return self.lower(wanted);
        }
        if (self.count + 1) * 100 > self.homes * LOAD_MAX {
            self.grow();
        }
        let (index, found) = self.find(wanted);
        if found {
            let hidden = self.is_above(index, wanted);
            if !hidden {
                self.put(index, wanted);
            }
            return hidden;
        }
        let end = self
            .slots
            .iter()
            .skip(index)
            .position(|slot| is_empty(*slot))
            .map_or(self.slots.len(), |empty| index + empty);
        if end == self.slots.len() {
            self.slots.reserve_exact(if end == self.slots.capacity() { 64 } else { 0 });
            self.slots.push(EMPTY);
        }
        self.slots.copy_within(index..end, index + 1);
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = wanted;
        }
        self.count += 1;
        false
    }

    /// Records that a name in the set has been seen on this source, too.
    fn lower(&mut self, wanted: Slot) -> bool {
        let (index, found) = self.find(wanted);
        if !found || self.is_above(index, wanted) {
            return found;
        }
        self.put(index, wanted);
        false
    }

    fn is_above(&self, index: usize, wanted: Slot) -> bool {
        let source = |slot: Slot| slot.last().map_or(0, |last| last & SOURCE);
        self.slots.get(index).is_some_and(|slot| source(*slot) < source(wanted))
    }

    /// Grows in place: all entries to the end of the larger table, then each to its new home or the
    /// next free slot behind it.
    fn grow(&mut self) {
        let homes = (self.homes * GROWTH / 100).max(SMALLEST);
        let end =
            self.slots.iter().filter(|slot| !is_empty(**slot)).fold(0, |next, slot| home(*slot, homes).max(next) + 1);
        // Room for entries that overflow the end later, so that one more entry does not double the table.
        let length = homes.max(end) + homes / 1024 + 16;
        let old = self.slots.len();
        self.slots.reserve_exact(length.saturating_sub(old));
        self.slots.resize(length.max(old), EMPTY);
        let mut to = self.slots.len();
        for from in (0..old).rev() {
            let Some(slot) = self.slots.get_mut(from) else { continue };
            let moved = std::mem::replace(slot, EMPTY);
            if !is_empty(moved) {
                to -= 1;
                self.put(to, moved);
            }
        }
        let mut next = 0;
        for from in to..self.slots.len() {
            let Some(slot) = self.slots.get_mut(from) else { continue };
            let moved = std::mem::replace(slot, EMPTY);
            next = home(moved, homes).max(next);
            self.put(next, moved);
            next += 1;
        }
        self.homes = homes;
    }

    fn put(&mut self, index: usize, moved: Slot) {
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = moved;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::splitmix::Numbers;
    use std::collections::HashMap;

    fn name(number: u64) -> Vec<u8> {
        format!("{number:06x}").into_bytes()
    }

    fn check(hidden: &Hidden) {
        let used: Vec<(usize, Slot)> =
            hidden.slots.iter().copied().enumerate().filter(|(_, slot)| !is_empty(*slot)).collect();
        assert_eq!(used.len(), hidden.count);
        assert!(used.windows(2).all(|pair| bits(pair[0].1) < bits(pair[1].1)), "not in order");
        for (index, slot) in used {
            let home = home(slot, hidden.homes);
            assert!(
                home <= index && hidden.slots[home..index].iter().all(|slot| !is_empty(*slot)),
                "{index} is cut off from {home}"
            );
        }
    }

    #[test]
    fn a_name_is_hidden_from_the_sources_below_it_alone() {
        let mut hidden = Hidden::default();
        assert!(!hidden.hides(b"a", 0));
        assert!(!hidden.enter(b"a", 1));
        assert!(!hidden.enter(b"a", 1), "its own source goes on showing it");
        assert!(!hidden.hides(b"a", 0));
        assert!(!hidden.hides(b"a", 1));
        assert!(hidden.hides(b"a", 2));
        assert!(hidden.enter(b"a", 2));
        assert!(hidden.hides(b"a", 126));
        assert!(!hidden.hides(b"b", 126));
        assert_eq!(hidden.len(), 1);
    }

    #[test]
    fn a_closed_set_takes_no_new_names() {
        let mut hidden = Hidden::default();
        hidden.enter(b"a", 1);
        hidden.enter(b"b", 0);
        hidden.close();
        assert!(!hidden.enter(b"a", 0) && hidden.hides(b"a", 1), "seen above now");
        assert!(hidden.enter(b"b", 1) && hidden.hides(b"b", 1));
        assert!(!hidden.enter(b"c", 0) && !hidden.hides(b"c", 1));
        assert_eq!(hidden.len(), 2);
    }

    #[test]
    fn what_a_source_hid_can_be_shown_again() {
        for closed in [false, true] {
            let mut hidden = Hidden::default();
            for (name, source) in [(b"a", 1), (b"b", 2), (b"c", 1)] {
                hidden.enter(name, source);
            }
            if closed {
                hidden.close();
            }
            hidden.take_back(b"b", 1);
            hidden.take_back(b"a", 1);
            assert!(!hidden.hides(b"a", 126) && hidden.hides(b"b", 3) && hidden.hides(b"c", 2));
            assert!(!hidden.enter(b"a", 1) && hidden.hides(b"a", 2), "the source comes to it again");
            hidden.unhide(1);
            assert!(!hidden.hides(b"a", 126) && hidden.hides(b"b", 3) && !hidden.hides(b"c", 126));
            assert!(
                !hidden.enter(b"c", 2) && hidden.enter(b"c", 3),
                "a source below shows it, and hides it from then on"
            );
            check(&hidden);
        }
    }

    #[test]
    fn it_agrees_with_a_map_while_it_grows() {
        let (mut hidden, mut map) = (Hidden::default(), HashMap::new());
        let mut numbers = Numbers(1);
        for step in 0..60_000_u64 {
            let random = numbers.next();
            let (name, source) = (name(random % 40_000), (random >> 40) as usize % 5);
            let above = map.get(&name).is_some_and(|first| *first < source);
            assert_eq!(hidden.hides(&name, source), above);
            if random & 1 == 0 {
                assert_eq!(hidden.enter(&name, source), above);
                map.entry(name).and_modify(|first: &mut usize| *first = source.min(*first)).or_insert(source);
            }
            if step % 10_000 == 0 {
                check(&hidden);
            }
        }
        check(&hidden);
        assert_eq!(hidden.len(), map.len());
    }

    #[test]
    fn at_most_sixteen_bytes_a_name_of_any_length() {
        let mut hidden = Hidden::default();
        let long = [b'x'; 240];
        for number in 0..300_000_u64 {
            hidden.enter(&[&long[..], &name(number)].concat(), 0);
            if hidden.len() >= 10_000 {
                assert!(hidden.bytes() <= 16 * hidden.len(), "{} bytes for {} names", hidden.bytes(), hidden.len());
            }
        }
        check(&hidden);
    }
}
