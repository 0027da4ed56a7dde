//! Extended attributes by directory descriptor and name (`getxattrat(2)` and related calls, Linux
//! 6.13), never following a link at the end, and of the file behind any descriptor. Older kernels
//! are supported through proc, which is slower.

use crate::{CName, check, inode::proc_path};
use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicBool, Ordering},
};

// The same numbers on every supported architecture (the common part of the system call tables).
const SETXATTRAT: libc::c_long = 463;
const GETXATTRAT: libc::c_long = 464;
const LISTXATTRAT: libc::c_long = 465;
const REMOVEXATTRAT: libc::c_long = 466;

/// Whether this kernel lacks the calls; set at the first attempt.
static ABSENT: AtomicBool = AtomicBool::new(false);

/// The file of a call.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// The file with this name in this directory.
    Entry(BorrowedFd<'a>, &'a [u8]),
    /// The file behind this descriptor, `O_PATH` or not.
    File(BorrowedFd<'a>),
}

/// `struct xattr_args` of the kernel.
#[repr(C, align(8))]
struct Arguments {
    value: u64,
    size: u32,
    flags: u32,
}

/// Variant of the system call: at a directory, or through a path in proc.
#[expect(clippy::large_enum_variant, reason = "lives on the stack for one call; a box would be an allocation per call")]
enum Way {
    At(libc::c_int, CName),
    /// The path, and whether a link at its end is followed (the magic link of the descriptor
    /// itself).
    Path(CString, bool),
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

/// Checks the name of an attribute; ERANGE if it is too long, like xattr(7).
fn attribute(name: &[u8]) -> io::Result<CName> {
    if name.is_empty() || name.len() > 255 {
        return Err(io::Error::from_raw_os_error(libc::ERANGE));
    }
    CName::new(name).ok_or_else(invalid)
}

fn way(target: Target<'_>) -> io::Result<Way> {
    match target {
        Target::Entry(directory, name) if !ABSENT.load(Ordering::Relaxed) => {
            let name = CName::new(name).ok_or_else(|| io::Error::from_raw_os_error(libc::ENAMETOOLONG))?;
            Ok(Way::At(directory.as_raw_fd(), name))
        }
        Target::Entry(directory, name) => {
            let mut path = proc_path(directory).into_bytes();
            path.push(b'/');
            path.extend_from_slice(name);
            Ok(Way::Path(CString::new(path).map_err(|_| invalid())?, false))
        }
        // The calls with an empty path refuse O_PATH descriptors (EBADF), the magic link in proc
        // does not.
        Target::File(file) => Ok(Way::Path(CString::new(proc_path(file)).map_err(|_| invalid())?, true)),
    }
}

/// Makes the call; if the kernel lacks it, remembers that and uses proc.
fn call(target: Target<'_>, make: impl Fn(&Way) -> libc::c_long) -> io::Result<usize> {
    let result = check(make(&way(target)?));
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && !ABSENT.swap(true, Ordering::Relaxed) => {
            check(make(&way(target)?))
        }
        other => other,
    }
}

/// Reads an attribute; with an empty buffer, only returns its size.
///
/// # Errors
/// As `getxattr(2)`.
pub fn get(target: Target<'_>, name: &[u8], buffer: &mut [u8]) -> io::Result<usize> {
    let name = attribute(name)?;
    let length = buffer.len();
    let pointer = buffer.as_mut_ptr();
    call(target, |way| match way {
        Way::At(directory, entry) => {
            let arguments =
                Arguments { value: pointer as u64, size: u32::try_from(length).unwrap_or(u32::MAX), flags: 0 };
            // SAFETY: the strings end with NUL, the buffer has `size` bytes, everything lives
            // during the call.
            unsafe {
                libc::syscall(
                    GETXATTRAT,
                    *directory,
                    entry.as_ptr(),
                    libc::AT_SYMLINK_NOFOLLOW,
                    name.as_ptr(),
                    &raw const arguments,
                    size_of::<Arguments>(),
                )
            }
        }
        // SAFETY: as above.
        Way::Path(path, true) => unsafe {
            libc::getxattr(path.as_ptr(), name.as_ptr(), pointer.cast(), length) as libc::c_long
        },
        // SAFETY: as above.
        Way::Path(path, false) => unsafe {
            libc::lgetxattr(path.as_ptr(), name.as_ptr(), pointer.cast(), length) as libc::c_long
        },
    })
}

