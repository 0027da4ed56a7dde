//! A minimal io_uring: 128-byte entries, `URING_CMD` only, one submitting thread, completions run
//! in that thread when it waits.
//!
//! Used by `ring.rs`. Why not a general library: the number of entries that the kernel has consumed must be readable
//! from other threads ([`Consumed`]), because that shows that a reply has been accepted while the thread that sent it
//! already waits for the next request in the same system call. Invariant: one thread creates, submits and reaps
//! (`SINGLE_ISSUER`).
//!
//! The memory of the ring is ours (`NO_MMAP`): mapped from the ring's file it would keep that file, and with it the
//! fuse device, as long as any thread of a killed process lives, and a thread that waits for the mount lives until
//! the device is closed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi::{Pod, UringCmdReq};

const SETUP_SUBMIT_ALL: u32 = 1 << 7;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
const SETUP_NO_MMAP: u32 = 1 << 14;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// More than the space of both queues' heads and flags before the completions.
const RING_HEAD: usize = 1024;
const ENTER_GETEVENTS: u32 = 1;
const OP_URING_CMD: u8 = 46;
const SQE_SIZE: usize = 128;
const CQE_SIZE: usize = 16;

/// `struct io_sqring_offsets` and `struct io_cqring_offsets`, which differ in names only.
#[repr(C)]
#[derive(Default)]
struct Offsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags_or_overflow: u32,
    dropped_or_cqes: u32,
    array_or_flags: u32,
    resv1: u32,
    user_addr: u64,
}

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    resv: [u32; 3],
    sq_off: Offsets,
    cq_off: Offsets,
}

const _: () = assert!(size_of::<Params>() == 120);

