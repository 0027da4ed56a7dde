//! Compression of frames before they are written, by the calling thread and a pool of threads.
//!
//! Callers: the store as [`Frames`](crate::frames::Frames). Invariants:
//! - No lock is held during compression, and no space of the pool is used.
//! - The caller compresses its frames from the front; from the back it queues copies for the threads as
//!   long as fewer than [`WAITING`] wait for each thread, so that a thread always has the next one. When
//!   the two meet, the caller runs queued jobs, its own or another caller's. So it waits only for running
//!   compressions.
//! - Frames that a crashed thread has lost are compressed by the caller that queued them.
//! - The threads end with the store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;

use super::{Result, Store};
use crate::checksum;
use crate::compress;
use crate::error::PoolError;
use crate::frames::{Compressed, CompressionSetting, NewFrame};
use crate::pointer::{ChecksumKind, Compression, Pointer};
use crate::workers::{Workers, processors};

/// Minimum number of bytes for which several threads compress.
const WORTH_A_THREAD: usize = 512 << 10;
/// Maximum number of waiting groups per thread.
const WAITING: usize = 3;
/// Number of frames in a group for a thread.
const GROUP: usize = 2;
/// Number of buffers kept for reuse, and their maximum length, bytes.
const SPARE: (usize, usize) = (4, 1 << 20);

/// Checksum of a content, and its compressed form.
type Content = (Option<[u8; 16]>, Option<(Compression, Vec<u8>)>);

fn compress_group(compression: CompressionSetting, checksum: ChecksumKind, contents: &[&[u8]]) -> Vec<Content> {
    contents
        .iter()
        .map(|content| (checksum::content(checksum, content), compress::compress(compression, content)))
        .collect()
}

/// Copies of contents that a thread is to compress.
struct Job {
    /// Channel to the waiting caller; it recognizes a lost job by this end being dropped.
    results: Sender<(usize, Vec<Content>)>,
    /// Number of the caller's group.
    group: usize,
    bytes: Vec<u8>,
    lengths: Vec<usize>,
    compression: CompressionSetting,
    checksum: ChecksumKind,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Job {
    /// Compresses the group, and returns its buffer for reuse.
    fn run(mut self) {
        let mut rest = &*self.bytes;
        let mut contents = Vec::with_capacity(self.lengths.len());
        for length in &self.lengths {
            let Some((content, behind)) = rest.split_at_checked(*length) else { break };
            contents.push(content);
            rest = behind;
        }
        let compressed = compress_group(self.compression, self.checksum, &contents);
        // The caller waits for all groups that it has queued.
        let _ = self.results.send((self.group, compressed));
        let mut spare = self.spare.lock();
        if spare.len() < SPARE.0 && self.bytes.capacity() <= SPARE.1 {
            self.bytes.clear();
            spare.push(self.bytes);
        }
    }
}

/// The compression threads.
#[derive(Default)]
pub(super) struct Compressors {
    running: OnceLock<Running>,
    /// The last contents were compressible.
    hope: AtomicBool,
}

struct Running {
    workers: Workers<Job>,
    /// Buffers for reuse.
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl std::fmt::Debug for Compressors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Compressors").field(&self.running.get().is_some()).finish()
    }
}

impl Compressors {
    /// The threads, if there are any, in addition to the calling thread.
    fn running(&self) -> Option<&Running> {
        let start = || {
            let threads = processors() - 1;
            let workers = Workers::start("pool-pack", threads, threads * WAITING, Job::run);
            Running { workers, spare: Arc::default() }
        };
        Some(self.running.get_or_init(start)).filter(|running| running.workers.count() > 0)
    }
}

