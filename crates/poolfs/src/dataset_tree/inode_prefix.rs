//! Prefixes: the upper bits of inode numbers, as users see them, which identify a tree of a member.
//!
//! A tree usually has the same prefix after a remount: it is derived from a hash, and another one
//! is chosen only if that is taken. Invariants: no two trees have the same prefix; a prefix that
//! was given up is never assigned again.

use nacre_vfs::GivenNumbers;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

/// Position of the upper bits.
const SHIFT: u32 = 40;
/// Number of upper bits without the topmost, which the FUSE front end uses.
const BITS: u32 = 23;
/// Number of prefixes, from 1; 0 is the live file system of the first member.
const MOST: u64 = (1 << BITS) - 1;

/// Splits a number into its prefix and the lower bits.
pub(super) fn split(number: u64) -> (u64, u64) {
    (number >> SHIFT, number & ((1 << SHIFT) - 1))
}

/// Joins a prefix and the lower bits.
pub(super) fn join(prefix: u64, lower: u64) -> u64 {
    prefix << SHIFT | lower & ((1 << SHIFT) - 1)
}

/// Owner of a prefix.
struct Owner<M> {
    /// The member, and the tree's upper bits within it. `None` if the prefix was given up.
    tree: Option<(Weak<M>, u64)>,
}

/// The assigned prefixes; see the head of this file.
pub(super) struct InodePrefixes<M> {
    taken: HashMap<u64, Owner<M>>,
    /// By the number of the dataset and the upper bits within it.
    known: HashMap<(u64, u64), u64>,
    /// Prefixes given out by a previous process, for datasets that were not added yet.
    left: HashMap<(u64, u64), u64>,
    /// Records prefixes for a process that takes over later.
    noted: Option<Arc<dyn GivenNumbers>>,
}

/// Flag of the records made here, to distinguish them from those of datasets.
const NOTED: u64 = 1 << 63;
/// Instead of upper bits: all prefixes of a dataset were given up.
const GIVEN_UP: u64 = u64::MAX;

impl<M> Default for InodePrefixes<M> {
    fn default() -> Self {
        InodePrefixes { taken: HashMap::new(), known: HashMap::new(), left: HashMap::new(), noted: None }
    }
}

impl<M> InodePrefixes<M> {
    /// Starts recording prefixes; recorded ones are reserved for their trees.
    pub fn note_in(&mut self, given: &Arc<dyn GivenNumbers>) {
        for [dataset, inner, prefix] in given.all() {
            let Some(dataset) = dataset.checked_sub(NOTED) else { continue };
            if inner == GIVEN_UP {
                self.left.retain(|(of, _), _| *of != dataset);
            } else {
                self.taken.insert(prefix, Owner { tree: None });
                self.left.insert((dataset, inner), prefix);
            }
        }
        self.noted = Some(Arc::clone(given));
    }

    /// Restores the prefixes of a dataset that was added again.
    pub fn take_left(&mut self, dataset: u64, member: &Weak<M>) {
        for ((_, inner), prefix) in self.left.extract_if(|(of, _), _| *of == dataset) {
            self.taken.insert(prefix, Owner { tree: Some((Weak::clone(member), inner)) });
            self.known.insert((dataset, inner), prefix);
        }
    }

    fn note(&self, dataset: u64, inner: u64, prefix: u64) {
        self.noted.iter().for_each(|noted| noted.give([dataset | NOTED, inner, prefix]));
    }

    /// Returns the prefix of a tree.
    pub fn get(&self, dataset: u64, inner: u64) -> Option<u64> {
        self.known.get(&(dataset, inner)).copied()
    }

    /// Returns the prefix of a tree; assigns one if it has none.
    pub fn take(&mut self, dataset: u64, inner: u64, member: &Weak<M>) -> u64 {
        if let Some(known) = self.get(dataset, inner) {
            return known;
        }
        let mut prefix = first(dataset, inner);
        while self.taken.contains_key(&prefix) {
            prefix = prefix % MOST + 1;
        }
        self.note(dataset, inner, prefix);
        self.taken.insert(prefix, Owner { tree: Some((Weak::clone(member), inner)) });
        self.known.insert((dataset, inner), prefix);
        prefix
    }

    /// Returns the member of a prefix, and the upper bits within it.
    pub fn owner(&self, prefix: u64) -> Option<(Arc<M>, u64)> {
        let (member, inner) = self.taken.get(&prefix)?.tree.as_ref()?;
        Some((member.upgrade()?, *inner))
    }

