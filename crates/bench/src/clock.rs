//! Time: the only file in which the bench reads clocks and waits.
//!
//! Called by all measurements, and by code that waits for a process, a mount or an answer. Invariant: a wait ends
//! at its deadline, whatever it waits for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Returns the time for a measurement.
#[expect(clippy::disallowed_methods, reason = "this is the clock of the bench")]
pub fn now() -> Instant {
    Instant::now()
}

/// Returns the date, as time since 1970.
#[expect(clippy::disallowed_methods, reason = "this is the clock of the bench")]
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Deadline of a wait.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// Makes a deadline this long from now.
    pub fn after(patience: Duration) -> Self {
        Self(now() + patience)
    }

    /// Returns the remaining time.
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(now())
    }

    /// Whether the deadline has passed.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Pauses between two polls.
    #[expect(clippy::disallowed_methods, reason = "for what comes without a word")]
    pub fn pause(self, interval: Duration) {
        thread::sleep(interval.min(self.left()));
    }

    /// Waits until the kernel reports an event on `file`; false at the deadline.
    pub fn wait_for(self, file: impl AsFd, events: PollFlags) -> io::Result<bool> {
        loop {
            let left = self.left();
            let left =
                Timespec { tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&file, events)], Some(&left)) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a process has ended with all its threads, so that its locks are released as well; false at the
    /// deadline.
    pub fn wait_for_end(self, process: &OwnedFd) -> io::Result<bool> {
        self.wait_for(process, PollFlags::IN)
    }

    /// Waits until a child has ended; `None` at the deadline.
    pub fn wait_for_child(self, child: &mut Child) -> io::Result<Option<ExitStatus>> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
        self.wait_for_end(&process)?;
        child.try_wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_child_is_waited_for_until_the_deadline() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert_eq!(Deadline::after(Duration::from_millis(1)).wait_for_child(&mut child).unwrap(), None);
        drop(child.stdin.take());
        let ended = Deadline::after(Duration::from_secs(60)).wait_for_child(&mut child).unwrap();
        assert!(ended.is_some_and(|status| status.success()));
    }
}
