//! Project quotas: a limit for all files with one project id (quotactl_fd(2),
//! ioctl_xfs_fsgetxattr(2)).
//!
//! Called by the quota engine of cages. The same calls work on ext4 and XFS.

use crate::{check, ioctls};
use std::{
    ffi::CStr,
    io, mem,
    os::fd::{AsRawFd, BorrowedFd},
};

/// The same number on every supported architecture (the common part of the system call tables);
/// Linux 5.14.
const QUOTACTL_FD: libc::c_long = 443;
/// `PRJQUOTA`.
const PROJECT: u32 = 2;
/// `Q_GETQUOTA`, `Q_SETQUOTA` (linux/quota.h).
const GET_QUOTA: u32 = 0x80_0007;
const SET_QUOTA: u32 = 0x80_0008;
/// `Q_XGETQSTATV` (linux/dqblk_xfs.h); ext4 supports it, too.
const GET_STATE: u32 = 0x5808;
/// `FS_QUOTA_PDQ_ACCT`, `FS_QUOTA_PDQ_ENFD`.
const STATE_COUNTED: u16 = 1 << 4;
const STATE_ENFORCED: u16 = 1 << 5;
/// `QIF_BLIMITS`, `QIF_ILIMITS`.
const VALID_LIMITS: u32 = 1 | 4;
/// Unit of limits: `QIF_DQBLKSIZE`.
pub const LIMIT_UNIT: u64 = 1024;

/// `FS_XFLAG_PROJINHERIT`: new files in this directory belong to its project.
const INHERIT: u32 = 0x200;

/// `struct if_dqblk`.
#[repr(C)]
#[derive(Default)]
struct Block {
    block_hard: u64,
    block_soft: u64,
    space: u64,
    inode_hard: u64,
    inode_soft: u64,
    inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
    pad: u32,
}

/// `struct fs_quota_statv`: version, padding, flags, and unused fields.
#[repr(C, align(8))]
struct QuotaState {
    version: i8,
    pad: u8,
    flags: u16,
    rest: [u8; 156],
}

const _: () = assert!(mem::size_of::<Block>() == 72 && mem::size_of::<QuotaState>() == 160);

/// # Safety
/// `argument` points to what `command` reads and writes.
unsafe fn quotactl(file: BorrowedFd<'_>, command: u32, id: u32, argument: *mut libc::c_void) -> io::Result<()> {
    let command = command << 8 | PROJECT;
    // SAFETY: as the caller vouches.
    check(unsafe { libc::syscall(QUOTACTL_FD, file.as_raw_fd(), command, id, argument) }).map(drop)
}

/// State of project quotas on a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// Usage is counted.
    pub counted: bool,
    /// Limits are enforced.
    pub enforced: bool,
}

/// Reads the quota state of the file system that contains `file`.
///
/// # Errors
/// ENOSYS, EOPNOTSUPP, EINVAL, ESRCH if the kernel or the file system has no quotas; EPERM.
pub fn state(file: BorrowedFd<'_>) -> io::Result<Quotas> {
    let mut state = QuotaState { version: 1, pad: 0, flags: 0, rest: [0; 156] };
    // SAFETY: the command reads the version and writes a struct fs_quota_statv.
    unsafe { quotactl(file, GET_STATE, 0, (&raw mut state).cast()) }?;
    Ok(Quotas { counted: state.flags & STATE_COUNTED != 0, enforced: state.flags & STATE_ENFORCED != 0 })
}

/// Limits and usage of a project.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Limit, bytes; 0: none.
    pub limit: u64,
    /// Bytes in use.
    pub used: u64,
    /// Limit of inodes; 0: none.
    pub inode_limit: u64,
    /// Inodes in use.
    pub inodes: u64,
}

/// Reads limits and usage of a project; zeros for a project without files and limits.
///
/// # Errors
/// ESRCH where quotas are off; EPERM.
pub fn usage(file: BorrowedFd<'_>, project: u32) -> io::Result<Usage> {
    let mut block = Block::default();
    // SAFETY: the command writes a struct if_dqblk.
    match unsafe { quotactl(file, GET_QUOTA, project, (&raw mut block).cast()) } {
        Ok(()) => Ok(Usage {
            limit: block.block_hard.saturating_mul(LIMIT_UNIT),
            used: block.space,
            inode_limit: block.inode_hard,
            inodes: block.inodes,
        }),
        // XFS has no record of this project.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Usage::default()),
        Err(error) => Err(error),
    }
}

