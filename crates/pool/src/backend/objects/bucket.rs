//! What an object store must be able to do, and one in memory that loses requests and replies.
//!
//! Callers: [`Objects`](super::Objects), and tests. Invariant of every bucket: an object is there
//! whole or not at all, and whoever has a reply sees what it says from then on.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use parking_lot::Mutex;

use crate::device::Random;

/// How making an object went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is there now.
    Made,
    /// One of this name is there already, or somebody else makes it at this moment.
    Exists,
}

/// Objects by their names. Each request waits for its reply; an error means that nobody knows
/// whether it was carried out.
pub trait Bucket: Send + Sync {
    /// How people call it.
    fn name(&self) -> &str;

    /// Makes an object, or replaces it.
    ///
    /// # Errors
    /// No reply, or one that tells of a failure: as for all here.
    fn put(&self, key: &str, body: &[u8]) -> io::Result<()>;

    /// Makes an object if there is none of this name.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put>;

    /// An object, or as much of a range of it as there is; `None` where there is none.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>>;

    /// The same, past what is kept of it, which is corrected.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get_anew(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        self.get(key, range)
    }

    /// Whether [`Self::get_anew`] may answer something else than [`Self::get`].
    fn keeps_parts(&self) -> bool {
        false
    }

    /// A range will be read soon. Does not wait.
    fn expect(&self, key: &str, range: Range<u64>) {
        let _ = (key, range);
    }

    /// The names that begin so, in the order of their bytes.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn list(&self, prefix: &str) -> io::Result<Vec<String>>;

    /// Removes an object; one that is not there is removed.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn delete(&self, key: &str) -> io::Result<()>;
}

/// A bucket in memory, for tests: the same seed loses the same requests.
pub struct MemoryBucket {
    state: Mutex<Memory>,
}

struct Memory {
    objects: BTreeMap<String, Vec<u8>>,
    random: Random,
    /// Of so many requests one gets no reply; 0: none.
    loses: u64,
    /// Requests that are still carried out.
    allowed: Option<u64>,
    requests: u64,
}

impl Memory {
    /// Whether something goes wrong that does so many times more seldom than losing a request.
    fn loses_one(&mut self, times: u64) -> bool {
        self.loses > 0 && self.random.below(self.loses * times) == 0
    }
}

impl MemoryBucket {
    /// An empty one that loses one of so many requests or replies (0: none).
    #[must_use]
    pub fn new(seed: u64, loses: u64) -> Self {
        let state = Memory { objects: BTreeMap::new(), random: Random(seed), loses, allowed: None, requests: 0 };
        Self { state: Mutex::new(state) }
    }

    /// Lets this many more requests be carried out; all after them fail, as for a machine that has
    /// lost its network. `None` ends that.
    pub fn fail_after(&self, requests: Option<u64>) {
        self.state.lock().allowed = requests;
    }

    /// Requests so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.state.lock().requests
    }

    /// Flips a bit of an object.
    pub fn rot(&self, key: &str, offset: usize, bit: u8) {
        if let Some(byte) = self.state.lock().objects.get_mut(key).and_then(|body| body.get_mut(offset)) {
            *byte ^= 1 << (bit % 8);
        }
    }

    /// The names of all objects.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        self.state.lock().objects.keys().cloned().collect()
    }

    fn request<T>(&self, carry_out: impl FnOnce(&mut Memory) -> T) -> io::Result<T> {
        let lost = || io::Error::from(io::ErrorKind::TimedOut);
        let mut state = self.state.lock();
        state.requests += 1;
        match &mut state.allowed {
            Some(0) => return Err(lost()),
            Some(left) => *left -= 1,
            None => {}
        }
        let is_lost = state.loses_one(1);
        if is_lost && state.random.below(2) == 0 {
            return Err(lost());
        }
        let reply = carry_out(&mut state);
        if is_lost { Err(lost()) } else { Ok(reply) }
    }
}

impl Bucket for MemoryBucket {
    fn name(&self) -> &str {
        "memory"
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.request(|state| drop(state.objects.insert(key.to_owned(), body.to_vec())))
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        self.request(|state| {
            if state.objects.contains_key(key) {
                return Put::Exists;
            }
            // A store that has to choose between two who make it at once may refuse both.
            if state.loses_one(4) {
                return Put::Exists;
            }
            state.objects.insert(key.to_owned(), body.to_vec());
            Put::Made
        })
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        self.request(|state| {
            let body = state.objects.get(key)?;
            let Range { start, end } = range.unwrap_or(0..body.len() as u64);
            let (start, end) = (start.min(body.len() as u64) as usize, end.min(body.len() as u64) as usize);
            Some(body.get(start..end.max(start)).unwrap_or_default().to_vec())
        })
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        self.request(|state| state.objects.keys().filter(|key| key.starts_with(prefix)).cloned().collect())
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.request(|state| drop(state.objects.remove(key)))
    }
}
