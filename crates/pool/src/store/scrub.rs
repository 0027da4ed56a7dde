//! Walks over segments: to verify every frame that lives, and to show what is there.
//!
//! Callers: `nacre pool scrub` and `nacre pool inspect` through the level above; the cleaner. No
//! tree is needed: headers name frames and owners.

use std::collections::{BTreeMap, BTreeSet};

use crate::backend::{Backend, SegmentAt};
use crate::checksum;
use crate::compress;
use crate::error::{Damage, PoolError};
use crate::frame::{self, Header};
use crate::frames::{Owner, WriteStream};
use crate::label::{Place, Root};
use crate::pointer::{Compression, Pointer, Txg};
use crate::segment::stream::Appender;
use crate::segment::table::Segment;

use super::copies::TableDamage;
use super::table_read::table_place;
use super::{Result, Store};

/// How much of a segment is read at once, bytes.
const WINDOW: usize = 4 << 20;
/// So many pages of the segment table are looked at before commits are asked where the next ones are.
const TABLE_AT_ONCE: usize = 256;

/// How far a segment was written at some moment. With as much as the table knows of, that ends with a
/// whole row.
#[derive(Clone, Copy, Debug)]
pub(super) struct WrittenSoFar {
    pub(super) frames: u32,
    pub(super) bytes: u32,
    /// Nothing more was to come.
    pub(super) sealed: bool,
}

impl WrittenSoFar {
    pub(super) fn of(segment: &Segment) -> Self {
        Self { frames: segment.frames, bytes: segment.bytes, sealed: segment.sealed }
    }
}

/// A part of a segment in memory, which moves on with a walk.
pub(super) trait WalkedPart {
    /// From now on it holds this range, and nothing before it; the segment ends at `end`.
    fn slide(&mut self, from: usize, to: usize, end: usize) -> Result<()>;

    /// A range that it holds.
    fn get(&self, from: usize, to: usize) -> Option<&[u8]>;
}

/// The part of a segment that a walk has read in one of its ways.
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

/// All of a segment.
struct Image<'a>(&'a [u8]);

impl WalkedPart for Image<'_> {
    fn slide(&mut self, _from: usize, _to: usize, _end: usize) -> Result<()> {
        Ok(())
    }

    fn get(&self, from: usize, to: usize) -> Option<&[u8]> {
        self.0.get(from..to)
    }
}

/// What a walk has met that verifies a segment.
pub(super) struct Met {
    /// The frames that live there and are whole.
    pub(super) found: BTreeSet<(u32, u32)>,
    /// All that live there are among them, or were told to be damaged.
    pub(super) whole: bool,
    /// The visitor has not stopped it.
    pub(super) go_on: bool,
}

/// A frame met on a walk.
pub(super) struct Walked<'a> {
    pub(super) header: Header,
    /// Where its header is in the segment, bytes.
    pub(super) offset: u32,
    pub(super) raw_header: &'a [u8],
    pub(super) stored: &'a [u8],
}

/// What a scrub says of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The frame's name: segment and number.
    pub name: (u32, u32),
    /// Whose it is; `None` where the header is lost.
    pub owner: Option<Owner>,
    /// What the header says; `None` where it is lost, and for what must be compared with the
    /// pointer.
    pub header: Option<Header>,
    /// The bytes that were read for it.
    pub bytes: u64,
    /// On which of the pool's devices it lies, or has given wrong bytes; `None` where that is not known.
    pub device: Option<u16>,
    /// What is wrong with it, if anything is.
    pub damage: Option<Damage>,
    /// Another copy was whole: nothing is lost, and the damaged one was written anew.
    pub mended: bool,
    /// How much was written anew, bytes of the device.
    pub repaired: u64,
}

impl Checked {
    /// A frame that lies on this device, of which nothing else is known.
    pub(super) fn of(name: (u32, u32), device: u16) -> Self {
        let device = Some(device);
        Self { name, owner: None, header: None, bytes: 0, device, damage: None, mended: false, repaired: 0 }
    }
}

/// What is known of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number.
    pub id: u32,
    /// Its stream.
    pub stream: WriteStream,
    /// Whether it is full (or was left).
    pub sealed: bool,
    /// Where it lies; nowhere when all in it has moved.
    pub place: Place,
    /// Frames written to it.
    pub frames: u32,
    /// How far it is written, bytes.
    pub bytes: u32,
    /// Frames alive in it.
    pub live_frames: u32,
    /// What these are charged, bytes.
    pub live_bytes: u64,
    /// Frames of its name that live elsewhere.
    pub moved: u64,
    /// The newest birth in it.
    pub newest: Txg,
    /// The generation since which it is dead.
    pub dead_since: Option<u64>,
}

