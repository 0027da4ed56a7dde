//! Compact map of moved frames: frame numbers and their current locations.
//!
//! Callers: the segment table, which has one of these maps for each segment. A pool that is cleaned for years has
//! moved most of its frames, and every one of them is found through this: neighbours move together, so numbers are
//! stored as differences, about five bytes per frame.
//!
//! Invariants: chunks are sorted and do not overlap; each has 1 to [`CHUNK`] entries; a chunk's bytes determine its
//! entries.

use std::fmt;

/// Maximum number of entries in a chunk. A lookup reads half of them on average.
const CHUNK: usize = 128;
/// Two neighbouring chunks with at most this many entries together are merged.
const LITTLE: usize = CHUNK / 2;

/// Location of a frame: the segment, and the offset in it in units of 16 bytes.
pub type At = (u32, u32);

/// A frame's number and its location.
type Entry = (u32, At);

/// Moved frames by number. Maps are equal if they have the same entries, regardless of their chunks.
#[derive(Clone, Default)]
pub struct Moved {
    chunks: Vec<Chunk>,
    count: usize,
}

#[derive(Clone)]
struct Chunk {
    first: u32,
    last: Entry,
    count: usize,
    /// The first entry's location, then differences.
    bytes: Vec<u8>,
}

/// Zigzag encoding: maps small signed differences to small numbers.
fn fold(difference: i32) -> u32 {
    ((difference << 1) ^ (difference >> 31)) as u32
}

fn unfold(folded: u32) -> i32 {
    (folded >> 1) as i32 ^ -((folded & 1) as i32)
}

fn put(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Reads a number; returns zero bits after the end of the input.
fn take(bytes: &mut &[u8]) -> u32 {
    let (mut number, mut shift) = (0, 0);
    while let Some((byte, rest)) = bytes.split_first() {
        *bytes = rest;
        number |= u32::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 || shift > 31 {
            break;
        }
    }
    number
}

impl Chunk {
    fn of(entry: Entry) -> Self {
        let mut chunk = Self { first: entry.0, last: entry, count: 1, bytes: Vec::new() };
        put(&mut chunk.bytes, entry.1.0);
        put(&mut chunk.bytes, entry.1.1);
        chunk
    }

    /// A chunk of these sorted entries; `None` if there are none.
    fn of_all(entries: &[Entry]) -> Option<Self> {
        let (first, rest) = entries.split_first()?;
        let mut chunk = Self::of(*first);
        rest.iter().for_each(|entry| chunk.push(*entry));
        chunk.bytes.shrink_to_fit();
        Some(chunk)
    }

    /// Appends an entry after all others.
    fn push(&mut self, entry: Entry) {
        let (last, (segment, offset)) = (self.last, entry.1);
        put(&mut self.bytes, entry.0.wrapping_sub(last.0));
        put(&mut self.bytes, fold(segment.wrapping_sub(last.1.0) as i32));
        put(&mut self.bytes, fold(offset.wrapping_sub(last.1.1) as i32));
        self.last = entry;
        self.count += 1;
    }

    fn entries(&self) -> Entries<'_> {
        Entries { bytes: &self.bytes, next: self.first, left: self.count, before: None }
    }
}

struct Entries<'c> {
    bytes: &'c [u8],
    next: u32,
    left: usize,
    before: Option<Entry>,
}

impl Iterator for Entries<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        self.left = self.left.checked_sub(1)?;
        let entry = match self.before {
            None => (self.next, (take(&mut self.bytes), take(&mut self.bytes))),
            Some((index, (segment, offset))) => {
                let index = index.wrapping_add(take(&mut self.bytes));
                let segment = segment.wrapping_add(unfold(take(&mut self.bytes)) as u32);
                (index, (segment, offset.wrapping_add(unfold(take(&mut self.bytes)) as u32)))
            }
        };
        self.before = Some(entry);
        Some(entry)
    }
}

impl Moved {
    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Location of a frame, if it has moved.
    #[must_use]
    pub fn get(&self, index: u32) -> Option<At> {
        let chunk = self.chunks.get(self.place(index)?)?;
        if index > chunk.last.0 {
            return None;
        }
        chunk.entries().find(|(at, _)| *at >= index).filter(|(at, _)| *at == index).map(|(_, to)| to)
    }

    /// Sets the location of a frame.
    pub fn insert(&mut self, index: u32, to: At) {
        let Some(place) = self.place(index) else {
            // Before all others, or the first entry.
            self.chunks.insert(0, Chunk::of((index, to)));
            self.count += 1;
            return self.join(0);
        };
        let Some(chunk) = self.chunks.get_mut(place) else { return };
        if index > chunk.last.0 {
            self.count += 1;
            if chunk.count < CHUNK {
                return chunk.push((index, to));
            }
            chunk.bytes.shrink_to_fit();
            self.chunks.insert(place + 1, Chunk::of((index, to)));
            return;
        }
        let mut entries: Vec<Entry> = chunk.entries().collect();
        match entries.binary_search_by_key(&index, |(at, _)| *at) {
            Ok(at) => entries.get_mut(at).into_iter().for_each(|entry| entry.1 = to),
            Err(at) => {
                entries.insert(at, (index, to));
                self.count += 1;
            }
        }
        let (front, back) = entries.split_at(if entries.len() > CHUNK { CHUNK / 2 } else { entries.len() });
        self.chunks.splice(place..=place, Chunk::of_all(front).into_iter().chain(Chunk::of_all(back)));
    }

