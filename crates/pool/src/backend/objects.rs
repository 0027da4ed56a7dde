//! Backend in an object store: segments and roots are objects of a bucket. Another program may write to the same
//! bucket at any moment, and replies may be lost: everything relies on one condition that every object store offers,
//! conditional creation (an object is only created if none of its name exists).
//!
//! Callers: the store, by [`Backend`]. A real object store implements [`Bucket`]; the one here, in memory, is for
//! tests. The objects of a pool:
//!
//! ```text
//!  pool/REVISION          the identity block
//!  erase/SEQUENCE         an erasable key
//!  epochs/EPOCH           a claim: the writer that owns this epoch
//!  roots/GENERATION       a root record, its writer, the writer's machine, the time, a checksum
//!  seg/XX/EPOCH-ID        a segment; XX are the last two digits of its number
//!  log/EPOCH/SEQUENCE     a block of the intent log
//! ```
//!
//! Invariants:
//! - A root is put under a new name only. If that name exists and is not this writer's own ([`WriterId`]
//!   distinguishes them), the pool belongs to another writer, and this one is fenced: it puts nothing more.
//! - A writer claims an epoch before its first root. Names of segments and log blocks contain it, so that no
//!   writer overwrites another one's objects, nor a later writer the leftovers of lost or discarded states.
//! - A process that takes over from a crashed one ([`Objects::going_on`]) is another writer with the same
//!   number: the newest root has to have that number, and the follower's first root fences requests that the
//!   crashed process may still have in flight.
//! - A segment is deleted after a root of this writer that does not name it, and only if a list made after
//!   that shows no newer root. It is retained for [`READABLE`] after the first such root: readers on other
//!   machines, which write nothing and so can hold nothing, are at that root by then.
//! - A segment is created with conditional creation; only data added to it later replaces the object, once.
//!   So a delayed request destroys nothing.
//! - Roots are retained for a day. The first root of each of the newest epochs stays, whatever its age, as a
//!   fence: a stopped writer's next root collides with it, whatever the clocks of the two show. A writer that
//!   was idle for an hour, by either clock of its machine, looks for newer roots first. Log blocks and
//!   identities that only deleted roots need are deleted after them.

mod bucket;
mod cached;
#[cfg(test)]
mod cached_tests;
mod doomed;
mod epochs;
mod erasable;
mod listing;
mod local_log;
mod log;
#[cfg(test)]
mod log_tests;
mod parts;
mod root_body;
mod roots;
mod seen;
mod sweeping;
mod taking_over;
mod uploads;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

pub use bucket::{Bucket, MemoryBucket, ObjectTag, Put, Requests, Silence, longest_object};
pub use cached::{CacheFigures, Cached};
pub use local_log::LocalLog;
pub use parts::Parts;
pub use seen::SeenRoots;

use super::{
    Backend, Copies, Healed, HealedPart, NewestRoot, PutRoot, Result, Room, SegmentAt, Sweep, SweptRange, Unknown,
};
use crate::error::{Damage, PoolError};
use crate::frames::{Reach, WriteStream};
use crate::label::{Identity, LogStart, Place, PoolState, Root, SlotAddress};
use crate::log::Blocks;
use crate::pointer::Txg;
use crate::workers;
use doomed::Doomed;
use listing::{each_page, newest_keys, own_keys};
use log::{Logs, ObjectLog};
use root_body::{RootBody, decode_identity, read_root, read_whole};
use roots::{DamagedRoot, root_key};
use sweeping::RootAge;
use uploads::Uploads;

/// Number of attempts to create an object that another writer may be creating.
const MAKING: usize = 6;
/// A writer that has put no root for this time looks for newer roots first, seconds.
const IDLE: u64 = 3600;
/// Retention time of roots, seconds.
const KEPT: u64 = 24 * 3600;
/// Retention time of segments after the first root that does not name them, seconds.
pub const READABLE: u64 = 600;
/// Segments that fall due within this time are deleted together, seconds: each deletion costs a list request.
const TOGETHER: u64 = 60;
/// A reader that finds no next root looks for any later one in one of this many polls.
const LOOKED: usize = 64;
/// Old roots, and objects that only they need, are collected once per this many roots.
const SWEEP: u64 = 256;
/// Number of attempts to list and delete all objects of a kind.
const ERASING: usize = 8;
/// Number of segments that one request deletes.
const REMOVED_AT_ONCE: usize = 1000;
/// Number of newest roots that are tried where they are unreadable: another program may have put more.
const UNREADABLE_MOST: u64 = 1000;

