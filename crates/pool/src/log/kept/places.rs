//! Memory of the replay journal: positions that only grow, one per word, mapped to parts of the memory that are
//! reused.
//!
//! Called by [`super`] alone. The first access to a page costs many times more than a copy into it, and most of the
//! journal is empty most of the time: so the next records go to the part that was emptied last, which is in memory
//! and often in the processor's cache, and not to one that was never accessed.
//!
//! Invariants:
//! - A part is mapped to positions ([`PARTS`]) before [`super::END`] reaches them, and is reused only when
//!   [`super::BEGIN`] has left all of it. The free parts are known only to the process: the next one derives
//!   them from these two.
//! - There is one part more than the journal's length: a full journal begins and ends in the middle of one.

use std::sync::atomic::{AtomicU64, Ordering};

use nacre_sys::shared_words::SharedWords;

/// Index of the word with the memory part of the first part of the positions; one word for each part follows.
const PARTS: usize = 16;
/// Start of the parts, words: the header before is a page.
pub(super) const FIRST: usize = 512;
/// Length of a part, words: 1 MiB.
pub(super) const PART: u64 = 1 << 17;
/// Maximum number of parts.
const MOST: usize = FIRST - PARTS;

/// Number of words of a journal of this size, or of the largest one.
pub(super) fn words_for(bytes: usize) -> usize {
    FIRST + (bytes.div_ceil(PART as usize * 8) + 1).min(MOST) * PART as usize
}

/// The words of the journal.
pub(super) struct Places {
    shared: SharedWords,
    count: u64,
}

/// Parts in use, as the appending process knows them.
#[derive(Debug, Default)]
pub(super) struct HeldParts {
    /// The free parts; the last one is used first.
    free: Vec<u64>,
    /// The first part of the positions in use, and the one behind the last.
    held: (u64, u64),
}

impl Places {
    /// Wraps the shared memory; `None` where it is too short or too long.
    pub(super) fn of(shared: SharedWords) -> Option<Self> {
        let count = shared.words().len().checked_sub(FIRST)? / PART as usize;
        (1 < count && count <= MOST).then_some(Self { shared, count: count as u64 })
    }

    pub(super) fn shared(&self) -> &SharedWords {
        &self.shared
    }

    /// Maximum number of positions in use at a time.
    pub(super) fn length(&self) -> u64 {
        (self.count - 1) * PART
    }

    /// Whether the positions from `begin` to `end`, and those after them, are mapped to existing parts, each to a
    /// different one.
    pub(super) fn are_whole(&self, begin: u64, end: u64) -> bool {
        let used: Vec<u64> = (begin / PART..end.div_ceil(PART)).map(|part| self.get(self.where_is(part))).collect();
        used.iter().enumerate().all(|(at, part)| *part < self.count && !used.iter().take(at).any(|other| other == part))
    }

    /// Finds the free parts while the positions from `begin` to `end` are in use.
    pub(super) fn parts(&self, begin: u64, end: u64) -> HeldParts {
        let held = (begin / PART, end.div_ceil(PART).max(begin / PART));
        let used: Vec<u64> = (held.0..held.1).map(|part| self.get(self.where_is(part))).collect();
        // Part 0 is used first.
        HeldParts { free: (0..self.count).rev().filter(|part| !used.contains(part)).collect(), held }
    }

    /// Maps memory for all positions up to `end`; returns whether there is enough.
    pub(super) fn reach(&self, parts: &mut HeldParts, end: u64) -> bool {
        while parts.held.1 * PART < end {
            let Some(part) = parts.free.pop() else { return false };
            self.set(self.where_is(parts.held.1), part);
            parts.held.1 += 1;
        }
        true
    }

    /// Frees the parts before this position.
    pub(super) fn leave(&self, parts: &mut HeldParts, begin: u64) {
        while parts.held.0 < (begin / PART).min(parts.held.1) {
            parts.free.push(self.get(self.where_is(parts.held.0)));
            parts.held.0 += 1;
        }
    }