    /// Returns all prefixes of a dataset.
    pub fn of(&self, dataset: u64) -> Vec<u64> {
        self.known.iter().filter(|((of, _), _)| *of == dataset).map(|(_, prefix)| *prefix).collect()
    }

    /// Gives up the prefixes of a removed dataset. Its numbers may still be in use, so they are
    /// never assigned again.
    pub fn give_up(&mut self, dataset: u64) {
        for prefix in self.of(dataset) {
            self.taken.insert(prefix, Owner { tree: None });
        }
        self.known.retain(|(of, _), _| *of != dataset);
        self.note(dataset, GIVEN_UP, 0);
    }
}

/// The preferred prefix, at which the search begins.
fn first(dataset: u64, inner: u64) -> u64 {
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = (dataset.wrapping_mul(SPREAD) ^ inner).wrapping_mul(SPREAD);
    (mixed >> (u64::BITS - BITS)) % MOST + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_split_and_joined() {
        for (prefix, lower) in [(0, 1), (MOST, (1 << SHIFT) - 1), (77, 0)] {
            assert_eq!(split(join(prefix, lower)), (prefix, lower));
            assert!(join(prefix, lower) < 1 << 63);
        }
        assert_eq!(join(3, u64::MAX), join(4, 0) - 1);
    }

    #[test]
    fn a_tree_keeps_its_bits_and_they_are_nobody_elses() {
        let member = Arc::new(());
        let mut prefixes = InodePrefixes::default();
        let mut all: Vec<u64> = (0..10)
            .flat_map(|dataset| (0..2000).map(move |inner| (dataset, inner)))
            .map(|(dataset, inner)| prefixes.take(dataset, inner, &Arc::downgrade(&member)))
            .collect();
        assert!(all.iter().all(|prefix| (1..=MOST).contains(prefix)));
        let third = prefixes.take(3, 7, &Arc::downgrade(&member));
        assert_eq!((all[3 * 2000 + 7], prefixes.get(3, 7)), (third, Some(third)));
        assert_eq!(prefixes.owner(third).map(|(_, inner)| inner), Some(7));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 20_000);
        assert_eq!(prefixes.of(3).len(), 2000);
        prefixes.give_up(3);
        assert!(prefixes.owner(third).is_none());
        assert_ne!(prefixes.take(3, 7, &Arc::downgrade(&member)), third);
    }

    #[derive(Default)]
    struct Noted(parking_lot::Mutex<Vec<[u64; 3]>>);

    impl GivenNumbers for Noted {
        fn all(&self) -> Vec<[u64; 3]> {
            self.0.lock().clone()
        }
        fn give(&self, given: [u64; 3]) {
            self.0.lock().push(given);
        }
    }

    #[test]
    fn the_next_process_gives_out_the_same() {
        let given: Arc<dyn GivenNumbers> = Arc::new(Noted::default());
        let member = Arc::new(());
        let weak = Arc::downgrade(&member);
        let of = || {
            let mut prefixes = InodePrefixes::default();
            prefixes.note_in(&given);
            prefixes
        };
        let mut first = of();
        // The second one moves to the next prefix.
        let natural = super::first(3, 0);
        let other = (4..).find(|inner| super::first(9, *inner) == natural).unwrap();
        assert_eq!([first.take(3, 0, &weak), first.take(9, other, &weak)], [natural, natural + 1]);
        let gone = first.take(5, 0, &weak);
        first.give_up(5);
        let again = first.take(5, 0, &weak);
        assert_ne!(gone, again);
        first.take(6, 0, &weak);
        first.give_up(6);
        for _ in 0..2 {
            let mut next = of();
            // Requested in another order, and before the others are there.
            next.take_left(9, &weak);
            assert_eq!(next.owner(natural + 1).map(|(_, inner)| inner), Some(other));
            assert!(next.owner(natural).is_none());
            assert_eq!(next.take(9, other, &weak), natural + 1);
            next.take_left(5, &weak);
            next.take_left(3, &weak);
            assert_eq!([next.take(5, 0, &weak), next.take(3, 0, &weak)], [again, natural]);
        }
        let mut next = of();
        next.take_left(6, &weak);
        assert_ne!(next.take(6, 0, &weak), super::first(6, 0), "given up is given up");
    }

    #[test]
    fn what_is_gone_owns_nothing() {
        let mut prefixes = InodePrefixes::default();
        let prefix = prefixes.take(1, 0, &Arc::downgrade(&Arc::new(())));
        assert!(prefixes.owner(prefix).is_none());
    }
}