/// Identity of a writer in its roots.
pub struct WriterId {
    /// A random number, new with each import; a process that takes over from a crashed one keeps its number.
    pub nonce: u64,
    /// The machine's identity ([`Self::machine`]), or its name alone.
    pub host: String,
    /// Wall clock, seconds since 1970.
    pub clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Uptime of the machine including suspend, seconds: nothing can set it.
    pub uptime: Box<dyn Fn() -> u64 + Send + Sync>,
}

/// A moment by both clocks of the machine.
#[derive(Clone, Copy)]
struct Moment {
    time: u64,
    uptime: u64,
}

impl Moment {
    /// Whether a writer that owned the pool at this moment has to look for newer roots by now.
    fn is_long_before(self, now: Self) -> bool {
        self.time.saturating_add(IDLE) < now.time || self.uptime.saturating_add(IDLE) < now.uptime
    }
}

impl WriterId {
    /// Uptime of this machine including suspend, seconds.
    #[must_use]
    pub fn uptime() -> u64 {
        nacre_sys::clocks::now(nacre_sys::clocks::Clock::Boottime).as_secs()
    }

    fn moment(&self) -> Moment {
        Moment { time: (self.clock)(), uptime: (self.uptime)() }
    }

    /// A machine's identity in roots: two machines with the same name are distinguished by their numbers.
    #[must_use]
    pub fn machine(number: u64, name: &str) -> String {
        format!("{name}\0{number:016x}")
    }
}

/// A pool in a bucket.
pub struct Objects {
    bucket: Arc<dyn Bucket>,
    /// GUID of the pool.
    pool: u64,
    writer: Arc<WriterId>,
    segment_length: u64,
    /// Number of segments that fit.
    total: u64,
    /// The log on this machine (`log=local`).
    local: Option<Arc<LocalLog>>,
    /// This process takes over from a crashed one, which had the same writer number.
    goes_on: bool,
    /// Writer number that the newest root must have.
    expected: Option<u64>,
    state: Arc<Mutex<State>>,
    uploads: Uploads,
    /// Generation of the newest root that was put here.
    newest: Arc<AtomicU64>,
    /// How often the next root was polled in vain.
    asked: AtomicUsize,
    /// The damaged root that a reader has found after its own.
    damaged: Mutex<Option<DamagedRoot>>,
    /// The newest root that this machine has seen.
    seen: Option<SeenRoots>,
    /// Why no log is kept on this machine, where one was requested.
    log_trouble: Mutex<Option<String>>,
    /// Objects that serve as fences and are retained for that: names, with their epochs.
    fences: Mutex<BTreeMap<String, u64>>,
    /// Roots whose time is in the future.
    ahead: Mutex<BTreeMap<String, RootAge>>,
}

#[derive(Default)]
struct State {
    /// The epoch that this writer has claimed; 0: none.
    epoch: u32,
    /// The epoch of the newest root that was found.
    found: u32,
    /// The machine that put the found root.
    host: String,
    /// Writer number of the found root.
    writer: u64,
    /// Whether a newer root has fenced this writer.
    is_fenced: bool,
    /// The import whose local log belongs to the roots of txg `base`; 0: none.
    inherited: u32,
    /// The txg that this import starts from.
    base: Txg,
    /// The txg of the newest root that was put here.
    durable: Txg,
    /// Segments begun here that are not completely in the bucket.
    open: BTreeMap<u32, Open>,
    /// Segments that use space.
    known: BTreeMap<u32, Place>,
    /// Segments that are to be deleted.
    doomed: Vec<Doomed>,
    /// The newest root that was found or put here: generation, and when.
    last: Option<(u64, Moment)>,
    /// Writer number of that root.
    last_nonce: u64,
}

/// A segment that is being written.
#[derive(Default)]
struct Open {
    place: Place,
    bytes: Arc<Vec<u8>>,
    /// Number of bytes written, in any order.
    written: u64,
    /// Final length, once known.
    finished: Option<u64>,
    /// Grows with each write.
    version: u64,
    /// The version in the bucket.
    put: u64,
    /// An upload of it is in progress.
    uploading: bool,
    /// Whether the segment was handed to an upload thread.
    offered: bool,
    /// Checksums of uploads without a reply: the bucket may have any of these.
    tried: Vec<[u8; 16]>,
}

impl Open {
    fn is_whole(&self) -> bool {
        self.finished.is_some_and(|length| self.written >= length)
    }

    /// Whether it is complete and not in the bucket yet.
    fn waits(&self) -> bool {
        self.is_whole() && self.version != self.put
    }

    fn is_done(&self) -> bool {
        self.is_whole() && self.version == self.put
    }
}

