//! A shared mapping of a file with bounds-checked access, for tests and measurements of `mmap(2)`.
//!
//! Callers: the real-mount tests. Bytes are moved one by one with volatile accesses, because other
//! processes may change them at any time. Truncating the file below a mapped page ends the process
//! with SIGBUS on the next access, as it does natively.

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

/// A shared mapping of a file.
#[derive(Debug)]
pub struct SharedMapping {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
}

impl SharedMapping {
    /// Maps the first `length` bytes of a file, with `writable` also for writing.
    ///
    /// # Errors
    /// As `mmap(2)`: EINVAL for a length of 0, EACCES for a mode that the file was not opened for.
    pub fn new(file: impl AsFd, length: usize, writable: bool) -> io::Result<SharedMapping> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the kernel chooses the place, so that no existing mapping is touched; the pages
        // are only reached through this value.
        let start = unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(SharedMapping { start, length, writable })
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// EINVAL outside of the mapping.
    pub fn read(&self, offset: usize, buffer: &mut [u8]) -> io::Result<()> {
        self.check(offset, buffer.len())?;
        for (index, byte) in buffer.iter_mut().enumerate() {
            // SAFETY: `check` has shown that every byte lies in the mapping, which lives as long as
            // `self`.
            *byte = unsafe { self.start.as_ptr().add(offset + index).read_volatile() };
        }
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// EINVAL outside of the mapping, EACCES where it is not writable.
    pub fn write(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        if !self.writable {
            return Err(rustix::io::Errno::ACCESS.into());
        }
        for (index, byte) in data.iter().enumerate() {
            // SAFETY: as for `read`, and the mapping was made writable.
            unsafe { self.start.as_ptr().add(offset + index).write_volatile(*byte) };
        }
        Ok(())
    }

    /// Writes changed pages back and waits for it.
    ///
    /// # Errors
    /// As `msync(2)`.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: start and length are those of the mapping.
        unsafe { msync(self.start.as_ptr().cast::<c_void>(), self.length, MsyncFlags::SYNC) }.map_err(io::Error::from)
    }

    fn check(&self, offset: usize, length: usize) -> io::Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length => Ok(()),
            _ => Err(rustix::io::Errno::INVAL.into()),
        }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the mapping, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast::<c_void>(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_mapping_is_the_file() {
        let path = std::env::temp_dir().join(format!("nacre-mapping.{}", std::process::id()));
        let mut file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(5_000).unwrap();
        let mapping = SharedMapping::new(&file, 5_000, true).unwrap();
        mapping.write(4_998, b"ok").unwrap();
        mapping.sync().unwrap();
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content.get(4_998..), Some(&b"ok"[..]));
        assert!(mapping.write(4_999, b"no").is_err());
        assert!(mapping.read(usize::MAX, &mut [0]).is_err());
        assert!(SharedMapping::new(&file, 5_000, false).unwrap().write(0, b"x").is_err());
    }
}
