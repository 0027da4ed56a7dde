//! Names in directories: the row by sequence, which has the name and is read by listings, and the
//! row by hash, which look-ups use.

use super::{damaged, keys, whole};
use crate::codec::Writer;
use crate::error::PoolError;

/// Type of an inode. The numbers are those of `d_type` in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FileType {
    /// A named pipe.
    Fifo = 1,
    /// A character device.
    CharDevice = 2,
    /// A directory.
    Directory = 4,
    /// A block device.
    BlockDevice = 6,
    /// A regular file.
    Regular = 8,
    /// A symbolic link.
    Symlink = 10,
    /// A socket.
    Socket = 12,
}

impl FileType {
    /// The type in the upper four of a mode's 16 bits, if valid.
    #[must_use]
    pub fn of_mode(mode: u16) -> Option<Self> {
        Self::of_byte((mode >> 12) as u8)
    }

    /// The type as the upper four of a mode's 16 bits.
    #[must_use]
    pub fn mode_bits(self) -> u16 {
        u16::from(self as u8) << 12
    }

    fn of_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Fifo,
            2 => Self::CharDevice,
            4 => Self::Directory,
            6 => Self::BlockDevice,
            8 => Self::Regular,
            10 => Self::Symlink,
            12 => Self::Socket,
            _ => return None,
        })
    }

    fn read(byte: u8) -> Result<Self, PoolError> {
        Self::of_byte(byte).ok_or_else(|| damaged("unknown type of file"))
    }
}

/// The value of an entry by its sequence. The name is borrowed from the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Number of its inode.
    pub inode: u64,
    /// Its type.
    pub file_type: FileType,
    /// The name: 1 to 255 bytes, neither "." nor "..", without "/" and NUL.
    pub name: &'a [u8],
}

impl<'a> Entry<'a> {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u8(self.file_type as u8);
        to.varint(self.inode);
        to.bytes(self.name);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no entry.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, PoolError> {
        let mut from = crate::codec::Reader::new(bytes);
        let (file_type, inode) = (FileType::read(from.u8()?)?, from.varint()?);
        let name = from.rest();
        if !is_name(name) {
            return Err(damaged("an entry that is no name"));
        }
        Ok(Self { inode, file_type, name })
    }
}

/// Whether this is a valid name of an entry.
#[must_use]
pub fn is_name(name: &[u8]) -> bool {
    let length = (1..=keys::NAME_MOST).contains(&name.len());
    // Without an early exit: many bytes are compared at a time.
    length
        && name != b"."
        && name != b".."
        && !name.iter().fold(false, |found, byte| found | (*byte == 0) | (*byte == b'/'))
}

/// The value of an entry by its hash: enough for a look-up once the name has been compared in the
/// row by sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameTarget {
    /// Number of its inode.
    pub inode: u64,
    /// Its type.
    pub file_type: FileType,
}

impl NameTarget {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u8(self.file_type as u8);
        to.varint(self.inode);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| Ok(Self { file_type: FileType::read(from.u8()?)?, inode: from.varint()? }))
    }
}
