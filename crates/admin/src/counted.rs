//! Counts the requests to a device, or a bucket: for `pool iostat`, and for the error columns of `pool status`.
//!
//! A request runs in the thread of its caller: there is no queue here, so a request's time is the
//! device's, and the number of active requests is the number of threads in one.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

use nacre_pool::backend::{Bucket, ObjectTag, Put, Requests, Silence};
use nacre_pool::device::Device;
use serde::{Deserialize, Serialize};

use crate::clock::{moment, now};
use crate::failing::Failing;
use crate::watch::Watch;

/// How often the progress of a long listing is shown, seconds.
const NOTED_EACH: u64 = 5;

/// Counters since the import: sums of requests, bytes and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests to read.
    pub reads: u64,
    /// Requests to write.
    pub writes: u64,
    /// Requests to make durable.
    pub syncs: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time spent reading, in all threads.
    pub read_time: u64,
    /// Time spent writing.
    pub write_time: u64,
    /// Time spent making durable.
    pub sync_time: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes, syncs and discards that failed.
    pub write_errors: u64,
    /// Frames whose checksum did not match.
    pub checksum_errors: u64,
}

/// Kind of request to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceRequest {
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Making durable.
    Sync,
    /// Giving room back.
    Trim,
}

impl DeviceRequest {
    /// All of them, in the order of [`Spread`].
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Sync, Self::Trim];
}

/// Number of requests by size or time: bucket `n` counts those from 2^n to 2^(n+1) - 1.
pub type Histogram = Vec<u64>;

/// Distribution of requests since the import, and number of active ones; by [`DeviceRequest::ALL`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spread {
    /// By duration, nanoseconds: up to 2^37.
    pub times: [Histogram; 4],
    /// By size, bytes: up to 2^27; empty for syncs.
    pub sizes: [Histogram; 4],
    /// Number of active requests.
    pub active: [u64; 4],
}

/// Number of buckets of a histogram of times: longer times count in the last one.
const TIMES: usize = 38;
/// Number of buckets of a histogram of sizes.
const SIZES: usize = 28;

/// Counters of one kind of request.
#[derive(Debug)]
struct Kept {
    times: [AtomicU64; TIMES],
    sizes: [AtomicU64; SIZES],
    active: AtomicU64,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            times: [const { AtomicU64::new(0) }; TIMES],
            sizes: [const { AtomicU64::new(0) }; SIZES],
            active: AtomicU64::new(0),
        }
    }
}

/// Counts a number in its bucket.
fn place(counters: &[AtomicU64], number: u64) {
    let at = (number.max(1).ilog2() as usize).min(counters.len().saturating_sub(1));
    if let Some(counter) = counters.get(at) {
        add(counter, 1);
    }
}

#[derive(Debug, Default)]
struct Counters {
    spread: [Kept; 4],
    reads: AtomicU64,
    writes: AtomicU64,
    syncs: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    read_time: AtomicU64,
    write_time: AtomicU64,
    sync_time: AtomicU64,
    read_errors: AtomicU64,
    write_errors: AtomicU64,
    checksum_errors: AtomicU64,
}

/// A device and its counters.
pub struct Counted {
    device: Arc<dyn Device>,
    tally: Tally,
}

/// A bucket and its counters.
pub struct CountedBucket {
    bucket: Arc<dyn Bucket>,
    tally: Tally,
    /// Whether the last request failed.
    away: AtomicBool,
}

/// Counters and state of one device or bucket of a pool.
#[derive(Debug)]
pub struct Tally {
    name: String,
    counters: Counters,
    failing: Arc<Failing>,
    watch: Arc<Watch>,
    /// The worst reported state: an index into [`STATES`].
    state: AtomicU8,
}

/// The states of a device, in the words of ZFS: DEGRADED: reads fail or content is damaged;
/// FAULTED: writes fail; REMOVED: it is not there any more.
const STATES: [&str; 4] = ["ONLINE", "DEGRADED", "FAULTED", "REMOVED"];
const ONLINE: u8 = 0;
const DEGRADED: u8 = 1;
const FAULTED: u8 = 2;
const REMOVED: u8 = 3;

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counted").field("tally", &self.tally).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for CountedBucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CountedBucket").field("tally", &self.tally).finish_non_exhaustive()
    }
}

impl std::ops::Deref for Counted {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        &self.tally
    }
}

impl std::ops::Deref for CountedBucket {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        &self.tally
    }
}

fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Counted {
    /// Wraps a device with zeroed counters.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, failing: Arc<Failing>, watch: Arc<Watch>) -> Self {
        let tally = Tally::new(device.name(), failing, watch);
        Self { device, tally }
    }
}

impl CountedBucket {
    /// Wraps a bucket with zeroed counters.
    #[must_use]
    pub fn new(bucket: Arc<dyn Bucket>, failing: Arc<Failing>, watch: Arc<Watch>) -> Self {
        let tally = Tally::new(bucket.name(), failing, watch);
        Self { bucket, tally, away: AtomicBool::new(false) }
    }

