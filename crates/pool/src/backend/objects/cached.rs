//! A bucket of which parts are kept on this machine: each is fetched once, by whoever wants it first, and
//! what will be read soon is fetched ahead.
//!
//! Callers: whoever opens a pool in a bucket that is far away. Only segments are kept: their names are
//! never used again, and what is added to one leaves what it had.
//!
//! Invariants:
//! - A part that is being fetched is not fetched by another thread; whoever wants it waits.
//! - What is put goes to the bucket first: what is kept is nobody's only copy.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Condvar, Mutex};

use super::bucket::{Bucket, Put, Requests, Silence};
use super::parts::{PART, Parts, name};
use crate::workers::Workers;

/// The names of objects of which parts are kept begin so.
const KEPT: &str = "seg/";
/// Requests made ahead of readers at the same time.
const AHEAD: usize = 8;
/// Those that wait; what comes beyond is fetched when it is read.
const WAITING: usize = 256;
/// How much is fetched by one request where it is wanted now, parts.
const AT_ONCE: u64 = 8;
/// And ahead of readers, parts; such requests begin and end at multiples of it where they can. Each costs
/// the server and its price the same, whatever its length.
const AT_ONCE_AHEAD: u64 = 32;
/// So far ahead of a reader it is fetched at most, bytes: as much as that is in memory on its way.
const FURTHEST: u64 = AHEAD as u64 * AT_ONCE_AHEAD * PART;
/// But not more than one of so many of what can be kept: it must still be here when it is read.
const SHARE: u64 = 8;

/// How a cache was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheFigures {
    /// Parts that were here when they were wanted.
    pub hits: u64,
    /// Parts that had to be fetched.
    pub misses: u64,
    /// Parts that could not be written here.
    pub failed: u64,
    /// What is here now, at most, bytes.
    pub bytes: u64,
    /// The limit, bytes.
    pub limit: u64,
}

/// A bucket, and what is kept of it.
pub struct Cached {
    far: Arc<Far>,
    ahead: Workers<Ahead>,
}

struct Far {
    bucket: Arc<dyn Bucket>,
    parts: Parts,
    /// Parts that are on their way.
    coming: Mutex<HashSet<u128>>,
    came: Condvar,
    hits: AtomicU64,
    misses: AtomicU64,
    failed: AtomicU64,
}

struct Ahead {
    far: Arc<Far>,
    key: String,
    parts: Range<u64>,
}

impl Ahead {
    fn run(self) {
        // Who reads it meets the error.
        drop(self.far.fetch_missing(&self.key, self.parts));
    }
}

/// The parts that hold a range.
fn parts_of(range: &Range<u64>) -> Range<u64> {
    range.start / PART..range.end.div_ceil(PART)
}

