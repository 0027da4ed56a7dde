//! Processes that have an image open, or a file below a directory: the servers of the pool in it, under any name.
//! Read from `/proc`, never cached.
//!
//! Called by `pools`, `undo` and `mounted`. Invariant: only processes that hold a file of the bench
//! are ever ended.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::clock::Deadline;
use crate::failure::{Doing, Failure};
use crate::memory::bytes_of;

/// Deadline for the end of a killed process.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the processes that have `image` or a file below it open, except this one; none if it does not exist.
pub fn of(image: &Path) -> Result<Vec<Pid>, Failure> {
    let wanted = match fs::canonicalize(image) {
        Ok(path) => path,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::io("looking at", image, error)),
    };
    let (processes, mut holders) = (Path::new("/proc"), Vec::new());
    for entry in fs::read_dir(processes).doing("listing", processes)? {
        let process = entry.doing("listing", processes)?;
        let number = process.file_name();
        let number =
            std::str::from_utf8(number.as_bytes()).ok().and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
        // A process may end at any moment, and other users' processes cannot be inspected: neither serves a pool of
        // ours.
        let (Some(number), Ok(files)) = (number, fs::read_dir(process.path().join("fd"))) else { continue };
        // Only the text of the link is used: following it would send a request to every file system, and one that
        // hangs would block the bench.
        let holds = files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|path| path.starts_with(&wanted)));
        if holds && number != rustix::process::getpid() {
            holders.push(number);
        }
    }
    Ok(holders)
}

/// Returns the processes that have `image` open, each by a pidfd, so that no later process of the same id is meant.
fn held(image: &Path) -> Result<Vec<(Pid, OwnedFd)>, Failure> {
    let mut held = Vec::new();
    for holder in of(image)? {
        match rustix::process::pidfd_open(holder, PidfdFlags::empty()) {
            Ok(process) => held.push((holder, process)),
            // It has ended by itself.
            Err(Errno::SRCH) => {}
            Err(error) => return Err(Failure::new(format!("looking at process {holder}: {error}"))),
        }
    }
    Ok(held)
}

fn signal((holder, process): &(Pid, OwnedFd), signal: Signal, doing: &str) -> Result<(), Failure> {
    match rustix::process::pidfd_send_signal(process, signal) {
        // It has ended by itself.
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(Failure::new(format!("{doing} process {holder}: {error}"))),
    }
}

/// Waits until all these processes have ended; false at the deadline.
fn have_ended(holders: &[(Pid, OwnedFd)], deadline: Deadline) -> Result<bool, Failure> {
    for (holder, process) in holders {
        let ended = deadline.wait_for_end(process);
        if !ended.map_err(|error| Failure::new(format!("waiting for process {holder}: {error}")))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Terminates the processes that have `image` open, and kills those that do not end in time.
pub fn end(image: &Path) -> Result<(), Failure> {
    let deadline = Deadline::after(PATIENCE);
    let holders = held(image)?;
    holders.iter().try_for_each(|holder| signal(holder, Signal::TERM, "ending"))?;
    have_ended(&holders, deadline)?;
    kill(image)
}

/// Kills the processes that have `image` open, and waits until they have ended.
pub fn kill(image: &Path) -> Result<(), Failure> {
    let deadline = Deadline::after(PATIENCE);
    loop {
        let holders = held(image)?;
        if holders.is_empty() {
            return Ok(());
        }
        holders.iter().try_for_each(|holder| signal(holder, Signal::KILL, "killing"))?;
        if !have_ended(&holders, deadline)? || deadline.is_over() {
            return Err(Failure::new(format!("{} is still held by a process that was killed", image.display())));
        }
    }
}

/// Returns the peak memory of the processes that have `image` open, in bytes; `None` if there are none.
pub fn memory(image: &Path) -> Result<Option<u64>, Failure> {
    let mut most = None;
    for holder in of(image)? {
        let path = format!("/proc/{holder}/status");
        let Ok(status) = fs::read_to_string(&path) else { continue };
        most = Some(most.unwrap_or(0) + bytes_of(&status, "VmHWM").unwrap_or(0));
    }
    Ok(most)
}

/// Bytes that devices have read and written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, more: Self) {
        self.read += more.read;
        self.written += more.written;
    }
}

/// Returns the bytes that the processes that have `image` open have read from devices and written to them; `None` if
/// there are no such processes.
pub fn traffic(image: &Path) -> Result<Option<Traffic>, Failure> {
    let mut all = None;
    for holder in of(image)? {
        // A process may end at any moment.
        let Ok(counters) = fs::read_to_string(format!("/proc/{holder}/io")) else { continue };
        *all.get_or_insert_default() += of_process(&counters);
    }
    Ok(all)
}

/// Parses `/proc/PID/io`.
fn of_process(counters: &str) -> Traffic {
    let counter = |name: &str| {
        let line = counters.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
    };
    Traffic { read: counter("read_bytes:"), written: counter("write_bytes:") }
}

/// Returns the bytes that block devices have read and written.
pub fn traffic_of_devices(devices: &[PathBuf]) -> Result<Traffic, Failure> {
    let mut all = Traffic::default();
    for device in devices {
        let name = device.file_name().unwrap_or_default();
        let path = Path::new("/sys/class/block").join(name).join("stat");
        let counters = fs::read_to_string(&path).doing("reading", &path)?;
        all += of_device(&counters).ok_or_else(|| Failure::new(format!("'{counters}' counts no sectors")))?;
    }
    Ok(all)
}

/// Parses `/sys/class/block/NAME/stat`, which counts sectors of 512 bytes.
fn of_device(counters: &str) -> Option<Traffic> {
    let counters: Vec<u64> = counters.split_whitespace().map_while(|word| word.parse().ok()).collect();
    Some(Traffic { read: counters.get(2)? * 512, written: counters.get(6)? * 512 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_read_from_the_counters_of_the_kernel() {
        let process = "rchar: 9\nwchar: 8\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n";
        assert_eq!(of_process(process), Traffic { read: 4096, written: 8192 });
        let device = "  7  0  16  3  9  1  32  5  0  4  8  0 0 0 0 0 0\n";
        assert_eq!(of_device(device), Some(Traffic { read: 8192, written: 16384 }));
        assert_eq!(of_device("1 2 3"), None);
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(traffic(directory.path()).unwrap(), None);
    }
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_holds_the_file_is_found_and_killed() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        fs::write(&image, "x").unwrap();
        assert!(of(&image).unwrap().is_empty() && of(&directory.path().join("none")).unwrap().is_empty());
        let script = "exec 3< \"$0\"; echo open; read line";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(&image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(of(&image).unwrap(), [Pid::from_child(&child)]);
        assert!(memory(&image).unwrap().is_some_and(|bytes| bytes > 0));
        kill(&image).unwrap();
        assert!(!child.wait().unwrap().success());
        assert_eq!(memory(&image), Ok(None));
        end(&image).unwrap();
    }
}
