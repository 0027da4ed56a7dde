//! The kernel's side of the protocol: numbers, flags and structs of FUSE 7.45.
//!
//! Used by all other modules of this crate and by handlers, which fill in reply structs. Constants keep the kernel's
//! names, without the prefix that their module repeats. No I/O. Source: `include/uapi/linux/fuse.h`, which may be
//! used under the BSD licence.

mod pod;
mod structs;

pub use pod::Pod;
pub use structs::*;

/// Major version of the protocol that this crate implements.
pub const KERNEL_VERSION: u32 = 7;
/// Minor version of the protocol that this crate implements.
pub const KERNEL_MINOR_VERSION: u32 = 45;
/// Oldest minor version that is supported (Linux 5.4).
pub const OLDEST_MINOR_VERSION: u32 = 31;
/// Node id of the root.
pub const ROOT_ID: u64 = 1;
/// Minimum size of the buffer for a read of the device, and of the payload area of a ring entry, bytes.
pub const MIN_READ_BUFFER: usize = 8192;
/// Set in `unique` of the reply to an INTERRUPT.
pub const INT_REQ_BIT: u64 = 1;
/// Set in `unique` of a request that was sent before (after a RESEND notification).
pub const UNIQUE_RESEND: u64 = 1 << 63;
/// User or group id of requests on idmapped mounts that do not create anything.
pub const INVALID_UIDGID: u32 = u32::MAX;
/// Maximum number of node ids in one PRUNE notification.
pub const MAX_PRUNE: usize = 512;

