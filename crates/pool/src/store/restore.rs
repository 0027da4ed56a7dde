//! Scrub and resilver of segments in groups: every live frame is verified, from other copies or reconstructions where
//! the first is damaged; then all columns are compared with the right content, including parity, and rewritten where
//! they differ.
//!
//! Callers: scrubs; commands that bring devices back. Invariants:
//! - Only verified bytes are written, including frames that are no longer alive: a move or a free is not durable
//!   before a commit, and the last root needs them.
//! - Parity is recomputed only for rows that were verified completely: otherwise lost frames may still be
//!   reconstructed from the old parity.
//! - A device counts as complete when every segment on it was verified after it had returned.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::cleaning::{Cleaned, Outcome};
use super::scrub::{Checked, Walked, WrittenSoFar, check};
use super::{Committed, Result, Store};
use crate::backend::{Disks, HealedPart, SegmentAt, Sources};
use crate::device::Device;
use crate::error::{Damage, PoolError};
use crate::frame::{self, Header};
use crate::frames::Owner;
use crate::label::Place;
use crate::pointer::Pointer;
use crate::segment::table::{Op, Segment};

/// Number of bytes read in one step.
const AT_ONCE: u64 = 1 << 20;
/// Readahead, in steps.
const AHEAD: usize = 4;

type Name = (u32, u32);

/// Limit of the bytes that are checked to reconstruct frames of one segment block by block.
const MOST_JUDGED: u64 = 2 << 30;

/// A frame that was found by its header.
#[derive(Clone)]
struct Found {
    name: Name,
    header: Header,
    offset: usize,
    length: usize,
}

impl Found {
    fn of(frame: &Walked<'_>) -> Self {
        let Pointer { segment, index, .. } = frame.header.pointer;
        let length = frame.raw_header.len() + frame.stored.len();
        Self { name: (segment, index), header: frame.header, offset: frame.offset as usize, length }
    }

    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.length
    }
}

/// The verified frames of a segment, by offset.
struct Verified {
    frames: BTreeMap<usize, Found>,
    written: WrittenSoFar,
    /// Whether frame numbers are in the order of the offsets: not for relocated frames.
    numbered: bool,
    /// Alignment to which the segment is padded with zeros at the end of a commit, bytes.
    row: usize,
}

impl Verified {
    /// Adds a new frame. File content may look like a frame where the header before it is damaged: returns the names
    /// of supposed frames that lie inside of this one.
    fn add(&mut self, found: Found) -> Option<Vec<Name>> {
        let Range { start, end } = found.range();
        let before = self.frames.range(..end).rev();
        let overlapping: Vec<&Found> =
            before.map(|(_, other)| other).take_while(|other| other.range().end > start).collect();
        let longer = |other: &&Found| other.offset >= start && other.range().end <= end && other.length < found.length;
        if !overlapping.iter().all(longer) {
            return None;
        }
        let inside: Vec<(usize, Name)> = overlapping.iter().map(|other| (other.offset, other.name)).collect();
        for (offset, _) in &inside {
            self.frames.remove(offset);
        }
        self.frames.insert(start, found);
        Some(inside.into_iter().map(|(_, name)| name).collect())
    }

    /// Whether these are all frames ever written to the segment, including dead ones.
    fn is_all(&self) -> bool {
        let in_order = || self.frames.values().zip(0..).all(|(found, number)| found.name.1 == number);
        let mut end = 0;
        let adjoin = |found: &Found| self.fits_behind(std::mem::replace(&mut end, found.range().end), found.offset);
        self.frames.len() == self.written.frames as usize
            && (!self.numbered || in_order())
            && self.frames.values().all(adjoin)
    }

    /// Whether a frame at `start` may follow one that ends at `end`.
    fn fits_behind(&self, end: usize, start: usize) -> bool {
        start == end.next_multiple_of(Pointer::UNIT as usize) || start == end.next_multiple_of(self.row)
    }

