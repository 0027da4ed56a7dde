//! The stored bytes of a sealed frame: a prefix, the lists of its children, the encrypted body, and the tag.
//!
//! Callers: the adapter between the engine and the store; walks without the key, which decode the lists alone. Byte
//! tables: `docs/decisions/encryption.md`, 3.2. Invariants:
//! - The lists are decoded and bounded before anything is decrypted; nothing is allocated for a length that only the
//!   frame itself names.
//! - The tag covers everything that says what the frame is; places of children, births and stored lengths are not
//!   covered, because they differ between pools and change when frames move.

use std::cell::RefCell;

use super::child_entry::{ADDRESS, ChildEntry, PORTABLE};
use super::derive::{KeyPurpose, KeyView, derive, mac};
use super::message::{Cipher, NONCE, TAG, open_message, seal_message};
use super::{ID, RandomBytes};
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::frame::stored::{HASH, hash_of};
use crate::frames::CompressionSetting;
use crate::pointer::{Compression, FrameKind, Pointer};
use crate::tree::{MAX_CONTENT, MAX_LEVEL};
use crate::{checksum, compress};

/// Length of the prefix before the lists, bytes.
pub const PREFIX: usize = 40;
/// Maximum number of children of a node: as many pointers as a node in memory can have.
pub const CHILDREN_MAX: usize = 1310;
/// Length of the two lengths before the packed content in the body, bytes.
const LENGTHS: usize = 8;
const DOMAIN: &[u8] = b"nacre 2026-12 frame";

/// A generation of a family of keys, as far as frames need it.
#[derive(Clone, Copy)]
pub struct FrameKeys<'a> {
    /// The cipher of the family.
    pub cipher: Cipher,
    /// The crypt id of the family.
    pub crypt_id: [u8; ID],
    /// The id of the generation.
    pub generation: [u8; 8],
    /// The master key.
    pub master: KeyView<'a>,
}

impl FrameKeys<'_> {
    fn purpose(&self) -> KeyPurpose {
        match self.cipher {
            Cipher::Aes256Gcm => KeyPurpose::FrameAes,
            Cipher::ChaCha20Poly1305 => KeyPurpose::FrameChaCha,
        }
    }

    /// The mask of the inode and the offset in the header of this frame.
    ///
    /// # Errors
    /// None for an id of this length.
    pub fn owner_mask(&self, id: &[u8; ID]) -> Result<(u64, u64), PoolError> {
        let derived = derive(KeyPurpose::FrameOwner, self.master, id)?;
        let mut from = Reader::new(derived.expose());
        Ok((from.u64()?, from.u64()?))
    }
}

/// A frame to be sealed.
#[derive(Clone, Copy)]
pub struct NewSeal<'a> {
    /// The frame's id.
    pub id: [u8; ID],
    /// The kind of its content.
    pub kind: FrameKind,
    /// The height of a node above the leaves; 0 for other frames.
    pub height: u8,
    /// The children of a node.
    pub children: &'a [ChildEntry],
    /// The length of the content as the engine knows it, bytes: of a node in its form in memory.
    pub logical: u32,
    /// The content, or its packed form; of a node the short form.
    pub content: NewContent<'a>,
}

/// Content to be sealed.
#[derive(Clone, Copy)]
pub enum NewContent<'a> {
    /// Content, and how to compress it.
    Plain(&'a [u8], CompressionSetting),
    /// Content that is compressed already.
    Packed {
        /// The compressed bytes.
        bytes: &'a [u8],
        /// How they are compressed.
        compression: Compression,
        /// Length of the content, bytes.
        length: u32,
    },
}

/// Fields that the tag covers beside the body.
struct Covered<'a> {
    kind: FrameKind,
    height: u8,
    compression: Compression,
    /// The rounded length of the content.
    logical: u32,
    portable: &'a [u8],
}

impl Covered<'_> {
    fn associated(&self, keys: &FrameKeys<'_>) -> Vec<u8> {
        let mut to = Writer::with_room(64 + self.portable.len());
        to.bytes(DOMAIN);
        to.bytes(&keys.crypt_id);
        to.bytes(&keys.generation);
        to.bytes(&[self.kind as u8, self.height, self.compression as u8]);
        to.u32(self.logical);
        to.u16((self.portable.len() / PORTABLE) as u16);
        to.bytes(self.portable);
        to.finish()
    }
}

fn rounded(logical: u32) -> Result<u32, PoolError> {
    let rounded = logical.checked_next_multiple_of(16).filter(|rounded| *rounded > 0);
    rounded.ok_or_else(|| PoolError::Refused(format!("content of {logical} bytes cannot be sealed")))
}

