//! Entries of the two lists in a sealed node: the children's identities, which the node authenticates, and their
//! addresses, which may change without the key.
//!
//! Callers: the stored form, the node form, walks without the key. Invariant: an entry that was decoded fits the kind
//! and height of its node.

use super::ID;
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
use crate::tree::MAX_LEVEL;

/// Length of an entry in the portable list, bytes.
pub const PORTABLE: usize = 24;
/// Length of an entry in the address list, bytes.
pub const ADDRESS: usize = 32;

const HEIGHT: u8 = 0x3f;
const SHARED: u8 = 1;
const PLAIN: u8 = 0x40;
const BLAKE3: u8 = 0x80;

const fn bad(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// A child of a sealed node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChildEntry {
    /// The child's frame. The length of its content is rounded up to 16.
    pub pointer: Pointer,
    /// The child's height, if it is a node.
    pub height: u8,
    /// The txg since which another record shares the frame; `None` for a frame that no other record shares.
    pub since: Option<Txg>,
}

impl ChildEntry {
    /// An entry for a frame, and the difference between the rounded and the exact length of its content.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a length that cannot be rounded up.
    pub fn new(pointer: &Pointer, height: u8, since: Option<Txg>) -> Result<(Self, u8), PoolError> {
        let rounded = pointer.logical.checked_next_multiple_of(16).ok_or(bad("an impossible length of content"))?;
        let difference = (rounded - pointer.logical) as u8;
        Ok((Self { pointer: Pointer { logical: rounded, ..*pointer }, height, since }, difference))
    }

    /// The pointer with the exact length of the content.
    ///
    /// # Errors
    /// [`PoolError::Format`] for an impossible difference.
    pub fn exact(&self, difference: u8) -> Result<Pointer, PoolError> {
        let logical = self.pointer.logical.checked_sub(difference.into()).filter(|_| difference < 16);
        let logical = logical.ok_or(bad("an impossible length of content"))?;
        Ok(Pointer { logical, ..self.pointer })
    }

    /// Appends the portable entry.
    pub fn encode_portable(&self, to: &mut Writer) {
        let Self { pointer, height, since } = self;
        let mut flags = if pointer.kind == FrameKind::Data { u8::from(since.is_some()) } else { height & HEIGHT };
        if !pointer.is_sealed() {
            flags |= PLAIN;
        }
        if pointer.checksum_kind == ChecksumKind::Blake3 {
            flags |= BLAKE3;
        }
        to.bytes(&[pointer.kind as u8, flags, pointer.pin, pointer.compression as u8]);
        to.u32(pointer.logical);
        to.bytes(&pointer.checksum);
    }

    /// Appends the address entry.
    pub fn encode_address(&self, to: &mut Writer) {
        let Pointer { segment, index, offset, stored, birth, .. } = self.pointer;
        for number in [segment, index, offset, stored] {
            to.u32(number);
        }
        to.u64(birth.0);
        to.u64(self.since.map_or(0, |since| since.0));
    }

    /// Decodes the portable entry of a tree's root, which has no address.
    ///
    /// # Errors
    /// [`PoolError::Format`] for an entry that is no node.
    pub fn decode_root(portable: &[u8; PORTABLE]) -> Result<Self, PoolError> {
        let [kind, flags, ..] = portable;
        if !matches!(FrameKind::try_from(*kind)?, FrameKind::Leaf | FrameKind::Inner) {
            return Err(bad("the root of a tree is no node"));
        }
        let mut address = Writer::with_room(ADDRESS);
        address.bytes(&[0; 12]);
        address.u32(Pointer::SEALED_LEAST);
        address.bytes(&[0; 16]);
        let address = address.finish();
        let Ok(address) = address.as_slice().try_into() else { return Err(bad("an address")) };
        Self::decode(portable, address, (flags & HEIGHT) + 1)
    }

    /// Decodes an entry from both lists of a node of this height.
    ///
    /// # Errors
    /// [`PoolError::Format`] for an entry that the format does not know, or that does not fit the node.
    pub fn decode(portable: &[u8; PORTABLE], address: &[u8; ADDRESS], node_height: u8) -> Result<Self, PoolError> {
        let mut from = Reader::new(portable);
        let (kind, flags, pin, compression) =
            (FrameKind::try_from(from.u8()?)?, from.u8()?, from.u8()?, Compression::try_from(from.u8()?)?);
        let (logical, checksum): (u32, [u8; ID]) = (from.u32()?, from.array()?);
        let checksum_kind = match (flags & PLAIN != 0, flags & BLAKE3 != 0) {
            (false, false) => ChecksumKind::Sealed,
            (false, true) => return Err(bad("a sealed child with a checksum")),
            (true, false) => ChecksumKind::Xxh3,
            (true, true) => ChecksumKind::Blake3,
        };
        let mut from = Reader::new(address);
        let (segment, index, offset, stored) = (from.u32()?, from.u32()?, from.u32()?, from.u32()?);
        let (birth, since) = (Txg(from.u64()?), from.u64()?);
        let pointer =
            Pointer { segment, index, offset, stored, logical, kind, compression, checksum_kind, pin, birth, checksum };
        pointer.check_seal()?;
        if logical == 0 || !logical.is_multiple_of(16) {
            return Err(bad("a length of content that is not rounded"));
        }
        let low = flags & HEIGHT;
        let (height, is_shared) = match kind {
            FrameKind::Data if low <= SHARED => (0, low == SHARED),
            FrameKind::Value if low == 0 => (0, false),
            FrameKind::Leaf if low == 0 => (0, false),
            FrameKind::Inner if (1..=MAX_LEVEL).contains(&low) => (low, false),
            _ => return Err(bad("the height of a child")),
        };
        let is_node = matches!(kind, FrameKind::Leaf | FrameKind::Inner);
        if is_node != (node_height > 0) || (is_node && height + 1 != node_height) {
            return Err(bad("a child of a node is no frame one below"));
        }
        if (since != 0) != is_shared || (is_shared && since < birth.0) {
            return Err(bad("the sharing of a child"));
        }
        Ok(Self { pointer, height, since: is_shared.then_some(Txg(since)) })
    }
}
