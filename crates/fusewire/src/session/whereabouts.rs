//! Looks up the CPU of a caller, in a thread for which no other thread waits.
//!
//! Used by `leader.rs`, which gets the result a tick later. Only `/proc` has it, and reading about a process there
//! waits while that process is in execve(2) (as of Linux 6.18: the `exec_update_lock`); meanwhile it closes files,
//! and waits for our reply to each FLUSH. Invariants: no lock is held while `/proc` is read; the thread is not one of
//! the session's, and ends by itself.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::threads::cpu_of;
use crate::sys;

/// CPUs of the callers of one session.
#[derive(Debug, Default)]
pub(super) struct Whereabouts(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    started: bool,
    over: bool,
    /// Thread id of a caller to be looked up.
    wanted: Option<u32>,
    /// The caller looked up last, and its CPU.
    found: Option<(u32, usize)>,
}

impl Whereabouts {
    /// Requests a lookup of a caller's CPU; returns the last result since the previous call, if it is about the same
    /// caller.
    pub(super) fn of(&self, caller: u32) -> Option<usize> {
        let mut state = self.0.state.lock();
        if !state.started {
            state.started = true;
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("fuse callers".to_owned()).stack_size(64 << 10);
            if let Err(error) = thread.spawn(move || shared.look()) {
                tracing::debug!(%error, "the reader of the fuse device does not follow its callers");
            }
        }
        state.wanted = Some(caller);
        self.0.changed.notify_one();
        state.found.take().filter(|(found, _)| *found == caller).map(|(_, cpu)| cpu)
    }
}

impl Drop for Whereabouts {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn look(&self) {
        sys::mask_signals();
        let mut state = self.state.lock();
        while !state.over {
            let Some(caller) = state.wanted.take() else {
                self.changed.wait(&mut state);
                continue;
            };
            drop(state);
            let cpu = cpu_of(caller);
            state = self.state.lock();
            state.found = cpu.map(|cpu| (caller, cpu));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_found_and_no_other_is_taken_for_it() {
        let callers = Whereabouts::default();
        let tid = rustix::thread::gettid().as_raw_pid().unsigned_abs();
        let found = std::iter::repeat_with(|| {
            std::thread::yield_now();
            callers.of(tid)
        });
        assert!(found.flatten().next().is_some());
        *callers.0.state.lock() = State { started: true, found: Some((tid, 0)), ..State::default() };
        assert_eq!(callers.of(tid + 1), None);
    }
}
