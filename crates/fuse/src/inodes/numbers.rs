//! The inode table of layers whose files are found again by their numbers: node ids are inode
//! numbers, and only files that are open have a record.
//!
//! Called by `inodes.rs` alone, which asks this instead of its own table. What else is kept is two
//! bits for each file that the kernel knows, so that a listing does not tell it again what it has,
//! how often it was looked up where that was more than once, and how the last files were used.
//! Invariants:
//! * a file is known until all its look-ups are taken back: FORGET may be overtaken by later
//!   requests;
//! * a record is there exactly while the state of open files in it is not idle, or somebody is at
//!   it;
//! * the layer is never called under a lock.

use super::{InodeRecord, ROOT, Removed, Slot};
use nacre_vfs::{Caller, FileId, Kind, Layer, Node, Opened};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

const SHARDS: usize = 16;
/// Files of one word of the set.
const WORD: u64 = 64;
/// Words that are allocated and given back as a whole.
const WORDS: usize = 64;
/// Marks the root's own id while it is not [`ROOT`].
const PROMOTED: u64 = 1 << 63;

/// See the file's head.
pub(crate) struct Numbers {
    layer: Arc<dyn Layer>,
    root: FileId,
    promoted: AtomicBool,
    records: [Mutex<HashMap<u64, Slot>>; SHARDS],
    known: Set,
}

impl Numbers {
    /// Of a layer that has numbers, with this root; `None` for others.
    pub fn new(layer: &Arc<dyn Layer>, root: FileId) -> Option<Numbers> {
        layer.capabilities().numbered?;
        Some(Numbers {
            layer: Arc::clone(layer),
            root,
            promoted: AtomicBool::new(false),
            records: Default::default(),
            known: Set::default(),
        })
    }

    pub fn promote_root(&self, promoted: bool) {
        self.promoted.store(promoted, Ordering::Relaxed);
    }

    /// The inode number of a node id.
    pub fn inner(&self, nodeid: u64) -> u64 {
        if nodeid == ROOT || nodeid == self.root.ino | PROMOTED { self.root.ino } else { nodeid }
    }

    /// The node id of an inode number.
    pub fn outer(&self, number: u64) -> u64 {
        match (number == self.root.ino, self.promoted.load(Ordering::Relaxed)) {
            (true, true) => number | PROMOTED,
            (true, false) => ROOT,
            (false, _) => number,
        }
    }

    pub fn is_root(&self, nodeid: u64) -> bool {
        self.inner(nodeid) == self.root.ino
    }

    /// How many files the kernel knows.
    pub fn len(&self) -> usize {
        self.known.count.load(Ordering::Relaxed)
    }

    /// The kernel is told of a file; answers its node id.
    pub fn register(&self, id: &FileId) -> u64 {
        self.known.insert(id.ino);
        self.outer(id.ino)
    }

    pub fn node(&self, nodeid: u64) -> Option<Node> {
        self.layer.capabilities().numbered?.node(self.inner(nodeid)).ok()
    }

    pub fn id(&self, nodeid: u64) -> FileId {
        FileId { ino: self.inner(nodeid), ..self.root }
    }

    pub fn any_file(&self, nodeid: u64) -> Option<Opened> {
        let number = self.inner(nodeid);
        self.shard(number).lock().get(&number).and_then(Slot::any_file)
    }

    /// Node of a directory with its own and its parent's inode number.
    pub fn directory(&self, nodeid: u64) -> Option<(Node, u64, u64)> {
        let node = self.node(nodeid)?;
        let parent = self.layer.capabilities().numbered?.parent(&node);
        Some((node, self.inner(nodeid), parent))
    }

    pub fn is_a(&self, nodeid: u64, kind: Kind) -> bool {
        let Some(node) = self.node(nodeid) else { return false };
        self.layer.getattr(&Caller::ROOT, &node, None).is_ok_and(|attr| attr.kind == kind)
    }

