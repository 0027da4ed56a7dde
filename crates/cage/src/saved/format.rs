//! Encoding and decoding of checkpoint and log. Pure. All numbers are little-endian;
//! `docs/cage-state.md` shows the layout.
//!
//! Invariant: decoding checks every length and count against the available bytes before it uses
//! them.

use super::{super::ledger::Owner, BootId};
use crate::ledger::{Sum, Sums};
use nacre_vfs::FileId;
use std::{io, ops::RangeInclusive};

/// The last byte is the version.
const CHECKPOINT_MAGIC: [u8; 8] = *b"nacreCP\x01";
const LOG_MAGIC: [u8; 8] = *b"nacreCL\x01";

/// Bytes before the body of a checkpoint: magic, length, checksum.
const CHECKPOINT_HEAD: usize = 16;
const CLEAN: u32 = 1;
const EXACT: u32 = 2;

/// Length of a log's header, bytes.
pub(super) const HEADER: usize = 36;

/// Bytes before a record: length, its complement, checksum.
pub(super) const RECORD_HEAD: usize = 12;
/// Bytes of a record without its path.
const RECORD_FIXED: usize = 40;
/// Valid lengths of a record: the longest path is that of the deepest tree that the layers support.
pub(super) const RECORD_LENGTHS: RangeInclusive<usize> = RECORD_FIXED..=RECORD_FIXED + (64 << 20);

const NO_GROUP: u32 = u32::MAX;

/// CRC-32C (Castagnoli; reflected polynomial 0x82F63B78), as iSCSI (RFC 3720) and Btrfs use it.
const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0x82f6_3b78 } else { value >> 1 };
            bit += 1;
        }
        #[allow(clippy::indexing_slicing)] // checked at compile time
        {
            table[index] = value;
        }
        index += 1;
    }
    table
};

/// The checksum of `bytes`.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(!0, |crc, &byte| CRC_TABLE.get((crc as u8 ^ byte) as usize).map_or(crc, |entry| crc >> 8 ^ entry))
}

/// Decoded checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Checkpoint {
    /// The number of the log that follows it.
    pub(super) generation: u64,
    pub(super) boot: BootId,
    pub(super) clean: bool,
    pub(super) exact: bool,
    /// Seconds since the epoch; for people only.
    pub(super) written: u64,
    /// Inode number and generation.
    pub(super) root: (u64, u64),
    pub(super) groups: Vec<Vec<u8>>,
    pub(super) sums: Sums,
}

/// Reason why bytes are no valid checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// Written by another version.
    Version(u8),
    /// Damaged, or other content.
    Damaged,
}