/// Sets the hard limits of a project: bytes (rounded down to [`LIMIT_UNIT`]) and inodes; 0 is none.
///
/// # Errors
/// ESRCH where quotas are off; EPERM; ERANGE for limits beyond what the file system can store.
pub fn set_limits(file: BorrowedFd<'_>, project: u32, bytes: u64, inodes: u64) -> io::Result<()> {
    let mut block =
        Block { block_hard: bytes / LIMIT_UNIT, inode_hard: inodes, valid: VALID_LIMITS, ..Block::default() };
    // SAFETY: the command reads a struct if_dqblk.
    unsafe { quotactl(file, SET_QUOTA, project, (&raw mut block).cast()) }
}

/// Project of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The project; 0: none.
    pub project: u32,
    /// Whether new files in this directory belong to it, too.
    pub inherited: bool,
}

/// Reads the project of a file or directory.
///
/// # Errors
/// ENOTTY, EOPNOTSUPP if the file system has no projects.
pub fn membership(file: BorrowedFd<'_>) -> io::Result<Membership> {
    let value = ioctls::extended(file)?;
    let flags = word(&value, 0);
    Ok(Membership { project: word(&value, 12), inherited: flags & INHERIT != 0 })
}

/// Moves a file or directory (`inherited` may only be set for these) to a project.
///
/// # Errors
/// EPERM for immutable files; EDQUOT; EOPNOTSUPP if the file system has no projects; as
/// [`membership`].
pub fn set_membership(file: BorrowedFd<'_>, membership: Membership) -> io::Result<()> {
    let mut value = ioctls::extended(file)?;
    let flags = if membership.inherited { word(&value, 0) | INHERIT } else { word(&value, 0) & !INHERIT };
    value[..4].copy_from_slice(&flags.to_ne_bytes());
    value[12..16].copy_from_slice(&membership.project.to_ne_bytes());
    ioctls::set_extended(file, &value)
}

/// `file_getattr`, `file_setattr`: the same numbers on every supported architecture; Linux 6.17.
const FILE_GETATTR: libc::c_long = 468;
const FILE_SETATTR: libc::c_long = 469;

/// `struct file_attr`.
#[repr(C)]
#[derive(Default)]
struct FileAttributes {
    flags: u64,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
}

const _: () = assert!(mem::size_of::<FileAttributes>() == 24);

/// Reads the project of a name in a directory: also of links, sockets and devices, which cannot be
/// opened for that.
///
/// # Errors
/// ENOSYS before Linux 6.17; EOPNOTSUPP if the file system has no projects; ENOENT.
pub fn membership_of(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<u32> {
    Ok(attributes(directory, name)?.project)
}

/// Moves the file with this name in a directory, not a directory itself, to a project.
///
/// # Errors
/// As [`membership_of`]; EDQUOT; EPERM.
pub fn set_membership_of(directory: BorrowedFd<'_>, name: &CStr, project: u32) -> io::Result<()> {
    let mut value = FileAttributes { project, ..attributes(directory, name)? };
    // SAFETY: the structure and the name live during the call, and the structure's size is passed.
    unsafe { at(FILE_SETATTR, directory, name, &mut value) }
}

fn attributes(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<FileAttributes> {
    let mut value = FileAttributes::default();
    // SAFETY: the structure and the name live during the call, and the structure's size is passed.
    unsafe { at(FILE_GETATTR, directory, name, &mut value) }?;
    Ok(value)
}

/// # Safety
/// `call` is one of the two above.
unsafe fn at(call: libc::c_long, directory: BorrowedFd<'_>, name: &CStr, value: &mut FileAttributes) -> io::Result<()> {
    let (directory, size) = (directory.as_raw_fd(), mem::size_of::<FileAttributes>());
    // SAFETY: as the caller vouches; a link at the end is not followed.
    check(unsafe {
        libc::syscall(call, directory, name.as_ptr(), value as *mut FileAttributes, size, libc::AT_SYMLINK_NOFOLLOW)
    })
    .map(drop)
}

fn word(value: &[u8; ioctls::EXTENDED_LEN], at: usize) -> u32 {
    let mut bytes = [0; 4];
    for (to, from) in bytes.iter_mut().zip(value.iter().skip(at)) {
        *to = *from;
    }
    u32::from_ne_bytes(bytes)
}
