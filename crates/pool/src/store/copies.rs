//! Metadata in two places: segments of trees and of the segment table lie twice, on different
//! devices where there are several. A copy that is damaged is told, and written anew from the one
//! that is whole: by whoever reads it, by a scrub, by the cleaner.
//!
//! Callers: the store's reads, its scrub and its cleaner. Where slots are short, a segment has one
//! place only.
//!
//! Invariants:
//! - Both places hold the same bytes at the same offsets, and are durable before a root names them.
//! - A place is written over only where it is damaged, only with what the other one holds, and only
//!   as long as it belongs to the segment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::open::{read_table_copy, table_places};
use super::scrub::{Checked, Walked, check};
use super::watch::Damaged;
use super::{Location, Map, Result, Store};
use crate::device::Device;
use crate::error::{Damage, PoolError};
use crate::frame::Header;
use crate::frames::{Owner, WriteStream};
use crate::label::{Root, SlotAddress};
use crate::pointer::Pointer;
use crate::segment::cleaner::{self, Pressure};

/// Devices are written in whole blocks of this, bytes: a part of one would have to be read, which
/// is what fails.
const BLOCK: u64 = 4096;

/// The name of a frame: segment and number.
type Name = (u32, u32);

/// What is damaged at one place of a segment, and whose it is as far as headers tell.
type Damages = BTreeMap<Name, (Damage, Option<Owner>)>;

impl Store {
    /// How many damaged copies were written anew since the pool was opened.
    #[must_use]
    pub fn mended(&self) -> u64 {
        self.sums.mended.load(Ordering::Relaxed)
    }

    /// The places of a new segment that has this one: another, if its stream is written twice and
    /// slots are not short.
    pub(super) fn with_copy(&self, map: &mut Map, stream: WriteStream, place: SlotAddress) -> Vec<SlotAddress> {
        let mut places = vec![place];
        let short = || cleaner::pressure(map.slots.free(), map.slots.total()) == Pressure::Urgent;
        if self.has_redundant_metadata() && stream.is_metadata() && !short() {
            places.extend(map.slots.take_apart(place));
        }
        places
    }

    /// A frame's content by its copy, where it cannot be read at its first place; the damaged one
    /// is written anew.
    pub(super) fn read_copy(&self, pointer: &Pointer, at: Location, error: PoolError) -> Result<Arc<[u8]>> {
        let Some(copy) = at.copy.filter(|_| matches!(error, PoolError::Frame { .. } | PoolError::Device { .. })) else {
            return Err(error);
        };
        let Ok(content) = self.read_at(pointer, Location { place: copy, ..at }) else { return Err(error) };
        // Its place may have been given to others meanwhile: then nothing is damaged.
        if pointer.birth <= self.durable() && self.find(pointer).is_ok_and(|now| now == at) {
            self.told(self.mend(pointer, at, copy, at.place));
            self.report(pointer, at, &error, true);
        }
        Ok(content)
    }

    /// Whether a copy was mended; that it could not be is no error of whoever has the content.
    fn told(&self, mended: Result<bool>) -> bool {
        mended
            .inspect_err(|error| tracing::warn!(%error, "a damaged copy of metadata cannot be written anew"))
            .unwrap_or(false)
    }

    /// Writes a frame anew at a place where it is damaged, from one where its content is whole.
    /// Answers whether it was still there.
    fn mend(&self, pointer: &Pointer, at: Location, good: SlotAddress, bad: SlotAddress) -> Result<bool> {
        if self.usable().is_err() {
            return Ok(false);
        }
        let _giving = self.giving.lock();
        let now =
            self.map.read().table.find(pointer.segment, pointer.index, (at.offset / u64::from(Pointer::UNIT)) as u32);
        if now.is_none_or(|now| {
            now.segment != at.segment || u64::from(now.offset) * u64::from(Pointer::UNIT) != at.offset
        }) {
            return Ok(false);
        }
        self.write_over(pointer, at.offset, good, bad)?;
        Ok(true)
    }

