//! Mounts of our own without access times, through which files are read where the source's are to
//! stay.
//!
//! Used by `open.rs` where the layer is told `noatime`. `O_NOATIME` on our descriptor is not
//! enough: what the kernel reads by itself (passthrough) it reads through an open file of its own,
//! which has the user's flags and our descriptor's mount. A file system that is mounted inside the
//! source gets none: it would stay in use after it was unmounted. Needs root; what cannot be opened so
//! stays as it was opened. Invariants: a mount is made of a directory, so that no file's content is
//! held by it; it lasts as long as the layer.

use super::detached_mount::{DetachedMount, MOUNTS_MAX};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

/// By device; `None` where there can be none.
#[derive(Default)]
pub(super) struct QuietMounts(Mutex<HashMap<u32, Option<Arc<DetachedMount>>>>);

impl QuietMounts {
    /// The file behind `descriptor`, of that device, opened through such a mount; else `descriptor`
    /// itself. `directory` is one of the same file system, if there is one at hand.
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
