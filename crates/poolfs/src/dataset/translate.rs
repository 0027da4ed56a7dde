//! Conversions between the engine's types and those of layers: types, times, attributes, errors.
//! The only table of errnos.

use super::file_flags::refusing;
use nacre_pool::PoolError;
use nacre_pool::files::{AttributeChange, ChangedTime, FileError, TimeChange};
use nacre_pool::rows::inode::flags;
use nacre_pool::rows::{FileType, InodeRow, Timestamp};
use nacre_vfs::{Attr, ChangeTime, Errno, FileId, Kind, Protection, SetAttr, SetTime, Time};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

static COMPLAINTS: Complaints = Complaints { since: Mutex::new(None), more: AtomicU64::new(0) };

/// Rate limit for logging errors of the engine: one line a second, since users can cause them
/// almost at will.
struct Complaints {
    since: Mutex<Option<Instant>>,
    /// Number of errors since then that were not logged.
    more: AtomicU64,
}

impl Complaints {
    #[expect(clippy::disallowed_methods, reason = "how often the same is logged")]
    fn tell(&self, error: &PoolError) {
        if self.is_due(Instant::now()) {
            let more = self.more.swap(0, Ordering::Relaxed);
            tracing::error!(%error, more, "the pool");
        } else {
            self.more.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        const PAUSE: Duration = Duration::from_secs(1);
        let mut since = self.since.lock();
        let due = since.is_none_or(|since| now.saturating_duration_since(since) >= PAUSE);
        if due {
            *since = Some(now);
        }
        due
    }
}

/// The errno for an error of the engine.
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
        FileError::NotUtf8 => Errno::EILSEQ,
        FileError::TooManyLinks => Errno::EMLINK,
        FileError::TooLarge => Errno::EFBIG,
        FileError::NoData => Errno::ENODATA,
        FileError::Range => Errno::ERANGE,
        FileError::ReadOnly => Errno::EROFS,
        FileError::Quota | FileError::OwnerQuota => Errno::EDQUOT,
        FileError::Pool(PoolError::NoSpace) => Errno::ENOSPC,
        FileError::Pool(error) => {
            COMPLAINTS.tell(&error);
            Errno::EIO
        }
    }
}

/// As [`errno`] for an operation on a file that is held: if a writer on another machine has removed
/// it, it is gone for good.
pub(super) fn of_node(error: FileError) -> Errno {
    match error {
        FileError::NotFound => Errno::ESTALE,
        error => errno(error),
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

/// The kind of a decoded row: rows of unknown types are refused when they are decoded.
pub(super) fn kind_of(row: &InodeRow) -> Kind {
    row.file_type().map_or(Kind::File, kind_of_type)
}

pub(super) fn time(stamp: Timestamp) -> Time {
    Time { sec: stamp.seconds, nsec: stamp.nanoseconds }
}

/// The attributes in a row.
pub(super) fn attr(fs: u64, number: u64, row: &InodeRow) -> Attr {
    /// Unit of `st_blocks`, bytes.
    const SECTOR: u64 = 512;
    // Small content is stored in the tree, and no sector is charged for it; programs take a file
    // without sectors for a hole (`tar -S`).
    let least = u64::from(row.file_type() == Some(FileType::Regular) && row.size > 0);
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
        blocks: row.charged.div_ceil(SECTOR).max(least),
        blksize: 1 << if row.record_shift == 0 { 17 } else { row.record_shift },
        atime: time(row.accessed),
        mtime: time(row.modified),
        ctime: time(row.changed),
        btime: Some(time(row.born)),
        protection: Protection::of(row.flags & flags::IMMUTABLE != 0, row.flags & flags::APPEND != 0),
    }
}

/// The engine's form of a change of attributes.
pub(super) fn change_of(change: &SetAttr) -> AttributeChange {
    let stamp = |time: Time| Timestamp { seconds: time.sec, nanoseconds: time.nsec.min(999_999_999) };
    let time = |time: SetTime| match time {
        SetTime::Now => TimeChange::Now,
        SetTime::To(time) => TimeChange::To(stamp(time)),
    };
    AttributeChange {
        permissions: change.mode.map(|mode| (mode & 0o7777) as u16),
        uid: change.uid,
        gid: change.gid,
        size: change.size,
        only_longer: false,
        accessed: change.atime.map(time),
        modified: change.mtime.map(time),
        changed: match change.ctime {
            ChangeTime::Now => ChangedTime::Now,
            ChangeTime::To(time) => ChangedTime::To(stamp(time)),
            ChangeTime::Stays => ChangedTime::Stays,
        },
        kill_privileges: change.kill_privileges,
        outside_group: change.outside_group,
        flags: None,
        refused_by: refusing(change),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_complaint_a_second() {
        let complaints = Complaints { since: Mutex::new(None), more: AtomicU64::new(0) };
        let now = Instant::now();
        assert!(complaints.is_due(now) && !complaints.is_due(now));
        assert!(complaints.is_due(now + Duration::from_secs(1)));
        complaints.tell(&PoolError::NoSpace);
        complaints.tell(&PoolError::NoSpace);
        assert_eq!(complaints.more.load(Ordering::Relaxed), 2, "time goes on from the last line");
    }
}