/// Memory shared with the kernel.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is not bound to a thread; all shared words in it are accessed as atomics, and all other memory
// by the owning thread only.
unsafe impl Send for Mapping {}
// SAFETY: as above; through a shared reference only `Consumed` reads, atomically.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// At least `len` bytes of zeros, whole pages.
    fn new(len: usize) -> io::Result<Mapping> {
        let len = len.next_multiple_of(rustix::param::page_size());
        // Shared, so that a fork does not separate it from the pages that the kernel has.
        let kind = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address chosen by the kernel touches no existing memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(start.cast())
            .map(|start| Mapping { start, len })
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// A word shared with the kernel.
    fn word(&self, offset: u32) -> io::Result<NonNull<AtomicU32>> {
        let offset = offset as usize;
        if offset.is_multiple_of(4) && offset + 4 <= self.len {
            // SAFETY: within the mapping, as checked, hence not null.
            Ok(unsafe { self.start.add(offset) }.cast())
        } else {
            Err(io::Error::from_raw_os_error(libc::EPROTO))
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; every holder of pointers into it holds the `Arc` around it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Number of submission entries that the kernel has consumed, readable from any thread and beyond the life of the
/// ring. The kernel publishes it after it has processed the entries.
#[derive(Debug)]
pub(super) struct Consumed {
    _rings: Arc<Mapping>,
    head: NonNull<AtomicU32>,
}

// SAFETY: `head` points into `_rings`, which lives as long, and is only read atomically.
unsafe impl Send for Consumed {}
// SAFETY: as above.
unsafe impl Sync for Consumed {}

impl Consumed {
    pub(super) fn get(&self) -> u32 {
        // SAFETY: points into the mapping that `_rings` keeps alive; aligned (checked by
        // `Mapping::word`).
        unsafe { self.head.as_ref() }.load(Ordering::SeqCst)
    }
}

/// `struct io_uring_cqe`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawCompletion {
    user_data: u64,
    result: i32,
    _flags: u32,
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The user data of the submission.
    pub(super) user_data: u64,
    /// 0 or more, or a negative error number.
    pub(super) result: i32,
}

/// An io_uring.
#[derive(Debug)]
pub(super) struct Uring {
    fd: OwnedFd,
    rings: Arc<Mapping>,
    sqes: Mapping,
    sq_head: NonNull<AtomicU32>,
    sq_tail: NonNull<AtomicU32>,
    cq_head: NonNull<AtomicU32>,
    cq_tail: NonNull<AtomicU32>,
    cqes: usize,
    sq_entries: u32,
    cq_entries: u32,
    /// Keeps the value in its thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Uring {
    /// A ring for `entries` commands at a time, to be used by the calling thread only. Linux 6.6 or
    /// later.
    pub(super) fn new(entries: u32) -> io::Result<Uring> {
        let size = entries.next_power_of_two() as usize;
        // The kernel makes the completion queue twice as long as the submission queue.
        let rings = Mapping::new(RING_HEAD + 2 * size * CQE_SIZE)?;
        let sqes = Mapping::new(size * SQE_SIZE)?;
        let mut params = Params {
            flags: SETUP_SQE128
                | SETUP_SINGLE_ISSUER
                | SETUP_DEFER_TASKRUN
                | SETUP_NO_SQARRAY
                | SETUP_SUBMIT_ALL
                | SETUP_NO_MMAP,
            sq_off: Offsets { user_addr: sqes.address(), ..Offsets::default() },
            cq_off: Offsets { user_addr: rings.address(), ..Offsets::default() },
            ..Params::default()
        };
        // SAFETY: the kernel reads and fills `params`, which has the layout of its struct (size
        // asserted above), and takes the pages of the two mappings, which outlive the ring.
        let raw = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut params) };
        let raw = RawFd::try_from(raw).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: created just now, and owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let cqes = params.cq_off.dropped_or_cqes as usize;
        if cqes + params.cq_entries as usize * CQE_SIZE > rings.len || params.sq_entries as usize * SQE_SIZE > sqes.len
        {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        Ok(Uring {
            sq_head: rings.word(params.sq_off.head)?,
            sq_tail: rings.word(params.sq_off.tail)?,
            cq_head: rings.word(params.cq_off.head)?,
            cq_tail: rings.word(params.cq_off.tail)?,
            cqes,
            sq_entries: params.sq_entries,
            cq_entries: params.cq_entries,
            fd,
            rings: Arc::new(rings),
            sqes,
            _not_send: std::marker::PhantomData,
        })
    }

    /// Returns a view of the progress for other threads.
    pub(super) fn consumed(&self) -> Consumed {
        Consumed { _rings: Arc::clone(&self.rings), head: self.sq_head }
    }

    /// Queues a command on `fuse`; `areas` is the address of an array of two `iovec` (and must live
    /// until the command was submitted), or 0. EBUSY if the queue is full.
    pub(super) fn push(
        &mut self,
        fuse: RawFd,
        command: u32,
        areas: u64,
        request: &UringCmdReq,
        user_data: u64,
    ) -> io::Result<()> {
        let tail = word(self.sq_tail).load(Ordering::Relaxed);
        if tail.wrapping_sub(word(self.sq_head).load(Ordering::Acquire)) >= self.sq_entries {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let mut entry = [0_u8; SQE_SIZE];
        let mut put = |offset: usize, bytes: &[u8]| {
            if let Some(place) = entry.get_mut(offset..offset + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(0, &[OP_URING_CMD]);
        put(4, &fuse.to_ne_bytes());
        put(8, &command.to_ne_bytes());
        put(16, &areas.to_ne_bytes());
        put(24, &if areas == 0 { 0_u32 } else { 2 }.to_ne_bytes());
        put(32, &user_data.to_ne_bytes());
        put(48, request.bytes());
        let index = (tail & (self.sq_entries - 1)) as usize;
        // SAFETY: `index` is less than the number of entries, so the entry lies within the mapping; the kernel does
        // not read it before the tail is published below, and has read the previous content (checked above).
        unsafe {
            std::ptr::copy_nonoverlapping(entry.as_ptr(), self.sqes.start.as_ptr().add(index * SQE_SIZE), SQE_SIZE)
        };
        word(self.sq_tail).store(tail.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Submits the queued commands, and with `wait` sleeps until there is a completion: one system call for both.
    pub(super) fn enter(&mut self, wait: bool) -> io::Result<()> {
        let pending =
            word(self.sq_tail).load(Ordering::Relaxed).wrapping_sub(word(self.sq_head).load(Ordering::Acquire));
        let (fd, least) = (self.fd.as_raw_fd(), u32::from(wait));
        // SAFETY: no argument block; the entries submitted were written in full by `push`.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                fd,
                pending,
                least,
                ENTER_GETEVENTS,
                std::ptr::null::<libc::c_void>(),
                0_usize,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Whether a completion can be taken.
    pub(super) fn ready(&self) -> bool {
        word(self.cq_head).load(Ordering::Relaxed) != word(self.cq_tail).load(Ordering::Acquire)
    }

    /// Takes a completion.
    pub(super) fn next(&mut self) -> Option<Completion> {
        if !self.ready() {
            return None;
        }
        let head = word(self.cq_head).load(Ordering::Relaxed);
        let index = (head & (self.cq_entries - 1)) as usize;
        // SAFETY: `index` is less than the number of entries and `new` mapped that many from `cqes`
        // on; the kernel has written this one (acquired tail) and does not reuse it before the head
        // is published.
        let raw = unsafe {
            std::ptr::read_unaligned(
                self.rings.start.as_ptr().add(self.cqes + index * CQE_SIZE).cast::<RawCompletion>(),
            )
        };
        word(self.cq_head).store(head.wrapping_add(1), Ordering::Release);
        Some(Completion { user_data: raw.user_data, result: raw.result })
    }
}

/// A word of the ring, through a pointer that `Uring` keeps in addition to the mapping.
fn word<'a>(word: NonNull<AtomicU32>) -> &'a AtomicU32 {
    // SAFETY: all callers pass pointers of a `Uring` whose mapping they hold, and drop the
    // reference at once; aligned by `Mapping::word`.
    unsafe { word.as_ref() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_command_completes_with_its_error() {
        let Ok(mut ring) = Uring::new(2) else {
            eprintln!("skipped: io_uring is not permitted here");
            return;
        };
        let consumed = ring.consumed();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(consumed.get(), 0);
        ring.push(file.as_raw_fd(), 77, 0, &UringCmdReq::default(), 5).unwrap();
        assert!(!ring.ready());
        ring.enter(true).unwrap();
        let completion = ring.next().unwrap();
        assert_eq!(completion.user_data, 5);
        assert!(completion.result <= 0);
        assert!(ring.next().is_none());
        drop(ring);
        assert_eq!(consumed.get(), 1);
    }
}
