//! Asynchronous writes: full pieces of file content are written to the devices by threads of their own, while the
//! caller continues with the next request or with compression.
//!
//! Callers: the store, for the content stream. Invariants:
//! - A piece counts as settled only when its write has returned, and is read from memory until then. A commit waits for
//!   all of them ([`Appender::wait_settled`]) before it syncs.
//! - A failed write suspends the store: the next writer gets the error, and no commit succeeds any more.
//! - When [`WAITING`] pieces are queued per thread, the caller writes the next one itself. So memory is bounded, and
//!   nobody writes faster than the devices do.
//! - The threads end with the store, after the last write.

use std::sync::{Arc, OnceLock};

use super::{Result, Store};
use crate::backend::Backend;
use crate::error::PoolError;
use crate::segment::stream::{Appender, Piece};
use crate::workers::Workers;

/// Maximum number of queued pieces per thread.
const WAITING: usize = 3;
/// Number of threads beyond the number of open segments: one spare write per device keeps it busy.
const MORE: usize = 1;

/// The reason why a store is suspended, if it is.
#[derive(Debug, Default)]
pub(super) struct Suspension(OnceLock<String>);

impl Suspension {
    /// The reason.
    pub(super) fn reason(&self) -> Option<&String> {
        self.0.get()
    }

    /// Suspends the store, unless it is suspended already; returns the first reason.
    pub(super) fn stop(&self, error: &PoolError) -> &String {
        self.0.get_or_init(|| {
            tracing::error!(%error, "the pool is suspended");
            error.to_string()
        })
    }
}

/// A piece to be written.
struct Job {
    backend: Arc<dyn Backend>,
    piece: Arc<Piece>,
    appender: Arc<Appender>,
    stopped: Arc<Suspension>,
    settled: bool,
}

impl Drop for Job {
    fn drop(&mut self) {
        // Threads that wait for the piece must not wait forever.
        if !self.settled {
            self.stopped.stop(&PoolError::Refused("a thread that wrote is gone".to_owned()));
            self.appender.settle(&self.piece, false);
        }
    }
}

impl Job {
    fn run(mut self) {
        let Piece { start, bytes, .. } = &*self.piece;
        // If it has less redundancy than it should, the backend records that, and the cleaner moves the frames.
        let written = self.backend.write(self.piece.at(), self.appender.stream, u64::from(*start), bytes);
        let written = written.map_err(|error| self.stopped.stop(&error)).is_ok();
        self.settled = true;
        self.appender.settle(&self.piece, written);
        if written {
            let (piece, appender) = (Arc::clone(&self.piece), Arc::clone(&self.appender));
            drop(self);
            appender.recycle(piece);
        }
    }
}

/// The write threads.
#[derive(Default)]
pub(super) struct WriteQueue(OnceLock<Workers<Job>>);

impl std::fmt::Debug for WriteQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WriteQueue").field(&self.0.get().is_some()).finish()
    }
}

impl Store {
    /// Queues a full piece of content for writing.
    pub(super) fn write_behind(&self, appender: &Appender, piece: Arc<Piece>) -> Result<()> {
        let mut shared = self.appenders.of_data().iter();
        let Some(shared) = shared.find(|shared| std::ptr::eq(&raw const ***shared, appender)) else {
            return Err(PoolError::Refused("content has no segment to go to".to_owned()));
        };
        let job = Job {
            backend: Arc::clone(&self.backend),
            piece,
            appender: Arc::clone(shared),
            stopped: Arc::clone(&self.suspended),
            settled: false,
        };
        let workers = self.write_queue.0.get_or_init(|| {
            let threads = self.appenders.of_data().len() + MORE;
            Workers::start("pool-write", threads, threads * WAITING, Job::run)
        });
        let Err(job) = workers.offer(job) else { return Ok(()) };
        job.run();
        self.accepts_frames()
    }
}