    pub(super) fn copy(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut copied = Vec::with_capacity(bytes.next_multiple_of(8));
        for words in self.pieces(at, super::words_of(bytes)) {
            words.iter().for_each(|word| copied.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()));
        }
        copied.truncate(bytes);
        copied
    }

    pub(super) fn fill(&self, at: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for words in self.pieces(at, super::words_of(bytes.len())) {
            let (now, later) = rest.split_at(rest.len().min(words.len() * 8));
            rest = later;
            let (whole, part) = now.as_chunks::<8>();
            for (word, bytes) in words.iter().zip(whole) {
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            if let (Some(word), false) = (words.get(whole.len()), part.is_empty()) {
                let mut last = [0; 8];
                last.iter_mut().zip(part).for_each(|(to, from)| *to = *from);
                word.store(u64::from_ne_bytes(last), Ordering::Relaxed);
            }
        }
    }

    pub(super) fn at(&self, at: u64) -> u64 {
        self.pieces(at, 1).flatten().next().map_or(0, |word| word.load(Ordering::Relaxed))
    }

    pub(super) fn put(&self, at: u64, value: u64) {
        self.pieces(at, 1).flatten().for_each(|word| word.store(value, Ordering::Relaxed));
    }

    /// The words of some positions, part by part. An impossible part number, which damage has caused, gives no words.
    fn pieces(&self, at: u64, words: u64) -> impl Iterator<Item = &[AtomicU64]> {
        let end = at.saturating_add(words);
        let mut next = at;
        std::iter::from_fn(move || {
            let from = next;
            next = (from / PART + 1).saturating_mul(PART).min(end);
            (from < end).then(|| {
                let part = self.get(self.where_is(from / PART)).min(self.count);
                // Below the length of the memory, or empty.
                let start = FIRST + (part * PART + from % PART) as usize;
                self.shared.words().get(start..start + (next - from) as usize).unwrap_or_default()
            })
        })
    }

    /// Index of the word with the memory part of a part of the positions.
    fn where_is(&self, part: u64) -> usize {
        PARTS + (part % self.count) as usize
    }

    pub(super) fn get(&self, number: usize) -> u64 {
        self.shared.words().get(number).map_or(0, |word| word.load(Ordering::Acquire))
    }

    pub(super) fn set(&self, number: usize, value: u64) {
        self.shared.words().get(number).iter().for_each(|word| word.store(value, Ordering::Release));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_emptied_last_is_used_first_and_nothing_is_used_twice() {
        let places = Places::of(SharedWords::new(c"test", words_for(8 << 20)).unwrap()).unwrap();
        assert_eq!(places.length(), 8 * PART);
        let mut parts = places.parts(0, 0);
        let (mut begin, mut end) = (0, 0);
        for step in 0..1000 {
            // Never more than a quarter, so that no more than that is ever touched.
            end += PART / 3 + step;
            assert!(places.reach(&mut parts, end));
            let held: Vec<u64> =
                (begin / PART..end.div_ceil(PART)).map(|part| places.get(places.where_is(part))).collect();
            assert!(held.iter().all(|part| *part < 4), "{held:?}");
            assert!(held.iter().enumerate().all(|(at, part)| !held[..at].contains(part)), "{held:?}");
            // Another process finds the same.
            let mut found = places.parts(begin, end);
            found.free.sort_unstable();
            let mut known = parts.free.clone();
            known.sort_unstable();
            assert_eq!((found.free, found.held), (known, parts.held));
            places.put(end - 1, step);
            assert_eq!(places.at(end - 1), step);
            if step % 4 == 3 {
                begin = end - PART;
                places.leave(&mut parts, begin);
            }
        }
    }

    #[test]
    fn a_full_log_begins_and_ends_in_the_middle_of_a_part() {
        let places = Places::of(SharedWords::new(c"test", words_for(4 << 20)).unwrap()).unwrap();
        let mut parts = places.parts(0, 0);
        assert!(places.reach(&mut parts, 7));
        places.leave(&mut parts, 7);
        assert!(places.reach(&mut parts, 7 + places.length()));
        assert!(!places.reach(&mut parts, 5 * PART + 1));
        places.leave(&mut parts, PART);
        assert!(places.reach(&mut parts, 5 * PART + 1));
        assert!(places.are_whole(PART, 5 * PART + 1));
        for part in [places.get(places.where_is(2)), places.count] {
            places.set(places.where_is(1), part);
            assert!(!places.are_whole(PART, 5 * PART + 1) && places.are_whole(2 * PART, 5 * PART + 1));
        }
    }
}
