//! Files whose inodes are locked by callers that are being served: fallocate(2), truncation, copy_file_range(2),
//! direct writes. Such a caller may wait in the layer until the kernel has written dirty pages back, which otherwise
//! waits for the inode's lock (`self_io/flush.rs`).
//!
//! Owned by `writeback.rs`; entered by the handlers of `ops/`. Invariant: a file is in the table exactly while such a
//! request for it is served.

use parking_lot::Mutex;
use std::collections::HashMap;

/// Number of these requests, by node id.
#[derive(Default)]
pub(crate) struct LockedFiles(Mutex<HashMap<u64, usize>>);

/// One of these requests, until it is dropped.
pub(crate) struct Locked<'a> {
    table: &'a LockedFiles,
    nodeid: u64,
}

impl LockedFiles {
    /// Adds a request.
    pub fn enter(&self, nodeid: u64) -> Locked<'_> {
        *self.0.lock().entry(nodeid).or_default() += 1;
        Locked { table: self, nodeid }
    }

    /// Whether there is a request for the file.
    pub fn has(&self, nodeid: u64) -> bool {
        self.0.lock().contains_key(&nodeid)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let mut table = self.table.0.lock();
        if let Some(served) = table.get_mut(&self.nodeid) {
            *served -= 1;
            if *served == 0 {
                table.remove(&self.nodeid);
            }
        }
    }
}
