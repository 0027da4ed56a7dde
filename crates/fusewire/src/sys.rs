//! System calls that the standard library and rustix do not have in the form needed: ioctls of the
//! device, signals to threads, memory for buffers. With `abi/pod.rs` and `session/uring.rs` the
//! only file with `unsafe`.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::abi::{BackingMap, device};

/// Registers a backing file; returns its id.
pub(crate) fn backing_open(fuse: BorrowedFd<'_>, file: i32) -> io::Result<i32> {
    let map = BackingMap { fd: file, flags: 0, padding: 0 };
    // SAFETY: the ioctl reads one `fuse_backing_map`, which lives for the call.
    check(unsafe { libc::ioctl(fuse.as_raw_fd(), ioctl(device::IOC_BACKING_OPEN), std::ptr::from_ref(&map)) })
}

/// Unregisters a backing file.
pub(crate) fn backing_close(fuse: BorrowedFd<'_>, id: i32) -> io::Result<()> {
    // SAFETY: the ioctl reads one u32, which lives for the call.
    check(unsafe { libc::ioctl(fuse.as_raw_fd(), ioctl(device::IOC_BACKING_CLOSE), std::ptr::from_ref(&id)) }).map(drop)
}

/// Opens the device once more, bound to the connection of `fuse`.
pub(crate) fn clone_device(fuse: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: a constant path with its NUL.
    let raw = check(unsafe { libc::open(c"/dev/fuse".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
    // SAFETY: `raw` was opened just now and nobody else owns it.
    let clone = unsafe { OwnedFd::from_raw_fd(raw) };
    let source = fuse.as_raw_fd();
    // SAFETY: the ioctl reads one u32, which lives for the call.
    check(unsafe { libc::ioctl(raw, ioctl(device::IOC_CLONE), std::ptr::from_ref(&source)) })?;
    Ok(clone)
}

/// Redirects a descriptor to /dev/null, for owners that are still using it: its number stays theirs.
pub(crate) fn close_in_place(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: both are open for the call, and the number of `descriptor` stays open for its owner.
    check(unsafe { libc::dup3(null.as_raw_fd(), descriptor.as_raw_fd(), libc::O_CLOEXEC) }).map(drop)
}

/// Maximum number of descriptors of the process.
pub(crate) fn descriptor_limit() -> i32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| i32::try_from(limit).ok()).unwrap_or(i32::MAX)
}

/// Converts a request number to the C library's type.
fn ioctl(number: u32) -> libc::Ioctl {
    number as libc::Ioctl
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Pins a thread of this process (0: the calling one) to a CPU; EINVAL if that is offline or not allowed.
pub(crate) fn pin_to_cpu(tid: u32, cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(rustix::thread::Pid::from_raw(tid.cast_signed()), &set).map_err(io::Error::from)
}

/// Gives the calling thread a table of descriptors and a working directory of its own. It contains only the standard
/// descriptors, which lead to /dev/null; the process keeps all of its own. To be called first in a thread that opens
/// everything itself.
pub(crate) fn leave_descriptors_to_others() -> io::Result<()> {
    // SAFETY: from here on this thread shares no table with others, so what it closes below stays
    // open for them.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES | rustix::thread::UnshareFlags::FS) }?;
    // SAFETY: closes the copies in this thread's own table; by contract the thread owns no
    // descriptor yet.
    let closed =
        unsafe { libc::syscall(libc::SYS_close_range, 0 as libc::c_uint, libc::c_uint::MAX, 0 as libc::c_uint) };
    if closed < 0 {
        return Err(io::Error::last_os_error());
    }
    // The lowest free numbers are 0, 1 and 2, in this order; they are the thread's until it ends.
    for _ in 0..3 {
        let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
        let _kept = std::os::fd::IntoRawFd::into_raw_fd(null);
    }
    Ok(())
}

/// Scheduling class of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// SCHED_OTHER.
    Other,
    /// SCHED_BATCH: does not preempt the caller that it has just answered.
    Batch,
    /// SCHED_IDLE: runs only where no other thread wants the CPU; leaving it takes CAP_SYS_NICE.
    Idle,
}

/// Whether a thread of this process is SCHED_IDLE.
pub(crate) fn yields(tid: u32) -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::sched_getscheduler(tid.cast_signed()) == libc::SCHED_IDLE }
}

