//! Memory for keys: locked, in no core file, in no forked process, wiped.
//!
//! `memfd_secret(2)` where the kernel has it: its pages are in no page table of the kernel, so that no other process
//! and no driver reads them. Otherwise an anonymous mapping with `mlock(2)`. Invariants: each slot has one owner, which
//! alone reads and writes it; a slot is zeros before it gets an owner and after it has lost it.

use rustix::{
    mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, mmap_anonymous, munlock, munmap},
    process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit},
};
use std::{
    ffi::c_void,
    io,
    os::fd::OwnedFd,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, compiler_fence},
    },
};

/// Length of a slot, bytes.
pub const SECRET: usize = 32;

/// Whether memory that the kernel may swap out is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlocked {
    /// It is an error.
    Refused,
    /// It is used where memory can be locked in no way.
    Accepted,
}

/// A mapping with room for secrets.
#[derive(Debug)]
pub struct SecretArena {
    start: NonNull<[u8; SECRET]>,
    /// Whether each slot has an owner.
    taken: Vec<AtomicBool>,
    locked: bool,
}

// SAFETY: the mapping belongs to this value and is not bound to a thread; each slot is reached by its one owner alone.
unsafe impl Send for SecretArena {}
// SAFETY: as above.
unsafe impl Sync for SecretArena {}

impl SecretArena {
    /// Maps an arena of this many bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// As `mmap(2)`; as `mlock(2)` where locked memory is required: EPERM or ENOMEM beyond the limit of the process.
    pub fn new(bytes: usize, unlocked: Unlocked) -> io::Result<Arc<Self>> {
        let bytes = bytes.max(1).next_multiple_of(rustix::param::page_size());
        match map_secret(bytes) {
            Ok(start) => Self::over(start, bytes, true),
            Err(_) => Self::anonymous(bytes, unlocked),
        }
    }

    /// Maps an arena without `memfd_secret(2)`.
    fn anonymous(bytes: usize, unlocked: Unlocked) -> io::Result<Arc<Self>> {
        // SAFETY: the kernel chooses the place, so that no existing mapping is touched.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        // SAFETY: the range is the mapping just made; locking changes nothing of its content.
        let locked = unsafe { mlock(start, bytes) };
        if let (Err(error), Unlocked::Refused) = (locked, unlocked) {
            // SAFETY: nothing refers to the mapping.
            unsafe { munmap(start, bytes) }?;
            return Err(error.into());
        }
        Self::over(start, bytes, locked.is_ok())
    }

    fn over(start: *mut c_void, bytes: usize, locked: bool) -> io::Result<Arc<Self>> {
        let taken = std::iter::repeat_with(|| AtomicBool::new(false)).take(bytes / SECRET).collect();
        let Some(at) = NonNull::new(start.cast()) else { return Err(io::ErrorKind::OutOfMemory.into()) };
        // It is unmapped from now on where something fails.
        let arena = Self { start: at, taken, locked };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: the range is the mapping just made; the advice changes nothing of its content here.
            unsafe { madvise(start, bytes, advice) }?;
        }
        Ok(Arc::new(arena))
    }

    /// Whether the kernel never swaps the secrets out.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// Takes a free slot; `None` where all have owners.
    pub fn take(self: &Arc<Self>) -> Option<SecretSlot> {
        let is_taken =
            |taken: &AtomicBool| taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let at = self.taken.iter().position(is_taken)?;
        Some(SecretSlot { arena: Arc::clone(self), at })
    }

    fn slot(&self, at: usize) -> *mut [u8; SECRET] {
        debug_assert!(at < self.taken.len());
        // SAFETY: slots are numbered within the mapping.
        unsafe { self.start.as_ptr().add(at) }
    }
}

impl Drop for SecretArena {
    fn drop(&mut self) {
        // Each slot was wiped by its owner, of which none is left.
        // SAFETY: start and length are those of the mapping, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.taken.len() * SECRET) };
    }
}

/// A secret in an arena: zeros at first, wiped when it is dropped.
#[derive(Debug)]
pub struct SecretSlot {
    arena: Arc<SecretArena>,
    at: usize,
}

