//! Full pieces of file content on their way to devices, written by threads of their own: whoever
//! has filled them goes on meanwhile, with the next request or with compression.
//!
//! Callers: the store, for the stream of content. Invariants:
//! - A piece counts as settled only when its write has returned, and is read from memory until
//!   then. A commit waits for all of them ([`Appender::wait_settled`]) before it syncs.
//! - A write that fails suspends the store: the next one to write is told, and no commit succeeds
//!   any more.
//! - When [`WAITING`] pieces wait, the caller writes the next one itself. So memory is bounded, and
//!   nobody writes faster than devices do.
//! - The threads end with the store, after the last write.

use std::sync::{Arc, OnceLock};

use super::workers::Workers;
use super::{Result, Store};
use crate::device::{Device, failed};
use crate::error::PoolError;
use crate::frames::WriteStream;
use crate::segment::slots;
use crate::segment::stream::{Appender, PIECE, Piece};

/// Pieces that wait at most.
const WAITING: usize = 6;
/// As many threads write: a device has the next piece before it has told that one is done.
const WRITERS: usize = 2;

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
    targets: Vec<(Arc<dyn Device>, u64)>,
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
        let write = |(device, at): &(Arc<dyn Device>, u64)| {
            write_to(&**device, self.appender.stream, *at, &self.piece.bytes).map_err(|error| self.stopped.stop(&error))
        };
        let written = self.targets.iter().try_for_each(write).is_ok();
        self.settled = true;
        self.appender.settle(&self.piece, written);
        if written {
            let (piece, appender) = (Arc::clone(&self.piece), Arc::clone(&self.appender));
            drop(self);
            appender.recycle(piece);
        }
    }
}

/// Writes, and has the device begin to make it durable where it is much.
pub(super) fn write_to(device: &dyn Device, stream: WriteStream, at: u64, bytes: &[u8]) -> Result<()> {
    let written = match (bytes.len() >= PIECE / 2, stream) {
        // Trees are read again soon.
        (true, WriteStream::Data) => device.write_stream(bytes, at),
        (true, _) => device.write_at(bytes, at).map(|()| device.begin_sync(at, bytes.len() as u64)),
        (false, _) => device.write_at(bytes, at),
    };
    written.map_err(|error| failed(device, "writing", error))
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
    pub(super) fn write_behind(&self, piece: Arc<Piece>) -> Result<()> {
        let target = |place: &crate::label::SlotAddress| {
            Ok((self.device(place.device)?, slots::start(*place, self.slot) + u64::from(piece.start)))
        };
        let targets = piece.place.iter().map(target).collect::<Result<Vec<_>>>();
        let targets = targets.map_err(|error| {
            self.appenders.data.settle(&piece, false);
            self.suspend(&error)
        })?;
        let job = Job {
            targets,
            piece,
            appender: Arc::clone(&self.appenders.data),
            stopped: Arc::clone(&self.suspended),
            settled: false,
        };
        let workers = self.write_queue.0.get_or_init(|| Workers::start("pool-write", WRITERS, WAITING, Job::run));
        let Err(job) = workers.offer(job) else { return Ok(()) };
        job.run();
        self.usable()
    }
}