    /// Makes a request to the bucket. Each request takes its time to fail: while the pool is being
    /// released, no further one is made after a failure.
    fn ask<T>(&self, request: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.away.load(Ordering::Relaxed) && self.tally.failing.is_given_up() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the pool is being let go without its store"));
        }
        let reply = request();
        self.away.store(reply.is_err(), Ordering::Relaxed);
        reply
    }
}

impl Tally {
    fn new(name: &str, failing: Arc<Failing>, watch: Arc<Watch>) -> Self {
        let (name, state) = (name.to_owned(), AtomicU8::new(ONLINE));
        Self { name, counters: Counters::default(), failing, watch, state }
    }

    /// Name of the device or bucket.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Health state by its errors so far, in the words of ZFS.
    #[must_use]
    pub fn state(&self) -> &'static str {
        STATES.get(usize::from(self.state.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }

    /// Raises the state to a worse one, and reports that once, until its errors are cleared.
    fn is_worse(&self, state: u8, why: &str) {
        if self.state.fetch_max(state, Ordering::Relaxed) >= state {
            return;
        }
        let (device, word) = (self.name.as_str(), self.state());
        tracing::error!(device, state = word, why, "a device fails");
        let details = [("vdev_path", device), ("vdev_state", word), ("reason", why)];
        let details = details.map(|(name, value)| (name.to_owned(), value.to_owned()));
        self.watch.note("resource.fs.zfs.statechange", details.to_vec());
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        Counts {
            reads: of(&counters.reads),
            writes: of(&counters.writes),
            syncs: of(&counters.syncs),
            read_bytes: of(&counters.read_bytes),
            written_bytes: of(&counters.written_bytes),
            read_time: of(&counters.read_time),
            write_time: of(&counters.write_time),
            sync_time: of(&counters.sync_time),
            read_errors: of(&counters.read_errors),
            write_errors: of(&counters.write_errors),
            checksum_errors: of(&counters.checksum_errors),
        }
    }

    /// Returns the distribution of requests.
    #[must_use]
    pub fn spread(&self) -> Spread {
        let of = |counters: &[AtomicU64]| counters.iter().map(|counter| counter.load(Ordering::Relaxed)).collect();
        let [read, write, sync, trim] = &self.counters.spread;
        let all = [read, write, sync, trim];
        Spread {
            times: all.map(|kept| of(&kept.times)),
            sizes: all.map(|kept| of(&kept.sizes)),
            active: all.map(|kept| kept.active.load(Ordering::Relaxed)),
        }
    }

    /// Runs a request to the device, and counts its time and size; returns its result and the time, nanoseconds.
    fn timed<R>(&self, request: DeviceRequest, length: u64, work: impl FnOnce() -> R) -> (R, u64) {
        let [read, write, sync, trim] = &self.counters.spread;
        let kept = match request {
            DeviceRequest::Read => read,
            DeviceRequest::Write => write,
            DeviceRequest::Sync => sync,
            DeviceRequest::Trim => trim,
        };
        add(&kept.active, 1);
        let began = moment();
        let done = work();
        let time = nanoseconds(began);
        kept.active.fetch_sub(1, Ordering::Relaxed);
        place(&kept.times, time);
        if length > 0 {
            place(&kept.sizes, length);
        }
        (done, time)
    }

    fn reading(&self, length: u64, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let (read, time) = self.timed(DeviceRequest::Read, length, work);
        add(&self.counters.reads, 1);
        add(&self.counters.read_bytes, length);
        add(&self.counters.read_time, time);
        self.failing(&self.counters.read_errors, DEGRADED, read)
    }

    fn writing(&self, length: u64, work: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let (written, time) = self.timed(DeviceRequest::Write, length, || {
            self.failing.write(&self.name, || self.failing(&self.counters.write_errors, FAULTED, work()))
        });
        add(&self.counters.writes, 1);
        add(&self.counters.written_bytes, length);
        add(&self.counters.write_time, time);
        written
    }

    /// Counts a damaged frame on it.
    pub fn found_damage(&self) {
        add(&self.counters.checksum_errors, 1);
        self.is_worse(DEGRADED, "it holds something else than was written");
    }

    /// Forgets the errors (`pool clear`).
    pub fn clear_errors(&self) {
        for counter in [&self.counters.read_errors, &self.counters.write_errors, &self.counters.checksum_errors] {
            counter.store(0, Ordering::Relaxed);
        }
        self.state.store(ONLINE, Ordering::Relaxed);
    }

    fn failing<T>(&self, errors: &AtomicU64, state: u8, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            add(errors, 1);
            self.is_worse(state, &error.to_string());
        })
    }
}

impl Device for Counted {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn length(&self) -> u64 {
        self.device.length()
    }

    fn descriptor(&self) -> Option<i32> {
        self.device.descriptor()
    }

    fn look_again(&self) -> io::Result<u64> {
        self.device.look_again()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reading(buffer.len() as u64, || self.device.read_at(buffer, offset))
    }

