//! An open file of the host.
//!
//! Made by [`super::open`] and [`super::create`]; lives as long as a front end's file handle.
//! Invariant: `descriptor` is the node's file, opened without `O_APPEND` where the source allows
//! that: appends are written with `RWF_APPEND`, so that two appenders never overwrite each other
//! whatever offsets the kernel passed, while other callers may use the descriptor at any offset.

use super::{
    HostShared,
    descriptor::{SET_ID, forward, has_set_id},
    errno,
    locks::{Flocks, LockTables},
    node::HostNode,
    stat,
};
use nacre_sys::{
    credentials,
    descriptors::{self, Counted},
};
use nacre_vfs::{
    AllocateMode, Errno, FileLock, Ioctl, Kind, LockKind, LockOwner, OpenFile, OpenFlags, Result, Whence, WriteOrigin,
};
use rustix::{
    fs::{FallocateFlags, OFlags, SeekFrom},
    io::ReadWriteFlags,
};
use std::{
    any::Any,
    io::IoSlice,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// Open file of the host; see the file's head.
pub(super) struct HostFile {
    node: Arc<HostNode>,
    descriptor: OwnedFd,
    _counted: Counted,
    flags: OpenFlags,
    /// Alignment of buffers, for `O_DIRECT`.
    direct: Option<u32>,
    locks: Arc<LockTables>,
    flocks: Flocks,
    /// Notified when a file that is open for writing is closed.
    writing: Option<Weak<HostShared>>,
    /// The mount of the source's root.
    root_mount: u64,
    /// Whether the file has set-id bits, read before the first change. The kernel in front decides
    /// for the writer whether they are cleared ([`nacre_vfs::SetAttr::kill_privileges`]); our own
    /// thread's capabilities do not matter.
    set_id: OnceLock<bool>,
    /// Set-id bits were set while it was open.
    set_id_given: AtomicBool,
}

impl HostFile {
    pub(super) fn new(
        shared: &HostShared,
        node: Arc<HostNode>,
        descriptor: OwnedFd,
        flags: OpenFlags,
        direct: Option<u32>,
        writing: Option<Weak<HostShared>>,
    ) -> HostFile {
        HostFile {
            node,
            descriptor,
            _counted: descriptors::FILES.one(),
            flags,
            direct,
            locks: Arc::clone(&shared.locks),
            flocks: Flocks::default(),
            writing,
            root_mount: shared.directories.mounts().root().0,
            set_id: OnceLock::new(),
            set_id_given: AtomicBool::new(false),
        }
    }

    /// Records that these permission bits were set.
    pub(super) fn mode_given(&self, mode: u32) {
        if mode & SET_ID != 0 {
            self.set_id_given.store(true, Ordering::Relaxed);
        }
    }

    /// Runs a change of the content that does not clear set-id bits.
    fn changing<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let set_id = || *self.set_id.get_or_init(|| has_set_id(self.fd()));
        if self.set_id_given.load(Ordering::Relaxed) || set_id() {
            credentials::with_set_id_kept(change)?
        } else {
            change()
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Opened for writing.
    pub(super) fn writes(&self) -> bool {
        self.flags.writes()
    }

    fn access(&self) -> OFlags {
        OFlags::from_bits_retain(self.flags.raw()) & OFlags::RWMODE
    }

    /// Writes once, at an offset or at the end.
    fn write_once(&self, data: &[u8], offset: Option<u64>) -> rustix::io::Result<usize> {
        match offset {
            Some(offset) => rustix::io::pwrite(&self.descriptor, data, offset),
            // With `RWF_APPEND` the offset is ignored (pwritev2(2)).
            None => rustix::io::pwritev2(&self.descriptor, &[IoSlice::new(data)], 0, ReadWriteFlags::APPEND),
        }
    }

    /// Writes all of it, at an offset or at the end.
    fn write_all(&self, data: &[u8], offset: Option<u64>) -> Result<usize> {
        if let Some(align) = self.direct {
            return self.write_direct(data, offset, align as usize);
        }
        let mut done = 0;
        while let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) {
            match self.write_once(rest, offset.map(|offset| offset.saturating_add(done as u64))) {
                Ok(0) => break,
                Ok(written) => done += written,
                Err(_) if done > 0 => break,
                Err(error) => return Err(errno(error)),
            }
        }
        Ok(done)
    }

    fn read_direct(&self, buffer: &mut [u8], offset: u64, align: usize) -> Result<usize> {
        let mut room = Aligned::new(buffer.len().next_multiple_of(align), align);
        let read = rustix::io::pread(&self.descriptor, room.bytes(), offset).map_err(errno)?.min(buffer.len());
        for (to, from) in buffer.iter_mut().zip(room.bytes().iter().take(read)) {
            *to = *from;
        }
        Ok(read)
    }

    fn write_direct(&self, data: &[u8], offset: Option<u64>, align: usize) -> Result<usize> {
        let mut room = Aligned::new(data.len(), align);
        room.bytes().copy_from_slice(data);
        self.write_once(room.bytes(), offset).map_err(errno)
    }
}

/// A buffer whose address is a multiple of some number.
struct Aligned {
    room: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize, align: usize) -> Aligned {
        let step = align.next_power_of_two();
        let room = vec![0; length + step];
        let start = room.as_ptr().align_offset(step).min(step);
        Aligned { room, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.room.get_mut(self.start..self.start + self.length).unwrap_or_default()
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        self.node.closed();
        // Before the descriptor is closed: the event of that close must find the file without
        // writers.
        if let Some(shared) = self.writing.as_ref().and_then(Weak::upgrade) {
            shared.watch.written(self.node.id());
        }
    }
}

impl OpenFile for HostFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn inner(&self) -> &dyn OpenFile {
        self
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        if let Some(align) = self.direct {
            return self.read_direct(buffer, offset, align as usize);
        }
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pread(&self.descriptor, rest, offset.saturating_add(done as u64)) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(_) if done > 0 => break,
                Err(error) => return Err(errno(error)),
            }
        }
        Ok(done)
    }

    fn write(&self, data: &[u8], offset: u64, _origin: WriteOrigin) -> Result<usize> {
        self.changing(|| self.write_all(data, Some(offset)))
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.changing(|| self.write_all(data, None))
    }

    fn flush(&self, owner: LockOwner) -> Result<()> {
        self.locks.release((self.node.id(), owner));
        if self.writes() {
            // Some storage reports failed writes only when a descriptor is closed.
            let copy = rustix::io::fcntl_dupfd_cloexec(&self.descriptor, 0).map_err(errno)?;
            nacre_sys::inode::close(copy)?;
        }
        Ok(())
    }

    fn fsync(&self, data_only: bool) -> Result<()> {
        if data_only { rustix::fs::fdatasync(&self.descriptor) } else { rustix::fs::fsync(&self.descriptor) }
            .map_err(errno)
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let flags = FallocateFlags::from_bits_retain(mode.0);
        self.changing(|| rustix::fs::fallocate(&self.descriptor, flags, offset, length).map_err(errno))
    }

    fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        if i64::try_from(offset).is_err() {
            return Err(Errno::ENXIO);
        }
        let from = match whence {
            Whence::Data => SeekFrom::Data(offset),
            Whence::Hole => SeekFrom::Hole(offset),
        };
        rustix::fs::seek(&self.descriptor, from).map_err(errno)
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        let Some(target) = target.inner().as_any().downcast_ref::<HostFile>() else { return Err(Errno::EXDEV) };
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (mut from, mut to) = (offset, target_offset);
        target.changing(|| {
            let copied = rustix::fs::copy_file_range(
                &self.descriptor,
                Some(&mut from),
                &target.descriptor,
                Some(&mut to),
                length,
            );
            copied.map(|bytes| bytes as u64).map_err(errno)
        })
    }

    fn test_lock(&self, owner: LockOwner, lock: FileLock) -> Result<FileLock> {
        self.locks.test((self.node.id(), owner), self.fd(), self.access(), lock)
    }

    fn set_lock(&self, owner: LockOwner, lock: FileLock, wait: bool) -> Result<()> {
        self.locks.set((self.node.id(), owner), self.fd(), self.access(), lock, wait)
    }

    fn flock(&self, owner: LockOwner, kind: LockKind, wait: bool) -> Result<()> {
        self.flocks.set(owner, self.fd(), self.access(), kind, wait)
    }

    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        forward(self.fd(), request, output)
    }

    fn is_on_inner_mount(&self) -> bool {
        // If the mount is unknown, assume an inner one.
        stat::mount_of(self.fd()) != Ok(self.root_mount)
    }

    fn backing(&self) -> Option<BorrowedFd<'_>> {
        (self.node.kind() == Kind::File).then(|| self.fd())
    }

    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        None
    }
}
