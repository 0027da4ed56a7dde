//! The descriptor table of the process as a whole, and the working directory.
//!
//! Called before another program is started that must not inherit our descriptors, and by a thread
//! that must hold no descriptors of its process. Also counts descriptors that are held for long,
//! for the whole process (state: the two counts), so that short-lived calls that need a descriptor
//! find a free one. Invariant: no descriptor is closed that other parts of the process use.

use crate::check;
use rustix::{
    fs::{Mode, OFlags},
    process::{Resource, getrlimit},
    thread::UnshareFlags,
};
use std::{
    io,
    os::fd::{AsRawFd, IntoRawFd, OwnedFd},
    sync::atomic::{AtomicUsize, Ordering},
};

/// Minimum and maximum number of descriptors reserved for the process itself (standard ones,
/// signals, sockets, watches, sources, the kernel's device), and for short-lived calls.
const RESERVE: [u64; 2] = [48, 384];

/// Open files of the source: opened by users, or kept for the next open.
pub static FILES: Count = Count(AtomicUsize::new(0));
/// Directories of the source that are kept open.
pub static DIRECTORIES: Count = Count(AtomicUsize::new(0));

/// Number of descriptors that the process holds for one purpose.
pub struct Count(AtomicUsize);

impl Count {
    /// Counts one more, until the returned value is dropped.
    pub fn one(&'static self) -> Counted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Counted(self)
    }

    /// The current number.
    pub fn held(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One counted descriptor.
pub struct Counted(&'static Count);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Number of descriptors that may be held for long, by the current limit of the process.
pub fn room() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let [least, most] = RESERVE;
    let reserve = (limit / 4).saturating_add(32).clamp(least, most);
    usize::try_from(limit.saturating_sub(reserve).max(limit / 4)).unwrap_or(usize::MAX)
}

/// Number of descriptors held for long.
pub fn held() -> usize {
    FILES.held() + DIRECTORIES.held()
}

/// `CLOSE_RANGE_CLOEXEC` (linux/close_range.h).
const CLOEXEC: libc::c_uint = 1 << 2;

/// Sets close-on-exec for every descriptor from `first` on.
///
/// # Errors
/// ENOSYS before Linux 5.9, EINVAL before 5.11.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: plain numbers; with this flag no descriptor is closed, so no ownership ends.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, CLOEXEC) }).map(drop)
}

/// Gives the calling thread a descriptor table of its own, in which only the standard descriptors
/// exist, connected to `/dev/null`; the process keeps all of its descriptors. To be called first in
/// a thread that then opens what it needs itself. (Copies of the standard descriptors would keep a
/// pipe open whose reader waits for this process to close it.) The thread gets a working directory
/// of its own as well, so that it may change to the directory that it works on.
///
/// # Errors
/// ENOMEM; ENOSYS before Linux 5.9; the errors of opening `/dev/null`.
pub fn leave_all_to_others() -> io::Result<()> {
    unshare_tables()?;
    close_from_to(0, libc::c_uint::MAX)?;
    lead_standard_ones_nowhere()
}

/// Closes all descriptors of the process from `first` on except these numbers. To be called by a
/// process that inherited the descriptor table of another one, before it opens any itself.
///
/// # Errors
/// ENOSYS before Linux 5.9.
pub fn close_all_from_but(first: u32, kept: &[u32]) -> io::Result<()> {
    let mut kept: Vec<u32> = kept.iter().copied().filter(|number| *number >= first).collect();
    kept.sort_unstable();
    kept.dedup();
    let mut from = first;
    for number in kept {
        if number > from {
            close_from_to(from, number - 1)?;
        }
        from = number.saturating_add(1);
    }
    close_from_to(from, libc::c_uint::MAX)
}

/// Duplicates a descriptor with this number that another process left open in this process' table.
///
/// # Errors
/// EBADF where the number is not open.
pub fn another(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: makes a new descriptor, and touches no other.
    let made = check(libc::c_long::from(unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) }))?;
    // SAFETY: the kernel just made it, and it has no other owner.
    unsafe { crate::owned(made) }
}

