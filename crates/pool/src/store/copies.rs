//! Redundant metadata: segments of trees and of the segment table have two copies, on different devices where there
//! are several. A damaged copy is reported, and rewritten from the right one: by readers, by a scrub, by the cleaner.
//!
//! Callers: the store's reads, its scrub and its cleaner. Only checksums of frames show which copy is right: that is
//! done here; the backend rewrites the others ([`crate::backend::Backend::heal`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::blame::Reading;
use super::pieces::put_together;
use super::scrub::{Checked, Walked, WrittenSoFar, check};
use super::table_read::{read_table_copy, table_place};
use super::watch::Damaged;
use super::{Location, Result, Store};
use crate::backend::{Healed, SegmentAt};
use crate::error::{Damage, PoolError};
use crate::frames::Owner;
use crate::label::{Place, Root};
use crate::pointer::Pointer;

/// Name of a frame: segment and number.
type Name = (u32, u32);

/// Damage of a frame of the segment table.
pub(super) struct TableDamage {
    pub(super) damage: Damage,
    /// The devices that returned wrong bytes; empty where that is unknown.
    pub(super) devices: BTreeSet<u16>,
    /// The rewritten parts.
    pub(super) healed: Option<Healed>,
}

/// Damaged frames in one copy of a segment, with their owners as far as headers name them.
type Damages = BTreeMap<Name, (Damage, Option<Owner>)>;

impl Store {
    /// Number of damaged copies that were rewritten since the pool was opened.
    #[must_use]
    pub fn mended(&self) -> u64 {
        self.sums.mended.load(Ordering::Relaxed)
    }

    /// Reads a frame from another copy or reconstruction after the first reading was damaged; rewrites the damaged
    /// one.
    pub(super) fn read_copy(
        &self,
        pointer: &Pointer,
        at: &Location,
        error: PoolError,
        first: &Reading,
    ) -> Result<Arc<[u8]>> {
        if !matches!(error, PoolError::Frame { .. } | PoolError::Device { .. }) {
            return Err(error);
        }
        let chosen = self.backend.chooses(at.at());
        for way in usize::from(!chosen)..self.backend.ways(at.at()) {
            let Ok(frame) = self.read_whole(pointer, at, Some(way)) else { continue };
            if self.backend.is_read_again() {
                self.note_wrong_reply(at.at());
                return Ok(frame.content.into());
            }
            // Its location may have been reused meanwhile: then nothing is damaged.
            if pointer.birth <= self.durable() && self.find(pointer).is_ok_and(|now| now == *at) {
                let healed = self.told(self.heal_frame(&frame, at.at(), at.offset));
                let wrong = match (&error, self.blamed_in(at.at(), first, frame.stored()), healed) {
                    (_, Some(blamed), Some(healed)) => blamed.union(&healed.devices()).copied().map(Some).collect(),
                    (_, Some(blamed), None) => blamed.into_iter().map(Some).collect(),
                    (_, None, Some(healed)) if !healed.wrong.is_empty() => {
                        healed.devices().into_iter().map(Some).collect()
                    }
                    // The wrong bytes were reconstructed from several devices, or nothing is wrong any more.
                    (PoolError::Frame { .. }, None, _) => vec![None],
                    (_, None, Some(_)) => Vec::new(),
                    (_, None, None) if chosen => self.damaged_copy(pointer, at, way).map(Some).into_iter().collect(),
                    (_, None, None) => vec![Some(self.backend.blamed(at.at(), way))],
                };
                wrong.into_iter().for_each(|device| self.report_of(pointer, at, &error, (device, true)));
            }
            return Ok(frame.content.into());
        }
        // A moved frame is not damaged.
        if self.find(pointer).is_ok_and(|now| now == *at)
            && let Some(content) = self.read_pieces(pointer, at, &error, first)?
        {
            return Ok(content);
        }
        Err(error)
    }

