//! Mounts of our own of the watched file systems, through which files are opened for writing.
//!
//! Made by [`super::Running::watch_file_system`], used at each opening for writing. A mount of our own is a detached clone of the mount
//! that the source lies on: nobody else has files open through it, so that content events that come through it are our clients' own, and
//! the kernel is told to leave them out. Events of the same file through any other mount are reported as ever.
//!
//! The hosts of one company share a group, so that this holds for all of them: see `marks.rs` for what must be heard all the same.
//!
//! Invariants: a file is opened the ordinary way first, which decides whether it may be; what cannot be opened through a mount of our own
//! (handles that do not lead back, a stricter mount) stays as it was opened and is merely reported. One mark per mount, none per file.
//!
//! Why not a mark per file while it is written: files come and go by the thousand, and such a mark would hide the writes of others, too.

use nacre_sys::{fanotify, handles, inode::proc_path, mounts};
use parking_lot::RwLock;
use rustix::fs::{Mode, OFlags};
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

/// The most file systems below one source that get a mount of our own: some make a device of each of thousands of snapshots.
const MOUNTS_MAX: usize = 64;

/// What our clients do with an open file.
const OWN: fanotify::Mask = fanotify::MODIFY | fanotify::CLOSE_WRITE;

/// A detached mount. It lasts as long as its descriptor and the files that were opened through it.
struct OwnMount {
    /// Holds the mount together.
    _tree: OwnedFd,
    /// What it is a mount of, open.
    anchor: OwnedFd,
}

impl OwnMount {
    fn new(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<OwnMount> {
        let tree = mounts::clone_tree(Path::new(&proc_path(file)), false)?;
        // Else it would hold on to what others mount below the source later.
        mounts::make_private(tree.as_fd())?;
        let anchor = rustix::fs::open(proc_path(tree.as_fd()), OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        fanotify::ignore_mount(group, anchor.as_fd(), OWN)?;
        Ok(OwnMount { _tree: tree, anchor })
    }
}

/// See the file's head.
#[derive(Default)]
pub(super) struct OwnMounts(RwLock<HashMap<u32, Arc<OwnMount>>>);

impl OwnMounts {
    /// Makes a mount for the file system of `file` and tells `group` to leave it out. Without it, writes are dearer, not wrong.
    pub(super) fn add(&self, group: BorrowedFd<'_>, device: u32, file: BorrowedFd<'_>) {
        let mut known = self.0.write();
        if known.len() >= MOUNTS_MAX || known.contains_key(&device) {
            return;
        }
        match OwnMount::new(group, file) {
            Ok(mount) => {
                known.insert(device, Arc::new(mount));
            }
            Err(error) => tracing::debug!(%error, "no mount of our own: each write through us is reported back"),
        }
    }

    /// Has no mount for that device any more: also what is written to files that are open already is reported from now on.
    ///
    /// # Errors
    /// What the kernel says; then it may not be reported.
    pub(super) fn give_up(&self, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
        let known = self.0.write().remove(&device);
        known.map_or(Ok(()), |mount| fanotify::hear_mount(group, mount.anchor.as_fd(), OWN))
    }

    /// The file behind `descriptor`, of that device, opened through our own mount; else `descriptor` itself.
    pub(super) fn open(&self, device: u32, descriptor: OwnedFd, flags: OFlags) -> OwnedFd {
        let Some(mount) = self.0.read().get(&device).map(Arc::clone) else { return descriptor };
        match handles::open_through(mount.anchor.as_fd(), descriptor.as_fd(), flags.bits().cast_signed()) {
            Ok(ours) => ours,
            Err(error) => {
                tracing::debug!(%error, "a file could not be opened through our own mount");
                descriptor
            }
        }
    }
}
