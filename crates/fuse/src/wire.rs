//! Conversions between the types of `nacre_vfs` and the wire format: attributes, times, statfs, locks, errors. Pure
//! functions.
//!
//! Called by the handlers under `ops/`. Each conversion is in one exhaustive function.

use fusewire::abi;
use nacre_vfs::{Attr, ChangeTime, FileLock, Kind, LockKind, SetAttr, SetTime, StatFs, Time};
use std::time::Duration;

/// `SEEK_DATA` and `SEEK_HOLE`, as the kernel sends them.
pub(crate) const SEEK_DATA: u32 = 3;
/// See [`SEEK_DATA`].
pub(crate) const SEEK_HOLE: u32 = 4;

/// `STATX_BASIC_STATS`.
const STATX_BASIC_STATS: u32 = 0x7ff;
/// `STATX_BTIME`.
const STATX_BTIME: u32 = 0x800;

/// Attributes for LOOKUP, GETATTR and similar replies.
pub(crate) fn attr(attr: &Attr) -> abi::Attr {
    abi::Attr {
        ino: attr.id.ino,
        size: attr.size,
        blocks: attr.blocks,
        // Two's complement for times before 1970.
        atime: attr.atime.sec as u64,
        mtime: attr.mtime.sec as u64,
        ctime: attr.ctime.sec as u64,
        atimensec: attr.atime.nsec,
        mtimensec: attr.mtime.nsec,
        ctimensec: attr.ctime.nsec,
        mode: attr.kind.mode() | attr.mode & 0o7777,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: abi::encode_dev(attr.rdev_major, attr.rdev_minor),
        blksize: attr.blksize,
        flags: 0,
    }
}

/// Reply to LOOKUP and creations.
pub(crate) fn entry(nodeid: u64, found: &Attr, names: Duration, attributes: Duration) -> abi::EntryOut {
    abi::EntryOut {
        nodeid,
        // Node ids are never reused within a mount; where files were replaced by others with the same numbers, the
        // front end sets the generation.
        generation: 0,
        entry_valid: names.as_secs(),
        attr_valid: attributes.as_secs(),
        entry_valid_nsec: names.subsec_nanos(),
        attr_valid_nsec: attributes.subsec_nanos(),
        attr: attr(found),
    }
}

/// Reply for a missing name (negative dentry) with timeout `names`.
pub(crate) fn negative(names: Duration) -> abi::EntryOut {
    abi::EntryOut { entry_valid: names.as_secs(), entry_valid_nsec: names.subsec_nanos(), ..abi::EntryOut::default() }
}

/// Reply to GETATTR and SETATTR.
pub(crate) fn attr_out(found: &Attr, valid: Duration) -> abi::AttrOut {
    abi::AttrOut {
        attr_valid: valid.as_secs(),
        attr_valid_nsec: valid.subsec_nanos(),
        attr: attr(found),
        ..abi::AttrOut::default()
    }
}

/// Reply to STATX, which the kernel sends when a caller wants the birth time.
pub(crate) fn statx_out(attr: &Attr, valid: Duration) -> abi::StatxOut {
    let stat = abi::Statx {
        mask: STATX_BASIC_STATS | if attr.btime.is_some() { STATX_BTIME } else { 0 },
        blksize: attr.blksize,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        mode: (attr.kind.mode() | attr.mode & 0o7777) as u16,
        ino: attr.id.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: sx_time(attr.atime),
        btime: sx_time(attr.btime.unwrap_or_default()),
        ctime: sx_time(attr.ctime),
        mtime: sx_time(attr.mtime),
        rdev_major: attr.rdev_major,
        rdev_minor: attr.rdev_minor,
        ..abi::Statx::default()
    };
    abi::StatxOut {
        attr_valid: valid.as_secs(),
        attr_valid_nsec: valid.subsec_nanos(),
        stat,
        ..abi::StatxOut::default()
    }
}

fn sx_time(time: Time) -> abi::SxTime {
    abi::SxTime { tv_sec: time.sec, tv_nsec: time.nsec, ..abi::SxTime::default() }
}

/// Statistics of the file system.
pub(crate) fn statfs(statfs: &StatFs) -> abi::Kstatfs {
    abi::Kstatfs {
        blocks: statfs.blocks,
        bfree: statfs.free,
        bavail: statfs.available,
        files: statfs.files,
        ffree: statfs.files_free,
        bsize: statfs.block,
        namelen: statfs.name_max,
        frsize: statfs.fragment,
        ..abi::Kstatfs::default()
    }
}

/// The changes of a SETATTR.
pub(crate) fn change(request: &abi::SetattrIn) -> SetAttr {
    use abi::fattr;
    let asked = |bit: u32| request.valid & bit != 0;
    let time = |bit: u32, now: u32, sec: u64, nsec: u32| {
        asked(bit).then(|| if asked(now) { SetTime::Now } else { SetTime::To(Time { sec: sec as i64, nsec }) })
    };
    SetAttr {
        mode: asked(fattr::MODE).then_some(request.mode & 0o7777),
        uid: asked(fattr::UID).then_some(request.uid),
        gid: asked(fattr::GID).then_some(request.gid),
        size: asked(fattr::SIZE).then_some(request.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, request.atime, request.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, request.mtime, request.mtimensec),
        ctime: change_time(request),
        // A request without any attribute comes from the kernel's `file_remove_privs` where the daemon removes set-id
        // bits (`fuse_setattr` in Linux' fs/fuse/dir.c): before fallocate(2) and copy_file_range(2) by a user who may
        // not keep them, and in chown(2) without ids.
        kill_privileges: asked(fattr::KILL_SUIDGID) || !asked(ATTRIBUTES),
        outside_group: false,
        never_waits: false,
    }
}

