//! inotify watches on single directories.
//!
//! Added by look-ups and listings, removed when the last node of a directory is dropped
//! ([`Lease`]). Invariant: the table and the kernel's watch are changed under one lock, so that a
//! watch and its entry exist together.

use super::super::node::HostNode;
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// All inotify watches of one source.
pub(in super::super) struct DirectoryWatches {
    descriptor: OwnedFd,
    /// The nodes of each watched directory: more than one where it has several identities.
    nodes: Mutex<HashMap<i32, Vec<Weak<HostNode>>>>,
    /// The limit of watches was reached; retries are useless until one is removed.
    full: AtomicBool,
}

/// One node's share in a watch; released with the node.
pub(in super::super) struct Lease {
    watches: Arc<DirectoryWatches>,
    watch: i32,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.watches.release(self.watch);
    }
}

impl DirectoryWatches {
    pub(super) fn new() -> std::io::Result<DirectoryWatches> {
        let descriptor = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(DirectoryWatches { descriptor, nodes: Mutex::default(), full: AtomicBool::new(false) })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Watches a directory. If that fails, the node stays unwatched.
    pub(super) fn add(self: &Arc<DirectoryWatches>, node: &Arc<HostNode>, directory: BorrowedFd<'_>) {
        if self.full.load(Ordering::Relaxed) {
            return;
        }
        let events = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::ATTRIB
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ONLYDIR;
        let added = {
            let mut nodes = self.nodes.lock();
            let added = inotify::add_watch(&self.descriptor, nacre_sys::inode::proc_path(directory), events);
            if let Ok(watch) = added {
                let known = nodes.entry(watch).or_default();
                known.retain(|other| other.strong_count() > 0);
                known.push(Arc::downgrade(node));
            }
            added
        };
        match added {
            Ok(watch) => node.keep_watch(Lease { watches: Arc::clone(self), watch }),
            Err(rustix::io::Errno::NOSPC) => {
                if !self.full.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "no inotify watches left (fs.inotify.max_user_watches): further directories are asked for anew each time"
                    );
                }
            }
            Err(error) => tracing::debug!(%error, "a directory cannot be watched"),
        }
    }

    fn release(&self, watch: i32) {
        let mut nodes = self.nodes.lock();
        let Some(known) = nodes.get_mut(&watch) else { return };
        known.retain(|node| node.strong_count() > 0);
        if known.is_empty() {
            nodes.remove(&watch);
            // EINVAL: the directory was removed, and its watch with it.
            let _removed = inotify::remove_watch(&self.descriptor, watch);
            self.full.store(false, Ordering::Relaxed);
        }
    }

    /// Removes a watch that the kernel has ended: its directory was removed or unmounted.
    pub(super) fn ended(&self, watch: i32) {
        let nodes = self.nodes.lock().remove(&watch).unwrap_or_default();
        for node in nodes.iter().filter_map(Weak::upgrade) {
            node.end_watch(|lease| lease.watch == watch);
        }
    }

    /// The nodes of a watched directory.
    pub(super) fn nodes(&self, watch: i32) -> Vec<Arc<HostNode>> {
        self.nodes.lock().get(&watch).map(|nodes| nodes.iter().filter_map(Weak::upgrade).collect()).unwrap_or_default()
    }

    /// Number of watched directories.
    #[cfg(test)]
    pub(in super::super) fn len(&self) -> usize {
        self.nodes.lock().len()
    }
}

/// One inotify event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event<'a> {
    pub(super) watch: i32,
    pub(super) mask: u32,
    /// Connects the two halves of a rename.
    pub(super) cookie: u32,
    /// Empty for the directory itself.
    pub(super) name: &'a [u8],
}

/// Parses the first event in `bytes`; also returns the remaining bytes.
pub(super) fn first(bytes: &[u8]) -> Option<(Event<'_>, &[u8])> {
    // struct inotify_event: wd i32, mask u32, cookie u32, len u32, name padded with NULs.
    let number = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let end = 16 + usize::try_from(number(12)?).ok()?;
    let padded = bytes.get(16..end)?;
    let length = padded.iter().position(|&byte| byte == 0).unwrap_or(padded.len());
    let name = padded.get(..length)?;
    Some((Event { watch: number(0)?.cast_signed(), mask: number(4)?, cookie: number(8)?, name }, bytes.get(end..)?))
}