impl SecretSlot {
    /// The secret.
    pub fn get(&self) -> &[u8; SECRET] {
        // SAFETY: the slot is in the mapping, which lives as long as the arena, and only this owner changes it.
        unsafe { &*self.arena.slot(self.at) }
    }

    /// The secret, to be changed.
    pub fn get_mut(&mut self) -> &mut [u8; SECRET] {
        // SAFETY: as in `get`; this owner is borrowed exclusively.
        unsafe { &mut *self.arena.slot(self.at) }
    }
}

impl Drop for SecretSlot {
    fn drop(&mut self) {
        // SAFETY: as in `get_mut`. A volatile write is not left out by the compiler.
        unsafe { self.arena.slot(self.at).write_volatile([0; SECRET]) };
        compiler_fence(Ordering::SeqCst);
        if let Some(taken) = self.arena.taken.get(self.at) {
            taken.store(false, Ordering::Release);
        }
    }
}

/// Maps memory that only this process can read.
fn map_secret(bytes: usize) -> io::Result<*mut c_void> {
    // SAFETY: the call takes one number, and returns a descriptor that nobody else owns.
    let fd = crate::check(unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) })?;
    // SAFETY: as above.
    let memory: OwnedFd = unsafe { crate::owned(fd) }?;
    rustix::fs::ftruncate(&memory, bytes as u64)?;
    // SAFETY: the kernel chooses the place, so that no existing mapping is touched.
    let mapped =
        unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &memory, 0) };
    Ok(mapped?)
}

/// A large buffer whose pages are in no core file, and locked where the limit of the process allows it; as before when
/// this is dropped, so that the memory does not count against that limit any more. The owner of the secrets in it wipes
/// them before that. The first and the last page, which may be shared with other data, are left as they are.
#[derive(Debug)]
pub struct Shielded<'a, T> {
    buffer: &'a mut [T],
    start: *mut c_void,
    /// Length of the whole pages, bytes.
    bytes: usize,
    locked: bool,
}

/// Shields the pages of a large buffer.
pub fn shield<T>(buffer: &mut [T]) -> Shielded<'_, T> {
    let page = rustix::param::page_size();
    let start = buffer.as_mut_ptr().cast::<c_void>();
    let skipped = start.addr().next_multiple_of(page) - start.addr();
    let bytes = size_of_val(buffer).saturating_sub(skipped) / page * page;
    if bytes == 0 {
        return Shielded { buffer, start, bytes, locked: false };
    }
    // SAFETY: the range lies in the buffer; neither call changes its content.
    let (start, left_out, locked) = unsafe {
        let start = start.byte_add(skipped);
        (start, madvise(start, bytes, Advice::LinuxDontDump), mlock(start, bytes))
    };
    if left_out.is_err() || locked.is_err() {
        // Both are more than the caller depends on: the buffer is wiped in any case.
    }
    Shielded { buffer, start, bytes, locked: locked.is_ok() }
}

impl<T> std::ops::Deref for Shielded<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.buffer
    }
}

impl<T> std::ops::DerefMut for Shielded<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.buffer
    }
}

impl<T> Drop for Shielded<'_, T> {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        // SAFETY: the range lies in the buffer, which is borrowed until now; neither call changes its content.
        unsafe {
            if self.locked {
                let _ = munlock(self.start, self.bytes);
            }
            let _ = madvise(self.start, self.bytes, Advice::LinuxDoDump);
        }
    }
}

