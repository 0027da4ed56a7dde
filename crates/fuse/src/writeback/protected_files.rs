//! Up to which offset the content of immutable and append-only files (`chattr +i`, `chattr +a`) is protected
//! against pages that the kernel writes back. The kernel knows the flags of its own file systems alone: it takes
//! stores to a shared mapping, and writes by a descriptor that has lost O_APPEND, into the page cache.
//!
//! Owned by `writeback.rs`; set by `ops/protected.rs` when flags change and when a file is opened for writing, by
//! `ops/unopened.rs` when a file that is opened without a request may be written to; asked with each page that arrives. Invariant: an offset grows only where the kernel holds no dirty page of the file,
//! so a page that it took before the flags were set is never refused.

use nacre_vfs::Protection;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The table, by node id.
#[derive(Default)]
pub(crate) struct ProtectedFiles {
    protected_up_to: Mutex<HashMap<u64, u64>>,
    count: AtomicUsize,
}

impl ProtectedFiles {
    /// The flags of a file have changed, which has this size now. `clean`: the kernel held no dirty page of it.
    /// Otherwise only what was protected before stays protected: dirty pages there are refused already.
    pub fn set(&self, nodeid: u64, protection: Protection, size: u64, clean: bool) {
        let mut files = self.protected_up_to.lock();
        match protection {
            Protection::None => files.remove(&nodeid),
            Protection::AppendOnly | Protection::Immutable => {
                let most = if clean { u64::MAX } else { files.get(&nodeid).copied().unwrap_or(0) };
                files.insert(nodeid, offset(protection, size).min(most))
            }
        };
        self.count.store(files.len(), Ordering::Release);
    }

    /// A file of which the kernel holds no dirty page is about to be written to. What the table has of it stays.
    pub fn begin(&self, nodeid: u64, protection: Protection, size: u64) {
        if protection != Protection::None {
            let mut files = self.protected_up_to.lock();
            files.entry(nodeid).or_insert_with(|| offset(protection, size));
            self.count.store(files.len(), Ordering::Release);
        }
    }

    /// The offset up to which a file is protected; 0 for one without protection.
    pub fn offset(&self, nodeid: u64) -> u64 {
        if self.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        self.protected_up_to.lock().get(&nodeid).copied().unwrap_or(0)
    }

    /// The kernel can hold no dirty page of a file any more.
    pub fn forget(&self, nodeid: u64) {
        if self.count.load(Ordering::Acquire) > 0 {
            let mut files = self.protected_up_to.lock();
            files.remove(&nodeid);
            self.count.store(files.len(), Ordering::Release);
        }
    }
}

fn offset(protection: Protection, size: u64) -> u64 {
    match protection {
        Protection::None => 0,
        Protection::AppendOnly => size,
        Protection::Immutable => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_from_before_the_flags_are_never_refused() {
        let files = ProtectedFiles::default();
        files.set(1, Protection::Immutable, 10, false);
        files.begin(1, Protection::Immutable, 10);
        assert_eq!(files.offset(1), 0);
        files.set(1, Protection::AppendOnly, 10, true);
        files.begin(1, Protection::AppendOnly, 20);
        assert_eq!(files.offset(1), 10);
        files.set(1, Protection::Immutable, 10, true);
        assert_eq!((files.offset(1), files.offset(2)), (u64::MAX, 0));
        // A flush that fails takes no protection away, and adds none.
        files.set(1, Protection::Immutable, 10, false);
        assert_eq!(files.offset(1), u64::MAX);
        files.set(1, Protection::AppendOnly, 10, false);
        files.set(1, Protection::Immutable, 20, false);
        assert_eq!(files.offset(1), 10);
        files.set(1, Protection::None, 10, true);
        files.begin(1, Protection::None, 10);
        files.begin(2, Protection::AppendOnly, 5);
        assert_eq!((files.offset(1), files.offset(2)), (0, 5));
        files.forget(2);
        assert_eq!((files.offset(2), files.count.load(Ordering::Acquire)), (0, 0));
    }
}
