//! Between the engine's words and the contract's: types, times, attributes, errors. One table for error numbers.

use nacre_pool::PoolError;
use nacre_pool::files::{AttributeChange, FileError, TimeChange};
use nacre_pool::rows::{FileType, Inode as Row, Timestamp};
use nacre_vfs::{Attr, Errno, FileId, Kind, SetAttr, SetTime, Time};

/// The error number of an error of the engine.
pub(super) fn errno(error: FileError) -> Errno {
    match error {
        FileError::NotFound => Errno::ENOENT,
        FileError::Exists | FileError::AttributeExists => Errno::EEXIST,
        FileError::NotDirectory => Errno::ENOTDIR,
        FileError::IsDirectory => Errno::EISDIR,
        FileError::NotEmpty => Errno::ENOTEMPTY,
        FileError::Invalid => Errno::EINVAL,
        FileError::NotPermitted => Errno::EPERM,
        FileError::NameTooLong => Errno::ENAMETOOLONG,
        FileError::TooManyLinks => Errno::EMLINK,
        FileError::TooLarge => Errno::EFBIG,
        FileError::NoData => Errno::ENODATA,
        FileError::Range => Errno::ERANGE,
        FileError::ReadOnly => Errno::EROFS,
        FileError::Quota | FileError::OwnerQuota => Errno::EDQUOT,
        FileError::Pool(PoolError::NoSpace) => Errno::ENOSPC,
        FileError::Pool(error) => {
            tracing::error!(%error, "the pool");
            Errno::EIO
        }
    }
}

pub(super) fn kind_of_type(file_type: FileType) -> Kind {
    match file_type {
        FileType::Regular => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::BlockDevice => Kind::Block,
        FileType::CharDevice => Kind::Character,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
    }
}

pub(super) fn type_of(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::Regular,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Block => FileType::BlockDevice,
        Kind::Character => FileType::CharDevice,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
    }
}

/// The kind of a row that was read: rows of no known type are refused when they are read.
pub(super) fn kind_of(row: &Row) -> Kind {
    row.file_type().map_or(Kind::File, kind_of_type)
}

fn time(stamp: Timestamp) -> Time {
    Time { sec: stamp.seconds, nsec: stamp.nanoseconds }
}

/// The attributes that a row says.
pub(super) fn attr(fs: u64, number: u64, row: &Row) -> Attr {
    /// `st_blocks` counts these, bytes.
    const SECTOR: u64 = 512;
    Attr {
        id: FileId { fs, ino: number, generation: 0 },
        kind: kind_of(row),
        mode: u32::from(row.mode) & 0o7777,
        nlink: row.links,
        uid: row.uid,
        gid: row.gid,
        rdev_major: rustix::fs::major(row.device),
        rdev_minor: rustix::fs::minor(row.device),
        size: row.size,
        blocks: row.charged.div_ceil(SECTOR),
        blksize: 1 << if row.record_shift == 0 { 17 } else { row.record_shift },
        atime: time(row.accessed),
        mtime: time(row.modified),
        ctime: time(row.changed),
        btime: Some(time(row.born)),
    }
}

/// A change of attributes in the engine's words.
pub(super) fn change_of(change: &SetAttr) -> AttributeChange {
    let time = |time: SetTime| match time {
        SetTime::Now => TimeChange::Now,
        SetTime::To(time) => TimeChange::To(Timestamp { seconds: time.sec, nanoseconds: time.nsec.min(999_999_999) }),
    };
    AttributeChange {
        permissions: change.mode.map(|mode| (mode & 0o7777) as u16),
        uid: change.uid,
        gid: change.gid,
        size: change.size,
        accessed: change.atime.map(time),
        modified: change.mtime.map(time),
        kill_privileges: change.kill_privileges,
        flags: None,
    }
}
