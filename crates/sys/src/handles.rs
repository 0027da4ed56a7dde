//! File handles: what the kernel names a file by in notifications, turned back into a descriptor, and the way from one mount of a file
//! system to another.

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

/// Opens the file behind a descriptor once more, with `flags`, as seen through the mount of `mount` (any open file of it, not `O_PATH`).
/// Both must be of one file system.
///
/// # Errors
/// As `open(2)`; EOPNOTSUPP or EOVERFLOW where the file system makes no handles that lead back; ESTALE; EPERM without
/// `CAP_DAC_READ_SEARCH`.
pub fn open_through(mount: BorrowedFd<'_>, file: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    // struct file_handle: handle_bytes u32, handle_type i32, then the bytes.
    let mut raw = [0_u32; 2 + HANDLE_MAX / 4];
    raw[0] = u32::try_from(HANDLE_MAX).unwrap_or_default();
    let mut mount_id: libc::c_int = 0;
    // SAFETY: the structure has room for the bytes that it announces, is aligned to 4 as file_handle is, and lives during the call; so
    // does the number. The empty path is a C string and means the file of the descriptor itself.
    check(unsafe {
        libc::syscall(libc::SYS_name_to_handle_at, file.as_raw_fd(), c"".as_ptr(), raw.as_mut_ptr(), &raw mut mount_id, libc::AT_EMPTY_PATH)
    })?;
    // SAFETY: the kernel has just completed the structure, which lives during the call.
    let fd = check(unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), raw.as_ptr(), flags | libc::O_CLOEXEC) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { owned(fd) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::{
        fs::File,
        io::{ErrorKind, Read, Write},
        os::fd::AsFd,
    };

    #[test]
    fn a_file_without_a_name_is_opened_again() {
        let mount = File::open(std::env::temp_dir()).unwrap();
        let mut file = File::from(rustix::fs::openat(&mount, ".", OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).unwrap());
        file.write_all(b"content").unwrap();
        match open_through(mount.as_fd(), file.as_fd(), libc::O_RDONLY) {
            Ok(again) => {
                let mut content = Vec::new();
                File::from(again).read_to_end(&mut content).unwrap();
                assert_eq!(content, b"content");
            }
            // Not as an ordinary user, and not on every file system.
            Err(error) => assert!(matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported), "{error}"),
        }
    }
}
