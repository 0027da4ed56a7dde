//! Status and counters of a mount, as plain data: read by the command line for `status`, `top` and Prometheus text.

use crate::{door::Door, invalidate::InvalidationCounts, self_io::waits::Waiting, writeback::WritebackFigures};
use fusewire::Session;
use nacre_vfs::{Coherence, Description};
use std::{path::PathBuf, sync::atomic::Ordering};

/// Transport of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// FUSE over io_uring.
    Uring,
    /// The fuse device.
    Device,
}

impl Transport {
    /// Name in `--transport`, shown to users.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Uring => "uring",
            Transport::Device => "device",
        }
    }
}

/// Counters of one kind of request since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationCounts {
    /// The kernel's name of the operation (`LOOKUP`).
    pub name: &'static str,
    /// Number of requests handled.
    pub requests: u64,
    /// Failed ones among them. A name or extended attribute that does not exist is no failure, nor an operation that
    /// the kernel will not request again (ENOSYS).
    pub errors: u64,
    /// Total time spent on all of them, nanoseconds.
    pub total_ns: u64,
    /// Bucket `i` counts requests that took from 2^i to 2^(i+1) - 1 nanoseconds.
    pub histogram: Vec<u64>,
}

/// Counters of passthrough.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassthroughCounts {
    /// Why it is off; `None` where it is on.
    pub refusal: Option<String>,
    /// Number of opens in passthrough.
    pub opens: u64,
    /// Opens among them that used a file kept open since its last close.
    pub reused: u64,
    /// Number of opens that the daemon serves because registering the file failed.
    pub failures: u64,
    /// Number of files kept open now.
    pub kept: u64,
}

/// Counters of write-back caching by the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WritebackCounts {
    /// Why it is off; `None` where it is on, file by file.
    pub refusal: Option<String>,
    /// Number of files open now whose writes are cached.
    pub files: usize,
    /// Number of writes reserved in the layers.
    pub announced: u64,
    /// Refused ones among them: the limit was reached.
    pub refused: u64,
    /// Number of recalls: layers required reservations from then on.
    pub recalls: u64,
    /// Maximum number of dirty bytes that the kernel can hold now.
    pub dirty_limit: u64,
}

/// Status of a mount at one moment.
#[derive(Clone, Debug)]
pub struct Status {
    /// The mount point.
    pub mountpoint: PathBuf,
    /// Device number, as in stat(2).
    pub device: Option<u64>,
    /// It is still in this process's mount tree. Otherwise processes that have it open, or other mount namespaces,
    /// hold it.
    pub attached: bool,
    /// Transport of the requests.
    pub transport: Transport,
    /// Why the transport is not io_uring although that was wanted.
    pub transport_fallback: Option<String>,
    /// Passthrough.
    pub passthrough: PassthroughCounts,
    /// Why files are opened by requests; `None` where the kernel opens them itself.
    pub asks_at_open: Option<&'static str>,
    /// It can never be made writable: the layers are not notified of open files, or nothing ever changes.
    pub stays_read_only: bool,
    /// Write-back caching by the kernel.
    pub writeback: WritebackCounts,
    /// The kernel enforces POSIX ACLs.
    pub acls: bool,
    /// Counters by kind of request, in the order of the protocol; only those that occurred.
    pub operations: Vec<OperationCounts>,
    /// Number of requests with a waiting caller: all but FORGET and INTERRUPT.
    pub requests: u64,
    /// Number of requests being handled now.
    pub in_flight: usize,
    /// Requests of the mount's own threads to the mount itself that wait too long.
    pub waiting: Vec<Waiting>,
    /// Number of serving threads now.
    pub threads: usize,
    /// Number of files that the kernel knows now.
    pub inodes: usize,
    /// Number of open files now.
    pub open_files: usize,
    /// The layers' coherence of the root.
    pub coherence: Coherence,
    /// Number of changes behind the mount that the kernel was notified of.
    pub invalidations: u64,
    /// Number of times when anything may have changed: lost events of the watch, or a reload.
    pub invalidated_all: u64,
    /// The layers.
    pub stack: Description,
}

impl Status {
    /// Number of requests of one kind.
    pub fn requests_of(&self, name: &str) -> u64 {
        self.operations.iter().find(|operation| operation.name == name).map_or(0, |operation| operation.requests)
    }
}

/// Reads the status and all counters.
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
