//! Shared memory that survives the processes that use it: an array of words, each read and written
//! atomically.
//!
//! Made by a supervisor and inherited by its workers (`worker.rs`), so that records of one worker
//! are available to the next. Only touched pages cost memory. Invariant: the memory is accessed by
//! atomics only, so that writes of another process are no data race.

use rustix::{
    fs::{MemfdFlags, fstat, ftruncate, memfd_create},
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
};
use std::{
    ffi::{CStr, c_void},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

/// Zeroed words, shared with all processes that are forked from this one.
#[derive(Debug)]
pub struct SharedWords {
    start: NonNull<AtomicU64>,
    count: usize,
    memory: OwnedFd,
}

// SAFETY: the mapping belongs to this value and is not bound to a thread; its words are atomics.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Allocates `count` words, under a name that lists of mappings show.
    ///
    /// # Errors
    /// As `memfd_create(2)` and `mmap(2)`: ENOMEM if the process may not map as much.
    pub fn new(name: &CStr, count: usize) -> io::Result<SharedWords> {
        let memory = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, bytes_of(count)? as u64)?;
        SharedWords::map(memory, count)
    }

    /// Maps the words that this process allocated before it executed the current program.
    ///
    /// # Errors
    /// EINVAL if their number differs; as [`Self::new`].
    pub fn taken_over(memory: OwnedFd, count: usize) -> io::Result<SharedWords> {
        if fstat(&memory)?.st_size.cast_unsigned() != bytes_of(count)? as u64 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        SharedWords::map(memory, count)
    }

    fn map(memory: OwnedFd, count: usize) -> io::Result<SharedWords> {
        let bytes = bytes_of(count)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the place, so that no existing mapping is touched; the pages
        // are only reached through this value.
        let start =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, &memory, 0) }?;
        // SAFETY: the range is the mapping just made, and the advice changes nothing of its content.
        let left_out = unsafe { madvise(start, bytes, Advice::LinuxDontDump) };
        if left_out.is_err() {
            // A core file is larger then, which is harmless.
        }
        // A mapping begins at a page, so it is aligned for words.
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(SharedWords { start, count, memory })
    }

    /// The words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping holds `count` words, all of them initialised (zeroed by the kernel), and
        // lives as long as `self`; other processes change it through atomics, too.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }

    /// The descriptor of the memory, which must stay open when descriptors are closed for a new
    /// program.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Zeroes words, and frees the memory of whole pages among them.
    pub fn clear(&self, from: usize, count: usize) {
        let Some(words) = from.checked_add(count).and_then(|end| self.words().get(from..end)) else { return };
        let start = words.as_ptr().cast::<c_void>().cast_mut();
        let aligned = start.addr().is_multiple_of(rustix::param::page_size())
            && size_of_val(words).is_multiple_of(rustix::param::page_size());
        // SAFETY: the range lies in the mapping. Its pages read as zeros from then on, as if each word
        // had been stored.
        if aligned && unsafe { madvise(start, size_of_val(words), Advice::LinuxRemove) }.is_ok() {
            return;
        }
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

fn bytes_of(count: usize) -> io::Result<usize> {
    count.checked_mul(size_of::<AtomicU64>()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the mapping, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.count * size_of::<AtomicU64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_zero_until_they_are_stored_and_after_they_are_cleared() {
        let page = rustix::param::page_size() / 8;
        let shared = SharedWords::new(c"test", 1 << 30).unwrap();
        let at = |word: usize| shared.words()[word].load(Ordering::Relaxed);
        for word in [0, page - 1, page, 3 * page, (1 << 30) - 1] {
            assert_eq!(at(word), 0);
            shared.words()[word].store(word as u64 + 7, Ordering::Relaxed);
        }
        shared.clear(page, page);
        shared.clear(3 * page, 1);
        assert_eq!([page - 1, page, 3 * page].map(at), [page as u64 + 6, 0, 0]);
        assert_eq!(at((1 << 30) - 1), (1 << 30) + 6);
        shared.clear(usize::MAX, 2);
    }
}
