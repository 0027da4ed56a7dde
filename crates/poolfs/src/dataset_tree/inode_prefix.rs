//! The upper bits of inode numbers, as users see them: which of them mean which tree of which
//! member.
//!
//! A tree has the same ones after a remount, as a rule: they are chosen by its names and move on
//! only where others have them. Invariants: two trees never have the same; what was given up is
//! never given again.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

/// Where the upper bits begin.
const SHIFT: u32 = 40;
/// The number of upper bits but for the topmost, which doors have for themselves.
const BITS: u32 = 23;
/// They are told apart by so many numbers, from 1; 0 is the first member's head.
const MOST: u64 = (1 << BITS) - 1;

/// The upper bits of a number, and the rest.
pub(super) fn split(number: u64) -> (u64, u64) {
    (number >> SHIFT, number & ((1 << SHIFT) - 1))
}

/// The number with these bits.
pub(super) fn join(prefix: u64, lower: u64) -> u64 {
    prefix << SHIFT | lower & ((1 << SHIFT) - 1)
}

/// Whose they are.
struct Owner<M> {
    /// Of the member, and the upper bits that the tree has there. None where they were given up.
    tree: Option<(Weak<M>, u64)>,
}

/// See the file's head.
pub(super) struct InodePrefixes<M> {
    taken: HashMap<u64, Owner<M>>,
    /// By the number of the dataset and the upper bits there.
    known: HashMap<(u64, u64), u64>,
}

impl<M> Default for InodePrefixes<M> {
    fn default() -> Self {
        InodePrefixes { taken: HashMap::new(), known: HashMap::new() }
    }
}

impl<M> InodePrefixes<M> {
    /// Those of a tree.
    pub fn get(&self, dataset: u64, inner: u64) -> Option<u64> {
        self.known.get(&(dataset, inner)).copied()
    }

    /// The same; given to it where it has none.
    pub fn take(&mut self, dataset: u64, inner: u64, member: &Weak<M>) -> u64 {
        if let Some(known) = self.get(dataset, inner) {
            return known;
        }
        let mut prefix = first(dataset, inner);
        while self.taken.contains_key(&prefix) {
            prefix = prefix % MOST + 1;
        }
        self.taken.insert(prefix, Owner { tree: Some((Weak::clone(member), inner)) });
        self.known.insert((dataset, inner), prefix);
        prefix
    }

    /// Whose they are, and what they are there.
    pub fn owner(&self, prefix: u64) -> Option<(Arc<M>, u64)> {
        let (member, inner) = self.taken.get(&prefix)?.tree.as_ref()?;
        Some((member.upgrade()?, *inner))
    }

    /// All those of a dataset.
    pub fn of(&self, dataset: u64) -> Vec<u64> {
        self.known.iter().filter(|((of, _), _)| *of == dataset).map(|(_, prefix)| *prefix).collect()
    }

    /// The dataset goes. Somebody may still have numbers of it: nobody else ever gets them.
    pub fn give_up(&mut self, dataset: u64) {
        for prefix in self.of(dataset) {
            self.taken.insert(prefix, Owner { tree: None });
        }
        self.known.retain(|(of, _), _| *of != dataset);
    }
}

/// Where the search begins.
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

    #[test]
    fn what_is_gone_owns_nothing() {
        let mut prefixes = InodePrefixes::default();
        let prefix = prefixes.take(1, 0, &Arc::downgrade(&Arc::new(())));
        assert!(prefixes.owner(prefix).is_none());
    }
}
