//! Attribution of a damaged frame to devices.
//!
//! Callers: the store's reads and its scrub. A reading records which device its bytes are from; once another copy or
//! reconstruction is right, the devices whose bytes differ in the reading are wrong.
//!
//! Invariants:
//! - A device that has returned right bytes is not blamed, whichever copy or reconstruction was right
//!   first: bits may flip in one reading only.
//! - Devices that are known to lack data are not blamed.

use std::collections::BTreeSet;

use super::{Location, Result, Store, Way};
use crate::backend::{Healed, SegmentAt, Sources};
use crate::error::{Damage, PoolError};
use crate::frame::{Header, stored};
use crate::pointer::Pointer;

/// Stored bytes of a frame as read, and the devices that they are from.
#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) stored: Vec<u8>,
    pub(super) sources: Sources,
}

/// An undamaged frame in its stored form.
pub(super) struct WholeFrame {
    /// The frame's header and the stored bytes.
    bytes: Vec<u8>,
    /// Whether the header belongs to this frame.
    has_header: bool,
    /// The content; the stored bytes of a sealed frame.
    pub(super) content: Vec<u8>,
}

impl WholeFrame {
    /// The stored bytes, without the header.
    pub(super) fn stored(&self) -> &[u8] {
        self.bytes.get(Pointer::HEADER as usize..).unwrap_or_default()
    }
}

impl Store {
    /// Reads a frame from copy or reconstruction `way` and verifies it.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Frame`] where it is damaged.
    pub(super) fn read_whole(&self, pointer: &Pointer, at: &Location, way: Way) -> Result<WholeFrame> {
        let mut bytes = vec![0; (u64::from(Pointer::HEADER) + u64::from(pointer.stored)) as usize];
        self.read_range(pointer.birth, at, way, 0, &mut bytes, &mut Sources::default())?;
        self.verified(pointer, bytes)
    }

    /// Verifies the bytes of a frame.
    fn verified(&self, pointer: &Pointer, bytes: Vec<u8>) -> Result<WholeFrame> {
        let damaged = |damage| PoolError::Frame { pointer: *pointer, damage };
        if u64::from(pointer.content_length()) > self.longest {
            return Err(damaged(Damage::Structure("longer than a segment")));
        }
        let mut content = vec![0; pointer.content_length() as usize];
        let stored_bytes = bytes.get(Pointer::HEADER as usize..).unwrap_or_default();
        if let Some(damage) = stored::unpack(pointer, stored_bytes, &mut content) {
            return Err(damaged(damage));
        }
        let has_header = Header::decode(&bytes).is_ok_and(|header| header.is_of(pointer));
        Ok(WholeFrame { bytes, has_header, content })
    }

    /// Reads and verifies a frame at a location that the table does not know.
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

    /// Repairs all copies of a frame with its content, and with its header unless that is damaged here. `None` if the
    /// frame is no longer there.
    pub(super) fn heal_frame(&self, frame: &WholeFrame, at: SegmentAt<'_>, offset: u64) -> Result<Option<Healed>> {
        if self.usable().is_err() {
            return Ok(None);
        }
        let skip = if frame.has_header { 0 } else { Pointer::HEADER as usize };
        self.heal(at, offset + skip as u64, frame.bytes.get(skip..).unwrap_or_default())
    }

    /// The devices that returned wrong bytes in a reading that should have been `right`, except those known to lack
    /// data; `None` where the wrong bytes were reconstructed from several devices.
    pub(super) fn blamed_in(&self, at: SegmentAt<'_>, reading: &Reading, right: &[u8]) -> Option<BTreeSet<u16>> {
        let mut wrong = reading.sources.wrong(0, &reading.stored, right);
        if wrong.is_empty() {
            return None;
        }
        wrong.retain(|device| self.backend.should_hold(at, *device));
        Some(wrong)
    }
}
