//! Discarding a range of a block device (`BLKDISCARD`, include/uapi/linux/fs.h).
//!
//! Called by devices of pools. The content of the range is undefined afterwards.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `_IO(0x12, 119)`.
const BLKDISCARD: u32 = 0x1277;

/// Discards a range of a block device, bytes; both ends are sector-aligned.
///
/// # Errors
/// EOPNOTSUPP if the device does not support it, ENOTTY if it is no block device, EINVAL for an
/// unaligned range.
pub fn discard(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    let range = [offset, length];
    // SAFETY: the command reads two numbers of 64 bits, and they outlive the call.
    check(libc::c_long::from(unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) })).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_is_no_block_device() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(discard(file.as_fd(), 0, 4096).is_err());
    }
}
