//! The flags of files (lsattr(1), chattr(1); ioctl_iflags(2)): immutable, append-only, no access times, no dump.
//!
//! Called by `ioctl` of files and of the file system (FS_IOC_GETFLAGS and its kin), and by the
//! operations that an immutable or append-only file refuses with EPERM; names are checked by
//! `nacre_pool` (files/protection.rs). The kernel checks before the request that the caller may
//! change flags (owner, CAP_FOWNER, CAP_LINUX_IMMUTABLE).

use super::mounted_tree::{FileNode, Tree};
use super::translate::{errno, kind_of};
use nacre_pool::files::{AttributeChange, FlagChange};
use nacre_pool::rows::InodeRow;
use nacre_pool::rows::inode::flags::{APPEND, IMMUTABLE, NOATIME, NODUMP};
use nacre_vfs::{AllocateMode, ChangeTime, Errno, Ioctl, Kind, OpenFlags, Result, SetAttr, SetTime};

/// `sizeof(struct fsxattr)`.
const EXTENDED_LEN: usize = 28;
/// The flags that files can have.
const SUPPORTED: u32 = IMMUTABLE | APPEND | NODUMP | NOATIME;

/// One flag in its three numberings.
struct Flag {
    /// In an inode's row.
    stored: u32,
    /// `FS_*_FL` (linux/fs.h).
    plain: u32,
    /// `FS_XFLAG_*`.
    extended: u32,
}

const FLAGS: [Flag; 4] = [
    Flag { stored: IMMUTABLE, plain: 0x10, extended: 0x08 },
    Flag { stored: APPEND, plain: 0x20, extended: 0x10 },
    Flag { stored: NODUMP, plain: 0x40, extended: 0x80 },
    Flag { stored: NOATIME, plain: 0x80, extended: 0x40 },
];

fn shown(stored: u32, number: fn(&Flag) -> u32) -> u32 {
    FLAGS.iter().filter(|flag| stored & flag.stored != 0).map(number).sum()
}

/// The stored flags for those of a caller; EOPNOTSUPP for one that files cannot have.
fn stored(asked: u32, number: fn(&Flag) -> u32) -> Result<u32> {
    let flags = FLAGS.iter().filter(|flag| asked & number(flag) != 0);
    let stored = flags.map(|flag| flag.stored).sum();
    if shown(stored, number) == asked { Ok(stored) } else { Err(Errno::EOPNOTSUPP) }
}

/// Returns the flags of a file of these files, or changes them.
///
/// The caller has checked that the tree is live: a check here would wait for the end of a rollback that waits for a
/// caller inside of [`Passage::enter`](super::passage::Passage::enter).
///
/// # Errors
/// EOPNOTSUPP for flags that files cannot have; ENOTTY for other commands and other kinds of files.
pub(super) fn ioctl(
    files: &Tree,
    file_node: &FileNode,
    request: &Ioctl<'_>,
    output: &mut [u8],
) -> Result<(i32, usize)> {
    let row = files.attributes_without_room(&file_node.inode).map_err(errno)?;
    if !matches!(kind_of(&row), Kind::File | Kind::Directory) {
        return Err(Errno::ENOTTY);
    }
    let mut answer = |value: u32, length: usize| {
        let output = output.get_mut(..length).ok_or(Errno::EINVAL)?;
        output.fill(0);
        output.get_mut(..4).ok_or(Errno::EINVAL)?.copy_from_slice(&value.to_ne_bytes());
        Ok((0, length))
    };
    let first = || request.input.first_chunk().map(|chunk| u32::from_ne_bytes(*chunk)).ok_or(Errno::EINVAL);
    let new = match request.command {
        Ioctl::GET_FLAGS => return answer(shown(row.flags, |flag| flag.plain), size_of::<u32>()),
        Ioctl::GET_EXTENDED => return answer(shown(row.flags, |flag| flag.extended), EXTENDED_LEN),
        Ioctl::SET_FLAGS => stored(first()?, |flag| flag.plain)?,
        // Neither extent sizes nor projects.
        Ioctl::SET_EXTENDED if request.input.iter().skip(4).any(|byte| *byte != 0) => return Err(Errno::EOPNOTSUPP),
        Ioctl::SET_EXTENDED => stored(first()?, |flag| flag.extended)?,
        _ => return Err(Errno::ENOTTY),
    };
    if file_node.tree.is_snapshot() {
        return Err(Errno::EROFS);
    }
    if new == row.flags & SUPPORTED {
        return Ok((0, 0));
    }
    let flags = Some(FlagChange { mask: SUPPORTED, bits: new });
    files.set_attributes(&file_node.inode, &AttributeChange { flags, ..Default::default() }).map_err(errno)?;
    Ok((0, 0))
}

/// Checks whether a file may be opened with these flags (`may_open` of Linux).
///
/// # Errors
/// EPERM if not.
pub(super) fn check_open(row: &InodeRow, flags: OpenFlags) -> Result<()> {
    let appends = flags.raw() & rustix::fs::OFlags::APPEND.bits() != 0;
    let changes = flags.writes() || flags.truncates();
    let refused = row.flags & IMMUTABLE != 0 && changes
        || row.flags & APPEND != 0 && (flags.truncates() || flags.writes() && !appends);
    if refused { Err(Errno::EPERM) } else { Ok(()) }
}

/// Whether attributes may change so.
///
/// # Errors
/// EPERM if not.
pub(super) fn check_change(row: &InodeRow, change: &SetAttr) -> Result<()> {
    if row.flags & refusing(change) != 0 { Err(Errno::EPERM) } else { Ok(()) }
}

/// The flags that refuse a change of attributes (`notify_change` of Linux).
pub(super) fn refusing(change: &SetAttr) -> u32 {
    // A kernel that collects writes keeps the modification time itself: it sends its own beside the time of change,
    // for collected writes and where a caller wants the time of now. A caller's own one without an access time
    // cannot be told from it.
    let by_kernel = change.ctime != ChangeTime::default();
    let is_set = |time: Option<SetTime>| time.is_some_and(|time| time != SetTime::Now);
    let sets_time = is_set(change.atime) || is_set(change.mtime) && !by_kernel;
    let touches = change.atime.is_some() || change.mtime.is_some() && !by_kernel;
    let changes = change.mode.is_some() || change.uid.is_some() || change.gid.is_some() || change.size.is_some();
    if changes || sets_time {
        IMMUTABLE | APPEND
    } else if touches {
        IMMUTABLE
    } else {
        0
    }
}

/// Checks whether space may be allocated or released (`vfs_fallocate` of Linux).
///
/// # Errors
/// EPERM if not.
pub(super) fn check_allocate(row: &InodeRow, mode: AllocateMode) -> Result<()> {
    let only_adds = mode.0 & !AllocateMode::KEEP_SIZE == 0;
    let refused = row.flags & IMMUTABLE != 0 || row.flags & APPEND != 0 && !only_adds;
    if refused { Err(Errno::EPERM) } else { Ok(()) }
}
