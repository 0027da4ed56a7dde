//! Reports of cages as scripts read them, and the cost of a directory by the rules of docs/cage.md.

use super::{Fixture, eventually, text};
use serde_json::Value;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The report of one cage.
#[derive(Clone, Debug)]
pub struct Cage(pub Value);

impl Cage {
    /// Requests the report on the cage of a directory, which must exist.
    pub fn of(fixture: &Fixture, directory: &Path) -> Cage {
        let ask =
            || fixture.nacre([OsStr::new("cage"), OsStr::new("status"), OsStr::new("--json"), directory.as_os_str()]);
        let mut output = ask();
        // A daemon in the foreground serves the mount a moment before it answers questions.
        eventually("the daemon answers", || {
            if !output.status.success() {
                output = ask();
            }
            output.status.success()
        });
        assert!(output.status.success(), "nacre cage status: {}", text(&output.stderr));
        let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let cages = value.as_array().expect("a list of cages");
        assert_eq!(cages.len(), 1, "{value}");
        Cage(cages[0].clone())
    }

    /// Returns a number; a missing limit is `u64::MAX`.
    pub fn number(&self, field: &str) -> u64 {
        match &self.0[field] {
            Value::Null => u64::MAX,
            value => value.as_u64().unwrap_or_else(|| panic!("{field} in {}", self.0)),
        }
    }

    /// Returns a text.
    pub fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or_else(|| panic!("{field} in {}", self.0))
    }

    /// Returns the number of refused calls, by the limit that refused them.
    pub fn refused(&self, limit: &str) -> u64 {
        self.0["refused"][limit].as_u64().unwrap_or_else(|| panic!("refused.{limit} in {}", self.0))
    }
}

/// Returns this many bytes to write.
pub fn zeros(length: u64) -> Vec<u8> {
    vec![0x5a; usize::try_from(length).unwrap()]
}

/// Writes until a write fails; returns the number of accepted bytes and the error number.
pub fn fill(file: &mut impl std::io::Write, piece: usize) -> (u64, i32) {
    let piece = vec![b'x'; piece];
    let mut accepted = 0;
    loop {
        match file.write(&piece) {
            Ok(written) => accepted += written as u64,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return (accepted, error.raw_os_error().unwrap()),
        }
        assert!(accepted < 1 << 32, "nothing stops it");
    }
}

/// Returns the cost of everything below a directory: bytes and inodes. The directory itself is
/// free.
pub fn cost(directory: &Path) -> (u64, u64) {
    let (mut bytes, mut inodes, mut seen) = (0, 0, HashSet::new());
    let mut ahead = vec![directory.to_owned()];
    while let Some(place) = ahead.pop() {
        for entry in std::fs::read_dir(&place).expect("read_dir") {
            let path = entry.expect("entry").path();
            let data = std::fs::symlink_metadata(&path).expect("stat");
            if data.nlink() > 1 && !data.is_dir() && !seen.insert((data.dev(), data.ino())) {
                continue;
            }
            let allocated = data.blocks() * 512;
            bytes += if data.is_file() { allocated.min(data.len().next_multiple_of(4096)) } else { allocated };
            inodes += 1;
            if data.is_dir() {
                ahead.push(path);
            }
        }
    }
    (bytes, inodes)
}

/// Returns the allocated bytes of regular files below a directory on the host.
pub fn data(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut ahead = vec![directory.to_owned()];
    while let Some(place) = ahead.pop() {
        for entry in std::fs::read_dir(&place).into_iter().flatten().flatten() {
            let Ok(data) = std::fs::symlink_metadata(entry.path()) else { continue };
            if data.is_dir() {
                ahead.push(entry.path());
            } else if data.is_file() {
                bytes += (data.blocks() * 512).min(data.len().next_multiple_of(4096));
            }
        }
    }
    bytes
}
