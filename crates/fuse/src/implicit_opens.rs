//! Open files for requests without a file handle: where the kernel opens files without a request (immutable mounts),
//! READ has a node id only.
//!
//! Called by `ops/data.rs`. A short LRU list, newest last; evicted files are closed. Files on file systems that are
//! mounted inside the source are not in it: those could not be unmounted. Invariant: a node is in the list at most
//! once, so that nothing of it stays open when the kernel has forgotten it.

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
        let entry = take(&mut files, nodeid)?;
        let file = Arc::clone(&entry.1);
        files.push_back(entry);
        Some(file)
    }

    /// Adds an open file in place of an earlier one of the node, unless it is on a file system mounted inside the
    /// source.
    pub fn put(&self, nodeid: u64, file: Opened) {
        if file.is_on_inner_mount() {
            return;
        }
        let closed = {
            let mut files = self.files.lock();
            let earlier = take(&mut files, nodeid);
            files.push_back((nodeid, file));
            if files.len() > self.most { files.pop_front() } else { earlier }
        };
        // Closed outside of the lock.
        drop(closed);
    }

    /// Closes the file of a node.
    pub fn forget(&self, nodeid: u64) {
        let gone = take(&mut self.files.lock(), nodeid);
        // Closed outside of the lock.
        drop(gone);
    }

    /// Closes all.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.files.lock());
        drop(all);
    }
}

/// Takes the open file of a node out of the list.
fn take(files: &mut VecDeque<(u64, Opened)>, nodeid: u64) -> Option<(u64, Opened)> {
    let at = files.iter().rposition(|(known, _)| *known == nodeid)?;
    files.remove(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_layers::mem::Mem;
    use nacre_vfs::{Caller, Layer, Name, OpenFlags};

    #[test]
    fn nothing_of_a_forgotten_node_stays_open() {
        let mem = Mem::default();
        let root = mem.root().unwrap().node;
        let made = |name: &[u8]| {
            mem.create(&Caller::ROOT, &root, Name::new(name).unwrap(), 0o600, OpenFlags::READ_WRITE).unwrap().1
        };
        let (first, second, other) = (made(b"first"), made(b"second"), made(b"other"));
        let opens = ImplicitOpens::new(2);
        opens.put(8, Arc::clone(&first));
        opens.put(9, Arc::clone(&other));
        // A second open of the node replaces the first one, and no other file.
        opens.put(8, Arc::clone(&second));
        assert_eq!([&first, &second, &other].map(Arc::strong_count), [1, 2, 2]);
        assert!(opens.get(8).is_some_and(|file| Arc::ptr_eq(&file, &second)));
        opens.forget(8);
        assert_eq!([&first, &second, &other].map(Arc::strong_count), [1, 1, 2]);
        assert!(opens.get(8).is_none() && opens.get(9).is_some());
    }
}
