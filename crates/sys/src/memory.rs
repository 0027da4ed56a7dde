//! Memory of the allocator.

/// Gives memory that the allocator holds but nobody uses back to the kernel. Takes time in proportion to the heap: not for a thread that
/// serves requests. Does nothing where the C library has no such call.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers; any thread may call it at any time (malloc_trim(3): MT-Safe).
    let _ = unsafe { libc::malloc_trim(0) };
}

/// From now on, blocks of 128 KiB and more are mappings of their own, which go back to the kernel as soon as they are freed. The allocator would
/// otherwise raise that limit with each large block that is freed, and keep as much. To be called before there are threads; does nothing where the C
/// library has no such call.
pub fn keep_large_blocks_apart() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers; it sets a limit of the allocator. It is not to be called beside allocations of other threads (mallopt(3):
    // MT-Unsafe init), and a race would leave the old limit or the new one.
    let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
}
