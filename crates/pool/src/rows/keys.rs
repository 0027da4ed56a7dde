//! Keys of a dataset's rows. Files build them for look-ups and range reads; checks and dumps decode
//! them.
//!
//! Invariant: numbers are big-endian, so that keys compare as bytes in the order of their numbers.

use std::ops::Range;

use super::damaged;
use crate::error::PoolError;

/// Kind byte of the dataset header.
pub const HEAD: u8 = 0x01;
/// Kind byte of inodes.
pub const INODE: u8 = 0x02;
/// Kind byte of entries in the order of their creation.
pub const ENTRY: u8 = 0x03;
/// Kind byte of entries by the hash of their names.
pub const NAME: u8 = 0x04;
/// Kind byte of extended attributes.
pub const XATTR: u8 = 0x05;
/// Kind byte of extents.
pub const EXTENT: u8 = 0x06;
/// Kind byte of orphan inodes: without a name, but still open or being freed.
pub const ORPHAN: u8 = 0x07;
/// Kind byte of owners' usage.
pub const OWNER_USE: u8 = 0x08;
/// Kind byte of patches of records.
pub const PATCH: u8 = 0x09;
/// Kind byte of files with records after their end, which a truncation has not removed yet.
pub const CUT: u8 = 0x0a;
/// Kind byte of the position of a received stream.
pub const RECEIVED: u8 = 0x0b;
/// Kind byte of the progress of charging inodes for their rows.
pub const RECOUNTED: u8 = 0x0c;

/// Length of the longest name of an entry or an extended attribute, bytes.
pub const NAME_MOST: usize = 255;

/// Number of bits of an inode number and of a sequence: mounts use the bits above them for the
/// snapshot of a file, positions in listings (63 bits) have own bits there. So many files are never
/// created.
pub const NUMBER_BITS: u32 = 40;

/// Largest inode number, largest sequence, and the end of their common counter.
pub const NUMBER_MOST: u64 = (1 << NUMBER_BITS) - 1;

/// Kind of an owner: user or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum OwnerKind {
    /// A user.
    User = 1,
    /// A group.
    Group = 2,
}

/// A decoded key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// The dataset header: one per dataset.
    Head,
    /// An inode's attributes.
    Inode(u64),
    /// An entry, in the order of creation.
    Entry {
        /// The directory's inode.
        directory: u64,
        /// The entry's number, the cookie of listings.
        sequence: u64,
    },
    /// An entry by its name.
    Name {
        /// The directory's inode.
        directory: u64,
        /// [`Hashing::hash`] of the name.
        hash: u64,
        /// The entry's number.
        sequence: u64,
    },
    /// An extended attribute.
    Xattr {
        /// The inode that has it.
        inode: u64,
        /// Its name, with the namespace: "user.x".
        name: Vec<u8>,
    },
    /// A record of a file.
    Extent {
        /// The file's inode.
        inode: u64,
        /// The record's number: offset / record size.
        record: u64,
    },
    /// An inode that has no name any more and was not freed yet.
    Orphan(u64),
    /// Usage of a user or group.
    OwnerUse(OwnerKind, u32),
    /// A part of a record that was written after the record's frame.
    Patch {
        /// The file's inode.
        inode: u64,
        /// The record's number.
        record: u64,
        /// Its position in the order of the record's patches.
        number: u64,
    },
    /// A truncated file whose records after its end are not all freed.
    Cut(u64),
    /// Position of the stream that the dataset is received from.
    Received,
    /// Progress of charging inodes of older versions for their rows.
    Recounted,
}

/// Key of the dataset header.
#[must_use]
pub fn head() -> [u8; 1] {
    [HEAD]
}

/// Key of an inode.
#[must_use]
pub fn inode(inode: u64) -> [u8; 9] {
    one(INODE, inode)
}

/// Key of an entry by its sequence.
#[must_use]
pub fn entry(directory: u64, sequence: u64) -> [u8; 17] {
    two(ENTRY, directory, sequence)
}

/// Range of the entries of a directory from a sequence on, in the order of listings.
#[must_use]
pub fn entries(directory: u64, from: u64) -> Range<Vec<u8>> {
    entry(directory, from).to_vec()..after(&one(ENTRY, directory))
}

/// Key of an entry by its name.
#[must_use]
pub fn name(directory: u64, hash: u64, sequence: u64) -> [u8; 25] {
    let mut key = [0; 25];
    let (front, back) = key.split_at_mut(17);
    front.copy_from_slice(&two(NAME, directory, hash));
    back.copy_from_slice(&sequence.to_be_bytes());
    key
}

/// Range of the entries of a directory whose names have this hash.
#[must_use]
pub fn names(directory: u64, hash: u64) -> Range<Vec<u8>> {
    let prefix = two(NAME, directory, hash);
    prefix.to_vec()..after(&prefix)
}

/// Key of an extended attribute.
#[must_use]
pub fn xattr(inode: u64, name: &[u8]) -> Vec<u8> {
    let mut key = one(XATTR, inode).to_vec();
    key.extend_from_slice(name);
    key
}

