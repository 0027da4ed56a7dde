//! A device that is a file or a block device of the system.
//!
//! Invariants: one process has it open for writing (an exclusive `flock`; block devices also `O_EXCL`, which excludes
//! mounted ones); readers share it among themselves, and a writer waits for them for a moment. I/O uses the page
//! cache, except for streaming writes and verification: caching these would cost a copy, memory and writeback, and
//! they are not read soon. All of this I/O is aligned to 4 KiB.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{Advice, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::Device;
use crate::patience;

/// Alignment of direct I/O, bytes.
const ALIGN: usize = 4096;
/// Maximum readahead in one call, bytes.
const EXPECTED: u64 = 512 << 10;

/// Time limit of a writer that waits for readers of a device.
const READ_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const READ_PAUSE: Duration = Duration::from_millis(1);

/// A file or block device.
#[derive(Debug)]
pub struct FileDevice {
    name: String,
    file: File,
    /// A descriptor of the same file for direct I/O, where the file system supports that.
    direct: Option<File>,
    length: AtomicU64,
    block: bool,
    /// The device has refused to discard.
    keeps_room: AtomicBool,
}

/// Opens the same file again for direct I/O.
fn direct(file: &File) -> Option<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
    rustix::fs::open(format!("/proc/self/fd/{}", file.as_raw_fd()), flags, Mode::empty()).ok().map(File::from)
}

/// Locks a device: exclusively for a writer, shared for a reader. A writer waits for readers: a process that searches
/// for pools reads the labels of every device that it finds.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] if a writer has the device, or readers have it for longer than `limit`.
fn lock(file: &File, writable: bool, limit: Duration) -> io::Result<()> {
    let (shared, exclusive) = (FlockOperation::NonBlockingLockShared, FlockOperation::NonBlockingLockExclusive);
    let start = patience::now();
    loop {
        match rustix::fs::flock(file, if writable { exclusive } else { shared }) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {}
            Err(other) => return Err(other.into()),
        }
        let has_readers_only = writable && rustix::fs::flock(file, shared).is_ok();
        if !has_readers_only || start.elapsed() > limit {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "in use by another process"));
        }
        rustix::fs::flock(file, FlockOperation::Unlock)?;
        patience::sleep(READ_PAUSE);
    }
}

impl FileDevice {
    /// Creates a new sparse file of this length (bytes) for a pool.
    ///
    /// # Errors
    /// Errors of the system: the file exists, the directory does not, and so on.
    pub fn create(path: &Path, length: u64) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        lock(&file, true, READ_LIMIT)?;
        if let Err(error) = file.set_len(length) {
            std::fs::remove_file(path)
                .map_err(|left| io::Error::other(format!("{error}; the file stays behind: {left}")))?;
            return Err(error);
        }
        let block = false;
        Ok(Self {
            name: path.display().to_string(),
            direct: direct(&file),
            file,
            length: AtomicU64::new(length),
            block,
            keeps_room: AtomicBool::new(false),
        })
    }

    /// Opens an existing file or block device.
    ///
    /// # Errors
    /// Errors of the system; [`io::ErrorKind::ResourceBusy`] when another process (or a mount) uses it.
    pub fn open(path: &Path, writable: bool) -> io::Result<Self> {
        Self::open_within(path, writable, READ_LIMIT)
    }

    /// Opens a file or block device for reading its labels, without a lock: even while a pool on it is imported.
    /// Labels that are being written meanwhile fail their checksums.
    ///
    /// # Errors
    /// Errors of the system; the path is neither a file nor a block device.
    pub fn open_unlocked(path: &Path) -> io::Result<Self> {
        Self::of_file(path, Self::open_file(path, false)?)
    }

    /// Opens as [`Self::open`]; readers are waited for up to `limit`.
    pub(super) fn open_within(path: &Path, writable: bool, limit: Duration) -> io::Result<Self> {
        let file = Self::open_file(path, writable)?;
        lock(&file, writable, limit)?;
        // After a failed sync the page cache may hold data that the medium does not have, and consider it clean: drop
        // it, so that reads come from the medium. Where the system does not support that (memory file systems), there
        // is no medium behind the cache.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        let direct = if writable { direct(&file) } else { None };
        Ok(Self { direct, ..Self::of_file(path, file)? })
    }

    /// Creates the device of an open file, without a second descriptor for direct I/O.
    fn of_file(path: &Path, file: File) -> io::Result<Self> {
        let length = AtomicU64::new(rustix::fs::seek(&file, SeekFrom::End(0))?);
        let block = file.metadata()?.file_type().is_block_device();
        let name = path.display().to_string();
        Ok(Self { name, file, direct: None, length, block, keeps_room: AtomicBool::new(false) })
    }

    /// Opens a file or block device, and nothing else.
    fn open_file(path: &Path, writable: bool) -> io::Result<File> {
        let kind = std::fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"));
        }
        // The owner of the directory may replace the path by a pipe at this moment, or hold a lease on it: the open
        // must not block.
        let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK | if writable { OFlags::RDWR } else { OFlags::RDONLY };
        if kind.is_block_device() && writable {
            flags |= OFlags::EXCL;
        }
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process has a lease on it"));
            }
            Err(other) => return Err(other.into()),
        };
        if file.metadata()?.file_type() != kind {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is something else now"));
        }
        Ok(file)
    }

    /// Takes over the descriptor that a previous process has opened for writing (failover). Its lock stays in force:
    /// no other process can take it meanwhile.
    ///
    /// # Errors
    /// The descriptor is neither a file nor a block device, or its length is unavailable.
    pub fn adopt(name: String, descriptor: OwnedFd) -> io::Result<Self> {
        let file = File::from(descriptor);
        let kind = file.metadata()?.file_type();
        let block = kind.is_block_device();
        if !kind.is_file() && !block {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"));
        }
        let length = AtomicU64::new(rustix::fs::seek(&file, SeekFrom::End(0))?);
        Ok(Self { name, direct: direct(&file), file, length, block, keeps_room: AtomicBool::new(false) })
    }
}

