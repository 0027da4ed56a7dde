//! Requests of the kernel, parsed: pure functions of bytes.
//!
//! Called by the transports; handlers match on [`Op`]. Only numbers are copied: names and data borrow the transport's
//! buffer. Invariant: no input makes this panic; a request that contradicts its own lengths is an error, which the
//! transport answers with EIO. Names and extended attribute names come without their NUL, are not empty, and contain
//! no NUL; the kernel guarantees that a name contains no `/`.

mod ext;
mod parse;
#[cfg(test)]
mod tests;

pub use ext::{Groups, SecurityContexts};
pub(crate) use parse::{Form, fixed_size, parse};

use crate::abi::{FileLock, InHeader, SetattrIn};

/// Header of a request: caller, opcode and node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the request, unique among those in flight. [`crate::abi::UNIQUE_RESEND`] marks a resent one.
    pub unique: u64,
    /// Opcode: [`crate::abi::opcode`].
    pub opcode: u32,
    /// Node id; 1 is the root.
    pub nodeid: u64,
    /// File-system user id of the caller, in the mount's user namespace.
    pub uid: u32,
    /// File-system group id of the caller.
    pub gid: u32,
    /// Thread id of the caller; 0 for requests of the kernel itself.
    pub pid: u32,
}

impl From<&InHeader> for Header {
    fn from(header: &InHeader) -> Header {
        Header {
            unique: header.unique,
            opcode: header.opcode,
            nodeid: header.nodeid,
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
        }
    }
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Caller, opcode and node.
    pub header: Header,
    /// The operation with its arguments.
    pub op: Op<'a>,
    /// Supplementary group of a creation (`CREATE_SUPP_GROUP`): at most the parent's group, if the
    /// caller is a member. Empty otherwise.
    pub groups: Groups<'a>,
    /// Security contexts of a creation (`SECURITY_CTX`). Empty otherwise.
    pub security: SecurityContexts<'a>,
}