    /// Removes a frame.
    pub fn remove(&mut self, index: u32) {
        let Some(place) = self.place(index) else { return };
        let Some(chunk) = self.chunks.get(place) else { return };
        let left: Vec<Entry> = chunk.entries().filter(|(at, _)| *at != index).collect();
        self.count -= chunk.count - left.len();
        self.chunks.splice(place..=place, Chunk::of_all(&left));
        self.join(place.saturating_sub(1));
    }

    /// All entries, by frame number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, At)> + '_ {
        self.chunks.iter().flat_map(Chunk::entries)
    }

    /// Index of the chunk that may hold a number.
    fn place(&self, index: u32) -> Option<usize> {
        self.chunks.partition_point(|chunk| chunk.first <= index).checked_sub(1)
    }

    /// Merges a chunk with its successor, or that one with the next, where few entries are left.
    fn join(&mut self, place: usize) {
        for place in [place + 1, place] {
            let Some([left, right]) = self.chunks.get(place..).and_then(|chunks| chunks.first_chunk()) else {
                continue;
            };
            if left.count + right.count <= LITTLE {
                let entries: Vec<Entry> = left.entries().chain(right.entries()).collect();
                self.chunks.splice(place..=place + 1, Chunk::of_all(&entries));
            }
        }
    }

    /// Memory use, bytes.
    #[cfg(test)]
    fn memory(&self) -> usize {
        self.chunks.capacity() * size_of::<Chunk>()
            + self.chunks.iter().map(|chunk| chunk.bytes.capacity()).sum::<usize>()
    }
}

impl PartialEq for Moved {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.iter().eq(other.iter())
    }
}

impl Eq for Moved {}

impl fmt::Debug for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn assert_is(moved: &Moved, map: &BTreeMap<u32, At>) {
        assert_eq!((moved.len(), moved.is_empty()), (map.len(), map.is_empty()));
        assert!(moved.iter().eq(map.iter().map(|(index, at)| (*index, *at))));
        assert!(
            moved
                .chunks
                .iter()
                .all(|chunk| (1..=CHUNK).contains(&chunk.count) && chunk.entries().count() == chunk.count)
        );
        assert!(moved.chunks.iter().all(|chunk| chunk.entries().last() == Some(chunk.last)));
    }

    #[test]
    fn numbers_of_all_sizes_are_differences() {
        for number in [0, 1, -1, 63, -64, 64, i32::MAX, i32::MIN] {
            assert_eq!(unfold(fold(number)), number);
        }
        let (mut moved, mut map) = (Moved::default(), BTreeMap::new());
        for (index, at) in
            [(u32::MAX, (0, u32::MAX)), (0, (u32::MAX, 0)), (7, (1, 1 << 31)), (u32::MAX - 1, (1 << 31, 5))]
        {
            moved.insert(index, at);
            map.insert(index, at);
            assert_is(&moved, &map);
            assert_eq!(moved.get(index), Some(at));
        }
        assert_eq!((moved.get(1), moved.get(8)), (None, None));
    }

    #[test]
    fn frames_that_move_together_take_little() {
        let mut moved = Moved::default();
        let frames = 16_000;
        for index in 0..frames {
            moved.insert(index, (900 + index / 8000, index % 8000 * 400));
        }
        assert!(moved.memory() < frames as usize * 6, "{} bytes", moved.memory());
        (0..frames).filter(|index| index % 50 != 0).for_each(|index| moved.remove(index));
        assert!(moved.memory() < frames as usize, "{} bytes of {} frames", moved.memory(), moved.len());
        assert!((0..frames).all(|index| moved.get(index).is_some() == (index % 50 == 0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn it_is_as_a_map(steps in proptest::collection::vec((0u8..8, 0u32..700, any::<u16>(), any::<u32>()), 0..1500), scattered: bool) {
            let (mut moved, mut map) = (Moved::default(), BTreeMap::new());
            for (next, (what, index, segment, offset)) in (1..).zip(steps) {
                let index = match what {
                    // As the cleaner comes, in the order of numbers.
                    0..=3 if !scattered => next,
                    _ => index,
                };
                let at = (u32::from(segment), offset);
                match what {
                    0..=5 => {
                        moved.insert(index, at);
                        map.insert(index, at);
                    }
                    _ => {
                        moved.remove(index);
                        map.remove(&index);
                    }
                }
                prop_assert_eq!(moved.get(index), map.get(&index).copied());
            }
            (0..1600).for_each(|index| assert_eq!(moved.get(index), map.get(&index).copied()));
            let mut again = Moved::default();
            map.iter().for_each(|(index, at)| again.insert(*index, *at));
            prop_assert_eq!(&moved, &again);
            assert_is(&moved, &map);
        }
    }
}
