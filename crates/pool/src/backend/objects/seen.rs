//! Local record of the newest root of a pool in a bucket that this machine has seen: detects a bucket that was rolled
//! back, or whose newest roots were deleted.
//!
//! Caller: [`Objects`](super::Objects). The file is 16 bytes: the generation, and a checksum of it. Invariants: it is
//! a lower bound, since it is not synced; a missing or damaged file has no effect; a failed write is logged and
//! otherwise ignored.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::checksum;
use crate::error::PoolError;

/// The newest root of one pool that this machine has seen.
pub struct SeenRoots {
    path: PathBuf,
    /// Accepts an older state.
    accepts_older: bool,
    newest: Mutex<u64>,
}

fn sum(generation: u64) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = checksum::structure(&generation.to_le_bytes());
    [a, b, c, d, e, f, g, h]
}

fn read(path: &Path) -> Option<u64> {
    let mut bytes = [0; 16];
    OpenOptions::new().read(true).open(path).ok()?.read_exact(&mut bytes).ok()?;
    let (generation, found) = bytes.split_first_chunk::<8>()?;
    let generation = u64::from_le_bytes(*generation);
    (sum(generation) == *found).then_some(generation)
}

impl SeenRoots {
    /// Reads the file, if it exists; otherwise that of an older version, which stays as it is.
    #[must_use]
    pub fn open(path: PathBuf, older: Option<&Path>, accepts_older: bool) -> Self {
        let newest = read(&path).or_else(|| read(older?)).unwrap_or(0);
        Self { path, accepts_older, newest: Mutex::new(newest) }
    }

    /// Refuses a newest root that is older than one that this machine has seen.
    pub(super) fn check(&self, generation: u64) -> Result<(), PoolError> {
        let seen = *self.newest.lock();
        if generation >= seen {
            self.note(generation);
            return Ok(());
        }
        if self.accepts_older {
            *self.newest.lock() = 0;
            self.note(generation);
            return Ok(());
        }
        Err(PoolError::Refused(format!(
            "the newest state in the bucket is number {generation}, and this machine has seen number {seen}: newer states were removed, or the bucket was rolled back (-f takes what is there)"
        )))
    }

    /// Records a root of this generation.
    pub(super) fn note(&self, generation: u64) {
        let mut newest = self.newest.lock();
        if generation <= *newest {
            return;
        }
        *newest = generation;
        if let Err(error) = self.write(generation) {
            tracing::debug!(%error, file = %self.path.display(), "the newest state that was seen is not noted");
        }
    }

    fn write(&self, generation: u64) -> io::Result<()> {
        if let Some(directory) = self.path.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        let [a, b] = [generation.to_le_bytes(), sum(generation)];
        file.write_all_at(&[a, b].concat(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_state_is_refused_unless_it_is_wanted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/seen");
        SeenRoots::open(path.clone(), None, false).check(7).unwrap();
        let seen = SeenRoots::open(path.clone(), None, false);
        seen.note(3);
        seen.check(7).unwrap();
        let why = seen.check(6).unwrap_err().to_string();
        assert!(why.contains("number 6") && why.contains("number 7"), "{why}");
        SeenRoots::open(path.clone(), None, true).check(6).unwrap();
        SeenRoots::open(path.clone(), None, false).check(6).unwrap();
        // A damaged file has no effect.
        std::fs::write(&path, [7; 16]).unwrap();
        SeenRoots::open(path, None, false).check(1).unwrap();
    }
}
