//! Changes of an inode through any descriptor of it, `O_PATH` included.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd},
};

/// Path in /proc that leads to the file of a descriptor, where proc is mounted.
pub fn proc_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// The number of `fchmodat2(2)`, which is the same on all architectures but Alpha; libc has it for some of them only.
const SYS_FCHMODAT2: libc::c_long = 452;

/// Changes the permission bits of exactly the file behind a descriptor.
///
/// # Errors
/// As `fchmodat2(2)`; EOPNOTSUPP for symbolic links.
pub fn change_mode(file: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    // SAFETY: the path is a NUL-terminated constant; the rest are numbers.
    let result = check(unsafe {
        libc::syscall(SYS_FCHMODAT2, file.as_raw_fd(), c"".as_ptr(), mode & 0o7777, libc::AT_EMPTY_PATH)
    });
    match result {
        // Before Linux 6.6.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            Ok(rustix::fs::chmod(proc_path(file), rustix::fs::Mode::from_raw_mode(mode & 0o7777))?)
        }
        other => other.map(drop),
    }
}

/// Closes a descriptor and returns the storage's error, which dropping ignores.
///
/// # Errors
/// EIO, ENOSPC, EDQUOT: a write that was accepted earlier has failed.
pub fn close(file: OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is ours and given up here; even on error it is closed (close(2)).
    check(unsafe { libc::close(file.into_raw_fd()) }.into()).map(drop)
}
