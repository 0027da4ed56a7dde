//! Walks over segments: to verify every live frame, and to list the frames of a segment.
//!
//! Callers: `nacre pool scrub` and `nacre pool inspect` through the engine; the cleaner. No tree is needed: headers
//! name frames and owners.

use std::collections::{BTreeMap, BTreeSet};

use crate::backend::{Backend, SegmentAt};
use crate::error::{Damage, PoolError};
use crate::frame::{self, Header, stored};
use crate::frames::{Owner, WriteStream};
use crate::label::{Place, Root};
use crate::pointer::{Pointer, Txg};
use crate::segment::stream::Appender;
use crate::segment::table::Segment;

use super::copies::TableDamage;
use super::table_read::table_place;
use super::{Result, Store};

/// Number of bytes of a segment read at once.
const WINDOW: usize = 4 << 20;
/// Number of pages of the segment table that are verified between two accesses to the commit state.
const TABLE_AT_ONCE: usize = 256;

/// How far a segment was written at some moment; the length ends with a whole row.
#[derive(Clone, Copy, Debug)]
pub(super) struct WrittenSoFar {
    pub(super) frames: u32,
    pub(super) bytes: u32,
    /// Whether it was sealed.
    pub(super) sealed: bool,
}

impl WrittenSoFar {
    pub(super) fn of(segment: &Segment) -> Self {
        Self { frames: segment.frames, bytes: segment.bytes, sealed: segment.sealed }
    }
}

/// The sliding window of a walk over a segment.
pub(super) trait WalkedPart {
    /// Moves the window to this range, and drops everything before it; the segment ends at `end`.
    fn slide(&mut self, from: usize, to: usize, end: usize) -> Result<()>;

    /// Returns a range inside of the window.
    fn get(&self, from: usize, to: usize) -> Option<&[u8]>;
}

/// A window that is read from one copy or reconstruction.
struct Window<'a> {
    backend: &'a dyn Backend,
    at: SegmentAt<'a>,
    way: usize,
    start: usize,
    bytes: Vec<u8>,
}

impl WalkedPart for Window<'_> {
    fn slide(&mut self, from: usize, to: usize, end: usize) -> Result<()> {
        if from >= self.start && to <= self.start + self.bytes.len() {
            return Ok(());
        }
        self.bytes.resize((to - from).max(WINDOW).min(end - from), 0);
        self.start = from;
        self.backend.read(self.at, self.way, from as u64, &mut self.bytes)
    }

    fn get(&self, from: usize, to: usize) -> Option<&[u8]> {
        self.bytes.get(from.checked_sub(self.start)?..to.checked_sub(self.start)?)
    }
}

/// A window over a whole segment in memory.
struct Image<'a>(&'a [u8]);

impl WalkedPart for Image<'_> {
    fn slide(&mut self, _from: usize, _to: usize, _end: usize) -> Result<()> {
        Ok(())
    }

    fn get(&self, from: usize, to: usize) -> Option<&[u8]> {
        self.0.get(from..to)
    }
}

/// Result of verifying a segment.
pub(super) struct Met {
    /// The undamaged live frames.
    pub(super) found: BTreeSet<(u32, u32)>,
    /// Whether all live frames are among them, or were reported as damaged.
    pub(super) whole: bool,
    /// Whether the visitor has not stopped it.
    pub(super) go_on: bool,
}

/// A frame found on a walk.
pub(super) struct Walked<'a> {
    pub(super) header: Header,
    /// Offset of its header in the segment, bytes.
    pub(super) offset: u32,
    pub(super) raw_header: &'a [u8],
    pub(super) stored: &'a [u8],
}

