//! Records for layers whose files are found by inode number: no nodes and locations, but which files the kernel knows
//! (one bit each), and which of them may have cached writes. In addition, the numbers that layers assign for good,
//! and the threads of the process that use the mount.
//!
//! Written by `inodes/numbers.rs`, `writeback/written_files.rs` and `self_io.rs` under their own locks, and by
//! layers. The words of each list are valid by themselves, or by their key.

use super::{Head, NUMBERS_AT, Survival, get, keep_order, publish, put, retract};
use nacre_vfs::GivenNumbers;
use parking_lot::Mutex;

/// Words of a set of files ([`Sets`]).
pub(crate) const SET: usize = 64;
/// Maximum numbers of one mount: of sets, files with writes, threads, assigned numbers.
const SETS: usize = 1 << 18;
const WRITTEN: usize = 1 << 18;
const ACTORS: usize = 4096;
const GIVEN: usize = 1 << 20;
/// Words per assigned number.
const GIVEN_WORDS: usize = 4;

const KEYS_AT: usize = NUMBERS_AT;
const SETS_AT: usize = KEYS_AT + SETS;
const WRITTEN_AT: usize = SETS_AT + SETS * SET;
const ACTORS_AT: usize = WRITTEN_AT + WRITTEN;
const GIVEN_AT: usize = ACTORS_AT + ACTORS;
pub(super) const WORDS: usize = SETS + SETS * SET + WRITTEN + ACTORS + GIVEN * GIVEN_WORDS;

/// Free indices of a list: freed ones, and all from `end` on.
#[derive(Debug)]
struct Places {
    free: Vec<usize>,
    end: usize,
    most: usize,
}

impl Places {
    fn take(&mut self) -> Option<usize> {
        self.free.pop().or_else(|| {
            let next = Some(self.end).filter(|next| *next < self.most)?;
            self.end += 1;
            Some(next)
        })
    }
}

/// Finds the free indices of a list of words; 0 is free.
fn places(memory: &Survival, at: usize, end: Head, most: usize) -> Places {
    let end = (memory.head(end) as usize).min(most);
    let words = memory.part(at, most);
    Places { free: (0..end).rev().filter(|place| get(words, *place) == 0).collect(), end, most }
}

/// A list of words other than 0.
#[derive(Debug)]
pub(crate) struct Words {
    memory: Survival,
    at: usize,
    end: Head,
    /// Why no failover is possible where the list is full.
    full: &'static str,
    places: Mutex<Places>,
}

impl Words {
    /// Files that may have cached writes, by node id.
    pub fn written(memory: &Survival) -> Words {
        Words::list(memory, (WRITTEN_AT, WRITTEN), Head::WrittenEnd, "too many of its files are written to")
    }

    /// Threads that use the mount.
    pub fn actors(memory: &Survival) -> Words {
        Words::list(memory, (ACTORS_AT, ACTORS), Head::ActorsEnd, "too many threads use it")
    }

    fn list(memory: &Survival, (at, most): (usize, usize), end: Head, full: &'static str) -> Words {
        Words { memory: memory.clone(), at, end, full, places: Mutex::new(places(memory, at, end, most)) }
    }

    /// Returns all words with their indices.
    pub fn all(&self) -> Vec<(usize, u64)> {
        let places = self.places.lock();
        let words = self.memory.part(self.at, places.most);
        (0..places.end).map(|place| (place, get(words, place))).filter(|(_, word)| *word != 0).collect()
    }

    /// Adds a word; returns its index.
    pub fn add(&self, word: u64) -> Option<usize> {
        let Some(place) = self.places.lock().take() else {
            self.memory.give_up(self.full);
            return None;
        };
        self.memory.raise(self.end, place as u64 + 1);
        publish(self.memory.part(self.at + place, 1), 0, word);
        Some(place)
    }

    /// Removes a word.
    pub fn remove(&self, place: usize) {
        retract(self.memory.part(self.at + place, 1), 0);
        self.places.lock().free.push(place);
    }
}

/// A recorded set of files: its index, its key, and its bits.
pub(crate) struct SetLeft {
    pub place: usize,
    pub key: u64,
    pub words: [u64; SET],
}

/// Sets of files that the kernel knows: consecutive inode numbers from a key on, one bit each.
#[derive(Debug)]
pub(crate) struct Sets {
    memory: Survival,
    places: Mutex<Places>,
}

impl Sets {
    pub fn new(memory: &Survival) -> Sets {
        Sets { memory: memory.clone(), places: Mutex::new(places(memory, KEYS_AT, Head::KnownEnd, SETS)) }
    }

    /// Returns all sets that a previous process recorded.
    pub fn left(&self) -> Vec<SetLeft> {
        if !self.memory.resumes() {
            return Vec::new();
        }
        let end = self.places.lock().end;
        let keys = self.memory.part(KEYS_AT, SETS);
        let of = |place| {
            let key = get(keys, place).checked_sub(1)?;
            let bits = self.memory.part(SETS_AT + place * SET, SET);
            Some(SetLeft { place, key, words: std::array::from_fn(|word| get(bits, word)) })
        };
        (0..end).filter_map(of).collect()
    }

    /// Adds an empty set; returns its index.
    pub fn add(&self, key: u64) -> Option<usize> {
        let Some(place) = self.places.lock().take() else {
            self.memory.give_up("it has too many files in use");
            return None;
        };
        self.memory.raise(Head::KnownEnd, place as u64 + 1);
        (0..SET).for_each(|word| put(self.memory.part(SETS_AT + place * SET, SET), word, 0));
        publish(self.memory.part(KEYS_AT + place, 1), 0, key + 1);
        Some(place)
    }

    /// Sets a word of a set.
    pub fn set(&self, place: usize, word: usize, bits: u64) {
        publish(self.memory.part(SETS_AT + place * SET, SET), word, bits);
    }

    /// Removes a set, which is empty.
    pub fn remove(&self, place: usize) {
        retract(self.memory.part(KEYS_AT + place, 1), 0);
        self.places.lock().free.push(place);
    }
}

/// Records of numbers that layers assign for good.
pub(crate) struct Given(Survival);

impl Given {
    pub fn new(memory: &Survival) -> Given {
        Given(memory.clone())
    }

    fn end(&self) -> usize {
        (self.0.head(Head::GivenEnd) as usize).min(GIVEN)
    }
}

impl GivenNumbers for Given {
    fn all(&self) -> Vec<[u64; 3]> {
        // An assignment that was in progress when the process died has reached nobody.
        let of = |place| {
            let record = self.0.part(GIVEN_AT + place * GIVEN_WORDS, GIVEN_WORDS);
            [0, 1, 2].map(|word| get(record, word))
        };
        (0..self.end()).map(of).collect()
    }

    fn give(&self, given: [u64; 3]) {
        let _one_at_a_time = self.0.giving.lock();
        let end = self.end();
        if end == GIVEN {
            return self.0.give_up("too many file systems and snapshots were seen in it");
        }
        let record = self.0.part(GIVEN_AT + end * GIVEN_WORDS, GIVEN_WORDS);
        given.iter().enumerate().for_each(|(word, value)| put(record, word, *value));
        keep_order();
        self.0.set(Head::GivenEnd, end as u64 + 1);
    }
}
