//! Operations on the descriptor of any file: reopen, truncate, file flags.
//!
//! Called by `open.rs`, `file.rs`, `change.rs` and `locks.rs`. Knows no nodes: the caller has
//! checked that the descriptor belongs to the intended file.

use super::{errno, stat};
use nacre_sys::{credentials, inode::proc_path, ioctls};
use nacre_vfs::{Errno, Ioctl, Result};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Set-user-id and set-group-id.
pub(super) const SET_ID: u32 = 0o6000;

/// Whether an open file has set-id bits.
pub(super) fn has_set_id(file: BorrowedFd<'_>) -> bool {
    stat::of_file_timeless(file).is_ok_and(|statx| u32::from(statx.stx_mode) & SET_ID != 0)
}

/// Truncates or extends a file without a change of its set-id bits.
pub(super) fn cut(file: BorrowedFd<'_>, size: u64) -> Result<()> {
    let cut = || rustix::fs::ftruncate(file, size).map_err(errno);
    if has_set_id(file) { credentials::with_set_id_kept(cut)? } else { cut() }
}

/// Reopens the file behind a descriptor, with its own position and locks.
pub(super) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(proc_path(file), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()).map_err(errno)
}

/// `FS_JOURNAL_DATA_FL` and `FS_PROJINHERIT_FL` (linux/fs.h): file systems require capabilities to
/// change journaling, and charge a project's quota by the caller. Our own capabilities would be
/// checked, not the caller's.
const GUARDED: u32 = 0x4000 | 0x2000_0000;

/// The project of extended flags, and whether new files inherit it (`struct fsxattr`).
#[derive(PartialEq, Eq)]
struct Project {
    number: [u8; 4],
    inherited: bool,
}

fn project(extended: &[u8; ioctls::EXTENDED_LEN]) -> Project {
    /// `FS_XFLAG_PROJINHERIT`.
    const INHERIT: u32 = 0x200;
    let [a, b, c, d, _, _, _, _, _, _, _, _, number @ ..] = *extended;
    let [w, x, y, z, ..] = number;
    Project { number: [w, x, y, z], inherited: u32::from_ne_bytes([a, b, c, d]) & INHERIT != 0 }
}

/// Forwards the commands whose argument is a plain value (file flags, extended flags, inode
/// version); ENOTTY for all others.
pub(super) fn forward(file: BorrowedFd<'_>, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
    let mut answer = |bytes: &[u8]| {
        output.get_mut(..bytes.len()).ok_or(Errno::EINVAL)?.copy_from_slice(bytes);
        Ok((0, bytes.len()))
    };
    match request.command {
        Ioctl::GET_FLAGS => answer(&ioctls::flags(file)?.to_ne_bytes()),
        Ioctl::GET_VERSION => answer(&ioctls::version(file)?.to_ne_bytes()),
        Ioctl::GET_EXTENDED => answer(&ioctls::extended(file)?),
        Ioctl::SET_FLAGS => {
            let value = u32::from_ne_bytes(*request.input.first_chunk().ok_or(Errno::EINVAL)?);
            if (value ^ ioctls::flags(file)?) & GUARDED != 0 {
                return Err(Errno::EPERM);
            }
            ioctls::set_flags(file, value)?;
            Ok((0, 0))
        }
        Ioctl::SET_EXTENDED => {
            let value = request.input.first_chunk().ok_or(Errno::EINVAL)?;
            if project(value) != project(&ioctls::extended(file)?) {
                return Err(Errno::EPERM);
            }
            ioctls::set_extended(file, value)?;
            Ok((0, 0))
        }
        _ => Err(Errno::ENOTTY),
    }
}