/// Lists the names of attributes, each terminated by a NUL; with an empty buffer, only returns the
/// size.
///
/// # Errors
/// As `listxattr(2)`.
pub fn list(target: Target<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    let length = buffer.len();
    let pointer: *mut libc::c_char = buffer.as_mut_ptr().cast();
    call(target, |way| match way {
        // SAFETY: the string ends with NUL, the buffer has `length` bytes, everything lives during
        // the call.
        Way::At(directory, entry) => unsafe {
            libc::syscall(LISTXATTRAT, *directory, entry.as_ptr(), libc::AT_SYMLINK_NOFOLLOW, pointer, length)
        },
        // SAFETY: as above.
        Way::Path(path, true) => unsafe { libc::listxattr(path.as_ptr(), pointer, length) as libc::c_long },
        // SAFETY: as above.
        Way::Path(path, false) => unsafe { libc::llistxattr(path.as_ptr(), pointer, length) as libc::c_long },
    })
}

/// Sets an attribute; `flags` are `XATTR_CREATE` (1) and `XATTR_REPLACE` (2).
///
/// # Errors
/// As `setxattr(2)`.
pub fn set(target: Target<'_>, name: &[u8], value: &[u8], flags: i32) -> io::Result<()> {
    let name = attribute(name)?;
    let size = u32::try_from(value.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    call(target, |way| match way {
        Way::At(directory, entry) => {
            let arguments = Arguments { value: value.as_ptr() as u64, size, flags: flags.cast_unsigned() };
            // SAFETY: the strings end with NUL, the value has `size` bytes, everything lives during
            // the call.
            unsafe {
                libc::syscall(
                    SETXATTRAT,
                    *directory,
                    entry.as_ptr(),
                    libc::AT_SYMLINK_NOFOLLOW,
                    name.as_ptr(),
                    &raw const arguments,
                    size_of::<Arguments>(),
                )
            }
        }
        Way::Path(path, true) => {
            // SAFETY: as above.
            unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) }.into()
        }
        Way::Path(path, false) => {
            // SAFETY: as above.
            unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) }.into()
        }
    })
    .map(drop)
}

/// Removes an attribute.
///
/// # Errors
/// As `removexattr(2)`.
pub fn remove(target: Target<'_>, name: &[u8]) -> io::Result<()> {
    let name = attribute(name)?;
    call(target, |way| match way {
        // SAFETY: the strings end with NUL and live during the call.
        Way::At(directory, entry) => unsafe {
            libc::syscall(REMOVEXATTRAT, *directory, entry.as_ptr(), libc::AT_SYMLINK_NOFOLLOW, name.as_ptr())
        },
        // SAFETY: as above.
        Way::Path(path, true) => unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) }.into(),
        // SAFETY: as above.
        Way::Path(path, false) => unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) }.into(),
    })
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        os::fd::{AsFd, OwnedFd},
    };

    #[test]
    fn by_name_and_by_descriptor_reach_the_same_attribute() {
        let path = std::env::temp_dir().join(format!("nacre-sys-xattrat-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("file"), b"").unwrap();
        let directory = fs::File::open(&path).unwrap();
        let handle: OwnedFd = rustix::fs::openat(
            &directory,
            "file",
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        let by_name = Target::Entry(directory.as_fd(), b"file");
        let by_fd = Target::File(handle.as_fd());
        let mut buffer = [0; 64];
        for absent in [ABSENT.load(Ordering::Relaxed), true] {
            ABSENT.store(absent, Ordering::Relaxed);
            match set(by_fd, b"user.one", b"value", 0) {
                // The temporary directory lies on a file system without them.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => break,
                other => other.unwrap(),
            }
            for target in [by_name, by_fd] {
                assert_eq!(get(target, b"user.one", &mut []).unwrap(), 5);
                let length = get(target, b"user.one", &mut buffer).unwrap();
                assert_eq!(&buffer[..length], b"value");
                let length = list(target, &mut buffer).unwrap();
                assert!(buffer[..length].windows(9).any(|name| name == b"user.one\0"));
                assert_eq!(set(target, b"user.one", b"x", 1).unwrap_err().raw_os_error(), Some(libc::EEXIST));
                assert_eq!(get(target, b"user.one", &mut [0; 2]).unwrap_err().raw_os_error(), Some(libc::ERANGE));
            }
            remove(by_name, b"user.one").unwrap();
            assert_eq!(remove(by_fd, b"user.one").unwrap_err().raw_os_error(), Some(libc::ENODATA));
        }
        ABSENT.store(false, Ordering::Relaxed);
        fs::remove_dir_all(path).unwrap();
    }
}
