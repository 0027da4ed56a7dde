//! Encoding of segments and operations in the stored table ([`super::pages`]), and the format of earlier versions,
//! which is only read: a full copy from time to time, and the changes with each commit.
//!
//! Callers: [`super::pages`], and the store's import. The byte tables are in `docs/pool-format.md`. Invariant: any
//! input gives a possible table or an error.

use std::collections::{BTreeMap, BTreeSet};

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::{read_places, small, write_places};
use crate::pointer::{Pointer, Txg};

use super::moved::Moved;
use super::table::{Bits, Op, Segment, SegmentTable, fits};

const FULL: u8 = 1;
const DELTA: u8 = 2;
const INDEX: u8 = 3;
/// In place of the segment that held a frame: the table knows it.
pub const NOT_SAID: u32 = u32::MAX;

/// Consecutive frames of a txg later than the commit's: an import of this root frees them ("young" in
/// `docs/pool-format.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UncommittedRun {
    /// The segment of the frames.
    pub segment: u32,
    /// Number of the first frame.
    pub index: u32,
    /// Number of frames.
    pub count: u32,
    /// Charged size of the frames, units.
    pub units: u32,
    /// The frames' birth txg; not stored.
    pub birth: Txg,
}

pub(super) fn wrong<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}

pub(super) fn begin(kind: u8, generation: u64) -> Writer {
    let mut to = Writer::default();
    to.u8(kind);
    to.u64(generation);
    to
}

pub(super) fn expect_kind(from: &mut Reader<'_>, kind: u8) -> Result<u64, PoolError> {
    if from.u8()? != kind {
        return wrong("another piece of the segment table");
    }
    from.u64()
}

pub(super) fn write_uncommitted(to: &mut Writer, uncommitted: &[UncommittedRun]) {
    to.varint(uncommitted.len() as u64);
    for run in uncommitted {
        for number in [run.segment, run.index, run.count, run.units] {
            to.varint(u64::from(number));
        }
    }
}

pub(super) fn read_uncommitted(from: &mut Reader<'_>) -> Result<Vec<UncommittedRun>, PoolError> {
    let mut uncommitted = Vec::new();
    for _ in 0..from.varint()? {
        uncommitted.push(UncommittedRun {
            segment: small(from)?,
            index: small(from)?,
            count: small(from)?,
            units: small(from)?,
            birth: Txg(0),
        });
    }
    Ok(uncommitted)
}

/// Applies a delta to the table, and ends its commit there.
///
/// # Errors
/// [`PoolError::Format`] for bytes that are not a delta of this table.
pub fn replay_delta(bytes: &[u8], table: &mut SegmentTable) -> Result<Vec<UncommittedRun>, PoolError> {
    let mut from = Reader::new(bytes);
    let generation = expect_kind(&mut from, DELTA)?;
    for _ in 0..from.varint()? {
        let op = table.resolve(read_op(&mut from)?)?;
        table.replay(&op)?;
    }
    table.finish(generation, &BTreeSet::new())?;
    table.take_ops();
    read_uncommitted(&mut from)
}

pub(super) fn write_op(to: &mut Writer, op: &Op) {
    let (tag, numbers): (u8, &[u32]) = match op {
        Op::Open { id, stream, place } => {
            to.u8(1);
            to.varint(u64::from(*id));
            to.u8(*stream as u8);
            write_places(to, place);
            return;
        }
        Op::Grow { id, frames, bytes, units, newest } => {
            to.u8(2);
            for number in [*id, *frames, *bytes, *units] {
                to.varint(u64::from(number));
            }
            to.varint(newest.0);
            return;
        }
        Op::Seal { id } => (3, &[*id]),
        Op::Free { segment, index, count: 1, units } => (4, &[*segment, *index, *units]),
        Op::Free { segment, index, count, units } => (5, &[*segment, *index, *count, *units]),
        Op::Release { id } => (7, &[*id]),
        Op::FreeMoved { segment, index, holder, units } => (9, &[*segment, *index, *holder, *units]),
        Op::Move { segment, index, from, to, offset, units } => (10, &[*segment, *index, *from, *to, *offset, *units]),
        Op::Die { id, since } => {
            to.u8(11);
            to.varint(u64::from(*id));
            to.varint(*since);
            return;
        }
        Op::Widen { id, place } => {
            to.u8(8);
            to.varint(u64::from(*id));
            write_places(to, place);
            return;
        }
    };
    to.u8(tag);
    for number in numbers {
        to.varint(u64::from(*number));
    }
}

