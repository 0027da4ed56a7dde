//! What can be done with the descriptor of any file: opened again, cut, asked for its flags.
//!
//! Called by `open.rs`, `file.rs`, `change.rs` and `locks.rs`. Knows no nodes: whoever calls has
//! seen to it that the descriptor is that of the file that is meant.

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

/// Changes the length of a file, and leaves its set-id bits as they are.
pub(super) fn cut(file: BorrowedFd<'_>, size: u64) -> Result<()> {
    let cut = || rustix::fs::ftruncate(file, size).map_err(errno);
    if has_set_id(file) { credentials::with_set_id_kept(cut)? } else { cut() }
}

/// Opens the file behind a descriptor once more, with its own position and locks.
pub(super) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(proc_path(file), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()).map_err(errno)
}

/// Forwards the commands whose argument is a plain value (file flags, extended flags, inode
/// version); ENOTTY for all others.
pub(super) fn forward(file: BorrowedFd<'_>, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
    use ioctls::command;
    let mut answer = |bytes: &[u8]| {
        output.get_mut(..bytes.len()).ok_or(Errno::EINVAL)?.copy_from_slice(bytes);
        Ok((0, bytes.len()))
    };
    match request.command {
        command::GET_FLAGS => answer(&ioctls::flags(file)?.to_ne_bytes()),
        command::GET_VERSION => answer(&ioctls::version(file)?.to_ne_bytes()),
        command::GET_EXTENDED => answer(&ioctls::extended(file)?),
        command::SET_FLAGS => {
            let value = request.input.first_chunk().ok_or(Errno::EINVAL)?;
            ioctls::set_flags(file, u32::from_ne_bytes(*value))?;
            Ok((0, 0))
        }
        command::SET_EXTENDED => {
            ioctls::set_extended(file, request.input.first_chunk().ok_or(Errno::EINVAL)?)?;
            Ok((0, 0))
        }
        _ => Err(Errno::ENOTTY),
    }
}