/// Writer of a pool's newest root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastWriter {
    /// Name of its machine.
    pub host: String,
    /// Number of its machine; `None` for roots of older versions.
    pub machine: Option<u64>,
    /// Time of the root by the writer's clock, seconds since 1970.
    pub time: u64,
}

impl LastWriter {
    fn of(body: &RootBody) -> Self {
        let machine = body.host.split_once('\0').and_then(|(_, number)| u64::from_str_radix(number, 16).ok());
        Self { host: host_name(&body.host).to_owned(), machine, time: body.time }
    }
}

/// Whether two roots were put by the same machine, even if it was renamed; roots of older versions have only the
/// name.
fn is_same_machine(one: &str, other: &str) -> bool {
    match (one.split_once('\0'), other.split_once('\0')) {
        (Some((_, one)), Some((_, other))) => one == other,
        _ => host_name(one) == host_name(other),
    }
}

/// The machine's name in a machine identity of a root.
fn host_name(host: &str) -> &str {
    host.split('\0').next().unwrap_or_default()
}

fn segment_key(segment: u32, place: &Place) -> String {
    let epoch = place.first().map_or(0, |at| at.slot);
    format!("seg/{:02x}/{epoch}-{segment}", segment & 0xff)
}

fn place_of(epoch: u32) -> Place {
    vec![SlotAddress { device: 0, slot: epoch }].into()
}

impl Objects {
    /// Backend for a bucket with an existing or a new pool of this GUID: segments of this length, at most `size` bytes
    /// in all.
    #[must_use]
    pub fn new(bucket: Arc<dyn Bucket>, pool: u64, segment_length: u64, size: u64, writer: WriterId) -> Self {
        let total = size / segment_length.max(1);
        let state = Arc::default();
        let uploads = Uploads::new(&bucket, &state);
        Self {
            bucket,
            pool,
            writer: Arc::new(writer),
            segment_length,
            total,
            local: None,
            goes_on: false,
            expected: None,
            state,
            uploads,
            newest: Arc::default(),
            asked: AtomicUsize::new(1),
            damaged: Mutex::default(),
            seen: None,
            log_trouble: Mutex::default(),
            fences: Mutex::default(),
            ahead: Mutex::default(),
        }
    }

    /// Adds an intent log on this machine.
    #[must_use]
    pub fn with_local_log(self, local: Option<LocalLog>) -> Self {
        Self { local: local.map(Arc::new), ..self }
    }

    /// Adds this machine's record of the roots it has seen.
    #[must_use]
    pub fn remembering(self, seen: Option<SeenRoots>) -> Self {
        Self { seen, ..self }
    }

    /// Records why no log is kept on this machine, where one is requested.
    pub fn set_log_trouble(&self, why: Option<String>) {
        *self.log_trouble.lock() = why;
    }

    /// Why an fsync goes to the object store or to a commit, where a log on this machine was requested.
    #[must_use]
    pub fn log_trouble(&self) -> Option<String> {
        let failed = || self.local.as_ref().and_then(|local| local.trouble());
        self.log_trouble.lock().clone().or_else(failed)
    }

    fn note_root(&self, generation: u64) {
        if let Some(seen) = &self.seen {
            seen.note(generation);
        }
    }

    /// Makes this process take over from a crashed one that had the same writer number.
    #[must_use]
    pub fn going_on(self) -> Self {
        Self { goes_on: true, ..self }
    }

    /// Requires the newest root to be of this writer.
    #[must_use]
    pub fn expecting(self, writer: Option<u64>) -> Self {
        Self { expected: writer, ..self }
    }

    /// Number of the writer of the found root, if a newer root has fenced this writer.
    #[must_use]
    pub fn fenced_after(&self) -> Option<u64> {
        let state = self.state.lock();
        state.is_fenced.then_some(state.writer)
    }

    /// Number of this writer.
    #[must_use]
    pub fn writer(&self) -> u64 {
        self.writer.nonce
    }

