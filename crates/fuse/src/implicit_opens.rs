//! Open files for requests without a file handle: where the kernel opens files without a request (immutable mounts),
//! READ has a node id only.
//!
//! Called by `ops/data.rs`. A short LRU list, newest last; evicted files are closed. Files on file systems that are
//! mounted inside the source are not in it: those could not be unmounted.

use nacre_vfs::Opened;
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// Maximum number of files kept open. Reads of one file come in runs, so few are enough.
const LIMIT: usize = 64;

/// LRU list of open files by node id.
pub(crate) struct ImplicitOpens {
    most: usize,
    files: Mutex<VecDeque<(u64, Opened)>>,
}

impl ImplicitOpens {
    /// An empty list of at most `most` files.
    pub fn new(most: usize) -> ImplicitOpens {
        ImplicitOpens { most: most.min(LIMIT), files: Mutex::default() }
    }

    /// Returns the open file of a node, if it is in the list, and makes it the newest.
    pub fn get(&self, nodeid: u64) -> Option<Opened> {
        let mut files = self.files.lock();
        let at = files.iter().rposition(|(known, _)| *known == nodeid)?;
        let entry = files.remove(at)?;
        let file = Arc::clone(&entry.1);
        files.push_back(entry);
        Some(file)
    }

    /// Adds an open file, unless it is on a file system mounted inside the source.
    pub fn put(&self, nodeid: u64, file: Opened) {
        if file.is_on_inner_mount() {
            return;
        }
        let oldest = {
            let mut files = self.files.lock();
            files.push_back((nodeid, file));
            if files.len() > self.most { files.pop_front() } else { None }
        };
        // Closed outside of the lock.
        drop(oldest);
    }

    /// Closes the file of a node.
    pub fn forget(&self, nodeid: u64) {
        let gone = {
            let mut files = self.files.lock();
            let at = files.iter().position(|(known, _)| *known == nodeid);
            at.and_then(|at| files.remove(at))
        };
        // Closed outside of the lock.
        drop(gone);
    }

    /// Closes all.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.files.lock());
        drop(all);
    }
}
