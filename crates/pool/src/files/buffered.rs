//! Records in memory: what was written and is not in the table yet, as whole records or as parts of
//! stored ones.
//!
//! Held by the active inodes (`inodes`), filled by writes (`content`, `patches`), recorded by an
//! fsync (`durable`), emptied by the flush. Invariant: a record has content or parts, never both.

use std::collections::BTreeMap;
use std::ops::Range;

/// A record in memory.
#[derive(Debug, Default)]
pub(super) struct Buffered {
    /// Its content, from its beginning to its last byte that is not a hole.
    pub(super) content: Vec<u8>,
    /// The part that no record of the intent log holds.
    pub(super) unrecorded: Option<Range<usize>>,
    /// What is promised for it: at least what it will be charged. Bytes.
    pub(super) promised: u64,
    /// Parts of it, where the rest is not in memory; the content is empty then.
    pub(super) fragments: Fragments,
    /// The length of the stored content that the parts belong to, bytes.
    pub(super) base: usize,
}

impl Buffered {
    /// Whether only parts of it are in memory.
    pub(super) fn is_sparse(&self) -> bool {
        self.fragments.len() > 0
    }

    /// What it takes, bytes.
    pub(super) fn held(&self) -> u64 {
        (self.content.len() + self.fragments.bytes()) as u64
    }

    /// Notes that a part has changed.
    pub(super) fn changed(&mut self, part: Range<usize>) {
        self.unrecorded = Some(match self.unrecorded.take() {
            Some(before) => before.start.min(part.start)..before.end.max(part.end),
            None => part,
        });
    }

    /// Makes it whole where it has one part, which is all of it.
    pub(super) fn take_whole(&mut self) -> bool {
        let parts = &mut self.fragments.0;
        let Some(only) = parts.first_entry().filter(|part| part.get().bytes.len() == self.base) else { return false };
        let Fragment { bytes, unrecorded } = only.remove();
        self.unrecorded = unrecorded.then_some(0..bytes.len());
        self.content = bytes;
        true
    }

    /// Makes it whole: its parts lie over the stored content.
    pub(super) fn lay_over(&mut self, content: Vec<u8>) {
        self.content = content;
        for (from, fragment) in std::mem::take(&mut self.fragments).0 {
            overlay(&mut self.content, 0, from, &fragment.bytes);
            if fragment.unrecorded {
                self.changed(from..from + fragment.bytes.len());
            }
        }
    }
}

/// A part of a record in memory.
#[derive(Debug)]
struct Fragment {
    bytes: Vec<u8>,
    /// No record of the intent log holds it.
    unrecorded: bool,
}

/// Parts of a record in memory, by their place in it; none touches another.
#[derive(Debug, Default)]
pub(super) struct Fragments(BTreeMap<usize, Fragment>);

impl Fragments {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// What it takes, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.values().map(|fragment| fragment.bytes.len()).sum()
    }

    /// Whether a part is in one of them.
    pub(super) fn cover(&self, part: &Range<usize>) -> bool {
        let before = self.0.range(..=part.start).next_back();
        before.is_some_and(|(start, fragment)| start + fragment.bytes.len() >= part.end)
    }

    /// Puts a part in; what it touches becomes one with it.
    pub(super) fn put(&mut self, from: usize, part: &[u8]) {
        let end = from + part.len();
        let before = self.0.range(..from).next_back().filter(|(start, fragment)| *start + fragment.bytes.len() >= from);
        let first = before.map_or(from, |(start, _)| *start);
        let mut touched = self.0.range(first..=end).map(|(start, fragment)| (*start, *start + fragment.bytes.len()));
        let (one, more) = (touched.next(), touched.next().is_some());
        if let (Some((start, stop)), false) = (one, more)
            && start <= from
            && let Some(fragment) = self.0.get_mut(&start)
        {
            // The usual cases: written again, or right behind.
            let inside = stop.min(end) - from;
            let (over, behind) = part.split_at(inside);
            if let Some(place) = fragment.bytes.get_mut(from - start..from - start + inside) {
                place.copy_from_slice(over);
            }
            fragment.bytes.extend_from_slice(behind);
            fragment.unrecorded = true;
            return;
        }
        let starts: Vec<usize> = self.0.range(first..=end).map(|(start, _)| *start).collect();
        let mut whole = Vec::new();
        for start in starts {
            if let Some(fragment) = self.0.remove(&start) {
                overlay(&mut whole, first, start, &fragment.bytes);
            }
        }
        overlay(&mut whole, first, from, part);
        self.0.insert(first, Fragment { bytes: whole, unrecorded: true });
    }

    /// The parts with their places.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.0.iter().map(|(start, fragment)| (*start, fragment.bytes.as_slice()))
    }

    /// The parts that no record of the log holds, with their places.
    pub(super) fn unrecorded(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.0
            .iter()
            .filter(|(_, fragment)| fragment.unrecorded)
            .map(|(start, fragment)| (*start, fragment.bytes.as_slice()))
    }

    /// Takes everything behind the first so many parts out.
    pub(super) fn split(&mut self, most: usize) -> Option<Self> {
        let next = self.0.keys().nth(most).copied()?;
        Some(Self(self.0.split_off(&next)))
    }

    /// A record of the log holds them now.
    pub(super) fn recorded(&mut self) {
        self.0.values_mut().for_each(|fragment| fragment.unrecorded = false);
    }
}

/// Copies a part to its place in `whole`, which begins at `origin` and grows as needed.
fn overlay(whole: &mut Vec<u8>, origin: usize, from: usize, part: &[u8]) {
    let at = from.saturating_sub(origin);
    if whole.len() < at + part.len() {
        whole.resize(at + part.len(), 0);
    }
    if let Some(place) = whole.get_mut(at..at + part.len()) {
        place.copy_from_slice(part);
    }
}

/// Copies what `part` (at `from` of a record) has in common with `target` (at `at` of it).
pub(super) fn overlap(target: &mut [u8], at: usize, from: usize, part: &[u8]) {
    let (start, end) = (at.max(from), (at + target.len()).min(from + part.len()));
    if start < end
        && let (Some(to), Some(source)) = (target.get_mut(start - at..end - at), part.get(start - from..end - from))
    {
        to.copy_from_slice(source);
    }
}
