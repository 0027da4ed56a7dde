//! Attributes of an entry, as `statx(2)` and the extended attributes have them.

use crate::Entry;
use rustix::fs::{self, AtFlags, FileType, Statx, StatxAttributes, StatxFlags, Timespec, Timestamps};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, ffi::OsStr, io, os::fd::BorrowedFd};

/// A time: seconds and nanoseconds.
pub(crate) type Time = (i64, u32);

/// Extended attributes by their names.
pub(crate) type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Attributes from `statx(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// Type and permission bits, as in `st_mode`.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) links: u32,
    /// Device number of the file system.
    pub(crate) device: u64,
    pub(crate) ino: u64,
    /// Number of a device file.
    pub(crate) special: (u32, u32),
    pub(crate) atime: Time,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
    pub(crate) btime: Option<Time>,
    /// Another file system, or another directory, is mounted there.
    pub(crate) is_mount: bool,
}

impl Meta {
    /// Reads the attributes of an entry of a directory, without following a link.
    pub(crate) fn of_entry(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<Meta> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        Ok(Meta::new(&fs::statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?))
    }

    /// Reads the attributes of the file behind a descriptor.
    pub(crate) fn of_file(file: BorrowedFd<'_>) -> io::Result<Meta> {
        Ok(Meta::new(&fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?))
    }

    fn new(stat: &Statx) -> Meta {
        let has_birth = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        Meta {
            mode: stat.stx_mode.into(),
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: stat.stx_size,
            links: stat.stx_nlink,
            device: fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            ino: stat.stx_ino,
            special: (stat.stx_rdev_major, stat.stx_rdev_minor),
            atime: (stat.stx_atime.tv_sec, stat.stx_atime.tv_nsec),
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            ctime: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
            btime: has_birth.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)),
            is_mount: stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        }
    }

    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind() == FileType::Directory
    }

    pub(crate) fn is_file(&self) -> bool {
        self.kind() == FileType::RegularFile
    }

    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind(), FileType::BlockDevice | FileType::CharacterDevice)
    }

    /// Permission bits with set-id and sticky.
    pub(crate) fn permissions(&self) -> u32 {
        self.mode & 0o7777
    }

    /// Letter of the type, as the log of hidden entries has it.
    pub(crate) fn letter(&self) -> char {
        match self.kind() {
            FileType::Directory => 'd',
            FileType::Symlink => 'l',
            FileType::Fifo => 'p',
            FileType::Socket => 's',
            FileType::CharacterDevice => 'c',
            FileType::BlockDevice => 'b',
            _ => 'f',
        }
    }

    /// The attributes that callers see.
    pub(crate) fn entry(&self) -> Entry {
        Entry { mode: self.mode, uid: self.uid, gid: self.gid, size: self.size }
    }

    /// Birth as one number, as copies record it of their originals; 0 where it is unknown.
    pub(crate) fn generation(&self) -> u64 {
        generation(self.btime)
    }
}

/// Access and modification time for `utimensat(2)`.
pub(crate) fn timestamps(accessed: Time, modified: Time) -> Timestamps {
    let time = |(tv_sec, tv_nsec): Time| Timespec { tv_sec, tv_nsec: tv_nsec.into() };
    Timestamps { last_access: time(accessed), last_modification: time(modified) }
}

/// Birth as one number; 0 where it is unknown.
pub(crate) fn generation(birth: Option<Time>) -> u64 {
    let Some((seconds, nanos)) = birth else { return 0 };
    seconds.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(nanos.into())
}

/// Prefixes of the union's own attributes, which are no content.
const PRIVATE: [&[u8]; 5] =
    [b"trusted.overlay.", b"user.overlay.", b"trusted.nacre.", b"user.nacre.", b"user.fuseoverlayfs."];

/// Attributes of an overlay file system within the view, and the prefixes under which branches store them.
const NESTED: [(&[u8], &[u8]); 2] =
    [(b"trusted.overlay.", b"trusted.overlay.overlay."), (b"user.overlay.", b"user.overlay.overlay.")];

/// The name under which users see a stored attribute; `None` for one of the union's own, for labels that security
/// modules give to files by themselves, and for second names of access control lists.
pub(crate) fn shown_attribute(name: &[u8]) -> Option<Vec<u8>> {
    if name.starts_with(b"security.") && name != b"security.capability" || name.starts_with(b"trusted.SGI_ACL_") {
        return None;
    }
    for (shown, nested) in NESTED {
        if let Some(rest) = name.strip_prefix(nested) {
            return Some([shown, rest].concat());
        }
    }
    if is_private(name) { None } else { Some(name.to_vec()) }
}

/// Whether an attribute is a label by which a security module decides who may do what with a file.
fn is_label(name: &[u8]) -> bool {
    name == b"security.selinux" || name.starts_with(b"security.SMACK64")
}

/// The labels of security modules. They are no content: a file has them from its directory, or takes them over from the
/// file that it replaces.
pub(crate) fn labels(stored: &Xattrs) -> Xattrs {
    stored.iter().filter(|(name, _)| is_label(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Whether an attribute is the union's own.
pub(crate) fn is_private(name: &[u8]) -> bool {
    PRIVATE.iter().any(|prefix| name.starts_with(prefix)) && !NESTED.iter().any(|(_, nested)| name.starts_with(nested))
}

/// The attributes that users see.
pub(crate) fn shown_attributes(stored: &Xattrs) -> Xattrs {
    stored.iter().filter_map(|(name, value)| Some((shown_attribute(name)?, value.clone()))).collect()
}