    /// Creates this import's log file on this machine; returns `false` where no local log is configured.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn make_local_log(&self) -> Result<bool> {
        let epoch = self.state.lock().epoch;
        self.local.as_ref().map_or(Ok(false), |local| local.make(epoch).map(|()| true))
    }

    /// Directs later fsyncs to that file, or to the object store. No synced entry may be in the other log alone.
    pub fn log_locally(&self, wanted: bool) {
        if let Some(local) = &self.local {
            local.set_wanted(wanted);
        }
    }

    /// Logs on this machine that were not replayed, since they do not belong to the newest root.
    #[must_use]
    pub fn logs_aside(&self) -> Vec<std::path::PathBuf> {
        self.local.as_ref().map_or_else(Vec::new, |local| local.aside())
    }

    /// The import whose local log belongs to a root: the previous one until a root contains the replayed entries.
    fn log_of(&self, root: &Root) -> u32 {
        let state = self.state.lock();
        let wanted = || self.local.as_ref().is_some_and(|local| local.is_wanted());
        match root.txg <= state.base {
            _ if root.clean => 0,
            true => state.inherited,
            false if wanted() => state.epoch,
            false => 0,
        }
    }

    /// Reads the identity of the pool in a bucket; `None` where there is none.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Format`].
    pub fn find(bucket: &dyn Bucket) -> Result<Option<Identity>> {
        let Some(newest) = newest_keys(bucket, "pool/", "")?.pop() else { return Ok(None) };
        read_whole(bucket, "reading", &newest, decode_identity)?.transpose()
    }

    /// Reads who put the newest root; `None` where there is none.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn last_writer(bucket: &dyn Bucket) -> Result<Option<LastWriter>> {
        last_writer(bucket, "")
    }

    /// Tests whether a bucket supports conditional creation, on which everything relies: an existing object is not
    /// created again. `nonce` is a number that was never used.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn keeps_condition(bucket: &dyn Bucket, nonce: u64) -> Result<bool> {
        let key = format!("probe/{nonce:016x}");
        let first = make(bucket, &key, b"first")?;
        let second = make(bucket, &key, b"second")?;
        attempt(bucket, "removing from", || bucket.delete(&key))?;
        Ok(first && !second)
    }

    /// Deletes all objects of a destroyed pool. Its newest identity is deleted last: an interrupted deletion can be
    /// identified and repeated by it. `progress` gets the number of deleted objects. The identity is checked before
    /// each page: another machine may have deleted this pool as well, and created another one.
    ///
    /// # Errors
    /// [`PoolError::Device`]; the remaining objects still exist. [`PoolError::Refused`] where another pool, or a pool
    /// that was imported again, exists.
    pub fn erase(bucket: &dyn Bucket, pool: u64, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let mut removed = 0;
        // Whether the pool still exists; its identity is deleted last where another machine deletes it.
        let is_there = || match Self::find(bucket)? {
            Some(there) if there.pool != pool || there.state != PoolState::Destroyed => {
                Err(PoolError::Refused(format!("pool '{}' is there now", there.name)))
            }
            there => Ok(there.is_some()),
        };
        if !is_there()? {
            return Ok(());
        }
        let identity = newest_keys(bucket, "pool/", "")?.pop();
        for kind in ["erase/", "seg/", "log/", "roots/", "epochs/", "probe/", "pool/"] {
            // A store may skip names while others are deleted, or list deleted ones for a while.
            for _ in 0..ERASING {
                let (mut is_empty, mut stopped) = (true, None);
                let listed = each_page(bucket, kind, "", &mut |mut keys| {
                    keys.retain(|key| Some(key) != identity.as_ref());
                    if keys.is_empty() {
                        return Ok(());
                    }
                    is_empty = false;
                    stopped = match is_there() {
                        Ok(true) => None,
                        Ok(false) => Some(Ok(())),
                        Err(error) => Some(Err(error)),
                    };
                    if stopped.is_some() {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    bucket.delete_all(&keys)?;
                    removed += keys.len() as u64;
                    progress(removed);
                    Ok(())
                });
                if let Some(stopped) = stopped {
                    return stopped;
                }
                listed?;
                if is_empty {
                    break;
                }
            }
        }
        if !is_there()? {
            return Ok(());
        }
        identity.map_or(Ok(()), |key| attempt(bucket, "removing from", || bucket.delete(&key)))
    }

    fn object_log(&self) -> ObjectLog {
        let (bucket, writer) = (Arc::clone(&self.bucket), Arc::clone(&self.writer));
        ObjectLog::new(bucket, writer, Arc::clone(&self.state), Arc::clone(&self.newest))
    }

    fn fence(&self) {
        self.state.lock().is_fenced = true;
        if let Some(local) = &self.local {
            local.fence();
        }
    }

    /// Fences this writer: another one has put a root of this generation or a later one. Names the other as far as
    /// known.
    fn fenced(&self, generation: u64) -> PutRoot {
        self.fence();
        let by = match last_writer(&*self.bucket, &root_key(generation.saturating_sub(1))) {
            Ok(Some(writer)) => format!("'{}'", writer.host),
            Ok(None) | Err(_) => "another program".to_owned(),
        };
        PutRoot::Fenced { by }
    }
}