/// Seals a frame; returns its stored bytes.
///
/// # Errors
/// [`PoolError::Refused`] for impossible lengths, or where there are no random bytes.
pub fn seal_frame(random: &dyn RandomBytes, keys: &FrameKeys<'_>, frame: &NewSeal<'_>) -> Result<Vec<u8>, PoolError> {
    let refused = |why: &str| Err(PoolError::Refused(why.to_owned()));
    let is_node = matches!(frame.kind, FrameKind::Leaf | FrameKind::Inner);
    if frame.children.len() > CHILDREN_MAX || (!is_node && (!frame.children.is_empty() || frame.height != 0)) {
        return refused("a frame with too many children");
    }
    let compressed = match frame.content {
        NewContent::Plain(content, setting) => compress::compress(setting, content),
        NewContent::Packed { .. } => None,
    };
    let (compression, packed, content_length) = match (frame.content, &compressed) {
        (NewContent::Plain(content, _), Some((compression, packed))) => {
            (*compression, packed.as_slice(), content.len() as u32)
        }
        (NewContent::Plain(content, _), None) => (Compression::Off, content, content.len() as u32),
        (NewContent::Packed { bytes, compression, length }, _) => (compression, bytes, length),
    };
    let lists = PREFIX + frame.children.len() * (PORTABLE + ADDRESS);
    let length = (lists + LENGTHS + packed.len() + TAG).next_multiple_of(16);
    if u32::try_from(length).is_err() {
        return refused("content that is too long to be sealed");
    }

    let mut to = Writer::with_room(length);
    // The hash and the nonce follow from what is written behind them.
    to.bytes(&[0; HASH]);
    to.bytes(&keys.generation);
    to.bytes(&[0; NONCE]);
    to.u16(frame.children.len() as u16);
    to.bytes(&[frame.height, compression as u8]);
    frame.children.iter().for_each(|child| child.encode_portable(&mut to));
    frame.children.iter().for_each(|child| child.encode_address(&mut to));
    to.u32(packed.len() as u32);
    to.u32(content_length);
    to.bytes(packed);
    let mut bytes = to.finish();
    bytes.resize(length - TAG, 0);

    let key = derive(keys.purpose(), keys.master, &frame.id)?;
    let mut fresh = [0; NONCE];
    random.fill(&mut fresh)?;
    let logical = rounded(frame.logical)?;
    let (prefix, rest) = bytes.split_at_mut(PREFIX);
    let (lists, body) = rest.split_at_mut(lists - PREFIX);
    let portable = lists.get(..frame.children.len() * PORTABLE).unwrap_or_default();
    let covered = Covered { kind: frame.kind, height: frame.height, compression, logical, portable };
    let associated = covered.associated(keys);
    // The nonce depends on everything that the tag covers, for copies of a virtual machine that get equal random bytes:
    // two tags under one nonce would give the authentication key away.
    let nonce: [u8; NONCE] = mac(&key, &[&fresh, &checksum::structure(body), &associated]).first();
    let tag = seal_message(keys.cipher, &key, nonce, &associated, body)?;
    if let Some(at) = prefix.get_mut(HASH + 8..HASH + 8 + NONCE) {
        at.copy_from_slice(&nonce);
    }
    bytes.extend_from_slice(&tag);
    rehash(&mut bytes, &frame.id, frame.kind, logical);
    Ok(bytes)
}

/// Computes the hash at the start of stored bytes anew, after a change of the address list.
pub fn rehash(stored: &mut [u8], id: &[u8; ID], kind: FrameKind, logical: u32) {
    if let Some((hash, rest)) = stored.split_first_chunk_mut::<HASH>() {
        *hash = hash_of(id, kind, logical, rest);
    }
}

/// Stored bytes of a sealed frame, taken apart. Nothing of it is authenticated before the frame is opened.
#[derive(Clone, Copy, Debug)]
pub struct StoredForm<'a> {
    /// The id of the key generation.
    pub generation: [u8; 8],
    /// The height of a node above the leaves.
    pub height: u8,
    kind: FrameKind,
    nonce: [u8; NONCE],
    compression: Compression,
    portable: &'a [u8],
    addresses: &'a [u8],
    body: &'a [u8],
    tag: [u8; TAG],
}

