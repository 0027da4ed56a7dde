//! An open file, for reading, writing and locks.

use crate::Result;
use std::{any::Any, os::fd::BorrowedFd};

/// Flags of `open(2)` from the kernel. Access mode, `O_TRUNC`, `O_EXCL` and `O_APPEND` have the same value on every
/// architecture that we serve; layers that need other flags interpret [`OpenFlags::raw`] themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFlags(pub u32);

impl OpenFlags {
    /// `O_RDONLY`.
    pub const READ: OpenFlags = OpenFlags(0);
    /// `O_WRONLY`.
    pub const WRITE: OpenFlags = OpenFlags(1);
    /// `O_RDWR`.
    pub const READ_WRITE: OpenFlags = OpenFlags(2);
    /// `O_EXCL`.
    pub const EXCL: u32 = 0o200;
    /// `O_TRUNC`.
    pub const TRUNC: u32 = 0o1000;
    /// `O_APPEND`.
    pub const APPEND: u32 = 0o2000;
    /// `O_NONBLOCK`.
    pub const NONBLOCK: u32 = 0o4000;

    /// All bits.
    pub fn raw(self) -> u32 {
        self.0
    }
    /// Opened for reading.
    pub fn reads(self) -> bool {
        self.0 & 3 != 1
    }
    /// Opened for writing.
    pub fn writes(self) -> bool {
        self.0 & 3 != 0
    }
    /// Opened so that stores to a shared mapping are possible.
    pub fn maps_for_writing(self) -> bool {
        self.reads() && self.writes()
    }
    /// `O_TRUNC` is set.
    pub fn truncates(self) -> bool {
        self.0 & Self::TRUNC != 0
    }
    /// `O_APPEND` is set.
    pub fn appends(self) -> bool {
        self.0 & Self::APPEND != 0
    }
    /// Whether the open waits for a lease that another process holds on the file (`O_NONBLOCK` is not set).
    pub fn waits(self) -> bool {
        self.0 & Self::NONBLOCK == 0
    }
    /// `O_EXCL` is set.
    pub fn exclusive(self) -> bool {
        self.0 & Self::EXCL != 0
    }
}

/// The `mode` of `fallocate(2)`: bits of `FALLOC_FL_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocateMode(pub u32);

/// The bits, with the values of linux/falloc.h.
impl AllocateMode {
    /// The length stays, even where space is allocated past the end.
    pub const KEEP_SIZE: u32 = 0x01;
    /// The range becomes a hole; only together with [`AllocateMode::KEEP_SIZE`].
    pub const PUNCH_HOLE: u32 = 0x02;
    /// The range is removed, and the data after it moves.
    pub const COLLAPSE_RANGE: u32 = 0x08;
    /// The range reads as zeros.
    pub const ZERO_RANGE: u32 = 0x10;
    /// A hole is inserted, and the data after it moves.
    pub const INSERT_RANGE: u32 = 0x20;

    /// Whether any of `bits` is set.
    pub fn any(self, bits: u32) -> bool {
        self.0 & bits != 0
    }
}

/// Origin of a write, for layers to which it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrigin {
    /// A program, at this moment: it gets the result.
    Caller,
    /// A front end's page cache, with data accepted before: no caller remains who could get an error.
    Writeback {
        /// The front end keeps the times of the write and sets them itself, before or after: the layer leaves the
        /// file's times unchanged, where it can.
        timed: bool,
    },
}

impl WriteOrigin {
    /// Whether it comes from a page cache.
    pub fn is_writeback(self) -> bool {
        matches!(self, WriteOrigin::Writeback { .. })
    }

    /// Whether its time is set separately.
    pub fn is_timed(self) -> bool {
        self == WriteOrigin::Writeback { timed: true }
    }
}

/// The two values of `whence` of `lseek(2)` for which the kernel asks the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    /// `SEEK_DATA`.
    Data,
    /// `SEEK_HOLE`.
    Hole,
}

/// Kinds of lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// None: releases a lock, or means that there is no conflicting lock.
    Unlock,
}

/// Owner of a lock: the front end's number (a process for `fcntl`, an open file for `flock`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockOwner(pub u64);

/// A byte-range lock; `end` is inclusive, `u64::MAX >> 1` means to the end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLock {
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive.
    pub end: u64,
    /// Kind.
    pub kind: LockKind,
    /// Process that holds it, for `F_GETLK`; 0 where unknown.
    pub pid: u32,
}

/// An `ioctl(2)` with its argument copied in (`input`); the result goes to a buffer of the caller.
#[derive(Clone, Copy, Debug)]
pub struct Ioctl<'a> {
    /// Command number.
    pub command: u32,
    /// The argument as a number.
    pub argument: u64,
    /// The bytes that the kernel copied from the caller.
    pub input: &'a [u8],
}

impl Ioctl<'_> {
    /// `FS_IOC_GETFLAGS` of a 64-bit caller: `_IOR('f', 1, long)` (linux/fs.h).
    pub const GET_FLAGS: u32 = 0x8008_6601;
    /// `FS_IOC_SETFLAGS` of a 64-bit caller: `_IOW('f', 2, long)`.
    pub const SET_FLAGS: u32 = 0x4008_6602;
    /// `FS_IOC_GETVERSION` of a 64-bit caller: `_IOR('v', 1, long)`.
    pub const GET_VERSION: u32 = 0x8008_7601;
    /// `FS_IOC_FSGETXATTR`: `_IOR('X', 31, struct fsxattr)`.
    pub const GET_EXTENDED: u32 = 0x801c_581f;
    /// `FS_IOC_FSSETXATTR`: `_IOW('X', 32, struct fsxattr)`.
    pub const SET_EXTENDED: u32 = 0x401c_5820;

    /// Whether the command changes the file: among the commands known to layers, the two that set flags.
    #[must_use]
    pub fn may_change(&self) -> bool {
        matches!(self.command, Self::SET_FLAGS | Self::SET_EXTENDED)
    }

    /// Whether the command makes a file immutable or append-only, or leaves it so.
    #[must_use]
    pub fn protects(&self) -> bool {
        /// `FS_IMMUTABLE_FL | FS_APPEND_FL`, `FS_XFLAG_IMMUTABLE | FS_XFLAG_APPEND` (linux/fs.h).
        const PLAIN: u32 = 0x30;
        const EXTENDED: u32 = 0x18;
        let protecting = match self.command {
            Self::SET_FLAGS => PLAIN,
            Self::SET_EXTENDED => EXTENDED,
            _ => return false,
        };
        let flags = self.input.first_chunk().map(|chunk| u32::from_ne_bytes(*chunk));
        flags.is_some_and(|flags| flags & protecting != 0)
    }
}