    /// Ranges of a segment that are right: verified frames, and the zero padding behind them. Padding has no
    /// checksum: it is recognized by the absence of a frame, and written to the image.
    fn runs(&self, image: &mut [u8]) -> Vec<Range<usize>> {
        let (all, length) = (self.is_all(), image.len());
        let mut runs: Vec<Range<usize>> = Vec::new();
        let mut close = |run: &mut Range<usize>, until: usize, (before, next): (&Found, u32)| {
            let is_next = self.numbered && before.name.1.checked_add(1) == Some(next);
            let too_short = until - run.end < frame::LENGTH;
            let zeros = too_short || (all || is_next) && self.fits_behind(run.end, until);
            if let Some(gap) = image.get_mut(run.end..until).filter(|_| zeros) {
                gap.fill(0);
                run.end = until;
            }
        };
        let mut before: Option<&Found> = None;
        for found in self.frames.values() {
            let range = found.range();
            if let (Some(run), Some(before)) = (runs.last_mut(), before) {
                close(run, range.start, (before, found.name.1));
            }
            match runs.last_mut().filter(|run| run.end == range.start) {
                Some(run) => run.end = range.end,
                None => runs.push(range),
            }
            before = Some(found);
        }
        if let (Some(run), Some(before)) = (runs.last_mut(), before) {
            close(run, length, (before, self.written.frames));
        }
        runs
    }
}

/// The content of a segment as read from one copy or reconstruction.
struct SegmentImage {
    bytes: Vec<u8>,
    /// The unreadable ranges.
    unread: Vec<Range<usize>>,
    sources: Sources,
}

/// Frames of a segment that were damaged and are repaired, per device that returned wrong bytes.
#[derive(Default)]
struct Mended {
    frames: BTreeMap<(Name, Option<u16>), MendedFrame>,
}

/// Damage of a frame on a device.
#[derive(Default)]
struct MendedFrame {
    header: Option<Header>,
    /// The kind of damage, as far as known.
    damage: Option<Damage>,
    /// Number of bytes written to the device.
    repaired: u64,
}

impl Mended {
    /// Records that a frame was damaged in a reading, and the devices to blame.
    fn damaged(&mut self, found: &Found, damage: &Damage, devices: impl IntoIterator<Item = Option<u16>>) {
        for device in devices {
            let frame = self.frames.entry((found.name, device)).or_default();
            (frame.header, frame.damage) = (Some(found.header), Some(damage.clone()));
        }
    }

    /// Records a rewritten part: the frames in it, or the one before it, were damaged on that device.
    fn healed(&mut self, part: &HealedPart, frames: &BTreeMap<usize, Found>) {
        let (from, to) = (part.range.start as usize, part.range.end as usize);
        let before = frames.range(..=from).next_back().map(|(offset, _)| *offset).unwrap_or(from);
        let mut bytes = part.bytes;
        let around = || frames.range(before..to.max(before + 1)).map(|(_, found)| found);
        let inside = || around().filter(|found| found.range().end > from);
        let first = around().next().or_else(|| frames.values().next());
        for found in inside().chain(first.filter(|_| inside().next().is_none())) {
            let frame = self.frames.entry((found.name, Some(part.device))).or_default();
            frame.header = Some(found.header);
            frame.repaired += std::mem::take(&mut bytes);
        }
    }

    /// Converts to reports of a scrub. Frames with a known wrong device are not reported for an unknown one.
    fn reports(self) -> Vec<Checked> {
        let known: BTreeSet<Name> =
            self.frames.keys().filter(|(_, device)| device.is_some()).map(|(name, _)| *name).collect();
        let is_reported = |name: &Name, device: &Option<u16>| device.is_some() || !known.contains(name);
        let reported = self.frames.into_iter().filter(|((name, device), _)| is_reported(name, device));
        reported
            .map(|((name, device), MendedFrame { header, damage, repaired })| Checked {
                name,
                owner: header.map(|header| header.owner),
                header,
                bytes: 0,
                device,
                damage: Some(damage.unwrap_or(Damage::Checksum)),
                mended: true,
                repaired,
            })
            .collect()
    }
}

/// Whether these bytes are an undamaged frame with this header.
fn is_frame(frame: &[u8], header: &Header) -> bool {
    let Some((raw_header, stored)) = frame.split_at_checked(frame::LENGTH) else { return false };
    Header::decode(raw_header).is_ok_and(|found| found == *header)
        && check(&Walked::new(*header, 0, raw_header, stored)).is_none()
}

