//! What an object store must be able to do, and one in memory that loses requests and replies.
//!
//! Callers: [`Objects`](super::Objects), and tests. Invariant of every bucket: an object is there
//! whole or not at all, and whoever has a reply sees what it says from then on.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::Random;
use crate::frames::Reach;

/// The longest object of the pool's own of this name, bytes. Others may put longer ones: no more than this is read.
#[must_use]
pub fn longest_object(key: &str) -> u64 {
    match key.split('/').next() {
        Some("pool" | "roots" | "epochs" | "probe") => 1 << 20,
        // A segment, or a block of the log with as much as the log may have.
        _ => (64 << 20) + (64 << 10),
    }
}

/// How making an object went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is there now.
    Made,
    /// One of this name is there already, or somebody else makes it at this moment.
    Exists,
}

/// Which content of an object was read, as the store tells contents apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectTag {
    /// Its entity tag.
    pub e_tag: Option<String>,
    /// Its version, where the store's conditions are about these.
    pub version: Option<String>,
}

/// What was asked of a bucket so far. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Objects made or replaced.
    pub puts: u64,
    /// Objects read, or parts of them.
    pub gets: u64,
    /// Pages of names.
    pub lists: u64,
    /// Objects removed.
    pub deletes: u64,
    /// Those of all these that were made once more, because there was no reply or a refusal that
    /// passes.
    pub again: u64,
    /// What was sent.
    pub sent: u64,
    /// What was received.
    pub received: u64,
}

/// That a store gives no answer with which a request could end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silence {
    /// For so long.
    pub lasts: Duration,
    /// What came instead, in words.
    pub why: String,
}

/// Objects by their names. Each request waits for its reply; an error means that nobody knows
/// whether it was carried out.
pub trait Bucket: Send + Sync {
    /// How people call it.
    fn name(&self) -> &str;

    /// How often a request is worth making that fails: once where the bucket itself does it again.
    fn attempts(&self) -> usize {
        6
    }

    /// The pool is being let go: from now on a request fails soon where there is no reply, also those that
    /// are under way.
    fn hurry(&self) {}

    /// The end of a hurry: requests have their usual time again.
    fn take_time(&self) {}

    /// How many requests are worth making at the same time.
    fn parallel(&self) -> usize {
        1
    }

    /// What was asked of it so far.
    fn requests(&self) -> Requests {
        Requests::default()
    }

    /// Since when it has answered nothing, while somebody waits for an answer; `None` where it answers.
    fn silence(&self) -> Option<Silence> {
        None
    }

    /// Tells that a range of an object will be read soon.
    fn expect(&self, key: &str, range: Range<u64>) {
        let _ = (key, range);
    }

    /// How far ahead of a reader that is worth doing.
    fn ahead(&self) -> Reach {
        Reach::NONE
    }

    /// Makes an object, or replaces it.
    ///
    /// # Errors
    /// No reply, or one that tells of a failure: as for all here.
    fn put(&self, key: &str, body: &[u8]) -> io::Result<()>;

    /// A whole object, past what is kept of it, with what [`Self::put_if`] needs; `None` where there is none. No
    /// more than [`longest_object`] of it.
    ///
    /// # Errors
    /// As [`Self::put`]; a bucket that cannot tell contents apart.
    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        let _ = key;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Replaces an object if it is still what was read; whether it was.
    ///
    /// # Errors
    /// As [`Self::get_tagged`].
    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        let _ = (key, body, tag);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes an object if there is none of this name.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put>;

    /// An object, or as much of a range of it as there is; `None` where there is none. Without a range, no more
    /// than [`longest_object`].
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>>;

    /// A range of an object as it comes: pieces in turn, each with its place in the object. Where it had to
    /// be asked for again, they begin again. Whether there is such an object.
    ///
    /// # Errors
    /// As [`Self::put`]; what came before is right.
    fn get_by_pieces(&self, key: &str, range: Range<u64>, piece: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let found = self.get(key, Some(range.clone()))?;
        found.iter().for_each(|found| piece(range.start, found));
        Ok(found.is_some())
    }

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

    /// The names that begin so and come after another one, in the order of their bytes. What they
    /// begin with ends with a slash.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>>;

    /// The same page by page, so that a list of any length takes the memory of one page. A page may come again where a
    /// reply was lost, and names are in the order of the store.
    ///
    /// # Errors
    /// As [`Self::put`]; that of `page`.
    fn list_pages(
        &self,
        prefix: &str,
        after: &str,
        page: &mut dyn FnMut(Vec<String>) -> io::Result<()>,
    ) -> io::Result<()> {
        page(self.list(prefix, after)?)
    }

    /// Removes objects, many by one request where the store can do that.
    ///
    /// # Errors
    /// As [`Self::put`]: some of them may be gone.
    fn delete_all(&self, keys: &[String]) -> io::Result<()> {
        keys.iter().try_for_each(|key| self.delete(key))
    }

    /// Removes an object; one that is not there is removed.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn delete(&self, key: &str) -> io::Result<()>;
}

/// A bucket in memory, for tests: the same seed loses the same requests.
pub struct MemoryBucket {
    state: Mutex<Memory>,
    parallel: usize,
}

struct Memory {
    objects: BTreeMap<String, Vec<u8>>,
    random: Random,
    /// Of so many requests one gets no reply; 0: none.
    loses: u64,
    /// Requests that are still carried out.
    allowed: Option<u64>,
    /// Nothing is made whose name begins so.
    refused: Option<String>,
    /// Nothing is made beyond so many bytes of objects.
    limit: Option<usize>,
    /// So many replies about objects whose names begin so are damaged.
    damaged: (String, u64),
    requests: Requests,
}