    /// Copies a frame from one place to the other. The frame's header goes with it unless that is
    /// the damaged part of the good one.
    fn write_over(&self, pointer: &Pointer, offset: u64, good: SlotAddress, bad: SlotAddress) -> Result<()> {
        let (from, to) = (offset / BLOCK * BLOCK, (offset + pointer.charged()).next_multiple_of(BLOCK).min(self.slot));
        let mut whole = vec![0; (to - from) as usize];
        self.read_place(good, from, &mut whole)?;
        let mut blocks = vec![0; whole.len()];
        if self.read_place(bad, from, &mut blocks).is_err() {
            blocks.clone_from(&whole);
        }
        let begin = (offset - from) as usize;
        let header =
            whole.get(begin..).and_then(|frame| Header::decode(frame).ok()).is_some_and(|header| header.is_of(pointer));
        let begin = if header { begin } else { begin + Pointer::HEADER as usize };
        let range = begin..(offset + pointer.charged() - from) as usize;
        if let (Some(target), Some(source)) = (blocks.get_mut(range.clone()), whole.get(range)) {
            target.copy_from_slice(source);
        }
        self.write_place(bad, from, &blocks)?;
        self.sums.mended.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Looks at a frame of the table at all its places; tells where it is damaged, how, and whether
    /// that is mended now.
    pub(super) fn look_at_table_frame(
        &self,
        devices: &[Arc<dyn Device>],
        root: &Root,
        pointer: &Pointer,
    ) -> Option<(SlotAddress, Damage, bool)> {
        let places = table_places(root, pointer);
        let damage_at = |place: &SlotAddress| match read_table_copy(devices, self.slot, *place, pointer) {
            Ok(_) => None,
            Err(PoolError::Frame { damage, .. }) => Some(damage),
            Err(_) => Some(Damage::Structure("it cannot be read")),
        };
        let looked: Vec<(SlotAddress, Option<Damage>)> =
            places.iter().map(|place| (*place, damage_at(place))).collect();
        let good = looked.iter().find(|(_, damage)| damage.is_none()).map(|(place, _)| *place);
        let (bad, damage) = looked.into_iter().find_map(|(place, damage)| Some((place, damage?)))?;
        let mended = good.is_some_and(|good| self.told(self.mend_table(root, pointer, good, bad)));
        Some((bad, damage, mended))
    }

    fn mend_table(&self, root: &Root, pointer: &Pointer, good: SlotAddress, bad: SlotAddress) -> Result<bool> {
        let committed = self.committed.lock();
        // Segments of the table are given back under this lock, and numbers are never used again.
        if self.usable().is_err() || table_places(&committed.root, pointer) != table_places(root, pointer) {
            return Ok(false);
        }
        self.write_over(pointer, u64::from(pointer.offset) * u64::from(Pointer::UNIT), good, bad)?;
        Ok(true)
    }

    /// Mends what it can of a segment that lies twice; answers whether there was anything. The
    /// damage is told.
    pub(super) fn mend_segment(&self, id: u32) -> Result<bool> {
        if self.map.read().table.segments().get(&id).is_none_or(|segment| segment.place.len() < 2) {
            return Ok(false);
        }
        let mut mended = false;
        let living = self.living_by_headers(id)?;
        self.scrub_copies(id, &living, &mut |checked| {
            if let (true, Some(header)) = (checked.mended, checked.header) {
                mended = true;
                let damage = checked.damage.clone();
                self.tell_watcher(&Damaged {
                    pointer: header.pointer,
                    owner: checked.owner,
                    device: checked.device,
                    damage,
                    mended: true,
                });
            }
            true
        })?;
        Ok(mended)
    }

    /// Verifies these frames of a segment that lies twice, at both places, and mends what is
    /// damaged at one of them. All of them must be on the devices.
    pub(super) fn scrub_copies(
        &self,
        id: u32,
        living: &BTreeSet<Name>,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<bool> {
        let places = self.map.read().table.segments().get(&id).map(|segment| segment.place.clone()).unwrap_or_default();
        let [first, second] = places.as_slice() else { return Ok(true) };
        let mut damaged: [Damages; 2] =
            [0, 1].map(|_| living.iter().map(|name| (*name, (Damage::Header, None))).collect());
        for (copy, damaged) in damaged.iter_mut().enumerate() {
            let mut go_on = true;
            self.walk(id, copy, false, &mut |frame| {
                let name = name_of(&frame);
                if !living.contains(&name) {
                    return Ok(true);
                }
                match check(&frame) {
                    Some(damage) => drop(damaged.insert(name, (damage, Some(frame.header.owner)))),
                    None => drop(damaged.remove(&name)),
                }
                // Once for each frame; the other copy only asks whether to go on.
                let header = (copy == 0).then_some(frame.header);
                let bytes = header.map_or(0, |header| header.pointer.charged());
                let (owner, device) = (Some(frame.header.owner), if copy == 0 { first.device } else { second.device });
                go_on = visit(&Checked { name, owner, header, bytes, device, damage: None, mended: false });
                Ok(go_on)
            })?;
            if !go_on {
                return Ok(false);
            }
        }
        let [at_first, at_second] = damaged;
        if at_first.is_empty() && at_second.is_empty() {
            return Ok(true);
        }
        Ok(self.mend_from(id, (1, *second), *first, &at_first, visit)?
            && self.mend_from(id, (0, *first), *second, &at_second, visit)?
            && self.tell_lost(id, first.device, &at_first, &at_second, visit))
    }

    /// Mends frames that are damaged at one place from the other copy, as far as they are whole
    /// there.
    fn mend_from(
        &self,
        id: u32,
        (copy, good): (usize, SlotAddress),
        bad: SlotAddress,
        damaged: &Damages,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<bool> {
        if damaged.is_empty() {
            return Ok(true);
        }
        let mut go_on = true;
        self.walk(id, copy, false, &mut |frame| {
            let name = name_of(&frame);
            let (Some((damage, _)), None) = (damaged.get(&name), check(&frame)) else { return Ok(true) };
            let stream = WriteStream::Metadata;
            let at = Location { segment: id, stream, place: bad, copy: Some(good), offset: u64::from(frame.offset) };
            if self.told(self.mend(&frame.header.pointer, at, good, bad)) {
                let (owner, header, device) = (Some(frame.header.owner), Some(frame.header), bad.device);
                go_on = visit(&Checked {
                    name,
                    owner,
                    header,
                    bytes: 0,
                    device,
                    damage: Some(damage.clone()),
                    mended: true,
                });
            }
            Ok(go_on)
        })?;
        Ok(go_on)
    }

    /// Tells of the frames that are whole nowhere.
    fn tell_lost(
        &self,
        id: u32,
        device: u16,
        at_first: &Damages,
        at_second: &Damages,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> bool {
        let now: BTreeSet<Name> = self.living(id);
        for (name, (damage, owner)) in at_first.iter().filter(|(name, _)| now.contains(name)) {
            let Some((_, other)) = at_second.get(name) else { continue };
            let (damage, owner) = (Some(damage.clone()), owner.or(*other));
            if !visit(&Checked { name: *name, owner, header: None, bytes: 0, device, damage, mended: false }) {
                return false;
            }
        }
        true
    }
}

fn name_of(frame: &Walked<'_>) -> Name {
    (frame.header.pointer.segment, frame.header.pointer.index)
}