/// The operation of a request. Field names are those of the system call; offsets and sizes are bytes.
#[derive(Clone, Copy, Debug)]
#[allow(
    missing_docs,
    reason = "the fields are the arguments of the system calls of these names; what differs is said at the variant"
)]
pub enum Op<'a> {
    /// Look `name` up in the node. Each reply with a node counts as one lookup until FORGET.
    Lookup { name: &'a [u8] },
    /// Attributes; `fh` where the call came through a descriptor and the kernel sends it.
    Getattr { fh: Option<u64> },
    /// Change attributes; see [`crate::abi::fattr`] for `valid`.
    Setattr(SetattrIn),
    /// Target of a symbolic link.
    Readlink,
    /// Make a symbolic link.
    Symlink { name: &'a [u8], target: &'a [u8] },
    /// Make a file of the type in `mode`; `rdev` as in [`crate::abi::decode_dev`]. The umask is
    /// applied already unless `DONT_MASK`.
    Mknod { name: &'a [u8], mode: u32, rdev: u32, umask: u32 },
    /// Make a directory.
    Mkdir { name: &'a [u8], mode: u32, umask: u32 },
    /// Remove a name.
    Unlink { name: &'a [u8] },
    /// Remove a directory.
    Rmdir { name: &'a [u8] },
    /// RENAME and RENAME2: `flags` are `RENAME_*`.
    Rename { name: &'a [u8], new_dir: u64, new_name: &'a [u8], flags: u32 },
    /// Create `name` in the node as another link to `nodeid`.
    Link { nodeid: u64, name: &'a [u8] },
    /// Open; `open_flags` are `OPEN_KILL_SUIDGID`.
    Open { flags: u32, open_flags: u32 },
    /// Read at most `size` bytes; `flags` are the open file's `O_*`.
    Read { fh: u64, offset: u64, size: u32, flags: u32, lock_owner: Option<u64>, read_flags: u32 },
    /// Write `data`; `write_flags` are `WRITE_*` of [`crate::abi::flag`].
    Write { fh: u64, offset: u64, data: &'a [u8], flags: u32, write_flags: u32, lock_owner: Option<u64> },
    /// Statistics of the file system.
    Statfs,
    /// The last descriptor of an open file is gone; the kernel ignores the reply. `lock_owner` is set where its BSD
    /// lock must be released.
    Release { fh: u64, flags: u32, release_flags: u32, lock_owner: Option<u64> },
    /// Make durable.
    Fsync { fh: u64, datasync: bool },
    /// Set an extended attribute; `flags` are `XATTR_*`.
    Setxattr { name: &'a [u8], value: &'a [u8], flags: u32, setxattr_flags: u32 },
    /// Read an extended attribute; `size` 0 requests its size ([`crate::Reply::xattr_size`]), ERANGE if it is longer.
    Getxattr { name: &'a [u8], size: u32 },
    /// List extended attributes, each name with a NUL; `size` as above.
    Listxattr { size: u32 },
    /// Remove an extended attribute.
    Removexattr { name: &'a [u8] },
    /// A descriptor of this open file was closed.
    Flush { fh: u64, lock_owner: u64 },
    /// Open a directory.
    Opendir { flags: u32 },
    /// List from `offset` on (0, or the `off` of an earlier entry), at most `size` bytes
    /// ([`crate::Reply::directory`]).
    Readdir { fh: u64, offset: u64, size: u32 },
    /// List with lookups: each entry but `.` and `..` that has a node counts as one.
    Readdirplus { fh: u64, offset: u64, size: u32 },
    /// The last descriptor of a directory is gone.
    Releasedir { fh: u64, flags: u32 },
    /// Make a directory durable.
    Fsyncdir { fh: u64, datasync: bool },
    /// Find a conflicting lock.
    Getlk { fh: u64, owner: u64, lock: FileLock, flags: u32 },
    /// Take or release a lock; `wait` for it within [`crate::blocking`]. `flags` may contain `LK_FLOCK`.
    Setlk { fh: u64, owner: u64, lock: FileLock, flags: u32, wait: bool },
    /// `access(2)`, without `default_permissions` only.
    Access { mask: u32 },
    /// Make and open.
    Create { name: &'a [u8], flags: u32, mode: u32, umask: u32, open_flags: u32 },
    /// Create and open a file without a name in this directory. `name` is the name that the kernel shows for it.
    Tmpfile { name: &'a [u8], flags: u32, mode: u32, umask: u32, open_flags: u32 },
    /// Device block of a file's block (fuseblk).
    Bmap { block: u64, blocksize: u32 },
    /// `ioctl(2)`: `input` is the data read according to the command's number, at most `out_size` bytes are returned.
    Ioctl { fh: u64, flags: u32, cmd: u32, arg: u64, input: &'a [u8], out_size: u32 },
    /// `poll(2)`: wake up `kh` by notification when ready, if `flags` contain `POLL_SCHEDULE_NOTIFY`.
    Poll { fh: u64, kh: u64, flags: u32, events: u32 },
    /// `fallocate(2)`.
    Fallocate { fh: u64, offset: u64, length: u64, mode: u32 },
    /// `lseek(2)` with `SEEK_DATA` or `SEEK_HOLE`.
    Lseek { fh: u64, offset: u64, whence: u32 },
    /// `copy_file_range(2)`; pass `wide` to [`crate::Reply::copied`].
    CopyFileRange {
        fh_in: u64,
        off_in: u64,
        nodeid_out: u64,
        fh_out: u64,
        off_out: u64,
        len: u64,
        flags: u64,
        wide: bool,
    },
    /// `syncfs(2)`: sent for fuseblk and virtiofs only.
    Syncfs,
    /// `statx(2)` for fields that GETATTR does not have; at the time of writing the kernel requests the birth time
    /// only.
    Statx { fh: Option<u64>, flags: u32, mask: u32 },
    /// The file system ends (fuseblk only).
    Destroy,
    /// An operation that this crate does not know: answer ENOSYS.
    Unknown(u32),
}
