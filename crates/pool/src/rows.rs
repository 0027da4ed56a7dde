//! The rows of a dataset's tree: their keys, and the codec of each value. The files of a dataset
//! are stored in them; `docs/pool-format.md` has the byte tables.
//!
//! ```text
//!  kind  row         key after the kind byte       value
//!  0x01  head        -                             DatasetHead: next number, root inode, hash seed, name folding
//!  0x02  inode       inode                         InodeRow: attributes
//!  0x03  entry       directory, sequence           Entry: inode, type, name; the order of listings
//!  0x04  name        directory, hash, sequence     NameTarget: inode, type; the index of look-ups
//!  0x05  xattr       inode, name                   Xattr: value or pointer
//!  0x06  extent      inode, record                 Extent: pointer or inline content
//!  0x07  orphan      inode                         nothing
//!  0x08  owner use   user or group, id             OwnerUse: bytes and objects
//!  0x09  patch       inode, record, number         Patch: pointer and pieces
//!  0x0a  cut         inode                         nothing
//!  0x0b  received    -                             ResumeToken: position of a stream
//!  0x0c  recounted   -                             the first inode that may lack a charge for its rows
//! ```
//!
//! Invariants: keys sort by kind, then as their numbers do; every decoder accepts arbitrary bytes
//! and returns a value or an error; an encoded value is decoded to an equal one; nothing follows a
//! value within its row.

pub mod entry;
pub mod extent;
pub mod folding;
pub mod head;
pub mod inode;
pub mod keys;
pub mod owner_use;
pub mod patch;
pub mod xattr;

pub use entry::{Entry, FileType, NameTarget};
pub use extent::Extent;
pub(crate) use extent::{FRAME as EXTENT_FRAME, SHARED as EXTENT_SHARED};
pub use folding::Folding;
pub use head::DatasetHead;
pub use inode::{InodeRow, NameHint, Timestamp};
pub use keys::{Key, OwnerKind};
pub use owner_use::OwnerUse;
pub use patch::Patch;
pub(crate) use xattr::FRAME as XATTR_FRAME;
pub use xattr::Xattr;

use crate::codec::Reader;
use crate::deadlist::Dead;
use crate::error::{Damage, PoolError};
use crate::pointer::Pointer;

/// The frame that a row references.
pub(crate) fn pointer_of(key: &[u8], value: &[u8]) -> Result<Option<Pointer>, PoolError> {
    Ok(match key.first() {
        Some(&keys::EXTENT) => Extent::decode(value)?.pointer().copied(),
        Some(&keys::XATTR) => match Xattr::decode(value)? {
            Xattr::Frame(pointer) => Some(pointer),
            Xattr::Inline(_) => None,
        },
        Some(&keys::PATCH) => Some(Patch::decode(value)?.pointer),
        _ => None,
    })
}

/// The frame to free with a row.
pub(crate) fn dead_of(key: &[u8], value: &[u8]) -> Result<Option<Dead>, PoolError> {
    match key.first() {
        Some(&keys::EXTENT) => Ok(Extent::decode(value)?.dead()),
        _ => Ok(pointer_of(key, value)?.map(|pointer| Dead::of(&pointer, false))),
    }
}

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// Decodes a value that fills the whole row.
fn whole<T>(bytes: &[u8], read: impl FnOnce(&mut Reader<'_>) -> Result<T, PoolError>) -> Result<T, PoolError> {
    let mut reader = Reader::new(bytes);
    let value = read(&mut reader)?;
    if reader.is_empty() { Ok(value) } else { Err(damaged("bytes after the end of a row")) }
}

#[cfg(test)]
mod tests;
