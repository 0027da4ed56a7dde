//! Local cache of a bucket: each part of an object is fetched once, by the first reader, and parts that will be read
//! soon are fetched ahead.
//!
//! Callers: the code that opens a pool in a remote bucket. Only segments are cached: their names are never reused,
//! and an append to a segment keeps its former content.
//!
//! Invariants:
//! - A part that a thread has claimed ([`Claim`]) is not fetched by another one; readers wait until it has
//!   arrived, which may be long before the reply is complete.
//! - Writes go to the bucket first: the cache is never the only copy.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Condvar, Mutex};

use super::bucket::{Bucket, ObjectTag, Put, Requests, Silence};
use super::parts::{PART, Parts, name};
use crate::frames::Reach;
use crate::workers::Workers;

/// Prefix of the names of cached objects.
const KEPT: &str = "seg/";
/// Number of readahead requests in parallel.
const AHEAD: usize = 8;
/// Number of queued readahead requests; parts beyond that are fetched when they are read.
const WAITING: usize = 256;
/// Number of parts in one request of a reader.
const AT_ONCE: u64 = 8;
/// Number of parts in one readahead request, aligned to this where possible. The latency and the price of a request
/// do not depend on its length.
const AT_ONCE_AHEAD: u64 = 32;
/// Readahead at the start of a file, bytes: a large first read is mostly followed by more, and each step costs the
/// latency of a request.
const BEGINS: u64 = 8 << 20;
/// Maximum readahead, bytes: as much as can be in flight.
const FURTHEST: u64 = AHEAD as u64 * AT_ONCE_AHEAD * PART;
/// Maximum share of the cache for readahead, as its divisor: a part must still be cached when it is read.
const SHARE: u64 = 8;

/// Statistics of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheFigures {
    /// Parts that were cached when they were read.
    pub hits: u64,
    /// Parts that had to be fetched.
    pub misses: u64,
    /// Parts that could not be written to the cache.
    pub failed: u64,
    /// Size of the cached parts, rounded up, bytes.
    pub bytes: u64,
    /// Size limit, bytes.
    pub limit: u64,
}

/// A bucket with a local cache.
pub struct Cached {
    far: Arc<Far>,
    ahead: Workers<Ahead>,
}

struct Far {
    bucket: Arc<dyn Bucket>,
    parts: Parts,
    /// Parts that are being fetched.
    coming: Mutex<HashSet<u128>>,
    came: Condvar,
    /// Number of failed readahead requests.
    in_vain: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    failed: AtomicU64,
}

/// A readahead request.
struct Ahead {
    claim: Claim,
    /// [`Far::in_vain`] when it was queued.
    in_vain: u64,
}

impl Ahead {
    fn run(self) {
        let far = Arc::clone(&self.claim.far);
        // After a failure the queued requests are dropped: a reader meets the error at once, and does not wait for
        // all of them.
        if far.in_vain.load(Relaxed) == self.in_vain && self.claim.fetch(&mut |_, _| {}).is_err() {
            far.in_vain.fetch_add(1, Relaxed);
        }
    }
}

/// Parts of an object that a thread is fetching. Dropping it releases waiting readers in any case.
struct Claim {
    far: Arc<Far>,
    key: String,
    /// The parts that have not arrived yet.
    parts: Range<u64>,
}

impl Claim {
    /// Fetches the parts, and caches each as soon as it has arrived; `told` gets them in order. Returns whether the
    /// object exists.
    fn fetch(mut self, told: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let (far, key) = (Arc::clone(&self.far), self.key.clone());
        let range = self.parts.start * PART..self.parts.end * PART;
        far.misses.fetch_add(self.parts.end - self.parts.start, Relaxed);
        let (mut came, mut begun) = (range.start, Vec::new());
        let found = far.bucket.get_by_pieces(&key, range, &mut |offset, piece| {
            // After a retry the pieces start again.
            let mut piece = piece.get(came.saturating_sub(offset) as usize..).unwrap_or_default();
            came += piece.len() as u64;
            while !piece.is_empty() {
                let (now, later) = piece.split_at(piece.len().min(PART as usize - begun.len()));
                piece = later;
                if now.len() as u64 == PART {
                    self.arrived(now, told);
                    continue;
                }
                begun.extend_from_slice(now);
                if begun.len() as u64 == PART {
                    self.arrived(&begun, told);
                    begun.clear();
                }
            }
        })?;
        if !begun.is_empty() {
            // The last, short part of the object.
            self.arrived(&begun, told);
        }
        Ok(found)
    }

