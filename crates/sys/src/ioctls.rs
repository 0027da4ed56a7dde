//! The few ioctls that the host leaf forwards, each with its argument as a value.

use crate::check;
use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Command numbers of the calls made here (include/uapi/linux/fs.h). Those of requests are `nacre_vfs::Ioctl`'s.
mod command {
    /// Reads the file flags.
    pub(super) const GET_FLAGS: u32 = libc::FS_IOC_GETFLAGS as u32;
    /// Sets the file flags.
    pub(super) const SET_FLAGS: u32 = libc::FS_IOC_SETFLAGS as u32;
    /// Reads the inode's generation number.
    pub(super) const GET_VERSION: u32 = libc::FS_IOC_GETVERSION as u32;
    /// `FS_IOC_FSGETXATTR`: `_IOR('X', 31, struct fsxattr)`.
    pub(super) const GET_EXTENDED: u32 = 0x801c_581f;
    /// `FS_IOC_FSSETXATTR`: `_IOW('X', 32, struct fsxattr)`.
    pub(super) const SET_EXTENDED: u32 = 0x401c_5820;
    /// `FS_IOC_FIEMAP`: `_IOWR('f', 11, struct fiemap)`.
    pub(super) const MAP_EXTENTS: u32 = 0xc020_660b;
    /// `BLKGETSIZE64`: `_IOR(0x12, 114, size_t)`.
    pub(super) const BLOCK_SIZE: u32 = 0x8008_1272;
}

/// `sizeof(struct fsxattr)`.
pub const EXTENDED_LEN: usize = 28;

/// # Safety
/// `argument` points to what `command` reads and writes.
unsafe fn ioctl(file: BorrowedFd<'_>, command: u32, argument: *mut libc::c_void) -> io::Result<usize> {
    // SAFETY: as the caller vouches. The type of the number differs between C libraries, its bits
    // do not.
    check(unsafe { libc::ioctl(file.as_raw_fd(), command as _, argument) }.into())
}

