//! Detached mounts of our own of the watched file systems, through which files are opened for
//! writing.
//!
//! Made by [`super::Running::watch_file_system`], used at each opening for writing. The detached
//! mount is a clone of the mount that the source lies on: no other process has files open through
//! it, so content events from it are about writes of our own clients, and the kernel is configured
//! to ignore them. Events of the same file through any other mount are reported as usual.
//!
//! The hosts of one watch group share their marks, so that this holds for all: see `marks.rs` for
//! the writes that must cause events all the same.
//!
//! Invariants: a file is opened the ordinary way first, which checks permission; a file that cannot
//! be reopened through the detached mount (its file handle does not work, the mount is stricter)
//! keeps its ordinary descriptor, and its writes cause events. One ignore mark per mount, none per
//! file.
//!
//! Why not a mark per file while it is written: files come and go by the thousand, and such a mark
//! would hide the writes of other processes, too.

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

/// Events caused by our clients' writes to an open file.
const OWN: fanotify::Mask = fanotify::MODIFY | fanotify::CLOSE_WRITE;

/// Detached mounts by device; see the file's head.
#[derive(Default)]
pub(super) struct OwnMounts {
    mounts: RwLock<HashMap<u32, Arc<DetachedMount>>>,
    /// The mounts are `noatime`: reading through them leaves access times alone.
    noatime: bool,
}

impl OwnMounts {
    pub(super) fn new(noatime: bool) -> OwnMounts {
        OwnMounts { noatime, ..OwnMounts::default() }
    }

    /// Makes a mount for the file system of `file` and an ignore mark for it in `group`. Without
    /// it, writes are slower, not wrong.
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

    /// Drops the mount for that device: writes to files that are open through it cause events from
    /// now on, too.
    ///
    /// # Errors
    /// As the kernel; then these writes may cause no events.
    pub(super) fn give_up(&self, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
        let known = self.mounts.write().remove(&device);
        known.map_or(Ok(()), |mount| fanotify::hear_mount(group, mount.anchor(), OWN))
    }

    /// Reopens the file behind `descriptor` through the detached mount; else returns `descriptor`
    /// itself.
    pub(super) fn open(&self, device: u32, descriptor: OwnedFd, flags: OFlags) -> OwnedFd {
        let mount = self.mounts.read().get(&device).map(Arc::clone);
        match mount {
            Some(mount) => mount.open(descriptor, flags),
            None => descriptor,
        }
    }
}
