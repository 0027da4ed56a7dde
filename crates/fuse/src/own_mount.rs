//! Reaching files of our own mount from a thread of the daemon: by node id, without a name.
//!
//! Called by threads that serve no requests (`shadow.rs`, `resync.rs`, `collecting/settle.rs`). Needs root. Invariant: no descriptor of the
//! mount is held for longer than one act, so that it can be unmounted.

use nacre_sys::handles::{self, Handle};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, StatxFlags},
    io::Errno as SysErrno,
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

/// How the kernel encodes a FUSE inode in a handle: `FILEID_INO64_GEN`, two words of node id and one of generation.
const HANDLE_KIND: i32 = 0x81;

/// The device number of what is mounted at a place, without a request: a daemon that is killed while it waits for itself could not end.
pub(crate) fn device(mountpoint: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statx(CWD, mountpoint, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// The root of the mount with this device number; ESTALE where something else is seen at its place.
pub(crate) fn root(mountpoint: &Path, expected: u64) -> Result<OwnedFd, SysErrno> {
    if device(mountpoint).map_err(number)? != expected {
        return Err(SysErrno::STALE);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(mountpoint, flags, Mode::empty())?;
    // Once more: what was asked first was a name.
    let stat = rustix::fs::statx(&root, c"", AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    if rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor) != expected {
        return Err(SysErrno::STALE);
    }
    Ok(root)
}

/// A descriptor for an inode that the kernel has in memory, by its node id and generation; ESTALE where it has not.
pub(crate) fn by_handle(root: &OwnedFd, (nodeid, generation): (u64, u32), flags: OFlags) -> Result<OwnedFd, SysErrno> {
    let mut bytes = [0_u8; 12];
    let words = [(nodeid >> 32) as u32, nodeid as u32, generation];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    let handle = Handle { kind: HANDLE_KIND, bytes: &bytes };
    handles::open(root.as_fd(), handle, flags.bits().cast_signed()).map_err(number)
}

/// The number of a system call's error.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it over")]
pub(crate) fn number(error: io::Error) -> SysErrno {
    SysErrno::from_io_error(&error).unwrap_or(SysErrno::IO)
}
