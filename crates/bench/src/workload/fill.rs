//! Sixteen writers of four kinds write until nothing more fits. Then it is checked how many bytes the host holds
//! beyond the limit, and whether all accepted bytes exist. Nothing is timed.
//!
//! Only targets with a limit are filled; writers also stop by themselves somewhat above it, so that a broken cage
//! cannot fill the disk.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::Visit;
use super::appends::{LOGGER, Line};
use crate::failure::{Doing, Failure};

const WRITERS: usize = 16;
const KIB: usize = 1024;
const MIB: u64 = 1 << 20;
/// Allocation unit of file systems.
const BLOCK: u64 = 4096;

/// Method of writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Blocks of 1 MiB at growing offsets.
    Blocks,
    /// Appends of 4 KiB by one descriptor.
    Pages,
    /// Appends of lines by one descriptor.
    Lines,
    /// The file opened for each line.
    OpenedLines,
}

const KINDS: [Kind; 4] = [Kind::Blocks, Kind::Pages, Kind::Lines, Kind::OpenedLines];

impl Kind {
    fn data(self) -> Vec<u8> {
        match self {
            Self::Blocks => vec![b'b'; KIB * KIB],
            Self::Pages => vec![b'p'; 4 * KIB],
            Self::Lines | Self::OpenedLines => (Line::Long.text() + "\n").into_bytes(),
        }
    }
}

/// A file and the number of its bytes that were accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Written {
    path: PathBuf,
    accepted: u64,
}

fn open(path: &Path, kind: Kind) -> Result<OwnedFd, Errno> {
    let flags = if kind == Kind::Blocks { OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC } else { LOGGER };
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))
}

fn is_full(error: Errno) -> bool {
    error == Errno::NOSPC || error == Errno::DQUOT
}

/// Writes until nothing more fits or the common allowance is used up.
fn write_until_full(path: PathBuf, kind: Kind, allowance: &AtomicU64) -> Result<Written, Failure> {
    let data = kind.data();
    let mut written = Written { path, accepted: 0 };
    let mut held = None;
    loop {
        let file = match held.take() {
            Some(file) => file,
            None => match open(&written.path, kind) {
                Ok(file) => file,
                Err(error) if is_full(error) => return Ok(written),
                Err(error) => return Err(Failure::io("opening", &written.path, error)),
            },
        };
        let result = if kind == Kind::Blocks {
            rustix::io::pwrite(&file, &data, written.accepted)
        } else {
            rustix::io::write(&file, &data)
        };
        let count = match result {
            Ok(count) => count as u64,
            Err(error) if is_full(error) => return Ok(written),
            Err(error) => return Err(Failure::io("writing", &written.path, error)),
        };
        written.accepted += count;
        let before =
            allowance.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(count)));
        if before.is_ok_and(|left| left <= count) {
            return Ok(written);
        }
        held = (kind != Kind::OpenedLines).then_some(file);
    }
}

/// Runs all writers concurrently.
fn fill(directory: &Path, allowance: u64) -> Result<Vec<Written>, Failure> {
    let allowance = AtomicU64::new(allowance);
    let results: Vec<Result<Written, Failure>> = thread::scope(|scope| {
        let writers = KINDS.iter().cycle().take(WRITERS).enumerate();
        let writers = writers.map(|(number, kind)| {
            let (path, allowance) = (directory.join(format!("writer-{number:02}")), &allowance);
            scope.spawn(move || write_until_full(path, *kind, allowance))
        });
        // Collected first, so that all of them are started before any is joined.
        let writers: Vec<_> = writers.collect();
        writers
            .into_iter()
            .map(|writer| writer.join().unwrap_or_else(|_| Err(Failure::new("a writer panicked"))))
            .collect()
    });
    results.into_iter().collect()
}

/// Returns how many accepted bytes are not in the files.
fn missing(written: &[Written]) -> Result<u64, Failure> {
    let mut missing = 0;
    for Written { path, accepted } in written {
        let there = match fs::metadata(path) {
            Ok(data) => data.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
            Err(error) => return Err(Failure::io("looking at", path, error)),
        };
        missing += accepted.saturating_sub(there);
    }
    Ok(missing)
}

/// Returns the bytes of file data that the host holds below `directory`. Preallocation behind the end of a file and
/// metadata are not counted: blocks count up to the last byte only.
fn held_by(directory: &Path) -> Result<u64, Failure> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory).doing("listing", directory)? {
        let path = entry.doing("listing", directory)?.path();
        let data = fs::symlink_metadata(&path).doing("looking at", &path)?;
        if data.is_dir() {
            bytes += held_by(&path)?;
        } else if data.is_file() {
            bytes += (data.blocks() * 512).min(data.len().next_multiple_of(BLOCK));
        }
    }
    Ok(bytes)
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let limit = visit.bounds.limit;
    let written = fill(&visit.own, limit + limit / 8 + 64 * MIB)?;
    let accepted: u64 = written.iter().map(|written| written.accepted).sum();
    if accepted < limit / 2 {
        return Err(Failure::new(format!("full after {accepted} of {limit} bytes")));
    }
    // A cage that reserved too little for write-back would fail now.
    for Written { path, .. } in written.iter().filter(|written| written.accepted > 0) {
        fs::File::open(path).and_then(|file| file.sync_all()).doing("flushing", path)?;
    }
    visit.tidy(&[])?;
    let host = fs::File::open(&visit.bounds.host).doing("opening", &visit.bounds.host)?;
    rustix::fs::syncfs(&host).doing("flushing", &visit.bounds.host)?;
    visit.count("lost", missing(&written)?)?;
    visit.count("overshoot", held_by(&visit.bounds.host)?.saturating_sub(limit))?;
    let files: Vec<PathBuf> = written.into_iter().map(|written| written.path).filter(|path| path.exists()).collect();
    visit.tidy(&files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_stop_at_the_allowance_and_every_byte_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let written = fill(directory.path(), 8 * MIB).unwrap();
        assert_eq!(written.len(), WRITERS);
        let accepted: u64 = written.iter().map(|written| written.accepted).sum();
        assert!((8 * MIB..24 * MIB).contains(&accepted), "{accepted}");
        assert_eq!(missing(&written), Ok(0));
        assert!(held_by(directory.path()).unwrap() >= accepted);
        let cut = written.iter().find(|written| written.accepted > 1000).unwrap();
        fs::File::options().write(true).open(&cut.path).unwrap().set_len(cut.accepted - 7).unwrap();
        assert_eq!(missing(&written), Ok(7));
        fs::remove_file(&cut.path).unwrap();
        assert_eq!(missing(&written), Ok(cut.accepted));
    }

    #[test]
    fn both_kinds_of_full_are_known() {
        assert!(is_full(Errno::NOSPC) && is_full(Errno::DQUOT) && !is_full(Errno::IO));
    }
}
