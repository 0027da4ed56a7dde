//! The attributes of an inode. Every operation on a file reads this row, so it is small: usual
//! values take no byte.
//!
//! Invariants: the type in the mode is one of [`FileType`]; nanoseconds are below 10^9; an inode of
//! a new file takes about 30 bytes, one with four different times about 50.
//!
//! After the attributes the row has the charge for the inode's rows. It is no attribute: only the
//! function that applies batches reads and writes it (`files/row_charges.rs`), so nothing in memory
//! can have an outdated figure. [`InodeRow::encode`] omits it, and [`InodeRow::decode`] skips it.

use super::{FileType, damaged, whole};
use crate::codec::{Reader, Writer};
use crate::error::PoolError;

/// Nanoseconds of a second.
const SECOND: u32 = 1_000_000_000;

const ACCESSED_IS_BORN: u64 = 1 << 0;
const MODIFIED_IS_BORN: u64 = 1 << 1;
const CHANGED_IS_MODIFIED: u64 = 1 << 2;
const HAS_DEVICE: u64 = 1 << 3;
const HAS_HINT: u64 = 1 << 4;
const HAS_FLAGS: u64 = 1 << 5;
const HAS_RECORD: u64 = 1 << 6;
const HAS_GENERATION: u64 = 1 << 7;
const HAS_ROW_CHARGE: u64 = 1 << 8;
const KNOWN: u64 = (1 << 9) - 1;

/// A point in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Seconds since 1970, negative before.
    pub seconds: i64,
    /// Nanoseconds after that second, below 10^9.
    pub nanoseconds: u32,
}

/// One of the inode's names: where a search for its path begins. A hard link may have others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameHint {
    /// The directory.
    pub directory: u64,
    /// The entry's sequence in it.
    pub sequence: u64,
}

/// Bits of [`InodeRow::flags`].
pub mod flags {
    /// Never changed (`chattr +i`).
    pub const IMMUTABLE: u32 = 1 << 0;
    /// Only appended to (`chattr +a`).
    pub const APPEND: u32 = 1 << 1;
    /// Not to be dumped (`chattr +d`).
    pub const NODUMP: u32 = 1 << 2;
    /// No access times (`chattr +A`).
    pub const NOATIME: u32 = 1 << 3;
    /// Written synchronously (`chattr +S`).
    pub const SYNC: u32 = 1 << 4;
    /// There are extended attributes: without it none are searched.
    pub const HAS_XATTRS: u32 = 1 << 16;
    /// One of them is an access control list.
    pub const HAS_ACL: u32 = 1 << 17;
    /// Some of its records may be shared with other files: freeing checks the reference counts.
    pub const SHARES_RECORDS: u32 = 1 << 18;
    /// Some of its records may have patches: without it none are searched.
    pub const HAS_PATCHES: u32 = 1 << 19;
    /// It was truncated, and rows of records after its end may still exist: they are removed before
    /// it grows.
    pub const CUT: u32 = 1 << 20;
}

/// The attributes of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeRow {
    /// Type and permissions, as `st_mode`.
    pub mode: u16,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Link count; for a directory 2 plus the number of directories in it.
    pub links: u32,
    /// Size in bytes; for a directory the number of names in it.
    pub size: u64,
    /// Space that its records and large attributes are charged, bytes (see
    /// [`crate::Pointer::charged`]).
    pub charged: u64,
    /// Access time (atime).
    pub accessed: Timestamp,
    /// Modification time (mtime).
    pub modified: Timestamp,
    /// Change time (ctime).
    pub changed: Timestamp,
    /// Birth time.
    pub born: Timestamp,
    /// Device number of a device file, as in Linux; otherwise 0.
    pub device: u64,
    /// Bits of [`flags`].
    pub flags: u32,
    /// Not in use: 0. Inodes with the same number, the first of which was lost by a crash, are
    /// distinguished by their birth times.
    pub generation: u64,
    /// The record size of a regular file as a power of two, fixed when it grew beyond one record; 0
    /// before that.
    pub record_shift: u8,
    /// One of its names.
    pub hint: Option<NameHint>,
}

impl InodeRow {
    /// A new inode: no content, no flags, all times the same.
    #[must_use]
    pub fn new(file_type: FileType, permissions: u16, now: Timestamp) -> Self {
        Self {
            mode: file_type.mode_bits() | (permissions & 0o7777),
            uid: 0,
            gid: 0,
            links: if file_type == FileType::Directory { 2 } else { 1 },
            size: 0,
            charged: 0,
            accessed: now,
            modified: now,
            changed: now,
            born: now,
            device: 0,
            flags: 0,
            generation: 0,
            record_shift: 0,
            hint: None,
        }
    }

    /// Its type; `None` only if the mode was set to one that cannot be stored.
    #[must_use]
    pub fn file_type(&self) -> Option<FileType> {
        FileType::of_mode(self.mode)
    }