    fn read_past_caches(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reading(buffer.len() as u64, || self.device.read_past_caches(buffer, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.writing(bytes.len() as u64, || self.device.write_at(bytes, offset))
    }

    fn write_stream(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.writing(bytes.len() as u64, || self.device.write_stream(bytes, offset))
    }

    fn sync(&self) -> io::Result<()> {
        let (synced, time) = self.timed(DeviceRequest::Sync, 0, || self.device.sync());
        add(&self.counters.syncs, 1);
        add(&self.counters.sync_time, time);
        if self.device.deleted().is_some() {
            self.is_worse(REMOVED, "the file was deleted: what is in the pool is lost when it is let go (pool status)");
        }
        self.failing(&self.counters.write_errors, FAULTED, synced)
            .inspect_err(|error| self.tally.failing.failed(self.device.name(), error))
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let (told, _) = self.timed(DeviceRequest::Trim, length, || self.device.discard(offset, length));
        // A discard that fails loses nothing.
        self.failing(&self.counters.write_errors, ONLINE, told)
    }

    fn can_discard(&self) -> bool {
        self.device.can_discard()
    }

    fn deleted(&self) -> Option<PathBuf> {
        self.device.deleted()
    }

    fn is_missing(&self) -> bool {
        self.device.is_missing()
    }

    fn is_anybodys(&self) -> bool {
        self.device.is_anybodys()
    }

    fn expect(&self, offset: u64, length: u64) {
        self.device.expect(offset, length);
    }

    fn begin_sync(&self, offset: u64, length: u64) {
        self.device.begin_sync(offset, length);
    }
}

impl Bucket for CountedBucket {
    fn name(&self) -> &str {
        self.bucket.name()
    }

    fn attempts(&self) -> usize {
        self.bucket.attempts()
    }

    fn hurry(&self) {
        self.bucket.hurry();
    }

    fn take_time(&self) {
        self.bucket.take_time();
    }

    fn parallel(&self) -> usize {
        self.bucket.parallel()
    }

    fn requests(&self) -> Requests {
        self.bucket.requests()
    }

    fn silence(&self) -> Option<Silence> {
        self.bucket.silence()
    }

    fn expect(&self, key: &str, range: Range<u64>) {
        self.bucket.expect(key, range);
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.writing(body.len() as u64, || self.ask(|| self.bucket.put(key, body)))
    }

    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        let mut found = None;
        let get = || self.ask(|| self.bucket.get_tagged(key));
        self.reading(0, || self.failing.read(&self.name, get).map(|got| found = got))?;
        Ok(found)
    }

    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        // Not retried by `failmode`: a repair that fails now is repeated later.
        let (put, _) =
            self.timed(DeviceRequest::Write, body.len() as u64, || self.ask(|| self.bucket.put_if(key, body, tag)));
        put
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let made = Cell::new(Put::Exists);
        self.writing(body.len() as u64, || self.ask(|| self.bucket.put_new(key, body)).map(|put| made.set(put)))?;
        Ok(made.get())
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        let (mut found, length) = (None, range.as_ref().map_or(0, |range| range.end - range.start));
        let get = || self.ask(|| self.bucket.get(key, range.clone()));
        self.reading(length, || self.failing.read(&self.name, get).map(|got| found = got))?;
        Ok(found)
    }

    fn get_for_writing(&self, key: &str) -> io::Result<Option<Vec<u8>>> {
        let mut found = None;
        self.failing.write(&self.name, || {
            self.tally.reading(0, || self.ask(|| self.bucket.get_for_writing(key)).map(|got| found = got))
        })?;
        Ok(found)
    }

    fn get_by_pieces(&self, key: &str, range: Range<u64>, piece: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let (mut is_there, length) = (false, range.end.saturating_sub(range.start));
        self.reading(length, || {
            let get = || self.ask(|| self.bucket.get_by_pieces(key, range.clone(), piece));
            self.failing.read(&self.name, get).map(|found| is_there = found)
        })?;
        Ok(is_there)
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        // A writer may have to know first which objects exist.
        let mut found = Vec::new();
        self.failing.write(&self.name, || {
            self.tally.reading(0, || self.ask(|| self.bucket.list(prefix, after)).map(|got| found = got))
        })?;
        Ok(found)
    }

    fn list_pages(
        &self,
        prefix: &str,
        after: &str,
        page: &mut dyn FnMut(Vec<String>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut count, mut noted) = (0, now());
        self.failing.write(&self.name, || {
            let mut counted = |keys: Vec<String>| {
                count += keys.len();
                if now() >= noted + NOTED_EACH {
                    noted = now();
                    self.failing.note(&format!("'{}': {count} names of objects were listed so far", self.name));
                }
                page(keys)
            };
            self.tally.reading(0, || self.ask(|| self.bucket.list_pages(prefix, after, &mut counted)))
        })
    }

    fn delete_all(&self, keys: &[String]) -> io::Result<()> {
        let (removed, _) = self.timed(DeviceRequest::Trim, 0, || self.ask(|| self.bucket.delete_all(keys)));
        self.failing(&self.counters.write_errors, ONLINE, removed)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        // An object that cannot be deleted now is deleted later.
        let (removed, _) = self.timed(DeviceRequest::Trim, 0, || self.ask(|| self.bucket.delete(key)));
        self.failing(&self.counters.write_errors, ONLINE, removed)
    }
}
