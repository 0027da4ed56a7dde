//! The content of a file, record by record. A record without a row is a hole.
//!
//! A file whose content fits the row has it inline at record 0; the target of a symbolic link
//! always is.

use super::damaged;
use crate::codec::Reader;
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::pointer::{FrameKind, Pointer, Txg};

/// First byte of an extent that is a frame of its own.
pub(crate) const FRAME: u8 = 0;
/// First byte of an extent that shares a frame.
pub(crate) const SHARED: u8 = 1;
const INLINE: u8 = 2;

/// Content of files up to this length is inline, bytes.
pub const INLINE_FILE: usize = 2048;

/// The longest inline content: the target of a symbolic link, bytes.
pub const INLINE_MOST: usize = 4096;

/// Where the content of a record is. Inline content is borrowed from the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent<'a> {
    /// In a frame that only this record references, in this dataset and its snapshots.
    Frame(Pointer),
    /// In a frame of another record: it is freed with the last row that references it.
    Shared {
        /// The frame.
        pointer: Pointer,
        /// The txg in which this record got it: for everything that depends on births, the row's
        /// frame was born then.
        since: Txg,
    },
    /// In the row.
    Inline(&'a [u8]),
}

impl<'a> Extent<'a> {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Frame(pointer) => tagged(FRAME, pointer),
            Self::Shared { pointer, since } => {
                let mut to = crate::codec::Writer::default();
                to.u8(SHARED);
                to.varint(since.0);
                pointer.encode(&mut to);
                to.finish()
            }
            Self::Inline(content) => [&[INLINE], *content].concat(),
        }
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no extent.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, PoolError> {
        let (tag, rest) = bytes.split_first().ok_or_else(|| damaged("an empty extent"))?;
        match *tag {
            FRAME => Ok(Self::Frame(pointer(rest, FrameKind::Data)?)),
            SHARED => {
                let mut from = Reader::new(rest);
                let since = Txg(from.varint()?);
                let pointer = pointer(from.rest(), FrameKind::Data)?;
                if since < pointer.birth {
                    Err(damaged("a shared frame that is younger than its sharing"))
                } else {
                    Ok(Self::Shared { pointer, since })
                }
            }
            INLINE if rest.len() <= INLINE_MOST => Ok(Self::Inline(rest)),
            INLINE => Err(damaged("inline content that is too long")),
            _ => Err(damaged("unknown kind of extent")),
        }
    }

    /// The frame to free with the row.
    #[must_use]
    pub fn dead(&self) -> Option<Dead> {
        match self {
            Self::Frame(pointer) => Some(Dead::of(pointer, false)),
            Self::Shared { pointer, since } => Some(Dead { birth: *since, ..Dead::of(pointer, true) }),
            Self::Inline(_) => None,
        }
    }

    /// The frame, if there is one.
    #[must_use]
    pub fn pointer(&self) -> Option<&Pointer> {
        match self {
            Self::Frame(pointer) | Self::Shared { pointer, .. } => Some(pointer),
            Self::Inline(_) => None,
        }
    }
}

/// Encodes a tag and a pointer.
pub(super) fn tagged(tag: u8, pointer: &Pointer) -> Vec<u8> {
    let mut to = crate::codec::Writer::default();
    to.u8(tag);
    pointer.encode(&mut to);
    to.finish()
}

/// Decodes the pointer at the end of a row, to a frame of this kind.
pub(super) fn pointer(bytes: &[u8], kind: FrameKind) -> Result<Pointer, PoolError> {
    let mut from = Reader::new(bytes);
    let pointer = Pointer::decode(&mut from)?;
    if !from.is_empty() {
        return Err(damaged("bytes after the end of a row"));
    }
    if pointer.kind == kind { Ok(pointer) } else { Err(damaged("a row that names a frame of another kind")) }
}