    /// Encodes the row, without a charge for rows.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.encode_charged(0)
    }

    /// Encodes the row with the charge for the inode's rows, bytes; 0 for none.
    #[must_use]
    pub fn encode_charged(&self, rows: u64) -> Vec<u8> {
        let layout = self.layout() | if rows == 0 { 0 } else { HAS_ROW_CHARGE };
        let mut to = Writer::default();
        to.varint(layout);
        to.u16(self.mode);
        to.varint(self.uid.into());
        to.varint(self.gid.into());
        to.varint(self.links.into());
        to.varint(self.size);
        to.varint(self.charged);
        write_time(&mut to, self.born, Timestamp::default());
        if layout & ACCESSED_IS_BORN == 0 {
            write_time(&mut to, self.accessed, self.born);
        }
        if layout & MODIFIED_IS_BORN == 0 {
            write_time(&mut to, self.modified, self.born);
        }
        if layout & CHANGED_IS_MODIFIED == 0 {
            write_time(&mut to, self.changed, self.born);
        }
        for (bit, value) in
            [(HAS_DEVICE, self.device), (HAS_FLAGS, self.flags.into()), (HAS_GENERATION, self.generation)]
        {
            if layout & bit != 0 {
                to.varint(value);
            }
        }
        if layout & HAS_RECORD != 0 {
            to.u8(self.record_shift);
        }
        if let Some(hint) = self.hint {
            to.varint(hint.directory);
            to.varint(hint.sequence);
        }
        if rows != 0 {
            to.varint(rows);
        }
        to.finish()
    }

    fn layout(&self) -> u64 {
        [
            (ACCESSED_IS_BORN, self.accessed == self.born),
            (MODIFIED_IS_BORN, self.modified == self.born),
            (CHANGED_IS_MODIFIED, self.changed == self.modified),
            (HAS_DEVICE, self.device != 0),
            (HAS_HINT, self.hint.is_some()),
            (HAS_FLAGS, self.flags != 0),
            (HAS_RECORD, self.record_shift != 0),
            (HAS_GENERATION, self.generation != 0),
        ]
        .iter()
        .fold(0, |layout, (bit, set)| if *set { layout | bit } else { layout })
    }

    /// Decodes the row.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        Self::decode_charged(bytes).map(|(row, _)| row)
    }

    /// Decodes the row, and the charge for the inode's rows: 0 in inodes last written by an older
    /// version.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode_charged(bytes: &[u8]) -> Result<(Self, u64), PoolError> {
        whole(bytes, Self::read)
    }

    fn read(from: &mut Reader<'_>) -> Result<(Self, u64), PoolError> {
        let layout = from.varint()?;
        if layout & !KNOWN != 0 {
            return Err(damaged("unknown fields in an inode"));
        }
        let mode = from.u16()?;
        if FileType::of_mode(mode).is_none() {
            return Err(damaged("unknown type of file"));
        }
        let (uid, gid, links) = (number32(from)?, number32(from)?, number32(from)?);
        let (size, charged) = (from.varint()?, from.varint()?);
        let born = read_time(from, Timestamp::default())?;
        let accessed = if layout & ACCESSED_IS_BORN == 0 { read_time(from, born)? } else { born };
        let modified = if layout & MODIFIED_IS_BORN == 0 { read_time(from, born)? } else { born };
        let changed = if layout & CHANGED_IS_MODIFIED == 0 { read_time(from, born)? } else { modified };
        let device = if layout & HAS_DEVICE == 0 { 0 } else { from.varint()? };
        let flags = if layout & HAS_FLAGS == 0 { 0 } else { number32(from)? };
        let generation = if layout & HAS_GENERATION == 0 { 0 } else { from.varint()? };
        let record_shift = if layout & HAS_RECORD == 0 { 0 } else { from.u8()? };
        if record_shift != 0 && !(9..=24).contains(&record_shift) {
            return Err(damaged("the record size of an inode"));
        }
        let hint = if layout & HAS_HINT == 0 {
            None
        } else {
            Some(NameHint { directory: from.varint()?, sequence: from.varint()? })
        };
        let rows = if layout & HAS_ROW_CHARGE == 0 { 0 } else { from.varint()? };
        if i64::try_from(rows).is_err() {
            return Err(damaged("an inode that is charged too much"));
        }
        let row = Self {
            mode,
            uid,
            gid,
            links,
            size,
            charged,
            accessed,
            modified,
            changed,
            born,
            device,
            flags,
            generation,
            record_shift,
            hint,
        };
        Ok((row, rows))
    }
}

fn number32(from: &mut Reader<'_>) -> Result<u32, PoolError> {
    u32::try_from(from.varint()?).map_err(|_| damaged("a number of more than 32 bits"))
}

/// Encodes a time as its distance from another: seconds, then nanoseconds of the second.
fn write_time(to: &mut Writer, time: Timestamp, base: Timestamp) {
    let distance = time.seconds.wrapping_sub(base.seconds);
    to.varint(((distance << 1) ^ (distance >> 63)) as u64);
    to.varint(time.nanoseconds.into());
}

fn read_time(from: &mut Reader<'_>, base: Timestamp) -> Result<Timestamp, PoolError> {
    let folded = from.varint()?;
    let distance = (folded >> 1) as i64 ^ -((folded & 1) as i64);
    let nanoseconds = number32(from)?;
    if nanoseconds >= SECOND {
        return Err(damaged("nanoseconds of more than a second"));
    }
    Ok(Timestamp { seconds: base.seconds.wrapping_add(distance), nanoseconds })
}
