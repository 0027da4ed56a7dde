//! Btrfs: the subvolume of a directory, and its quota limit (include/uapi/linux/btrfs.h).
//!
//! Called by the quota engine of cages. The usage of a subvolume is read from sysfs, which needs no
//! call of this file.

use crate::check;
use std::{
    io, mem,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `BTRFS_IOC_INO_LOOKUP`: `_IOWR(0x94, 18, 4096 bytes)`.
const INO_LOOKUP: u32 = 0xd000_9412;
/// `BTRFS_IOC_FS_INFO`: `_IOR(0x94, 31, 1024 bytes)`.
const FS_INFO: u32 = 0x8400_941f;
/// `BTRFS_IOC_QGROUP_LIMIT`: `_IOR(0x94, 43, 48 bytes)`.
const QGROUP_LIMIT: u32 = 0x8030_942b;
/// `BTRFS_QGROUP_LIMIT_MAX_RFER`.
const MAX_REFERENCED: u64 = 1;
/// `BTRFS_FIRST_FREE_OBJECTID`: the inode number of every subvolume's root.
pub const SUBVOLUME_INODE: u64 = 256;

/// `struct btrfs_ioctl_ino_lookup_args`.
#[repr(C)]
struct InoLookup {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

/// `struct btrfs_ioctl_fs_info_args`.
#[repr(C)]
struct FsInfo {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    rest: [u64; 124],
}

/// `struct btrfs_ioctl_qgroup_limit_args`.
#[repr(C)]
struct QgroupLimit {
    group: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved_referenced: u64,
    reserved_exclusive: u64,
}

const _: () = assert!(
    mem::size_of::<InoLookup>() == 4096 && mem::size_of::<FsInfo>() == 1024 && mem::size_of::<QgroupLimit>() == 48
);

/// # Safety
/// `argument` points to what `command` reads and writes.
unsafe fn ioctl(file: BorrowedFd<'_>, command: u32, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: as the caller vouches. The type of the number differs between C libraries, its bits
    // do not.
    check(unsafe { libc::ioctl(file.as_raw_fd(), command as _, argument) }.into()).map(drop)
}

/// The number of the subvolume that a file lies in.
///
/// # Errors
/// ENOTTY on another file system than Btrfs.
pub fn subvolume(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut lookup = InoLookup { tree: 0, object: SUBVOLUME_INODE, name: [0; 4080] };
    // SAFETY: the command reads and writes a struct btrfs_ioctl_ino_lookup_args.
    unsafe { ioctl(file, INO_LOOKUP, (&raw mut lookup).cast()) }?;
    Ok(lookup.tree)
}

/// The file system's UUID, as sysfs writes it.
///
/// # Errors
/// ENOTTY on another file system than Btrfs.
pub fn filesystem(file: BorrowedFd<'_>) -> io::Result<String> {
    let mut info = FsInfo { max_id: 0, num_devices: 0, fsid: [0; 16], rest: [0; 124] };
    // SAFETY: the command reads and writes a struct btrfs_ioctl_fs_info_args.
    unsafe { ioctl(file, FS_INFO, (&raw mut info).cast()) }?;
    let mut text = String::with_capacity(36);
    for (place, byte) in info.fsid.iter().enumerate() {
        if matches!(place, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    Ok(text)
}

/// Limits the referenced bytes of a subvolume; `None` removes the limit.
///
/// # Errors
/// EPERM; ENOTCONN where quotas are off; ENOENT for a group that does not exist; ENOTTY on another
/// file system than Btrfs.
pub fn set_limit(file: BorrowedFd<'_>, subvolume: u64, bytes: Option<u64>) -> io::Result<()> {
    // All ones means no limit to the kernel.
    let max_referenced = bytes.map_or(u64::MAX, |bytes| bytes.min(u64::MAX - 1));
    let mut limit = QgroupLimit {
        group: subvolume,
        flags: MAX_REFERENCED,
        max_referenced,
        max_exclusive: 0,
        reserved_referenced: 0,
        reserved_exclusive: 0,
    };
    // SAFETY: the command reads a struct btrfs_ioctl_qgroup_limit_args.
    unsafe { ioctl(file, QGROUP_LIMIT, (&raw mut limit).cast()) }
}
