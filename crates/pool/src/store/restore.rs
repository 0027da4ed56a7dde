//! Segments of groups made whole: every frame that lives is verified, in other ways where the first
//! finds it damaged; then all columns are compared with what they should be, parity as well, and
//! written where they differ. That is what a scrub does with each of them, and what makes a device
//! whole that comes back or is new.
//!
//! Callers: scrubs; commands that bring devices. Invariants:
//! - Only what was verified is written, frames that do not live any more among it: a move or a free
//!   is not durable before a commit, and the last root needs them.
//! - Parity is computed again only of rows that were verified whole: otherwise it is what lost frames
//!   may still be computed from.
//! - A device counts as whole when every segment that lies on it was verified after it had come.

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

/// So much is read at once, bytes.
const AT_ONCE: u64 = 1 << 20;
/// So many times as much is announced ahead.
const AHEAD: usize = 4;

type Name = (u32, u32);

/// What is judged at most to put together frames of one segment of which different parts are damaged in
/// different columns, bytes.
const MOST_JUDGED: u64 = 2 << 30;

/// A frame that was found, by its header.
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

/// The frames of a segment that were verified, by their offsets.
struct Verified {
    frames: BTreeMap<usize, Found>,
    written: WrittenSoFar,
    /// Whether frames are numbered here in their order: not those that have moved.
    numbered: bool,
    /// What the segment is filled up to with zeros at the end of a commit, bytes.
    row: usize,
}

impl Verified {
    /// Adds a frame, if it is new. Content may look like a frame where the header before it is
    /// damaged: answers what turns out to be that.
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

    /// Whether these are all that were ever written to the segment, also those that do not live.
    fn is_all(&self) -> bool {
        let in_order = || self.frames.values().zip(0..).all(|(found, number)| found.name.1 == number);
        let mut end = 0;
        let adjoin = |found: &Found| self.fits_behind(std::mem::replace(&mut end, found.range().end), found.offset);
        self.frames.len() == self.written.frames as usize
            && (!self.numbered || in_order())
            && self.frames.values().all(adjoin)
    }

    /// Whether a frame that begins here may be the next one behind one that ends there.
    fn fits_behind(&self, end: usize, start: usize) -> bool {
        start == end.next_multiple_of(Pointer::UNIT as usize) || start == end.next_multiple_of(self.row)
    }

    /// The parts of a segment that are right: frames that were verified, and the zeros behind them.
    /// Nothing verifies those: they are told by there being no frame, and put into the image.
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

/// The content of a segment, read in one way.
struct SegmentImage {
    bytes: Vec<u8>,
    /// The parts that could not be read.
    unread: Vec<Range<usize>>,
    sources: Sources,
}

/// The frames of a segment that were wrong and are right now, each on the devices that gave wrong bytes.
#[derive(Default)]
struct Mended {
    frames: BTreeMap<(Name, Option<u16>), MendedFrame>,
}

/// How a frame was wrong on a device.
#[derive(Default)]
struct MendedFrame {
    header: Option<Header>,
    /// As far as it is known.
    damage: Option<Damage>,
    /// What was written to the device, bytes.
    repaired: u64,
}

impl Mended {
    /// A frame was damaged in a reading; these devices are to blame.
    fn damaged(&mut self, found: &Found, damage: &Damage, devices: impl IntoIterator<Item = Option<u16>>) {
        for device in devices {
            let frame = self.frames.entry((found.name, device)).or_default();
            (frame.header, frame.damage) = (Some(found.header), Some(damage.clone()));
        }
    }

    /// A part of the segment was wrong on a device, and was written anew: the frames in it, or the one
    /// before it, were wrong there.
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

