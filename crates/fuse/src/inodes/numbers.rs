//! The inode table of layers whose files are found by inode number: node ids are inode numbers, and only open files
//! have a record.
//!
//! Called by `inodes.rs` alone, which uses this instead of its own table. In addition, two bits are kept for each
//! file that the kernel knows (so that a listing does not send it again attributes that it has cached), and the
//! lookup count where that is above one. Invariants:
//! * a file is known until all its lookups are forgotten: FORGET may be overtaken by later requests;
//! * a record exists exactly while the state of open files in it is not idle, or a caller is using it;
//! * the layer is never called under a lock.
//!
//! Where the mount survives its process, the set is recorded in the handoff state, without lookup counts. So for a
//! file that a previous process knew, FORGET does not show whether that was the last lookup, and the kernel is asked
//! (`survival/doubts.rs`).

use super::{InodeRecord, ROOT, Removed, Slot};
use crate::survival::numbers::{SET, Sets};
use nacre_vfs::{Caller, FileId, Kind, Layer, Node, Opened};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::Sender,
    },
};

const SHARDS: usize = 16;
/// Files per word of the set.
const WORD: u64 = 64;
/// Words per chunk, which is allocated and freed as a whole.
const WORDS: usize = SET;
/// Bit of the root's own id while it is not [`ROOT`].
const PROMOTED: u64 = 1 << 63;

/// The inode table of a layer whose files are found by inode number.
pub(crate) struct Numbers {
    layer: Arc<dyn Layer>,
    root: FileId,
    promoted: AtomicBool,
    records: [Mutex<HashMap<u64, Slot>>; SHARDS],
    known: Set,
    /// Channel to the thread that asks the kernel, while that runs.
    doubts: Mutex<Option<Sender<u64>>>,
}

impl Numbers {
    /// Creates the table of a layer with inode numbers and this root; `None` for other layers. Restored from `sets`,
    /// where there are any, and recorded there.
    pub fn new(layer: &Arc<dyn Layer>, root: FileId, sets: Option<Sets>) -> Option<Numbers> {
        layer.capabilities().numbered?;
        Some(Numbers {
            layer: Arc::clone(layer),
            root,
            promoted: AtomicBool::new(false),
            records: Default::default(),
            known: Set::noted(sets),
            doubts: Mutex::default(),
        })
    }

    /// Sets the channel for node ids of files that the kernel may have forgotten.
    pub fn doubt_with(&self, doubts: Option<Sender<u64>>) {
        *self.doubts.lock() = doubts;
    }

    /// Has the kernel asked whether it knows a file of a previous process.
    pub fn doubt(&self, nodeid: u64) {
        // Without that thread, the file stays known until the mount ends.
        if let Some(doubts) = &*self.doubts.lock() {
            let _ = doubts.send(nodeid);
        }
    }

    /// Number of lookups of a file in this process, if the kernel may know it from a previous one.
    pub fn told_since(&self, nodeid: u64) -> Option<u64> {
        self.known.told_since(self.inner(nodeid))
    }