impl Checkpoint {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(256);
        body.extend(self.generation.to_le_bytes());
        body.extend(self.boot.0);
        let flags = if self.clean { CLEAN } else { 0 } | if self.exact { EXACT } else { 0 };
        body.extend(flags.to_le_bytes());
        for number in [self.written, self.root.0, self.root.1] {
            body.extend(number.to_le_bytes());
        }
        put_count(&mut body, self.groups.len());
        for group in &self.groups {
            put_count(&mut body, group.len());
            body.extend(group);
        }
        put_sum(&mut body, self.sums.whole);
        put_count(&mut body, self.sums.users.len());
        for (uid, &sum) in &self.sums.users {
            body.extend(uid.to_le_bytes());
            put_sum(&mut body, sum);
        }
        put_count(&mut body, self.sums.dirs.len());
        for (&group, &sum) in &self.sums.dirs {
            put_count(&mut body, group);
            put_sum(&mut body, sum);
        }
        let mut bytes = Vec::with_capacity(CHECKPOINT_HEAD + body.len());
        bytes.extend(CHECKPOINT_MAGIC);
        put_count(&mut bytes, body.len());
        bytes.extend(crc(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Checkpoint, Unreadable> {
        let mut head = Reader(bytes);
        let magic: [u8; 8] = head.array().ok_or(Unreadable::Damaged)?;
        if magic != CHECKPOINT_MAGIC {
            let [name @ .., version] = magic;
            return Err(if CHECKPOINT_MAGIC.starts_with(&name) {
                Unreadable::Version(version)
            } else {
                Unreadable::Damaged
            });
        }
        let (Some(length), Some(sum)) = (head.count(), head.u32()) else { return Err(Unreadable::Damaged) };
        let Reader(body) = head;
        if body.len() != length || crc(body) != sum {
            return Err(Unreadable::Damaged);
        }
        Checkpoint::body(Reader(body)).ok_or(Unreadable::Damaged)
    }

    fn body(mut body: Reader<'_>) -> Option<Checkpoint> {
        let generation = body.u64()?;
        let boot = BootId(body.array()?);
        let flags = body.u32()?;
        let written = body.u64()?;
        let root = (body.u64()?, body.u64()?);
        let mut groups = Vec::new();
        for _ in 0..body.count()? {
            let length = body.count()?;
            groups.push(body.bytes(length)?.to_vec());
        }
        let mut sums = Sums { whole: body.sum()?, ..Sums::default() };
        for _ in 0..body.count()? {
            let uid = body.u32()?;
            sums.users.insert(uid, body.sum()?);
        }
        for _ in 0..body.count()? {
            let group = body.count()?;
            sums.dirs.insert(group, body.sum()?);
        }
        let (clean, exact) = (flags & CLEAN != 0, flags & EXACT != 0);
        body.0.is_empty().then_some(Checkpoint { generation, boot, clean, exact, written, root, groups, sums })
    }
}

/// Decoded header of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) generation: u64,
    pub(super) boot: BootId,
}

impl Header {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(LOG_MAGIC);
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(self.boot.0);
        bytes.extend(crc(&bytes).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Header> {
        let mut reader = Reader(bytes);
        let magic: [u8; 8] = reader.array()?;
        let header = Header { generation: reader.u64()?, boot: BootId(reader.array()?) };
        (magic == LOG_MAGIC && header.encode() == bytes).then_some(header)
    }
}

/// Encodes a record, head included.
///
/// # Errors
/// InvalidInput if the path is too long.
pub(super) fn record(id: FileId, place: &[u8], charge: u64, owner: Owner) -> io::Result<Vec<u8>> {
    let length = RECORD_FIXED + place.len();
    let group =
        owner.group.map_or(Some(NO_GROUP), |group| u32::try_from(group).ok().filter(|&group| group != NO_GROUP));
    let (true, Some(group), Ok(length)) = (RECORD_LENGTHS.contains(&length), group, u32::try_from(length)) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let mut payload = Vec::with_capacity(RECORD_FIXED + place.len());
    for number in [id.fs, id.ino, id.generation, charge] {
        payload.extend(number.to_le_bytes());
    }
    payload.extend(owner.uid.to_le_bytes());
    payload.extend(group.to_le_bytes());
    payload.extend(place);
    let mut bytes = Vec::with_capacity(RECORD_HEAD + payload.len());
    bytes.extend(length.to_le_bytes());
    bytes.extend((!length).to_le_bytes());
    bytes.extend(crc(&payload).to_le_bytes());
    bytes.extend(payload);
    Ok(bytes)
}

/// Decodes length and checksum of the payload from a record's head; `None` if the head is invalid.
pub(super) fn record_head(bytes: &[u8; RECORD_HEAD]) -> Option<(usize, u32)> {
    let mut reader = Reader(bytes);
    let (length, complement, sum) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let announced = usize::try_from(length).ok()?;
    (complement == !length && RECORD_LENGTHS.contains(&announced)).then_some((announced, sum))
}

/// Decodes a record's payload; `None` if it does not match its checksum.
pub(super) fn record_payload(payload: &[u8], sum: u32) -> Option<super::Touched> {
    if crc(payload) != sum {
        return None;
    }
    let mut reader = Reader(payload);
    let id = FileId { fs: reader.u64()?, ino: reader.u64()?, generation: reader.u64()? };
    let charge = reader.u64()?;
    let uid = reader.u32()?;
    let group = reader.u32()?;
    let group = if group == NO_GROUP { None } else { Some(usize::try_from(group).ok()?) };
    Some(super::Touched { id, charge, owner: Owner { uid, group }, place: reader.0.to_vec() })
}

fn put_count(bytes: &mut Vec<u8>, count: usize) {
    // More than 2^32 limits, or such long paths, cannot come from a command line.
    bytes.extend(u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_sum(bytes: &mut Vec<u8>, sum: Sum) {
    bytes.extend(sum.bytes.to_le_bytes());
    bytes.extend(sum.inodes.to_le_bytes());
}

/// Decodes values from the front of a byte slice.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, left) = self.0.split_at_checked(length)?;
        self.0 = left;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Option<usize> {
        self.u32().and_then(|count| usize::try_from(count).ok())
    }

    fn sum(&mut self) -> Option<Sum> {
        Some(Sum { bytes: self.u64()?, inodes: self.u64()? })
    }
}