    /// Caches the next part and notifies its readers.
    fn arrived(&mut self, content: &[u8], told: &mut dyn FnMut(u64, &[u8])) {
        let part = self.parts.start;
        self.far.keep(&self.key, part, content);
        self.parts.start = part + 1;
        self.far.coming.lock().remove(&name(&self.key, part));
        self.far.came.notify_all();
        told(part, content);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut coming = self.far.coming.lock();
        self.parts.clone().for_each(|part| _ = coming.remove(&name(&self.key, part)));
        drop(coming);
        self.far.came.notify_all();
    }
}

/// Numbers of the parts that hold a range.
fn parts_of(range: &Range<u64>) -> Range<u64> {
    range.start / PART..range.end.div_ceil(PART)
}

impl Cached {
    /// A bucket with a local cache.
    #[must_use]
    pub fn new(bucket: Arc<dyn Bucket>, parts: Parts) -> Self {
        let far = Far {
            bucket,
            parts,
            coming: Mutex::default(),
            came: Condvar::new(),
            in_vain: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        Self { far: Arc::new(far), ahead: Workers::start("pool-fetch", AHEAD, WAITING, Ahead::run) }
    }

    /// Statistics of the cache so far.
    #[must_use]
    pub fn figures(&self) -> CacheFigures {
        let far = &*self.far;
        CacheFigures {
            hits: far.hits.load(Relaxed),
            misses: far.misses.load(Relaxed),
            failed: far.failed.load(Relaxed),
            bytes: far.parts.taken(),
            limit: far.parts.most() * PART,
        }
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        // Queued readahead has no reader any more.
        while self.ahead.take().is_some() {}
    }
}

impl Far {
    /// Reads a range of an object from the cache, and fetches the missing parts.
    fn get(self: &Arc<Self>, key: &str, range: Range<u64>) -> io::Result<Option<Vec<u8>>> {
        let mut found = Vec::with_capacity((range.end.saturating_sub(range.start)) as usize);
        let wanted = parts_of(&range);
        let within =
            |part: u64| range.start.max(part * PART) - part * PART..range.end.min((part + 1) * PART) - part * PART;
        let mut part = wanted.start;
        while part < wanted.end {
            if self.parts.read(name(key, part), within(part), &mut found) {
                self.hits.fetch_add(1, Relaxed);
                part += 1;
                continue;
            }
            let Some(claim) = self.claim(key, part..wanted.end, range.end) else {
                // It arrived meanwhile.
                continue;
            };
            let end = claim.parts.end;
            let is_there = claim.fetch(&mut |part, content| {
                let Range { start, end } = within(part);
                // The existing bytes of the requested range.
                found.extend_from_slice(
                    content.get(start as usize..content.len().min(end as usize)).unwrap_or_default(),
                );
            })?;
            if !is_there {
                return Ok(None);
            }
            if (found.len() as u64) < range.end.min(end * PART) - range.start {
                break;
            }
            part = end;
        }
        Ok(Some(found))
    }

    /// Claims missing parts, beginning with the first one, for one request; where another thread fetches the first
    /// one, waits for it and returns `None`.
    fn claim(self: &Arc<Self>, key: &str, parts: Range<u64>, end: u64) -> Option<Claim> {
        let mut coming = self.coming.lock();
        if coming.contains(&name(key, parts.start)) {
            self.came.wait(&mut coming);
            return None;
        }
        let until = |part: u64| end.min((part + 1) * PART) - part * PART;
        let mut claimed = parts.start..parts.start;
        for part in parts.clone().take(AT_ONCE as usize) {
            let name = name(key, part);
            if coming.contains(&name) || self.parts.has(name, until(part) - 1) {
                break;
            }
            claimed.end = part + 1;
        }
        self.take(&mut coming, key, claimed)
    }

    /// Claims all parts that are neither cached nor being fetched, one claim for each request.
    fn claim_missing(self: &Arc<Self>, key: &str, parts: Range<u64>) -> Vec<Claim> {
        let mut coming = self.coming.lock();
        let (mut claims, mut run) = (Vec::new(), parts.start..parts.start);
        for part in parts {
            let name = name(key, part);
            let is_missing = !coming.contains(&name) && !self.parts.has(name, 0);
            if !is_missing || part.is_multiple_of(AT_ONCE_AHEAD) {
                claims.extend(self.take(&mut coming, key, run.start..part));
                run.start = part;
            }
            run.end = part + 1;
            if !is_missing {
                run.start = run.end;
            }
        }
        claims.extend(self.take(&mut coming, key, run));
        claims
    }