/// Creates an object; returns `false` where another one of this name exists.
fn make(bucket: &dyn Bucket, key: &str, body: &[u8]) -> Result<bool> {
    let (mut failure, mut seen) = (io::Error::from(io::ErrorKind::TimedOut), None);
    for _ in 0..MAKING {
        match bucket.put_new(key, body) {
            Ok(Put::Made) => return Ok(true),
            // It may be the object of an earlier attempt. Where nothing exists, another writer was about to create it
            // and has not.
            Ok(Put::Exists) => match bucket.get_for_writing(key) {
                Ok(Some(found)) if found == body => return Ok(true),
                // A reply may have been damaged in transit: only the same content twice counts as another object.
                Ok(Some(found)) if seen.as_ref() == Some(&found) => return Ok(false),
                Ok(Some(found)) => seen = Some(found),
                Ok(None) => {}
                Err(error) => failure = error,
            },
            Err(error) => failure = error,
        }
    }
    Err(failed(bucket, "writing", failure))
}

/// Reads who put the newest root whose name comes after another one.
fn last_writer(bucket: &dyn Bucket, after: &str) -> Result<Option<LastWriter>> {
    for key in newest_keys(bucket, "roots/", after)?.iter().rev().take(UNREADABLE_MOST as usize) {
        if let Some(Ok(body)) = read_root(bucket, key)? {
            return Ok(Some(LastWriter::of(&body)));
        }
    }
    Ok(None)
}

