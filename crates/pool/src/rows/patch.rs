//! Patches of a record: parts that were written after the record's frame, in a small frame of their
//! own, so that a small write costs a small write.

use super::{damaged, whole};
use crate::codec::Writer;
use crate::error::PoolError;
use crate::pointer::{FrameKind, Pointer};

/// Most pieces of one patch.
pub const PIECES_MOST: usize = 64;
/// Longest record, bytes.
const RECORD_MOST: u64 = 1 << 24;

/// Value of a patch's row: a frame with the pieces one after the other, and their positions in the
/// record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// The frame, of the kind [`FrameKind::Data`].
    pub pointer: Pointer,
    /// The pieces: offset in the record and length, bytes; in order, no two adjacent.
    pub pieces: Vec<(u32, u32)>,
}

impl Patch {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        self.pointer.encode(&mut to);
        to.varint(self.pieces.len() as u64);
        for (from, length) in &self.pieces {
            to.varint(u64::from(*from));
            to.varint(u64::from(*length));
        }
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no patch.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            let pointer = Pointer::decode(from)?;
            if pointer.kind != FrameKind::Data {
                return Err(damaged("a patch that names no data"));
            }
            let count = from.varint()?;
            if count == 0 || count > PIECES_MOST as u64 {
                return Err(damaged("the number of pieces of a patch"));
            }
            let (mut pieces, mut end, mut sum) = (Vec::new(), None, 0);
            for _ in 0..count {
                let (at, length) = (from.varint()?, from.varint()?);
                let fits =
                    at < RECORD_MOST && length > 0 && length <= RECORD_MOST - at && end.is_none_or(|end| at > end);
                if !fits {
                    return Err(damaged("a piece of a patch"));
                }
                (end, sum) = (Some(at + length), sum + length);
                pieces.push((at as u32, length as u32));
            }
            if sum == u64::from(pointer.logical) {
                Ok(Self { pointer, pieces })
            } else {
                Err(damaged("the length of a patch"))
            }
        })
    }
}