/// Report of a scrub on one frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The frame's name: segment and number.
    pub name: (u32, u32),
    /// The frame's owner; `None` where the header is lost.
    pub owner: Option<Owner>,
    /// The frame's header; `None` where it is lost, or where the frame was verified by its pointer.
    pub header: Option<Header>,
    /// Number of bytes that were read for it.
    pub bytes: u64,
    /// The device that holds it or has returned wrong bytes; `None` where that is unknown.
    pub device: Option<u16>,
    /// The frame's damage, if there is any.
    pub damage: Option<Damage>,
    /// Whether the frame was repaired from another copy: nothing is lost.
    pub mended: bool,
    /// Number of bytes rewritten on the device.
    pub repaired: u64,
}

impl Checked {
    /// A report on a frame on this device, without further details.
    pub(super) fn of(name: (u32, u32), device: u16) -> Self {
        let device = Some(device);
        Self { name, owner: None, header: None, bytes: 0, device, damage: None, mended: false, repaired: 0 }
    }
}

/// Description of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// The segment's number.
    pub id: u32,
    /// The segment's stream.
    pub stream: WriteStream,
    /// Whether it is full, or was sealed early.
    pub sealed: bool,
    /// The segment's location; empty when all of its frames have moved.
    pub place: Place,
    /// Number of frames written to the segment.
    pub frames: u32,
    /// Written length, bytes.
    pub bytes: u32,
    /// Number of live frames in it.
    pub live_frames: u32,
    /// Charged size of the live frames, bytes.
    pub live_bytes: u64,
    /// Number of frames with its name that were moved to other segments.
    pub moved: u64,
    /// The newest birth txg in it.
    pub newest: Txg,
    /// The generation since which it is dead.
    pub dead_since: Option<u64>,
}

/// Checks a frame against its own header; returns the damage.
pub(super) fn check(frame: &Walked<'_>) -> Option<Damage> {
    stored::check(&frame.header.pointer, frame.stored)
}

