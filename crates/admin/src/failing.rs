//! Handling of writes that a device refuses: the pool's property `failmode`. A process that takes
//! over from a crashed one waits for a store whatever the property's value, also with reads, until
//! the pool is imported.
//!
//! Used by the devices of an imported pool ([`crate::counted`]). Invariants: a write is retried
//! only as a whole, with the same bytes at the same address, and its caller, who is blocked, writes
//! nothing later before; a failed sync is never retried, because the system may have dropped the
//! data.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use nacre_pool::engine::Stuck;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Signal, getpid, kill_process};

/// Time between two attempts of a write.
const AGAIN: Duration = Duration::from_secs(1);

const CONTINUE: u8 = 0;
const WAIT: u8 = 1;
const PANIC: u8 = 2;

/// Shows a line to people.
pub type ShowLine = Box<dyn Fn(&str) + Send + Sync>;

/// Receiver of the reason for which the process ends, or of progress lines.
struct Ending(ShowLine);

impl std::fmt::Debug for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ending").finish_non_exhaustive()
    }
}

/// The mode, and the writes that wait by it.
#[derive(Debug, Default)]
pub struct Failing {
    mode: AtomicU8,
    /// The pool survives the loss of a device.
    redundant: AtomicBool,
    /// All requests wait, whatever the mode.
    patient: AtomicBool,
    /// No write waits for room: the pool is about to be destroyed.
    without_room: AtomicBool,
    /// Called with the reason before the process ends by the mode.
    ending: OnceLock<Ending>,
    /// Shows the progress of long steps while the pool is being imported.
    progress: Mutex<Option<Ending>>,
    state: Mutex<FailingState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FailingState {
    /// Number of waiting writes.
    waiting: usize,
    /// Error of the last attempt of one of them.
    why: String,
    /// No request waits any more: the pool is about to be released.
    given_up: bool,
}

impl Failing {
    /// Sets the mode from the value of the property.
    pub fn set(&self, value: &str) {
        let mode = match value {
            "wait" => WAIT,
            "panic" => PANIC,
            _ => CONTINUE,
        };
        self.mode.store(mode, Ordering::Relaxed);
        self.try_again();
    }

    /// Sets the function that gets the reason just before the process ends by the mode.
    pub fn before_end(&self, told: impl Fn(&str) + Send + Sync + 'static) {
        // There is one process, which sets it once.
        let _ = self.ending.set(Ending(Box::new(told)));
    }

    /// Sets or removes the function that shows progress lines.
    pub fn show_progress(&self, show: Option<ShowLine>) {
        *self.progress.lock() = show.map(Ending);
    }

    /// Shows a line of progress.
    pub(crate) fn note(&self, line: &str) {
        if let Some(Ending(show)) = &*self.progress.lock() {
            show(line);
        }
    }

    /// Error that blocked writes currently wait for, if any do.
    #[must_use]
    pub fn waiting(&self) -> Option<String> {
        let state = self.state.lock();
        (state.waiting > 0).then(|| state.why.clone())
    }

    /// Sets whether all requests wait, whatever the mode, also reads from a store.
    pub fn be_patient(&self, patient: bool) {
        self.patient.store(patient, Ordering::Relaxed);
    }

    /// Reads from a store; retries if all requests have to wait.
    pub(crate) fn read<T>(&self, store: &str, mut read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        match read() {
            Err(error) if self.patient.load(Ordering::Relaxed) => {
                self.again(("reading", store), error, |_| false, read)
            }
            read => read,
        }
    }

    /// Wakes blocked requests for an attempt at once.
    pub fn try_again(&self) {
        self.changed.notify_all();
    }

    /// Fails blocked requests, and later ones that would wait.
    pub fn give_up(&self) {
        self.state.lock().given_up = true;
        self.changed.notify_all();
    }

    /// Fails writes that wait for room, and later ones that would: nothing that the pool holds is needed any more.
    pub fn give_up_room(&self) {
        self.without_room.store(true, Ordering::Relaxed);
        self.try_again();
    }

    /// Whether the pool is about to be released.
    pub fn is_given_up(&self) -> bool {
        self.state.lock().given_up
    }

    /// Writes; a failed write is handled by the mode.
    pub(crate) fn write(&self, device: &str, mut write: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        let Err(error) = write() else { return Ok(()) };
        if self.redundant.load(Ordering::Relaxed) {
            return Err(error);
        }
        self.end_by(device, &error);
        let is_full = |error: &io::Error| {
            let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
            is_full && self.without_room.load(Ordering::Relaxed)
        };
        self.again(("writing", device), error, is_full, write)
    }

    /// Handles a failed write that redundancy cannot replace: the mode decides whether it is retried.
    pub(crate) fn write_again<E: std::fmt::Display>(
        &self,
        device: &str,
        error: E,
        write: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.end_by(device, &error);
        self.again(("writing", device), error, |_| false, write)
    }

