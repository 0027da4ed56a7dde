//! The kernel's cached times of an inode that is written to directly.
//!
//! Kept with the open files of the inode, counted up by `ops/opens.rs` and `ops/data.rs`; corrected by
//! `attr_refresh.rs`.

use nacre_vfs::{Attr, Time};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering},
};

/// Difference of mtimes up to which they count as equal, nanoseconds: native ones have the granularity of a clock
/// tick.
const CLOSE: i64 = 10_000_000;

/// The kernel's cached times of an inode that is written to directly.
pub(crate) struct Times {
    /// The kernel's mtime, nanoseconds since 1970.
    kernel: AtomicI64,
    /// Number of direct writes.
    pub(super) writes: AtomicU64,
    /// Number of direct writes that the kernel knows of.
    told: AtomicU64,
    /// The thread has been asked to update the kernel.
    pub(super) asked: AtomicBool,
    /// The kernel's attributes have expired, so that it asks at each stat.
    pub(super) short: AtomicBool,
    /// Number of files open for direct writes.
    pub(super) writers: AtomicUsize,
}

impl Times {
    /// State of an inode with these attributes in the kernel; `short` where they were sent with a timeout of zero.
    fn new(attr: &Attr, short: bool) -> Times {
        Times {
            kernel: AtomicI64::new(nanoseconds(attr.mtime)),
            writes: AtomicU64::new(0),
            told: AtomicU64::new(0),
            asked: AtomicBool::new(false),
            short: AtomicBool::new(short),
            writers: AtomicUsize::new(0),
        }
    }

    /// Whether the kernel's mtime counts as equal to this one, or is the same if `exact`.
    pub(super) fn fits(&self, attr: &Attr, exact: bool) -> bool {
        let most = if exact { 0 } else { CLOSE.unsigned_abs() };
        nanoseconds(attr.mtime).abs_diff(self.kernel.load(Ordering::Acquire)) <= most
    }

    /// Counts a direct write that is about to be made; returns whether the kernel has to be updated.
    pub fn written(&self) -> bool {
        self.writes.fetch_add(1, Ordering::AcqRel);
        // Where the kernel's attributes have expired, a stat(2) asks and waits.
        !self.short.load(Ordering::Acquire) && !self.asked.swap(true, Ordering::AcqRel)
    }

    /// Notes possible writes that the kernel does not know of.
    pub fn missed(&self) {
        self.writes.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether there are writes that the kernel does not know of.
    pub(super) fn is_stale(&self) -> bool {
        self.told.load(Ordering::Acquire) < self.writes.load(Ordering::Acquire)
    }

    /// Whether the state can be freed: no writers, and no update is pending.
    pub(super) fn is_over(&self) -> bool {
        self.writers.load(Ordering::Acquire) == 0 && !self.asked.load(Ordering::Acquire) && !self.is_stale()
    }

    /// Notes that the kernel knows of the writes up to this one.
    pub(super) fn heard(&self, writes: u64) {
        self.told.fetch_max(writes, Ordering::AcqRel);
    }

    /// Notes the kernel's mtime.
    pub(super) fn set(&self, mtime: Time) {
        self.kernel.store(nanoseconds(mtime), Ordering::Release);
    }

    /// Notes an mtime that the kernel sent or set for a caller: both the kernel and the file have it.
    pub fn agreed(&self, mtime: Time) {
        let writes = self.writes.load(Ordering::Acquire);
        self.set(mtime);
        self.heard(writes);
    }

    /// Whether this is the kernel's mtime from before a direct write: it must not be set on the file.
    pub fn outdated(&self, mtime: Time) -> bool {
        self.is_stale() && self.kernel.load(Ordering::Acquire) == nanoseconds(mtime)
    }
}

/// Counts a file open for direct writes.
pub(crate) fn one_more(times: &Arc<Times>) -> Arc<Times> {
    times.writers.fetch_add(1, Ordering::AcqRel);
    Arc::clone(times)
}

/// Counts a file open for direct writes where it may be the first one; `attr`: the inode's attributes in the kernel.
/// Under the inode's lock.
pub(crate) fn begin(times: &mut Option<Arc<Times>>, attr: &Attr, created: bool) -> Arc<Times> {
    one_more(times.get_or_insert_with(|| Arc::new(Times::new(attr, created))))
}

pub(super) fn nanoseconds(time: Time) -> i64 {
    time.sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.nsec))
}
