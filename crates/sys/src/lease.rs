//! Whether anybody else has a file open or mapped: leases (`F_SETLEASE`) tell, and nothing else
//! does without a search through all processes.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
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

/// The leases of this process, each held for an instant.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// The number of leases that this process has asked for so far.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// So often a call is repeated that leases of this process may have refused, with a millisecond between.
const TRIES: usize = 100;

/// Makes a call, an open that does not wait, again as long as `is_refused` says that a lease refused it and this
/// process may have held that lease. No lock is held meanwhile: an open of a source that does not answer lasts long.
#[expect(clippy::disallowed_methods, reason = "a lease lasts an instant, and nothing tells its end")]
pub fn without_own<T>(mut call: impl FnMut() -> T, is_refused: impl Fn(&T) -> bool) -> T {
    for _ in 0..TRIES {
        // In this order: a lease that is held during the call is either seen in HELD, or asked for after `asked`.
        let asked = ASKED.load(SeqCst);
        if HELD.load(SeqCst) == 0 {
            let result = call();
            if !is_refused(&result) || ASKED.load(SeqCst) == asked {
                return result;
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    call()
}

/// Counts a lease as held while it lives.
struct Held;

impl Held {
    fn new() -> Held {
        HELD.fetch_add(1, SeqCst);
        ASKED.fetch_add(1, SeqCst);
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.fetch_sub(1, SeqCst);
    }
}

fn is_refused(file: BorrowedFd<'_>, lease: libc::c_int) -> io::Result<bool> {
    let _one = Held::new();
    let fd = file.as_raw_fd();
    // Opening the file in the moment in which the lease is held makes the kernel send this process a
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
    fn a_refusal_by_a_lease_of_another_process_is_not_tried_again() {
        // Beside it the other test may ask for leases.
        let (mut tries, asked) = (0, ASKED.load(SeqCst));
        let refused = without_own(
            || {
                tries += 1;
                Err::<(), _>(libc::EAGAIN)
            },
            |result| result.is_err(),
        );
        assert!(refused.is_err());
        if ASKED.load(SeqCst) == asked {
            assert_eq!(tries, 1);
        }
        let held = Held::new();
        let waiting = std::thread::spawn(|| without_own(|| (), |()| false));
        std::thread::sleep(std::time::Duration::from_millis(20));
        let waits = !waiting.is_finished();
        drop(held);
        waiting.join().unwrap();
        assert!(waits, "a call while this process holds a lease");
    }

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
