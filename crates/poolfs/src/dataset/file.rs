//! An open file of a dataset, and the locks on files.

use super::file_flags;
use super::mounted_tree::FileNode;
use super::translate::{errno, of_node};
use super::writeback_group::{Lease, Member};
use super::xattrs;
use nacre_layers::locks::Locks;
use nacre_pool::engine::Pool;
use nacre_pool::files::{ChangedTime, FileError, Range, SeekTo};
use nacre_pool::rows::InodeRow;
use nacre_vfs::{
    AllocateMode, Errno, FileLock, Ioctl, LockKind, LockOwner, OpenFile, OpenFlags, Result, Whence, WriteOrigin,
};
use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
};

/// An open file.
pub(super) struct DatasetFile {
    pool: Arc<Pool>,
    file_node: FileNode,
    flags: OpenFlags,
    locks: Arc<Locks>,
    /// Reads update the access time.
    touches: bool,
    /// The lease, if the file is open for writing.
    lease: Option<Lease>,
    member: Arc<Member>,
    generation: u32,
}

impl Drop for DatasetFile {
    fn drop(&mut self) {
        self.file_node.tree.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl DatasetFile {
    /// Opens a file; with `quiet` reads do not update its access time.
    pub(super) fn new(
        pool: &Arc<Pool>,
        (file_node, row): (&FileNode, &InodeRow),
        (flags, quiet): (OpenFlags, bool),
        member: &Arc<Member>,
    ) -> DatasetFile {
        file_node.tree.open.fetch_add(1, Ordering::AcqRel);
        let touches = !quiet && !file_node.tree.is_snapshot() && flags.raw() & rustix::fs::OFlags::NOATIME.bits() == 0;
        DatasetFile {
            pool: Arc::clone(pool),
            locks: file_node.tree.locks.of(file_node.inode.number()),
            file_node: file_node.clone(),
            flags,
            touches,
            lease: (flags.writes() && !file_node.tree.is_snapshot()).then(|| Lease::new(member, file_node)),
            member: Arc::clone(member),
            generation: file_node.tree.generation(file_node.inode.number(), row),
        }
    }

    fn writable(&self) -> Result<()> {
        if self.flags.writes() { self.file_node.changeable().map(drop) } else { Err(Errno::EBADF) }
    }

    fn write_at(&self, data: &[u8], offset: Option<u64>, origin: WriteOrigin) -> Result<usize> {
        self.writable()?;
        let _entered = self.file_node.tree.enter()?;
        let files = self.file_node.tree.files.files();
        if !origin.is_writeback() {
            files.check_write(&self.file_node.inode, offset, data.len() as u64).map_err(errno)?;
        }
        let written = match offset {
            Some(at) if origin.is_writeback() => self.member.arrive(&self.file_node, at, data, origin.is_timed()),
            _ => files.write(&self.file_node.inode, offset, data),
        };
        let outcome = written.map_err(errno)?;
        let written = outcome.written;
        self.member.written(written);
        if outcome.has_attributes && !origin.is_writeback() {
            // With write-back caching, and for mode bits, the kernel does this itself.
            xattrs::drop_capability(files, &self.file_node.inode)?;
        }
        self.sync_if_always()?;
        Ok(written)
    }

    /// Writes for a copy that the kernel requested, which leaves the times unchanged.
    fn write_timed(&self, data: &[u8], offset: u64) -> Result<usize> {
        self.writable()?;
        let _entered = self.file_node.tree.enter()?;
        let files = self.file_node.tree.files.files();
        let outcome = files.write_stored(&self.file_node.inode, offset, data, true).map_err(errno)?;
        self.member.written(outcome.written);
        self.sync_if_always()?;
        Ok(outcome.written)
    }

    /// Whether the kernel keeps the times of the file: it has set one for this change and sends it
    /// later, or has sent it already if an earlier change was in the same tick.
    fn is_timed(&self) -> bool {
        self.lease.as_ref().is_some_and(Lease::is_collected)
    }

    /// With `sync=always`: makes a change of content durable before it is answered.
    fn sync_if_always(&self) -> Result<()> {
        self.file_node.tree.sync_if_always(&self.pool, &self.file_node.inode)
    }
}

impl OpenFile for DatasetFile {
    fn generation(&self) -> u32 {
        self.generation
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn inner(&self) -> &dyn OpenFile {
        self
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        if !self.flags.reads() && !self.lease.as_ref().is_some_and(Lease::is_collected) {
            return Err(Errno::EBADF);
        }
        let files = self.file_node.files()?;
        let count = files.read(&self.file_node.inode, offset, buffer).map_err(of_node)?;
        // It may have been replaced by another file meanwhile (rollback).
        self.file_node.tree.usable()?;
        if self.touches {
            files.touch(&self.file_node.inode);
        }
        Ok(count)
    }

    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        self.write_at(data, Some(offset), origin)
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.write_at(data, None, WriteOrigin::Caller)
    }

    fn flush(&self, owner: LockOwner) -> Result<()> {
        self.locks.release(owner);
        Ok(())
    }

    fn fsync(&self, _data_only: bool) -> Result<()> {
        if self.file_node.tree.is_snapshot() {
            return Ok(());
        }
        self.pool.sync_file(&self.file_node.tree.files, &self.file_node.inode).map_err(errno)
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.writable()?;
        if length == 0 {
            return Err(Errno::EINVAL);
        }
        let grow = !mode.any(AllocateMode::KEEP_SIZE);
        let _entered = self.file_node.tree.enter()?;
        let files = self.file_node.tree.files.files();
        file_flags::check_allocate(&files.attributes_without_room(&self.file_node.inode).map_err(errno)?, mode)?;
        match mode.0 & !AllocateMode::KEEP_SIZE {
            // Space cannot be reserved on disk where each write goes to a new block address: as in
            // ZFS, there has to be enough room, and only the size is changed.
            0 => {
                let end = offset.checked_add(length).ok_or(Errno::EFBIG)?;
                files.would_fill(&self.file_node.inode, offset, length).map_err(errno)?;
                if !grow {
                    return Ok(());
                }
                if end <= files.attributes_without_room(&self.file_node.inode).map_err(errno)?.size {
                    return Ok(());
                }
                let changed = if self.is_timed() { ChangedTime::Stays } else { ChangedTime::Now };
                // Write-back continues meanwhile: the file may be longer by now.
                let change = nacre_pool::files::AttributeChange {
                    size: Some(end),
                    only_longer: true,
                    changed,
                    refused_by: nacre_pool::rows::inode::flags::IMMUTABLE,
                    ..Default::default()
                };
                files.set_attributes(&self.file_node.inode, &change).map_err(errno)?;
            }
            AllocateMode::PUNCH_HOLE if !grow => {
                files.zero_timed(&self.file_node.inode, offset, length, false, self.is_timed()).map_err(errno)?
            }
            AllocateMode::ZERO_RANGE => {
                files.would_fill(&self.file_node.inode, offset, length).map_err(errno)?;
                files.zero_timed(&self.file_node.inode, offset, length, grow, self.is_timed()).map_err(errno)?;
            }
            _ => return Err(Errno::EOPNOTSUPP),
        }
        self.sync_if_always()
    }

    fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        let to = match whence {
            Whence::Data => SeekTo::Data,
            Whence::Hole => SeekTo::Hole,
        };
        self.file_node.files()?.seek(&self.file_node.inode, offset, to).map_err(|error| match error {
            FileError::NoData => Errno::ENXIO,
            other => errno(other),
        })
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        /// Bytes of one step of a copy; the caller continues after a short copy.
        const STEP: u64 = 1 << 20;
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        let target = target.inner().as_any().downcast_ref::<DatasetFile>().ok_or(Errno::EXDEV)?;
        if target.flags.appends() {
            return Err(Errno::EBADF);
        }
        let overlap = offset < target_offset.saturating_add(length) && target_offset < offset.saturating_add(length);
        if Arc::ptr_eq(&self.file_node.inode, &target.file_node.inode) && overlap {
            return Err(Errno::EINVAL);
        }
        let files = target.file_node.files()?;
        // The source may end before the range does.
        files.check_write(&target.file_node.inode, Some(target_offset), length.min(1)).map_err(errno)?;
        let range = Range { from: offset, to: target_offset, length };
        let mut step = STEP;
        if self.file_node.beside(&target.file_node).is_ok() {
            // Sharing needs no room and no time; the kernel copies the remainder.
            target.writable()?;
            let _entered = target.file_node.tree.enter()?;
            let files = target.file_node.tree.files.files();
            let (from, to) = (&self.file_node.inode, &target.file_node.inode);
            let shared = files.share_timed(from, to, range, target.is_timed()).map_err(errno)?;
            if shared > 0 {
                target.sync_if_always()?;
                return Ok(shared);
            }
            // A part of a record, or one with many small writes: later records are shared again.
            let until = files.until_sharing(&self.file_node.inode, &target.file_node.inode, range).map_err(errno)?;
            step = until.map_or(STEP, |until| until.min(STEP));
        }
        let mut buffer = vec![0; length.min(step) as usize];
        let count = self.read(&mut buffer, offset)?;
        let content = buffer.get(..count).unwrap_or_default();
        let written = if target.is_timed() {
            target.write_timed(content, target_offset)?
        } else {
            target.write(content, target_offset, WriteOrigin::Caller)?
        };
        Ok(written as u64)
    }

    fn test_lock(&self, owner: LockOwner, lock: FileLock) -> Result<FileLock> {
        Ok(self.locks.test(owner, lock))
    }

    fn set_lock(&self, owner: LockOwner, lock: FileLock, wait: bool) -> Result<()> {
        self.locks.set(owner, lock, wait)
    }

    fn flock(&self, owner: LockOwner, kind: LockKind, wait: bool) -> Result<()> {
        self.locks.flock(owner, kind, wait)
    }

    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let _entered = self.file_node.tree.enter()?;
        let files = self.file_node.tree.files.files();
        let done = file_flags::ioctl(files, &self.file_node, &request, output)?;
        if request.may_change() {
            self.file_node.tree.sync_if_always(&self.pool, &self.file_node.inode)?;
        }
        Ok(done)
    }

    fn is_on_inner_mount(&self) -> bool {
        false
    }

    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        self.lease.as_ref().map(|lease| lease as &dyn nacre_vfs::WritebackLease)
    }
}