    fn take(self: &Arc<Self>, coming: &mut HashSet<u128>, key: &str, parts: Range<u64>) -> Option<Claim> {
        if parts.is_empty() {
            return None;
        }
        coming.extend(parts.clone().map(|part| name(key, part)));
        Some(Claim { far: Arc::clone(self), key: key.to_owned(), parts })
    }

    /// Caches the bytes of an object from this part on.
    fn keep(&self, key: &str, first: u64, bytes: &[u8]) {
        for (part, content) in (first..).zip(bytes.chunks(PART as usize)) {
            if !self.parts.keep(name(key, part), content) {
                self.failed.fetch_add(1, Relaxed);
            }
        }
    }

    /// Replaces cached parts that differ.
    fn correct(&self, key: &str, first: u64, bytes: &[u8]) {
        for (part, content) in (first..).zip(bytes.chunks(PART as usize)) {
            let (name, mut kept) = (name(key, part), Vec::new());
            if self.parts.has(name, 0)
                && !(self.parts.read(name, 0..content.len() as u64, &mut kept) && kept == content)
            {
                self.keep(key, part, content);
            }
        }
    }
}

impl Bucket for Cached {
    fn name(&self) -> &str {
        self.far.bucket.name()
    }

    fn attempts(&self) -> usize {
        self.far.bucket.attempts()
    }

    fn hurry(&self) {
        self.far.bucket.hurry();
    }

    fn take_time(&self) {
        self.far.bucket.take_time();
    }

    fn parallel(&self) -> usize {
        self.far.bucket.parallel()
    }

    fn requests(&self) -> Requests {
        self.far.bucket.requests()
    }

    fn silence(&self) -> Option<Silence> {
        self.far.bucket.silence()
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.far.bucket.put(key, body)?;
        if key.starts_with(KEPT) {
            self.far.keep(key, 0, body);
        }
        Ok(())
    }

    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        self.far.bucket.get_tagged(key)
    }

    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        let is_put = self.far.bucket.put_if(key, body, tag)?;
        if is_put && key.starts_with(KEPT) {
            self.far.keep(key, 0, body);
        }
        Ok(is_put)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let put = self.far.bucket.put_new(key, body)?;
        if put == Put::Made && key.starts_with(KEPT) {
            self.far.keep(key, 0, body);
        }
        Ok(put)
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        match range {
            Some(range) if key.starts_with(KEPT) => self.far.get(key, range),
            range => self.far.bucket.get(key, range),
        }
    }

    fn get_for_writing(&self, key: &str) -> io::Result<Option<Vec<u8>>> {
        self.far.bucket.get_for_writing(key)
    }

    fn get_anew(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        if !key.starts_with(KEPT) {
            return self.far.bucket.get(key, range);
        }
        let parts = range.as_ref().map(parts_of);
        let first = parts.as_ref().map_or(0, |parts| parts.start * PART);
        let Some(fetched) = self.far.bucket.get(key, parts.map(|parts| first..parts.end * PART))? else {
            return Ok(None);
        };
        self.far.correct(key, first / PART, &fetched);
        let Some(range) = range else { return Ok(Some(fetched)) };
        let at = |offset: u64| ((offset - first) as usize).min(fetched.len());
        Ok(Some(fetched.get(at(range.start)..at(range.end)).unwrap_or_default().to_vec()))
    }

    fn expect(&self, key: &str, range: Range<u64>) {
        if !key.starts_with(KEPT) || range.is_empty() {
            return;
        }
        let in_vain = self.far.in_vain.load(Relaxed);
        for claim in self.far.claim_missing(key, parts_of(&range)) {
            // Requests that do not fit into the queue are fetched when they are read.
            drop(self.ahead.offer(Ahead { claim, in_vain }));
        }
    }

    fn ahead(&self) -> Reach {
        let most = FURTHEST.min(self.far.parts.most() * PART / SHARE);
        Reach { least: 0, begins: BEGINS.min(most), most, block: AT_ONCE_AHEAD * PART }
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.far.bucket.list(prefix, after)
    }

    fn list_pages(
        &self,
        prefix: &str,
        after: &str,
        page: &mut dyn FnMut(Vec<String>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.far.bucket.list_pages(prefix, after, page)
    }

    fn delete_all(&self, keys: &[String]) -> io::Result<()> {
        self.far.bucket.delete_all(keys)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.far.bucket.delete(key)
    }
}
