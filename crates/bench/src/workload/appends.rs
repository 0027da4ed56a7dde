//! Lines appended to a log by a program: first the file is opened and closed for each line, then one descriptor is
//! held open. Three system calls a line, or one, and nothing else.

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Visit, timed};
use crate::failure::{Doing, Failure};

const SHORT: &str = "this is my incredible log message from outer space";
const LONG: &str = "this is my incredible log message from outer space, i post it here and there and everywhere";
const AGAIN: &str = " - to repeat - ";
/// How often a log is opened for a line before its descriptor is held.
const OPENED: u64 = 100;
/// Repetitions of the text in the longest line.
const TIMES: usize = 6;

/// Lengths of lines in real logs: a few words, a sentence, a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// A line of 50 bytes.
    Short,
    /// A line of 91 bytes.
    Long,
    /// A line of 621 bytes.
    VeryLong,
}

impl Line {
    /// All lines, shortest first.
    pub const ALL: [Self; 3] = [Self::Short, Self::Long, Self::VeryLong];

    /// The text without its newline.
    pub fn text(self) -> String {
        match self {
            Self::Short => SHORT.to_owned(),
            Self::Long => LONG.to_owned(),
            Self::VeryLong => [LONG; TIMES].join(AGAIN),
        }
    }
}

/// Flags of a logger.
pub const LOGGER: OFlags = OFlags::WRONLY.union(OFlags::APPEND).union(OFlags::CREATE).union(OFlags::CLOEXEC);

fn failed(doing: &str, error: Errno) -> Failure {
    Failure::new(format!("{doing} a log: {error}"))
}

fn append(file: &OwnedFd, line: &[u8]) -> Result<(), Failure> {
    let count = rustix::io::write(file, line).map_err(|error| failed("appending to", error))?;
    if count == line.len() { Ok(()) } else { Err(Failure::new(format!("appended {count} of {} bytes", line.len()))) }
}

fn opening(path: &CString, line: &[u8], count: u64) -> Result<(), Failure> {
    for _ in 0..count {
        let file = rustix::fs::open(path.as_c_str(), LOGGER, Mode::from_raw_mode(0o644))
            .map_err(|error| failed("opening", error))?;
        append(&file, line)?;
        // It is closed before the next one.
    }
    Ok(())
}

fn holding(path: &CString, line: &[u8], count: u64) -> Result<(), Failure> {
    let file = rustix::fs::open(path.as_c_str(), LOGGER, Mode::from_raw_mode(0o644))
        .map_err(|error| failed("opening", error))?;
    (0..count).try_for_each(|_| append(&file, line))
}

/// Fails unless the file has exactly this many bytes: a target that loses lines is not measured.
pub fn expect_length(path: &Path, bytes: u64) -> Result<(), Failure> {
    let found = fs::metadata(path).doing("looking at", path)?.len();
    if found == bytes {
        Ok(())
    } else {
        Err(Failure::new(format!("{} has {found} bytes instead of {bytes}", path.display())))
    }
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let count = visit.scale.appends;
    let path: PathBuf = visit.own.join("log");
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Failure::new(format!("{} contains a zero byte", path.display())))?;
    let opened = ["open-short", "open-long", "open-very-long"];
    let held = ["held-short", "held-long", "held-very-long"];
    for (tests, work) in [(opened, opening as fn(&CString, &[u8], u64) -> Result<(), Failure>), (held, holding)] {
        for (test, line) in tests.into_iter().zip(Line::ALL) {
            let line = line.text() + "\n";
            let elapsed = timed(|| work(&name, line.as_bytes(), count))?.0;
            expect_length(&path, count * line.len() as u64)?;
            visit.sample(test, elapsed, count)?;
            visit.tidy(std::slice::from_ref(&path))?;
        }
    }
    // The log has been written line by line so far; now it is held open.
    let line = Line::Short.text() + "\n";
    opening(&name, line.as_bytes(), OPENED)?;
    let elapsed = timed(|| holding(&name, line.as_bytes(), count))?.0;
    expect_length(&path, (OPENED + count) * line.len() as u64)?;
    visit.sample("held-after-open", elapsed, count)?;
    visit.tidy(std::slice::from_ref(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_their_lengths() {
        assert_eq!(Line::ALL.map(|line| line.text().len()), [50, 91, 621]);
    }

    #[test]
    fn both_ways_append_every_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        opening(&name, b"one\n", 3).unwrap();
        holding(&name, b"two\n", 2).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\none\none\ntwo\ntwo\n");
        expect_length(&path, 20).unwrap();
        assert!(expect_length(&path, 21).unwrap_err().to_string().contains("20 bytes instead of 21"));
    }
}