/// Whether copies may be added to a segment.
fn may_widen(segment: &Segment) -> bool {
    segment.sealed && segment.live_frames > 0 && !segment.place.is_empty()
}

impl Store {
    /// Reads a segment from copy or reconstruction `way`, with its unreadable ranges.
    fn image(&self, at: SegmentAt<'_>, way: usize, length: usize) -> SegmentImage {
        let row = u64::from(self.backend.row(at.place)).max(1);
        let step = ((AT_ONCE / row).max(1) * row) as usize;
        let (mut image, mut unread, mut sources) = (vec![0; length], Vec::new(), Sources::default());
        for (number, part) in image.chunks_mut(step).enumerate() {
            let start = number * step;
            // Where copies are chosen per read, readahead happens at the choice.
            if way == 0 && number.is_multiple_of(AHEAD) && !self.backend.chooses(at) {
                let (from, to) = (if number == 0 { 0 } else { start + AHEAD * step }, start + 2 * AHEAD * step);
                let (from, to) = (from.min(length), to.min(length));
                self.backend.expect(at, from as u64, (to - from) as u64);
            }
            let noting = |sources: &mut Sources| self.backend.read_noting(at, Some(way), start as u64, part, sources);
            if let Err(error) = sources.within(start, noting) {
                tracing::debug!(segment = at.segment, way, %error, "a part of a segment cannot be read");
                unread.push(start..(start + step).min(length));
            }
        }
        SegmentImage { bytes: image, unread, sources }
    }

    /// Whether these bytes are a complete, sealed segment, with all frames that were ever written to it and zeros
    /// between them.
    pub(super) fn is_whole(&self, at: SegmentAt<'_>, image: &[u8]) -> bool {
        let known = {
            let map = self.map.read();
            let segment = map.table.segments().get(&at.segment).filter(|segment| segment.place == *at.place);
            segment.map(|segment| (WrittenSoFar::of(segment), segment.stream))
        };
        let Some((written, stream)) = known.filter(|(written, _)| written.sealed) else { return false };
        let (numbered, row) = (!stream.is_of_moved(), (self.backend.row(at.place) as usize).max(1));
        let mut verified = Verified { frames: BTreeMap::new(), written, numbered, row };
        let (mut end, mut is_clean) = (0, image.len() >= written.bytes as usize);
        let walked = self.walk_image(at, image, &mut |frame| {
            let found = Found::of(&frame);
            let gap = image.get(end..found.offset);
            end = found.range().end;
            is_clean &= check(&frame).is_none() && gap.is_some_and(|gap| gap.iter().all(|byte| *byte == 0));
            verified.add(found);
            Ok(is_clean)
        });
        let rest = image.get(end..).is_some_and(|rest| rest.iter().all(|byte| *byte == 0));
        matches!(walked, Ok(true)) && is_clean && rest && verified.is_all()
    }

