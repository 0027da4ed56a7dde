//! Whether anybody else has a file open or mapped: leases (`F_SETLEASE`) tell, and nothing else
//! does without a search through all processes.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::{PoisonError, RwLock},
};

/// `F_SETSIG` (asm-generic/fcntl.h), which libc lacks: the signal that tells of a lease to be
/// broken.
const F_SETSIG: libc::c_int = 10;

/// Whether anybody but this open file has the file open, or a mapping of it, at this moment; also
/// the kernel on somebody's behalf. A write lease is only granted to the single user of a file, and
/// given back at once.
///
/// # Errors
/// EINVAL where the file system knows no leases or the file is no regular one, EACCES where it
/// belongs to somebody else and `CAP_LEASE` is missing.
pub fn is_used_by_others(file: BorrowedFd<'_>) -> io::Result<bool> {
    is_refused(file, libc::F_WRLCK)
}

/// Whether anybody has the file open for writing, or a mapping of it that was made with such an
/// open file; `file` is open for reading alone. A read lease is only granted where that is not so,
/// and given back at once.
///
/// # Errors
/// As [`is_used_by_others`].
pub fn is_open_for_writing(file: BorrowedFd<'_>) -> io::Result<bool> {
    is_refused(file, libc::F_RDLCK)
}

/// Held by all who hold a lease, for an instant.
static OWN_LEASES: RwLock<()> = RwLock::new(());

/// Makes a call while this process holds no lease: an open that must not wait would be refused for
/// one of ours.
pub fn without_own<T>(call: impl FnOnce() -> T) -> T {
    let _none = OWN_LEASES.write().unwrap_or_else(PoisonError::into_inner);
    call()
}

fn is_refused(file: BorrowedFd<'_>, lease: libc::c_int) -> io::Result<bool> {
    let _one = OWN_LEASES.read().unwrap_or_else(PoisonError::into_inner);
    let fd = file.as_raw_fd();
    // Whoever opens the file in the moment in which we hold the lease makes the kernel send us a
    // signal: one that is ignored unless asked for. SAFETY: a command of integers on a descriptor
    // that is borrowed, so open.
    check(i64::from(unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) }))?;
    // SAFETY: as above.
    let taken = check(i64::from(unsafe { libc::fcntl(fd, libc::F_SETLEASE, lease) }));
    match taken {
        Ok(_) => {
            // SAFETY: as above.
            check(i64::from(unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) }))?;
            Ok(false)
        }
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, os::fd::AsFd};

    #[test]
    fn others_are_noticed() {
        let path = std::env::temp_dir().join(format!("nacre-sys-lease-{}", std::process::id()));
        std::fs::write(&path, b"content").unwrap();
        let file = File::open(&path).unwrap();
        assert!(!is_used_by_others(file.as_fd()).unwrap());
        let other = File::open(&path).unwrap();
        assert!(is_used_by_others(file.as_fd()).unwrap());
        assert!(!is_open_for_writing(file.as_fd()).unwrap());
        drop(other);
        assert!(!is_used_by_others(file.as_fd()).unwrap());
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        assert!(is_used_by_others(file.as_fd()).unwrap());
        assert!(is_open_for_writing(file.as_fd()).unwrap());
        let mapping = crate::mapping::SharedMapping::new(&writer, 1, true).unwrap();
        drop(writer);
        assert!(is_open_for_writing(file.as_fd()).unwrap());
        drop(mapping);
        assert!(!is_open_for_writing(file.as_fd()).unwrap());
        assert!(!is_used_by_others(file.as_fd()).unwrap());
        std::fs::remove_file(&path).unwrap();
    }
}
