//! Open segments being filled: one per stream, several for content. Frames are numbered and placed under the stream's
//! lock and copied into pieces of 1 MiB, which are written to the device without the lock, by the caller or by
//! threads of their own; until then they are read from here.
//!
//! Callers: the store. Invariants:
//! - No I/O and no compression under the lock.
//! - Pieces begin and end at multiples of a row, which is at least 4 KiB: committed bytes are never
//!   overwritten, not even with the same bytes, and no row is written in parts.
//! - The table learns of frames when a segment is sealed and when a stream is flushed ([`Growth`]),
//!   never of incomplete ones.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::backend::SegmentAt;
use crate::frame::Header;
use crate::frames::WriteStream;
use crate::label::Place;
use crate::pointer::{Pointer, Txg};

use super::table::Op;
use super::table_log::UncommittedRun;

/// Length of a full piece, bytes.
pub const PIECE: usize = 1 << 20;
/// Alignment of buffers, bytes.
pub const ALIGN: u32 = 4096;
/// Number of buffers kept for reuse.
const SPARE: usize = 8;

/// The open segment of one stream.
#[derive(Debug)]
pub struct Appender {
    /// The stream.
    pub stream: WriteStream,
    state: Mutex<AppenderState>,
    changed: Condvar,
}

/// State of an appender.
#[derive(Debug, Default)]
pub struct AppenderState {
    open: Option<Open>,
    /// A thread is allocating a segment.
    opening: bool,
    /// Full pieces that are not on the device yet, in the order in which they were filled.
    unsettled: Vec<Arc<Piece>>,
    /// Total length of the unsettled pieces, bytes.
    unsettled_bytes: u64,
    next_piece: u64,
    failed: bool,
    spare: Vec<Buffer>,
}

/// An open segment.
#[derive(Debug)]
struct Open {
    id: u32,
    place: Place,
    shape: Shape,
    frames: u32,
    bytes: u32,
    /// Offset of the piece being filled.
    start: u32,
    piece: Buffer,
    /// Growth that the table does not know yet.
    units: u32,
    newest: Txg,
    uncommitted: Vec<UncommittedRun>,
}

/// Geometry of a segment, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Maximum length of the segment.
    pub capacity: u64,
    /// Alignment of pieces.
    pub row: u32,
}

impl Shape {
    /// Length of a full piece.
    fn piece(self) -> usize {
        let row = (self.row as usize).max(1);
        (PIECE / row).max(1) * row
    }
}

/// A buffer aligned to [`ALIGN`] for direct I/O. It never grows beyond a piece.
#[derive(Debug, Default)]
pub struct Buffer {
    memory: Vec<u8>,
    skip: usize,
}

impl Buffer {
    fn aligned() -> Self {
        let mut memory: Vec<u8> = Vec::with_capacity(PIECE + ALIGN as usize);
        // Without a known alignment it is an ordinary buffer.
        let skip = memory.as_ptr().align_offset(ALIGN as usize).min(ALIGN as usize);
        memory.resize(skip, 0);
        Self { memory, skip }
    }

    fn clear(&mut self) {
        self.memory.truncate(self.skip);
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.get(self.skip..).unwrap_or_default()
    }
}

/// A part of a segment to be written.
#[derive(Debug)]
pub struct Piece {
    number: u64,
    /// The segment's number.
    pub segment: u32,
    /// The segment's location.
    pub place: Place,
    /// Offset of the piece in the segment, bytes.
    pub start: u32,
    /// The bytes to be written.
    pub bytes: Buffer,
    /// Whether it has the full length of a piece.
    pub is_full: bool,
}

impl Piece {
    /// The segment and its location.
    #[must_use]
    pub fn at(&self) -> SegmentAt<'_> {
        SegmentAt { segment: self.segment, place: &self.place }
    }
}

/// Growth of a segment for the table.
#[derive(Debug, Default)]
pub struct Growth {
    /// The operations.
    pub ops: Vec<Op>,
    /// The new frames, with their birth txgs.
    pub uncommitted: Vec<UncommittedRun>,
}