impl Running {
    /// Queues a group for the threads, if there is space in the queue.
    fn leave(&self, results: &Sender<(usize, Vec<Content>)>, group: usize, frames: &[NewFrame<'_>]) -> bool {
        let Some(first) = frames.first() else { return false };
        // Checked first to avoid a needless copy, except where another caller is faster.
        if self.workers.is_full() {
            return false;
        }
        let mut bytes = self.spare.lock().pop().unwrap_or_default();
        let lengths = frames.iter().map(|frame| frame.content.len()).collect();
        frames.iter().for_each(|frame| bytes.extend_from_slice(frame.content));
        let (compression, checksum, spare) = (first.compression, first.checksum, Arc::clone(&self.spare));
        self.workers
            .offer(Job { results: results.clone(), group, bytes, lengths, compression, checksum, spare })
            .is_ok()
    }

    /// Compresses groups of frames, with the help of the threads.
    fn compress(&self, groups: &[&[NewFrame<'_>]]) -> Vec<Vec<Content>> {
        let (results, came) = bounded(groups.len());
        let mut done: Vec<Vec<Content>> = groups.iter().map(|_| Vec::new()).collect();
        let (mut front, mut back) = (0, groups.len());
        while front < back {
            let last = groups.get(back - 1).copied().unwrap_or_default();
            if front + 1 < back && self.leave(&results, back - 1, last) {
                back -= 1;
                continue;
            }
            if let (Some(place), Some(group)) = (done.get_mut(front), groups.get(front)) {
                *place = compress_frames(group);
            }
            front += 1;
        }
        drop(results);
        while came.len() < groups.len() - back
            && let Some(job) = self.workers.take()
        {
            job.run();
        }
        for (group, compressed) in came {
            if let Some(place) = done.get_mut(group) {
                *place = compressed;
            }
        }
        // Lost by a thread.
        for (place, group) in done.iter_mut().zip(groups) {
            if place.len() != group.len() {
                *place = compress_frames(group);
            }
        }
        done
    }
}

/// Compresses frames with the same compression and checksum settings.
fn compress_frames(frames: &[NewFrame<'_>]) -> Vec<Content> {
    let Some(first) = frames.first() else { return Vec::new() };
    let contents: Vec<&[u8]> = frames.iter().map(|frame| frame.content).collect();
    compress_group(first.compression, first.checksum, &contents)
}

impl Store {
    /// Checks and compresses a frame; uses no space of the pool yet.
    pub(super) fn compress(&self, frame: &NewFrame<'_>) -> Result<Compressed> {
        self.check_new(frame)?;
        let checksum = checksum::content(frame.checksum, frame.content);
        compressed(frame, (checksum, compress::compress(frame.compression, frame.content)))
    }

    fn check_new(&self, frame: &NewFrame<'_>) -> Result<()> {
        self.accepts_frames()?;
        let logical = frame.content.len();
        if logical == 0 || logical as u64 > self.largest_frame() {
            return Err(PoolError::Refused(format!(
                "a frame of {logical} bytes; 1 to {} are possible here",
                self.largest_frame()
            )));
        }
        Ok(())
    }

    /// Compresses frames. Incompressible data is not worth several threads: where the previous frames were not
    /// compressible, the first ones are tried alone.
    pub(super) fn compress_each(&self, frames: &[NewFrame<'_>]) -> Vec<Result<Compressed>> {
        let alike = |one: &NewFrame<'_>, next: &NewFrame<'_>| {
            (one.compression, one.checksum) == (next.compression, next.checksum)
        };
        let is_one_kind = frames.windows(2).all(|pair| matches!(pair, [one, next] if alike(one, next)));
        if frames.len() < 2 || !is_one_kind || frames.iter().any(|frame| self.check_new(frame).is_err()) {
            return frames.iter().map(|frame| self.compress(frame)).collect();
        }
        let groups: Vec<&[NewFrame<'_>]> = frames.chunks(GROUP).collect();
        let bytes: usize = frames.iter().map(|frame| frame.content.len()).sum();
        let tried = usize::from(!self.compressors.hope.load(Ordering::Relaxed)).min(groups.len());
        let (first, others) = groups.split_at(tried);
        let mut done: Vec<Vec<Content>> = first.iter().map(|group| compress_frames(group)).collect();
        let compresses = |done: &[Vec<Content>]| done.iter().flatten().any(|(_, stored)| stored.is_some());
        let several = bytes >= WORTH_A_THREAD && (first.is_empty() || compresses(&done));
        match if several { self.compressors.running() } else { None } {
            Some(running) => done.extend(running.compress(others)),
            None => done.extend(others.iter().map(|group| compress_frames(group))),
        }
        self.compressors.hope.store(compresses(&done), Ordering::Relaxed);
        frames.iter().zip(done.into_iter().flatten()).map(|(frame, content)| compressed(frame, content)).collect()
    }
}

fn compressed(frame: &NewFrame<'_>, (checksum, stored): Content) -> Result<Compressed> {
    let Some(checksum) = checksum else {
        return Err(PoolError::Refused("a sealed frame is written with its stored bytes".to_owned()));
    };
    let (compression, stored) = stored.unzip();
    let logical = frame.content.len();
    let pointer = Pointer {
        segment: 0,
        index: 0,
        offset: 0,
        stored: stored.as_ref().map_or(logical, Vec::len) as u32,
        logical: logical as u32,
        kind: frame.kind,
        compression: compression.unwrap_or(Compression::Off),
        checksum_kind: frame.checksum,
        pin: 0,
        birth: frame.birth,
        checksum,
    };
    Ok(Compressed { pointer, stored, sealed: None })
}

#[cfg(test)]
mod tests;
