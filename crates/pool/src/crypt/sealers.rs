//! Sealing of several frames, by the calling thread and the threads of the pool.
//!
//! Callers: the adapter for frames, before content is written. Invariants:
//! - No lock is held while frames are sealed, and no space of the pool is used.
//! - The caller seals its frames from the front; from the back it queues copies for the threads as long as their queue
//!   has room. When the two meet, it runs queued jobs, its own or another caller's: it waits for running ones only.
//! - Frames that a crashed thread has lost are sealed by the caller.
//! - The threads begin with the first frames that are worth it, and end with their last owner.

use std::sync::{Arc, OnceLock};

use crossbeam_channel::{Sender, bounded};

use super::frames::Sealing;
use crate::error::PoolError;
use crate::frames::{Compressed, NewFrame};
use crate::workers::{Workers, processors};

/// Minimum number of bytes for which several threads seal.
const WORTH_A_THREAD: usize = 512 << 10;
/// Maximum number of waiting frames per thread.
const WAITING: usize = 6;

type Sealed = Result<Compressed, PoolError>;

/// A copy of a frame that a thread is to seal.
struct Job {
    sealing: Arc<Sealing>,
    /// The frame, with an empty content.
    frame: NewFrame<'static>,
    content: zeroize::Zeroizing<Vec<u8>>,
    /// Index of the frame in the caller's list.
    number: usize,
    /// Channel to the waiting caller; it recognizes a lost job by this end being dropped.
    results: Sender<(usize, Sealed)>,
}

impl Job {
    fn run(self) {
        let sealed = self.sealing.seal_content(&NewFrame { content: &self.content, ..self.frame });
        // The caller waits for all frames that it has queued.
        let _ = self.results.send((self.number, sealed));
    }
}

/// The threads that seal the frames of a pool.
#[derive(Default)]
pub struct Sealers(OnceLock<Workers<Job>>);

impl std::fmt::Debug for Sealers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sealers").field(&self.0.get().is_some()).finish()
    }
}

impl Sealers {
    /// The threads, if there are any, in addition to the calling thread.
    fn running(&self) -> Option<&Workers<Job>> {
        let start = || {
            let threads = processors() - 1;
            Workers::start("pool-seal", threads, threads * WAITING, Job::run)
        };
        Some(self.0.get_or_init(start)).filter(|workers| workers.count() > 0)
    }

    /// Seals frames, in their order.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where a frame cannot be sealed.
    pub(super) fn seal(&self, sealing: &Arc<Sealing>, frames: &[NewFrame<'_>]) -> Result<Vec<Compressed>, PoolError> {
        let bytes: usize = frames.iter().map(|frame| frame.content.len()).sum();
        let workers = if frames.len() > 1 && bytes >= WORTH_A_THREAD { self.running() } else { None };
        match workers {
            Some(workers) => seal_with(workers, sealing, frames),
            None => frames.iter().map(|frame| sealing.seal_content(frame)).collect(),
        }
    }
}

fn seal_with(
    workers: &Workers<Job>,
    sealing: &Arc<Sealing>,
    frames: &[NewFrame<'_>],
) -> Result<Vec<Compressed>, PoolError> {
    let (results, came) = bounded(frames.len());
    let mut done: Vec<Option<Sealed>> = frames.iter().map(|_| None).collect();
    let (mut front, mut back) = (0, frames.len());
    while front < back {
        // Checked first to avoid a needless copy, except where another caller is faster.
        if front + 1 < back
            && !workers.is_full()
            && let Some(frame) = frames.get(back - 1)
        {
            let job = Job {
                sealing: Arc::clone(sealing),
                frame: NewFrame { content: &[], ..*frame },
                content: frame.content.to_vec().into(),
                number: back - 1,
                results: results.clone(),
            };
            if workers.offer(job).is_ok() {
                back -= 1;
                continue;
            }
        }
        if let (Some(place), Some(frame)) = (done.get_mut(front), frames.get(front)) {
            *place = Some(sealing.seal_content(frame));
        }
        front += 1;
    }
    drop(results);
    while came.len() < frames.len() - back
        && let Some(job) = workers.take()
    {
        job.run();
    }
    for (number, sealed) in came {
        if let Some(place) = done.get_mut(number) {
            *place = Some(sealed);
        }
    }
    let lost = |frame| sealing.seal_content(frame);
    frames.iter().zip(done).map(|(frame, sealed)| sealed.unwrap_or_else(|| lost(frame))).collect()
}
