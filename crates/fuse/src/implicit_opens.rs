//! Open files for requests that name none: where the kernel opens without asking (immutable
//! mounts), READ comes with a node id only.
//!
//! Called by `ops/data.rs`. A short list, youngest last; what falls out at the old end is closed. Files on
//! file systems that are mounted inside the source are not in it: these could not be unmounted.

use nacre_vfs::Opened;
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// Files kept open. Reads of one file come in runs, so few are enough.
const LIMIT: usize = 64;

/// The list.
pub(crate) struct ImplicitOpens {
    most: usize,
    files: Mutex<VecDeque<(u64, Opened)>>,
}

impl ImplicitOpens {
    /// An empty list of at most so many files.
    pub fn new(most: usize) -> ImplicitOpens {
        ImplicitOpens { most: most.min(LIMIT), files: Mutex::default() }
    }

    /// The open file of a node, if it is in the list; it becomes the youngest.
    pub fn get(&self, nodeid: u64) -> Option<Opened> {
        let mut files = self.files.lock();
        let at = files.iter().rposition(|(known, _)| *known == nodeid)?;
        let entry = files.remove(at)?;
        let file = Arc::clone(&entry.1);
        files.push_back(entry);
        Some(file)
    }

    /// Adds an open file, unless it has to be closed with its last user.
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