impl Memory {
    fn size(&self) -> usize {
        self.objects.values().map(Vec::len).sum()
    }

    /// Whether something goes wrong that does so many times more seldom than losing a request.
    fn loses_one(&mut self, times: u64) -> bool {
        self.loses > 0 && self.random.below(self.loses * times) == 0
    }
}

impl MemoryBucket {
    /// An empty one that loses one of so many requests or replies (0: none).
    #[must_use]
    pub fn new(seed: u64, loses: u64) -> Self {
        let state = Memory {
            objects: BTreeMap::new(),
            random: Random(seed),
            loses,
            allowed: None,
            refused: None,
            limit: None,
            damaged: Default::default(),
            requests: Requests::default(),
        };
        Self { state: Mutex::new(state), parallel: 1 }
    }

    /// One that takes so many requests at a time: which of them are lost is no longer the same each
    /// time.
    #[must_use]
    pub fn in_parallel(self, parallel: usize) -> Self {
        Self { parallel, ..self }
    }

    /// Lets this many more requests be carried out; all after them fail, as for a machine that has
    /// lost its network. `None` ends that.
    pub fn fail_after(&self, requests: Option<u64>) {
        self.state.lock().allowed = requests;
    }

    /// Of so many requests or replies one is lost from now on (0: none).
    pub fn lose_one_of(&self, loses: u64) {
        self.state.lock().loses = loses;
    }

    /// Refuses to make objects whose names begin so, and to give them, until the next call.
    pub fn refuse(&self, names: Option<&str>) {
        self.state.lock().refused = names.map(str::to_owned);
    }

    /// Makes no object that all objects would take more than this with, bytes.
    pub fn limit(&self, most: Option<usize>) {
        self.state.lock().limit = most;
    }

    /// How long all objects are together, bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.state.lock().size()
    }

    /// Damages the next replies about objects whose names begin so, and no others; how many were still to be.
    pub fn damage_replies(&self, names: &str, replies: u64) -> u64 {
        std::mem::replace(&mut self.state.lock().damaged, (names.to_owned(), replies)).1
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

    fn check_refused(&self, key: &str) -> io::Result<()> {
        let is_refused = self.state.lock().refused.as_deref().is_some_and(|names| key.starts_with(names));
        if is_refused { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
    }

    fn check_room(&self, key: &str, body: &[u8]) -> io::Result<()> {
        let state = self.state.lock();
        let before = state.objects.get(key).map_or(0, Vec::len);
        let is_full = state.limit.is_some_and(|most| state.size() - before + body.len() > most);
        if is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn request<T>(
        &self,
        counter: impl FnOnce(&mut Requests) -> &mut u64,
        carry_out: impl FnOnce(&mut Memory) -> T,
    ) -> io::Result<T> {
        let lost = || io::Error::from(io::ErrorKind::TimedOut);
        let mut state = self.state.lock();
        *counter(&mut state.requests) += 1;
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

fn tag_of(body: &[u8]) -> ObjectTag {
    ObjectTag { e_tag: Some(format!("{:016x}", xxhash_rust::xxh3::xxh3_64(body))), version: None }
}

impl Bucket for MemoryBucket {
    fn name(&self) -> &str {
        "memory"
    }

    fn parallel(&self) -> usize {
        self.parallel
    }

    fn requests(&self) -> Requests {
        self.state.lock().requests
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.request(|of| &mut of.puts, |state| drop(state.objects.insert(key.to_owned(), body.to_vec())))
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        self.check_refused(key)?;
        self.check_room(key, body)?;
        self.request(
            |of| &mut of.puts,
            |state| {
                if state.objects.contains_key(key) {
                    return Put::Exists;
                }
                // A store that has to choose between two who make it at once may refuse both.
                if state.loses_one(4) {
                    return Put::Exists;
                }
                state.objects.insert(key.to_owned(), body.to_vec());
                Put::Made
            },
        )
    }

    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        Ok(self.get(key, None)?.map(|body| {
            let tag = tag_of(&body);
            (body, tag)
        }))
    }

    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        self.request(
            |of| &mut of.puts,
            |state| match state.objects.get_mut(key) {
                Some(there) if tag_of(there) == *tag => {
                    *there = body.to_vec();
                    true
                }
                // The reply to an earlier request may have been lost.
                Some(there) => there == body,
                None => false,
            },
        )
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        self.check_refused(key)?;
        self.request(
            |of| &mut of.gets,
            |state| {
                let body = state.objects.get(key)?;
                let Range { start, end } = range.unwrap_or(0..longest_object(key));
                let (start, end) = (start.min(body.len() as u64) as usize, end.min(body.len() as u64) as usize);
                let mut reply = body.get(start..end.max(start)).unwrap_or_default().to_vec();
                let (names, replies) = &mut state.damaged;
                if *replies > 0
                    && key.starts_with(names.as_str())
                    && let Some(byte) = reply.last_mut()
                {
                    *replies -= 1;
                    *byte ^= 1;
                }
                Some(reply)
            },
        )
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        let fits = |key: &&String| key.starts_with(prefix) && key.as_str() > after;
        self.request(|of| &mut of.lists, |state| state.objects.keys().filter(fits).cloned().collect())
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.request(|of| &mut of.deletes, |state| drop(state.objects.remove(key)))
    }
}
