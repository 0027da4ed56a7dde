//! The structs of the FUSE protocol, 7.45, with the kernel's field names.
//!
//! Filled in and read by handlers (replies), request parsing and the transports. Names lose their
//! `fuse_` prefix; `...In` comes from the kernel, `...Out` goes to it. Sizes are checked at compile
//! time.
#![allow(
    missing_docs,
    reason = "the fields have the names of the kernel's header and mean what it says; each struct is documented"
)]

use super::pod::wire;

wire! {
    /// Attributes of a file. Times are seconds since the epoch (two's complement for earlier ones)
    /// and nanoseconds; `blocks` counts 512-byte units; `rdev` is the kernel's 32-bit encoding (see
    /// [`super::encode_dev`]); `flags` are [`super::attr_flags`].
    pub struct Attr = 88 {
        pub ino: u64, pub size: u64, pub blocks: u64, pub atime: u64, pub mtime: u64, pub ctime: u64,
        pub atimensec: u32, pub mtimensec: u32, pub ctimensec: u32, pub mode: u32, pub nlink: u32,
        pub uid: u32, pub gid: u32, pub rdev: u32, pub blksize: u32, pub flags: u32,
    }
    /// A time within [`Statx`].
    pub struct SxTime = 16 { pub tv_sec: i64, pub tv_nsec: u32, pub reserved: i32 }
    /// Attributes in the form of `statx(2)`; `mask` has the flags of the valid fields (`STATX_*`).
    pub struct Statx = 256 {
        pub mask: u32, pub blksize: u32, pub attributes: u64, pub nlink: u32, pub uid: u32, pub gid: u32, pub mode: u16, pub spare0: u16,
        pub ino: u64, pub size: u64, pub blocks: u64, pub attributes_mask: u64,
        pub atime: SxTime, pub btime: SxTime, pub ctime: SxTime, pub mtime: SxTime,
        pub rdev_major: u32, pub rdev_minor: u32, pub dev_major: u32, pub dev_minor: u32, pub spare2: [u64; 14],
    }
    /// Statistics of the file system, as in `statfs(2)`; counts are in units of `frsize` bytes.
    pub struct Kstatfs = 80 {
        pub blocks: u64, pub bfree: u64, pub bavail: u64, pub files: u64, pub ffree: u64,
        pub bsize: u32, pub namelen: u32, pub frsize: u32, pub padding: u32, pub spare: [u32; 6],
    }
    /// A POSIX lock: first and last byte (inclusive, `OFFSET_MAX` for "to the end"),
    /// `F_RDLCK`/`F_WRLCK`/`F_UNLCK`, process.
    pub struct FileLock = 24 { pub start: u64, pub end: u64, pub r#type: u32, pub pid: u32 }
    /// Reply to LOOKUP, MKNOD, MKDIR, SYMLINK, LINK, and the first half of CREATE's. `nodeid` 0 with a validity is a
    /// cacheable negative dentry. (nodeid, generation) must be unique for the life of the mount.
    pub struct EntryOut = 128 {
        pub nodeid: u64, pub generation: u64, pub entry_valid: u64, pub attr_valid: u64,
        pub entry_valid_nsec: u32, pub attr_valid_nsec: u32, pub attr: Attr,
    }
    /// FORGET: number of lookups of this node that the kernel forgets.
    pub struct ForgetIn = 8 { pub nlookup: u64 }
    /// One node of a BATCH_FORGET.
    pub struct ForgetOne = 16 { pub nodeid: u64, pub nlookup: u64 }
    /// BATCH_FORGET: followed by `count` [`ForgetOne`].
    pub struct BatchForgetIn = 8 { pub count: u32, pub dummy: u32 }
    /// GETATTR; `fh` is valid with `GETATTR_FH`.
    pub struct GetattrIn = 16 { pub getattr_flags: u32, pub dummy: u32, pub fh: u64 }
    /// Reply to GETATTR and SETATTR: attributes and their timeout.
    pub struct AttrOut = 104 { pub attr_valid: u64, pub attr_valid_nsec: u32, pub dummy: u32, pub attr: Attr }
    /// STATX.
    pub struct StatxIn = 24 { pub getattr_flags: u32, pub reserved: u32, pub fh: u64, pub sx_flags: u32, pub sx_mask: u32 }
    /// Reply to STATX.
    pub struct StatxOut = 288 { pub attr_valid: u64, pub attr_valid_nsec: u32, pub flags: u32, pub spare: [u64; 2], pub stat: Statx }
    /// MKNOD; followed by the name.
    pub struct MknodIn = 16 { pub mode: u32, pub rdev: u32, pub umask: u32, pub padding: u32 }
    /// MKDIR; followed by the name.
    pub struct MkdirIn = 8 { pub mode: u32, pub umask: u32 }
    /// RENAME; followed by both names.
    pub struct RenameIn = 8 { pub newdir: u64 }
    /// RENAME2; followed by both names. `flags` are `RENAME_*`.
    pub struct Rename2In = 16 { pub newdir: u64, pub flags: u32, pub padding: u32 }
    /// LINK; followed by the new name.
    pub struct LinkIn = 8 { pub oldnodeid: u64 }
    /// SETATTR: `valid` has the flags of the valid fields ([`super::fattr`]).
    pub struct SetattrIn = 88 {
        pub valid: u32, pub padding: u32, pub fh: u64, pub size: u64, pub lock_owner: u64, pub atime: u64, pub mtime: u64, pub ctime: u64,
        pub atimensec: u32, pub mtimensec: u32, pub ctimensec: u32, pub mode: u32, pub unused4: u32, pub uid: u32, pub gid: u32, pub unused5: u32,
    }
    /// OPEN and OPENDIR.
    pub struct OpenIn = 8 { pub flags: u32, pub open_flags: u32 }
    /// CREATE and TMPFILE; followed by the name.
    pub struct CreateIn = 16 { pub flags: u32, pub mode: u32, pub umask: u32, pub open_flags: u32 }
    /// Reply to OPEN and OPENDIR, second half of CREATE's; `open_flags` are [`super::fopen`],
    /// `backing_id` counts with `PASSTHROUGH`.
    pub struct OpenOut = 16 { pub fh: u64, pub open_flags: u32, pub backing_id: i32 }
    /// RELEASE and RELEASEDIR.
    pub struct ReleaseIn = 24 { pub fh: u64, pub flags: u32, pub release_flags: u32, pub lock_owner: u64 }
    /// FLUSH.
    pub struct FlushIn = 24 { pub fh: u64, pub unused: u32, pub padding: u32, pub lock_owner: u64 }
    /// READ, READDIR and READDIRPLUS.
    pub struct ReadIn = 40 {
        pub fh: u64, pub offset: u64, pub size: u32, pub read_flags: u32, pub lock_owner: u64, pub flags: u32, pub padding: u32,
    }
    /// WRITE; followed by the data.
    pub struct WriteIn = 40 {
        pub fh: u64, pub offset: u64, pub size: u32, pub write_flags: u32, pub lock_owner: u64, pub flags: u32, pub padding: u32,
    }
    /// Reply to WRITE and COPY_FILE_RANGE.
    pub struct WriteOut = 8 { pub size: u32, pub padding: u32 }
    /// FSYNC and FSYNCDIR.
    pub struct FsyncIn = 16 { pub fh: u64, pub fsync_flags: u32, pub padding: u32 }
    /// SETXATTR where SETXATTR_EXT was not negotiated; followed by name and value.
    pub struct SetxattrCompatIn = 8 { pub size: u32, pub flags: u32 }
    /// SETXATTR where SETXATTR_EXT was negotiated; followed by name and value.
    pub struct SetxattrIn = 16 { pub size: u32, pub flags: u32, pub setxattr_flags: u32, pub padding: u32 }
    /// GETXATTR (followed by the name) and LISTXATTR; `size` 0 asks for the size only.
    pub struct GetxattrIn = 8 { pub size: u32, pub padding: u32 }
    /// Reply to GETXATTR and LISTXATTR of size 0.
    pub struct GetxattrOut = 8 { pub size: u32, pub padding: u32 }
    /// GETLK, SETLK, SETLKW.
    pub struct LkIn = 48 { pub fh: u64, pub owner: u64, pub lk: FileLock, pub lk_flags: u32, pub padding: u32 }
    /// Reply to GETLK.
    pub struct LkOut = 24 { pub lk: FileLock }
    /// ACCESS.
    pub struct AccessIn = 8 { pub mask: u32, pub padding: u32 }
    /// INIT, the kernel's offer.
    pub struct InitIn = 64 {
        pub major: u32, pub minor: u32, pub max_readahead: u32, pub flags: u32, pub flags2: u32, pub unused: [u32; 11],
    }
    /// Reply to INIT.
    pub struct InitOut = 64 {
        pub major: u32, pub minor: u32, pub max_readahead: u32, pub flags: u32, pub max_background: u16, pub congestion_threshold: u16,
        pub max_write: u32, pub time_gran: u32, pub max_pages: u16, pub map_alignment: u16, pub flags2: u32, pub max_stack_depth: u32,
        pub request_timeout: u16, pub unused: [u16; 11],
    }
    /// INTERRUPT: the number of the interrupted request.
    pub struct InterruptIn = 8 { pub unique: u64 }
    /// BMAP.
    pub struct BmapIn = 16 { pub block: u64, pub blocksize: u32, pub padding: u32 }
    /// Reply to BMAP.
    pub struct BmapOut = 8 { pub block: u64 }
    /// IOCTL; followed by `in_size` bytes.
    pub struct IoctlIn = 32 { pub fh: u64, pub flags: u32, pub cmd: u32, pub arg: u64, pub in_size: u32, pub out_size: u32 }
    /// A memory area, for unrestricted ioctls (CUSE only).
    pub struct IoctlIovec = 16 { pub base: u64, pub len: u64 }
    /// Reply to IOCTL; followed by the data.
    pub struct IoctlOut = 16 { pub result: i32, pub flags: u32, pub in_iovs: u32, pub out_iovs: u32 }
    /// POLL.
    pub struct PollIn = 24 { pub fh: u64, pub kh: u64, pub flags: u32, pub events: u32 }
    /// Reply to POLL.
    pub struct PollOut = 8 { pub revents: u32, pub padding: u32 }
    /// FALLOCATE.
    pub struct FallocateIn = 32 { pub fh: u64, pub offset: u64, pub length: u64, pub mode: u32, pub padding: u32 }
    /// LSEEK (`SEEK_DATA`, `SEEK_HOLE`).
    pub struct LseekIn = 24 { pub fh: u64, pub offset: u64, pub whence: u32, pub padding: u32 }
    /// Reply to LSEEK.
    pub struct LseekOut = 8 { pub offset: u64 }
    /// COPY_FILE_RANGE and COPY_FILE_RANGE_64.
    pub struct CopyFileRangeIn = 56 {
        pub fh_in: u64, pub off_in: u64, pub nodeid_out: u64, pub fh_out: u64, pub off_out: u64, pub len: u64, pub flags: u64,
    }
    /// Reply to COPY_FILE_RANGE_64.
    pub struct CopyFileRangeOut = 8 { pub bytes_copied: u64 }
    /// SETUPMAPPING (DAX, virtiofs only).
    pub struct SetupmappingIn = 40 { pub fh: u64, pub foffset: u64, pub len: u64, pub flags: u64, pub moffset: u64 }
    /// REMOVEMAPPING (DAX): followed by `count` [`RemovemappingOne`].
    pub struct RemovemappingIn = 4 { pub count: u32 }
    /// One mapping of a REMOVEMAPPING.
    pub struct RemovemappingOne = 16 { pub moffset: u64, pub len: u64 }
    /// SYNCFS.
    pub struct SyncfsIn = 8 { pub padding: u64 }
    /// Header of every request. `total_extlen` is the length of the extensions at its end, in units of 8 bytes.
    pub struct InHeader = 40 {
        pub len: u32, pub opcode: u32, pub unique: u64, pub nodeid: u64, pub uid: u32, pub gid: u32, pub pid: u32,
        pub total_extlen: u16, pub padding: u16,
    }
    /// Header of every reply: `error` is 0 or a negative error number. With `unique` 0 it is the header of a
    /// notification and `error` is its code.
    pub struct OutHeader = 16 { pub len: u32, pub error: i32, pub unique: u64 }
    /// Header of a directory entry; followed by the name, padded to 8 bytes. `type` is a `DT_*`.
    pub struct Dirent = 24 { pub ino: u64, pub off: u64, pub namelen: u32, pub r#type: u32 }
    /// Notification POLL.
    pub struct NotifyPollWakeupOut = 8 { pub kh: u64 }
    /// Notification INVAL_INODE; `off` < 0 means attributes only, `len` <= 0 means to the end.
    pub struct NotifyInvalInodeOut = 24 { pub ino: u64, pub off: i64, pub len: i64 }
    /// Notification INVAL_ENTRY; followed by the name and a NUL.
    pub struct NotifyInvalEntryOut = 16 { pub parent: u64, pub namelen: u32, pub flags: u32 }
    /// Notification DELETE; followed by the name and a NUL.
    pub struct NotifyDeleteOut = 24 { pub parent: u64, pub child: u64, pub namelen: u32, pub padding: u32 }
    /// Notification STORE; followed by the data.
    pub struct NotifyStoreOut = 24 { pub nodeid: u64, pub offset: u64, pub size: u32, pub padding: u32 }
    /// Notification RETRIEVE.
    pub struct NotifyRetrieveOut = 32 { pub notify_unique: u64, pub nodeid: u64, pub offset: u64, pub size: u32, pub padding: u32 }
    /// NOTIFY_REPLY, the answer to RETRIEVE; followed by the data.
    pub struct NotifyRetrieveIn = 40 { pub dummy1: u64, pub offset: u64, pub size: u32, pub dummy2: u32, pub dummy3: u64, pub dummy4: u64 }
    /// Notification PRUNE: followed by `count` node ids.
    pub struct NotifyPruneOut = 16 { pub count: u32, pub padding: u32, pub spare: u64 }
    /// Argument of the ioctl BACKING_OPEN.
    pub struct BackingMap = 16 { pub fd: i32, pub flags: u32, pub padding: u64 }
    /// Header of a security context extension: total `size` and the number of contexts.
    pub struct SecctxHeader = 8 { pub size: u32, pub nr_secctx: u32 }
    /// One security context: followed by its name, a NUL, and `size` bytes of label.
    pub struct Secctx = 8 { pub size: u32, pub padding: u32 }
    /// Header of an extension: total `size`, padded to 8 bytes; types up to 31 are a [`SecctxHeader`].
    pub struct ExtHeader = 8 { pub size: u32, pub r#type: u32 }
    /// Supplementary groups; followed by `nr_groups` group ids.
    pub struct SuppGroups = 4 { pub nr_groups: u32 }
    /// Identifies a request in a ring entry, with the size of its payload (in both directions).
    pub struct UringEntInOut = 32 { pub flags: u64, pub commit_id: u64, pub payload_sz: u32, pub padding: u32, pub reserved: u64 }
    /// The command area of a submission queue entry.
    pub struct UringCmdReq = 24 { pub flags: u64, pub commit_id: u64, pub qid: u16, pub padding: [u8; 6] }
    /// CUSE_INIT (character devices; not served by this crate).
    pub struct CuseInitIn = 16 { pub major: u32, pub minor: u32, pub unused: u32, pub flags: u32 }
    /// Reply to CUSE_INIT; followed by `DEVNAME=...`.
    pub struct CuseInitOut = 72 {
        pub major: u32, pub minor: u32, pub unused: u32, pub flags: u32, pub max_read: u32, pub max_write: u32,
        pub dev_major: u32, pub dev_minor: u32, pub spare: [u32; 10],
    }
}
