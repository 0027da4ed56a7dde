//! Calls of the program `nacre`: arguments, never a shell; bounded output and time.
//!
//! A command gets the volume's lock as its standard input. So where this process is killed, the lock
//! stays until the command has ended, and the next process waits for it instead of racing with it.

use crate::failure::{Failure, Kind};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    process::{Pid, PidfdFlags, pidfd_open},
};
use std::{
    fs::File,
    io::{self, Read},
    os::fd::AsFd,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Deadline of a command that an engine waits for.
pub const SHORT: Duration = Duration::from_secs(100);
/// Deadline of a replication.
pub const LONG: Duration = Duration::from_secs(24 * 3600);
/// Maximum output that is kept, bytes: JSON of all volumes.
const OUTPUT_MAX: usize = 32 << 20;

/// Where the program `nacre` is.
pub struct Nacre {
    /// Its path, or a name that is looked up in PATH.
    pub program: PathBuf,
}

/// What a command printed, and its exit code.
pub struct Finished {
    /// The exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub output: Vec<u8>,
    /// Standard error.
    pub errors: String,
}

impl Finished {
    /// Whether it ended with 0.
    pub fn is_done(&self) -> bool {
        self.code == Some(0)
    }

    /// The failure that a command reported; its kind by the exit code (docs/exit-codes.md).
    pub fn failure(&self) -> Failure {
        let kind = match self.code {
            Some(2) => Kind::Invalid,
            Some(3) => Kind::Missing,
            Some(5) => Kind::InUse,
            _ => Kind::Failed,
        };
        let lines: Vec<&str> = self.errors.lines().map(|line| line.trim_start_matches("nacre: ")).collect();
        let message = if lines.is_empty() { format!("nacre ended with {:?}", self.code) } else { lines.join("; ") };
        Failure::new(kind, message.chars().take(1000).collect::<String>())
    }
}

impl Nacre {
    /// Runs a command to its end, which has to be exit code 0; returns its standard output.
    ///
    /// # Errors
    /// Any other end.
    pub fn done(&self, lock: Option<&File>, words: &[&str]) -> Result<Vec<u8>, Failure> {
        let finished = self.run(lock, words, SHORT)?;
        if finished.is_done() { Ok(finished.output) } else { Err(finished.failure()) }
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// It cannot be started, or was killed at the deadline.
    pub fn run(&self, lock: Option<&File>, words: &[&str], limit: Duration) -> Result<Finished, Failure> {
        let failed = |error: io::Error| Failure::io("run", &self.program, &error);
        let input = match lock {
            Some(file) => Stdio::from(file.try_clone().map_err(failed)?),
            None => Stdio::null(),
        };
        let mut command = Command::new(&self.program);
        command.args(words).env("LC_ALL", "C").current_dir("/");
        // The service manager's socket and notifications are for the plugin alone.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "SYSTEMD_EXEC_PID", "NOTIFY_SOCKET"] {
            command.env_remove(name);
        }
        let mut child = command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
        // Closes our copy of the standard input.
        drop(command);
        match collect(&mut child, limit) {
            Ok(Some(finished)) => Ok(finished),
            Ok(None) => {
                child.kill().and_then(|()| child.wait()).map_err(failed)?;
                let message = format!("nacre {} took longer than {} s", words.join(" "), limit.as_secs());
                Err(Failure::new(Kind::Failed, message))
            }
            Err(error) => {
                child.kill().and_then(|()| child.wait()).map_err(failed)?;
                Err(failed(error))
            }
        }
    }
}

/// Reads the output until the command has ended. Background processes of the command may keep the
/// pipes open: the end of the process counts, not that of the pipes. `None` at the deadline.
fn collect(child: &mut Child, limit: Duration) -> io::Result<Option<Finished>> {
    let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(io::Error::other("no pipes"));
    };
    for pipe in [stdout.as_fd(), stderr.as_fd()] {
        fcntl_setfl(pipe, fcntl_getfl(pipe)? | OFlags::NONBLOCK)?;
    }
    let end = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let deadline = Instant::now() + limit;
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let (mut more_output, mut more_errors) = (true, true);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let mut fds = vec![PollFd::new(&end, PollFlags::IN)];
        if more_output {
            fds.push(PollFd::new(&stdout, PollFlags::IN));
        }
        if more_errors {
            fds.push(PollFd::new(&stderr, PollFlags::IN));
        }
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ended = fds.first().is_some_and(|first| !first.revents().is_empty());
        drop(fds);
        more_output = more_output && drain(&mut stdout, &mut output)?;
        more_errors = more_errors && drain(&mut stderr, &mut errors)?;
        if ended {
            let code = child.wait()?.code();
            return Ok(Some(Finished { code, output, errors: String::from_utf8_lossy(&errors).into_owned() }));
        }
    }
}

/// Reads all that is in the pipe. False at its end.
fn drain(pipe: &mut impl Read, kept: &mut Vec<u8>) -> io::Result<bool> {
    let mut piece = [0; 16 << 10];
    loop {
        match pipe.read(&mut piece) {
            Ok(0) => return Ok(false),
            Ok(length) => {
                if kept.len() + length > OUTPUT_MAX {
                    return Err(io::Error::other("the output is too long"));
                }
                kept.extend_from_slice(piece.get(..length).unwrap_or_default());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sh(script: &str, limit: Duration) -> Result<Finished, Failure> {
        Nacre { program: PathBuf::from("/bin/sh") }.run(None, &["-c", script], limit)
    }

    #[test]
    fn output_and_codes_are_kept() {
        let finished = sh("head -c 300000 /dev/zero; echo 'nacre: a' >&2; echo 'nacre: b' >&2; exit 3", SHORT).unwrap();
        assert_eq!((finished.code, finished.output.len()), (Some(3), 300_000));
        let failure = finished.failure();
        assert_eq!((failure.kind, failure.message.as_str()), (Kind::Missing, "a; b"));
    }

    #[test]
    fn a_background_process_with_our_pipes_keeps_nobody_waiting() {
        let finished = sh("sleep 300 & echo $!", SHORT).unwrap();
        assert!(finished.is_done());
        let background = String::from_utf8(finished.output).unwrap();
        assert!(sh(&format!("kill {background}"), SHORT).unwrap().is_done());
    }

    #[test]
    fn a_command_beyond_its_deadline_is_killed() {
        let failure = sh("exec sleep 300", Duration::from_millis(50)).err().unwrap();
        assert!(failure.message.contains("took longer"), "{failure}");
    }
}