/// Runs `work` on each item, several in parallel; the first error ends it.
fn in_parallel<T: Sync>(most: usize, all: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    if most <= 1 || all.len() <= 1 {
        return all.iter().try_for_each(work);
    }
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let along = || {
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = work(one) {
                next.store(all.len(), Ordering::Relaxed);
                failure.lock().get_or_insert(error);
            }
        }
    };
    std::thread::scope(|scope| {
        // The calling thread does the part of the threads that cannot be started.
        let started = (1..most.min(all.len())).map_while(|_| workers::start_in(scope, along).ok());
        drop(started.collect::<Vec<_>>());
        along();
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Whether a store has no room for an object.
fn is_full(error: &PoolError) -> bool {
    let PoolError::Device { source, .. } = error else { return false };
    matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn failed(bucket: &dyn Bucket, doing: &'static str, source: io::Error) -> PoolError {
    PoolError::Device { device: bucket.name().to_owned(), doing, source: Arc::new(source) }
}

/// Repeats an idempotent request until there is a reply.
fn attempt<T>(bucket: &dyn Bucket, doing: &'static str, request: impl Fn() -> io::Result<T>) -> Result<T> {
    let mut failure = io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..bucket.attempts() {
        match request() {
            Ok(reply) => return Ok(reply),
            Err(error) => failure = error,
        }
    }
    Err(failed(bucket, doing, failure))
}

fn no_segment() -> PoolError {
    PoolError::Format(Damage::Structure("a segment that is not written any more"))
}

/// Sequential scrub of objects: reads the ranges in turn.
struct ObjectSweep<'a> {
    objects: &'a Objects,
    asked: VecDeque<(u32, Place, u64, usize)>,
}

impl Sweep for ObjectSweep<'_> {
    fn ask(&mut self, at: SegmentAt<'_>, offset: u64, length: usize) {
        self.asked.push_back((at.segment, at.place.clone(), offset, length));
    }

    fn take(&mut self) -> Result<SweptRange> {
        let nothing = PoolError::Format(Damage::Structure("nothing was asked for"));
        let (segment, place, offset, length) = self.asked.pop_front().ok_or(nothing)?;
        let mut bytes = vec![0; length];
        // From the object store, not from the local cache.
        self.objects.read(SegmentAt { segment, place: &place }, 1, offset, &mut bytes)?;
        Ok(SweptRange { bytes, agree: true })
    }
}

impl Backend for Objects {
    fn segment_length(&self) -> u64 {
        self.segment_length
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn extends(&self) -> bool {
        false
    }

    fn adopt(&self, root: &Root, segments: &mut dyn Iterator<Item = (u32, &Place)>) -> Result<()> {
        let mut state = self.state.lock();
        state.base = root.txg;
        // A follower adopts one root after the other.
        state.known.clear();
        for (id, place) in segments {
            if state.known.insert(id, place.clone()).is_some() {
                return Err(PoolError::Format(Damage::Structure("a segment twice")));
            }
        }
        Ok(())
    }

    fn begin(&self, id: u32, _stream: WriteStream, spare: u64) -> Result<Option<Place>> {
        let mut state = self.state.lock();
        if self.total.saturating_sub(state.known.len() as u64) <= spare {
            return Ok(None);
        }
        let place = place_of(state.epoch);
        // Capacity for the longest segment: the buffer is not copied as it grows.
        let bytes = Arc::new(Vec::with_capacity(self.segment_length as usize));
        let open = Open { place: place.clone(), bytes, ..Open::default() };
        if state.known.insert(id, place.clone()).is_some() || state.open.insert(id, open).is_some() {
            return Err(PoolError::Format(Damage::Structure("a segment twice")));
        }
        Ok(Some(place))
    }

    fn write(&self, at: SegmentAt<'_>, _stream: WriteStream, offset: u64, bytes: &[u8]) -> Result<Copies> {
        self.uploads.make_room()?;
        let mut state = self.state.lock();
        let open = state.open.get_mut(&at.segment).ok_or_else(no_segment)?;
        let end = offset + bytes.len() as u64;
        if end > self.segment_length {
            return Err(PoolError::Format(Damage::Structure("behind the end of a segment")));
        }
        // Pieces arrive in any order.
        let there = Arc::make_mut(&mut open.bytes);
        if there.len() < end as usize {
            there.resize(end as usize, 0);
        }
        if let Some(range) = there.get_mut(offset as usize..end as usize) {
            range.copy_from_slice(bytes);
        }
        open.written += bytes.len() as u64;
        open.version += 1;
        drop(state);
        self.uploads.go_ahead();
        Ok(Copies::All)
    }

    fn await_room(&self) {
        self.uploads.await_room();
    }

    fn finish(&self, at: SegmentAt<'_>, length: u64) {
        let mut state = self.state.lock();
        if let Some(open) = state.open.get_mut(&at.segment) {
            open.finished = Some(length);
            if open.is_done() {
                state.open.remove(&at.segment);
            }
        }
    }

    fn flush(&self) -> Result<()> {
        let Err(error) = self.uploads.flush() else { return Ok(()) };
        // The store may be full of objects that no root needs.
        let has_room = self.make_room().inspect_err(|error| tracing::info!(%error, "no room can be made in the store"));
        if has_room.unwrap_or(false) { self.uploads.flush() } else { Err(error) }
    }

    fn ways(&self, _at: SegmentAt<'_>) -> usize {
        // The locally cached parts, or one reply, may be damaged while the object is not.
        2
    }

    fn is_read_again(&self) -> bool {
        true
    }

    fn sweep(&self) -> Box<dyn Sweep + '_> {
        Box::new(ObjectSweep { objects: self, asked: VecDeque::new() })
    }

    fn read(&self, at: SegmentAt<'_>, way: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset + into.len() as u64;
        let key = segment_key(at.segment, at.place);
        let lost = |kind: io::ErrorKind, how: &str| {
            failed(&*self.bucket, "reading", io::Error::new(kind, format!("'{key}' {how}")))
        };
        let short = || lost(io::ErrorKind::UnexpectedEof, "is cut short");
        if let Some(open) = self.state.lock().open.get(&at.segment).filter(|open| open.place == *at.place) {
            into.copy_from_slice(open.bytes.get(offset as usize..end as usize).ok_or_else(short)?);
            return Ok(());
        }
        let range = Some(offset..end);
        let found = attempt(&*self.bucket, "reading", || match way {
            0 => self.bucket.get(&key, range.clone()),
            _ => self.bucket.get_anew(&key, range.clone()),
        })?;
        let found = found.ok_or_else(|| lost(io::ErrorKind::NotFound, "is gone"))?;
        into.copy_from_slice(Some(found.as_slice()).filter(|found| found.len() == into.len()).ok_or_else(short)?);
        Ok(())
    }

    fn member(&self, _at: SegmentAt<'_>, _way: usize) -> u16 {
        0
    }

    fn expect(&self, at: SegmentAt<'_>, offset: u64, length: u64) {
        if !self.state.lock().open.contains_key(&at.segment) {
            self.bucket.expect(&segment_key(at.segment, at.place), offset..offset + length);
        }
    }

    fn label_of(&self, at: SegmentAt<'_>) -> String {
        segment_key(at.segment, at.place)
    }

    fn ahead(&self) -> Reach {
        self.bucket.ahead()
    }

    fn heal(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Healed>> {
        if self.state.lock().known.get(&at.segment) != Some(at.place) {
            return Ok(None);
        }
        let key = segment_key(at.segment, at.place);
        let Some((mut whole, tag)) = attempt(&*self.bucket, "reading", || self.bucket.get_tagged(&key))? else {
            return Err(failed(&*self.bucket, "reading", io::ErrorKind::NotFound.into()));
        };
        let range = whole.get_mut(offset as usize..offset as usize + right.len());
        let Some(range) = range.filter(|range| *range != right) else { return Ok(Some(Healed::default())) };
        range.copy_from_slice(right);
        // The reply may be damaged while the object is right.
        if !is_whole(&whole) {
            let why = "more of the object is damaged, or was sent wrong: it is not replaced";
            return Err(failed(&*self.bucket, "mending", io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        if !attempt(&*self.bucket, "writing", || self.bucket.put_if(&key, &whole, &tag))? {
            let why = "the object has changed since it was read";
            return Err(failed(&*self.bucket, "mending", io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        let bytes = whole.len() as u64;
        let part = HealedPart { device: 0, range: offset..offset + right.len() as u64, bytes };
        Ok(Some(Healed { columns: 1, wrong: vec![part] }))
    }

    fn remove(&self, segments: &[(u32, Place)]) {
        let mut state = self.state.lock();
        for (id, place) in segments {
            if state.known.get(id) == Some(place) {
                state.known.remove(id);
                state.open.remove(id);
            }
            state.doomed.push(Doomed { id: *id, place: place.clone(), since: None });
        }
    }

    fn waiting(&self) -> Option<usize> {
        let (now, state) = ((self.writer.clock)(), self.state.lock());
        let (_, put) = state.last?;
        // The next root deletes the segments that are due, and starts the retention time of those that it does not
        // name.
        let waits = |doomed: &&Doomed| doomed.since.is_none() || doomed.is_due(now.saturating_sub(TOGETHER));
        let due = state.doomed.iter().filter(waits);
        (put.time.saturating_add(TOGETHER) <= now).then(|| due.count())
    }

    fn list_unknown(&self, is_known: &dyn Fn(u32, &Place) -> bool) -> Result<Unknown> {
        listing::unknown_segments(&*self.bucket, self.begun_or_found(), is_known)
    }

    fn begin_epoch(&self, beyond: u32) -> Result<bool> {
        self.claim_epoch(beyond)
    }

    fn room(&self) -> Room {
        let taken = self.state.lock().known.len() as u64;
        let free = self.total.saturating_sub(taken);
        let (size, free_size) = (self.total * self.segment_length, free * self.segment_length);
        Room { total: self.total, reserved: 0, free, held_back: 0, size, free_size }
    }

    fn reclaim(&self) -> bool {
        false
    }

    fn copies(&self, _stream: WriteStream) -> usize {
        1
    }

    fn lacks(&self, _id: u32) -> bool {
        false
    }

    fn log(&self) -> Result<Option<Box<dyn Blocks>>> {
        let (objects, named) = (self.object_log(), self.state.lock().inherited);
        Ok(Some(Box::new(Logs { objects, local: self.local.clone(), named, is_last_near: false })))
    }

    fn fresh_log(&self) -> Result<LogStart> {
        let mut state = self.state.lock();
        state.inherited = 0;
        Ok(LogStart { position: u64::from(state.epoch), sequence: 0, chain: 0 })
    }

    fn end_log(&self, start: LogStart) -> Result<()> {
        self.object_log().end(start.into())
    }

    fn newest_identity(&self) -> Result<Option<Identity>> {
        Self::find(&*self.bucket)
    }

    fn missing_log(&self) -> Result<Option<String>> {
        let (epoch, host) = {
            let state = self.state.lock();
            (state.inherited, state.host.clone())
        };
        let is_own = is_same_machine(&host, &self.writer.host);
        let is_there = match &self.local {
            _ if epoch == 0 => true,
            Some(local) if is_own => local.has(epoch)?,
            _ => false,
        };
        let at = self.local.as_ref().map_or_else(String::new, |local| format!(" ('{}')", local.path(epoch).display()));
        let others = self.local.as_ref().filter(|_| is_own).map(|local| local.elsewhere(epoch)).unwrap_or_default();
        if let (false, Some(other)) = (is_there, others.first()) {
            return Ok(Some(format!(
                "what was synced last is in a log on this machine{at}, which is not there. '{}' is one of this pool under \
                 another address: if this bucket was moved, or is named otherwise than before, import it by its former \
                 address, or move the log there; if it is the log of a copy, -m imports the pool without it",
                other.display()
            )));
        }
        let on = if is_own { format!("this machine{at}") } else { format!("'{}'", host_name(&host)) };
        Ok((!is_there).then(|| {
            format!("what was synced last is in a log on {on}, which is not there: -m imports the pool without it")
        }))
    }

    fn give_up_log(&self) {
        self.state.lock().inherited = 0;
    }

    fn put_identity(&self, identity: &Identity) -> Result<()> {
        // The mark has the objects of the whole bucket removed, which may be another one by now.
        let is_taken = self.state.lock().is_fenced || identity.state == PoolState::Destroyed && !self.has_own_root()?;
        if is_taken {
            return Err(PoolError::Refused(format!("{}: another writer has the pool", self.bucket.name())));
        }
        let (key, body) = (format!("pool/{:020}", identity.revision), identity.encode()?);
        let is_made = match identity.state {
            PoolState::Destroyed => self.make_mark(&key, &body)?,
            PoolState::Active | PoolState::Exported => make(&*self.bucket, &key, &body)?,
        };
        if is_made {
            Ok(())
        } else {
            Err(PoolError::Refused(format!("{}: another pool is there, or another writer", self.bucket.name())))
        }
    }

    fn erasable(&self) -> Option<&dyn super::ErasableKeys> {
        Some(self)
    }

    fn put_root(&self, root: &Root) -> Result<PutRoot> {
        let now = self.writer.moment();
        let (epoch, last, last_nonce, doomed) = {
            let state = self.state.lock();
            (state.epoch, state.last, state.last_nonce, state.doomed.len())
        };
        if let Some((generation, put)) = last
            && put.is_long_before(now)
            && self.has_newer(generation)?
        {
            return Ok(self.fenced(root.generation));
        }
        if let Some((generation, _)) = last
            && !self.has_previous(generation, last_nonce)?
        {
            return Ok(self.fenced(root.generation));
        }
        let (log, nonce) = (self.log_of(root), self.writer.nonce);
        let body = self.encode(root, epoch, log, now)?;
        let key = root_key(root.generation);
        if !make(&*self.bucket, &key, &body)? {
            return match self.read_root(&key)? {
                // An unreadable root does not name the pool's owner.
                Some(Err(error)) => Err(error),
                Some(Ok(there)) if self.goes_on && there.nonce == nonce => Err(PoolError::Overtaken),
                Some(Ok(_)) | None => Ok(self.fenced(root.generation)),
            };
        }
        // A writer that was suspended for long before the root was stored may have used a name that was free again.
        let after = self.writer.moment();
        if last.is_some_and(|(_, put)| put.is_long_before(after)) && self.has_newer(root.generation)? {
            return Ok(self.fenced(root.generation));
        }
        let holds_all = {
            let mut state = self.state.lock();
            (state.last, state.durable) = (Some((root.generation, after)), root.txg);
            state.last_nonce = nonce;
            // The segments that were removed before this root was written.
            let unnamed = state.doomed.iter_mut().take(doomed).filter(|doomed| doomed.since.is_none());
            unnamed.for_each(|doomed| doomed.since = Some(after.time));
            root.txg > state.base
        };
        self.newest.store(root.generation, Ordering::Release);
        self.note_root(root.generation);
        match &self.local {
            Some(local) if root.clean => local.close(),
            Some(local) => local.root_is_there(log != 0 && log == epoch, holds_all),
            None => {}
        }
        // The root is durable: objects that cannot be deleted now are deleted after a later root.
        match self.tidy(root, now.time) {
            Ok(true) => Ok(PutRoot::Durable),
            Ok(false) => Ok(self.fenced(root.generation)),
            Err(error) => {
                tracing::info!(%error, "objects that nobody needs stay for now");
                Ok(PutRoot::Durable)
            }
        }
    }

    fn newest_root(&self) -> Result<Option<NewestRoot>> {
        self.find_newest()
    }

    fn newer_root(&self, generation: u64) -> Result<Option<Root>> {
        self.find_newer(generation)
    }

    fn roots(&self) -> Result<BTreeMap<u64, Root>> {
        Ok(Self::readable_roots(&*self.bucket, self.pool)?.0)
    }

    fn guard(&self) -> Result<bool> {
        // A list shows each root, readable or not.
        Ok(true)
    }

    fn scrub_roots(&self, identity: &Identity) -> Result<Vec<u64>> {
        let (key, right) = (format!("pool/{:020}", identity.revision), identity.encode()?);
        let found = attempt(&*self.bucket, "reading", || self.bucket.get(&key, None))?;
        if found.as_ref() == Some(&right) {
            return Ok(vec![0]);
        }
        attempt(&*self.bucket, "writing", || self.bucket.put(&key, &right))?;
        Ok(vec![1])
    }
}
