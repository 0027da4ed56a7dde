//! Detached mounts of our own of a file system below, through which files are opened once more.
//!
//! Made by `watch/own_mounts.rs`, so that writes through them are told from others', and by
//! `quiet.rs`, so that reading leaves access times alone. Invariant: a file is opened the ordinary
//! way first, which decides whether it may be; what cannot be opened so (handles that do not lead
//! back, a stricter mount) stays as it was opened.

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

/// The most file systems below one source that get one of a kind: some make a device of each of
/// thousands of snapshots.
pub(super) const MOUNTS_MAX: usize = 64;

/// It lasts as long as its descriptors and the files that were opened through it.
pub(super) struct DetachedMount {
    /// Holds the mount together.
    _tree: OwnedFd,
    /// What it is a mount of, open.
    anchor: OwnedFd,
}

impl DetachedMount {
    /// A clone of the mount that a file lies on. Its content is held by the mount.
    ///
    /// # Errors
    /// What the kernel says; EPERM without `CAP_SYS_ADMIN`.
    pub(super) fn of(file: BorrowedFd<'_>, noatime: bool) -> io::Result<DetachedMount> {
        let tree = mounts::clone_tree(Path::new(&proc_path(file)), false)?;
        // Else it would hold on to what others mount below the source later.
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

    /// What it is a mount of, open.
    pub(super) fn anchor(&self) -> BorrowedFd<'_> {
        self.anchor.as_fd()
    }

    /// The file behind `descriptor`, opened through this mount; else `descriptor` itself.
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
