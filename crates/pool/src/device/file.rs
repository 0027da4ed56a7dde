//! A device that is a file or a block device of the system.
//!
//! Invariants: one process has it open for writing (an exclusive `flock`; block devices `O_EXCL` too, which also keeps mounted ones out);
//! readers share it among themselves. All I/O goes through the page cache, at whole multiples of 4 KiB.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use rustix::fs::{Advice, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::Device;

/// A file or block device.
#[derive(Debug)]
pub struct FileDevice {
    name: String,
    file: File,
    length: u64,
}

impl FileDevice {
    /// Makes a new sparse file of this length (bytes) for a pool to lie on.
    ///
    /// # Errors
    /// The system's: the file exists, the directory does not, and so on.
    pub fn create(path: &Path, length: u64) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.set_len(length)?;
        Ok(Self { name: path.display().to_string(), file, length })
    }

    /// Opens a file or block device that is there.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::ResourceBusy`] when another process (or a mount) uses it.
    pub fn open(path: &Path, writable: bool) -> io::Result<Self> {
        let kind = std::fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"));
        }
        let mut flags = OFlags::CLOEXEC | if writable { OFlags::RDWR } else { OFlags::RDONLY };
        if kind.is_block_device() && writable {
            flags |= OFlags::EXCL;
        }
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let lock = if writable { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
        match rustix::fs::flock(&file, lock) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(io::Error::new(io::ErrorKind::ResourceBusy, "in use by another process")),
            Err(other) => return Err(other.into()),
        }
        let length = rustix::fs::seek(&file, SeekFrom::End(0))?;
        Ok(Self { name: path.display().to_string(), file, length })
    }
}

impl Device for FileDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // A file must not grow by a write behind its end: the place of its last labels is told by its length.
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.length) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a write behind the end of the device"));
        }
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(other) => Err(other.into()),
        }
    }

    fn begin_sync(&self, offset: u64, length: u64) {
        // A hint: the sync that follows tells whether it could be written.
        let _ = nacre_sys::writeback::start(self.file.as_fd(), offset, length);
    }

    fn expect(&self, offset: u64, length: u64) {
        if let Some(length) = std::num::NonZeroU64::new(length) {
            // A hint: what it says about failing changes nothing for the read that follows.
            let _ = rustix::fs::fadvise(&self.file, offset, Some(length), Advice::WillNeed);
        }
    }
}
