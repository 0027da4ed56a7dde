//! One big file that stays in the page cache: sequential, random and stride I/O without fsync. This measures the
//! cost of the system calls to the page cache, which a layer can increase.
//!
//! Every target works on the same file, so all share the same pages of the source.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::{Visit, repeated, shuffled};
use crate::failure::{Doing, Failure};
use crate::scale::Scale;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// iozone's stride: 17 records, so that all records of a power of two are visited.
pub const STRIDE: u64 = 17;

/// Page-aligned memory for I/O, filled with a pattern that no file system can store as a hole or
/// compress to nothing.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<u8>,
    skip: usize,
}

impl Buffer {
    /// Allocates memory for records of up to `bytes`.
    pub fn new(bytes: usize) -> Self {
        let mut memory = vec![0_u8; bytes + 4096];
        let mut state = 1_u32;
        for byte in &mut memory {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        let skip = memory.as_ptr().align_offset(4096).min(4096);
        Self { memory, skip }
    }

    /// Returns the first `bytes` of the memory, or all of it.
    pub fn record(&mut self, bytes: u64) -> &mut [u8] {
        let usable = self.memory.get_mut(self.skip..).unwrap_or_default();
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(usable.len());
        usable.get_mut(..wanted).unwrap_or_default()
    }
}

/// Opens `path` for reading and writing.
pub fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Failure> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o666)).doing("opening", path)
}

/// Reads a whole record at each of the offsets.
pub fn read_at(file: &OwnedFd, record: &mut [u8], offsets: &[u64]) -> Result<(), Failure> {
    for offset in offsets {
        let count = rustix::io::pread(file, &mut *record, *offset)
            .map_err(|error| Failure::new(format!("reading at {offset}: {error}")))?;
        if count != record.len() {
            return Err(Failure::new(format!("read {count} of {} bytes at {offset}", record.len())));
        }
    }
    Ok(())
}

/// Writes a whole record at each of the offsets.
pub fn write_at(file: &OwnedFd, record: &[u8], offsets: &[u64]) -> Result<(), Failure> {
    for offset in offsets {
        let count = rustix::io::pwrite(file, record, *offset)
            .map_err(|error| Failure::new(format!("writing at {offset}: {error}")))?;
        if count != record.len() {
            return Err(Failure::new(format!("wrote {count} of {} bytes at {offset}", record.len())));
        }
    }
    Ok(())
}

/// Syncs to the device.
pub fn flush(file: &OwnedFd) -> Result<(), Failure> {
    rustix::fs::fsync(file).map_err(|error| Failure::new(format!("fsync: {error}")))
}

/// Returns the offsets of the records of a file, first to last.
pub fn forward(bytes: u64, record: u64) -> Vec<u64> {
    (0..bytes / record).map(|number| number * record).collect()
}

/// Returns the offset of every record once, in random order.
pub fn random(bytes: u64, record: u64) -> Vec<u64> {
    shuffled(bytes / record).into_iter().map(|number| number * record).collect()
}

/// Returns as many offsets as the file has records, each [`STRIDE`] records after the one before, modulo the size.
pub fn stride(bytes: u64, record: u64) -> Vec<u64> {
    let count = bytes / record;
    (0..count).map(|number| number * STRIDE % count * record).collect()
}

/// Returns the path of the file that the groups cache and mmap work on.
pub fn path(root: &Path) -> PathBuf {
    root.join("big-file")
}

/// Makes the file, unless the other group has made it.
pub fn prepare(source: &Path, scale: &Scale, buffer: &mut Buffer) -> Result<(), Failure> {
    make(&path(source), scale.cache, buffer)
}

/// Makes a file of that size that everybody can write, unless it exists.
pub fn make(path: &Path, bytes: u64, buffer: &mut Buffer) -> Result<(), Failure> {
    if std::fs::metadata(path).is_ok_and(|data| data.len() == bytes) {
        return Ok(());
    }
    let file = open(path, OFlags::CREATE | OFlags::TRUNC | OFlags::RDWR)?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(0o666)).doing("opening to all", path)?;
    write_at(&file, buffer.record(MIB), &forward(bytes, MIB))?;
    File::from(file).sync_all().doing("flushing", path)
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (path, bytes) = (path(&visit.root), visit.scale.cache);
    let flags = if visit.reads_only { OFlags::RDONLY } else { OFlags::RDWR };
    let file = open(&path, flags)?;
    read_at(&file, visit.buffer.record(MIB), &forward(bytes, MIB))?;
    let reads: [(&'static str, u64, Vec<u64>); 4] = [
        ("cache-read-1m", MIB, forward(bytes, MIB)),
        ("cache-read-4k", 4 * KIB, forward(bytes, 4 * KIB)),
        ("cache-random-read-4k", 4 * KIB, random(bytes, 4 * KIB)),
        ("cache-stride-read-64k", 64 * KIB, stride(bytes, 64 * KIB)),
    ];
    for (test, record, offsets) in &reads {
        let memory = visit.buffer.record(*record);
        let elapsed = repeated(|| read_at(&file, memory, offsets))?;
        visit.sample(test, elapsed, bytes)?;
    }
    if visit.reads_only {
        return Ok(());
    }
    let writes: [(&'static str, u64, Vec<u64>); 3] = [
        ("cache-write-1m", MIB, forward(bytes, MIB)),
        ("cache-write-4k", 4 * KIB, forward(bytes, 4 * KIB)),
        ("cache-random-write-4k", 4 * KIB, random(bytes, 4 * KIB)),
    ];
    for (test, record, offsets) in &writes {
        let memory = visit.buffer.record(*record);
        let elapsed = repeated(|| write_at(&file, memory, offsets))?;
        visit.sample(test, elapsed, bytes)?;
        // Every test starts with a clean file, so that none pays for the writeback of the previous one.
        flush(&file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_visit_every_record_once() {
        for offsets in [forward(1 << 20, 4096), random(1 << 20, 4096), stride(1 << 20, 4096)] {
            let mut sorted = offsets.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, forward(1 << 20, 4096));
        }
        assert_eq!(stride(1 << 20, 4096)[..3], [0, 17 * 4096, 34 * 4096]);
    }

    #[test]
    fn buffers_are_aligned_and_not_zero() {
        let mut buffer = Buffer::new(64 * 1024);
        let record = buffer.record(64 * 1024);
        assert_eq!(record.len(), 64 * 1024);
        assert_eq!(record.as_ptr() as usize % 4096, 0);
        assert!(record.iter().any(|byte| *byte != 0));
    }
}
