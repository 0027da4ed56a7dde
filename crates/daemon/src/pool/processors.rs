//! Whether threads wait for a processor: who has begun something short then has not ended it yet.
//!
//! Called by `mounts.rs` before a snapshot. The kernel tells how many threads can run
//! (`/proc/loadavg`, proc_loadavg(5)): where these are no more than the processors, each of them
//! does run, and what takes a few microseconds without sleeping is over soon.

use std::time::{Duration, Instant};

/// Between two looks.
const STEP: Duration = Duration::from_micros(200);
/// A thread that can run may be on its way to another processor for a moment: so many looks in a
/// row have to agree.
const LOOKS: u32 = 2;

/// Waits until no thread waits for a processor, at most so long.
pub fn wait_for_all(most: Duration) {
    let until = Instant::now() + most;
    let mut agreed = 0;
    while agreed < LOOKS && Instant::now() < until {
        std::thread::sleep(STEP);
        agreed = if all_run() { agreed + 1 } else { 0 };
    }
}

/// Where it cannot be told they may not.
fn all_run() -> bool {
    // Those of the whole process: this thread may be bound to one of them.
    let processors =
        rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).map_or(1, |all| u64::from(all.count()));
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    runnable(&load).is_some_and(|threads| threads <= processors)
}

fn runnable(load: &str) -> Option<u64> {
    load.split_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_how_many_can_run() {
        assert_eq!(runnable("0.61 2.83 5.03 3/512 25001\n"), Some(3));
        assert_eq!(runnable("0.61 2.83"), None);
        let load = std::fs::read_to_string("/proc/loadavg").unwrap();
        assert!(runnable(&load).unwrap() >= 1, "this one: {load}");
    }

    #[test]
    fn nobody_waits_for_ever() {
        wait_for_all(Duration::ZERO);
        wait_for_all(Duration::from_millis(5));
    }
}