pub(super) fn read_op(from: &mut Reader<'_>) -> Result<Op, PoolError> {
    Ok(match from.u8()? {
        1 => Op::Open { id: small(from)?, stream: read_stream(from)?, place: read_places(from)? },
        2 => Op::Grow {
            id: small(from)?,
            frames: small(from)?,
            bytes: small(from)?,
            units: small(from)?,
            newest: Txg(from.varint()?),
        },
        3 => Op::Seal { id: small(from)? },
        4 => Op::Free { segment: small(from)?, index: small(from)?, count: 1, units: small(from)? },
        5 => Op::Free { segment: small(from)?, index: small(from)?, count: small(from)?, units: small(from)? },
        // Earlier versions did not record the previous segment.
        tag @ (6 | 10) => {
            let (segment, index) = (small(from)?, small(from)?);
            let before = if tag == 10 { small(from)? } else { NOT_SAID };
            let (to, offset, units) = (small(from)?, small(from)?, small(from)?);
            Op::Move { segment, index, from: before, to, offset, units }
        }
        9 => Op::FreeMoved { segment: small(from)?, index: small(from)?, holder: small(from)?, units: small(from)? },
        11 => Op::Die { id: small(from)?, since: from.varint()? },
        7 => Op::Release { id: small(from)? },
        8 => Op::Widen { id: small(from)?, place: read_places(from)? },
        _ => return wrong("unknown change of the segment table"),
    })
}

fn read_stream(from: &mut Reader<'_>) -> Result<WriteStream, PoolError> {
    match from.u8()? {
        1 => Ok(WriteStream::Metadata),
        2 => Ok(WriteStream::Data),
        3 => Ok(WriteStream::Relocated),
        5 => Ok(WriteStream::RelocatedMetadata),
        _ => wrong("unknown stream"),
    }
}

/// Decodes a full copy.
///
/// # Errors
/// [`PoolError::Format`] for other bytes.
pub fn read_full(bytes: &[u8]) -> Result<(SegmentTable, Vec<UncommittedRun>), PoolError> {
    let mut from = Reader::new(bytes);
    expect_kind(&mut from, FULL)?;
    let mut segments = BTreeMap::new();
    for _ in 0..from.varint()? {
        let id = small(&mut from)?;
        if segments.insert(id, read_segment(&mut from)?).is_some() {
            return wrong("a segment twice in the table");
        }
    }
    let uncommitted = read_uncommitted(&mut from)?;
    check(&segments)?;
    Ok((SegmentTable::with(segments), uncommitted))
}

/// Checks what a single segment's record cannot: moved frames are in segments for relocated ones, and their numbers
/// add up.
pub(super) fn check(segments: &BTreeMap<u32, Segment>) -> Result<(), PoolError> {
    let mut arrived = BTreeMap::<u32, u32>::new();
    for (_, (to, _)) in segments.values().flat_map(|segment| segment.moved.iter()) {
        if !segments.get(&to).is_some_and(|target| target.stream.is_of_moved() && !target.place.is_empty()) {
            return wrong("a moved frame is where none can be");
        }
        *arrived.entry(to).or_default() += 1;
    }
    let fits = |(id, segment): (&u32, &Segment)| {
        !segment.stream.is_of_moved() || segment.live_frames == arrived.get(id).copied().unwrap_or(0)
    };
    if segments.iter().all(fits) { Ok(()) } else { wrong("moved frames do not add up") }
}