impl Appender {
    /// An appender without an open segment.
    #[must_use]
    pub fn new(stream: WriteStream) -> Self {
        Self { stream, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Locks its state.
    pub fn lock(&self) -> MutexGuard<'_, AppenderState> {
        self.state.lock()
    }

    /// Waits until another thread has allocated a segment, or makes the caller the one that does: then it returns
    /// `true`.
    pub fn may_open(&self, state: &mut MutexGuard<'_, AppenderState>) -> bool {
        if state.opening {
            self.changed.wait(state);
            return false;
        }
        state.opening = true;
        true
    }

    /// Ends the caller's attempt to allocate a segment, successful or not.
    pub fn opened(&self) {
        self.state.lock().opening = false;
        self.changed.notify_all();
    }

    /// Marks a piece as written, or as failed.
    pub fn settle(&self, piece: &Arc<Piece>, written: bool) {
        let mut state = self.state.lock();
        if written {
            state.unsettled.retain(|other| other.number != piece.number);
            state.unsettled_bytes = state.unsettled_bytes.saturating_sub(piece.bytes.len() as u64);
        } else {
            state.failed = true;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns a written piece's buffer for reuse.
    pub fn recycle(&self, piece: Arc<Piece>) {
        if let Ok(Piece { mut bytes, .. }) = Arc::try_unwrap(piece) {
            let mut state = self.state.lock();
            if state.spare.len() < SPARE {
                bytes.clear();
                state.spare.push(bytes);
            }
        }
    }

    /// Waits until all pieces filled so far are on the device; returns `false` if one failed.
    #[must_use]
    pub fn wait_settled(&self) -> bool {
        let mut state = self.state.lock();
        let until = state.next_piece;
        while !state.failed && state.unsettled.iter().any(|piece| piece.number < until) {
            self.changed.wait(&mut state);
        }
        !state.failed
    }

    /// Copies the part of a range that is still in memory (offset in bytes in a segment) into the buffer, and returns
    /// the ranges that have to be read from the device.
    #[must_use]
    pub fn read(&self, segment: u32, offset: u64, buffer: &mut [u8]) -> Vec<Range<usize>> {
        let mut missing: Vec<Range<usize>> = std::iter::once(0..buffer.len()).collect();
        let state = self.state.lock();
        let open = state.open.iter().map(|open| (open.id, open.start, &*open.piece));
        let pieces = state.unsettled.iter().map(|piece| (piece.segment, piece.start, &*piece.bytes));
        for (of, start, bytes) in pieces.chain(open) {
            let (start, end) = (u64::from(start), u64::from(start) + bytes.len() as u64);
            let (from, to) = (offset.max(start), (offset + buffer.len() as u64).min(end));
            if of != segment || from >= to {
                continue;
            }
            let source = bytes.get((from - start) as usize..(to - start) as usize);
            let range = (from - offset) as usize..(to - offset) as usize;
            if let (Some(source), Some(target)) = (source, buffer.get_mut(range.clone())) {
                target.copy_from_slice(source);
                missing = without(&missing, &range);
            }
        }
        missing
    }
}

fn without(ranges: &[Range<usize>], taken: &Range<usize>) -> Vec<Range<usize>> {
    let parts = ranges
        .iter()
        .flat_map(|range| [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end]);
    parts.filter(|part| part.start < part.end).collect()
}

impl AppenderState {
    /// Whether a frame of this length fits the open segment.
    #[must_use]
    pub fn fits(&self, charged: u64) -> bool {
        self.open.as_ref().is_some_and(|open| u64::from(open.bytes) + charged <= open.shape.capacity)
    }

    /// Length of full pieces that are not on their device, bytes: writes in progress, and failed ones.
    #[must_use]
    pub fn unsettled(&self) -> u64 {
        self.unsettled_bytes
    }

    /// Remaining space of the open segment, bytes.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| open.shape.capacity.saturating_sub(u64::from(open.bytes)))
    }

    /// The open segment's number.
    #[must_use]
    pub fn open_segment(&self) -> Option<u32> {
        self.open.as_ref().map(|open| open.id)
    }

    /// Whether this segment is open here.
    #[must_use]
    pub fn is_open(&self, segment: u32) -> bool {
        self.open.as_ref().is_some_and(|open| open.id == segment)
    }

    /// Opens a segment, or resumes one at its end. The previous one must be sealed.
    pub fn begin(&mut self, id: u32, place: Place, shape: Shape, (frames, bytes): (u32, u32)) {
        let piece = self.buffer();
        self.open = Some(Open {
            id,
            place,
            shape,
            frames,
            bytes,
            start: bytes,
            piece,
            units: 0,
            newest: Txg(0),
            uncommitted: Vec::new(),
        });
    }

    fn buffer(&mut self) -> Buffer {
        self.spare.pop().unwrap_or_else(Buffer::aligned)
    }

    /// Appends a frame, which gets its name here; returns its pointer with the offset. `None` without an open
    /// segment.
    pub fn append(&mut self, mut header: Header, stored: &[u8], full: &mut Vec<Arc<Piece>>) -> Option<Pointer> {
        let open = self.open.as_mut()?;
        header.pointer.segment = open.id;
        header.pointer.index = open.frames;
        let pointer = Pointer { offset: open.bytes / Pointer::UNIT, ..header.pointer };
        let (units, birth) = ((pointer.charged() / u64::from(Pointer::UNIT)) as u32, pointer.birth);
        open.units += units;
        open.newest = open.newest.max(birth);
        match open.uncommitted.last_mut() {
            Some(run) if run.birth == birth => {
                run.count += 1;
                run.units += units;
            }
            _ => {
                open.uncommitted.push(UncommittedRun { segment: open.id, index: pointer.index, count: 1, units, birth })
            }
        }
        self.put(&header.encode(), stored, full);
        Some(pointer)
    }

    /// Appends a frame that has its name already; returns the segment and the offset in units.
    pub fn append_moved(
        &mut self,
        header: &[u8],
        stored: &[u8],
        birth: Txg,
        full: &mut Vec<Arc<Piece>>,
    ) -> Option<(u32, u32)> {
        let open = self.open.as_mut()?;
        open.newest = open.newest.max(birth);
        let at = (open.id, open.bytes / Pointer::UNIT);
        self.put(header, stored, full);
        Some(at)
    }

    fn put(&mut self, header: &[u8], stored: &[u8], full: &mut Vec<Arc<Piece>>) {
        const ZEROS: [u8; Pointer::UNIT as usize] = [0; Pointer::UNIT as usize];
        if let Some(open) = &mut self.open {
            open.frames += 1;
        }
        let unit = Pointer::UNIT as usize;
        let padding = (unit - (header.len() + stored.len()) % unit) % unit;
        self.copy(header, full);
        self.copy(stored, full);
        self.copy(ZEROS.get(..padding).unwrap_or_default(), full);
    }

    fn copy(&mut self, mut bytes: &[u8], full: &mut Vec<Arc<Piece>>) {
        while let Some(open) = self.open.as_mut().filter(|_| !bytes.is_empty()) {
            let piece = open.shape.piece();
            let room = piece - open.bytes as usize % piece;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            open.piece.memory.extend_from_slice(now);
            open.bytes += now.len() as u32;
            bytes = later;
            if now.len() == room {
                full.extend(self.cut());
            }
        }
    }

    /// Turns the piece being filled into one to be written.
    fn cut(&mut self) -> Option<Arc<Piece>> {
        let fresh = self.buffer();
        let number = self.next_piece;
        let open = self.open.as_mut()?;
        let bytes = std::mem::replace(&mut open.piece, fresh);
        if bytes.is_empty() {
            return None;
        }
        let is_full = bytes.len() == open.shape.piece();
        let place = open.place.clone();
        let piece = Arc::new(Piece { number, segment: open.id, place, start: open.start, bytes, is_full });
        open.start = open.bytes;
        self.next_piece += 1;
        self.unsettled_bytes += piece.bytes.len() as u64;
        self.unsettled.push(Arc::clone(&piece));
        Some(piece)
    }

    /// Cuts the filled part, padded to a whole row, and returns the growth for the table.
    pub fn flush(&mut self, full: &mut Vec<Arc<Piece>>) -> Growth {
        let Some(open) = &mut self.open else { return Growth::default() };
        let padded = open.bytes.next_multiple_of(open.shape.row);
        if !open.piece.is_empty() {
            open.piece.memory.resize(open.piece.memory.len() + (padded - open.bytes) as usize, 0);
            open.bytes = padded;
        }
        let mut growth = Growth::default();
        if open.newest != Txg(0) || open.units > 0 {
            let (units, newest) = (std::mem::take(&mut open.units), std::mem::take(&mut open.newest));
            growth.ops.push(Op::Grow { id: open.id, frames: open.frames, bytes: open.bytes, units, newest });
        }
        growth.uncommitted = std::mem::take(&mut open.uncommitted);
        full.extend(self.cut());
        growth
    }

    /// Seals the open segment.
    pub fn seal(&mut self, full: &mut Vec<Arc<Piece>>) -> Growth {
        let mut growth = self.flush(full);
        if let Some(open) = self.open.take() {
            growth.ops.push(Op::Seal { id: open.id });
            if self.spare.len() < SPARE {
                let mut piece = open.piece;
                piece.clear();
                self.spare.push(piece);
            }
        }
        growth
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Sealer;
    use crate::frames::Owner;
    use crate::label::SlotAddress;
    use crate::pointer::{ChecksumKind, Compression, FrameKind};

    const SHAPE: Shape = Shape { capacity: 1 << 26, row: 4096 };

    fn header(stored: usize, birth: u64) -> Header {
        let pointer = Pointer {
            segment: 0,
            index: 0,
            offset: 0,
            stored: stored as u32,
            logical: stored as u32,
            kind: FrameKind::Data,
            compression: Compression::Off,
            checksum_kind: ChecksumKind::Xxh3,
            pin: 0,
            birth: Txg(birth),
            checksum: [0; 16],
        };
        Header { pointer, owner: Owner::default(), sealer: Sealer::default() }
    }

    #[test]
    fn pieces_make_up_the_segment_and_are_read_until_they_are_settled() {
        let appender = Appender::new(WriteStream::Data);
        let mut full = Vec::new();
        let mut image = Vec::new();
        let mut names = Vec::new();
        let mut state = appender.lock();
        state.begin(7, vec![SlotAddress { device: 0, slot: 3 }].into(), SHAPE, (0, 0));
        for at in 0..100usize {
            let stored = vec![at as u8; 1000 + at * 700];
            let pointer = state.append(header(stored.len(), 1 + at as u64 / 50), &stored, &mut full).unwrap();
            assert_eq!(
                (pointer.segment, pointer.index, u64::from(pointer.offset) * 16),
                (7, at as u32, image.len() as u64)
            );
            names.push(pointer);
            image.extend(Header { pointer: Pointer { offset: 0, ..pointer }, ..header(0, 0) }.encode());
            image.extend(&stored);
            image.resize(image.len().next_multiple_of(16), 0);
            if at == 60 {
                let growth = state.flush(&mut full);
                image.resize(image.len().next_multiple_of(4096), 0);
                let units: u32 = names.iter().map(|name| (name.charged() / 16) as u32).sum();
                assert_eq!(
                    growth.ops,
                    vec![Op::Grow { id: 7, frames: 61, bytes: image.len() as u32, units, newest: Txg(2) }]
                );
                assert_eq!(
                    growth.uncommitted.iter().map(|run| (run.index, run.count, run.birth.0)).collect::<Vec<_>>(),
                    vec![(0, 50, 1), (50, 11, 2)]
                );
                assert!(state.flush(&mut full).ops.is_empty(), "nothing new");
            }
        }
        let growth = state.seal(&mut full);
        image.resize(image.len().next_multiple_of(4096), 0);
        assert_eq!(growth.ops[1], Op::Seal { id: 7 });
        assert!(!state.fits(96));
        drop(state);

        let mut device = vec![0; image.len()];
        for (at, piece) in full.iter().enumerate() {
            assert_eq!((piece.start % 4096, piece.bytes.len() % 4096), (0, 0));
            device[piece.start as usize..piece.start as usize + piece.bytes.len()].copy_from_slice(&piece.bytes);
            if at % 2 == 0 {
                appender.settle(piece, true);
            }
        }
        assert_eq!(device, image);
        for name in &names {
            let (from, length) = (u64::from(name.offset) * 16, name.charged() as usize);
            let mut buffer = vec![0; length];
            for range in appender.read(7, from, &mut buffer) {
                let source = from as usize + range.start..from as usize + range.end;
                buffer[range].copy_from_slice(&device[source]);
            }
            assert_eq!(buffer, &image[from as usize..from as usize + length]);
        }
        assert_eq!(appender.read(8, 0, &mut [0; 100]), vec![0..100]);
        full.iter().skip(1).step_by(2).for_each(|piece| appender.settle(piece, true));
        assert!(appender.wait_settled());
        assert_eq!(appender.read(7, 0, &mut [0; 100]), vec![0..100]);
    }

    #[test]
    fn a_failed_piece_is_not_waited_for() {
        let appender = Appender::new(WriteStream::Data);
        let mut full = Vec::new();
        appender.lock().begin(1, vec![SlotAddress { device: 0, slot: 0 }].into(), SHAPE, (0, 0));
        appender.lock().append(header(10, 1), &[1; 10], &mut full).unwrap();
        appender.lock().flush(&mut full);
        appender.settle(&full[0], false);
        assert!(!appender.wait_settled());
        let mut buffer = [0; 10];
        assert!(appender.read(1, 80, &mut buffer).is_empty(), "still read from memory");
        assert_eq!(buffer, [1; 10]);
    }
}
