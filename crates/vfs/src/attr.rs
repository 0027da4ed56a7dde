//! Attributes of a file: identity, attributes, changes of them, and statistics of a file system.

/// A file's stable identity across names and time.
///
/// `fs` distinguishes file systems below one mount (device number for a host directory). `generation` distinguishes
/// files that had one inode number one after the other (for host files: a digest of the birth time; 0 where nothing
/// is known), and a directory that appears at several paths by mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// The file system below, unique within one stack.
    pub fs: u64,
    /// Inode number, shown to users as `st_ino`.
    pub ino: u64,
    /// Distinguishes the files that had this inode number one after the other.
    pub generation: u64,
}

/// The type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Block device.
    Block,
    /// Character device.
    Character,
    /// FIFO.
    Fifo,
    /// Socket.
    Socket,
}

impl Kind {
    /// From the `S_IFMT` bits of a mode; `None` for bits that name no type.
    pub const fn from_mode(mode: u32) -> Option<Kind> {
        Some(match mode & 0o170_000 {
            0o100_000 => Kind::File,
            0o040_000 => Kind::Directory,
            0o120_000 => Kind::Symlink,
            0o060_000 => Kind::Block,
            0o020_000 => Kind::Character,
            0o010_000 => Kind::Fifo,
            0o140_000 => Kind::Socket,
            _ => return None,
        })
    }

    /// The `S_IFMT` bits.
    pub const fn mode(self) -> u32 {
        match self {
            Kind::File => 0o100_000,
            Kind::Directory => 0o040_000,
            Kind::Symlink => 0o120_000,
            Kind::Block => 0o060_000,
            Kind::Character => 0o020_000,
            Kind::Fifo => 0o010_000,
            Kind::Socket => 0o140_000,
        }
    }

    /// The `d_type` of a directory entry (`DT_*`), which is the mode shifted.
    pub const fn d_type(self) -> u8 {
        (self.mode() >> 12) as u8
    }
}

/// A point in time: seconds since the epoch (negative before it) and nanoseconds (0 to
/// 999,999,999).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub sec: i64,
    /// Nanoseconds within the second.
    pub nsec: u32,
}

/// The attributes of a file, as `statx(2)` shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Identity; users see `id.ino` as inode number.
    pub id: FileId,
    /// Type.
    pub kind: Kind,
    /// Permission bits with set-id and sticky: `0..=0o7777`.
    pub mode: u32,
    /// Hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a block or character device: major.
    pub rdev_major: u32,
    /// Device number of a block or character device: minor.
    pub rdev_minor: u32,
    /// Bytes.
    pub size: u64,
    /// Allocated units of 512 bytes.
    pub blocks: u64,
    /// Preferred size of I/O, bytes.
    pub blksize: u32,
    /// Last access.
    pub atime: Time,
    /// Last change of content.
    pub mtime: Time,
    /// Last change of status.
    pub ctime: Time,
    /// Birth, where the file system knows it.
    pub btime: Option<Time>,
    /// Whether its content may change (`chattr +i`, `chattr +a`).
    pub protection: Protection,
}

/// What the flags of chattr(1) allow to be done with a file's content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protection {
    /// Everything.
    #[default]
    None,
    /// Writes at the end only (`chattr +a`).
    AppendOnly,
    /// Nothing (`chattr +i`).
    Immutable,
}

impl Protection {
    /// The protection of a file with these flags.
    #[must_use]
    pub fn of(immutable: bool, append_only: bool) -> Protection {
        if immutable {
            Protection::Immutable
        } else if append_only {
            Protection::AppendOnly
        } else {
            Protection::None
        }
    }
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The clock of the file system that stores it.
    Now,
    /// This time.
    To(Time),
}

/// Effect of a change of attributes on the ctime, and on the mtime where no other value is given. A front end whose
/// kernel keeps a file's times itself gives the ctime that the kernel shows, and ignores the times in the result
/// where it gave both. Layers whose storage cannot set the ctime let the storage choose it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangeTime {
    /// Set to the current time.
    #[default]
    Now,
    /// Set to this time.
    To(Time),
    /// Unchanged.
    Stays,
}

/// A change of attributes; `None` leaves a field unchanged. All of it is applied, or the error is that of the first
/// failed call: owner, then mode, then size, then times (each step clears the bits that the native call would clear).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// New permission bits, `0..=0o7777`.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New length, bytes.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New modification time.
    pub mtime: Option<SetTime>,
    /// Effect on the ctime.
    pub ctime: ChangeTime,
    /// The kernel asks to drop set-user-id, set-group-id and file capabilities with this change (a
    /// write, truncate or chown by someone who may not keep them): `FUSE_HANDLE_KILLPRIV_V2`.
    pub kill_privileges: bool,
    /// With `kill_privileges`: set-group-id is also dropped from a file that its group may not execute, because the
    /// caller is outside of the file's group (Linux 6.2 and later, `setattr_should_drop_sgid` in fs/attr.c).
    pub outside_group: bool,
    /// With `size`: EAGAIN instead of waiting for a lease that a program outside has on the file (`F_SETLEASE`). The holder
    /// is asked to release it.
    pub never_waits: bool,
}

impl SetAttr {
    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        *self == SetAttr::default()
    }
}

/// Statistics of a file system (`statfs(2)`), in units of `fragment` bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Preferred block size.
    pub block: u32,
    /// Unit of the counts, bytes.
    pub fragment: u32,
    /// All blocks.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Free blocks for ordinary users.
    pub available: u64,
    /// All inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Longest name, bytes.
    pub name_max: u32,
}
