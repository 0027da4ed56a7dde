//! What the kernel believes of the times of an inode that is written to directly.
//!
//! Kept with the open files of the inode, counted up by `ops/opens.rs` and `ops/data.rs`; made true
//! by `attr_refresh.rs`.

use nacre_vfs::{Attr, Time};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering},
};

/// Times of modification that are closer than this are as good as equal, nanoseconds: native ones
/// have the granularity of a clock tick.
const CLOSE: i64 = 10_000_000;

/// What the kernel believes of an inode that is written to directly.
pub(crate) struct Times {
    /// The time of modification that it has, nanoseconds since 1970.
    kernel: AtomicI64,
    /// Direct writes, by number.
    pub(super) writes: AtomicU64,
    /// Of these, the last one that the kernel has heard of.
    told: AtomicU64,
    /// The thread has been asked to tell the kernel.
    pub(super) asked: AtomicBool,
    /// It does not believe for long: the attributes that it has are valid no more.
    pub(super) short: AtomicBool,
    /// Files open for direct writes.
    pub(super) writers: AtomicUsize,
}

impl Times {
    /// Entered for an inode that the kernel has with these attributes; `short` where it was told
    /// that they are valid for no time.
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

    /// Whether the kernel's time is as good as this one, or just this one where it has to be
    /// `exact`.
    pub(super) fn fits(&self, attr: &Attr, exact: bool) -> bool {
        let most = if exact { 0 } else { CLOSE.unsigned_abs() };
        nanoseconds(attr.mtime).abs_diff(self.kernel.load(Ordering::Acquire)) <= most
    }

    /// A direct write is about to be made; whether the kernel is to be told.
    pub fn written(&self) -> bool {
        self.writes.fetch_add(1, Ordering::AcqRel);
        // Where the kernel's answers are short, a stat(2) asks and waits.
        !self.short.load(Ordering::Acquire) && !self.asked.swap(true, Ordering::AcqRel)
    }

    /// There may have been writes that the kernel has not heard of.
    pub fn missed(&self) {
        self.writes.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether there are writes that the kernel has not heard of.
    pub(super) fn is_stale(&self) -> bool {
        self.told.load(Ordering::Acquire) < self.writes.load(Ordering::Acquire)
    }

    /// Whether nothing is left to be done: no writers, and what the thread was asked for is done.
    pub(super) fn is_over(&self) -> bool {
        self.writers.load(Ordering::Acquire) == 0 && !self.asked.load(Ordering::Acquire) && !self.is_stale()
    }

    /// The kernel has heard of the writes up to this one.
    pub(super) fn heard(&self, writes: u64) {
        self.told.fetch_max(writes, Ordering::AcqRel);
    }

    /// The kernel has this time from now on.
    pub(super) fn set(&self, mtime: Time) {
        self.kernel.store(nanoseconds(mtime), Ordering::Release);
    }

    /// The kernel has told us this time, or set it for somebody: it has it, and so has the file.
    pub fn agreed(&self, mtime: Time) {
        let writes = self.writes.load(Ordering::Acquire);
        self.set(mtime);
        self.heard(writes);
    }

    /// Whether this is the time that the kernel has from before a direct write: it must not go to
    /// the file.
    pub fn outdated(&self, mtime: Time) -> bool {
        self.is_stale() && self.kernel.load(Ordering::Acquire) == nanoseconds(mtime)
    }
}

/// Counts one more file open for direct writes.
pub(crate) fn one_more(times: &Arc<Times>) -> Arc<Times> {
    times.writers.fetch_add(1, Ordering::AcqRel);
    Arc::clone(times)
}

/// The same where it may be the first, of an inode that the kernel has with these attributes. Under
/// the inode's lock.
pub(crate) fn begin(times: &mut Option<Arc<Times>>, attr: &Attr, created: bool) -> Arc<Times> {
    one_more(times.get_or_insert_with(|| Arc::new(Times::new(attr, created))))
}

pub(super) fn nanoseconds(time: Time) -> i64 {
    time.sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.nsec))
}