pub(super) fn write_segment(to: &mut Writer, segment: &Segment) {
    to.u8(segment.stream as u8 | u8::from(segment.sealed) << 7);
    write_places(to, &segment.place);
    to.varint(segment.dead_since.map_or(0, |generation| generation + 1));
    for number in [segment.frames, segment.bytes, segment.live_frames, segment.live_units] {
        to.varint(u64::from(number));
    }
    to.varint(segment.newest.0);
    // Alternating runs, first of live, then of dead frames.
    let (mut runs, mut dead, mut length) = (Vec::new(), false, 0u64);
    if segment.dead.count() > 0 {
        for at in 0..segment.frames {
            if segment.dead.get(at) != dead {
                runs.push(length);
                (dead, length) = (!dead, 0);
            }
            length += 1;
        }
        runs.push(length);
    }
    to.varint(runs.len() as u64);
    for run in runs {
        to.varint(run);
    }
    to.varint(segment.moved.len() as u64);
    // Neighbours move together: differences are small. They wrap around, so every order can be encoded.
    let mut last = (0u32, 0u32, 0u32);
    for (index, (segment, offset)) in segment.moved.iter() {
        for (now, before) in [(index, last.0), (segment, last.1), (offset, last.2)] {
            to.varint(u64::from(now.wrapping_sub(before)));
        }
        last = (index, segment, offset);
    }
}

pub(super) fn read_segment(from: &mut Reader<'_>) -> Result<Segment, PoolError> {
    let flags = from.u8()?;
    let stream = read_stream(&mut Reader::new(&[flags & 0x7f]))?;
    let place = read_places(from)?;
    let dead_since = from.varint()?.checked_sub(1);
    let (frames, bytes, live_frames, live_units) = (small(from)?, small(from)?, small(from)?, small(from)?);
    let newest = Txg(from.varint()?);
    if !fits(frames, bytes) {
        return wrong("more frames than a segment holds");
    }
    let (mut dead, mut at, mut is_dead) = (Bits::default(), 0u64, false);
    for _ in 0..from.varint()? {
        let end = from.varint()?.checked_add(at).filter(|end| *end <= u64::from(frames));
        let Some(end) = end else { return wrong("more dead frames than frames") };
        if is_dead {
            (at..end).for_each(|at| dead.set(at as u32));
        }
        (at, is_dead) = (end, !is_dead);
    }
    let mut moved = Moved::default();
    let mut last = (0u32, 0u32, 0u32);
    for _ in 0..from.varint()? {
        last =
            (last.0.wrapping_add(small(from)?), last.1.wrapping_add(small(from)?), last.2.wrapping_add(small(from)?));
        moved.insert(last.0, (last.1, last.2));
    }
    let segment = Segment {
        stream,
        sealed: flags & 0x80 != 0,
        place,
        dead_since,
        frames,
        bytes,
        live_frames,
        live_units,
        newest,
        dead,
        moved,
    };
    check_segment(&segment)?;
    Ok(segment)
}

/// Checks the consistency of a segment's own fields.
pub(super) fn check_segment(segment: &Segment) -> Result<(), PoolError> {
    let Segment { stream, place, frames, bytes, live_frames, live_units, dead, .. } = segment;
    let home = !stream.is_of_moved();
    let sums = live_frames <= frames && (*live_frames == 0) == (*live_units == 0) && *live_units <= bytes.div_ceil(16);
    if !sums
        || !place.is_possible()
        || (place.parity() > 0 && stream.is_metadata())
        || (home && u64::from(frames - live_frames) != dead.count())
        || (place.is_empty() && *live_frames > 0)
    {
        return wrong("the sums of a segment do not fit each other");
    }
    Ok(())
}

/// Decodes the list of pieces.
///
/// # Errors
/// [`PoolError::Format`] for other bytes.
pub fn read_index(bytes: &[u8]) -> Result<Vec<Pointer>, PoolError> {
    let mut from = Reader::new(bytes);
    expect_kind(&mut from, INDEX)?;
    let mut pieces = Vec::new();
    for _ in 0..from.varint()? {
        pieces.push(Pointer::decode(&mut from)?);
    }
    Ok(pieces)
}