    /// Looks at or changes a record where there is one: most files have none, and looking them up
    /// costs more than the look.
    pub fn with_any<T>(&self, nodeid: u64, f: impl FnOnce(&mut InodeRecord<'_>) -> T) -> Option<T> {
        let number = self.inner(nodeid);
        let mut records = self.shard(number).lock();
        let answer = f(&mut InodeRecord { slot: records.get_mut(&number)? });
        let idle = self.settle(number, &mut records);
        drop(records);
        // A node goes outside of the lock.
        drop(idle);
        Some(answer)
    }

    /// Looks at or changes a record; made where there is none.
    pub fn with<T>(&self, nodeid: u64, f: impl FnOnce(&mut InodeRecord<'_>) -> T) -> Option<T> {
        let number = self.inner(nodeid);
        let mut f = Some(f);
        let mut run = |slot: &mut Slot| f.take().map(|f| f(&mut InodeRecord { slot }));
        {
            let mut records = self.shard(number).lock();
            if let Some(slot) = records.get_mut(&number) {
                let answer = run(slot);
                let idle = self.settle(number, &mut records);
                drop(records);
                // A node goes outside of the lock.
                drop(idle);
                return answer;
            }
        }
        let mut fresh = Some(Slot::open(self.node(nodeid)?, self.id(nodeid)));
        let mut records = self.shard(number).lock();
        let answer = match records.entry(number) {
            Entry::Occupied(mut there) => run(there.get_mut()),
            Entry::Vacant(place) => fresh.take().and_then(|fresh| run(place.insert(fresh))),
        };
        let idle = self.settle(number, &mut records);
        drop(records);
        drop((idle, fresh));
        answer
    }

    /// Takes a record away that nobody needs.
    fn settle(&self, number: u64, records: &mut HashMap<u64, Slot>) -> Option<Slot> {
        let slot = records.get_mut(&number)?;
        if !slot.is_idle() {
            return None;
        }
        records.remove(&number)
    }

    /// The node id of a file that the kernel may know.
    pub fn find(&self, id: &FileId) -> Option<u64> {
        (FileId { ino: id.ino, ..self.root } == *id).then(|| self.outer(id.ino))
    }

    /// Whether the kernel knows a file.
    pub fn is_known(&self, nodeid: u64) -> bool {
        let number = self.inner(nodeid);
        number == self.root.ino || self.known.has(number)
    }

    /// The kernel was given attributes of a file to keep, or keeps them no more.
    pub fn keeps(&self, nodeid: u64, kept: bool) {
        self.known.keeps(self.inner(nodeid), kept);
    }

    /// Whether it keeps them.
    pub fn is_kept(&self, number: u64) -> bool {
        self.known.is_kept(number)
    }

    /// The kernel takes look-ups back. When it does not know a file any more, what is left of its
    /// record goes, such as times of direct writes that it was never told of. It may have come to
    /// know the file anew meanwhile: what is open stays.
    pub fn forget(&self, nodeid: u64, lookups: u64) -> Option<Removed> {
        let number = self.inner(nodeid);
        if number == self.root.ino {
            return None;
        }
        let left = {
            let mut records = self.shard(number).lock();
            if !self.known.remove(number, lookups) {
                return None;
            }
            if records.get(&number).is_none_or(Slot::is_closed) {
                records.remove(&number)
            } else {
                // Another one with its number is open: the kernel has forgotten the one that was
                // replaced.
                self.known.insert(number);
                None
            }
        };
        if let Some(numbered) = self.layer.capabilities().numbered {
            numbered.forgotten(number);
        }
        left.and_then(Slot::into_removed)
    }

    /// Calls `f` with the node ids of all files that the kernel knows.
    pub fn for_each(&self, mut f: impl FnMut(u64)) {
        f(self.outer(self.root.ino));
        for shard in &self.known.shards {
            let numbers: Vec<u64> = shard.lock().iter().flat_map(|(at, chunk)| chunk.numbers(*at)).collect();
            numbers.into_iter().filter(|number| *number != self.root.ino).for_each(|number| f(self.outer(number)));
        }
    }

    /// Whether the kernel knows a file with a number from `from` to `to`.
    pub fn knows_any(&self, from: u64, to: u64) -> bool {
        self.known.any(from, to)
    }

    /// The mount is gone.
    pub fn clear(&self) {
        for shard in &self.records {
            let gone = std::mem::take(&mut *shard.lock());
            drop(gone);
        }
        for shard in &self.known.shards {
            shard.lock().clear();
        }
        self.known.count.store(0, Ordering::Relaxed);
    }

    fn shard(&self, number: u64) -> &Mutex<HashMap<u64, Slot>> {
        // Masked to the number of shards.
        #[allow(clippy::indexing_slicing)]
        &self.records[number as usize % SHARDS]
    }
}

/// A set of numbers that lie close together.
#[derive(Default)]
struct Set {
    shards: [Mutex<HashMap<u64, Chunk>>; SHARDS],
    count: AtomicUsize,
}

struct Chunk {
    words: Box<[u64; WORDS]>,
    /// Which of them the kernel keeps the attributes of.
    kept: Box<[u64; WORDS]>,
    live: u32,
    /// Look-ups of the same file but for one; of those with more than that.
    again: HashMap<u64, u64>,
}

impl Chunk {
    fn numbers(&self, at: u64) -> impl Iterator<Item = u64> {
        self.words.iter().enumerate().flat_map(move |(place, word)| {
            let base = (at * WORDS as u64 + place as u64) * WORD;
            (0..WORD).filter(move |bit| word >> bit & 1 == 1).map(move |bit| base + bit)
        })
    }
}

impl Set {
    /// The chunk, the word in it, the bit in that.
    fn place(number: u64) -> (u64, usize, u64) {
        let word = number / WORD;
        (word / WORDS as u64, word as usize % WORDS, 1 << (number % WORD))
    }

    fn shard(&self, chunk: u64) -> &Mutex<HashMap<u64, Chunk>> {
        // Masked to the number of shards.
        #[allow(clippy::indexing_slicing)]
        &self.shards[chunk as usize % SHARDS]
    }

    fn has(&self, number: u64) -> bool {
        let (at, word, bit) = Set::place(number);
        self.shard(at).lock().get(&at).and_then(|chunk| chunk.words.get(word)).is_some_and(|word| word & bit != 0)
    }

    /// Of those that are not in the set nothing is kept.
    fn keeps(&self, number: u64, kept: bool) {
        let (at, word, bit) = Set::place(number);
        let mut shard = self.shard(at).lock();
        let Some(chunk) = shard.get_mut(&at) else { return };
        let is_there = chunk.words.get(word).is_some_and(|word| word & bit != 0);
        if let Some(word) = chunk.kept.get_mut(word) {
            *word = if kept && is_there { *word | bit } else { *word & !bit };
        }
    }

    fn is_kept(&self, number: u64) -> bool {
        let (at, word, bit) = Set::place(number);
        self.shard(at).lock().get(&at).and_then(|chunk| chunk.kept.get(word)).is_some_and(|word| word & bit != 0)
    }

    /// Whether there is one from `from` to `to`.
    fn any(&self, from: u64, to: u64) -> bool {
        let within = Set::place(from).0..=Set::place(to).0;
        let shards = self.shards.iter();
        shards
            .flat_map(|shard| {
                let shard = shard.lock();
                let chunks = shard.iter().filter(|(at, _)| within.contains(at));
                chunks
                    .flat_map(|(at, chunk)| chunk.numbers(*at))
                    .filter(|number| (from..=to).contains(number))
                    .take(1)
                    .collect::<Vec<u64>>()
            })
            .next()
            .is_some()
    }

    /// One look-up more.
    fn insert(&self, number: u64) {
        let (at, word, bit) = Set::place(number);
        let mut shard = self.shard(at).lock();
        let chunk = shard.entry(at).or_insert_with(|| Chunk {
            words: Box::new([0; WORDS]),
            kept: Box::new([0; WORDS]),
            live: 0,
            again: HashMap::new(),
        });
        if let Some(word) = chunk.words.get_mut(word).filter(|word| **word & bit == 0) {
            *word |= bit;
            chunk.live += 1;
            self.count.fetch_add(1, Ordering::Relaxed);
        } else {
            *chunk.again.entry(number).or_default() += 1;
        }
    }

    /// So many look-ups less; whether none is left.
    fn remove(&self, number: u64, lookups: u64) -> bool {
        let (at, place, bit) = Set::place(number);
        let mut shard = self.shard(at).lock();
        let Some(chunk) = shard.get_mut(&at) else { return true };
        if let Some(more) = chunk.again.get_mut(&number) {
            let all = lookups > *more;
            *more = more.saturating_sub(lookups);
            if *more == 0 {
                chunk.again.remove(&number);
            }
            if !all {
                return false;
            }
        }
        if let Some(word) = chunk.words.get_mut(place).filter(|word| **word & bit != 0) {
            *word &= !bit;
            if let Some(kept) = chunk.kept.get_mut(place) {
                *kept &= !bit;
            }
            chunk.live -= 1;
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        if chunk.live == 0 {
            shard.remove(&at);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_what_was_put_in() {
        let set = Set::default();
        let numbers: Vec<u64> = (0..10_000).map(|n| n * 7).chain((0..100).map(|n| 5 << 40 | n)).collect();
        for number in &numbers {
            assert!(!set.has(*number));
            set.insert(*number);
            set.insert(*number);
            set.insert(*number);
        }
        assert_eq!(set.count.load(Ordering::Relaxed), numbers.len());
        set.keeps(7, true);
        set.keeps(8, true);
        set.keeps(14, true);
        set.keeps(14, false);
        assert_eq!([7, 8, 14].map(|number| set.is_kept(number)), [true, false, false]);
        assert!(numbers.iter().all(|number| set.has(*number)) && !set.has(8));
        for (from, to, any) in [
            (0, 0, true),
            (1, 6, false),
            (1, 7, true),
            (70_000, 5 << 40, true),
            (70_000, (5 << 40) - 1, false),
            (5 << 40 | 100, u64::MAX, false),
        ] {
            assert_eq!(set.any(from, to), any, "{from}..={to}");
        }
        let mut seen: Vec<u64> = set
            .shards
            .iter()
            .flat_map(|shard| shard.lock().iter().flat_map(|(at, chunk)| chunk.numbers(*at)).collect::<Vec<_>>())
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, numbers);
        // As many look-ups are taken back as there were, in whatever portions.
        for (at, number) in numbers.iter().enumerate() {
            match at % 3 {
                0 => assert!(!set.remove(*number, 1) && !set.remove(*number, 1) && set.remove(*number, 1)),
                1 => assert!(!set.remove(*number, 2) && set.has(*number) && set.remove(*number, 1)),
                _ => assert!(set.remove(*number, 3)),
            }
            assert!(!set.has(*number) && !set.is_kept(*number));
        }
        assert_eq!(set.count.load(Ordering::Relaxed), 0);
        assert!(set.shards.iter().all(|shard| shard.lock().is_empty()));
    }
}