impl Store {
    /// All segments except those of the segment table.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentInfo> {
        let map = self.map.read();
        let info = |(id, segment): (&u32, &Segment)| SegmentInfo {
            id: *id,
            stream: segment.stream,
            sealed: segment.sealed,
            place: segment.place.clone(),
            frames: segment.frames,
            bytes: segment.bytes,
            live_frames: segment.live_frames,
            live_bytes: u64::from(segment.live_units) * 16,
            moved: segment.moved.len() as u64,
            newest: segment.newest,
            dead_since: segment.dead_since,
        };
        map.table.segments().iter().map(info).collect()
    }

    /// Lists the frames of a segment in order, as far as it was committed: their headers, offsets (bytes) and whether
    /// they are alive. Stops when the visitor returns `false`.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] for a segment that does not exist.
    pub fn inspect(&self, id: u32, visit: &mut dyn FnMut(&Header, u32, bool) -> bool) -> Result<()> {
        if self.map.read().table.segments().get(&id).is_none_or(|segment| segment.place.is_empty()) {
            return Err(PoolError::Refused(format!("there is no segment {id} in the pool")));
        }
        let shown = self.walk(id, 0, false, &mut |frame| {
            let Pointer { segment, index, .. } = frame.header.pointer;
            let lives = self.map.read().table.lives_at(segment, index, id, frame.offset / Pointer::UNIT);
            Ok(visit(&frame.header, frame.offset, lives))
        });
        shown.map(|_| ())
    }

    /// Verifies the labels: every copy of the identity and of the root records; rewrites damaged ones. Returns how
    /// many were damaged on each device. Commits wait meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Suspended`].
    pub fn scrub_labels(&self) -> Result<Vec<u64>> {
        self.ready()?;
        let committed = self.committed.lock();
        self.backend.scrub_roots(&committed.identity)
    }

    /// Verifies every live frame, segment by segment, and reports it to the visitor, which stops the scrub by
    /// returning `false`. Frames written meanwhile are not verified. Damage is reported, not returned as an error.
    ///
    /// # Errors
    /// [`PoolError::Device`] for a device that cannot be read at all.
    pub fn scrub(&self, visit: &mut dyn FnMut(&Checked) -> bool) -> Result<()> {
        self.scrub_from(0, visit, &mut |_| {}).map(drop)
    }

    /// Scrubs as [`Self::scrub`], from a position on; `done` gets each position up to which everything is finished,
    /// at which a later scrub can resume. Returns whether it reached the end.
    ///
    /// # Errors
    /// As [`Self::scrub`].
    pub fn scrub_from(
        &self,
        first: u64,
        visit: &mut dyn FnMut(&Checked) -> bool,
        done: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        self.scrub_some(first, &|_| true, visit, done)
    }

    /// The segments that hold these frames.
    #[must_use]
    pub fn segments_of<'a>(&self, frames: impl IntoIterator<Item = &'a (u32, u32)>) -> BTreeSet<u32> {
        let map = self.map.read();
        let holder = |(segment, index): &(u32, u32)| {
            let home = map.table.segments().get(segment)?;
            Some(home.moved.get(*index).map_or(*segment, |(to, _)| to))
        };
        frames.into_iter().filter_map(holder).collect()
    }

    /// Scrubs as [`Self::scrub_from`], only the segments selected by `wanted`.
    ///
    /// # Errors
    /// As [`Self::scrub`].
    pub fn scrub_some(
        &self,
        first: u64,
        wanted: &dyn Fn(&SegmentInfo) -> bool,
        visit: &mut dyn FnMut(&Checked) -> bool,
        done: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        if first == 0 && !self.scrub_table(visit) {
            return Ok(false);
        }
        let living = |segment: &SegmentInfo| segment.live_frames > 0 && wanted(segment);
        let segments = self.segments().into_iter().filter(living);
        let stops = segments.map(|segment| self.stop(segment)).filter(|stop| stop.position >= first).collect();
        // Waits until their current content is on the devices.
        for appender in self.appenders.all() {
            self.wait_written(appender.stream)?;
        }
        self.sweep(stops, visit, done)
    }

    pub(super) fn scrub_table(&self, visit: &mut dyn FnMut(&Checked) -> bool) -> bool {
        let mut next = Some((0, 0));
        while let Some(from) = next {
            let (root, frames) = {
                let committed = self.committed.lock();
                let root = committed.root.clone();
                let mut frames: Vec<Pointer> = Vec::new();
                if from == (0, 0) {
                    frames.extend(root.deltas.iter().chain(&root.table).chain(&root.table_list));
                }
                let some: Vec<_> = committed.tree.from(from).take(TABLE_AT_ONCE).collect();
                next = some.last().map(|((height, number), _)| (*height, number.saturating_add(1)));
                frames.extend(some.into_iter().flat_map(|(_, frames)| frames.iter()));
                (root, frames)
            };
            if !self.scrub_table_frames(&root, &frames, visit) {
                return false;
            }
        }
        true
    }

    fn scrub_table_frames(&self, root: &Root, frames: &[Pointer], visit: &mut dyn FnMut(&Checked) -> bool) -> bool {
        frames.iter().all(|pointer| {
            let looked = self.look_at_table_frame(root, pointer);
            // A commit may have replaced it while it was read.
            let current = || self.committed.lock().root.generation == root.generation;
            let found = looked.filter(|found| found.healed.is_some() || current());
            let here = table_place(root, pointer).map_or(0, |at| self.backend.member(at, 0));
            let whole = Checked {
                owner: Some(Owner::default()),
                bytes: pointer.charged(),
                ..Checked::of((pointer.segment, pointer.index), here)
            };
            let Some(TableDamage { damage, devices, healed }) = found else { return visit(&whole) };
            let damaged = Checked { damage: Some(damage), mended: healed.is_some(), ..whole };
            if devices.is_empty() {
                return visit(&Checked { device: None, ..damaged });
            }
            let repaired = |device: u16| {
                let parts = healed.iter().flat_map(|healed| &healed.wrong);
                parts.filter(|part| part.device == device).map(|part| part.bytes).sum()
            };
            // It counts as one frame, on however many devices it is damaged.
            let each = (0..).zip(devices).map(|(number, device)| Checked {
                device: Some(device),
                repaired: repaired(device),
                bytes: if number == 0 { damaged.bytes } else { 0 },
                ..damaged.clone()
            });
            each.into_iter().all(|checked| visit(&checked))
        })
    }

    pub(super) fn scrub_segment(&self, id: u32, visit: &mut dyn FnMut(&Checked) -> bool) -> Result<bool> {
        let Some((written, copied, stream)) = self.map.read().table.segments().get(&id).map(|segment| {
            let at = SegmentAt { segment: id, place: &segment.place };
            (WrittenSoFar::of(segment), self.is_copied(at), segment.stream)
        }) else {
            return Ok(true);
        };
        if copied {
            let living = self.living_by_headers(id)?;
            // Read after `living`: every live frame ends before this end.
            let Some(written) = self.map.read().table.segments().get(&id).map(WrittenSoFar::of) else {
                return Ok(true);
            };
            self.wait_written(stream)?;
            return if self.backend.is_grouped() {
                self.restore_segment(id, (written, &living), visit)
            } else {
                self.scrub_copies(id, &living, visit)
            };
        }
        self.wait_written(stream)?;
        let found = self.map.read().table.segments().get(&id).map(|segment| (segment.place.clone(), segment.bytes));
        let Some((place, end)) = found.filter(|(place, _)| !place.is_empty()) else { return Ok(true) };
        let at = SegmentAt { segment: id, place: &place };
        let mut window = Window { backend: &*self.backend, at, way: 0, start: 0, bytes: Vec::new() };
        let verified = WrittenSoFar { bytes: written.bytes.min(end), ..written };
        self.verify(at, (stream, verified, false), &mut window, visit).map(|met| met.go_on)
    }

    /// Verifies the live frames of a segment up to a written length; where it is `copied`, damage is not reported,
    /// because another copy may be right.
    pub(super) fn verify(
        &self,
        at: SegmentAt<'_>,
        (stream, written, copied): (WriteStream, WrittenSoFar, bool),
        part: &mut dyn WalkedPart,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<Met> {
        let (id, device) = (at.segment, self.backend.member(at, 0));
        let lives = self.lives_in(id);
        let mut met = Met { found: BTreeSet::new(), whole: true, go_on: true };
        let mut dead = BTreeMap::new();
        self.walk_part(id, part, stream, written.bytes as usize, false, &mut |frame| {
            let Pointer { segment, index, .. } = frame.header.pointer;
            let units = frame.offset / Pointer::UNIT;
            let alive = || self.map.read().table.lives_at(segment, index, id, units);
            if !alive() {
                dead.insert((segment, index), units);
                return Ok(true);
            }
            if met.found.contains(&(segment, index)) {
                return Ok(true);
            }
            let damage = check(&frame).filter(|_| alive());
            if copied && damage.is_some() {
                met.whole = false;
                return Ok(true);
            }
            met.found.insert((segment, index));
            let bytes = frame.header.pointer.charged();
            met.go_on = visit(&Checked {
                owner: Some(frame.header.owner),
                header: Some(frame.header),
                bytes,
                damage,
                ..Checked::of((segment, index), device)
            });
            Ok(met.go_on)
        })?;
        if met.go_on && (met.found.len() != lives || self.lives_in(id) != lives) {
            // Some frames came or went meanwhile, or cannot be found by their headers. Only now the names are
            // computed, which is slow.
            for name in self.living_of(id, written).difference(&met.found) {
                // A relocated frame is in its new segment before the table records it there.
                let came = |units: &u32| self.map.read().table.lives_at(name.0, name.1, id, *units);
                if dead.get(name).is_some_and(came) {
                    continue;
                }
                met.whole = false;
                if copied {
                    break;
                }
                let lost = Checked { damage: Some(Damage::Header), ..Checked::of(*name, device) };
                if !visit(&lost) {
                    met.go_on = false;
                    break;
                }
            }
        }
        Ok(met)
    }

    /// Waits until the current frames of a stream are on the devices: the table knows them before the write threads
    /// are finished.
    fn wait_written(&self, stream: WriteStream) -> Result<()> {
        let mut of = self.appenders.all().filter(|appender| appender.stream == stream);
        if of.all(Appender::wait_settled) { Ok(()) } else { self.usable() }
    }

    /// Whether damage in a segment may be repairable from another copy.
    pub(super) fn is_copied(&self, at: SegmentAt<'_>) -> bool {
        self.backend.ways(at) > 1 || self.backend.is_paired(at)
    }

    fn lives_in(&self, id: u32) -> usize {
        self.map.read().table.segments().get(&id).map_or(0, |segment| segment.live_frames as usize)
    }

    /// Names of the live frames as [`Self::living`], by the headers in the segment where that finds all of them. For
    /// a segment of relocated frames, whose names are recorded in their original segments: all of these would have to
    /// be searched.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub(super) fn living_by_headers(&self, id: u32) -> Result<BTreeSet<(u32, u32)>> {
        if !self.map.read().table.segments().get(&id).is_some_and(|segment| segment.stream.is_of_moved()) {
            return Ok(self.living(id));
        }
        let lives = self.lives_in(id);
        let mut found = BTreeSet::new();
        self.walk(id, 0, false, &mut |frame| {
            let Pointer { segment, index, .. } = frame.header.pointer;
            if self.map.read().table.lives_at(segment, index, id, frame.offset / Pointer::UNIT) {
                found.insert((segment, index));
            }
            Ok(true)
        })?;
        Ok(if found.len() == lives { found } else { self.living(id) })
    }

    /// Names of all committed live frames of a segment.
    pub(super) fn living(&self, id: u32) -> BTreeSet<(u32, u32)> {
        self.living_of(id, WrittenSoFar { frames: u32::MAX, bytes: u32::MAX, sealed: true })
    }

    /// Names of the live frames that were in the segment at this written length.
    fn living_of(&self, id: u32, written: WrittenSoFar) -> BTreeSet<(u32, u32)> {
        let map = self.map.read();
        let segments = map.table.segments();
        match segments.get(&id) {
            Some(segment) if segment.stream.is_of_moved() => {
                let here = |(to, offset): (u32, u32)| {
                    to == id && u64::from(offset) * u64::from(Pointer::UNIT) < u64::from(written.bytes)
                };
                let moved = segments
                    .iter()
                    .flat_map(|(of, segment)| segment.moved.iter().map(move |(index, place)| (*of, index, place)));
                moved.filter(|(_, _, place)| here(*place)).map(|(of, index, _)| (of, index)).collect()
            }
            Some(segment) => {
                let frames = segment.frames.min(written.frames);
                (0..frames).filter(|index| !segment.dead.get(*index)).map(|index| (id, index)).collect()
            }
            None => BTreeSet::new(),
        }
    }

    /// Visits the frames of a segment in order, read from one copy or reconstruction; returns whether it reached the
    /// end. Bytes that are no header are skipped in search of the next one, unless `strict`: then the walk ends
    /// there, because file content may look like a frame.
    pub(super) fn walk(
        &self,
        id: u32,
        way: usize,
        strict: bool,
        visit: &mut dyn FnMut(Walked<'_>) -> Result<bool>,
    ) -> Result<bool> {
        let found = self
            .map
            .read()
            .table
            .segments()
            .get(&id)
            .map(|segment| (segment.place.clone(), segment.bytes, segment.stream));
        let Some((place, end, stream)) = found.filter(|(place, ..)| !place.is_empty()) else { return Ok(true) };
        let at = SegmentAt { segment: id, place: &place };
        let mut window = Window { backend: &*self.backend, at, way, start: 0, bytes: Vec::new() };
        self.walk_part(id, &mut window, stream, end as usize, strict, visit)
    }

    /// Walks over a segment's bytes in memory.
    pub(super) fn walk_image(
        &self,
        at: SegmentAt<'_>,
        image: &[u8],
        visit: &mut dyn FnMut(Walked<'_>) -> Result<bool>,
    ) -> Result<bool> {
        let stream = self.map.read().table.segments().get(&at.segment).map(|segment| segment.stream);
        let Some(stream) = stream else { return Ok(true) };
        self.walk_part(at.segment, &mut Image(image), stream, image.len(), false, visit)
    }

    fn walk_part(
        &self,
        id: u32,
        part: &mut dyn WalkedPart,
        stream: WriteStream,
        end: usize,
        strict: bool,
        visit: &mut dyn FnMut(Walked<'_>) -> Result<bool>,
    ) -> Result<bool> {
        let unit = Pointer::UNIT as usize;
        let mut at = 0usize;
        while at + frame::LENGTH <= end {
            part.slide(at, at + frame::LENGTH, end)?;
            let header = part.get(at, at + frame::LENGTH).map(Header::decode);
            let fits = |header: &Header| {
                let Pointer { segment, stored, logical, .. } = header.pointer;
                let own = stream.is_of_moved() || segment == id;
                own && at as u64 + header.pointer.charged() <= end as u64
                    && u64::from(stored.max(logical)) <= self.longest
            };
            let Some(header) = header.and_then(std::result::Result::ok).filter(fits) else {
                let next = (at + 1).next_multiple_of(4096).min(end);
                part.slide(at, next, end)?;
                let padding = part.get(at, next).is_some_and(|rest| rest.iter().all(|byte| *byte == 0));
                match (padding, strict) {
                    (true, _) => at = next,
                    (false, true) => return Ok(false),
                    (false, false) => at += unit,
                }
                continue;
            };
            let whole = header.pointer.charged() as usize;
            part.slide(at, at + whole, end)?;
            let frame = part.get(at, at + frame::LENGTH + header.pointer.stored as usize);
            let Some((raw_header, stored)) = frame.and_then(|frame| frame.split_at_checked(frame::LENGTH)) else {
                return Ok(false);
            };
            if !visit(Walked::new(header, at as u32, raw_header, stored))? {
                return Ok(false);
            }
            at += whole;
        }
        Ok(true)
    }
}

impl Store {
    /// Names of all live frames, except those of the segment table. For checks: it uses memory for each of them.
    #[must_use]
    pub fn living_frames(&self) -> std::collections::HashSet<(u32, u32)> {
        let map = self.map.read();
        let mut alive = std::collections::HashSet::new();
        for (id, segment) in map.table.segments() {
            alive.extend(segment.moved.iter().map(|(index, _)| (*id, index)));
            if !segment.stream.is_of_moved() {
                alive.extend((0..segment.frames).filter(|index| !segment.dead.get(*index)).map(|index| (*id, index)));
            }
        }
        alive
    }

    /// Birth txgs of these frames, by their headers; frames without a readable header are omitted.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn births(
        &self,
        names: &std::collections::HashSet<(u32, u32)>,
    ) -> Result<std::collections::HashMap<(u32, u32), Txg>> {
        let mut found = std::collections::HashMap::new();
        for id in self.segments_of(names) {
            let walked = self.walk(id, 0, false, &mut |frame| {
                let Pointer { segment, index, birth, .. } = frame.header.pointer;
                if names.contains(&(segment, index)) {
                    found.insert((segment, index), birth);
                }
                Ok(true)
            });
            match walked {
                Err(error) if self.is_gone(&error) => {}
                walked => drop(walked?),
            }
        }
        Ok(found)
    }
}
