//! Memory of the allocator and the process.

use std::sync::atomic::{AtomicU64, Ordering};

/// Returns unused memory of the allocator to the kernel. Takes time in proportion to the heap: not
/// for a thread that serves requests. Does nothing if the C library has no such call.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers; any thread may call it at any time (malloc_trim(3): MT-Safe).
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Calls [`trim`] if the process has grown by `by` bytes since the last call: cheap enough to be
/// called often.
pub fn trim_grown(by: u64) {
    static AFTER: AtomicU64 = AtomicU64::new(0);
    let now = resident();
    if AFTER.fetch_min(now, Ordering::Relaxed).saturating_add(by) < now {
        trim();
        AFTER.store(resident(), Ordering::Relaxed);
    }
}

/// Resident memory of the process, bytes (proc_pid_statm(5)); 0 if it cannot be read.
fn resident() -> u64 {
    let told = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = told.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// Evicts the pages of code from this process' memory: needed ones are read again from their files.
/// For a process that waits for long, and has done most of its work.
pub fn leave_code() {
    let all = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let of_code = all.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (range, access, inode) = (words.next()?, words.next()?, words.nth(2)?);
        let (start, end) = range.split_once('-').filter(|_| access == "r-xp" && inode != "0")?;
        Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
    });
    for (start, end) in of_code {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the range is a private read-only mapping of a file: each of its pages is the file's, and is
        // read again from it. If this thread is the only one, nothing else changes the mappings; if another
        // thread has unmapped the range, the kernel refuses.
        unsafe { libc::madvise(start, end.saturating_sub(start.addr()), libc::MADV_DONTNEED) };
    }
}

/// Makes blocks of 128 KiB and more mappings of their own, which return to the kernel as soon as
/// they are freed. Otherwise the allocator raises that threshold with each large block that is
/// freed, and keeps as much memory. To be called before there are threads; does nothing if the C
/// library has no such call.
pub fn keep_large_blocks_apart() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers; it sets a limit of the allocator. It must not be called during
    // allocations of other threads (mallopt(3): MT-Unsafe init), and a race would leave the old
    // limit or the new one.
    let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_freed_goes_back_once_it_is_worth_it() {
        let before = resident();
        assert!(before > 0);
        // Small pieces with one that stays allocated at the end: the allocator keeps freed memory
        // in front of it.
        let mut pieces: Vec<Vec<u8>> = (0..2048).map(|_| vec![1; 32 << 10]).collect();
        let last = pieces.pop();
        let full = resident();
        assert!(full > before + (48 << 20), "{before} {full}");
        drop(pieces);
        trim_grown(16 << 20);
        let after = resident();
        assert!(after + (40 << 20) < full, "{before} {full} {after}");
        drop(last);
    }
}
