//! Positions in directories of a host file system, and ext4's shortened to 31 bits.
//!
//! Called by `listing.rs`. A 64-bit process gets positions of 63 bits from ext4: the hash of a name, whose upper 31 bits
//! are what a 32-bit process gets (`hash2pos()`, Linux fs/ext4/dir.c). FUSE does not pass on which kind of process asks,
//! and the kernel shares one listing among all of them, so all get 31 bits.
//!
//! Invariants: positions ascend in a listing, also where names agree in these 31 bits (the later one gets the next free
//! number); a listing that continues at a position without the descriptor that gave it leaves no name out, as long as at
//! most [`NEAR`] names agree. It repeats names only where some agree, or where the next name has been removed.
//! Positions of 63 bits, from a version of nacre that handed these out, stay what they are until their listing ends.

use super::errno;
use nacre_sys::directory::{self, DirRecord};
use nacre_vfs::Result;
use rustix::fs::SeekFrom;
use std::os::fd::BorrowedFd;

/// `EXT4_SUPER_MAGIC` (Linux include/uapi/linux/magic.h), also that of ext2 and ext3.
const EXT4_MAGIC: u64 = 0xef53;

/// The bits of a position that are left out.
const LEFT_OUT: u32 = 32;

/// The position behind the last name (`EXT4_HTREE_EOF_32BIT`).
const END: u64 = (1 << 31) - 1;

/// The largest position before that. The numbers between them are room for names that agree, and for the positions of `.` and
/// `..` in the FUSE front end.
const LAST: u64 = END - 31;

/// The most names that agree in 31 bits for which a listing continues without leaving one out.
const NEAR: u64 = 31;

/// Room for the first records of a directory, bytes.
const FIRST: usize = 1024;

/// What the positions of a file system are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Positions {
    /// Handed out as they are.
    Own,
    /// ext4's: hashes of 63 bits, or small numbers in directories without an index.
    Hashed,
    /// They cannot be handed out: records are counted instead.
    Counted,
}

impl Positions {
    /// What positions are on the file system of an open directory, as long as nothing else is found out.
    ///
    /// # Errors
    /// The host's, of fstatfs(2).
    pub(super) fn of(directory: BorrowedFd<'_>) -> Result<Self> {
        let magic = rustix::fs::fstatfs(directory).map_err(errno)?.f_type;
        Ok(if u64::try_from(magic) == Ok(EXT4_MAGIC) { Self::Hashed } else { Self::Own })
    }
}

/// Whether a position was handed out as the host's own, of more than 31 bits.
pub(super) fn is_unshortened(position: u64) -> bool {
    position > END
}

/// Whether the position after a record is a hash.
pub(super) fn is_long(record: &DirRecord<'_>) -> bool {
    record.next > i64::from(i32::MAX)
}

/// The 31 bits of a hash.
fn upper(hash: u64) -> u64 {
    let upper = hash >> LEFT_OUT;
    if upper >= END { END } else { upper.min(LAST) }
}

/// The position that is handed out for a hash, behind the position handed out before it.
pub(super) fn shortened(hash: u64, before: u64) -> u64 {
    upper(hash).max(before + 1)
}

/// The records in a buffer that [`directory::read`] has filled.
fn records(bytes: &[u8]) -> impl Iterator<Item = DirRecord<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let record = directory::first(rest)?;
        rest = rest.get(record.length..)?;
        Some(record)
    })
}

/// Fills a buffer from a position of the host on, and returns how many bytes it has then.
fn read_from(directory: BorrowedFd<'_>, start: u64, buffer: &mut [u8]) -> Result<usize> {
    rustix::fs::seek(directory, SeekFrom::Start(start)).map_err(errno)?;
    Ok(directory::read(directory, buffer)?)
}

/// Where a listing continues in a buffer.
pub(super) struct Continued {
    /// The end of the records in the buffer, bytes.
    pub(super) end: usize,
    /// Where the first record begins that is handed out.
    pub(super) start: usize,
    /// The position before that record, as it is handed out.
    pub(super) position: u64,
    /// No name is repeated.
    pub(super) is_exact: bool,
}

/// Seeks in an ext4 directory to a position that was shortened, and fills a buffer from there on. `None` in a directory
/// whose positions are no hashes: nothing was done there but reading.
///
/// # Errors
/// The host's.
pub(super) fn seek(directory: BorrowedFd<'_>, from: u64, buffer: &mut [u8]) -> Result<Option<Continued>> {
    if is_unshortened(from) {
        return Ok(None);
    }
    let mut first = vec![0; FIRST];
    let length = read_from(directory, 0, &mut first)?;
    if !records(first.get(..length).unwrap_or_default()).any(|record| is_long(&record)) {
        return Ok(None);
    }
    // The first name at the position or behind it: records have the hashes of the names that follow them only.
    let length = read_from(directory, from << LEFT_OUT, &mut first)?;
    let behind = directory::first(first.get(..length).unwrap_or_default());
    let near = from.saturating_sub(NEAR);
    let end = read_from(directory, near << LEFT_OUT, buffer)?;
    let (mut start, mut position) = (0, near);
    for record in records(buffer.get(..end).unwrap_or_default()) {
        if behind.as_ref().is_some_and(|behind| behind.name == record.name) {
            break;
        }
        start += record.length;
        position = shortened(record.next.cast_unsigned(), position);
    }
    let is_exact = start == 0 || position == from;
    Ok(Some(match is_exact {
        true => Continued { end, start, position: from, is_exact },
        false => Continued { end, start: 0, position: near, is_exact },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_have_31_bits_and_ascend() {
        assert_eq!(shortened(0x408d_99c7_30d8_46be, 0), 0x408d_99c7);
        assert_eq!(shortened(0x408d_99c7_ffff_ffff, 0x408d_99c7), 0x408d_99c8, "names that agree");
        assert_eq!(shortened(0, 0), 1, "0 is the beginning");
        assert_eq!(shortened(i64::MAX.cast_unsigned(), 0x408d_99c7), END);
        assert_eq!(shortened(0x7fff_fffe << LEFT_OUT, 0), LAST);
        assert_eq!(shortened(0x7fff_fffe << LEFT_OUT, LAST), LAST + 1);
    }
}
