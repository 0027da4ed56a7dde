//! Which device is to blame for a frame that was read damaged.
//!
//! Callers: the store's reads and its scrub. A reading keeps what it got from which device; once another
//! way of reading has given what is right, the devices are wrong whose bytes differ in that reading.
//!
//! Invariants:
//! - A device that has answered rightly is not blamed, whichever way of reading was the first that gave
//!   what is right: bits may flip in one reading only.
//! - Nor is one that is known to lack something.

use std::collections::BTreeSet;

use super::{Location, Result, Store, Way};
use crate::backend::{Healed, SegmentAt, Sources};
use crate::error::{Damage, PoolError};
use crate::frame::Header;
use crate::pointer::Pointer;
use crate::{checksum, compress};

/// What was read of a frame's stored content, and from which devices.
#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) stored: Vec<u8>,
    pub(super) sources: Sources,
}

/// A frame that is whole, as it is stored.
pub(super) struct WholeFrame {
    /// Its header and what is stored.
    bytes: Vec<u8>,
    /// Whether the header is the frame's own.
    has_header: bool,
    pub(super) content: Vec<u8>,
}

impl WholeFrame {
    /// What is stored, without the header.
    pub(super) fn stored(&self) -> &[u8] {
        self.bytes.get(Pointer::HEADER as usize..).unwrap_or_default()
    }
}

impl Store {
    /// A frame read in one way, in which its content is whole.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Frame`] where it is not.
    pub(super) fn read_whole(&self, pointer: &Pointer, at: &Location, way: Way) -> Result<WholeFrame> {
        let mut bytes = vec![0; (u64::from(Pointer::HEADER) + u64::from(pointer.stored)) as usize];
        self.read_range(pointer.birth, at, way, 0, &mut bytes, &mut Sources::default())?;
        self.verified(pointer, bytes)
    }

    /// The same of bytes that were read.
    fn verified(&self, pointer: &Pointer, bytes: Vec<u8>) -> Result<WholeFrame> {
        let damaged = |damage| PoolError::Frame { pointer: *pointer, damage };
        if u64::from(pointer.logical) > self.longest {
            return Err(damaged(Damage::Structure("longer than a segment")));
        }
        let mut content = vec![0; pointer.logical as usize];
        let stored = bytes.get(Pointer::HEADER as usize..).unwrap_or_default();
        if !compress::decompress(pointer.compression, stored, &mut content) {
            return Err(damaged(Damage::Compression));
        }
        if checksum::content(pointer.checksum_kind, &content) != pointer.checksum {
            return Err(damaged(Damage::Checksum));
        }
        let has_header = Header::decode(&bytes).is_ok_and(|header| header.is_of(pointer));
        Ok(WholeFrame { bytes, has_header, content })
    }

    /// The same of a frame at a place that no table knows.
    pub(super) fn read_whole_at(
        &self,
        pointer: &Pointer,
        at: SegmentAt<'_>,
        offset: u64,
        way: usize,
    ) -> Result<WholeFrame> {
        let mut bytes = vec![0; (u64::from(Pointer::HEADER) + u64::from(pointer.stored)) as usize];
        self.backend.read(at, way, offset, &mut bytes)?;
        self.verified(pointer, bytes)
    }

    /// Makes all copies of a frame what it is. The frame's header goes with it unless that is damaged
    /// here. `None` if it was not there any more.
    pub(super) fn heal_frame(&self, frame: &WholeFrame, at: SegmentAt<'_>, offset: u64) -> Result<Option<Healed>> {
        if self.usable().is_err() {
            return Ok(None);
        }
        let skip = if frame.has_header { 0 } else { Pointer::HEADER as usize };
        self.heal(at, offset + skip as u64, frame.bytes.get(skip..).unwrap_or_default())
    }

    /// The devices that gave wrong bytes in a reading of what should have been `right`, as far as they are
    /// not known to lack something; `None` where what is wrong was computed from several.
    pub(super) fn blamed_in(&self, at: SegmentAt<'_>, reading: &Reading, right: &[u8]) -> Option<BTreeSet<u16>> {
        let mut wrong = reading.sources.wrong(0, &reading.stored, right);
        if wrong.is_empty() {
            return None;
        }
        wrong.retain(|device| self.backend.should_hold(at, *device));
        Some(wrong)
    }
}
