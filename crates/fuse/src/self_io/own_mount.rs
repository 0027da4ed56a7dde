//! Reaching files of our own mount from a thread of the daemon: by node id, without a name.
//!
//! Called by the threads of this folder. Needs root. Invariants: the mount is not held for longer than one act, so that it can be unmounted;
//! nothing of it that a user can watch is opened, but for `O_PATH`, of which nobody is told.

use nacre_sys::handles::{self, Handle};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, StatxFlags},
    io::Errno as SysErrno,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

/// How the kernel encodes a FUSE inode in a handle: `FILEID_INO64_GEN`, two words of node id and
/// one of generation.
const HANDLE_KIND: i32 = 0x81;

/// The device number of what is mounted at a place, without a request: a daemon that is killed
/// while it waits for itself could not end.
pub(crate) fn device(mountpoint: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statx(CWD, mountpoint, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// The same of a descriptor of the mount.
pub(crate) fn device_of(mount: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::statx(mount, c"", AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// Where the mount is.
#[derive(Clone, Debug)]
pub(crate) struct MountPlace {
    /// The path.
    pub mountpoint: PathBuf,
    /// The device number, so that nothing else is taken for it.
    pub device: u64,
    /// The generation of regular files' numbers.
    pub generation: u32,
}

/// The mount as the working directory of the calling thread: what opens files by handle takes it
/// for the mount, and no watcher hears of it, as it would of an open. The thread must have a
/// working directory of its own ([`nacre_sys::descriptors::leave_all_to_others`]), and leaves the
/// mount with this.
pub(crate) struct Entered(());

impl Entered {
    /// Enters the mount with this device number.
    ///
    /// # Errors
    /// ESTALE where something else is seen at its place.
    pub fn new(mountpoint: &Path, expected: u64) -> Result<Entered, SysErrno> {
        let root = rustix::fs::open(mountpoint, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if device_of(root.as_fd()).map_err(number)? != expected {
            return Err(SysErrno::STALE);
        }
        rustix::process::fchdir(root)?;
        Ok(Entered(()))
    }

    /// A descriptor for an inode that the kernel has in memory, by its node id and generation;
    /// ESTALE where it has not.
    ///
    /// # Errors
    /// As `open_by_handle_at(2)`.
    #[expect(clippy::unused_self, reason = "who has it is in the mount")]
    pub fn by_handle(&self, (nodeid, generation): (u64, u32), flags: OFlags) -> Result<OwnedFd, SysErrno> {
        let mut bytes = [0_u8; 12];
        let words = [(nodeid >> 32) as u32, nodeid as u32, generation];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        let handle = Handle { kind: HANDLE_KIND, bytes: &bytes };
        handles::open(CWD, handle, flags.bits().cast_signed()).map_err(number)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // Nothing keeps anybody from entering the root; a thread that stayed in the mount would
        // keep it from being unmounted.
        if let Err(error) = rustix::process::chdir(c"/") {
            tracing::warn!(%error, "a thread stays in the mount");
        }
    }
}

/// The number of a system call's error.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it over")]
pub(crate) fn number(error: io::Error) -> SysErrno {
    SysErrno::from_io_error(&error).unwrap_or(SysErrno::IO)
}
