//! The flags of files for lsattr(1) and chattr(1): a pool has none, and says so instead of refusing the
//! question, since programs that compare the flags of a copy with its original stop at a refusal.
//!
//! Called by `ioctl` of files and of the file system (FS_IOC_GETFLAGS and its kin, ioctl_iflags(2)). A change comes from the
//! owner or with CAP_FOWNER alone: the kernel refuses others before it asks (vfs_fileattr_set, Linux 5.13).

use nacre_vfs::{Errno, Ioctl, Result};

/// `FS_IOC_GETFLAGS` of a 64-bit caller: `_IOR('f', 1, long)` (linux/fs.h).
const GET_FLAGS: u32 = 0x8008_6601;
/// `FS_IOC_SETFLAGS` of a 64-bit caller: `_IOW('f', 2, long)`.
const SET_FLAGS: u32 = 0x4008_6602;
/// `FS_IOC_FSGETXATTR`: `_IOR('X', 31, struct fsxattr)`.
const GET_EXTENDED: u32 = 0x801c_581f;
/// `FS_IOC_FSSETXATTR`: `_IOW('X', 32, struct fsxattr)`.
const SET_EXTENDED: u32 = 0x401c_5820;
/// `sizeof(struct fsxattr)`.
const EXTENDED_LEN: usize = 28;

/// Answers a question about flags, and takes a change that changes nothing.
///
/// # Errors
/// EOPNOTSUPP for a flag that is to be set, ENOTTY for other commands.
pub(super) fn ioctl(request: &Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
    let length = match request.command {
        GET_FLAGS => size_of::<u32>(),
        GET_EXTENDED => EXTENDED_LEN,
        SET_FLAGS | SET_EXTENDED if request.input.iter().any(|byte| *byte != 0) => {
            return Err(Errno::EOPNOTSUPP);
        }
        SET_FLAGS | SET_EXTENDED => 0,
        _ => return Err(Errno::ENOTTY),
    };
    output.get_mut(..length).ok_or(Errno::EINVAL)?.fill(0);
    Ok((0, length))
}