/// What is wrong with a frame by its own header.
pub(super) fn check(frame: &Walked<'_>) -> Option<Damage> {
    let Pointer { logical, compression, checksum_kind, checksum, .. } = frame.header.pointer;
    if compression == Compression::Off && frame.stored.len() == logical as usize {
        return (checksum::content(checksum_kind, frame.stored) != checksum).then_some(Damage::Checksum);
    }
    let mut content = vec![0; logical as usize];
    if !compress::decompress(compression, frame.stored, &mut content) {
        return Some(Damage::Compression);
    }
    (checksum::content(checksum_kind, &content) != checksum).then_some(Damage::Checksum)
}

impl Store {
    /// All segments but the table's own.
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

    /// Shows the frames that lie in a segment, in their order, as far as it was committed: their
    /// headers, offsets (bytes) and whether they live. Stops when the visitor returns `false`.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] for a segment that is not there.
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

    /// Verifies the labels: every copy of the identity and of the root records, which are written
    /// anew where they are damaged. Answers how many were, for each device. Commits wait meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Suspended`].
    pub fn scrub_labels(&self) -> Result<Vec<u64>> {
        self.ready()?;
        let committed = self.committed.lock();
        self.backend.scrub_roots(&committed.identity)
    }

    /// Verifies every frame that lives, segment by segment, and tells the visitor, which may stop
    /// it by `false`. What is written meanwhile is not looked at. Damage is told, not returned.
    ///
    /// # Errors
    /// [`PoolError::Device`] for a device that cannot be read at all.
    pub fn scrub(&self, visit: &mut dyn FnMut(&Checked) -> bool) -> Result<()> {
        self.scrub_from(0, visit, &mut |_| {}).map(drop)
    }

    /// The same from a position on; `done` is told each position up to which all is finished, with
    /// which a scrub may go on later. What is written meanwhile is not looked at. Answers whether it
    /// came to the end.
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

    /// The segments in which these frames live.
    #[must_use]
    pub fn segments_of<'a>(&self, frames: impl IntoIterator<Item = &'a (u32, u32)>) -> BTreeSet<u32> {
        let map = self.map.read();
        let holder = |(segment, index): &(u32, u32)| {
            let home = map.table.segments().get(segment)?;
            Some(home.moved.get(*index).map_or(*segment, |(to, _)| to))
        };
        frames.into_iter().filter_map(holder).collect()
    }

    /// As [`Self::scrub_from`], of some segments only.
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
        // What they hold now is on the devices.
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
            // It is one frame, however many devices are wrong.
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
            // Not before: nothing lives that it does not reach.
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

    /// Verifies the frames that live in a segment of a stream, as far as it was written at some moment;
    /// where it is `copied`, what is damaged is not told: another copy may be whole.
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
            // Some came or went while we looked, or are not to be found by their headers. Only now
            // their names are asked for, which takes long.
            for name in self.living_of(id, written).difference(&met.found) {
                // Frames that move are in their new segment before the table says that they live
                // there.
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

    /// Waits until what the table knows now of a stream is on the devices: it knows frames before
    /// the threads that write have come to them.
    fn wait_written(&self, stream: WriteStream) -> Result<()> {
        let mut of = self.appenders.all().filter(|appender| appender.stream == stream);
        if of.all(Appender::wait_settled) { Ok(()) } else { self.usable() }
    }

    /// Whether what is damaged of a segment may be whole elsewhere.
    pub(super) fn is_copied(&self, at: SegmentAt<'_>) -> bool {
        self.backend.ways(at) > 1 || self.backend.is_paired(at)
    }

    fn lives_in(&self, id: u32) -> usize {
        self.map.read().table.segments().get(&id).map_or(0, |segment| segment.live_frames as usize)
    }

    /// The same as [`Self::living`], by the headers in the segment where all can be found by them.
    /// For a segment of frames that have moved, whose names are with the segments that they are of:
    /// all of those would have to be looked through.
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

    /// The names of all committed frames that live in a segment.
    pub(super) fn living(&self, id: u32) -> BTreeSet<(u32, u32)> {
        self.living_of(id, WrittenSoFar { frames: u32::MAX, bytes: u32::MAX, sealed: true })
    }

    /// The same of those that were in the segment when so much of it was written.
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

    /// Visits the frames of a segment, read in one of its ways, in their order; `true` if it came to
    /// the end. What is no header is passed over in search of the next one, unless `strict`: then
    /// the walk ends there, because file content may look like a frame.
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

    /// The same of a segment's bytes.
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
    /// The names of all frames that live, the segment table's own left out. For checks: it takes
    /// memory for each of them.
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

    /// When these frames were born, by their headers; those without one that can be read are left
    /// out.
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