/// Declares documented numbers.
macro_rules! numbers {
    ($type:ty: $($name:ident = $value:expr, $text:literal;)*) => { $(#[doc = $text] pub const $name: $type = $value;)* };
}

/// Operation codes.
pub mod opcode {
    /// Declares the opcodes with their names.
    macro_rules! opcodes {
        ($($name:ident = $value:literal, $text:literal;)*) => {
            $(#[doc = $text] pub const $name: u32 = $value;)*

            /// The name of an opcode in the kernel's spelling, or `None` for an unknown one.
            pub const fn name(opcode: u32) -> Option<&'static str> {
                match opcode { $($value => Some(stringify!($name)),)* _ => None }
            }
        };
    }

    opcodes! {
        LOOKUP = 1, "Look a name up.";
        FORGET = 2, "Give look-ups back; no reply.";
        GETATTR = 3, "Read attributes.";
        SETATTR = 4, "Change attributes.";
        READLINK = 5, "Read a symbolic link.";
        SYMLINK = 6, "Make a symbolic link.";
        MKNOD = 8, "Make a file of any kind but directory and link.";
        MKDIR = 9, "Make a directory.";
        UNLINK = 10, "Remove a name.";
        RMDIR = 11, "Remove a directory.";
        RENAME = 12, "Move a name.";
        LINK = 13, "Make a hard link.";
        OPEN = 14, "Open a file.";
        READ = 15, "Read data.";
        WRITE = 16, "Write data.";
        STATFS = 17, "Figures of the file system.";
        RELEASE = 18, "Last close of an open file.";
        FSYNC = 20, "Make a file durable.";
        SETXATTR = 21, "Set an extended attribute.";
        GETXATTR = 22, "Read an extended attribute.";
        LISTXATTR = 23, "List extended attributes.";
        REMOVEXATTR = 24, "Remove an extended attribute.";
        FLUSH = 25, "A descriptor was closed.";
        INIT = 26, "Negotiate.";
        OPENDIR = 27, "Open a directory.";
        READDIR = 28, "List a directory.";
        RELEASEDIR = 29, "Last close of a directory.";
        FSYNCDIR = 30, "Make a directory durable.";
        GETLK = 31, "Test a lock.";
        SETLK = 32, "Take or drop a lock.";
        SETLKW = 33, "Take a lock, waiting for it.";
        ACCESS = 34, "`access(2)`.";
        CREATE = 35, "Make and open a file.";
        INTERRUPT = 36, "A signal arrived for a waiting caller.";
        BMAP = 37, "Map a block.";
        DESTROY = 38, "The file system goes away (fuseblk only).";
        IOCTL = 39, "`ioctl(2)`.";
        POLL = 40, "`poll(2)`.";
        NOTIFY_REPLY = 41, "Answer to a RETRIEVE notification; no reply.";
        BATCH_FORGET = 42, "Many FORGETs; no reply.";
        FALLOCATE = 43, "Allocate or free space.";
        READDIRPLUS = 44, "List a directory with look-ups.";
        RENAME2 = 45, "Move a name, with flags.";
        LSEEK = 46, "Find data or holes.";
        COPY_FILE_RANGE = 47, "Copy between files.";
        SETUPMAPPING = 48, "Map into a DAX window.";
        REMOVEMAPPING = 49, "Unmap from a DAX window.";
        SYNCFS = 50, "Make the file system durable.";
        TMPFILE = 51, "Make and open a file without a name.";
        STATX = 52, "Read attributes in the form of `statx(2)`.";
        COPY_FILE_RANGE_64 = 53, "Copy between files, with a 64-bit count in the reply.";
        CUSE_INIT = 4096, "Negotiate a character device.";
    }

    /// The greatest opcode of a file system, plus one.
    pub const COUNT: usize = 54;
}

/// Flags of INIT: bits 0 to 31 travel in `flags`, 32 to 63 in `flags2`.
pub mod init {
    numbers! { u64:
        ASYNC_READ = 1 << 0, "Reads of one file may be sent at the same time.";
        POSIX_LOCKS = 1 << 1, "POSIX locks are sent to the daemon.";
        FILE_OPS = 1 << 2, "Not used by any kernel.";
        ATOMIC_O_TRUNC = 1 << 3, "OPEN itself handles `O_TRUNC`.";
        EXPORT_SUPPORT = 1 << 4, "LOOKUP handles `.` and `..`.";
        BIG_WRITES = 1 << 5, "WRITE may exceed 4 KiB.";
        DONT_MASK = 1 << 6, "The kernel leaves the umask to the daemon.";
        SPLICE_WRITE = 1 << 7, "Replies may be spliced.";
        SPLICE_MOVE = 1 << 8, "Spliced pages may be moved.";
        SPLICE_READ = 1 << 9, "Requests may be spliced.";
        FLOCK_LOCKS = 1 << 10, "BSD locks are sent to the daemon.";
        HAS_IOCTL_DIR = 1 << 11, "IOCTL on directories.";
        AUTO_INVAL_DATA = 1 << 12, "Cached pages are dropped when size or mtime change.";
        DO_READDIRPLUS = 1 << 13, "READDIRPLUS is understood.";
        READDIRPLUS_AUTO = 1 << 14, "READDIRPLUS only where it pays.";
        ASYNC_DIO = 1 << 15, "Asynchronous direct I/O.";
        WRITEBACK_CACHE = 1 << 16, "Writes go to the page cache first. Switches passthrough off.";
        NO_OPEN_SUPPORT = 1 << 17, "ENOSYS to OPEN means: never ask again.";
        PARALLEL_DIROPS = 1 << 18, "LOOKUP and READDIR in one directory at the same time.";
        HANDLE_KILLPRIV = 1 << 19, "The daemon drops set-id bits (first form).";
        POSIX_ACL = 1 << 20, "ACLs are served as extended attributes and checked by the kernel.";
        ABORT_ERROR = 1 << 21, "After an abort the device reads ECONNABORTED.";
        MAX_PAGES = 1 << 22, "`max_pages` counts.";
        CACHE_SYMLINKS = 1 << 23, "READLINK is cached.";
        NO_OPENDIR_SUPPORT = 1 << 24, "ENOSYS to OPENDIR means: never ask again.";
        EXPLICIT_INVAL_DATA = 1 << 25, "Cached pages are dropped on notification only.";
        MAP_ALIGNMENT = 1 << 26, "`map_alignment` counts.";
        SUBMOUNTS = 1 << 27, "Attributes may mark a root of a submount.";
        HANDLE_KILLPRIV_V2 = 1 << 28, "The daemon drops set-id bits and capabilities where the kernel says so.";
        SETXATTR_EXT = 1 << 29, "SETXATTR has the long form.";
        INIT_EXT = 1 << 30, "`flags2` counts.";
        SECURITY_CTX = 1 << 32, "Creations carry a security context.";
        HAS_INODE_DAX = 1 << 33, "DAX per inode.";
        CREATE_SUPP_GROUP = 1 << 34, "Creations carry a supplementary group that matches the parent's.";
        HAS_EXPIRE_ONLY = 1 << 35, "INVAL_ENTRY can only expire.";
        DIRECT_IO_ALLOW_MMAP = 1 << 36, "Shared mmap of direct I/O files.";
        PASSTHROUGH = 1 << 37, "Opens may name a backing file.";
        NO_EXPORT_SUPPORT = 1 << 38, "No file handles for this file system.";
        HAS_RESEND = 1 << 39, "RESEND is understood.";
        ALLOW_IDMAP = 1 << 40, "Idmapped mounts may be made.";
        OVER_IO_URING = 1 << 41, "Requests over io_uring.";
        REQUEST_TIMEOUT = 1 << 42, "`request_timeout` counts.";
    }
}

/// Flags in the reply to OPEN, OPENDIR and CREATE.
pub mod fopen {
    numbers! { u32:
        DIRECT_IO = 1 << 0, "No page cache for this open.";
        KEEP_CACHE = 1 << 1, "Cached pages stay.";
        NONSEEKABLE = 1 << 2, "`lseek(2)` is refused.";
        CACHE_DIR = 1 << 3, "The listing may be cached.";
        STREAM = 1 << 4, "There is no file position.";
        NOFLUSH = 1 << 5, "No FLUSH at close.";
        PARALLEL_DIRECT_WRITES = 1 << 6, "Direct writes need no lock.";
        PASSTHROUGH = 1 << 7, "Reads and writes go to the backing file.";
    }
}

/// Flags for the valid fields of a SETATTR.
pub mod fattr {
    numbers! { u32:
        MODE = 1 << 0, "`mode`.";
        UID = 1 << 1, "`uid`.";
        GID = 1 << 2, "`gid`.";
        SIZE = 1 << 3, "`size`.";
        ATIME = 1 << 4, "`atime`.";
        MTIME = 1 << 5, "`mtime`.";
        FH = 1 << 6, "`fh`.";
        ATIME_NOW = 1 << 7, "atime becomes now.";
        MTIME_NOW = 1 << 8, "mtime becomes now.";
        LOCKOWNER = 1 << 9, "`lock_owner`.";
        CTIME = 1 << 10, "`ctime` (writeback cache only).";
        KILL_SUIDGID = 1 << 11, "Drop set-id bits and capabilities.";
    }
}

/// Codes of notifications.
pub mod notify {
    numbers! { i32:
        POLL = 1, "A polled file is ready.";
        INVAL_INODE = 2, "Forget attributes and pages.";
        INVAL_ENTRY = 3, "Forget a name.";
        STORE = 4, "Put data into the page cache.";
        RETRIEVE = 5, "Fetch data from the page cache.";
        DELETE = 6, "A name was removed.";
        RESEND = 7, "Send all unanswered requests again.";
        INC_EPOCH = 8, "Forget all names.";
        PRUNE = 9, "Drop unused inodes.";
    }
}

/// Flags of single requests and replies.
pub mod flag {
    numbers! { u32:
        GETATTR_FH = 1 << 0, "GETATTR: `fh` is valid.";
        RELEASE_FLUSH = 1 << 0, "RELEASE: flush as well.";
        RELEASE_FLOCK_UNLOCK = 1 << 1, "RELEASE: drop the BSD lock of `lock_owner`.";
        LK_FLOCK = 1 << 0, "GETLK, SETLK: a BSD lock.";
        WRITE_CACHE = 1 << 0, "WRITE: from the page cache; the handle is a guess.";
        WRITE_LOCKOWNER = 1 << 1, "WRITE: `lock_owner` is valid.";
        WRITE_KILL_SUIDGID = 1 << 2, "WRITE: drop set-id bits.";
        READ_LOCKOWNER = 1 << 1, "READ: `lock_owner` is valid.";
        IOCTL_COMPAT = 1 << 0, "IOCTL: from a 32-bit process.";
        IOCTL_UNRESTRICTED = 1 << 1, "IOCTL: not well-formed (CUSE).";
        IOCTL_RETRY = 1 << 2, "IOCTL reply: try again with these areas (CUSE).";
        IOCTL_32BIT = 1 << 3, "IOCTL: a 32-bit command.";
        IOCTL_DIR = 1 << 4, "IOCTL: on a directory.";
        IOCTL_COMPAT_X32 = 1 << 5, "IOCTL: from an x32 process.";
        POLL_SCHEDULE_NOTIFY = 1 << 0, "POLL: notify when ready.";
        FSYNC_FDATASYNC = 1 << 0, "FSYNC: data only.";
        OPEN_KILL_SUIDGID = 1 << 0, "OPEN, CREATE: drop set-id bits if executable.";
        SETXATTR_ACL_KILL_SGID = 1 << 0, "SETXATTR: drop set-group-id with this ACL.";
        EXPIRE_ONLY = 1 << 0, "INVAL_ENTRY: expire, keep the dentry.";
    }
}

/// Flags of [`Attr`].
pub mod attr_flags {
    numbers! { u32:
        SUBMOUNT = 1 << 0, "Root of a submount.";
        DAX = 1 << 1, "DAX for this file.";
    }
}

/// Types of request extensions.
pub mod ext {
    numbers! { u32:
        MAX_NR_SECCTX = 31, "Types up to this are counts of security contexts.";
        GROUPS = 32, "Supplementary groups.";
    }
}

/// Ioctls of the device and its io_uring commands.
pub mod device {
    numbers! { u32:
        IOC_CLONE = 0x8004_e500, "`_IOR(229, 0, u32)`: bind this descriptor to another's connection.";
        IOC_BACKING_OPEN = 0x4010_e501, "`_IOW(229, 1, struct fuse_backing_map)`: register a backing file.";
        IOC_BACKING_CLOSE = 0x4004_e502, "`_IOW(229, 2, u32)`: unregister it.";
        IOC_SYNC_INIT = 0xe503, "`_IO(229, 3)`: `mount(2)` waits for INIT.";
        URING_REGISTER = 1, "io_uring command: hand a ring entry to the kernel.";
        URING_COMMIT_AND_FETCH = 2, "io_uring command: reply, and wait for the next request.";
    }
}

/// Layout of a ring entry's header area: three parts at fixed offsets.
pub mod uring {
    numbers! { usize:
        IN_OUT = 0, "Offset of the [`super::InHeader`] or [`super::OutHeader`].";
        OP_IN = 128, "Offset of the request's struct.";
        OP_IN_SIZE = 128, "Room for the request's struct.";
        ENT_IN_OUT = 256, "Offset of the [`super::UringEntInOut`].";
        HEADER_SIZE = 288, "The whole area.";
    }
}

/// Encodes a device number for `rdev` of [`Attr`] and [`MknodIn`] (the kernel's 12 bits of major, 20 of minor).
pub const fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The inverse of [`encode_dev`]: major and minor.
pub const fn decode_dev(dev: u32) -> (u32, u32) {
    ((dev & 0xf_ff00) >> 8, (dev & 0xff) | ((dev >> 12) & 0xf_ff00))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_a_round_trip() {
        for (major, minor) in [(0, 0), (8, 1), (4095, 1_048_575), (259, 256), (7, 300)] {
            assert_eq!(decode_dev(encode_dev(major, minor)), (major, minor));
        }
        // As makedev(3) and the kernel's new_encode_dev agree on it.
        assert_eq!(encode_dev(8, 17), 0x811);
        assert_eq!(encode_dev(259, 257), 0x0011_0301 & 0x000f_ffff | 0x0010_0000);
    }

    #[test]
    fn bytes_and_back() {
        let lock = FileLock { start: 1, end: u64::MAX, r#type: 2, pid: 77 };
        let bytes = lock.bytes().to_vec();
        assert_eq!(bytes.len(), 24);
        assert_eq!(FileLock::read(&bytes), Some(lock));
        assert_eq!(FileLock::read(&bytes[1..]), None);
        let mut short = [0_u8; 23];
        assert_eq!(lock.write(&mut short), None);
        assert_eq!(short, [0; 23]);
    }

    #[test]
    fn every_opcode_fits_the_tables() {
        assert_eq!(opcode::name(opcode::COPY_FILE_RANGE_64), Some("COPY_FILE_RANGE_64"));
        assert_eq!(opcode::COPY_FILE_RANGE_64 as usize + 1, opcode::COUNT);
        assert_eq!(opcode::name(7), None);
    }

    #[test]
    fn ring_header_parts_do_not_overlap() {
        const { assert!(uring::IN_OUT + size_of::<InHeader>() <= uring::OP_IN) };
        const { assert!(uring::OP_IN + uring::OP_IN_SIZE == uring::ENT_IN_OUT) };
        const { assert!(uring::ENT_IN_OUT + size_of::<UringEntInOut>() == uring::HEADER_SIZE) };
        const { assert!(size_of::<SetattrIn>() <= uring::OP_IN_SIZE) };
    }
}
