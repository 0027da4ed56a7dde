//! Interface to an object store, and an implementation in memory that loses requests and replies.
//!
//! Callers: [`Objects`](super::Objects), and tests. Invariant of every bucket: an object is complete or does not
//! exist, and a client that got a reply sees its effect from then on.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::Random;
use crate::frames::Reach;

/// Maximum length of the pool's own objects with this name, bytes. Other programs may put longer ones: no more is
/// read.
#[must_use]
pub fn longest_object(key: &str) -> u64 {
    match key.split('/').next() {
        Some("pool" | "roots" | "epochs" | "probe") => 1 << 20,
        // A segment, or a block of the log with the longest log content.
        _ => (64 << 20) + (64 << 10),
    }
}

/// Result of a conditional creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The object was created.
    Made,
    /// An object of this name exists, or another client is creating it at this moment.
    Exists,
}

/// Version of an object's content that was read, for conditional replacement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectTag {
    /// The object's entity tag (ETag).
    pub e_tag: Option<String>,
    /// The object's version, where the store's conditions use versions.
    pub version: Option<String>,
}

/// Statistics of the requests to a bucket. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Objects created or replaced.
    pub puts: u64,
    /// Reads of objects or ranges.
    pub gets: u64,
    /// Pages of names listed.
    pub lists: u64,
    /// Objects deleted.
    pub deletes: u64,
    /// Retries among all these: there was no reply, or a temporary refusal.
    pub again: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

/// State of a store that gives no usable answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silence {
    /// How long the store has not answered.
    pub lasts: Duration,
    /// The last error, for messages.
    pub why: String,
}

/// Client of a bucket: objects by name. Each request waits for its reply; after an error it is unknown whether the
/// request was carried out.
pub trait Bucket: Send + Sync {
    /// The bucket's name for messages.
    fn name(&self) -> &str;

    /// Number of attempts for a failing request: one where the bucket itself retries.
    fn attempts(&self) -> usize {
        6
    }

    /// Shortens timeouts during an export: requests fail soon where there is no reply, including those in progress.
    fn hurry(&self) {}

    /// Restores the usual timeouts after [`Self::hurry`].
    fn take_time(&self) {}

    /// Number of requests that are worth making in parallel.
    fn parallel(&self) -> usize {
        1
    }

    /// Statistics of the requests so far.
    fn requests(&self) -> Requests {
        Requests::default()
    }

    /// How long the store has not answered a pending request; `None` where it answers.
    fn silence(&self) -> Option<Silence> {
        None
    }

    /// Announces that a range of an object will be read soon (readahead).
    fn expect(&self, key: &str, range: Range<u64>) {
        let _ = (key, range);
    }

    /// How far readahead is worthwhile.
    fn ahead(&self) -> Reach {
        Reach::NONE
    }

    /// Creates or replaces an object.
    ///
    /// # Errors
    /// No reply, or a reply that reports a failure; the same for all methods.
    fn put(&self, key: &str, body: &[u8]) -> io::Result<()>;

    /// Reads a whole object, bypassing the cache, with the tag that [`Self::put_if`] needs; `None` where it does not
    /// exist. At most [`longest_object`] bytes.
    ///
    /// # Errors
    /// As [`Self::put`]; [`io::ErrorKind::Unsupported`] for a bucket without content versions.
    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        let _ = key;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Replaces an object if its content is still the one that was read; returns whether it was.
    ///
    /// # Errors
    /// As [`Self::get_tagged`].
    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        let _ = (key, body, tag);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Creates an object if none of this name exists.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put>;

    /// Reads an object, or the existing part of a range; `None` where it does not exist. Without a range, at most
    /// [`longest_object`] bytes.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>>;

    /// Reads a whole object that a writer has to know before its next step: where writes wait for a store that is
    /// away, this waits as well.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get_for_writing(&self, key: &str) -> io::Result<Option<Vec<u8>>> {
        self.get(key, None)
    }

    /// Streams a range of an object: pieces in order, each with its offset in the object. After a retry the pieces
    /// start again. Returns whether the object exists.
    ///
    /// # Errors
    /// As [`Self::put`]; the pieces before the error are right.
    fn get_by_pieces(&self, key: &str, range: Range<u64>, piece: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let found = self.get(key, Some(range.clone()))?;
        found.iter().for_each(|found| piece(range.start, found));
        Ok(found.is_some())
    }

    /// Reads as [`Self::get`], bypassing the cache, and corrects the cache.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get_anew(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        self.get(key, range)
    }

    /// Removes what processes that are gone have left of objects that never got their names.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn remove_unfinished(&self) -> io::Result<()> {
        Ok(())
    }

    /// Lists the names with this prefix that come after another name, in byte order. The prefix ends with a slash.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>>;

    /// Lists as [`Self::list`], page by page, so that a list of any length needs the memory of one page. A page may
    /// be repeated after a lost reply, and names are in the store's order.
    ///
    /// # Errors
    /// As [`Self::put`]; errors of `page`.
    fn list_pages(
        &self,
        prefix: &str,
        after: &str,
        page: &mut dyn FnMut(Vec<String>) -> io::Result<()>,
    ) -> io::Result<()> {
        page(self.list(prefix, after)?)
    }

    /// Deletes objects, many by one request where the store supports that.
    ///
    /// # Errors
    /// As [`Self::put`]: some of them may be deleted.
    fn delete_all(&self, keys: &[String]) -> io::Result<()> {
        keys.iter().try_for_each(|key| self.delete(key))
    }

    /// Deletes an object; succeeds if it does not exist.
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
    /// One of this many requests gets no reply; 0: none.
    loses: u64,
    /// Number of requests that are still carried out.
    allowed: Option<u64>,
    /// Prefix of names whose creation is refused.
    refused: Option<String>,
    /// Limit of all objects, bytes.
    limit: Option<usize>,
    /// Prefix of names, and the number of replies about them that are damaged.
    damaged: (String, u64),
    requests: Requests,
}

impl Memory {
    fn size(&self) -> usize {
        self.objects.values().map(Vec::len).sum()
    }

    /// Whether a failure occurs that is `times` as rare as a lost request.
    fn loses_one(&mut self, times: u64) -> bool {
        self.loses > 0 && self.random.below(self.loses * times) == 0
    }
}

impl MemoryBucket {
    /// An empty bucket that loses one of this many requests or replies (0: none).
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

    /// Allows this many requests in parallel: which of them are lost is no longer deterministic.
    #[must_use]
    pub fn in_parallel(self, parallel: usize) -> Self {
        Self { parallel, ..self }
    }

    /// Carries out this many more requests and fails all later ones, like a lost network. `None` ends that.
    pub fn fail_after(&self, requests: Option<u64>) {
        self.state.lock().allowed = requests;
    }

    /// Loses one of this many requests or replies from now on (0: none).
    pub fn lose_one_of(&self, loses: u64) {
        self.state.lock().loses = loses;
    }

    /// Refuses to create or return objects with this prefix, until the next call.
    pub fn refuse(&self, names: Option<&str>) {
        self.state.lock().refused = names.map(str::to_owned);
    }

    /// Refuses objects that would raise the total size above this, bytes.
    pub fn limit(&self, most: Option<usize>) {
        self.state.lock().limit = most;
    }

    /// Total size of all objects, bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.state.lock().size()
    }

    /// Damages this many replies about objects with this prefix; returns how many of the former setting were left.
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
        self.check_room(key, body)?;
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
                // A store that has to choose between two concurrent creators may refuse both.
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