/// Reads the file flags (`chattr(1)`).
///
/// # Errors
/// ENOTTY if the file system has none.
pub fn flags(file: BorrowedFd<'_>) -> io::Result<u32> {
    let mut flags: libc::c_long = 0;
    // SAFETY: the command writes an int, the room is a long as its number says.
    unsafe { ioctl(file, command::GET_FLAGS, (&raw mut flags).cast()) }?;
    let bytes = flags.to_ne_bytes();
    Ok(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// Sets the file flags.
///
/// # Errors
/// EPERM, EOPNOTSUPP, ENOTTY.
pub fn set_flags(file: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    let mut room: [u32; 2] = [flags, 0];
    // SAFETY: the command reads an int, the room is a long.
    unsafe { ioctl(file, command::SET_FLAGS, room.as_mut_ptr().cast()) }.map(drop)
}

/// Reads the inode's generation number.
///
/// # Errors
/// ENOTTY if the file system has none.
pub fn version(file: BorrowedFd<'_>) -> io::Result<u32> {
    let mut room: [u32; 2] = [0; 2];
    // SAFETY: the command writes an int, the room is a long.
    unsafe { ioctl(file, command::GET_VERSION, room.as_mut_ptr().cast()) }?;
    Ok(room[0])
}

/// Reads the extended flags, including the project id (`struct fsxattr`).
///
/// # Errors
/// ENOTTY if the file system has none.
pub fn extended(file: BorrowedFd<'_>) -> io::Result<[u8; EXTENDED_LEN]> {
    let mut room = [0_u32; EXTENDED_LEN / 4];
    // SAFETY: the command writes a struct fsxattr: seven 32-bit words.
    unsafe { ioctl(file, command::GET_EXTENDED, room.as_mut_ptr().cast()) }?;
    let mut bytes = [0; EXTENDED_LEN];
    for (to, word) in bytes.chunks_exact_mut(4).zip(room) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(bytes)
}

/// Sets the extended flags.
///
/// # Errors
/// EPERM, EINVAL, ENOTTY.
pub fn set_extended(file: BorrowedFd<'_>, value: &[u8; EXTENDED_LEN]) -> io::Result<()> {
    let mut room = [0_u32; EXTENDED_LEN / 4];
    for (word, bytes) in room.iter_mut().zip(value.chunks_exact(4)) {
        let mut copy = [0; 4];
        copy.copy_from_slice(bytes);
        *word = u32::from_ne_bytes(copy);
    }
    // SAFETY: the command reads a struct fsxattr: seven 32-bit words.
    unsafe { ioctl(file, command::SET_EXTENDED, room.as_mut_ptr().cast()) }.map(drop)
}

/// Whether extents are allocated for a file from `offset` on, written or not, including those
/// beyond its end.
///
/// # Errors
/// EOPNOTSUPP if the file system has no map of extents; EFBIG beyond the maximum file size.
pub fn has_extents_from(file: BorrowedFd<'_>, offset: u64) -> io::Result<bool> {
    // struct fiemap: start, length, then flags, extents found, room for extents, reserved. Without
    // room the extents are counted.
    let mut map: [u64; 4] = [offset, u64::MAX - offset, 0, 0];
    // SAFETY: the command reads and writes a struct fiemap, 32 bytes, and no extent behind it.
    unsafe { ioctl(file, command::MAP_EXTENTS, map.as_mut_ptr().cast()) }?;
    let words = map[2].to_ne_bytes();
    Ok(u32::from_ne_bytes([words[4], words[5], words[6], words[7]]) > 0)
}

/// `struct fiemap`, followed by the extents that one call returns (linux/fiemap.h).
#[repr(C)]
struct ExtentMap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    room: u32,
    reserved: u32,
    extents: [Extent; EXTENTS_PER_CALL],
}

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

const EXTENTS_PER_CALL: usize = 64;
/// `FIEMAP_EXTENT_LAST`.
const LAST_EXTENT: u32 = 1;
/// `FIEMAP_EXTENT_NOT_ALIGNED`, also set for content without blocks of its own.
const NOT_ALIGNED: u32 = 0x100;

/// Returns whole-block extents that are allocated for a file in a range, written or not, in order.
/// A very fragmented file is reported in part.
///
/// # Errors
/// EOPNOTSUPP if the file system has no map of extents.
pub fn extents(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    const MAX_CALLS: usize = 256;
    let mut found = Vec::new();
    let mut start = range.start;
    for _ in 0..MAX_CALLS {
        if start >= range.end {
            break;
        }
        let mut map = ExtentMap {
            start,
            length: range.end - start,
            flags: 0,
            mapped: 0,
            room: EXTENTS_PER_CALL as u32,
            reserved: 0,
            extents: [Extent::default(); EXTENTS_PER_CALL],
        };
        // SAFETY: the command reads and writes a struct fiemap and behind it as many extents as `room` says.
        unsafe { ioctl(file, command::MAP_EXTENTS, (&raw mut map).cast()) }?;
        let mapped = map.extents.get(..map.mapped as usize).unwrap_or_default();
        let aligned = mapped.iter().filter(|extent| extent.flags & NOT_ALIGNED == 0);
        found.extend(aligned.map(|extent| extent.logical..extent.logical.saturating_add(extent.length)));
        match mapped.last() {
            Some(last) if last.flags & LAST_EXTENT == 0 && last.length > 0 => {
                start = last.logical.saturating_add(last.length);
            }
            _ => break,
        }
    }
    Ok(found)
}

/// Returns the size of an open block device, bytes.
///
/// # Errors
/// ENOTTY if it is no block device.
pub fn block_device_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut size = 0_u64;
    // SAFETY: the command writes 64 bits.
    unsafe { ioctl(file, command::BLOCK_SIZE, (&raw mut size).cast()) }?;
    Ok(size)
}