impl Cached {
    /// A bucket of which parts are kept here.
    #[must_use]
    pub fn new(bucket: Arc<dyn Bucket>, parts: Parts) -> Self {
        let far = Far {
            bucket,
            parts,
            coming: Mutex::default(),
            came: Condvar::new(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        Self { far: Arc::new(far), ahead: Workers::start("pool-fetch", AHEAD, WAITING, Ahead::run) }
    }

    /// How the cache was used so far.
    #[must_use]
    pub fn figures(&self) -> CacheFigures {
        let far = &*self.far;
        CacheFigures {
            hits: far.hits.load(Relaxed),
            misses: far.misses.load(Relaxed),
            failed: far.failed.load(Relaxed),
            bytes: far.parts.count() * PART,
            limit: far.parts.most() * PART,
        }
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        // Nobody will read what no thread has begun to fetch.
        while self.ahead.take().is_some() {}
    }
}

impl Far {
    /// A range of an object.
    fn get(&self, key: &str, range: Range<u64>) -> io::Result<Option<Vec<u8>>> {
        let mut found = Vec::with_capacity((range.end.saturating_sub(range.start)) as usize);
        let wanted = parts_of(&range);
        let mut part = wanted.start;
        while part < wanted.end {
            let within =
                |part: u64| range.start.max(part * PART) - part * PART..range.end.min((part + 1) * PART) - part * PART;
            if self.parts.read(name(key, part), within(part), &mut found) {
                self.hits.fetch_add(1, Relaxed);
                part += 1;
                continue;
            }
            let Some(claimed) = self.claim(key, part..wanted.end, range.end, AT_ONCE) else {
                // It came meanwhile.
                continue;
            };
            let Some(fetched) = self.fetch(key, &claimed)? else { return Ok(None) };
            // As much as there is of what is wanted.
            let first = claimed.start * PART;
            let until = range.end.min(claimed.end * PART);
            let from = (range.start.max(first) - first) as usize;
            let to = ((until - first) as usize).min(fetched.len());
            found.extend_from_slice(fetched.get(from..to).unwrap_or_default());
            if (fetched.len() as u64) < until - first {
                break;
            }
            part = claimed.end;
        }
        Ok(Some(found))
    }

    /// Takes parts upon itself that are not here, so many at most, beginning with the first one; where
    /// somebody else fetches that, waits for it and takes none.
    fn claim(&self, key: &str, parts: Range<u64>, end: u64, most: u64) -> Option<Range<u64>> {
        let mut coming = self.coming.lock();
        if coming.contains(&name(key, parts.start)) {
            self.came.wait(&mut coming);
            return None;
        }
        let until = |part: u64| end.min((part + 1) * PART) - part * PART;
        let mut claimed = parts.start..parts.start;
        for part in parts.clone().take(most as usize) {
            let name = name(key, part);
            if coming.contains(&name) || self.parts.has(name, until(part) - 1) {
                break;
            }
            claimed.end = part + 1;
        }
        if claimed.is_empty() {
            return None;
        }
        coming.extend(claimed.clone().map(|part| name(key, part)));
        Some(claimed)
    }

    /// Fetches parts that were claimed, and keeps them.
    fn fetch(&self, key: &str, parts: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
        let fetched = self.bucket.get(key, Some(parts.start * PART..parts.end * PART));
        self.misses.fetch_add(parts.end - parts.start, Relaxed);
        if let Ok(Some(bytes)) = &fetched {
            self.keep(key, parts.start, bytes);
        }
        let mut coming = self.coming.lock();
        parts.clone().map(|part| name(key, part)).for_each(|name| _ = coming.remove(&name));
        self.came.notify_all();
        fetched
    }

    /// Keeps bytes of an object that begin with this part.
    fn keep(&self, key: &str, first: u64, bytes: &[u8]) {
        for (part, content) in (first..).zip(bytes.chunks(PART as usize)) {
            if !self.parts.keep(name(key, part), content) {
                self.failed.fetch_add(1, Relaxed);
            }
        }
    }

    /// Corrects those parts that are kept already and are something else.
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

    /// Fetches what is not here and nobody fetches.
    fn fetch_missing(&self, key: &str, parts: Range<u64>) -> io::Result<()> {
        for part in parts.clone() {
            let is_here = self.parts.has(name(key, part), 0) || self.coming.lock().contains(&name(key, part));
            if is_here {
                continue;
            }
            if let Some(claimed) = self.claim(key, part..parts.end, parts.end * PART, AT_ONCE_AHEAD) {
                self.fetch(key, &claimed)?;
            }
        }
        Ok(())
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

    fn keeps_parts(&self) -> bool {
        true
    }

    fn expect(&self, key: &str, range: Range<u64>) {
        if !key.starts_with(KEPT) || range.is_empty() {
            return;
        }
        let Range { mut start, end } = parts_of(&range);
        while start < end {
            let parts = start..end.min((start / AT_ONCE_AHEAD + 1) * AT_ONCE_AHEAD);
            start = parts.end;
            let job = Ahead { far: Arc::clone(&self.far), key: key.to_owned(), parts };
            if self.ahead.offer(job).is_err() {
                break;
            }
        }
    }

    fn ahead(&self) -> u64 {
        FURTHEST.min(self.far.parts.most() * PART / SHARE)
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.far.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.far.bucket.delete(key)
    }
}