/// An open regular file (or a special file opened through us). Dropping it closes it; errors of close(2) are reported
/// by `flush`.
///
/// No default bodies except where a wrapper is the same as its inner file: a layer without a feature states so in one
/// line.
pub trait OpenFile: Any + Send + Sync {
    /// This object, for the layer that created it (see [`OpenFile::inner`]).
    fn as_any(&self) -> &dyn Any;

    /// The file of the layer that creates the *nodes*: a filter that wraps files (throttle, trace) returns the inner
    /// file of the wrapped one, all others return themselves.
    fn inner(&self) -> &dyn OpenFile;

    /// Reads at an offset; short only at the end of the file.
    ///
    /// # Errors
    /// As `pread(2)`.
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes at an offset, whatever the open flags are: whether a write appends can change at any time (`F_SETFL` of
    /// `fcntl(2)` sets and clears `O_APPEND`), so a caller that knows calls [`OpenFile::append`] instead. Writes all
    /// of it or returns an error; a write that was cut short by a full disk returns the length written. A wrapper
    /// forwards `origin`.
    ///
    /// # Errors
    /// As `pwrite(2)`.
    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize>;

    /// Writes at the end of the file, as it is at that moment: two concurrent appends never overwrite each other.
    /// Otherwise like [`OpenFile::write`].
    ///
    /// # Errors
    /// As `write(2)` with `O_APPEND`.
    fn append(&self, data: &[u8]) -> Result<usize>;

    /// Returns errors for `close(2)`; called for each closed descriptor.
    ///
    /// # Errors
    /// As `close(2)`.
    fn flush(&self, owner: LockOwner) -> Result<()>;

    /// Makes content (and attributes, unless `data_only`) durable.
    ///
    /// # Errors
    /// As `fsync(2)`.
    fn fsync(&self, data_only: bool) -> Result<()>;

    /// Allocates, punches, zeroes, collapses or inserts.
    ///
    /// # Errors
    /// As `fallocate(2)`.
    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()>;

    /// Finds data or holes.
    ///
    /// # Errors
    /// ENXIO past the end of the file.
    fn seek(&self, offset: u64, whence: Whence) -> Result<u64>;

    /// Copies a range to another file of the same layer, sharing storage where possible; returns the bytes copied.
    ///
    /// # Errors
    /// As `copy_file_range(2)`; EXDEV or EOPNOTSUPP let the kernel fall back to reading and
    /// writing.
    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64>;

    /// The first lock that conflicts with `lock`, or one of kind `Unlock`.
    ///
    /// # Errors
    /// As `fcntl(F_GETLK)`.
    fn test_lock(&self, owner: LockOwner, lock: FileLock) -> Result<FileLock>;

    /// Sets or releases a byte-range lock; with `wait`, blocks until it is free or a signal arrives (EINTR).
    ///
    /// # Errors
    /// As `fcntl(F_SETLK)`: EAGAIN where another owner has it.
    fn set_lock(&self, owner: LockOwner, lock: FileLock, wait: bool) -> Result<()>;

    /// `flock(2)` on this open file.
    ///
    /// # Errors
    /// EWOULDBLOCK (EAGAIN) where another owner has it.
    fn flock(&self, owner: LockOwner, kind: LockKind, wait: bool) -> Result<()>;

    /// `ioctl(2)` with arguments that can be transferred; writes the result to `output` and returns the call's value
    /// and the bytes written.
    ///
    /// # Errors
    /// ENOTTY for commands that are not forwarded.
    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)>;

    /// Backing file for passthrough: a descriptor of exactly this file's bytes, which the kernel may read, write and
    /// map directly. A property of one open file: a layer that must see or change bytes returns `None`.
    fn backing(&self) -> Option<BorrowedFd<'_>>;

    /// Handoff state by which the next process takes the file over ([`crate::LeftOpen`]): the descriptor of
    /// [`Self::backing`], even where a layer has to see the bytes and allows no passthrough. When it changes, the
    /// front end is notified ([`crate::OpenFileHost::left_changed`]).
    fn left(&self) -> Option<crate::LeftFile<'_>> {
        self.backing().map(crate::LeftFile::from)
    }

    /// Whether it is on another mount than the root of its source: as long as it is open, that mount cannot be
    /// unmounted. A front end closes it with its last user.
    fn is_on_inner_mount(&self) -> bool;

    /// Lease for caching writes through this open file before they are written back; `None` where each write must be
    /// sent at once. Also for files opened for writing only; these can be read all the same, because caching parts of
    /// pages needs that.
    fn writeback_lease(&self) -> Option<&dyn crate::WritebackLease>;

    /// Generation of the file ([`crate::Numbered::generation`]); 0 for layers without inode numbers. Without access
    /// to the storage: a front end uses it to find the kernel's inode while requests are blocked.
    fn generation(&self) -> u32 {
        0
    }
}
