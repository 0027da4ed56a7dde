//! State of threads in the kernel, and permission to change their scheduling.
//!
//! Used by the watchers of serving threads: `pace.rs` (rings), `leader.rs` (device), and for other processes by
//! `whereabouts.rs`.

use std::fs::File;
use std::io::Read;
use std::sync::OnceLock;

use crate::sys::{self, Class};

/// Returns the CPU on which a thread of any process runs, or ran last. May wait for that process.
pub(super) fn cpu_of(tid: u32) -> Option<usize> {
    stat_field(&format!("/proc/{tid}/task/{tid}/stat"), 39)?.parse().ok()
}

/// Whether a thread is runnable or running.
pub(super) fn is_runnable(tid: u32) -> bool {
    stat_field(&format!("/proc/self/task/{tid}/stat"), 3).is_some_and(|state| state == "R")
}

/// A field of a thread's `stat`, from the third on (proc(5)).
fn stat_field(path: &str, number: usize) -> Option<String> {
    let mut text = [0; 1024];
    let len = File::open(path).and_then(|mut file| file.read(&mut text)).ok()?;
    let text = String::from_utf8_lossy(text.get(..len)?);
    // The name, in parentheses, may contain anything.
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(number.checked_sub(3)?).map(str::to_owned)
}

/// Whether threads of this process may leave SCHED_IDLE again: tried by a temporary thread.
pub(super) fn may_yield() -> bool {
    static MAY: OnceLock<bool> = OnceLock::new();
    *MAY.get_or_init(|| {
        let back = || sys::schedule(0, Class::Idle).and_then(|()| sys::schedule(0, Class::Other));
        let tried = std::thread::Builder::new().stack_size(64 << 10).spawn(back).map(std::thread::JoinHandle::join);
        let may = matches!(tried, Ok(Ok(Ok(()))));
        if !may {
            tracing::debug!("threads stay SCHED_BATCH: SCHED_IDLE could not be left again");
        }
        may
    })
}
