//! Memory of the allocator.

/// Gives memory that the allocator holds but nobody uses back to the kernel. Takes time in proportion to the heap: not for a thread that
/// serves requests. Does nothing where the C library has no such call.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers; any thread may call it at any time (malloc_trim(3): MT-Safe).
    let _ = unsafe { libc::malloc_trim(0) };
}
