//! The figures of a mount, as plain data: read by the command line for `status`, `top` and
//! Prometheus text.

use crate::{door::Door, invalidate::InvalidationCounts, self_io::waits::Waiting, writeback::WritebackFigures};
use fusewire::Session;
use nacre_vfs::{Coherence, Description};
use std::{path::PathBuf, sync::atomic::Ordering};

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// FUSE over io_uring.
    Uring,
    /// The fuse device.
    Device,
}

impl Transport {
    /// As `--transport` has it, shown to users.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Uring => "uring",
            Transport::Device => "device",
        }
    }
}

/// Requests of one kind since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationCounts {
    /// The kernel's name of it (`LOOKUP`).
    pub name: &'static str,
    /// Requests handled.
    pub requests: u64,
    /// Of these, failed. A name or extended attribute that does not exist is no failure, nor an operation that the kernel is
    /// not to ask for again (ENOSYS).
    pub errors: u64,
    /// Time spent on all of them together, nanoseconds.
    pub total_ns: u64,
    /// Bucket `i` counts requests that took from 2^i to 2^(i+1) - 1 nanoseconds.
    pub histogram: Vec<u64>,
}

/// How many opens the kernel serves itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassthroughCounts {
    /// Why it is off; `None` where it is on.
    pub refusal: Option<String>,
    /// Opens in passthrough.
    pub opens: u64,
    /// Of these, served by a file kept open since its last close.
    pub reused: u64,
    /// Opens that the daemon serves because registering the file failed.
    pub failures: u64,
    /// Files kept open now.
    pub kept: u64,
}

/// Writes that the kernel collects before it passes them on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WritebackCounts {
    /// Why none are; `None` where they may be, file by file.
    pub refusal: Option<String>,
    /// Files open now whose writes are collected.
    pub files: usize,
    /// Writes announced to the layers.
    pub announced: u64,
    /// Of these, refused: the limit was reached.
    pub refused: u64,
    /// How often the layers called for announcements.
    pub recalls: u64,
    /// The most that the kernel can hold back now, bytes.
    pub dirty_limit: u64,
}

/// Everything that a mount knows of itself at one moment.
#[derive(Clone, Debug)]
pub struct Status {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Its device number, as stat(2) shows it.
    pub device: Option<u64>,
    /// It is still there, as this process sees it. One that is not is held by whoever has it open,
    /// or by other mount namespaces.
    pub attached: bool,
    /// How requests arrive.
    pub transport: Transport,
    /// Why it is not io_uring although that was wanted.
    pub transport_fallback: Option<String>,
    /// Passthrough.
    pub passthrough: PassthroughCounts,
    /// Why files are opened by requests; `None` where the kernel opens them itself.
    pub asks_at_open: Option<&'static str>,
    /// It can never be made writable: nothing below is told of what is open, or nothing changes.
    pub stays_read_only: bool,
    /// Writes that the kernel collects.
    pub writeback: WritebackCounts,
    /// The kernel enforces POSIX ACLs.
    pub acls: bool,
    /// Requests by kind, in the order of the protocol; only those that occurred.
    pub operations: Vec<OperationCounts>,
    /// Requests that somebody waited for: all but FORGET and INTERRUPT.
    pub requests: u64,
    /// Requests being handled now.
    pub in_flight: usize,
    /// Requests of the mount's own threads to the mount itself that have waited for too long.
    pub waiting: Vec<Waiting>,
    /// Threads that serve requests now.
    pub threads: usize,
    /// Files that the kernel knows now.
    pub inodes: usize,
    /// Files open now.
    pub open_files: usize,
    /// What the layers promise for the root.
    pub coherence: Coherence,
    /// Changes behind the mount that the kernel was told of.
    pub invalidations: u64,
    /// Times when anything may have changed: a lost notice of the watch, or a reload.
    pub invalidated_all: u64,
    /// The layers.
    pub stack: Description,
}

impl Status {
    /// Requests of one kind.
    pub fn requests_of(&self, name: &str) -> u64 {
        self.operations.iter().find(|operation| operation.name == name).map_or(0, |operation| operation.requests)
    }
}

/// Reads all figures.
pub(crate) fn read(door: &Door, device: Option<u64>, session: &Session, counts: &InvalidationCounts) -> Status {
    let counters = session.counters();
    let operations = counters.snapshot().into_iter().map(|op| OperationCounts {
        name: op.name,
        requests: op.requests,
        errors: op.errors,
        total_ns: op.total_ns,
        histogram: op.buckets.to_vec(),
    });
    let (opens, reused, failures, kept) = door.open.passthrough.figures();
    let agreement = door.agreement();
    let refusal = door.open.passthrough.refusal().map(str::to_owned);
    Status {
        mountpoint: door.options.mountpoint.clone(),
        device,
        attached: session.is_mounted(),
        transport: match session.transport() {
            fusewire::Transport::Uring => Transport::Uring,
            fusewire::Transport::Device => Transport::Device,
        },
        transport_fallback: session.fallback_reason().map(str::to_owned),
        passthrough: PassthroughCounts { refusal, opens, reused, failures, kept },
        asks_at_open: agreement.asks_at_open,
        stays_read_only: door.options.immutable || agreement.opens_files_itself && !agreement.writeback,
        writeback: writeback(door),
        acls: agreement.acls,
        operations: operations.collect(),
        requests: counters.total(),
        in_flight: session.in_flight(),
        waiting: door.self_io.waits.late(),
        threads: session.threads(),
        inodes: door.inodes.len(),
        open_files: door.open.files.len() + door.writeback.written.len(),
        coherence: crate::negotiate::root_coherence(&*door.layer),
        invalidations: counts.told.load(Ordering::Relaxed),
        invalidated_all: counts.everything.load(Ordering::Relaxed),
        stack: door.layer.describe(),
    }
}

fn writeback(door: &Door) -> WritebackCounts {
    let WritebackFigures { refusal, files, announced, refused, recalls, dirty_limit } = door.writeback.figures();
    WritebackCounts { refusal, files, announced, refused, recalls, dirty_limit }
}
