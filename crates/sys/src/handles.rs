//! File handles: what the kernel names a file by in notifications, turned back into a descriptor.

use crate::{check, owned};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

/// The largest handle that the kernel makes, bytes (`MAX_HANDLE_SZ`).
pub const HANDLE_MAX: usize = 128;

/// A handle as the kernel writes it: type and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle<'a> {
    /// Which encoding; the file system's business.
    pub kind: i32,
    /// The bytes, at most [`HANDLE_MAX`].
    pub bytes: &'a [u8],
}

/// Opens the file of a handle with `flags` (`O_PATH` and the like). `mount` is any open file (not `O_PATH`) of the file system.
///
/// # Errors
/// ESTALE where the file is gone; EPERM without `CAP_DAC_READ_SEARCH`.
pub fn open(mount: BorrowedFd<'_>, handle: Handle<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    // struct file_handle: handle_bytes u32, handle_type i32, then the bytes.
    let mut raw = [0_u32; 2 + HANDLE_MAX / 4];
    let length = handle.bytes.len();
    if length > HANDLE_MAX {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    raw[0] = u32::try_from(length).unwrap_or_default();
    raw[1] = handle.kind.cast_unsigned();
    for (word, chunk) in raw.iter_mut().skip(2).zip(handle.bytes.chunks(4)) {
        let mut bytes = [0_u8; 4];
        for (to, from) in bytes.iter_mut().zip(chunk) {
            *to = *from;
        }
        *word = u32::from_ne_bytes(bytes);
    }
    // SAFETY: the structure is complete, aligned to 4 as file_handle is, and lives during the call.
    let fd = check(unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), raw.as_ptr(), flags | libc::O_CLOEXEC) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { owned(fd) }
}
