//! The trait of a file system: [`Handler`], and the negotiation before its first request.
//!
//! Called by the session (once) and by its worker threads (many at a time).

use crate::abi::init;
use crate::errno::Errno;
use crate::reply::Reply;
use crate::request::{Header, Request};

/// The kernel's offer at INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Minor version of the kernel's protocol; the version in use is the lesser of this and
    /// [`crate::abi::KERNEL_MINOR_VERSION`].
    pub minor: u32,
    /// Offered flags: [`crate::abi::init`].
    pub flags: u64,
    /// Maximum read-ahead of the kernel, bytes.
    pub max_readahead: u32,
}

impl Offer {
    /// Whether all these flags are offered.
    pub fn has(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }
}

/// The file system's choice at INIT.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Chosen flags; those not offered are dropped. `INIT_EXT`, `MAX_PAGES` and `OVER_IO_URING` are
    /// set by the session as needed.
    pub flags: u64,
    /// Maximum data of one READ, WRITE or listing, bytes; rounded up to pages, at least 8 KiB. Each thread has one or
    /// two buffers of this size, of which untouched pages cost nothing. 128 KiB is enough with passthrough; 1 MiB
    /// (the kernel's maximum unless `fs.fuse.max_pages_limit` was raised) where the daemon serves data.
    pub max_io: u32,
    /// Maximum read-ahead, bytes; limited to the offer. The mount's bdi has a limit of its own.
    pub max_readahead: u32,
    /// Maximum number of concurrent background requests (read-ahead, asynchronous direct I/O, RELEASE); 0 keeps the
    /// kernel's default.
    pub max_background: u16,
    /// Number of background requests at which the kernel considers the mount congested; 0 keeps the default.
    pub congestion_threshold: u16,
    /// Granularity of times, nanoseconds: a power of ten up to 1,000,000,000.
    pub time_gran: u32,
    /// With passthrough: maximum stacking depth with this file system on top; 1 or 2. 0 without passthrough.
    pub max_stack_depth: u32,
    /// The kernel aborts the connection when a request is not answered within this many seconds; 0 for never.
    pub request_timeout: u16,
}

impl Default for Settings {
    /// Defaults for most file systems: parallel operations, large requests, adaptive readdirplus.
    fn default() -> Settings {
        Settings {
            flags: init::ASYNC_READ
                | init::ATOMIC_O_TRUNC
                | init::BIG_WRITES
                | init::DO_READDIRPLUS
                | init::READDIRPLUS_AUTO
                | init::ASYNC_DIO
                | init::PARALLEL_DIROPS
                | init::HANDLE_KILLPRIV_V2,
            max_io: 1 << 20,
            max_readahead: 128 << 10,
            max_background: 0,
            congestion_threshold: 0,
            time_gran: 1,
            max_stack_depth: 0,
            request_timeout: 0,
        }
    }
}

/// A file system, as seen by the kernel.
///
/// All methods but `init` are called from worker threads, many at a time. A panic in one of them is caught, logged
/// once, and answered with EIO.
pub trait Handler: Send + Sync + 'static {
    /// Chooses from the offer. Called once, before any other method; a second time only if io_uring
    /// failed after the choice and the session had to mount again without it.
    fn init(&self, offer: &Offer) -> Settings;

    /// Called in each worker thread before its first request. Workers are scheduled as SCHED_BATCH, have all signals
    /// blocked but one, and over io_uring are pinned to a CPU; threads started by them inherit that.
    fn worker_started(&self) {}

    /// Handles one request. `Err` is sent as an error reply, and the content of `reply` is dropped.
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno>;

    /// Whether requests of this kind ([`crate::abi::opcode`]) are answered from memory, with no lock held for longer
    /// than a moment. For these, a thread over io_uring need not leave SCHED_IDLE, to which it may have changed while
    /// it waited. Called with each request; an OPEN that truncates the file never counts as brief.
    fn is_brief(&self, opcode: u32) -> bool {
        let _ = opcode;
        false
    }

    /// Subtracts `lookups` from the lookup count of a node (FORGET and BATCH_FORGET).
    fn forget(&self, nodeid: u64, lookups: u64);

    /// Undoes a successful reply that the kernel did not accept (the request was aborted meanwhile): everything that
    /// it granted (a counted lookup, an open handle). `reply` is the body of that reply.
    fn undelivered(&self, request: &Header, reply: &[u8]) {
        let _ = (request, reply);
    }

    /// Receives the data requested by a RETRIEVE notification: the notification's number, the offset of the data in
    /// the file, and the data.
    fn retrieved(&self, unique: u64, nodeid: u64, offset: u64, data: &[u8]) {
        let _ = (unique, nodeid, offset, data);
    }

    /// Called last: the connection has ended and no other call is running. The kernel has forgotten all nodes and
    /// handles then, mostly without FORGETs and RELEASEs.
    fn destroy(&self) {}
}