    /// Removes a file of a previous process that the kernel does not know; false where it was looked up more than
    /// `told` times in this process.
    pub fn is_unknown(&self, nodeid: u64, told: u64) -> (bool, Option<Removed>) {
        let number = self.inner(nodeid);
        let left = {
            let mut records = self.shard(number).lock();
            if !self.known.remove_left(number, told) {
                return (false, None);
            }
            self.take_closed(number, &mut records)
        };
        self.forgotten(number);
        (true, left.and_then(Slot::into_removed))
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

    /// Number of files that the kernel knows.
    pub fn len(&self) -> usize {
        self.known.count.load(Ordering::Relaxed)
    }

    /// Counts a lookup; returns the file's node id.
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

    /// Reads or changes a record where there is one: most files have none, and creating one costs more than the
    /// access.
    pub fn with_any<T>(&self, nodeid: u64, f: impl FnOnce(&mut InodeRecord<'_>) -> T) -> Option<T> {
        let number = self.inner(nodeid);
        let mut records = self.shard(number).lock();
        let answer = f(&mut InodeRecord { slot: records.get_mut(&number)? });
        let idle = self.settle(number, &mut records);
        drop(records);
        // The node is dropped outside of the lock.
        drop(idle);
        Some(answer)
    }

    /// Reads or changes a record; creates it where there is none.
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
                // The node is dropped outside of the lock.
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

    /// Removes an idle record.
    fn settle(&self, number: u64, records: &mut HashMap<u64, Slot>) -> Option<Slot> {
        let slot = records.get_mut(&number)?;
        if !slot.is_idle() {
            return None;
        }
        records.remove(&number)
    }

    /// Returns the node id of a file that the kernel may know.
    pub fn find(&self, id: &FileId) -> Option<u64> {
        (FileId { ino: id.ino, ..self.root } == *id).then(|| self.outer(id.ino))
    }

    /// Whether the kernel knows a file.
    pub fn is_known(&self, nodeid: u64) -> bool {
        let number = self.inner(nodeid);
        number == self.root.ino || self.known.has(number)
    }

    /// Notes whether the kernel may cache all attributes of a file.
    pub fn keeps(&self, nodeid: u64, kept: bool) {
        self.known.keeps(self.inner(nodeid), kept);
    }

    /// Whether the kernel caches all its attributes.
    pub fn is_kept(&self, number: u64) -> bool {
        self.known.is_kept(number)
    }

    /// Subtracts lookups. When the kernel no longer knows a file, the remaining state of its record goes, for example
    /// times of direct writes that the kernel never got. The kernel may have looked the file up again meanwhile: open
    /// files stay.
    pub fn forget(&self, nodeid: u64, lookups: u64) -> Option<Removed> {
        let number = self.inner(nodeid);
        if number == self.root.ino {
            return None;
        }
        let left = {
            let mut records = self.shard(number).lock();
            match self.known.remove(number, lookups) {
                Removal::Last => {}
                Removal::NotAll => return None,
                Removal::Unclear => {
                    drop(records);
                    self.doubt(nodeid);
                    return None;
                }
            }
            self.take_closed(number, &mut records)
        };
        self.forgotten(number);
        left.and_then(Slot::into_removed)
    }

    /// Removes the record of a file that the kernel no longer knows, unless another file with the same number is
    /// open: then the kernel has forgotten the replaced file.
    fn take_closed(&self, number: u64, records: &mut HashMap<u64, Slot>) -> Option<Slot> {
        if records.get(&number).is_none_or(Slot::is_closed) {
            return records.remove(&number);
        }
        self.known.insert(number);
        None
    }

    fn forgotten(&self, number: u64) {
        if let Some(numbered) = self.layer.capabilities().numbered {
            numbered.forgotten(number);
        }
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

    /// Removes everything: the mount is gone.
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

/// A set of numbers, dense in places: a sparse bitmap.
#[derive(Default)]
struct Set {
    shards: [Mutex<HashMap<u64, Chunk>>; SHARDS],
    count: AtomicUsize,
    /// Where the set is recorded.
    sets: Option<Sets>,
}

/// Result of subtracting lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    /// The file has no lookups any more.
    Last,
    /// The file has more lookups.
    NotAll,
    /// The lookups of previous processes are not known.
    Unclear,
}

struct Chunk {
    words: Box<[u64; WORDS]>,
    /// Bits of the files whose attributes the kernel caches.
    kept: Box<[u64; WORDS]>,
    /// Bits of the files that a previous process knew, where there was one.
    left: Option<Box<[u64; WORDS]>>,
    live: u32,
    /// Lookup counts minus one, of files with more than one lookup. For files of a previous process: all lookups of
    /// this process.
    again: HashMap<u64, u64>,
    /// Index of its record.
    place: Option<usize>,
}

impl Chunk {
    fn is_left(&self, word: usize, bit: u64) -> bool {
        self.left.as_ref().and_then(|left| left.get(word)).is_some_and(|word| word & bit != 0)
    }

    fn numbers(&self, at: u64) -> impl Iterator<Item = u64> {
        self.words.iter().enumerate().flat_map(move |(place, word)| {
            let base = (at * WORDS as u64 + place as u64) * WORD;
            (0..WORD).filter(move |bit| word >> bit & 1 == 1).map(move |bit| base + bit)
        })
    }
}

impl Set {
    /// A set recorded in `sets`, restored from there.
    fn noted(sets: Option<Sets>) -> Set {
        let set = Set { sets, ..Set::default() };
        for left in set.sets.iter().flat_map(Sets::left) {
            let live = left.words.iter().map(|word| word.count_ones()).sum();
            if live == 0 {
                // The process died before it freed the record.
                set.sets.iter().for_each(|sets| sets.remove(left.place));
                continue;
            }
            let chunk = Chunk {
                words: Box::new(left.words),
                kept: Box::new([0; WORDS]),
                left: Some(Box::new(left.words)),
                live,
                again: HashMap::new(),
                place: Some(left.place),
            };
            set.count.fetch_add(live as usize, Ordering::Relaxed);
            set.shard(left.key).lock().insert(left.key, chunk);
        }
        set
    }

    fn note(&self, chunk: &Chunk, word: usize) {
        if let Some(((sets, place), bits)) = self.sets.as_ref().zip(chunk.place).zip(chunk.words.get(word)) {
            sets.set(place, word, *bits);
        }
    }

    fn told_since(&self, number: u64) -> Option<u64> {
        let (at, word, bit) = Set::place(number);
        let shard = self.shard(at).lock();
        let chunk = shard.get(&at).filter(|chunk| chunk.is_left(word, bit))?;
        Some(chunk.again.get(&number).copied().unwrap_or(0))
    }

    /// Removes a file of a previous process that was looked up `told` times in this one.
    fn remove_left(&self, number: u64, told: u64) -> bool {
        let (at, word, bit) = Set::place(number);
        let mut shard = self.shard(at).lock();
        let Some(chunk) = shard.get_mut(&at).filter(|chunk| chunk.is_left(word, bit)) else { return false };
        if chunk.again.get(&number).copied().unwrap_or(0) != told {
            return false;
        }
        chunk.again.remove(&number);
        self.take(&mut shard, at, (word, bit));
        true
    }

    /// Removes a file from its chunk.
    fn take(&self, shard: &mut HashMap<u64, Chunk>, at: u64, (word, bit): (usize, u64)) {
        let Some(chunk) = shard.get_mut(&at) else { return };
        if let Some(bits) = chunk.words.get_mut(word).filter(|word| **word & bit != 0) {
            *bits &= !bit;
            for others in [Some(&mut chunk.kept), chunk.left.as_mut()].into_iter().flatten() {
                if let Some(bits) = others.get_mut(word) {
                    *bits &= !bit;
                }
            }
            chunk.live -= 1;
            self.count.fetch_sub(1, Ordering::Relaxed);
            self.note(chunk, word);
        }
        if chunk.live == 0 {
            let gone = shard.remove(&at).and_then(|chunk| chunk.place);
            self.sets.iter().zip(gone).for_each(|(sets, place)| sets.remove(place));
        }
    }

    /// The chunk, the word in it, and the bit in that.
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

    /// Sets whether attributes are cached; ignored for files that are not in the set.
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

    /// Whether there is a number from `from` to `to`.
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

    /// Adds one lookup.
    fn insert(&self, number: u64) {
        let (at, word, bit) = Set::place(number);
        let mut shard = self.shard(at).lock();
        let chunk = shard.entry(at).or_insert_with(|| Chunk {
            words: Box::new([0; WORDS]),
            kept: Box::new([0; WORDS]),
            left: None,
            live: 0,
            again: HashMap::new(),
            place: self.sets.as_ref().and_then(|sets| sets.add(at)),
        });
        if let Some(bits) = chunk.words.get_mut(word).filter(|word| **word & bit == 0) {
            *bits |= bit;
            chunk.live += 1;
            self.count.fetch_add(1, Ordering::Relaxed);
            self.note(chunk, word);
        } else {
            *chunk.again.entry(number).or_default() += 1;
        }
    }

    /// Subtracts lookups.
    fn remove(&self, number: u64, lookups: u64) -> Removal {
        let (at, word, bit) = Set::place(number);
        let mut shard = self.shard(at).lock();
        let Some(chunk) = shard.get_mut(&at) else { return Removal::Last };
        if chunk.is_left(word, bit) {
            return Removal::Unclear;
        }
        if let Some(more) = chunk.again.get_mut(&number) {
            let all = lookups > *more;
            *more = more.saturating_sub(lookups);
            if *more == 0 {
                chunk.again.remove(&number);
            }
            if !all {
                return Removal::NotAll;
            }
        }
        self.take(&mut shard, at, (word, bit));
        Removal::Last
    }
}

#[cfg(test)]
mod tests {
    use super::{Removal::*, *};
    use crate::survival::Survival;

    #[test]
    fn a_set_goes_on_with_what_the_kernel_may_know() {
        let mut memory = Survival::small().unwrap();
        let set = Set::noted(Some(Sets::new(&memory)));
        let numbers = [1, 7, 64, 4095, 4096, 5 << 40 | 3];
        numbers.iter().chain(&[8, 9 << 40]).for_each(|number| set.insert(*number));
        set.insert(7);
        assert_eq!([set.remove(8, 1), set.remove(9 << 40, 1), set.remove(7, 1)], [Last, Last, NotAll]);
        for _ in 0..2 {
            memory.next_life();
            let set = Set::noted(Some(Sets::new(&memory)));
            assert_eq!(set.count.load(Ordering::Relaxed), numbers.len());
            assert!(numbers.iter().all(|number| set.has(*number) && set.told_since(*number) == Some(0)));
            assert!(!set.has(8) && !set.has(9 << 40) && set.told_since(8).is_none());
        }
        let set = Set::noted(Some(Sets::new(&memory)));
        // New ones are counted; FORGET does not show the remaining lookups of older ones.
        set.insert(8);
        assert_eq!(set.remove(8, 1), Last);
        set.insert(7);
        assert_eq!((set.remove(7, 100), set.told_since(7)), (Unclear, Some(1)));
        assert!(!set.remove_left(7, 0) && set.has(7), "it was looked up meanwhile");
        assert!(set.remove_left(7, 1) && !set.has(7) && !set.remove_left(7, 0));
        set.insert(7);
        assert_eq!((set.told_since(7), set.remove(7, 1)), (None, Last));
        assert!(set.remove_left(5 << 40 | 3, 0));
        memory.next_life();
        let set = Set::noted(Some(Sets::new(&memory)));
        assert_eq!(set.count.load(Ordering::Relaxed), numbers.len() - 2);
        assert!(!set.has(7) && !set.has(5 << 40 | 3) && set.has(4096));
    }

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
                0 => assert_eq!([(); 3].map(|()| set.remove(*number, 1)), [NotAll, NotAll, Last]),
                1 => assert_eq!([set.remove(*number, 2), set.remove(*number, 1)], [NotAll, Last]),
                _ => assert_eq!(set.remove(*number, 3), Last),
            }
            assert!(!set.has(*number) && !set.is_kept(*number));
        }
        assert_eq!(set.count.load(Ordering::Relaxed), 0);
        assert!(set.shards.iter().all(|shard| shard.lock().is_empty()));
    }
}
