//! Detached mounts of our own with `noatime`, through which files are read where the source's
//! access times must not change.
//!
//! Used by `open.rs` where the layer has the option `noatime`. `O_NOATIME` on our descriptor is not
//! enough: for passthrough, the kernel reads through an open file of its own, which has the user's
//! flags and our descriptor's mount. A file system that is mounted inside the source gets no such
//! mount: it would stay in use after it was unmounted. Needs root; a file that cannot be opened in
//! this way keeps its ordinary descriptor. Invariants: the mount is cloned from a directory, so
//! that it keeps no file's content in use; it exists as long as the layer.

use super::detached_mount::{DetachedMount, MOUNTS_MAX};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

/// Mounts by device; `None` where none can be made.
#[derive(Default)]
pub(super) struct QuietMounts(Mutex<HashMap<u32, Option<Arc<DetachedMount>>>>);

impl QuietMounts {
    /// Opens the file behind `descriptor`, which lies on `device`, through this mount; else returns
    /// `descriptor` itself. `directory` yields a directory of the same file system, if there is one
    /// at hand.
    pub(super) fn open(
        &self,
        device: u32,
        descriptor: OwnedFd,
        flags: OFlags,
        directory: impl FnOnce() -> Option<OwnedFd>,
    ) -> OwnedFd {
        match self.mount(device, directory) {
            Some(mount) => mount.open(descriptor, flags),
            None => descriptor,
        }
    }

    fn mount(&self, device: u32, directory: impl FnOnce() -> Option<OwnedFd>) -> Option<Arc<DetachedMount>> {
        let mut known = self.0.lock();
        if let Some(mount) = known.get(&device) {
            return mount.clone();
        }
        if known.len() >= MOUNTS_MAX {
            return None;
        }
        let mount = DetachedMount::of(directory()?.as_fd(), true)
            .inspect_err(|error| tracing::debug!(%error, "no mount without access times"));
        known.entry(device).or_insert(mount.ok().map(Arc::new)).clone()
    }
}
