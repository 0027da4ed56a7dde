//! An open file: what reads, writes and locks go through.

use crate::Result;
use std::{any::Any, os::fd::BorrowedFd};

/// The flags of `open(2)` as the kernel gave them. Access mode, `O_TRUNC`, `O_EXCL` and `O_APPEND`
/// have the same value on every architecture that we serve; layers that need others interpret
/// [`OpenFlags::raw`] themselves.
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
    /// Whether the open waits for a lease that somebody holds on the file (`O_NONBLOCK` is not set).
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
    /// The length stays, also where space is given behind the end.
    pub const KEEP_SIZE: u32 = 0x01;
    /// The range becomes a hole; only together with [`AllocateMode::KEEP_SIZE`].
    pub const PUNCH_HOLE: u32 = 0x02;
    /// The range is taken out, and what follows moves.
    pub const COLLAPSE_RANGE: u32 = 0x08;
    /// The range reads as zeros.
    pub const ZERO_RANGE: u32 = 0x10;
    /// A hole is put in, and what follows moves.
    pub const INSERT_RANGE: u32 = 0x20;

    /// Whether any of `bits` is set.
    pub fn any(self, bits: u32) -> bool {
        self.0 & bits != 0
    }
}

/// Who makes a write, for layers to which it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrigin {
    /// A program, at this moment: it learns what becomes of it.
    Caller,
    /// A door's page cache, of what was taken before: nobody is left who could be refused.
    Writeback {
        /// The door keeps the times of the write and tells them by itself, before or after: the
        /// file's times stay, where a layer can leave them.
        timed: bool,
    },
}

impl WriteOrigin {
    /// It comes from a page cache.
    pub fn is_writeback(self) -> bool {
        matches!(self, WriteOrigin::Writeback { .. })
    }

    /// Its time is told apart from it.
    pub fn is_timed(self) -> bool {
        self == WriteOrigin::Writeback { timed: true }
    }
}

/// Where `lseek(2)` looks from: only the two that ask the file system.
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
    /// None: releases, or "nothing in the way".
    Unlock,
}

/// Who holds a lock: the door's number for the owner (a process for `fcntl`, an open file for
/// `flock`).
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

/// An `ioctl(2)` with its argument copied in (`input`) and the room for the result (`output`
/// bytes).
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

    /// Whether the command changes the file: of those that layers know, the two that set flags.
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

/// An open regular file (or a special file opened through us). Closing is dropping; what has to be
/// reported at close is `flush`.
///
/// No default bodies but for the identity of wrappers: a layer that lacks something says so in one
/// line.
pub trait OpenFile: Any + Send + Sync {
    /// This object, for the layer that made it (see [`OpenFile::inner`]).
    fn as_any(&self) -> &dyn Any;

    /// The file that the layer which makes the *nodes* knows: a filter that wraps files (throttle,
    /// trace) answers with the inner file of what it wraps, everybody else with itself.
    fn inner(&self) -> &dyn OpenFile;

    /// Reads at an offset; short only at the end of the file.
    ///
    /// # Errors
    /// As `pread(2)`.
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes at an offset, whatever the flags it was opened with: whether a write appends is a
    /// matter of the moment (`F_SETFL` of `fcntl(2)` sets and clears `O_APPEND`), so whoever knows
    /// calls [`OpenFile::append`] instead. All of it or an error; a write that was cut short by a
    /// full disk answers what was written. A wrapper passes `origin` on.
    ///
    /// # Errors
    /// As `pwrite(2)`.
    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize>;

    /// Writes at the end of the file, as it is at that moment: two who append never overwrite each
    /// other. Else as [`OpenFile::write`].
    ///
    /// # Errors
    /// As `write(2)` with `O_APPEND`.
    fn append(&self, data: &[u8]) -> Result<usize>;

    /// What `close(2)` reports; called for each closed descriptor.
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

    /// Copies a range to another file of the same layer, sharing storage where possible; answers
    /// the bytes copied.
    ///
    /// # Errors
    /// As `copy_file_range(2)`; EXDEV or EOPNOTSUPP let the kernel fall back to reading and
    /// writing.
    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64>;

    /// The first lock in the way of `lock`, or one of kind `Unlock`.
    ///
    /// # Errors
    /// As `fcntl(F_GETLK)`.
    fn test_lock(&self, owner: LockOwner, lock: FileLock) -> Result<FileLock>;

    /// Sets or releases a byte-range lock; with `wait`, blocks until it is free or a signal comes
    /// (EINTR).
    ///
    /// # Errors
    /// As `fcntl(F_SETLK)`: EAGAIN where held by another.
    fn set_lock(&self, owner: LockOwner, lock: FileLock, wait: bool) -> Result<()>;

    /// `flock(2)` on this open file.
    ///
    /// # Errors
    /// EWOULDBLOCK (EAGAIN) where held by another.
    fn flock(&self, owner: LockOwner, kind: LockKind, wait: bool) -> Result<()>;

    /// An `ioctl(2)` of those whose arguments can be carried; writes its result to `output` and
    /// answers the call's value and the bytes written.
    ///
    /// # Errors
    /// ENOTTY for commands that are not forwarded.
    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)>;

    /// A descriptor that holds exactly this file's bytes, which the kernel may read, write and map
    /// in our place. A property of one open file: a layer that must see or change bytes answers
    /// `None`.
    fn backing(&self) -> Option<BorrowedFd<'_>>;

    /// What a process after this one takes the file up by ([`crate::LeftOpen`]): the descriptor of
    /// [`Self::backing`], also where a layer has to see the bytes and lends it to nobody. Where it
    /// becomes another one, the door is told ([`crate::OpenFileHost::left_changed`]).
    fn left(&self) -> Option<crate::LeftFile<'_>> {
        self.backing().map(crate::LeftFile::from)
    }

    /// Whether it is on another mount than the root of its source: as long as it is open, whatever is
    /// mounted there cannot be unmounted. A door closes it with its last user.
    fn is_on_inner_mount(&self) -> bool;

    /// The permission to collect writes through this open file before passing them on; `None` where
    /// each must be passed on when it happens. Only of files opened for writing alone; they can be
    /// read all the same, because whoever collects parts of pages has to.
    fn writeback_lease(&self) -> Option<&dyn crate::WritebackLease>;

    /// What [`crate::Numbered::generation`] says of the file; 0 of layers whose files have no
    /// numbers. Asks nobody: a door finds the kernel's inode by it while everybody else waits.
    fn generation(&self) -> u32 {
        0
    }
}
