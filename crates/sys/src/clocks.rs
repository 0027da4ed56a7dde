//! Clocks that the standard library does not read.
//!
//! Read by the C library and not by rustix, which looks up every function of the vDSO at its first
//! clock and aborts if one is missing (User Mode Linux 7.2 has no `__vdso_getcpu`).

use std::time::Duration;

/// A clock of clock_gettime(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The time of day that the kernel stamps files with: it advances once per tick.
    RealtimeCoarse,
    /// Time since the machine was started, including suspend.
    Boottime,
}

/// Reads a clock: time since 1970, or since the start.
#[must_use]
pub fn now(clock: Clock) -> Duration {
    let id = match clock {
        Clock::RealtimeCoarse => libc::CLOCK_REALTIME_COARSE,
        Clock::Boottime => libc::CLOCK_BOOTTIME,
    };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a value of ours. It cannot fail with these clocks.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    // A time before 1970 becomes 1970.
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn clocks_are_those_of_the_kernel() {
        let day = SystemTime::UNIX_EPOCH.elapsed().unwrap();
        assert!(day.abs_diff(now(Clock::RealtimeCoarse)) < Duration::from_secs(60));
        assert!(now(Clock::Boottime) > Duration::ZERO);
    }
}
