//! The processors of the process, also for threads that are bound to one of them.
//!
//! Used wherever threads are started in addition to those that serve requests, which may be bound to
//! one processor each. A program that counts before it binds any thread (`nacre copy`, `nacre bench`,
//! `fusewire` at a mount) uses the standard library, which also respects a CPU quota.

use rustix::{
    process::getpid,
    thread::{sched_getaffinity, sched_setaffinity},
};
use std::{io, num::NonZero, thread};

/// Number of processors that the process may run on: those of its first thread, which is never
/// bound.
pub fn count() -> usize {
    match sched_getaffinity(Some(getpid())) {
        Ok(all) => (all.count() as usize).max(1),
        Err(_) => thread::available_parallelism().map_or(1, NonZero::get),
    }
}

/// Lets the calling thread run on all processors of the process. A new thread inherits the
/// processors of its creator: if that one is bound to a processor, both would compete for it.
///
/// # Errors
/// As the kernel; the thread stays where it is.
pub fn unpin_thread() -> io::Result<()> {
    Ok(sched_setaffinity(None, &sched_getaffinity(Some(getpid()))?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::CpuSet;

    #[test]
    fn a_bound_thread_sees_all_and_gets_loose() {
        let all = sched_getaffinity(Some(getpid())).unwrap();
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap());
        thread::spawn(move || {
            sched_setaffinity(None, &one).unwrap();
            assert_eq!(count(), all.count() as usize);
            unpin_thread().unwrap();
            assert_eq!(sched_getaffinity(None).unwrap(), all);
        })
        .join()
        .unwrap();
    }
}
