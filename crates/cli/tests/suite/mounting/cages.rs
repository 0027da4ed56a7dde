//! Cages as scripts see them, and what a directory costs by the rules of docs/cage.md.

use super::{Fixture, eventually, text};
use serde_json::Value;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The figures of one cage.
#[derive(Clone, Debug)]
pub struct Cage(pub Value);

impl Cage {
    /// Asks for the cage of a directory, which must be there.
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

    /// A figure; a limit that there is not is `u64::MAX`.
    pub fn number(&self, field: &str) -> u64 {
        match &self.0[field] {
            Value::Null => u64::MAX,
            value => value.as_u64().unwrap_or_else(|| panic!("{field} in {}", self.0)),
        }
    }

    /// A text.
    pub fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or_else(|| panic!("{field} in {}", self.0))
    }

    /// The calls that were refused, by the limit in the way.
    pub fn refused(&self, limit: &str) -> u64 {
        self.0["refused"][limit].as_u64().unwrap_or_else(|| panic!("refused.{limit} in {}", self.0))
    }
}

/// Bytes to write.
pub fn zeros(length: u64) -> Vec<u8> {
    vec![0x5a; usize::try_from(length).unwrap()]
}

/// Writes until it does not fit; the bytes that were accepted and the error.
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

/// What everything below a directory costs: bytes and inodes. The directory itself is free.
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

/// What regular files below a directory hold on the host, bytes.
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
