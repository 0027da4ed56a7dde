//! Whether a file is open or mapped elsewhere, by leases (`F_SETLEASE`): the only means without a
//! search through all processes.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
};

/// `F_SETSIG` (asm-generic/fcntl.h), which libc lacks: selects the signal for a lease that is being
/// broken.
const F_SETSIG: libc::c_int = 10;

/// Whether a file is open or mapped by anyone else than this open file at this moment, including
/// the kernel acting for a process. A write lease is only granted to the single user of a file, and
/// released at once.
///
/// # Errors
/// EINVAL if the file system has no leases or the file is not regular, EACCES if it belongs to
/// another user and `CAP_LEASE` is missing.
pub fn is_used_by_others(file: BorrowedFd<'_>) -> io::Result<bool> {
    is_refused(file, libc::F_WRLCK)
}

/// Whether a file is open for writing, or mapped through an open file for writing; `file` itself is
/// open for reading only. A read lease is only granted if it is not, and released at once.
///
/// # Errors
/// As [`is_used_by_others`].
pub fn is_open_for_writing(file: BorrowedFd<'_>) -> io::Result<bool> {
    is_refused(file, libc::F_RDLCK)
}

/// Number of leases that this process holds now, each for an instant.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// Number of leases that this process has requested so far.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// Maximum number of attempts of a call that may have failed because of our own leases, with a
/// millisecond between.
const TRIES: usize = 100;

/// Retries a call, a non-blocking open, while `is_refused` finds that a lease refused it and this
/// process may have held that lease. No lock is held meanwhile: an open of a source that does not
/// answer lasts long.
#[expect(clippy::disallowed_methods, reason = "a lease lasts an instant, and nothing tells its end")]
pub fn without_own<T>(mut call: impl FnMut() -> T, is_refused: impl Fn(&T) -> bool) -> T {
    for _ in 0..TRIES {
        // In this order: a lease held during the call is either seen in HELD, or requested after
        // `asked` was read.
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

/// Counts a lease as held until it is dropped.
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
    // If the file is opened while the lease is held, the kernel sends this process a signal:
    // SIGURG, which is ignored by default. SAFETY: a command of integers on a descriptor that is
    // borrowed, so open.
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
        // The other test may request leases concurrently.
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
