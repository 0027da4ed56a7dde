//! An open file of the tree in memory.

use super::{
    MemClock,
    content::SIZE_MAX,
    inode::{Inode, What},
};
use nacre_vfs::{
    AllocateMode, Errno, FileLock, Ioctl, LockKind, LockOwner, OpenFile, OpenFlags, Result, Whence, WriteOrigin,
};
use std::{any::Any, os::fd::BorrowedFd, sync::Arc};

/// An open file of the tree in memory.
pub(super) struct MemFile {
    pub(super) inode: Arc<Inode>,
    pub(super) flags: OpenFlags,
    pub(super) clock: MemClock,
}

/// The end of a range; EFBIG beyond the maximum file size.
fn end(offset: u64, length: u64) -> Result<u64> {
    offset.checked_add(length).filter(|&end| end <= SIZE_MAX).ok_or(Errno::EFBIG)
}

impl MemFile {
    fn no_atime(&self) -> bool {
        self.flags.raw() & rustix::fs::OFlags::NOATIME.bits() != 0
    }

    fn writable(&self) -> Result<()> {
        if self.flags.writes() { Ok(()) } else { Err(Errno::EBADF) }
    }

    /// Writes at an offset, or at the end.
    fn write_at(&self, data: &[u8], offset: Option<u64>) -> Result<usize> {
        self.writable()?;
        if data.is_empty() {
            return Ok(0);
        }
        let mut body = self.inode.body.lock();
        let content = body.content()?;
        let offset = offset.unwrap_or_else(|| content.size());
        end(offset, data.len() as u64)?;
        content.write(data, offset);
        let now = (self.clock)();
        (body.mtime, body.ctime) = (now, now);
        Ok(data.len())
    }
}

impl OpenFile for MemFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn inner(&self) -> &dyn OpenFile {
        self
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        if !self.flags.reads() {
            return Err(Errno::EBADF);
        }
        let mut body = self.inode.body.lock();
        let count = body.content()?.read(buffer, offset);
        if !self.no_atime() {
            body.touch_atime((self.clock)());
        }
        Ok(count)
    }

    fn write(&self, data: &[u8], offset: u64, _origin: WriteOrigin) -> Result<usize> {
        self.write_at(data, Some(offset))
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.write_at(data, None)
    }

    fn flush(&self, owner: LockOwner) -> Result<()> {
        self.inode.locks.release(owner);
        Ok(())
    }

    fn fsync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.writable()?;
        if length == 0 {
            return Err(Errno::EINVAL);
        }
        let end = end(offset, length)?;
        let mut body = self.inode.body.lock();
        let content = body.content()?;
        match mode.0 & !AllocateMode::KEEP_SIZE {
            0 => {}
            AllocateMode::PUNCH_HOLE if mode.any(AllocateMode::KEEP_SIZE) => content.punch(offset, length),
            AllocateMode::ZERO_RANGE => content.punch(offset, length),
            _ => return Err(Errno::EOPNOTSUPP),
        }
        if !mode.any(AllocateMode::KEEP_SIZE) && end > content.size() {
            content.resize(end);
        }
        let now = (self.clock)();
        (body.mtime, body.ctime) = (now, now);
        Ok(())
    }

    fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        let mut body = self.inode.body.lock();
        let content = body.content()?;
        let found = match whence {
            Whence::Data => content.next_data(offset),
            Whence::Hole => content.next_hole(offset),
        };
        found.ok_or(Errno::ENXIO)
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        /// Bytes copied per call; the caller continues after a short copy.
        const STEP: u64 = 1 << 20;
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        let target = target.inner().as_any().downcast_ref::<MemFile>().ok_or(Errno::EXDEV)?;
        if target.flags.appends() {
            return Err(Errno::EBADF);
        }
        let overlap = offset < target_offset.saturating_add(length) && target_offset < offset.saturating_add(length);
        if Arc::ptr_eq(&self.inode, &target.inode) && overlap {
            return Err(Errno::EINVAL);
        }
        let mut buffer = vec![0; length.min(STEP) as usize];
        let count = self.read(&mut buffer, offset)?;
        let written = target.write(buffer.get(..count).unwrap_or_default(), target_offset, WriteOrigin::Caller)?;
        Ok(written as u64)
    }

    fn test_lock(&self, owner: LockOwner, lock: FileLock) -> Result<FileLock> {
        Ok(self.inode.locks.test(owner, lock))
    }

    fn set_lock(&self, owner: LockOwner, lock: FileLock, wait: bool) -> Result<()> {
        self.inode.locks.set(owner, lock, wait)
    }

    fn flock(&self, owner: LockOwner, kind: LockKind, wait: bool) -> Result<()> {
        self.inode.locks.flock(owner, kind, wait)
    }

    fn ioctl(&self, _request: Ioctl<'_>, _output: &mut [u8]) -> Result<(i32, usize)> {
        Err(Errno::ENOTTY)
    }

    fn is_on_inner_mount(&self) -> bool {
        false
    }

    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        None
    }
}

impl MemFile {
    /// Truncates the file for `O_TRUNC`.
    pub(super) fn truncate(&self) {
        let now = (self.clock)();
        let mut body = self.inode.body.lock();
        if let What::File(content) = &mut body.what {
            let changed = content.size() > 0;
            content.resize(0);
            if changed {
                (body.mtime, body.ctime) = (now, now);
            }
        }
    }
}
