//! The flags of files for lsattr(1) and chattr(1): a pool has none, and says so instead of refusing the
//! question, since programs that compare the flags of a copy with its original stop at a refusal.
//!
//! Called by `ioctl` of files and of the file system (FS_IOC_GETFLAGS and its kin, ioctl_iflags(2)).

use nacre_sys::ioctls::{EXTENDED_LEN, command};
use nacre_vfs::{Errno, Ioctl, Result};

/// Answers a question about flags, and takes a change that changes nothing.
///
/// # Errors
/// EOPNOTSUPP for a flag that is to be set, ENOTTY for other commands.
pub(super) fn ioctl(request: &Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
    let length = match request.command {
        command::GET_FLAGS => size_of::<u32>(),
        command::GET_EXTENDED => EXTENDED_LEN,
        command::SET_FLAGS | command::SET_EXTENDED if request.input.iter().any(|byte| *byte != 0) => {
            return Err(Errno::EOPNOTSUPP);
        }
        command::SET_FLAGS | command::SET_EXTENDED => 0,
        _ => return Err(Errno::ENOTTY),
    };
    output.get_mut(..length).ok_or(Errno::EINVAL)?.fill(0);
    Ok((0, length))
}