    /// The reports of a scrub. A frame of which a wrong device is known needs no report of an unknown
    /// one.
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

/// Whether these bytes are a whole frame with this header.
fn is_frame(frame: &[u8], header: &Header) -> bool {
    let Some((raw_header, stored)) = frame.split_at_checked(frame::LENGTH) else { return false };
    Header::decode(raw_header).is_ok_and(|found| found == *header)
        && check(&Walked::new(*header, 0, raw_header, stored)).is_none()
}

/// Whether more copies may be added to a segment.
fn may_widen(segment: &Segment) -> bool {
    segment.sealed && segment.live_frames > 0 && !segment.place.is_empty()
}

impl Store {
    /// What a segment holds, read in one way, and which parts of it cannot be read.
    fn image(&self, at: SegmentAt<'_>, way: usize, length: usize) -> SegmentImage {
        let row = u64::from(self.backend.row(at.place)).max(1);
        let step = ((AT_ONCE / row).max(1) * row) as usize;
        let (mut image, mut unread, mut sources) = (vec![0; length], Vec::new(), Sources::default());
        for (number, part) in image.chunks_mut(step).enumerate() {
            let start = number * step;
            // Copies to choose from are announced where they are chosen.
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

    /// Whether these bytes are a segment of which nothing more is to come, with all frames that were ever
    /// written to it and zeros between them.
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

    /// Verifies a segment and makes it whole, as far as it was written when that was asked; these
    /// frames of it live, and all of that is on the devices. Frames that do not live any more are
    /// verified as well: the last root may still need them.
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
        // By what headers say that are whole in some way, of what is not.
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
        // The devices that gave wrong bytes of a frame in the first reading.
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
        // What was freed meanwhile is not missed.
        if !damaged.is_empty() {
            let now = self.living(id);
            damaged.retain(|name, _| now.contains(name));
        }
        // What is left has been freed, and no way of reading gives it back: whatever is there, parity
        // has to fit it, because others of the row are computed from both.
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

    /// Makes the devices whole that are there and may lack something, segment by segment; `done` is
    /// told of each that is finished. What is written meanwhile is whole already. Answers whether it
    /// came to the end; then a commit has to follow, [`Self::strengthen`], another commit, and
    /// [`Self::resilvered`].
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Suspended`].
    pub fn resilver(&self, visit: &mut dyn FnMut(&Checked) -> bool, done: &mut dyn FnMut(u32)) -> Result<bool> {
        self.resilver_from(0, visit, done)
    }

    /// The segment with which a resilver may go on that has finished all before this one, and a commit
    /// came after that: an earlier one, where copies are to be added that have nothing yet.
    #[must_use]
    pub fn resilver_goes_on(&self, first: u32) -> u32 {
        let map = self.map.read();
        let adds = |(id, segment): (&u32, &Segment)| {
            let at = SegmentAt { segment: *id, place: &segment.place };
            (may_widen(segment) && self.backend.would_widen(at)).then_some(*id)
        };
        map.table.segments().range(..first).find_map(adds).unwrap_or(first)
    }

    /// As [`Self::resilver`], from a segment on that [`Self::resilver_goes_on`] has answered. Whoever
    /// goes on after an import has made sure that no device was written by others meanwhile
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
        // What was begun while they were away goes on where they are.
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

    /// Gives segments of mirrors a place on devices that were attached; what lies there is written when
    /// they are verified.
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

    /// Moves what was written with less redundancy than there could be now to where it has more, as
    /// far as it is durable; what is damaged beyond that stays.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`], [`PoolError::Device`], [`PoolError::Suspended`].
    pub fn strengthen(&self) -> Result<()> {
        self.ready()?;
        let mut uncleanable = self.uncleanable.lock();
        // What could not be moved may have been mended since.
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
                    // What was moved gives its places back.
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

    /// The devices that are there and may lack something, and a number that grows with each that
    /// comes or goes: looked at before [`Self::resilver`].
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a pool that does not lie on devices.
    pub fn stale_devices(&self) -> Result<(Vec<u16>, u64)> {
        let disks = self.disks()?;
        let changes = disks.changes();
        Ok((disks.stale(), changes))
    }

    /// Everything on these devices was verified, and a commit came after that, so that nothing of
    /// the intent log is needed that they lack: they are whole. `false` where devices have come or
    /// gone meanwhile.
    ///
    /// # Errors
    /// Those of writing labels.
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
    /// [`PoolError::Refused`] where something would be lost; those of writing labels.
    pub fn offline(&self, device: u16) -> Result<()> {
        self.ready()?;
        self.of_devices(|disks| disks.offline(device))
    }

    /// A device is there again.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for another one; those of writing labels.
    pub fn online(&self, number: u16, device: Arc<dyn Device>) -> Result<()> {
        self.ready()?;
        self.of_devices(|disks| disks.online(number, device))
    }

    /// Does something with the devices that changes what the labels say of them. Commits wait
    /// meanwhile.
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
        // Refused before anything was done.
        changed.map_err(|error| match error {
            PoolError::Refused(_) | PoolError::Short { .. } => error,
            error => self.suspend(&error),
        })
    }

    /// The pool's devices, for what concerns them alone: how they are.
    #[must_use]
    pub fn on_devices(&self) -> Option<&Disks> {
        self.disks.as_deref()
    }
}
