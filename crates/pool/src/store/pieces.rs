//! Frames of which different parts are damaged in different copies or columns, put together.
//!
//! Callers: the store's reads and an import, for frames that no way of reading gives back whole. Which
//! parts go together the backend tries ([`Backend::piece_together`]); whether they are right is judged
//! here, by the frame's checksum.

use super::Result;
use crate::backend::{Backend, SegmentAt};
use crate::pointer::Pointer;
use crate::{checksum, compress};

/// What is judged at most to put together one frame of which different parts are damaged in different
/// copies, bytes.
const MOST_JUDGED: u64 = 1 << 30;

/// What is stored of a frame that is whole in none of the ways, and its content, if it can be put
/// together; and the devices that are wrong.
#[expect(clippy::type_complexity, reason = "a tuple that is taken apart at once")]
pub(super) fn put_together(
    backend: &dyn Backend,
    at: SegmentAt<'_>,
    offset: u64,
    pointer: &Pointer,
) -> Result<Option<(Vec<u8>, Vec<u8>, Vec<u16>)>> {
    let (mut stored, mut content) = (vec![0; pointer.stored as usize], vec![0; pointer.logical as usize]);
    let mut is_right = |stored: &[u8]| {
        compress::decompress(pointer.compression, stored, &mut content)
            && checksum::content(pointer.checksum_kind, &content) == pointer.checksum
    };
    let wrong = backend.piece_together(at, offset, &mut stored, &mut MOST_JUDGED.clone(), &mut is_right)?;
    Ok(wrong.map(|wrong| (stored, content, wrong)))
}
