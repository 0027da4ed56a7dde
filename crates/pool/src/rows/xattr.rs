//! Values of extended attributes: in the row, or, if long, in a frame of their own.

use super::{damaged, extent};
use crate::error::PoolError;
use crate::pointer::{FrameKind, Pointer};

const INLINE: u8 = 0;
/// First byte of a value in a frame of its own.
pub(crate) const FRAME: u8 = 1;

/// Values up to this length are inline, bytes.
pub const INLINE_MOST: usize = 4096;

/// Longest value that Linux allows, bytes.
pub const VALUE_MOST: usize = 65536;

/// The value of an extended attribute; inline ones are borrowed from the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Xattr<'a> {
    /// In the row.
    Inline(&'a [u8]),
    /// In a frame of the kind [`FrameKind::Value`]; its logical length is the value's.
    Frame(Pointer),
}

impl<'a> Xattr<'a> {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Inline(value) => [&[INLINE], *value].concat(),
            Self::Frame(pointer) => extent::tagged(FRAME, pointer),
        }
    }

    /// Reads a value from a log: long ones are there in full, and are no rows.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode_logged(bytes: &'a [u8]) -> Result<Self, PoolError> {
        match bytes.split_first() {
            Some((&INLINE, rest)) if rest.len() <= VALUE_MOST => Ok(Self::Inline(rest)),
            _ => Self::decode(bytes),
        }
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, PoolError> {
        let (tag, rest) = bytes.split_first().ok_or_else(|| damaged("an empty extended attribute row"))?;
        match *tag {
            INLINE if rest.len() <= INLINE_MOST => Ok(Self::Inline(rest)),
            INLINE => Err(damaged("an inline value that is too long")),
            FRAME => {
                let pointer = extent::pointer(rest, FrameKind::Value)?;
                let fits = usize::try_from(pointer.logical).is_ok_and(|length| length <= VALUE_MOST);
                if fits { Ok(Self::Frame(pointer)) } else { Err(damaged("an extended attribute that is too long")) }
            }
            _ => Err(damaged("unknown kind of extended attribute")),
        }
    }
}
