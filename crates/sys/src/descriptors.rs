//! All descriptors of the process at once.
//!
//! Called before another program is started that must not hold what this one was given. Invariant: nothing is closed here.

use crate::check;
use std::io;

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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    #[test]
    fn an_inherited_descriptor_is_not_passed_on() {
        let file = std::fs::File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        close_on_exec_from(3).unwrap();
        assert!(fcntl_getfd(&file).unwrap().contains(FdFlags::CLOEXEC));
    }
}
