//! Detached mounts of our own of a file system below, through which files are reopened.
//!
//! Made by `watch/own_mounts.rs`, so that writes through them can be distinguished from others, and
//! by `quiet.rs`, so that reading leaves access times alone. Invariant: a file is opened the
//! ordinary way first, which checks permission; a file that cannot be reopened (its file handle
//! does not work, the mount is stricter) keeps its ordinary descriptor.

use nacre_sys::{
    handles,
    inode::proc_path,
    mounts::{self, MountAttributes},
};
use rustix::fs::{Mode, OFlags};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

/// Maximum number of file systems below one source that get such a mount: some file systems have a
/// device for each of thousands of snapshots.
pub(super) const MOUNTS_MAX: usize = 64;

/// A detached mount; it exists as long as its descriptors and the files that were opened through
/// it.
pub(super) struct DetachedMount {
    /// Keeps the mount alive.
    _tree: OwnedFd,
    /// The mount's root, open.
    anchor: OwnedFd,
}

impl DetachedMount {
    /// Clones the mount that a file lies on. The clone keeps the file's content in use.
    ///
    /// # Errors
    /// As the kernel; EPERM without `CAP_SYS_ADMIN`.
    pub(super) fn of(file: BorrowedFd<'_>, noatime: bool) -> io::Result<DetachedMount> {
        let tree = mounts::clone_tree(Path::new(&proc_path(file)), false)?;
        // Else mounts made below the source later would propagate into it and stay in use.
        mounts::make_private(tree.as_fd())?;
        if noatime {
            mounts::set_attributes(tree.as_fd(), MountAttributes::NO_ATIME, MountAttributes::empty(), None, false)?;
        }
        let anchor = rustix::fs::open(
            proc_path(tree.as_fd()),
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(DetachedMount { _tree: tree, anchor })
    }

    /// The mount's root, open.
    pub(super) fn anchor(&self) -> BorrowedFd<'_> {
        self.anchor.as_fd()
    }

    /// Reopens the file behind `descriptor` through this mount; else returns `descriptor` itself.
    pub(super) fn open(&self, descriptor: OwnedFd, flags: OFlags) -> OwnedFd {
        match handles::open_through(self.anchor(), descriptor.as_fd(), flags.bits().cast_signed()) {
            Ok(ours) => ours,
            Err(error) => {
                tracing::debug!(%error, "a file could not be opened through a mount of our own");
                descriptor
            }
        }
    }
}