    /// Reads a frame from the first copy or reconstruction whose verified bytes `is_right` accepts, and rewrites the
    /// others: their checksums may be right, but the caller has found them forged.
    pub(super) fn read_accepted_at(
        &self,
        pointer: &Pointer,
        at: &Location,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Arc<[u8]>> {
        let error = PoolError::Frame { pointer: *pointer, damage: Damage::Seal };
        for way in 0..self.backend.ways(at.at()) {
            let Ok(frame) = self.read_whole(pointer, at, Some(way)) else { continue };
            if !is_right(&frame.content) {
                continue;
            }
            if self.backend.is_read_again() {
                self.note_wrong_reply(at.at());
                return Ok(frame.content.into());
            }
            // Its location may have been reused meanwhile: then nothing is forged.
            if pointer.birth <= self.durable() && self.find(pointer).is_ok_and(|now| now == *at) {
                let healed = self.told(self.heal_frame(&frame, at.at(), at.offset));
                for device in healed.iter().flat_map(Healed::devices) {
                    self.report_of(pointer, at, &error, (Some(device), true));
                }
            }
            return Ok(frame.content.into());
        }
        // Other frames may be in the place of a moved one: its parts are looked for where it is now.
        let is_moved = || !self.find(pointer).is_ok_and(|now| now == *at);
        if u64::from(pointer.stored) > self.longest || is_moved() {
            return Err(error);
        }
        let offset = at.offset + u64::from(Pointer::HEADER);
        let pieces = put_together(&*self.backend, at.at(), offset, pointer, is_right)?;
        let Some((stored, content, wrong)) = pieces else { return Err(error) };
        if is_moved() {
            return Ok(content.into());
        }
        let durable = pointer.birth <= self.durable() && self.usable().is_ok();
        let mended = durable && self.told(self.heal(at.at(), offset, &stored)).is_some();
        for device in wrong {
            self.report_of(pointer, at, &error, (Some(device), mended));
        }
        Ok(content.into())
    }

    /// The device whose copy is unreadable, where the first read chose among several copies and copy `good` is right.
    fn damaged_copy(&self, pointer: &Pointer, at: &Location, good: usize) -> Option<u16> {
        let mut others = (0..self.backend.ways(at.at())).filter(|way| *way != good);
        let bad = others.find(|way| self.read_whole(pointer, at, Some(*way)).is_err())?;
        Some(self.backend.member(at.at(), bad))
    }

    /// Reconstructs a frame block by block from different copies; rewrites the damaged blocks.
    fn read_pieces(
        &self,
        pointer: &Pointer,
        at: &Location,
        error: &PoolError,
        first: &Reading,
    ) -> Result<Option<Arc<[u8]>>> {
        if u64::from(pointer.stored.max(pointer.logical)) > self.longest {
            return Ok(None);
        }
        let offset = at.offset + u64::from(Pointer::HEADER);
        let Some((stored, content, wrong)) = put_together(&*self.backend, at.at(), offset, pointer, &mut |_| true)?
        else {
            return Ok(None);
        };
        let durable = pointer.birth <= self.durable() && self.usable().is_ok();
        let mended = durable && self.told(self.heal(at.at(), offset, &stored)).is_some();
        let mut blamed = self.blamed_in(at.at(), first, &stored).unwrap_or_default();
        blamed.extend(wrong);
        for device in blamed {
            self.report_of(pointer, at, error, (Some(device), mended));
        }
        Ok(Some(content.into()))
    }

    /// Logs a reading that was wrong while the stored object is right.
    fn note_wrong_reply(&self, at: SegmentAt<'_>) {
        let object = self.backend.label_of(at);
        tracing::warn!(object, "a reply of the store, or the part of it in the cache, was wrong: the object is right");
    }

    /// Whether a repair found nothing wrong in the stored object, since a reading of it was.
    fn was_wrong_reply(&self, at: SegmentAt<'_>, healed: &Healed) -> bool {
        let was_reply = self.backend.is_read_again() && healed.columns == 0;
        if was_reply {
            self.note_wrong_reply(at);
        }
        was_reply
    }

    /// Logs a failed repair, which is no error for a reader that has the content.
    fn told(&self, mended: Result<Option<Healed>>) -> Option<Healed> {
        mended.inspect_err(|error| tracing::warn!(%error, "a damaged copy cannot be written anew")).ok().flatten()
    }

    /// Rewrites all copies of a frame from copy `good`, which is right. `None` if the frame is no longer there.
    fn mend(&self, pointer: &Pointer, at: SegmentAt<'_>, offset: u64, good: usize) -> Result<Option<Healed>> {
        if self.usable().is_err() {
            return Ok(None);
        }
        // Another device may have failed or returned meanwhile: then this number reads other columns.
        match self.read_whole_at(pointer, at, offset, good) {
            Ok(frame) => self.heal_frame(&frame, at, offset),
            Err(PoolError::Frame { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Repairs all copies of a part of a segment; `None` if it is no longer there.
    pub(super) fn heal(&self, at: SegmentAt<'_>, offset: u64, right: &[u8]) -> Result<Option<Healed>> {
        let healed = self.backend.heal(at, offset, right, &|image| self.is_whole(at, image))?;
        self.sums.mended.fetch_add(healed.as_ref().map_or(0, |healed| healed.columns), Ordering::Relaxed);
        Ok(healed)
    }

    /// Reads a frame of the table from all copies; returns its damage, if there is any, and repairs it.
    pub(super) fn look_at_table_frame(&self, root: &Root, pointer: &Pointer) -> Option<TableDamage> {
        let at = table_place(root, pointer)?;
        let (mut good, mut found, mut bad) = (None, None, Vec::new());
        for way in 0..self.backend.ways(at) {
            let mut reading = Reading::default();
            let damage = match read_table_copy(&*self.backend, at, way, pointer, &mut reading) {
                Ok(_) => {
                    good.get_or_insert((way, reading.stored));
                    continue;
                }
                Err(PoolError::Frame { damage, .. }) => damage,
                Err(_) => Damage::Structure("it cannot be read"),
            };
            found.get_or_insert((way, damage));
            bad.push(reading);
        }
        let (first, damage) = found?;
        let healed = self.told(self.mend_table(root, pointer, at, good.as_ref().map(|(way, _)| *way)));
        if healed.as_ref().is_some_and(|healed| self.was_wrong_reply(at, healed)) {
            return None;
        }
        let mut devices: BTreeSet<u16> = healed.iter().flat_map(Healed::devices).collect();
        match good {
            Some((_, right)) => {
                devices.extend(bad.iter().filter_map(|reading| self.blamed_in(at, reading, &right)).flatten());
            }
            None if devices.is_empty() => drop(devices.insert(self.backend.member(at, first))),
            None => {}
        }
        Some(TableDamage { damage, devices, healed })
    }

    /// Rewrites all copies of a frame of the table from copy `good`, or, without a right copy, from a block-wise
    /// reconstruction.
    fn mend_table(
        &self,
        root: &Root,
        pointer: &Pointer,
        at: SegmentAt<'_>,
        good: Option<usize>,
    ) -> Result<Option<Healed>> {
        let mut committed = self.committed.lock();
        // Segments of the table are freed under this lock.
        let now = table_place(&committed.root, pointer).map(|at| at.place);
        if now != table_place(root, pointer).map(|at| at.place) || self.usable().is_err() {
            return Ok(None);
        }
        // Parity that covers more than this frame is right again in the next table segment.
        if at.place.parity() > 0 {
            (committed.open_table, committed.renew) = (None, true);
        }
        let offset = u64::from(pointer.offset) * u64::from(Pointer::UNIT);
        if let Some(good) = good {
            return self.mend(pointer, at, offset, good);
        }
        let content = offset + u64::from(Pointer::HEADER);
        let Some((stored, ..)) = put_together(&*self.backend, at, content, pointer, &mut |_| true)? else {
            return Ok(None);
        };
        self.heal(at, content, &stored)
    }

    /// Repairs the damaged frames of a segment with two copies, as far as possible, and reports the damage; returns
    /// whether there was any.
    pub(super) fn mend_segment(&self, id: u32) -> Result<bool> {
        let Some(place) = self.place_of(id) else { return Ok(false) };
        if self.backend.ways(SegmentAt { segment: id, place: &place }) < 2 {
            return Ok(false);
        }
        let mut mended = false;
        let living = self.living_by_headers(id)?;
        let Some(written) = self.map.read().table.segments().get(&id).map(WrittenSoFar::of) else { return Ok(false) };
        let scrub = |visit: &mut dyn FnMut(&Checked) -> bool| {
            if self.backend.is_grouped() {
                self.restore_segment(id, (written, &living), visit)
            } else {
                self.scrub_copies(id, &living, visit)
            }
        };
        scrub(&mut |checked| {
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

    fn place_of(&self, id: u32) -> Option<Place> {
        let map = self.map.read();
        map.table.segments().get(&id).map(|segment| segment.place.clone()).filter(|place| !place.is_empty())
    }

    /// Verifies these frames in both copies of a segment, and repairs frames that are damaged in one of them. All
    /// frames have to be on the devices.
    pub(super) fn scrub_copies(
        &self,
        id: u32,
        living: &BTreeSet<Name>,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<bool> {
        let Some(place) = self.place_of(id) else { return Ok(true) };
        let at = SegmentAt { segment: id, place: &place };
        let devices = [0, 1].map(|way| self.backend.member(at, way));
        let mut damaged: [Damages; 2] =
            [0, 1].map(|_| living.iter().map(|name| (*name, (Damage::Header, None))).collect());
        for (way, (damaged, device)) in damaged.iter_mut().zip(devices).enumerate() {
            let mut go_on = true;
            self.walk(id, way, false, &mut |frame| {
                let name = name_of(&frame);
                if !living.contains(&name) {
                    return Ok(true);
                }
                match check(&frame) {
                    Some(damage) => drop(damaged.insert(name, (damage, Some(frame.header.owner)))),
                    None => drop(damaged.remove(&name)),
                }
                // Once per frame; for the second copy the visitor only decides whether to continue.
                let header = (way == 0).then_some(frame.header);
                let bytes = header.map_or(0, |header| header.pointer.charged());
                let owner = Some(frame.header.owner);
                go_on = visit(&Checked { owner, header, bytes, ..Checked::of(name, device) });
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
        let [first, second] = devices;
        Ok(self.mend_from(at, 1, first, &at_first, visit)?
            && self.mend_from(at, 0, second, &at_second, visit)?
            && self.tell_lost(id, first, &at_first, &at_second, visit))
    }

    /// Repairs frames that are damaged on a device from the other copy, as far as they are right there.
    fn mend_from(
        &self,
        at: SegmentAt<'_>,
        good: usize,
        device: u16,
        damaged: &Damages,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<bool> {
        if damaged.is_empty() {
            return Ok(true);
        }
        let mut go_on = true;
        self.walk(at.segment, good, false, &mut |frame| {
            let name = name_of(&frame);
            let (Some((damage, _)), None) = (damaged.get(&name), check(&frame)) else { return Ok(true) };
            let healed = self.told(self.mend(&frame.header.pointer, at, u64::from(frame.offset), good));
            if let Some(healed) = healed.filter(|healed| !self.was_wrong_reply(at, healed)) {
                let (owner, header) = (Some(frame.header.owner), Some(frame.header));
                let (damage, repaired) = (Some(damage.clone()), healed.bytes());
                go_on = visit(&Checked { owner, header, damage, mended: true, repaired, ..Checked::of(name, device) });
            }
            Ok(go_on)
        })?;
        Ok(go_on)
    }

    /// Reports the frames that are damaged in both copies.
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
            if !visit(&Checked { owner, damage, ..Checked::of(*name, device) }) {
                return false;
            }
        }
        true
    }
}

fn name_of(frame: &Walked<'_>) -> Name {
    (frame.header.pointer.segment, frame.header.pointer.index)
}