/// Forbids core files of this process, and tracing and reading of its memory by other processes of its user. To be
/// called again after execve(2), which resets the first.
///
/// # Errors
/// As `prctl(2)` and `setrlimit(2)`.
pub fn refuse_dumps() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let maximum = getrlimit(Resource::Core).maximum;
    Ok(setrlimit(Resource::Core, Rlimit { current: Some(0), maximum })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags of the mapping that begins here, as /proc/self/smaps shows them.
    fn flags(start: *const u8) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let head = format!("{:x}-", start.addr());
        let rest = maps.split_once(&format!("\n{head}")).expect("a mapping that begins there").1;
        let flags = rest.lines().find_map(|line| line.strip_prefix("VmFlags: ")).unwrap();
        flags.split_whitespace().map(str::to_owned).collect()
    }

    fn arenas() -> Vec<Arc<SecretArena>> {
        vec![
            SecretArena::new(100, Unlocked::Refused).unwrap(),
            SecretArena::anonymous(4096, Unlocked::Refused).unwrap(),
        ]
    }

    #[test]
    fn arenas_are_locked_not_dumped_and_not_forked() {
        for arena in arenas() {
            let mut slot = arena.take().unwrap();
            slot.get_mut()[0] = 1;
            assert!(arena.is_locked());
            let flags = flags(arena.start.as_ptr().cast());
            for flag in ["lo", "dd", "dc"] {
                assert!(flags.iter().any(|has| has == flag), "{flag} in {flags:?}");
            }
        }
    }

    #[test]
    fn slots_have_one_owner_and_are_wiped() {
        for arena in arenas() {
            let mut slots = Vec::new();
            while let Some(mut slot) = arena.take() {
                assert_eq!(slot.get(), &[0; SECRET]);
                *slot.get_mut() = [slots.len() as u8 | 1; SECRET];
                slots.push(slot);
            }
            assert_eq!(slots.len() * SECRET, rustix::param::page_size());
            let places: std::collections::BTreeSet<_> = slots.iter().map(|slot| slot.get().as_ptr().addr()).collect();
            assert_eq!(places.len(), slots.len());
            assert_eq!(slots[5].get(), &[5; SECRET]);
            let place = slots[5].get().as_ptr();
            drop(slots.remove(5));
            // SAFETY: the arena is mapped, and the slot has no owner at the moment.
            let left = unsafe { place.cast::<[u8; SECRET]>().read_volatile() };
            assert_eq!(left, [0; SECRET]);
            let again = arena.take().unwrap();
            assert_eq!((again.get().as_ptr(), again.get()), (place, &[0; SECRET]));
            assert!(arena.take().is_none());
        }
    }

    #[test]
    fn threads_never_get_the_same_slot() {
        let arena = SecretArena::new(4096, Unlocked::Refused).unwrap();
        std::thread::scope(|scope| {
            for number in 1..5u8 {
                let arena = &arena;
                scope.spawn(move || {
                    for _ in 0..500 {
                        let mut slot = arena.take().unwrap();
                        assert_eq!(slot.get(), &[0; SECRET]);
                        *slot.get_mut() = [number; SECRET];
                        std::thread::yield_now();
                        assert_eq!(slot.get(), &[number; SECRET]);
                    }
                });
            }
        });
    }

    /// Flags of the mapping that has this address.
    fn flags_around(address: usize) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_inside = false;
        let flags = maps.lines().find_map(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let range = range.and_then(|(from, to)| {
                Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
            });
            if let Some((from, to)) = range {
                is_inside = (from..to).contains(&address);
            }
            line.strip_prefix("VmFlags: ").filter(|_| is_inside)
        });
        flags.unwrap().split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn large_buffers_are_shielded_until_they_are_given_back() {
        let mut buffer = vec![0u64; 128 << 10];
        let inside = buffer.as_ptr().addr() + (512 << 10);
        let has = |flag: &str| flags_around(inside).iter().any(|has| has == flag);
        let mut shielded = shield(&mut buffer);
        shielded[7] = 5;
        assert!(has("dd") && has("lo"), "{:?}", flags_around(inside));
        drop(shielded);
        assert!(!has("dd") && !has("lo"), "{:?}", flags_around(inside));
        assert_eq!(buffer[7], 5);
        drop(shield::<u8>(&mut []));
    }

    #[test]
    fn a_process_with_keys_leaves_no_core_file() {
        refuse_dumps().unwrap();
        assert_eq!(rustix::process::dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        assert_eq!(getrlimit(Resource::Core).current, Some(0));
        set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
    }
}
