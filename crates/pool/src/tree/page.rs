//! A leaf: rows in the order of their keys. In memory a slotted page (one buffer of rows, and their
//! offsets in the order of the keys); on a device the rows follow each other in order, so that a
//! leaf is read without copying, and its offsets are found in the same pass that checks them.
//!
//! Callers: `node`, `change`, `cursor`. Byte table: `docs/pool-format.md`, "Trees".
//!
//! Invariants:
//! - Keys are strictly ascending. Every slot is the offset of a whole row in the buffer: checked
//!   when decoded, preserved by every change.
//! - `used` is the length of the encoded page.
//! - Offsets fit in 16 bits: no buffer is longer than [`MAX_CONTENT`].

use std::cmp::Ordering;
use std::sync::Arc;

use super::Row;
use crate::codec::Reader;
use crate::error::{Damage, PoolError};

/// Length of the header of a node, bytes.
pub(crate) const HEADER: usize = 8;
/// Length of the two lengths before each row, bytes.
pub(crate) const ROW_HEADER: usize = 4;
/// Longest node with any settings, bytes: offsets in it have 16 bits.
pub(crate) const MAX_CONTENT: usize = 1 << 16;
/// Number of consecutive rows that make a run: a leaf in which one is growing is split at its end,
/// not in the middle.
const RUN: u16 = 4;

const BAD_ROW: PoolError = PoolError::Format(Damage::Structure("a row of a leaf does not end inside it"));
const BAD_ORDER: PoolError = PoolError::Format(Damage::Structure("the keys of a node do not rise"));
const TOO_LONG: PoolError = PoolError::Format(Damage::Structure("a node is too long"));
const TRAILING: PoolError = PoolError::Format(Damage::Structure("bytes after the last entry of a node"));

/// Position of the last rows put, to recognise ascending keys in the middle of a tree.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    next: u16,
    length: u16,
}

/// A row's offset in the buffer, and the head of its key ([`head`]): a search compares heads, which
/// are contiguous, and then one or two rows.
#[derive(Clone, Copy, Debug)]
struct Slot {
    head: u32,
    place: u16,
}

/// A leaf.
#[derive(Debug)]
pub(crate) struct Leaf {
    /// A frame's content as it was read: never changed. If there is one, `own` is not used.
    shared: Option<Arc<[u8]>>,
    /// Rows in the order of insertion, with gaps where rows were removed.
    own: Vec<u8>,
    slots: Vec<Slot>,
    /// Length of a common prefix of all keys, at least; heads begin after it.
    skip: usize,
    used: usize,
    run: Run,
}

/// Result of a put that overflowed the leaf: the rows from `right` on are in a new leaf, after this
/// key.
pub(crate) struct LeafSplit {
    pub(crate) separator: Vec<u8>,
    pub(crate) right: Leaf,
}

impl Default for Leaf {
    fn default() -> Self {
        Self { shared: None, own: Vec::new(), slots: Vec::new(), skip: 0, used: HEADER, run: Run::default() }
    }
}

fn row_at(bytes: &[u8], place: u16) -> Option<Row<'_>> {
    let (head, rest) = bytes.get(usize::from(place)..)?.split_first_chunk::<ROW_HEADER>()?;
    let [k0, k1, v0, v1] = *head;
    let (key, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes([k0, k1])))?;
    Some((key, rest.get(..usize::from(u16::from_le_bytes([v0, v1])))?))
}

fn key_at(bytes: &[u8], place: u16) -> &[u8] {
    row_at(bytes, place).map_or(&[], |(key, _)| key)
}

/// Four bytes of a key after the skipped ones, as a number in the order of the keys; missing ones
/// are zero.
pub(crate) fn head(key: &[u8], skip: usize) -> u32 {
    let rest = key.get(skip..).unwrap_or(&[]);
    match rest.first_chunk::<4>() {
        Some(four) => u32::from_be_bytes(*four),
        None => rest.iter().zip([24, 16, 8]).fold(0, |head, (byte, shift)| head | u32::from(*byte) << shift),
    }
}

/// Number of leading items that match, where all matching ones come first: mostly none or one, but
/// if keys of several kinds meet it may be nearly all.
pub(crate) fn equal_in_front<I>(items: &[I], sought: impl Fn(&I) -> bool) -> usize {
    const FEW: usize = 4;
    match items.iter().take(FEW).position(|item| !sought(item)) {
        Some(few) => few,
        None => items.partition_point(sought),
    }
}

