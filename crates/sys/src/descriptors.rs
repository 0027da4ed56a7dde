//! All descriptors of the process at once.
//!
//! Called before another program is started that must not hold what this one was given, and by a thread that must hold nothing of its
//! process. Invariant: nothing is closed that the rest of the process uses.

use crate::check;
use rustix::fs::{Mode, OFlags};
use std::{io, os::fd::IntoRawFd};

/// `CLOSE_RANGE_CLOEXEC` (linux/close_range.h).
const CLOEXEC: libc::c_uint = 1 << 2;

/// Marks every descriptor from `first` on to be closed when another program takes over.
///
/// # Errors
/// ENOSYS before Linux 5.9, EINVAL before 5.11.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: plain numbers; with this flag no descriptor is closed, so nobody's ownership ends.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, CLOEXEC) }).map(drop)
}

/// Gives the calling thread a table of descriptors of its own, in which only the standard ones are and lead nowhere; the process keeps all of
/// its. To be called first thing in a thread that then opens what it needs itself. (Copies of the standard ones would keep a pipe open whose
/// other end waits for this process to let go of it.)
///
/// # Errors
/// ENOMEM; ENOSYS before Linux 5.9; what opening `/dev/null` says.
pub fn leave_all_to_others() -> io::Result<()> {
    // SAFETY: from here on this thread shares no table with others, so what it closes below stays open for them.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }?;
    // SAFETY: closes the copies in this thread's own table; by contract the thread owns no descriptor yet.
    check(unsafe { libc::syscall(libc::SYS_close_range, 0 as libc::c_uint, libc::c_uint::MAX, 0 as libc::c_uint) })?;
    // The lowest free numbers are 0, 1 and 2, in this order; they are the thread's until it ends.
    for _ in 0..3 {
        let null = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty())?;
        let _kept = null.into_raw_fd();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    #[test]
    fn a_thread_without_descriptors_leaves_those_of_others_open() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let inside = std::thread::spawn(move || {
            leave_all_to_others().unwrap();
            let standard = [0, 1, 2].map(|number| std::fs::read_link(format!("/proc/thread-self/fd/{number}")).unwrap());
            assert!(standard.iter().all(|target| target == std::path::Path::new("/dev/null")), "{standard:?}");
            std::path::Path::new(&format!("/proc/thread-self/fd/{number}")).exists()
        });
        assert!(!inside.join().unwrap());
        assert!(std::io::read_to_string(file).unwrap().contains("Name:"));
    }

    #[test]
    fn an_inherited_descriptor_is_not_passed_on() {
        let file = std::fs::File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        close_on_exec_from(3).unwrap();
        assert!(fcntl_getfd(&file).unwrap().contains(FdFlags::CLOEXEC));
    }
}
