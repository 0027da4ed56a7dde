//! Frames of an encrypted file system: sealed on their way to the store, opened on their way from it.
//!
//! Callers: trees and files, through [`Frames`]; they know content in the clear only, and the store knows stored bytes
//! only. Invariants:
//! - Each write has a new random frame id, except the frames of a target, and a key of its own.
//! - Bytes that the key does not open are never returned: they are looked for in the other copies, which repairs the
//!   forged one, and otherwise are an error.
//! - No lock is held while frames are sealed or opened.
//! - No content in the clear is passed to the store: a frame goes down with its stored bytes alone.

use std::cell::RefCell;
use std::sync::Arc;

use super::keyring::{FamilyKeys, Generation};
use super::node_form::ShortNode;
use super::sealers::Sealers;
use super::stored_form::{NewContent, NewSeal, StoredForm, seal_frame};
use super::{ID, RandomBytes};
use crate::compress;
use crate::error::{Damage, PoolError};
use crate::frame::Sealer;
use crate::frames::{Compressed, CompressionSetting, Frames, NewFrame, Reach, SealedHeader, Wanted};
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer};

/// Maximum length of a sealed node's stored bytes.
const NODE_MAX: u64 = 96 << 10;

thread_local! {
    // Buffer for stored bytes, which are opened at once.
    static STORED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Whether frames in the clear are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainFrames {
    /// They are damage: all frames of the tree are sealed.
    Refused,
    /// They are read: the file system is being encrypted in place.
    Accepted,
}

/// Access to the frames of an encrypted file system.
pub struct SealedFrames {
    below: Arc<dyn Frames>,
    sealing: Arc<Sealing>,
    sealers: Arc<Sealers>,
    plain: PlainFrames,
}

/// What frames are sealed with.
pub(super) struct Sealing {
    keys: Arc<FamilyKeys>,
    random: Arc<dyn RandomBytes>,
}

impl SealedFrames {
    /// Frames of a family of keys, stored in `below`. `sealers` are the pool's sealing threads.
    #[must_use]
    pub fn new(
        below: Arc<dyn Frames>,
        keys: Arc<FamilyKeys>,
        random: Arc<dyn RandomBytes>,
        sealers: Arc<Sealers>,
        plain: PlainFrames,
    ) -> Self {
        Self { below, sealing: Arc::new(Sealing { keys, random }), sealers, plain }
    }

    fn keys(&self) -> &FamilyKeys {
        &self.sealing.keys
    }

    /// Whether a frame is opened here; `false` for a frame in the clear that the store reads.
    fn is_opened(&self, pointer: &Pointer) -> Result<bool, PoolError> {
        if !pointer.is_sealed() && self.plain == PlainFrames::Refused {
            let damage = Damage::Structure("a frame in the clear in an encrypted file system");
            return Err(PoolError::Frame { pointer: *pointer, damage });
        }
        if pointer.is_sealed() && u64::from(pointer.stored) > longest_stored(pointer) {
            let damage = Damage::Structure("a sealed frame that is longer than its content allows");
            return Err(PoolError::Frame { pointer: *pointer, damage });
        }
        Ok(pointer.is_sealed())
    }

    /// Takes stored bytes apart, and finds the key generation that they name.
    fn form_of<'k, 's>(
        &'k self,
        pointer: &Pointer,
        stored: &'s [u8],
    ) -> Result<(StoredForm<'s>, &'k Generation), Damage> {
        let form = StoredForm::decode(pointer.kind, stored).map_err(damage_of)?;
        let generation = self.keys().generation(&form.generation).filter(|found| found.ordinal >= pointer.pin);
        Ok((form, generation.ok_or(Damage::Seal)?))
    }

    /// Opens stored bytes; returns the content.
    fn open(&self, pointer: &Pointer, stored: &[u8]) -> Result<Vec<u8>, Damage> {
        let (form, generation) = self.form_of(pointer, stored)?;
        let content = form.open(&self.keys().frame_keys(generation), pointer)?;
        if !is_node(pointer.kind) {
            return Ok(content);
        }
        let children = form.children().map_err(damage_of)?;
        let short = ShortNode { height: form.height, children, content };
        let content = short.restore().map_err(damage_of)?;
        let is_length = content.len().next_multiple_of(16) == pointer.counted_logical() as usize;
        if is_length { Ok(content) } else { Err(Damage::Structure("a sealed node of another length")) }
    }

    fn open_into(&self, pointer: &Pointer, stored: &[u8], target: &mut [u8]) -> Result<(), Damage> {
        let (form, generation) = self.form_of(pointer, stored)?;
        form.open_into(&self.keys().frame_keys(generation), pointer, target)
    }

    /// Reads the frame from another copy, after its stored bytes were not opened.
    fn read_other(&self, pointer: &Pointer) -> Result<Vec<u8>, PoolError> {
        let mut opened = Err(Damage::Seal);
        self.below.read_accepted(pointer, &mut |stored| {
            opened = self.open(pointer, stored);
            opened.is_ok()
        })?;
        opened.map_err(|damage| PoolError::Frame { pointer: *pointer, damage })
    }

    fn read_into(&self, Wanted { pointer, target }: &mut Wanted<'_>) -> Result<(), PoolError> {
        let opened = STORED.with_borrow_mut(|buffer| {
            if buffer.len() < pointer.stored as usize {
                buffer.resize(pointer.stored as usize, 0);
            }
            let stored = buffer.get_mut(..pointer.stored as usize).unwrap_or_default();
            self.below.read_all(&mut [Wanted { pointer: *pointer, target: &mut *stored }])?;
            let opened = self.open_into(pointer, stored, target);
            compress::forget_much(buffer);
            Ok::<_, PoolError>(opened)
        })?;
        if opened.is_ok() {
            return Ok(());
        }
        let content = self.read_other(pointer)?;
        if content.len() != target.len() {
            let damage = Damage::Structure("a frame of another length than expected");
            return Err(PoolError::Frame { pointer: *pointer, damage });
        }
        target.copy_from_slice(&content);
        Ok(())
    }

    /// Writes a sealed frame. The store gets its stored bytes, and no content.
    fn write_sealed(&self, frame: &NewFrame<'_>, sealed: &Compressed) -> Result<Pointer, PoolError> {
        let (compression, checksum) = (CompressionSetting::Off, ChecksumKind::Sealed);
        self.below.write_compressed(&NewFrame { content: &[], compression, checksum, ..*frame }, sealed)
    }
}

impl Sealing {
    /// Seals content for a frame.
    fn seal(&self, frame: &NewFrame<'_>, logical: u32, content: NewContent<'_>) -> Result<Compressed, PoolError> {
        let mut id = [0; ID];
        self.random.fill(&mut id)?;
        let generation = self.keys.current();
        let keys = self.keys.frame_keys(generation);
        let kind = frame.kind;
        let (stored, logical) = if is_node(kind) {
            let NewContent::Plain(content, compression) = content else {
                return Err(PoolError::Refused("a node is sealed from its content".to_owned()));
            };
            let ShortNode { height, children, content } = ShortNode::new(content)?;
            // Pointers to nodes have the rounded length: only readers of the node know the exact one.
            let logical = logical.next_multiple_of(16);
            let content = NewContent::Plain(&content, compression);
            let seal = NewSeal { id, kind, height, children: &children, logical, content };
            (seal_frame(&*self.random, &keys, &seal)?, logical)
        } else {
            let seal = NewSeal { id, kind, height: 0, children: &[], logical, content };
            (seal_frame(&*self.random, &keys, &seal)?, logical)
        };
        let (object, offset) = keys.owner_mask(&id)?;
        let sealer = Sealer { family: self.keys.family, ordinal: generation.ordinal };
        let sealed = SealedHeader { sealer, object: frame.owner.object ^ object, offset: frame.owner.offset ^ offset };
        let pointer = Pointer {
            segment: 0,
            index: 0,
            offset: 0,
            stored: stored.len() as u32,
            logical,
            kind,
            compression: Compression::Off,
            checksum_kind: ChecksumKind::Sealed,
            pin: generation.ordinal,
            birth: frame.birth,
            checksum: id,
        };
        Ok(Compressed { pointer, stored: Some(stored), sealed: Some(sealed) })
    }

    /// Seals the content of a frame.
    pub(super) fn seal_content(&self, frame: &NewFrame<'_>) -> Result<Compressed, PoolError> {
        let logical = u32::try_from(frame.content.len())
            .map_err(|_| PoolError::Refused("content that is too long for a frame".to_owned()))?;
        self.seal(frame, logical, NewContent::Plain(frame.content, frame.compression))
    }
}

/// Maximum length of a frame's stored bytes. Lengths in addresses are not authenticated: nothing longer is allocated.
fn longest_stored(pointer: &Pointer) -> u64 {
    if is_node(pointer.kind) { NODE_MAX } else { 2 * u64::from(pointer.counted_logical()) + (4 << 10) }
}

fn is_node(kind: FrameKind) -> bool {
    matches!(kind, FrameKind::Leaf | FrameKind::Inner)
}

/// Damage of stored bytes that do not have the form of a sealed frame.
fn damage_of(error: PoolError) -> Damage {
    match error {
        PoolError::Format(damage) => damage,
        _ => Damage::Seal,
    }
}

impl Frames for SealedFrames {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        let is_opened = self.is_opened(pointer)?;
        let stored = self.below.read(pointer)?;
        if !is_opened {
            return Ok(stored);
        }
        match self.open(pointer, &stored) {
            Ok(content) => Ok(content.into()),
            Err(_) => Ok(self.read_other(pointer)?.into()),
        }
    }

    // By one thread, as the store does it: a stream has several requests at a time, each with its own thread.
    fn read_all(&self, wanted: &mut [Wanted<'_>]) -> Result<(), PoolError> {
        wanted.iter_mut().try_for_each(|wanted| {
            if self.is_opened(&wanted.pointer)? {
                return self.read_into(wanted);
            }
            self.below.read_all(std::slice::from_mut(wanted))
        })
    }

    fn expect(&self, pointers: &[Pointer]) {
        self.below.expect(pointers);
    }

    fn expect_later(&self, pointers: &[Pointer], beyond: &[Pointer]) {
        self.below.expect_later(pointers, beyond);
    }

    fn ahead(&self) -> Reach {
        self.below.ahead()
    }

    fn await_room(&self) {
        self.below.await_room();
    }

    fn make_room(&self, bytes: u64) -> Result<bool, PoolError> {
        self.below.make_room(bytes)
    }

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        self.write_sealed(frame, &self.sealing.seal_content(frame)?)
    }

    fn write_all(&self, frames: &[NewFrame<'_>], written: &mut Vec<Pointer>) -> Result<(), PoolError> {
        let sealed = self.sealers.seal(&self.sealing, frames)?;
        frames.iter().zip(&sealed).try_for_each(|(frame, sealed)| {
            written.push(self.write_sealed(frame, sealed)?);
            Ok(())
        })
    }

    fn compress_all(&self, frames: &[NewFrame<'_>]) -> Result<Vec<Compressed>, PoolError> {
        self.sealers.seal(&self.sealing, frames)
    }

    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer, PoolError> {
        if compressed.sealed.is_some() {
            return self.write_sealed(frame, compressed);
        }
        // Packed elsewhere, as a stream has brought it.
        let Pointer { compression, logical, .. } = compressed.pointer;
        let bytes = compressed.stored.as_deref().unwrap_or(frame.content);
        let mut unpacked = Vec::new();
        let content = if bytes.len() < logical as usize {
            NewContent::Packed { bytes, compression, length: logical }
        } else {
            // No frame is longer than its content: readers rely on it.
            unpacked.resize(logical as usize, 0);
            if !compress::decompress(compression, bytes, &mut unpacked) {
                return Err(PoolError::Refused("content that does not unpack".to_owned()));
            }
            NewContent::Plain(&unpacked, frame.compression)
        };
        self.write_sealed(frame, &self.sealing.seal(frame, logical, content)?)
    }
}

#[cfg(test)]
pub(crate) mod tests;