/// Length of the common prefix of two keys.
pub(crate) fn shared_prefix(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Space of a row in a page, bytes.
pub(crate) fn row_length(key: &[u8], value: &[u8]) -> usize {
    ROW_HEADER + key.len() + value.len()
}

/// Shortest key that is greater than `left` and not greater than `right`; `left` is less than
/// `right`.
pub(crate) fn separator(left: &[u8], right: &[u8]) -> Vec<u8> {
    right.iter().take(shared_prefix(left, right) + 1).copied().collect()
}

impl Leaf {
    /// Decodes the rows after the header of a node's content; `count` is from that header.
    pub(crate) fn decode(content: Arc<[u8]>, count: u32) -> Result<Self, PoolError> {
        if content.len() > MAX_CONTENT {
            return Err(TOO_LONG);
        }
        // A count that exceeds the content ends with the content: no memory is allocated for it in
        // advance.
        let mut slots = Vec::with_capacity((count as usize).min(content.len() / ROW_HEADER));
        let mut reader = Reader::new(&content);
        reader.take(HEADER)?;
        let mut last: Option<&[u8]> = None;
        for _ in 0..count {
            let place = content.len() - reader.rest().len();
            let (key, value) = (reader.u16()?, reader.u16()?);
            let key = reader.take(usize::from(key)).map_err(|_| BAD_ROW)?;
            reader.take(usize::from(value)).map_err(|_| BAD_ROW)?;
            if last.is_some_and(|last| last >= key) {
                return Err(BAD_ORDER);
            }
            last = Some(key);
            slots.push(Slot { head: 0, place: u16::try_from(place).map_err(|_| TOO_LONG)? });
        }
        if !reader.is_empty() {
            return Err(TRAILING);
        }
        let used = content.len();
        let mut leaf = Self { shared: Some(content), slots, used, ..Self::default() };
        leaf.index();
        Ok(leaf)
    }

    /// Appends the encoded rows in order, as they follow the header.
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        let bytes = self.bytes();
        for slot in &self.slots {
            if let Some(row) = row_at(bytes, slot.place) {
                append(to, row);
            }
        }
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Length of the encoded page, bytes.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Memory of the leaf, bytes.
    pub(crate) fn cost(&self) -> u64 {
        let buffer = self.shared.as_ref().map_or(self.own.capacity(), |content| content.len());
        (buffer + size_of::<Slot>() * self.slots.capacity() + size_of::<Self>()) as u64
    }

    fn bytes(&self) -> &[u8] {
        self.shared.as_deref().unwrap_or(&self.own)
    }

    /// Returns the row at a position.
    pub(crate) fn row(&self, at: usize) -> Option<Row<'_>> {
        row_at(self.bytes(), self.slots.get(at)?.place)
    }

    /// Returns the key at a position; empty if there is none.
    pub(crate) fn key(&self, at: usize) -> &[u8] {
        self.row(at).map_or(&[], |(key, _)| key)
    }

    /// Recomputes the heads.
    fn index(&mut self) {
        let skip = match self.len() {
            0 => 0,
            length => shared_prefix(self.key(0), self.key(length - 1)),
        };
        self.skip_so_much(skip);
    }

    fn skip_so_much(&mut self, skip: usize) {
        let mut slots = std::mem::take(&mut self.slots);
        for slot in &mut slots {
            slot.head = head(key_at(self.bytes(), slot.place), skip);
        }
        (self.slots, self.skip) = (slots, skip);
    }

    /// Returns the slot of a key to be inserted at `at`, and adjusts the heads: a key between
    /// others has their prefix, one at an end may not.
    fn slot(&mut self, at: usize, key: &[u8], place: usize) -> Slot {
        if self.slots.is_empty() {
            self.skip = key.len();
        } else if at == 0 || at >= self.len() {
            let skip = shared_prefix(self.key(0), key);
            if skip < self.skip {
                self.skip_so_much(skip);
            }
        }
        // A buffer is at most 64 KiB and the rows end inside it: the offset fits.
        Slot { head: head(key, self.skip), place: place as u16 }
    }

    /// Position of a key, or (`Err`) the position at which it would be inserted.
    pub(crate) fn find(&self, key: &[u8]) -> Result<usize, usize> {
        let beginning = self.key(0).get(..self.skip).unwrap_or(&[]);
        match key.get(..self.skip).unwrap_or(key).cmp(beginning) {
            Ordering::Less => Err(0),
            Ordering::Greater => Err(self.len()),
            Ordering::Equal => self.find_by_head(key),
        }
    }

    /// As [`Self::find`] for a key with the common prefix; for any other key `Err` with a
    /// meaningless position.
    fn find_by_head(&self, key: &[u8]) -> Result<usize, usize> {
        let wanted = head(key, self.skip);
        let from = self.slots.partition_point(|slot| slot.head < wanted);
        // Keys with the same head: mostly none or one.
        let bytes = self.bytes();
        let slots = self.slots.get(from..).unwrap_or(&[]);
        let same = equal_in_front(slots, |slot| slot.head == wanted);
        let slots = slots.get(..same).unwrap_or(&[]);
        match slots.binary_search_by(|slot| key_at(bytes, slot.place).cmp(key)) {
            Ok(at) => Ok(from + at),
            Err(at) => Err(from + at),
        }
    }

    /// As [`Self::find`], trying the end first: most rows are put there.
    fn find_for_put(&self, key: &[u8]) -> Result<usize, usize> {
        match self.slots.last().map(|slot| key_at(self.bytes(), slot.place).cmp(key)) {
            Some(Ordering::Less) => Err(self.slots.len()),
            Some(Ordering::Equal) => Ok(self.slots.len() - 1),
            Some(Ordering::Greater) => self.find(key),
            None => Err(0),
        }
    }

    /// Returns the value of a key.
    pub(crate) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let at = self.find_by_head(key).ok()?;
        self.row(at).map(|(_, value)| value)
    }

    /// Returns a copy for changes.
    pub(crate) fn thaw(&self) -> Self {
        let mut copy = Self { run: self.run, skip: self.skip, ..Self::default() };
        // Rounded, so that among thousands of leaves a new one fits into the memory of a dropped
        // one, which the allocator finds at once.
        copy.slots.reserve_exact((self.slots.len() + 8).next_multiple_of(32));
        copy.own.reserve_exact((self.used + self.used / 4).next_multiple_of(1 << 10));
        copy_rows(self.bytes(), &self.slots, &mut copy.own, &mut copy.slots);
        copy.used = self.used;
        copy
    }

    /// Returns this leaf in the form for the cache: rows in order, without gaps. `content` is the
    /// encoded node.
    pub(crate) fn settled(&self, content: Arc<[u8]>) -> Self {
        let mut slots = Vec::with_capacity(self.slots.len());
        let mut place = HEADER;
        for slot in &self.slots {
            slots.push(Slot { place: place as u16, ..*slot });
            if let Some((key, value)) = row_at(self.bytes(), slot.place) {
                place += row_length(key, value);
            }
        }
        Self { shared: Some(content), own: Vec::new(), slots, skip: self.skip, used: self.used, run: self.run }
    }

    /// Makes the rows an own copy with so much room after them.
    fn rows_with_room(&mut self, room: usize, page: usize) -> &mut Vec<u8> {
        if self.shared.is_some() || self.own.len() + room > page {
            let copy = self.thaw();
            self.shared = None;
            self.own = copy.own;
            self.slots = copy.slots;
        }
        if self.own.capacity() - self.own.len() < room {
            // Doubles, but not far beyond a page: a tree has thousands of leaves in memory.
            let wanted = (self.own.capacity() * 2).clamp(256, page.max(256)).max(self.own.len() + room);
            self.own.reserve_exact(wanted - self.own.len());
        }
        &mut self.own
    }

    /// Puts a row; a leaf that would become longer than `page` is split.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8], page: usize) -> Option<LeafSplit> {
        match self.find_for_put(key) {
            Ok(at) => {
                if self.overwrite(at, value) {
                    return None;
                }
                self.remove(at);
                self.insert(at, key, value, page)
            }
            Err(at) => self.insert(at, key, value, page),
        }
    }

    /// Overwrites a value with one of the same length.
    fn overwrite(&mut self, at: usize, value: &[u8]) -> bool {
        let Some(place) = self.slots.get(at).map(|slot| slot.place) else { return false };
        let Some((key, old)) = row_at(&self.own, place) else { return false };
        if self.shared.is_some() || old.len() != value.len() {
            return false;
        }
        let start = usize::from(place) + ROW_HEADER + key.len();
        let Some(target) = self.own.get_mut(start..start + value.len()) else { return false };
        target.copy_from_slice(value);
        true
    }

    fn insert(&mut self, at: usize, key: &[u8], value: &[u8], page: usize) -> Option<LeafSplit> {
        let length = row_length(key, value);
        if self.used + length > page {
            return Some(self.split(at, key, value, page));
        }
        self.note(at);
        let rows = self.rows_with_room(length, page);
        let place = rows.len();
        append(rows, (key, value));
        let slot = self.slot(at, key, place);
        self.slots.insert(at.min(self.slots.len()), slot);
        self.used += length;
        None
    }

    fn note(&mut self, at: usize) {
        let follows = usize::from(self.run.next) == at;
        self.run = Run { next: (at + 1) as u16, length: if follows { self.run.length.saturating_add(1) } else { 0 } };
    }

    fn split(&mut self, at: usize, key: &[u8], value: &[u8], page: usize) -> LeafSplit {
        let run = usize::from(self.run.next) == at && self.run.length >= RUN;
        let mut right = Self::default();
        if at >= self.len() {
            // Ascending keys leave full leaves behind.
            let separator = separator(self.key(self.len().saturating_sub(1)), key);
            right.run = Run { next: 0, length: self.run.length };
            right.push(key, value);
            right.run = Run { next: 1, length: self.run.length };
            return LeafSplit { separator, right };
        }
        let cut = self.cut(at, row_length(key, value), run, page);
        let mut left = Self::default();
        let old = std::mem::take(self);
        for position in 0..=old.len() {
            let row = match position.cmp(&at) {
                Ordering::Less => old.row(position),
                Ordering::Equal => Some((key, value)),
                Ordering::Greater => old.row(position - 1),
            };
            let side = if position < cut { &mut left } else { &mut right };
            if let Some((key, value)) = row {
                side.push(key, value);
            }
        }
        let separator = separator(left.key(left.len().saturating_sub(1)), right.key(0));
        left.index();
        right.index();
        let next = if at < cut { at + 1 } else { at - cut + 1 };
        let side = if at < cut { &mut left } else { &mut right };
        side.run = Run { next: next as u16, length: if run { old.run.length } else { 0 } };
        *self = left;
        LeafSplit { separator, right }
    }

    /// Number of rows, including the new one at `at`, that stay in the left leaf.
    fn cut(&self, at: usize, length: usize, run: bool, page: usize) -> usize {
        let total = self.used + length - HEADER;
        let before: usize =
            (0..at).filter_map(|position| self.row(position)).map(|(key, value)| row_length(key, value)).sum();
        if run {
            // The run continues at the end of a leaf of its own: later rows move away.
            if HEADER + before + length <= page {
                return at + 1;
            }
            if at > 0 && HEADER + total - before <= page {
                return at;
            }
        }
        let mut left = 0;
        for position in 0..self.len() {
            if left >= total / 2 {
                return position;
            }
            left += match position.cmp(&at) {
                Ordering::Equal => length,
                Ordering::Less => self.row(position).map_or(0, |(key, value)| row_length(key, value)),
                Ordering::Greater => self.row(position - 1).map_or(0, |(key, value)| row_length(key, value)),
            };
        }
        self.len()
    }

    /// Appends a row whose key is greater than all others.
    pub(crate) fn push(&mut self, key: &[u8], value: &[u8]) {
        let length = row_length(key, value);
        let rows = self.rows_with_room(length, MAX_CONTENT);
        let place = rows.len();
        append(rows, (key, value));
        let slot = self.slot(self.len(), key, place);
        self.slots.push(slot);
        self.used += length;
    }

    /// Appends all rows of the next leaf.
    pub(crate) fn append(&mut self, next: &Self) {
        for position in 0..next.len() {
            if let Some((key, value)) = next.row(position) {
                self.push(key, value);
            }
        }
    }

    /// Removes the row at a position.
    pub(crate) fn remove(&mut self, at: usize) {
        self.remove_range(at, at + 1);
    }

    /// Removes the rows from `from` up to before `to`.
    pub(crate) fn remove_range(&mut self, from: usize, to: usize) {
        let to = to.min(self.len());
        if from >= to {
            return;
        }
        let gone: usize =
            (from..to).filter_map(|position| self.row(position)).map(|(key, value)| row_length(key, value)).sum();
        self.slots.drain(from..to);
        self.used -= gone;
        self.run = Run::default();
    }
}

fn append(to: &mut Vec<u8>, (key, value): Row<'_>) {
    // Rows are checked against the limits before: both lengths fit.
    let (k, v) = ((key.len() as u16).to_le_bytes(), (value.len() as u16).to_le_bytes());
    let [k0, k1] = k;
    let [v0, v1] = v;
    to.extend_from_slice(&[k0, k1, v0, v1]);
    to.extend_from_slice(key);
    to.extend_from_slice(value);
}

fn copy_rows(bytes: &[u8], slots: &[Slot], rows: &mut Vec<u8>, copies: &mut Vec<Slot>) {
    for slot in slots {
        let start = usize::from(slot.place);
        let Some((key, value)) = row_at(bytes, slot.place) else { continue };
        copies.push(Slot { place: rows.len() as u16, ..*slot });
        if let Some(row) = bytes.get(start..start + row_length(key, value)) {
            rows.extend_from_slice(row);
        }
    }
}
