//! Records in memory: written content that is not in the table yet, as whole records or as parts of
//! stored ones.
//!
//! Held by the active inodes (`inodes`), filled by writes (`content`, `patches`), recorded by an
//! fsync (`durable`), emptied by the flush. Invariant: a record has either whole content or parts.

use std::collections::BTreeMap;
use std::ops::Range;

/// A record in memory.
#[derive(Debug, Default)]
pub(super) struct Buffered {
    /// Its content, from its beginning to its last byte that is not in a hole.
    pub(super) content: Vec<u8>,
    /// The part that is in no record of the intent log.
    pub(super) unrecorded: Option<Range<usize>>,
    /// Space reserved for it: at least its future charge. Bytes.
    pub(super) promised: u64,
    /// Parts of it, if the remainder is not in memory; `content` is empty then.
    pub(super) fragments: Fragments,
    /// The length of the stored content that the parts belong to, bytes.
    pub(super) base: usize,
}

impl Buffered {
    /// Whether only parts of it are in memory.
    pub(super) fn is_sparse(&self) -> bool {
        self.fragments.len() > 0
    }

    /// Memory that it uses, bytes.
    pub(super) fn held(&self) -> u64 {
        (self.content.len() + self.fragments.bytes()) as u64
    }

    /// Notes a changed part.
    pub(super) fn changed(&mut self, part: Range<usize>) {
        self.unrecorded = Some(match self.unrecorded.take() {
            Some(before) => before.start.min(part.start)..before.end.max(part.end),
            None => part,
        });
    }

    /// Makes it whole if it has one part, which covers all of it.
    pub(super) fn take_whole(&mut self) -> bool {
        let parts = &mut self.fragments.0;
        let Some(only) = parts.first_entry().filter(|part| part.get().bytes.len() == self.base) else { return false };
        let Fragment { bytes, unrecorded } = only.remove();
        self.unrecorded = unrecorded.then_some(0..bytes.len());
        self.content = bytes;
        true
    }

    /// Makes it whole by laying its parts over the stored content.
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
    /// It is in no record of the intent log.
    unrecorded: bool,
}

/// Parts of a record in memory, by their offsets; no two are adjacent.
#[derive(Debug, Default)]
pub(super) struct Fragments(BTreeMap<usize, Fragment>);

impl Fragments {
    /// Number of parts.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Memory that they use, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.values().map(|fragment| fragment.bytes.len()).sum()
    }

    /// Whether one of them contains this range.
    pub(super) fn cover(&self, part: &Range<usize>) -> bool {
        let before = self.0.range(..=part.start).next_back();
        before.is_some_and(|(start, fragment)| start + fragment.bytes.len() >= part.end)
    }

    /// Puts a part; parts that it touches are merged with it.
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
            // The usual cases: the same range again, or an append.
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

    /// The parts with their offsets.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.0.iter().map(|(start, fragment)| (*start, fragment.bytes.as_slice()))
    }

    /// The parts that are in no record of the log, with their offsets.
    pub(super) fn unrecorded(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.0
            .iter()
            .filter(|(_, fragment)| fragment.unrecorded)
            .map(|(start, fragment)| (*start, fragment.bytes.as_slice()))
    }

    /// Removes and returns all parts after the first `most`.
    pub(super) fn split(&mut self, most: usize) -> Option<Self> {
        let next = self.0.keys().nth(most).copied()?;
        Some(Self(self.0.split_off(&next)))
    }

    /// Notes that a record of the log has them.
    pub(super) fn recorded(&mut self) {
        self.0.values_mut().for_each(|fragment| fragment.unrecorded = false);
    }
}

/// Copies a part to its offset in `whole`, which begins at `origin` and grows as needed.
fn overlay(whole: &mut Vec<u8>, origin: usize, from: usize, part: &[u8]) {
    let at = from.saturating_sub(origin);
    if whole.len() < at + part.len() {
        whole.resize(at + part.len(), 0);
    }
    if let Some(place) = whole.get_mut(at..at + part.len()) {
        place.copy_from_slice(part);
    }
}

/// Copies the overlap of `part` (at `from` of a record) and `target` (at `at` of it).
pub(super) fn overlap(target: &mut [u8], at: usize, from: usize, part: &[u8]) {
    let (start, end) = (at.max(from), (at + target.len()).min(from + part.len()));
    if start < end
        && let (Some(to), Some(source)) = (target.get_mut(start - at..end - at), part.get(start - from..end - from))
    {
        to.copy_from_slice(source);
    }
}