const fn bad(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

impl<'a> StoredForm<'a> {
    /// Takes the stored bytes of a frame of this kind apart.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no sealed frame of this kind.
    pub fn decode(kind: FrameKind, stored: &'a [u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(stored);
        from.take(HASH)?;
        let (generation, nonce) = (from.array()?, from.array()?);
        let (count, height, compression) = (usize::from(from.u16()?), from.u8()?, from.u8()?.try_into()?);
        let fits = match kind {
            FrameKind::Data | FrameKind::Value => count == 0 && height == 0,
            FrameKind::Leaf => height == 0,
            FrameKind::Inner => count > 0 && (1..=MAX_LEVEL).contains(&height),
            FrameKind::Table => false,
        };
        if !fits || count > CHILDREN_MAX {
            return Err(bad("the children of a sealed frame"));
        }
        let (portable, addresses) = (from.take(count * PORTABLE)?, from.take(count * ADDRESS)?);
        let Some((body, tag)) = from.rest().split_last_chunk::<TAG>() else {
            return Err(bad("a sealed frame that is too short"));
        };
        if body.len() <= LENGTHS || !stored.len().is_multiple_of(16) {
            return Err(bad("a sealed frame that is too short"));
        }
        Ok(Self { generation, height, kind, nonce, compression, portable, addresses, body, tag: *tag })
    }

    /// The children of a node.
    ///
    /// # Errors
    /// [`PoolError::Format`] for entries that do not fit the node.
    pub fn children(&self) -> Result<Vec<ChildEntry>, PoolError> {
        let (portable, _) = self.portable.as_chunks::<PORTABLE>();
        let (addresses, _) = self.addresses.as_chunks::<ADDRESS>();
        let entries = portable.iter().zip(addresses);
        entries.map(|(portable, address)| ChildEntry::decode(portable, address, self.height)).collect()
    }

    /// Opens the frame and returns its content; of a node in its short form.
    ///
    /// # Errors
    /// [`Damage::Seal`] where the tag does not match; other damage for content that was sealed in an impossible form.
    pub fn open(&self, keys: &FrameKeys<'_>, pointer: &Pointer) -> Result<Vec<u8>, Damage> {
        self.open_with(keys, pointer, |packed, length| {
            let most = if self.is_node() { MAX_CONTENT } else { pointer.logical as usize };
            if length > most || (!self.is_node() && length != most) {
                return Err(Damage::Structure("sealed content of another length"));
            }
            let mut content = vec![0; length];
            self.unpack(packed, &mut content)?;
            Ok(content)
        })
    }

    /// Opens a frame of content into a buffer of its length.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_into(&self, keys: &FrameKeys<'_>, pointer: &Pointer, target: &mut [u8]) -> Result<(), Damage> {
        self.open_with(keys, pointer, |packed, length| {
            if self.is_node() || length != target.len() || length != pointer.logical as usize {
                return Err(Damage::Structure("sealed content of another length"));
            }
            self.unpack(packed, target)
        })
    }

    fn is_node(&self) -> bool {
        matches!(self.kind, FrameKind::Leaf | FrameKind::Inner)
    }

    fn unpack(&self, packed: &[u8], target: &mut [u8]) -> Result<(), Damage> {
        if compress::decompress(self.compression, packed, target) { Ok(()) } else { Err(Damage::Compression) }
    }

    /// Decrypts the body, and calls `use_body` with the packed content and its length before it was packed.
    fn open_with<T>(
        &self,
        keys: &FrameKeys<'_>,
        pointer: &Pointer,
        use_body: impl FnOnce(&[u8], usize) -> Result<T, Damage>,
    ) -> Result<T, Damage> {
        if self.generation != keys.generation || self.kind != pointer.kind {
            return Err(Damage::Seal);
        }
        let logical = pointer.counted_logical();
        let (kind, height, compression, portable) = (self.kind, self.height, self.compression, self.portable);
        let covered = Covered { kind, height, compression, logical, portable };
        let associated = covered.associated(keys);
        let key = derive(keys.purpose(), keys.master, &pointer.checksum).map_err(|_| Damage::Seal)?;
        OPENED.with_borrow_mut(|body| {
            body.clear();
            body.extend_from_slice(self.body);
            let opened = open_message(keys.cipher, &key, self.nonce, &associated, body, self.tag);
            let used = opened.map_err(|_| Damage::Seal).and_then(|()| {
                let (packed, length) = content_of(body)?;
                use_body(packed, length)
            });
            compress::forget_much(body);
            used
        })
    }
}

thread_local! {
    // Buffer for decrypted bodies, which are decompressed at once.
    static OPENED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The packed content in a decrypted body, and its length before it was packed.
fn content_of(body: &[u8]) -> Result<(&[u8], usize), Damage> {
    const WRONG: Damage = Damage::Structure("the lengths in a sealed frame");
    let mut from = Reader::new(body);
    let (Ok(packed), Ok(length)) = (from.u32(), from.u32()) else { return Err(WRONG) };
    let Ok(content) = from.take(packed as usize) else { return Err(WRONG) };
    let padding = from.rest();
    if padding.len() < 16 && padding.iter().all(|byte| *byte == 0) {
        Ok((content, length as usize))
    } else {
        Err(WRONG)
    }
}

#[cfg(test)]
pub(super) mod tests;
