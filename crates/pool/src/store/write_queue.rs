//! Full pieces of file content on their way to devices, written by threads of their own: whoever
//! has filled them goes on meanwhile, with the next request or with compression.
//!
//! Callers: the store, for the stream of content. Invariants:
//! - A piece counts as settled only when its write has returned, and is read from memory until
//!   then. A commit waits for all of them ([`Appender::wait_settled`]) before it syncs.
//! - A write that fails suspends the store: the next one to write is told, and no commit succeeds
//!   any more.
//! - When [`WAITING`] pieces wait for each thread, the caller writes the next one itself. So memory is bounded, and
//!   nobody writes faster than devices do.
//! - The threads end with the store, after the last write.

use std::sync::{Arc, OnceLock};

use super::{Result, Store};
use crate::backend::Backend;
use crate::error::PoolError;
use crate::segment::stream::{Appender, Piece};
use crate::workers::Workers;

/// Pieces that wait at most, for each thread.
const WAITING: usize = 3;
/// A device has the next piece before it has told that one is done: so many more threads write than
/// there are segments to be written.
const MORE: usize = 1;

/// Why a store has stopped, if it has.
#[derive(Debug, Default)]
pub(super) struct Suspension(OnceLock<String>);

impl Suspension {
    /// The reason.
    pub(super) fn reason(&self) -> Option<&String> {
        self.0.get()
    }

    /// Stops it, if it was not stopped before; answers the first reason.
    pub(super) fn stop(&self, error: &PoolError) -> &String {
        self.0.get_or_init(|| {
            tracing::error!(%error, "the pool is suspended");
            error.to_string()
        })
    }
}

/// A piece, and where it goes.
struct Job {
    backend: Arc<dyn Backend>,
    piece: Arc<Piece>,
    appender: Arc<Appender>,
    stopped: Arc<Suspension>,
    settled: bool,
}

impl Drop for Job {
    fn drop(&mut self) {
        // Whoever waits for it must not wait forever.
        if !self.settled {
            self.stopped.stop(&PoolError::Refused("a thread that wrote is gone".to_owned()));
            self.appender.settle(&self.piece, false);
        }
    }
}

impl Job {
    fn run(mut self) {
        let Piece { start, bytes, .. } = &*self.piece;
        // Where it has less redundancy than it should, the backend knows, and the cleaner moves it.
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

/// The threads that write.
#[derive(Default)]
pub(super) struct WriteQueue(OnceLock<Workers<Job>>);

impl std::fmt::Debug for WriteQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WriteQueue").field(&self.0.get().is_some()).finish()
    }
}

impl Store {
    /// Has a full piece of content written.
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