/// All attributes that can be changed; the ctime only comes along with others.
const ATTRIBUTES: u32 = {
    use abi::fattr::*;
    MODE | UID | GID | SIZE | ATIME | MTIME
};

/// The ctime that the kernel sends, which it does where it keeps times itself.
pub(crate) fn change_time(request: &abi::SetattrIn) -> ChangeTime {
    let told = request.valid & abi::fattr::CTIME != 0;
    if told { ChangeTime::To(Time { sec: request.ctime as i64, nsec: request.ctimensec }) } else { ChangeTime::Now }
}

/// `F_RDLCK`, `F_WRLCK`, `F_UNLCK`.
const LOCK_TYPES: [(u32, LockKind); 3] = [(0, LockKind::Read), (1, LockKind::Write), (2, LockKind::Unlock)];

/// Converts a lock from the kernel; `None` for an unknown type.
pub(crate) fn lock(lock: &abi::FileLock) -> Option<FileLock> {
    let (_, kind) = LOCK_TYPES.into_iter().find(|(number, _)| *number == lock.r#type)?;
    Some(FileLock { start: lock.start, end: lock.end, kind, pid: lock.pid })
}

/// Converts a lock for the kernel.
pub(crate) fn lock_out(lock: &FileLock) -> abi::FileLock {
    let number = LOCK_TYPES.into_iter().find(|(_, kind)| *kind == lock.kind).map_or(2, |(number, _)| number);
    abi::FileLock { start: lock.start, end: lock.end, r#type: number, pid: lock.pid }
}

/// A digest of the attributes that change with content: equal digests mean that cached pages may stay.
pub(crate) fn content_digest(attr: &Attr) -> u64 {
    use std::hash::{Hash, Hasher};
    // Constant keys: the value is only ever compared with one made by the same process.
    let mut hasher = std::hash::DefaultHasher::new();
    (attr.size, attr.mtime, attr.ctime).hash(&mut hasher);
    hasher.finish().max(1)
}

/// The kind of a MKNOD; `None` for directories, symbolic links and unknown types.
pub(crate) fn mknod_kind(mode: u32) -> Option<Kind> {
    // A type of 0 means a regular file, as for mknod(2).
    let kind = if mode & 0o170_000 == 0 { Kind::File } else { Kind::from_mode(mode)? };
    (!matches!(kind, Kind::Directory | Kind::Symlink)).then_some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setattr_says_exactly_what_was_asked() {
        use abi::fattr;
        let all = abi::SetattrIn {
            mode: 0o104_755,
            uid: 5,
            size: 9,
            mtime: u64::MAX,
            mtimensec: 7,
            ..abi::SetattrIn::default()
        };
        let nothing = change(&all);
        assert!(nothing.kill_privileges && SetAttr { kill_privileges: false, ..nothing }.is_empty(), "privileges go");
        let asked =
            change(&abi::SetattrIn { valid: fattr::MODE | fattr::MTIME | fattr::ATIME | fattr::ATIME_NOW, ..all });
        assert_eq!(asked.mode, Some(0o4755));
        assert_eq!(asked.mtime, Some(SetTime::To(Time { sec: -1, nsec: 7 })));
        assert_eq!(asked.atime, Some(SetTime::Now));
        assert_eq!((asked.uid, asked.size, asked.kill_privileges), (None, None, false));
        assert!(change(&abi::SetattrIn { valid: fattr::KILL_SUIDGID, ..all }).kill_privileges);
        let told = change(&abi::SetattrIn { valid: fattr::MODE | fattr::CTIME, ctime: 3, ctimensec: 4, ..all });
        assert_eq!((asked.ctime, told.ctime), (ChangeTime::Now, ChangeTime::To(Time { sec: 3, nsec: 4 })));
    }

    #[test]
    fn locks_survive_the_wire() {
        for number in 0..3 {
            let wire = abi::FileLock { start: 1, end: 2, r#type: number, pid: 3 };
            let there = lock(&wire).map(|lock| lock_out(&lock));
            assert_eq!(there.map(|back| (back.start, back.end, back.r#type, back.pid)), Some((1, 2, number, 3)));
        }
        assert!(lock(&abi::FileLock { start: 0, end: 0, r#type: 9, pid: 0 }).is_none());
    }

    #[test]
    fn a_mknod_without_a_type_makes_a_file() {
        assert_eq!(mknod_kind(0o644), Some(Kind::File));
        assert_eq!(mknod_kind(0o010_644), Some(Kind::Fifo));
        assert_eq!(mknod_kind(0o040_755), None);
    }
}
