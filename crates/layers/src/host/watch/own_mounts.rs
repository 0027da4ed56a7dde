//! Mounts of our own of the watched file systems, through which files are opened for writing.
//!
//! Made by [`super::Running::watch_file_system`], used at each opening for writing. A mount of our
//! own is a detached clone of the mount that the source lies on: nobody else has files open through
//! it, so that content events that come through it are our clients' own, and the kernel is told to
//! leave them out. Events of the same file through any other mount are reported as ever.
//!
//! The hosts of one watch group share their marks, so that this holds for all: see `marks.rs` for
//! what must be heard all the same.
//!
//! Invariants: a file is opened the ordinary way first, which decides whether it may be; what
//! cannot be opened through a mount of our own (handles that do not lead back, a stricter mount)
//! stays as it was opened and is merely reported. One mark per mount, none per file.
//!
//! Why not a mark per file while it is written: files come and go by the thousand, and such a mark
//! would hide the writes of others, too.

use super::super::detached_mount::{DetachedMount, MOUNTS_MAX};
use nacre_sys::fanotify;
use parking_lot::RwLock;
use rustix::fs::OFlags;
use std::{
    collections::HashMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

/// What our clients do with an open file.
const OWN: fanotify::Mask = fanotify::MODIFY | fanotify::CLOSE_WRITE;

/// See the file's head.
#[derive(Default)]
pub(super) struct OwnMounts {
    mounts: RwLock<HashMap<u32, Arc<DetachedMount>>>,
    /// What is read through them leaves access times alone.
    noatime: bool,
}

impl OwnMounts {
    pub(super) fn new(noatime: bool) -> OwnMounts {
        OwnMounts { noatime, ..OwnMounts::default() }
    }

    /// Makes a mount for the file system of `file` and tells `group` to leave it out. Without it,
    /// writes are dearer, not wrong.
    pub(super) fn add(&self, group: BorrowedFd<'_>, device: u32, file: BorrowedFd<'_>) {
        let mut known = self.mounts.write();
        if known.len() >= MOUNTS_MAX || known.contains_key(&device) {
            return;
        }
        let made = DetachedMount::of(file, self.noatime);
        match made.and_then(|mount| fanotify::ignore_mount(group, mount.anchor(), OWN).map(|()| mount)) {
            Ok(mount) => {
                known.insert(device, Arc::new(mount));
            }
            Err(error) => tracing::debug!(%error, "no mount of our own: each write through us is reported back"),
        }
    }

    /// Has no mount for that device any more: also what is written to files that are open already
    /// is reported from now on.
    ///
    /// # Errors
    /// What the kernel says; then it may not be reported.
    pub(super) fn give_up(&self, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
        let known = self.mounts.write().remove(&device);
        known.map_or(Ok(()), |mount| fanotify::hear_mount(group, mount.anchor(), OWN))
    }

    /// The file behind `descriptor`, of that device, opened through our own mount; else
    /// `descriptor` itself.
    pub(super) fn open(&self, device: u32, descriptor: OwnedFd, flags: OFlags) -> OwnedFd {
        let mount = self.mounts.read().get(&device).map(Arc::clone);
        match mount {
            Some(mount) => mount.open(descriptor, flags),
            None => descriptor,
        }
    }
}