/// Changes the scheduling class of a thread of this process (0: the calling one).
pub(crate) fn schedule(tid: u32, class: Class) -> io::Result<()> {
    let policy = match class {
        Class::Other => libc::SCHED_OTHER,
        Class::Batch => libc::SCHED_BATCH,
        Class::Idle => libc::SCHED_IDLE,
    };
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: `param` lives for the call.
    check(unsafe { libc::sched_setscheduler(tid.cast_signed(), policy, std::ptr::from_ref(&param)) }).map(drop)
}

/// The signal that interrupts a system call of a worker: a real-time signal that the program does
/// not use. Its handler does nothing and is installed without SA_RESTART, so a blocked system call
/// returns EINTR. `None` if all are in use.
pub(crate) fn wake_signal() -> Option<i32> {
    extern "C" fn nothing(_: libc::c_int) {}
    static SIGNAL: OnceLock<Option<i32>> = OnceLock::new();
    *SIGNAL.get_or_init(|| {
        (libc::SIGRTMIN() + 2..=libc::SIGRTMAX()).rev().find(|signal| {
            let mut old = MaybeUninit::<libc::sigaction>::uninit();
            // SAFETY: asks for the present action only; the kernel fills `old` when it returns 0.
            let free = unsafe {
                libc::sigaction(*signal, std::ptr::null(), old.as_mut_ptr()) == 0
                    && old.assume_init().sa_sigaction == libc::SIG_DFL
            };
            // SAFETY: an all-zero `sigaction` is valid (empty mask, no flags); the handler touches
            // nothing, so it is safe at any point.
            free && unsafe {
                let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
                action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
                libc::sigaction(*signal, &raw const action, std::ptr::null_mut()) == 0
            }
        })
    })
}

/// Blocks every signal in the calling thread but the wake signal (and those raised by a fault in the thread itself),
/// so that the program's own signals go to its own threads.
pub(crate) fn mask_signals() {
    // SAFETY: the sets are initialised by sigfillset; pthread_sigmask changes the calling thread
    // only.
    unsafe {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(set.as_mut_ptr());
        let mut set = set.assume_init();
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT, libc::SIGTRAP] {
            libc::sigdelset(&raw mut set, signal);
        }
        if let Some(signal) = wake_signal() {
            libc::sigdelset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Sends the wake signal to a thread of this process. ESRCH if it has ended.
pub(crate) fn wake_thread(tid: u32) -> io::Result<()> {
    let signal = wake_signal().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))?;
    // SAFETY: no memory is involved; the thread group is our own, so no other process can be hit.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid as libc::pid_t, signal) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Private zeroed memory of whole pages that costs nothing until touched.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to this value alone and is not bound to a thread.
unsafe impl Send for Pages {}

impl Pages {
    /// At least `len` bytes, aligned to a page.
    pub(crate) fn new(len: usize) -> io::Result<Pages> {
        let len = len.max(1).next_multiple_of(rustix::param::page_size());
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new anonymous mapping at an address chosen by the kernel touches no existing memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(start.cast())
            .map(|start| Pages { start, len })
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    /// Makes all pages resident, and writable by the kernel at once. If a thread is killed while the kernel writes to
    /// a page that has to be allocated first, the request fails with EIO. A fork would share the pages, which then
    /// have to be copied on write: so these are excluded from forks.
    ///
    /// # Errors
    /// As `madvise(2)`.
    pub(crate) fn make_resident(&mut self) -> io::Result<()> {
        // SAFETY: the range is this mapping, whose content stays; a forked process does not have it, and calls
        // execve(2) without accessing it.
        if unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        self.bytes_mut().fill(0);
        Ok(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes long, readable, initialised (zeroed by the kernel),
        // and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, writable, and borrowed exclusively through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The start, for the kernel.
    pub(crate) fn address(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this length and nobody else unmaps it; borrows
        // have ended.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A system error with the failed operation; keeps its number reachable as source.
#[derive(Debug)]
struct Context {
    text: String,
    error: io::Error,
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.text, self.error)
    }
}

impl std::error::Error for Context {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Adds the failed operation to an error; its kind stays.
pub(crate) fn with_context(text: String, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), Context { text, error })
}
