//! Uploads of segments to the bucket. Complete segments are uploaded at once, by threads of their own, so that a
//! commit has little left to upload. No root names them before that: after a crash the next import deletes them.
//!
//! Callers: [`Objects`](super::Objects). Invariants:
//! - One upload of a segment at a time. It stays in memory, and is read there, until one has succeeded.
//! - At most [`MOST`] complete segments are in memory; writers wait for that, and only for uploads, which need no lock
//!   that a caller holds: the write that completes a segment may wait as well. Where no upload is in progress,
//!   because one has failed or none was started, the writer uploads one itself, and gets its error.
//! - A failed background upload is retried by the flush, whose error counts.
//! - No request is made under a lock.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};

use super::{Bucket, Doomed, Result, State, attempt, failed, in_parallel, make, segment_key};
use crate::checksum;
use crate::label::Place;
use crate::workers::Workers;

/// Maximum number of complete segments in memory.
const MOST: usize = 16;
/// From this many on, background writers wait.
const MANY: usize = 8;

/// A segment for an upload thread.
struct Job {
    shared: Arc<Shared>,
    id: u32,
}

struct Shared {
    bucket: Arc<dyn Bucket>,
    state: Arc<Mutex<State>>,
    /// Signalled when an upload has ended.
    ended: Condvar,
    /// Set when queued uploads are obsolete.
    closed: AtomicBool,
}

/// The upload threads, and the state shared with waiting threads.
pub(super) struct Uploads {
    shared: Arc<Shared>,
    threads: OnceLock<Workers<Job>>,
}

/// Behaviour where another upload of the segment is in progress.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Other {
    /// Return: the other upload is sufficient.
    Trusted,
    /// Wait: the outcome counts.
    AwaitedFor,
}

impl Shared {
    /// Uploads the current content of a segment.
    fn upload(&self, id: u32, other: Other) -> Result<()> {
        let mut state = self.state.lock();
        let (place, bytes, version, is_new, tried) = loop {
            let Some(open) = state.open.get_mut(&id).filter(|open| open.version != open.put) else { return Ok(()) };
            if !open.uploading {
                open.uploading = true;
                break (open.place.clone(), Arc::clone(&open.bytes), open.version, open.put == 0, open.tried.clone());
            }
            if other == Other::Trusted {
                return Ok(());
            }
            self.ended.wait(&mut state);
        };
        let mut upload = Upload { shared: self, id, place, version, put: false, tried: None };
        drop(state);
        let key = segment_key(id, &upload.place);
        let put = if is_new {
            self.make(&key, &bytes, &tried)
        } else {
            // An unfinished segment is put again when it has grown.
            attempt(&*self.bucket, "writing", || self.bucket.put(&key, &bytes))
        };
        if put.is_err() {
            upload.tried = Some(checksum::structure(&bytes));
        }
        upload.put = put.is_ok();
        put
    }

    /// Creates the object of a segment. An existing object is replaced only if its checksum is that of an upload of
    /// this segment that was `tried` and had no reply.
    fn make(&self, key: &str, bytes: &[u8], tried: &[[u8; 16]]) -> Result<()> {
        if make(&*self.bucket, key, bytes)? {
            return Ok(());
        }
        let found = attempt(&*self.bucket, "reading", || self.bucket.get_anew(key, None))?;
        if found.is_some_and(|found| tried.contains(&checksum::structure(&found))) {
            return attempt(&*self.bucket, "writing", || self.bucket.put(key, bytes));
        }
        let why = format!(
            "'{key}' is there, and was not written by this import: it is not put over (after an export with -f, an import gives other names)"
        );
        Err(failed(&*self.bucket, "writing", io::Error::new(io::ErrorKind::AlreadyExists, why)))
    }
}

/// An upload in progress. Dropping it releases waiting threads in any case.
struct Upload<'a> {
    shared: &'a Shared,
    id: u32,
    place: Place,
    version: u64,
    put: bool,
    /// Checksum of the content, where it is unknown whether it was stored.
    tried: Option<[u8; 16]>,
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(open) = state.open.get_mut(&self.id) {
            open.uploading = false;
            let is_new = |tried: &[u8; 16]| !open.tried.contains(tried);
            let tried = self.tried.filter(is_new);
            open.tried.extend(tried);
            if self.put {
                open.put = self.version;
            }
            if open.is_done() {
                state.open.remove(&self.id);
            }
        } else if self.put && !state.doomed.iter().any(|doomed| doomed.id == self.id && doomed.place == self.place) {
            // The segment was removed before its upload ended, and no reader can be at a root that names it.
            state.doomed.push(Doomed { id: self.id, place: self.place.clone(), since: Some(0) });
        }
        drop(state);
        self.shared.ended.notify_all();
    }
}

impl Uploads {
    pub(super) fn new(bucket: &Arc<dyn Bucket>, state: &Arc<Mutex<State>>) -> Self {
        let (bucket, state) = (Arc::clone(bucket), Arc::clone(state));
        let shared = Shared { bucket, state, ended: Condvar::new(), closed: AtomicBool::new(false) };
        Self { shared: Arc::new(shared), threads: OnceLock::new() }
    }

    /// Waits while many complete segments are in memory and uploads are in progress.
    pub(super) fn await_room(&self) {
        let mut state = self.shared.state.lock();
        while state.open.values().filter(|open| open.waits()).count() >= MANY
            && state.open.values().any(|open| open.uploading)
        {
            self.shared.ended.wait(&mut state);
        }
    }

    /// Waits until there is memory for more.
    pub(super) fn make_room(&self) -> Result<()> {
        let mut state = self.shared.state.lock();
        loop {
            let whole = || state.open.iter().filter(|(_, open)| open.waits());
            if whole().count() < MOST {
                return Ok(());
            }
            let idle = if whole().any(|(_, open)| open.uploading) { None } else { whole().next().map(|(id, _)| *id) };
            let Some(id) = idle else {
                self.shared.ended.wait(&mut state);
                continue;
            };
            drop(state);
            self.shared.upload(id, Other::AwaitedFor)?;
            state = self.shared.state.lock();
        }
    }

    /// Hands complete segments to the upload threads.
    pub(super) fn go_ahead(&self) {
        let parallel = self.shared.bucket.parallel();
        if parallel <= 1 {
            return;
        }
        let mut state = self.shared.state.lock();
        let whole: Vec<u32> = state
            .open
            .iter_mut()
            .filter(|(_, open)| open.waits() && !open.offered)
            .map(|(id, open)| {
                open.offered = true;
                *id
            })
            .collect();
        drop(state);
        if whole.is_empty() {
            return;
        }
        let run = |Job { shared, id }: Job| {
            if !shared.closed.load(Ordering::Relaxed) {
                // An error is left to the caller that needs the segment.
                drop(shared.upload(id, Other::Trusted));
            }
        };
        let threads = self.threads.get_or_init(|| Workers::start("pool-upload", parallel, MOST, run));
        for id in whole {
            // A segment that does not fit into the queue is uploaded by the flush, or by a writer that needs memory.
            drop(threads.offer(Job { shared: Arc::clone(&self.shared), id }));
        }
    }

    /// Uploads everything that was written before the call.
    pub(super) fn flush(&self) -> Result<()> {
        let changed: Vec<u32> = {
            let state = self.shared.state.lock();
            state.open.iter().filter(|(_, open)| open.version != open.put).map(|(id, _)| *id).collect()
        };
        in_parallel(self.shared.bucket.parallel(), &changed, |id| self.shared.upload(*id, Other::AwaitedFor))
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
    }
}
