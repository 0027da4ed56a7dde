//! Runs operations on paths that may lead through a mount of this very process, in a thread that holds none of the
//! process's descriptors.
//!
//! Used for mounting and unmounting, and offered to owners of sessions. A thread that waits for a reply of its own
//! mount cannot be killed while it waits. If it shared the process's table of descriptors, a killed process would
//! never release the fuse device (nor any lock): the reply would never come, and every user of the mount would hang
//! with it. This thread has an empty table of its own, so the device is closed when all other threads have ended;
//! that ends the connection, and with it the wait.
//!
//! Invariant: none of the process's descriptors reaches this thread, and none of its own leaves it. So the operation
//! must not use anything that was opened elsewhere (a log file counts), nor return a descriptor.

use std::io;
use std::thread::Builder;

/// Name of these threads.
pub const APART: &str = "fuse-apart";

/// Runs `act` in a thread without descriptors, and waits for it. The thread has a working directory of its own as
/// well.
///
/// # Errors
/// Errors of `act`; where the thread cannot be started.
pub fn apart<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let body = || {
            crate::sys::leave_descriptors_to_others()?;
            act()
        };
        let thread = Builder::new().name(APART.to_owned()).stack_size(256 << 10).spawn_scoped(scope, body)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread without descriptors panicked")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn nothing_of_the_process_is_there_and_nothing_of_it_is_lost() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let number = file.as_raw_fd();
        let before = std::env::current_dir().unwrap();
        let inside = apart(|| {
            std::env::set_current_dir("/proc")?;
            Ok(std::fs::exists(format!("/proc/thread-self/fd/{number}")).unwrap())
        });
        assert!(!inside.unwrap());
        assert_eq!(std::env::current_dir().unwrap(), before);
        assert!(std::io::read_to_string(file).unwrap().contains("Name:"));
    }

    #[test]
    fn its_failure_is_told() {
        let failed: io::Result<()> = apart(|| Err(io::Error::from_raw_os_error(libc::EBUSY)));
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::EBUSY));
        let panicked: io::Result<()> = apart(|| panic!("on purpose"));
        assert!(panicked.is_err());
    }
}