/// Range of the extended attributes of an inode, by name.
#[must_use]
pub fn xattrs(inode: u64) -> Range<Vec<u8>> {
    let prefix = one(XATTR, inode);
    prefix.to_vec()..after(&prefix)
}

/// Key of a record of a file.
#[must_use]
pub fn extent(inode: u64, record: u64) -> [u8; 17] {
    two(EXTENT, inode, record)
}

/// Range of the records of a file, from `first` to `last`; empty if `last` is just before `first`.
#[must_use]
pub fn extents(inode: u64, first: u64, last: u64) -> Range<Vec<u8>> {
    let behind = last.checked_add(1).map(|next| extent(inode, next).to_vec());
    extent(inode, first).to_vec()..behind.unwrap_or_else(|| after(&one(EXTENT, inode)))
}

/// Key of an orphan inode.
#[must_use]
pub fn orphan(inode: u64) -> [u8; 9] {
    one(ORPHAN, inode)
}

/// Key of a file whose truncation is incomplete.
#[must_use]
pub fn cut(inode: u64) -> [u8; 9] {
    one(CUT, inode)
}

/// Key of the position of a received stream.
#[must_use]
pub fn received() -> [u8; 1] {
    [RECEIVED]
}

/// Key of the progress of charging inodes for their rows.
#[must_use]
pub fn recounted() -> [u8; 1] {
    [RECOUNTED]
}

/// Key of an owner's usage.
#[must_use]
pub fn owner_use(kind: OwnerKind, id: u32) -> [u8; 6] {
    let [a, b, c, d] = id.to_be_bytes();
    [OWNER_USE, kind as u8, a, b, c, d]
}

/// Range of all rows of one kind.
#[must_use]
pub fn of_kind(kind: u8) -> Range<Vec<u8>> {
    vec![kind]..after(&[kind])
}

/// Key of a patch.
#[must_use]
pub fn patch(inode: u64, record: u64, number: u64) -> [u8; 25] {
    let mut key = [0; 25];
    let (front, back) = key.split_at_mut(17);
    front.copy_from_slice(&two(PATCH, inode, record));
    back.copy_from_slice(&number.to_be_bytes());
    key
}

/// Range of the patches of a file's records, from `first` to `last`.
#[must_use]
pub fn patches(inode: u64, first: u64, last: u64) -> Range<Vec<u8>> {
    two(PATCH, inode, first).to_vec()..after(&two(PATCH, inode, last))
}

/// Hash under which a name is looked up. The seed comes from the dataset's [`super::DatasetHead`],
/// so that colliding names cannot be prepared.
#[must_use]
pub fn name_hash(seed: u64, name: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(name, seed)
}

/// How names are hashed in a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hashing {
    /// Each name as a whole: similar names are spread everywhere. Used by file systems of older
    /// versions.
    Whole,
    /// Names that differ in the last digits of their number are neighbours, ordered by it
    /// ([`ordered_hash`]): creating, looking up or removing many numbered files one after the other
    /// changes a few leaves of the tree, however many names the directory has.
    #[default]
    Ordered,
}

impl Hashing {
    /// Returns the hash of a name.
    #[must_use]
    pub fn hash(self, seed: u64, name: &[u8]) -> u64 {
        match self {
            Self::Whole => name_hash(seed, name),
            Self::Ordered => ordered_hash(seed, name),
        }
    }
}

/// Most digits of a name's number that are in the low bits of its hash.
const ORDERED_DIGITS: usize = 4;
/// Bits of a hash that hold those digits: enough for 9,999.
const ORDERED_BITS: u32 = 14;

/// Hash that keeps numbered names together. The last digits, at most four, of the last number in
/// the name (before its extension, if there is one) are the lowest 14 bits of the hash; the other
/// bits are [`name_hash`] of the name with these digits replaced by a slash and their count, which
/// no other name contains. A name without a digit has [`name_hash`].
#[must_use]
pub fn ordered_hash(seed: u64, name: &[u8]) -> u64 {
    let Some((front, digits, behind)) = split_number(name) else { return name_hash(seed, name) };
    let mut group = [0; NAME_MOST + 2];
    let parts = [front, &[b'/', b'0' + digits.len() as u8], behind];
    let mut length = 0;
    for part in parts {
        // Longer names, which do not exist, are hashed as a whole.
        let Some(to) = group.get_mut(length..length + part.len()) else { return name_hash(seed, name) };
        to.copy_from_slice(part);
        length += part.len();
    }
    let value = digits.iter().fold(0, |value, digit| value * 10 + u64::from(digit - b'0'));
    name_hash(seed, group.get(..length).unwrap_or(name)) & (u64::MAX << ORDERED_BITS) | value
}

/// Splits a name before and after the last digits of its number.
fn split_number(name: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let last_digit = |part: &[u8]| part.iter().rposition(u8::is_ascii_digit);
    let stem = name.iter().rposition(|byte| *byte == b'.').and_then(|dot| last_digit(name.get(..dot)?));
    let end = stem.or_else(|| last_digit(name))? + 1;
    let (front, behind) = name.split_at_checked(end)?;
    let digits = front.iter().rev().take(ORDERED_DIGITS).take_while(|byte| byte.is_ascii_digit()).count();
    let (front, digits) = front.split_at_checked(end - digits)?;
    Some((front, digits, behind))
}