    /// Verifies and repairs a segment up to its written length `written`; `living` are its live frames, and all of it
    /// is on the devices. Dead frames are verified as well: the last root may still need them.
    pub(super) fn restore_segment(
        &self,
        id: u32,
        (written, living): (WrittenSoFar, &BTreeSet<Name>),
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<bool> {
        let there = self.map.read().table.segments().get(&id).map(|segment| (segment.place.clone(), segment.stream));
        let Some((place, stream)) = there.filter(|(place, _)| !place.is_empty()) else { return Ok(true) };
        let at = SegmentAt { segment: id, place: &place };
        let length = written.bytes as usize;
        let SegmentImage { bytes: mut image, unread, sources } = self.image(at, 0, length);
        let mut damaged: BTreeMap<Name, (Damage, Option<Owner>)> =
            living.iter().map(|name| (*name, (Damage::Header, None))).collect();
        let lives = |found: &Found| {
            let units = found.offset as u32 / Pointer::UNIT;
            self.map.read().table.lives_at(found.name.0, found.name.1, id, units)
        };
        let (numbered, row) = (!stream.is_of_moved(), (self.backend.row(&place) as usize).max(1));
        let mut verified = Verified { frames: BTreeMap::new(), written, numbered, row };
        let (mut go_on, device) = (true, self.backend.member(at, 0));
        // Damaged frames by the headers that are right in some copy.
        let mut torn: BTreeMap<usize, Found> = BTreeMap::new();
        self.walk_image(at, &image, &mut |frame| {
            let found = Found::of(&frame);
            if let Some(damage) = check(&frame) {
                if damaged.contains_key(&found.name) {
                    damaged.insert(found.name, (damage, Some(frame.header.owner)));
                }
                torn.insert(found.offset, found);
                return Ok(true);
            }
            if lives(&found) && damaged.remove(&found.name).is_some() {
                let (name, bytes) = (found.name, frame.header.pointer.charged());
                let (owner, header) = (Some(frame.header.owner), Some(frame.header));
                go_on = visit(&Checked { owner, header, bytes, ..Checked::of(name, device) });
            }
            verified.add(found);
            Ok(go_on)
        })?;
        if !go_on {
            return Ok(false);
        }
        let mut mended = Mended::default();
        // The devices that returned wrong bytes of a frame in the first reading.
        let blamed = |read: &[u8], right: &[u8], offset: usize| -> Vec<Option<u16>> {
            let wrong = sources.wrong(offset, read, right);
            if wrong.is_empty() && read != right {
                return vec![None];
            }
            wrong.into_iter().filter(|device| self.backend.should_hold(at, *device)).map(Some).collect()
        };
        for way in 1..self.backend.ways(at) {
            if verified.is_all() {
                let now = self.living(id);
                damaged.retain(|name, _| now.contains(name));
                if damaged.is_empty() {
                    break;
                }
            }
            let other = self.image(at, way, length).bytes;
            let mut more = Vec::new();
            self.walk_image(at, &other, &mut |frame| {
                let found = Found::of(&frame);
                match check(&frame) {
                    None => more.push(found),
                    Some(_) => drop(torn.insert(found.offset, found)),
                }
                Ok(true)
            })?;
            for found in more {
                let (same, range, lives) = (found.clone(), found.range(), lives(&found));
                let Some(inside) = verified.add(found) else { continue };
                let mut wrong = Vec::new();
                if let (Some(to), Some(from)) = (image.get_mut(range.clone()), other.get(range)) {
                    wrong = blamed(to, from, same.offset);
                    to.copy_from_slice(from);
                }
                for content in inside.into_iter().filter(|name| living.contains(name)) {
                    damaged.insert(content, (Damage::Header, None));
                }
                if let Some((damage, _)) = damaged.remove(&same.name).filter(|_| lives) {
                    mended.damaged(&same, &damage, wrong);
                }
            }
        }
        if !verified.is_all() {
            let mut left = MOST_JUDGED;
            let whole: BTreeSet<Name> = verified.frames.values().map(|found| found.name).collect();
            for found in torn.into_values().filter(|found| !whole.contains(&found.name)) {
                let (same, range, lives) = (found.clone(), found.range(), lives(&found));
                let mut frame = vec![0; found.length];
                let mut is_right = |frame: &[u8]| is_frame(frame, &same.header);
                let offset = range.start as u64;
                let pieced = self.backend.piece_together(at, offset, &mut frame, &mut left, &mut is_right)?;
                let Some(pieced) = pieced else { continue };
                let Some(inside) = verified.add(found) else { continue };
                let mut wrong: Vec<Option<u16>> = pieced.into_iter().map(Some).collect();
                if let Some(to) = image.get_mut(range) {
                    wrong.extend(blamed(to, &frame, same.offset));
                    to.copy_from_slice(&frame);
                }
                for content in inside.into_iter().filter(|name| living.contains(name)) {
                    damaged.insert(content, (Damage::Header, None));
                }
                if let Some((damage, _)) = damaged.remove(&same.name).filter(|_| lives) {
                    mended.damaged(&same, &damage, wrong);
                }
            }
        }
        let mut runs = verified.runs(&mut image);
        // Frames that were freed meanwhile are not missed.
        if !damaged.is_empty() {
            let now = self.living(id);
            damaged.retain(|name, _| now.contains(name));
        }
        // The remaining damaged frames were freed and cannot be reconstructed: parity has to match whatever is there,
        // because other columns of the row are reconstructed from both.
        let covers = |runs: &[Range<usize>]| length == 0 || matches!(runs, [run] if *run == (0..length));
        if damaged.is_empty() && unread.is_empty() && !covers(&runs) {
            tracing::debug!(segment = id, "what was freed in a segment is damaged");
            runs = std::iter::once(0..length).collect();
        }
        if self.usable().is_ok() {
            let mut there = true;
            for run in &runs {
                let right = image.get(run.clone()).unwrap_or_default();
                match self.heal(at, run.start as u64, right)? {
                    Some(healed) => healed.wrong.iter().for_each(|part| mended.healed(part, &verified.frames)),
                    None => there = false,
                }
            }
            if there && written.sealed && covers(&runs) {
                self.backend.restored(id);
            }
        }
        if !mended.reports().iter().all(&mut *visit) {
            return Ok(false);
        }
        for (name, (damage, owner)) in damaged {
            let damage = Some(damage);
            if !visit(&Checked { owner, damage, ..Checked::of(name, device) }) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Resilvers the present devices that may lack data, segment by segment; `done` is called for each finished
    /// segment. Segments written meanwhile are complete already. Returns whether it reached the end; then a commit
    /// has to follow, [`Self::strengthen`], another commit, and [`Self::resilvered`].
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Suspended`].
    pub fn resilver(&self, visit: &mut dyn FnMut(&Checked) -> bool, done: &mut dyn FnMut(u32)) -> Result<bool> {
        self.resilver_from(0, visit, done)
    }

    /// The segment at which a resilver can resume that has finished all segments before `first` and was followed by a
    /// commit: an earlier one where missing copies have to be added.
    #[must_use]
    pub fn resilver_goes_on(&self, first: u32) -> u32 {
        let map = self.map.read();
        let adds = |(id, segment): (&u32, &Segment)| {
            let at = SegmentAt { segment: *id, place: &segment.place };
            (may_widen(segment) && self.backend.would_widen(at)).then_some(*id)
        };
        map.table.segments().range(..first).find_map(adds).unwrap_or(first)
    }

    /// Resumes a resilver as [`Self::resilver`], from a segment that [`Self::resilver_goes_on`] has returned. After
    /// an import the caller has to make sure that no other system has written to a device meanwhile
    /// ([`Disks::left_at`]).
    ///
    /// # Errors
    /// As [`Self::resilver`].
    pub fn resilver_from(
        &self,
        first: u32,
        visit: &mut dyn FnMut(&Checked) -> bool,
        done: &mut dyn FnMut(u32),
    ) -> Result<bool> {
        let stale: BTreeSet<u16> = self.disks()?.stale().into_iter().collect();
        if stale.is_empty() {
            return Ok(true);
        }
        // Segments opened while these devices were absent are sealed, so that new ones include them.
        for appender in self.appenders.all() {
            self.end_segment(appender)?;
        }
        {
            let mut committed = self.committed.lock();
            (committed.open_table, committed.renew) = (None, true);
        }
        if !self.scrub_table(visit) {
            return Ok(false);
        }
        self.widen()?;
        let stale: Vec<u16> = stale.into_iter().collect();
        let numbers: BTreeSet<u16> = self.disks()?.numbers_of(&stale).into_iter().collect();
        let concerns = |place: &Place| place.iter().any(|slot| numbers.contains(&slot.device));
        let ids: Vec<u32> = {
            let map = self.map.read();
            let segments = map.table.segments().range(first..);
            segments
                .filter(|(_, segment)| segment.live_frames > 0 && concerns(&segment.place))
                .map(|(id, _)| *id)
                .collect()
        };
        for id in ids {
            if !self.scrub_segment(id, visit)? {
                return Ok(false);
            }
            done(id);
        }
        Ok(true)
    }

    /// Extends segments of mirrors by a location on attached devices; the copy is written when the segment is
    /// verified.
    fn widen(&self) -> Result<()> {
        self.ready()?;
        let mut map = self.map.write();
        let segments = map.table.segments().iter().filter(|(_, segment)| may_widen(segment));
        let widen = |(id, segment): (&u32, &Segment)| {
            Some((*id, self.backend.widen(SegmentAt { segment: *id, place: &segment.place })?))
        };
        let widened: Vec<(u32, Place)> = segments.filter_map(widen).collect();
        widened.into_iter().try_for_each(|(id, place)| map.table.apply(Op::Widen { id, place }))
    }

    /// Moves segments with less redundancy than possible now, as far as they are durable; segments that are damaged
    /// beyond repair stay.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`], [`PoolError::Device`], [`PoolError::Suspended`].
    pub fn strengthen(&self) -> Result<()> {
        self.ready()?;
        let mut uncleanable = self.uncleanable.lock();
        // Segments that could not be moved may have been repaired since.
        uncleanable.clear();
        let mut tried = false;
        while let Some(id) = self.weak_segment(&uncleanable) {
            let moved = match self.move_out(id, u64::MAX, false, &mut Cleaned::default()) {
                Ok(Outcome::Damaged) => {
                    self.mend_segment(id)?;
                    self.move_out(id, u64::MAX, false, &mut Cleaned::default())
                }
                moved => moved,
            };
            match moved {
                Ok(Outcome::Empty) => tried = false,
                Ok(Outcome::Damaged | Outcome::Budget) => drop(uncleanable.insert(id)),
                Err(PoolError::NoSpace) if !tried => {
                    // Moved segments release their locations.
                    tried = true;
                    self.commit_moves()?;
                    self.backend.reclaim();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn weak_segment(&self, uncleanable: &BTreeSet<u32>) -> Option<u32> {
        let (durable, map) = (self.durable().0, self.map.read());
        let is_weak = |(id, segment): &(&u32, &Segment)| {
            let settled = segment.sealed && segment.newest.0 <= durable && !uncleanable.contains(*id);
            settled && self.lacks_copy(**id, segment)
        };
        map.table.segments().iter().find(is_weak).map(|(id, _)| *id)
    }

    /// The present devices that may lack data, and the change counter of the devices: to be read before
    /// [`Self::resilver`].
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a pool that is not on devices.
    pub fn stale_devices(&self) -> Result<(Vec<u16>, u64)> {
        let disks = self.disks()?;
        let changes = disks.changes();
        Ok((disks.stale(), changes))
    }

    /// Ends a resilver: everything on these devices was verified, and a commit followed, so that no log entry is
    /// needed that they lack. They are complete; `false` where devices have changed meanwhile.
    ///
    /// # Errors
    /// Errors of writing labels.
    pub fn resilvered(&self, devices: &[u16], changes: u64) -> Result<bool> {
        self.ready()?;
        let mut whole = false;
        self.of_devices(|disks| {
            whole = disks.make_whole(devices, changes)?;
            Ok(())
        })?;
        Ok(whole)
    }

    /// Takes a device offline.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where data would be lost; errors of writing labels.
    pub fn offline(&self, device: u16) -> Result<()> {
        self.ready()?;
        self.of_devices(|disks| disks.offline(device))
    }

    /// Brings a device back.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a different device; errors of writing labels.
    pub fn online(&self, number: u16, device: Arc<dyn Device>) -> Result<()> {
        self.ready()?;
        self.of_devices(|disks| disks.online(number, device))
    }

    /// Runs an operation that changes the devices' labels. Commits wait meanwhile.
    pub(super) fn of_devices(&self, change: impl FnOnce(&Disks) -> Result<()>) -> Result<()> {
        self.change_devices(&mut self.committed.lock(), change)
    }

    pub(super) fn change_devices(
        &self,
        committed: &mut Committed,
        change: impl FnOnce(&Disks) -> Result<()>,
    ) -> Result<()> {
        let disks = self.disks()?;
        let changed = change(disks);
        committed.identity = disks.identity();
        // Refusals come before any change.
        changed.map_err(|error| match error {
            PoolError::Refused(_) | PoolError::Short { .. } => error,
            error => self.suspend(&error),
        })
    }

    /// The pool's devices, for operations on their health.
    #[must_use]
    pub fn on_devices(&self) -> Option<&Disks> {
        self.disks.as_deref()
    }
}
