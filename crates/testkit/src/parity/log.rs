//! Log of a parity case, line by line, and calls whose results are logged in a uniform format.

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, Timestamps};
use rustix::io::{Errno, Result};
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The case's directory and its log so far.
pub struct Log {
    directory: PathBuf,
    lines: Vec<String>,
}

impl Log {
    pub(super) fn new(directory: &Path) -> Log {
        Log { directory: directory.to_path_buf(), lines: Vec::new() }
    }

    pub(super) fn lines(self) -> Vec<String> {
        self.lines
    }

    /// The path of a name in the case's directory.
    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Logs a line.
    pub fn say(&mut self, line: impl Into<String>) {
        self.lines.push(line.into());
    }

    /// Logs a result and returns its value.
    pub fn saw<T: Debug>(&mut self, what: &str, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.say(format!("{what} = {value:?}"));
                Some(value)
            }
            Err(error) => {
                self.say(format!("{what}: {}", shown(error)));
                None
            }
        }
    }

    /// Logs only the success of a result whose value differs from run to run, and returns the value.
    pub fn did<T>(&mut self, what: &str, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.say(format!("{what}: ok"));
                Some(value)
            }
            Err(error) => {
                self.say(format!("{what}: {}", shown(error)));
                None
            }
        }
    }

    /// Opens a name and logs whether it worked.
    pub fn open(&mut self, name: &str, flags: OFlags, mode: u32) -> Option<OwnedFd> {
        let result = rustix::fs::open(self.at(name), flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode));
        self.did(&format!("open {name} {:#o} {mode:o}", flags.bits()), result)
    }

    /// Creates a file with this content; not logged.
    pub fn file(&mut self, name: &str, content: &[u8]) -> OwnedFd {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(self.at(name), flags, Mode::from_raw_mode(0o644)).expect("create");
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644)).expect("fchmod");
        let mut rest = content;
        while !rest.is_empty() {
            let size = rustix::io::write(&file, rest).expect("write");
            rest = &rest[size..];
        }
        file
    }

    /// Creates a directory; not logged.
    pub fn mkdir(&mut self, name: &str) {
        rustix::fs::mkdir(self.at(name), Mode::from_raw_mode(0o755)).expect("mkdir");
        rustix::fs::chmod(self.at(name), Mode::from_raw_mode(0o755)).expect("chmod");
    }

    /// Logs the attributes of a name (of a link itself, not its target).
    pub fn stat(&mut self, name: &str) {
        let path = self.at(name);
        let flags = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let result = rustix::fs::statx(CWD, &path, AtFlags::SYMLINK_NOFOLLOW, flags);
        match result {
            Err(error) => self.say(format!("stat {name}: {}", shown(error))),
            Ok(stat) => {
                let kind = FileType::from_raw_mode(stat.stx_mode.into());
                self.say(format!(
                    "stat {name}: {kind:?} {:o} nlink {} owner {}:{} size {} device {}:{} birth {}",
                    stat.stx_mode & 0o7777,
                    stat.stx_nlink,
                    stat.stx_uid,
                    stat.stx_gid,
                    if kind == FileType::Directory { 0 } else { stat.stx_size },
                    stat.stx_rdev_major,
                    stat.stx_rdev_minor,
                    stat.stx_mask & StatxFlags::BTIME.bits() != 0,
                ));
            }
        }
    }

    /// Logs the atime and mtime of a name that were set, to the nanosecond.
    pub fn times(&mut self, name: &str) {
        match rustix::fs::statx(CWD, self.at(name), AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS) {
            Err(error) => self.say(format!("times {name}: {}", shown(error))),
            Ok(stat) => self.say(format!(
                "times {name}: {}.{:09} {}.{:09}",
                stat.stx_atime.tv_sec, stat.stx_atime.tv_nsec, stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec
            )),
        }
    }

    /// Logs whether the mtime and the ctime of a name have changed since `mark`.
    pub fn moved(&mut self, what: &str, name: &str, mark: Mark) {
        let now = Mark::of(&self.at(name));
        self.say(format!("{what}: mtime moved {} ctime moved {}", now.mtime > mark.mtime, now.ctime > mark.ctime));
    }

    /// Reads the times of a name, after a pause that is longer than a clock tick, so that the next
    /// change is visible. Measured by the clock that file times come from: on a busy machine its
    /// ticks are late.
    pub fn mark(&mut self, name: &str) -> Mark {
        let mark = Mark::of(&self.at(name));
        let now = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
            time.tv_sec * 1_000_000_000 + time.tv_nsec
        };
        let end = now() + 12_000_000;
        while now() < end {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        mark
    }

    /// Logs the content of a name, as a digest if it is long.
    pub fn content(&mut self, name: &str) {
        match std::fs::read(self.at(name)) {
            Ok(content) => self.say(format!("content {name}: {}", digest(&content))),
            Err(error) => self.say(format!("content {name}: {:?}", error.raw_os_error())),
        }
    }

    /// Logs the names in a directory, sorted, with types.
    pub fn list(&mut self, name: &str) {
        let directory =
            rustix::fs::open(self.at(name), OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let Some(directory) = self.did(&format!("opendir {name}"), directory) else { return };
        let entries = rustix::fs::Dir::read_from(&directory).expect("opendir");
        let mut names: Vec<String> = entries
            .map(|entry| {
                let entry = entry.expect("readdir");
                format!("{:?} {:?}", entry.file_name(), entry.file_type())
            })
            .collect();
        names.sort();
        self.say(format!("names of {name}: {}", names.join(", ")));
    }
}

/// Times of a file at some moment.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    mtime: (i64, u32),
    ctime: (i64, u32),
}

impl Mark {
    fn of(path: &Path) -> Mark {
        let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS).expect("statx");
        Mark {
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            ctime: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        }
    }
}

/// An error as number and text.
pub(super) fn shown(error: Errno) -> String {
    format!("errno {} ({error})", error.raw_os_error())
}

fn digest(content: &[u8]) -> String {
    if content.len() <= 64 {
        return content.escape_ascii().to_string();
    }
    // FNV-1a: sufficient to distinguish two runs of one test.
    let hash = content
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    format!("{} bytes, {hash:016x}", content.len())
}

/// Times to set: seconds and nanoseconds of access and modification.
pub(super) fn timestamps(atime: (i64, i64), mtime: (i64, i64)) -> Timestamps {
    Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: atime.0, tv_nsec: atime.1 },
        last_modification: rustix::fs::Timespec { tv_sec: mtime.0, tv_nsec: mtime.1 },
    }
}