/// Whether only root may write an open file; for a block device, the group that the system has for that may, too.
fn is_written_by_root(file: &Metadata) -> bool {
    let others = if file.file_type().is_block_device() { 0o002 } else { 0o022 };
    file.uid() == 0 && file.mode() & others == 0
}

/// Whether only root can replace the file at a path: directories above it that others may write are sticky, so that
/// others cannot remove root's files.
fn is_named_by_root(path: &Path) -> io::Result<bool> {
    for directory in path.ancestors().skip(1) {
        let there = std::fs::symlink_metadata(directory)?;
        if there.uid() != 0 || there.mode() & 0o022 != 0 && there.mode() & 0o1000 == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

impl FileDevice {
    /// Whether the open file is controlled by root, regardless of what is at its path by now.
    fn is_roots(&self) -> Option<bool> {
        let file = self.file.metadata().ok()?;
        // The kernel's path, without symbolic links.
        let path = std::fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        if !(is_written_by_root(&file) && is_named_by_root(&path).ok()?) {
            return Some(false);
        }
        // A loop device is as trusted as its backing file.
        let (major, minor) = (rustix::fs::major(file.rdev()), rustix::fs::minor(file.rdev()));
        let shown = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file"));
        match shown.ok().filter(|_| self.block) {
            Some(shown) => {
                let shown = Path::new(shown.trim_end_matches('\n'));
                Some(is_written_by_root(&std::fs::symlink_metadata(shown).ok()?) && is_named_by_root(shown).ok()?)
            }
            None => Some(true),
        }
    }
}

/// Whether direct I/O is possible.
fn lies_aligned(bytes: &[u8], offset: u64) -> bool {
    bytes.as_ptr().align_offset(ALIGN) == 0 && bytes.len().is_multiple_of(ALIGN) && offset.is_multiple_of(ALIGN as u64)
}

impl Device for FileDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length.load(Ordering::Acquire)
    }

    fn look_again(&self) -> io::Result<u64> {
        // Nothing else uses the descriptor's file position.
        let now = rustix::fs::seek(&self.file, SeekFrom::End(0))?;
        Ok(self.length.fetch_max(now, Ordering::AcqRel).max(now))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn read_past_caches(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let aligned = lies_aligned(buffer, offset);
        match self.direct.as_ref().filter(|_| aligned).map(|direct| direct.read_exact_at(buffer, offset)) {
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => self.read_at(buffer, offset),
            Some(read) => read,
            None => self.read_at(buffer, offset),
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // A file must not grow by a write beyond its end: its length determines the location of its last labels.
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.length()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a write behind the end of the device"));
        }
        self.file.write_all_at(bytes, offset)
    }

    fn write_stream(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let aligned = lies_aligned(bytes, offset);
        if let Some(direct) = self.direct.as_ref().filter(|_| aligned)
            && offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= self.length())
        {
            match direct.write_all_at(bytes, offset) {
                // The device needs larger blocks, or has written a part: write all of it again through the page
                // cache.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                outcome => return outcome,
            }
        }
        self.write_at(bytes, offset)?;
        self.begin_sync(offset, bytes.len() as u64);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let told = if self.block {
            nacre_sys::discard::discard(self.file.as_fd(), offset, length)
        } else {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, flags, offset, length).map_err(io::Error::from)
        };
        match told {
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::OPNOTSUPP | Errno::NOSYS)) => {
                self.keeps_room.store(true, Ordering::Relaxed);
                Ok(())
            }
            told => told,
        }
    }

    fn can_discard(&self) -> bool {
        !self.keeps_room.load(Ordering::Relaxed)
    }

    fn descriptor(&self) -> Option<i32> {
        Some(self.file.as_raw_fd())
    }

    fn deleted(&self) -> Option<PathBuf> {
        let open = || PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()));
        self.file.metadata().ok().filter(|file| !self.block && file.nlink() == 0).map(|_| open())
    }

    fn is_anybodys(&self) -> bool {
        // What cannot be examined is not known to be root's.
        self.is_roots().is_none_or(|roots| !roots)
    }

    fn begin_sync(&self, offset: u64, length: u64) {
        // A hint: the sync that follows reports whether the range could be written.
        let _ = nacre_sys::writeback::start(self.file.as_fd(), offset, length);
    }

    fn expect(&self, offset: u64, length: u64) {
        // The kernel reads ahead no more at once than one request of the device can hold.
        for from in (0..length).step_by(EXPECTED as usize) {
            let part = std::num::NonZeroU64::new(EXPECTED.min(length - from));
            // A hint: a failure does not affect the read that follows.
            let _ = rustix::fs::fadvise(&self.file, offset + from, part, Advice::WillNeed);
        }
    }
}