/// Whether a number is open.
pub fn is_open(number: i32) -> bool {
    // SAFETY: asks about a number only.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// Takes ownership of a descriptor that another process left open in this process' table.
///
/// # Errors
/// EBADF where the number is not open.
pub fn take_over(number: i32) -> io::Result<OwnedFd> {
    if !is_open(number) {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, and its owner has ended: the caller guarantees that it was recorded for this
    // process, and takes each number once.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(number) })
}

/// Renumbers descriptors: pairs of the current number and the new one, whose old descriptor is
/// closed. To be called by a process that inherited them, before it opens any itself.
///
/// # Errors
/// EBADF where a number is not open; EMFILE, or EBADF for a number beyond the limit (`RLIMIT_NOFILE`).
pub fn renumber(pairs: &[(i32, i32)]) -> io::Result<()> {
    // First to numbers where none of them collides with another.
    let free = pairs.iter().map(|(from, to)| from.max(to) + 1).max().unwrap_or(3);
    let mut aside = Vec::new();
    for (from, to) in pairs {
        // SAFETY: makes a new descriptor, and touches no other.
        let made = check(libc::c_long::from(unsafe { libc::fcntl(*from, libc::F_DUPFD_CLOEXEC, free) }))?;
        // SAFETY: the kernel just made it, and it has no other owner.
        aside.push((unsafe { crate::owned(made) }?, *to));
    }
    for (from, _) in pairs {
        // SAFETY: the caller guarantees that nothing in the process owns the descriptors that it inherited.
        unsafe { libc::close(*from) };
    }
    for (descriptor, to) in aside {
        // SAFETY: as above, for what has that number.
        let placed = unsafe { libc::dup3(descriptor.as_raw_fd(), to, libc::O_CLOEXEC) };
        check(libc::c_long::from(placed))?;
    }
    Ok(())
}

/// Gives the calling thread a table with one descriptor, not a standard one. It is a copy with the
/// same number: the process keeps its own.
///
/// # Errors
/// As [`leave_all_to_others`].
pub fn leave_all_but(kept: &OwnedFd) -> io::Result<()> {
    let kept = kept.as_raw_fd().unsigned_abs();
    unshare_tables()?;
    close_from_to(0, kept.saturating_sub(1))?;
    close_from_to(kept.saturating_add(1), libc::c_uint::MAX)?;
    lead_standard_ones_nowhere()
}

fn unshare_tables() -> io::Result<()> {
    // SAFETY: from here on this thread shares no table with others, so what the callers close stays
    // open for them.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FILES | UnshareFlags::FS) }?)
}

fn close_from_to(first: libc::c_uint, last: libc::c_uint) -> io::Result<()> {
    // SAFETY: closes unused descriptors: copies in a thread's own table, which by contract owns no
    // descriptor yet, or descriptors that a dead process left open.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0 as libc::c_uint) }).map(drop)
}

fn lead_standard_ones_nowhere() -> io::Result<()> {
    // The lowest free numbers are 0, 1 and 2, in this order; they stay open until the thread ends.
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
        let before = std::env::current_dir().unwrap();
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let inside = std::thread::spawn(move || {
            leave_all_to_others().unwrap();
            rustix::process::chdir("/proc").unwrap();
            let standard =
                [0, 1, 2].map(|number| std::fs::read_link(format!("/proc/thread-self/fd/{number}")).unwrap());
            assert!(standard.iter().all(|target| target == std::path::Path::new("/dev/null")), "{standard:?}");
            std::path::Path::new(&format!("/proc/thread-self/fd/{number}")).exists()
        });
        assert!(!inside.join().unwrap());
        assert_eq!(std::env::current_dir().unwrap(), before);
        assert!(std::io::read_to_string(file).unwrap().contains("Name:"));
    }

    #[test]
    fn descriptors_change_places() {
        // Numbers that no other test of this process uses.
        let file = |text: &[u8]| {
            let file = rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&file, text).unwrap();
            rustix::io::fcntl_dupfd_cloexec(file, 800).unwrap().into_raw_fd()
        };
        let read = |number| {
            let mut text = [0; 1];
            rustix::io::pread(take_over(number).unwrap(), &mut text, 0).unwrap();
            text[0]
        };
        let (first, second, far) = (file(b"a"), file(b"b"), 900);
        renumber(&[(first, second), (second, far)]).unwrap();
        assert_eq!((read(second), read(far)), (b'a', b'b'));
        assert!(another(first).is_err());
        assert!(renumber(&[(far, 901)]).is_err(), "closed by now");
    }

    #[test]
    fn an_inherited_descriptor_is_not_passed_on() {
        let file = std::fs::File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        close_on_exec_from(3).unwrap();
        assert!(fcntl_getfd(&file).unwrap().contains(FdFlags::CLOEXEC));
    }
}