/// The first key after all with this prefix; empty, hence before everything, if the prefix is all
/// ones.
fn after(prefix: &[u8]) -> Vec<u8> {
    crate::tree::after_prefix(prefix).unwrap_or_default()
}

fn one(kind: u8, number: u64) -> [u8; 9] {
    let mut key = [kind; 9];
    key.split_at_mut(1).1.copy_from_slice(&number.to_be_bytes());
    key
}

fn two(kind: u8, first: u64, second: u64) -> [u8; 17] {
    let mut key = [kind; 17];
    let (front, back) = key.split_at_mut(9);
    front.copy_from_slice(&one(kind, first));
    back.copy_from_slice(&second.to_be_bytes());
    key
}

impl Key {
    /// Encodes the key.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Head => head().to_vec(),
            Self::Inode(number) => inode(*number).to_vec(),
            Self::Entry { directory, sequence } => entry(*directory, *sequence).to_vec(),
            Self::Name { directory, hash, sequence } => name(*directory, *hash, *sequence).to_vec(),
            Self::Xattr { inode, name } => xattr(*inode, name),
            Self::Extent { inode, record } => extent(*inode, *record).to_vec(),
            Self::Orphan(number) => orphan(*number).to_vec(),
            Self::Cut(number) => cut(*number).to_vec(),
            Self::Received => received().to_vec(),
            Self::Recounted => recounted().to_vec(),
            Self::OwnerUse(kind, id) => owner_use(*kind, *id).to_vec(),
            Self::Patch { inode, record, number } => patch(*inode, *record, *number).to_vec(),
        }
    }

    /// Decodes a key.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no key.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let (kind, mut rest) = bytes.split_first().ok_or_else(|| damaged("an empty key"))?;
        let key = match *kind {
            HEAD => Self::Head,
            INODE => Self::Inode(number(&mut rest)?),
            ENTRY => Self::Entry { directory: number(&mut rest)?, sequence: sequence(&mut rest)? },
            NAME => {
                Self::Name { directory: number(&mut rest)?, hash: number(&mut rest)?, sequence: sequence(&mut rest)? }
            }
            XATTR => {
                let inode = number(&mut rest)?;
                check_xattr_name(rest)?;
                Self::Xattr { inode, name: std::mem::take(&mut rest).to_vec() }
            }
            EXTENT => Self::Extent { inode: number(&mut rest)?, record: number(&mut rest)? },
            ORPHAN => Self::Orphan(number(&mut rest)?),
            CUT => Self::Cut(number(&mut rest)?),
            RECEIVED => Self::Received,
            RECOUNTED => Self::Recounted,
            PATCH => Self::Patch { inode: number(&mut rest)?, record: number(&mut rest)?, number: number(&mut rest)? },
            OWNER_USE => {
                let [owner, id @ ..] = array::<5>(&mut rest)?;
                let owner = match owner {
                    1 => OwnerKind::User,
                    2 => OwnerKind::Group,
                    _ => return Err(damaged("unknown kind of owner")),
                };
                Self::OwnerUse(owner, u32::from_be_bytes(id))
            }
            _ => return Err(damaged("unknown kind of key")),
        };
        if rest.is_empty() { Ok(key) } else { Err(damaged("bytes after the end of a key")) }
    }
}

/// Returns the sequence of an entry from its key, as [`Key::decode`] does, but faster: listings
/// decode many. `None` if it is no entry's key.
///
/// # Errors
/// [`PoolError::Format`] for bytes that are no key.
pub fn sequence_of_entry(bytes: &[u8]) -> Result<Option<u64>, PoolError> {
    let Some((&ENTRY, mut rest)) = bytes.split_first() else { return Key::decode(bytes).map(|_| None) };
    number(&mut rest)?;
    let sequence = sequence(&mut rest)?;
    if rest.is_empty() { Ok(Some(sequence)) } else { Err(damaged("bytes after the end of a key")) }
}

/// Checks the name of an extended attribute.
///
/// # Errors
/// [`PoolError::Format`] for a name that is empty, too long, or has a NUL.
pub fn check_xattr_name(name: &[u8]) -> Result<(), PoolError> {
    if name.is_empty() || name.len() > NAME_MOST || name.contains(&0) {
        return Err(damaged("the name of an extended attribute"));
    }
    Ok(())
}

fn array<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], PoolError> {
    let (taken, left) = rest.split_first_chunk::<N>().ok_or_else(|| damaged("a key ends too early"))?;
    *rest = left;
    Ok(*taken)
}

fn number(rest: &mut &[u8]) -> Result<u64, PoolError> {
    Ok(u64::from_be_bytes(array(rest)?))
}

fn sequence(rest: &mut &[u8]) -> Result<u64, PoolError> {
    let sequence = number(rest)?;
    if sequence > NUMBER_MOST { Err(damaged("a sequence of more than 40 bits")) } else { Ok(sequence) }
}
