//! Clock of the layers: passed in, so that tests control the time.

use nacre_vfs::{Errno, Result};
use std::time::{Duration, Instant};

/// A monotonic clock that can also wait.
pub trait Clock: Send + Sync {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;

    /// Waits. Called in the thread that serves a read or write; a FUSE front end that must keep
    /// serving other requests wraps this.
    ///
    /// # Errors
    /// EINTR if a signal for this thread came first: the caller gave up.
    fn pause(&self, duration: Duration) -> Result<()>;
}

/// The clock of the system.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the clock that is passed in elsewhere")]
    fn default() -> SystemClock {
        SystemClock(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn pause(&self, duration: Duration) -> Result<()> {
        let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
        let request = rustix::thread::Timespec { tv_sec: seconds, tv_nsec: duration.subsec_nanos().into() };
        match rustix::thread::nanosleep(&request) {
            rustix::thread::NanosleepRelativeResult::Ok => Ok(()),
            rustix::thread::NanosleepRelativeResult::Interrupted(_) => Err(Errno::EINTR),
            rustix::thread::NanosleepRelativeResult::Err(error) => Err(Errno::from_raw(error.raw_os_error())),
        }
    }
}
