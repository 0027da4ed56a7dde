//! Block-wise reconstruction of frames that are damaged in different parts in different copies or columns.
//!
//! Callers: the store's reads and an import, for frames that no copy or reconstruction returns undamaged. The backend
//! tries the combinations of parts ([`Backend::piece_together`]); the frame's checksum decides here whether one is
//! right.

use super::Result;
use crate::backend::{Backend, SegmentAt};
use crate::frame::stored;
use crate::pointer::Pointer;

/// Limit of the bytes that are checked to reconstruct one frame.
const MOST_JUDGED: u64 = 1 << 30;

/// Reconstructs a frame that is damaged in all copies: its stored bytes and content, if that succeeds, and the wrong
/// devices. `is_accepted` decides about content whose checksum is right.
#[expect(clippy::type_complexity, reason = "a tuple that is taken apart at once")]
pub(super) fn put_together(
    backend: &dyn Backend,
    at: SegmentAt<'_>,
    offset: u64,
    pointer: &Pointer,
    is_accepted: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<Option<(Vec<u8>, Vec<u8>, Vec<u16>)>> {
    let (mut bytes, mut content) = (vec![0; pointer.stored as usize], vec![0; pointer.content_length() as usize]);
    let mut is_right = |bytes: &[u8]| stored::unpack(pointer, bytes, &mut content).is_none() && is_accepted(&content);
    let wrong = backend.piece_together(at, offset, &mut bytes, &mut MOST_JUDGED.clone(), &mut is_right)?;
    Ok(wrong.map(|wrong| (bytes, content, wrong)))
}