    /// Retries a request by the mode, unless its error is one that `fails`.
    fn again<T, E: std::fmt::Display>(
        &self,
        (doing, device): (&str, &str),
        mut error: E,
        fails: impl Fn(&E) -> bool,
        mut request: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut state = self.state.lock();
        state.waiting += 1;
        let done = loop {
            let waits = self.patient.load(Ordering::Relaxed) || self.mode.load(Ordering::Relaxed) == WAIT;
            if state.given_up || !waits || fails(&error) {
                break Err(error);
            }
            if state.why.is_empty() {
                tracing::error!(device, %error, "{doing} failed: everybody waits until it can be done");
            }
            state.why = format!("{doing} {device}: {error}");
            self.changed.wait_for(&mut state, AGAIN);
            drop(state);
            let tried = request();
            state = self.state.lock();
            match tried {
                Ok(reply) => {
                    tracing::info!(device, "{doing} goes on");
                    break Ok(reply);
                }
                Err(other) => error = other,
            }
        };
        state.waiting -= 1;
        if state.waiting == 0 {
            state.why.clear();
        }
        done
    }

    /// The pool survives the loss of a device: nothing waits for one, and the process does not end for it.
    pub(crate) fn set_redundant(&self) {
        self.redundant.store(true, Ordering::Relaxed);
    }

    /// Handles the final failure of a request that is not retried (a sync).
    pub(crate) fn failed(&self, device: &str, error: &io::Error) {
        if self.redundant.load(Ordering::Relaxed) {
            return;
        }
        self.end_by(device, error);
    }

    /// Decides by the mode about a pool whose operations do not end.
    pub(crate) fn stuck(&self, why: &str) -> Stuck {
        self.end("a commit of the pool", why);
        if self.mode.load(Ordering::Relaxed) == WAIT { Stuck::Wait } else { Stuck::Suspend }
    }

    /// With `panic`, ends the process as by a crash: what was durable is there at the next import.
    pub(crate) fn end_by(&self, device: &str, error: &impl std::fmt::Display) {
        self.end(device, &error.to_string());
    }

    fn end(&self, what: &str, error: &str) {
        if self.mode.load(Ordering::Relaxed) == PANIC {
            tracing::error!(device = what, error, "a device failed, and the process ends (failmode=panic)");
            if let Some(Ending(told)) = self.ending.get() {
                told(&format!("{what} failed, and failmode is 'panic': {error}"));
            }
            // No core is dumped: before that, the kernel would wait for all threads, also for those
            // that wait for an answer of this process.
            if let Err(error) = kill_process(getpid(), Signal::KILL) {
                tracing::error!(%error, "the process cannot be ended by a signal");
                std::process::abort();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    fn refused() -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }

    #[test]
    fn without_waiting_it_fails_at_once() {
        let failing = Failing::default();
        failing.set("continue");
        assert!(failing.write("disk", refused).is_err());
        failing.set("wait");
        failing.give_up();
        assert!(failing.write("disk", refused).is_err());
        assert_eq!(failing.waiting(), None);
    }

    #[test]
    fn who_waits_goes_on_when_it_can() {
        let failing = Arc::new(Failing::default());
        failing.set("wait");
        let tries = Arc::new(AtomicUsize::new(0));
        let (waiter, counted) = (Arc::clone(&failing), Arc::clone(&tries));
        let thread = std::thread::spawn(move || {
            waiter.write("disk", || if counted.fetch_add(1, Ordering::SeqCst) < 3 { refused() } else { Ok(()) })
        });
        while !thread.is_finished() {
            failing.try_again();
            std::thread::yield_now();
        }
        assert!(thread.join().unwrap().is_ok());
        assert_eq!((tries.load(Ordering::SeqCst), failing.waiting()), (4, None));
    }

    #[test]
    fn who_waits_for_room_fails_when_none_is_needed() {
        let failing = Failing::default();
        failing.set("wait");
        failing.give_up_room();
        assert_eq!(failing.write("bucket", refused).unwrap_err().kind(), io::ErrorKind::StorageFull);
        // Any other error may pass.
        let tries = AtomicUsize::new(0);
        let away = || match tries.fetch_add(1, Ordering::SeqCst) {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        };
        assert!(failing.write("bucket", away).is_ok());
    }

    #[test]
    fn who_waits_fails_when_it_is_given_up() {
        let failing = Arc::new(Failing::default());
        failing.set("wait");
        let waiter = Arc::clone(&failing);
        let thread = std::thread::spawn(move || waiter.write("disk", refused));
        while failing.waiting().is_none_or(|why| why.is_empty()) {
            std::thread::yield_now();
        }
        assert!(failing.waiting().unwrap().starts_with("writing disk: "));
        failing.give_up();
        assert!(thread.join().unwrap().is_err());
    }
}
