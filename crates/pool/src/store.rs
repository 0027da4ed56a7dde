//! The store: frames (checksummed blocks) in segments, as in a log-structured file system. It writes, reads and frees
//! frames, commits, cleans, scrubs, and accounts for space.
//!
//! Callers: trees (through [`Frames`]), the transaction group layer (commit, free, log area), commands (scrub,
//! inspect, add).
//!
//! Invariants:
//! - A root is written only after everything that it names is durable; everything that it names is not
//!   overwritten while the root is retained.
//! - No shared lock is held over I/O, compression or checksums. Lock order: commit, cleaning, stream,
//!   table.
//! - A failed write or sync suspends the store: nothing further is accepted, and the last durable root
//!   stays valid.

mod appenders;
mod blame;
mod cleaning;
mod commit;
mod compressors;
mod copies;
mod ditto;
mod following;
mod log_area;
mod open;
mod pieces;
mod reshape;
mod restore;
mod salvage;
mod scrub;
mod shape;
mod space;
mod streaming;
mod sweeping;
mod table_commit;
mod table_read;
#[cfg(test)]
mod tests;
mod watch;
mod write_queue;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

pub use crate::backend::{MINIMUM_DEVICE, TrimStep};
pub use cleaning::Cleaned;
pub use commit::Commit;
pub use open::{Access, Import, NewPool};
pub use reshape::{Left, MoveStep, Outlook};
pub use scrub::{Checked, SegmentInfo};
pub use space::{Claim, Space, Traffic};
pub use table_commit::DELTAS;
pub use watch::Damaged;

use self::blame::Reading;
use crate::backend::{Backend, Disks, SegmentAt, Sources};
use crate::compress;
use crate::error::{Damage, PoolError};
use crate::frame::{Header, Sealer, stored};
use crate::frames::{Compressed, Frames, NewFrame, Owner, Reach, Wanted, WriteStream};
use crate::label::{Identity, LogStart, Place, Root};
use crate::pointer::{Compression, Pointer, Txg};
use crate::segment::cleaner;
use crate::segment::pages::PageTree;
use crate::segment::stream::{Appender, AppenderState, Growth, Piece, Shape};
use crate::segment::table::{Op, SegmentTable};
use crate::segment::table_log::UncommittedRun;
use crate::workers::OnPanic;

type Result<T> = std::result::Result<T, PoolError>;

/// Number of the copy or reconstruction to read; `None`: the fastest now ([`Backend::read_any`]).
type Way = Option<usize>;

/// The frame store of one pool.
pub struct Store {
    /// Storage of segments and roots.
    backend: Arc<dyn Backend>,
    /// The backend as devices, for operations on devices; `None` in a bucket.
    disks: Option<Arc<Disks>>,
    /// Minimum length of a segment, bytes.
    slot: u64,
    /// Maximum length of a segment, bytes.
    longest: u64,
    writable: bool,
    closed: AtomicBool,
    /// The labels do not record yet that the pool was imported, or that later states were discarded for the opened
    /// one.
    unconfirmed: AtomicBool,
    map: RwLock<Map>,
    /// The open segments.
    appenders: appenders::Appenders,
    /// New file systems use the ordered name hash, by which names with neighbouring numbers are adjacent.
    ordered_names: AtomicBool,
    /// Frames may be sealed (encrypted).
    sealed_frames: AtomicBool,
    /// Segments that hold tree nodes among relocated file content.
    mixed: ditto::Mixed,
    committed: Mutex<Committed>,
    frees: Mutex<BTreeMap<Txg, Vec<Freed>>>,
    durable: AtomicU64,
    suspended: Arc<write_queue::Suspension>,
    /// Accept frames even after a device has failed: see [`Self::keep_unwritten`].
    keeps_unwritten: AtomicBool,
    /// Held by the one writer that frees space for all that wait for slots.
    relief: Mutex<()>,
    /// Segments that cannot be cleaned because of damage.
    uncleanable: Mutex<BTreeSet<u32>>,
    sums: Sums,
    /// Limits the slop space; used only by tests of full pools.
    slop_at_most: u64,
    /// Callback on damage that readers find.
    watcher: watch::Watcher,
    /// Readahead on devices.
    readahead: streaming::DeviceReadahead,
    /// Asynchronous writes of content.
    write_queue: write_queue::WriteQueue,
    /// Compression threads.
    compressors: compressors::Compressors,
}

/// Segment table, with sums for the space accounting.
#[derive(Debug, Default)]
struct Map {
    table: SegmentTable,
    /// Frames of uncommitted txgs, as far as the table knows them.
    uncommitted: Vec<UncommittedRun>,
    next_segment: u32,
    /// Segments with relocated frames that the table does not know yet.
    arriving: BTreeSet<u32>,
    /// Space lost at the ends of sealed segments, bytes; as of the last commit.
    slack: u64,
    /// Additional space of live frames for second copies, bytes; as of the last commit.
    copies: u64,
    /// Live metadata in the special class, bytes; as of the last commit.
    special: u64,
    /// Contribution of the live segments to these three sums.
    living: commit::Extra,
    /// Label revision at which these sums were computed.
    summed_at: Option<u64>,
    /// In a follower: the table of the previously used root, for readers that still use that root.
    before: Option<SegmentTable>,
}

/// State of the last commit.
struct Committed {
    root: Root,
    identity: Identity,
    /// Locations of the table's pages.
    tree: PageTree,
    /// Empty pages, each with the number of the first operation that it does not contain.
    hollow: BTreeMap<u32, u64>,
    /// First operation numbers of the root's deltas.
    firsts: Vec<u64>,
    /// Log start of the root that is discarded by a rewind.
    given_up: Option<LogStart>,
    /// Pending takeover of the pool from its writer in a bucket, once its state could be read.
    takes_over: Option<Import>,
    open_table: Option<u32>,
    /// The next commit rewrites the whole table.
    renew: bool,
}

/// A freed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Freed {
    segment: u32,
    index: u32,
    units: u32,
}

/// Byte counters.
#[derive(Debug, Default)]
struct Sums {
    allocated: AtomicU64,
    freeing: AtomicU64,
    table: AtomicU64,
    written_frames: AtomicU64,
    written_relocated: AtomicU64,
    written_table: AtomicU64,
    mended: AtomicU64,
    /// Written as second copies since the last commit.
    copies: AtomicU64,
    /// Written to the special class since the last commit.
    special: AtomicU64,
}

impl Frames for Store {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>> {
        let mut place = self.find(pointer)?;
        loop {
            let mut first = Reading::default();
            let read = self
                .read_at(pointer, &place, None, &mut first)
                .or_else(|error| self.read_copy(pointer, &place, error, &first));
            // The cleaner may have moved the frame meanwhile, and its old location may have been reused.
            match (read, self.find(pointer)?) {
                (Err(_), now) if now != place => place = now,
                (read, at) => return read.inspect_err(|error| self.report(pointer, &at, error, false)),
            }
        }
    }

    fn read_accepted(&self, pointer: &Pointer, is_right: &mut dyn FnMut(&[u8]) -> bool) -> Result<Arc<[u8]>> {
        let mut place = self.find(pointer)?;
        loop {
            let read = self.read_accepted_at(pointer, &place, is_right);
            match (read, self.find(pointer)?) {
                (Err(_), now) if now != place => place = now,
                (read, at) => return read.inspect_err(|error| self.report(pointer, &at, error, false)),
            }
        }
    }

    fn read_all(&self, wanted: &mut [Wanted<'_>]) -> Result<()> {
        self.read_wanted(wanted)
    }

    fn read_stored(&self, pointer: &Pointer) -> Result<Option<Vec<u8>>> {
        self.read_packed(pointer)
    }

    fn expect(&self, pointers: &[Pointer]) {
        self.expect_now(pointers);
    }

    fn expect_later(&self, pointers: &[Pointer], beyond: &[Pointer]) {
        self.expect_soon(pointers, beyond);
    }

    fn ahead(&self) -> Reach {
        self.backend.ahead()
    }

    fn await_room(&self) {
        self.backend.await_room();
    }

    fn make_room(&self, bytes: u64) -> Result<bool> {
        let enough = || self.room() >= bytes;
        if enough() || (self.backend.reclaim() && enough()) {
            return Ok(true);
        }
        // An importing store that is not written to yet cleans nothing; a write finds out whether it has room.
        if self.keeps_in_memory() {
            return Ok(true);
        }
        match self.clean_until(enough) {
            Ok(()) => Ok(true),
            Err(PoolError::NoSpace) => Ok(false),
            // A segment cannot be read: the content may find room elsewhere.
            Err(error @ (PoolError::Device { .. } | PoolError::Frame { .. } | PoolError::Format(_))) => {
                tracing::warn!(%error, "segments cannot be cleaned");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer> {
        self.put(frame, &self.compress(frame)?)
    }

    fn write_all(&self, frames: &[NewFrame<'_>], written: &mut Vec<Pointer>) -> Result<()> {
        let compressed = self.compress_each(frames);
        frames.iter().zip(compressed).try_for_each(|(frame, compressed)| {
            written.push(self.put(frame, &compressed?)?);
            Ok(())
        })
    }

    fn compress_all(&self, frames: &[NewFrame<'_>]) -> Result<Vec<Compressed>> {
        self.compress_each(frames).into_iter().collect()
    }

    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer> {
        self.accepts_frames()?;
        self.check_sealed(compressed)?;
        self.put(frame, compressed)
    }
}

thread_local! {
    // Buffer for compressed frames, which are decompressed at once: otherwise each read would allocate and clear one.
    static READ: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Store {
    /// Reads the content of a frame at a location, from copy or reconstruction `way`; a damaged reading is kept in
    /// `kept`.
    fn read_at(&self, pointer: &Pointer, place: &Location, way: Way, kept: &mut Reading) -> Result<Arc<[u8]>> {
        if u64::from(pointer.content_length()) > self.longest {
            return Err(PoolError::Frame { pointer: *pointer, damage: Damage::Structure("longer than a segment") });
        }
        let mut content: Arc<[u8]> = std::iter::repeat_n(0, pointer.content_length() as usize).collect();
        let Some(target) = Arc::get_mut(&mut content) else {
            return Err(PoolError::Format(Damage::Structure("a shared buffer")));
        };
        self.fill(pointer, place, way, target, kept)?;
        Ok(content)
    }

    /// Fills a buffer of [`Pointer::content_length`] from a frame at a location; a damaged reading is kept in `kept`.
    fn fill(&self, pointer: &Pointer, place: &Location, way: Way, target: &mut [u8], kept: &mut Reading) -> Result<()> {
        let length = pointer.stored as usize;
        if u64::from(pointer.stored) > self.longest {
            return Err(PoolError::Frame { pointer: *pointer, damage: Damage::Structure("longer than a segment") });
        }
        let damage = if pointer.compression == Compression::Off {
            if length == target.len() {
                self.read_stored_at(pointer, place, way, target, &mut kept.sources)?;
                let damage = stored::verify(pointer, target);
                kept.stored.extend_from_slice(if damage.is_some() { target } else { &[] });
                damage
            } else {
                Some(Damage::Compression)
            }
        } else {
            READ.with_borrow_mut(|buffer| {
                if buffer.len() < length {
                    buffer.resize(length, 0);
                }
                let bytes = buffer.get_mut(..length).unwrap_or_default();
                let read = self.read_stored_at(pointer, place, way, bytes, &mut kept.sources);
                let damage = read.map(|()| stored::unpack(pointer, bytes, target));
                if let Ok(Some(_)) = damage {
                    kept.stored.extend_from_slice(bytes);
                }
                compress::forget_much(buffer);
                damage
            })?
        };
        match damage {
            Some(damage) => {
                Err(PoolError::Frame { pointer: *pointer, damage: self.diagnose(pointer, place, way, damage) })
            }
            None => Ok(()),
        }
    }

    /// Appends a compressed frame to a segment.
    fn put(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer> {
        let appender = match frame.stream {
            WriteStream::Metadata => &self.appenders.metadata,
            WriteStream::Data => {
                let charged = compressed.pointer.charged();
                let scarce = || self.urgency() != cleaner::Pressure::None;
                let data = self.appenders.data(&frame.owner, charged, scarce);
                data.ok_or_else(|| PoolError::Refused("content has no segment to go to".to_owned()))?
            }
            WriteStream::Relocated | WriteStream::RelocatedMetadata | WriteStream::Table => {
                return Err(PoolError::Refused("this stream is the store's own".to_owned()));
            }
        };
        let logical = compressed.pointer.logical;
        let counted = compressed.pointer.counted_logical();
        let pointer = Pointer { birth: frame.birth, logical: counted, ..compressed.pointer };
        let stored = compressed.stored.as_deref().unwrap_or(frame.content);
        let header = match &compressed.sealed {
            None => Header { pointer, owner: frame.owner, sealer: Sealer::default() },
            Some(sealed) => {
                let owner = Owner { dataset: frame.owner.dataset, object: sealed.object, offset: sealed.offset };
                Header { pointer, owner, sealer: sealed.sealer }
            }
        };
        let charged = pointer.charged();
        let claim = if frame.stream == WriteStream::Data { Claim::Accepted } else { Claim::Metadata };
        match self.admit(charged, claim) {
            // Accepted in memory only: no commit will name it.
            Err(PoolError::NoSpace) if self.keeps_in_memory() => {}
            admitted => admitted?,
        }
        let written = self.append(appender, charged, |state, full| state.append(header, stored, full))?;
        self.sums.allocated.fetch_add(charged, Ordering::Relaxed);
        self.sums.written_frames.fetch_add(charged, Ordering::Relaxed);
        if frame.stream.is_metadata() {
            self.count_place(written.segment, charged);
        }
        Ok(Pointer { logical, ..written })
    }
}

impl Store {
    /// Accounts for metadata in a segment: additional space for copies, or space in the special class.
    fn count_place(&self, segment: u32, charged: u64) {
        let map = self.map.read();
        let Some(place) = map.table.segments().get(&segment).map(|segment| &segment.place) else { return };
        if self.backend.is_special(place) {
            self.sums.special.fetch_add(charged, Ordering::Relaxed);
        } else {
            let copies = self.backend.cost(place, charged).saturating_sub(charged);
            self.sums.copies.fetch_add(copies, Ordering::Relaxed);
        }
    }

    /// Maximum content length of a frame in this pool, bytes. Records of a quarter of that or less waste little at
    /// the ends of segments.
    #[must_use]
    pub fn largest_frame(&self) -> u64 {
        (self.slot - 4096).min(16 << 20)
    }

    /// Length of slots, bytes.
    #[must_use]
    pub fn slot(&self) -> u64 {
        self.slot
    }

    /// The last durable txg.
    #[must_use]
    pub fn durable(&self) -> Txg {
        Txg(self.durable.load(Ordering::Acquire))
    }

    /// The reason why the store is suspended, if it is.
    #[must_use]
    pub fn suspended(&self) -> Option<&str> {
        self.suspended.reason().map(String::as_str)
    }

    /// The pool's identity as the labels record it.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.committed.lock().identity.clone()
    }

    /// Whether the commit lock becomes free within this time: reading roots and labels waits for a running commit.
    #[must_use]
    pub fn answers_within(&self, time: std::time::Duration) -> bool {
        self.committed.try_lock_for(time).is_some()
    }

    /// The last durable root.
    #[must_use]
    pub fn root(&self) -> Root {
        self.committed.lock().root.clone()
    }

    /// Frees a frame as of this txg: neither its trees nor a snapshot use it any more. Its space is available once
    /// that txg is durable and no retained root reaches it.
    pub fn free(&self, pointer: &Pointer, txg: Txg) {
        self.free_named(pointer.segment, pointer.index, pointer.charged(), txg);
    }

    /// Frees as [`Self::free`], with the parts of a pointer that deadlists keep: the name, and the charged bytes.
    pub fn free_named(&self, segment: u32, index: u32, charged: u64, txg: Txg) {
        let units = (charged / u64::from(Pointer::UNIT)) as u32;
        self.sums.freeing.fetch_add(charged, Ordering::Relaxed);
        self.frees.lock().entry(txg).or_default().push(Freed { segment, index, units });
    }

    /// Checks that the pool is writable, and writes the labels of the import if they are still pending.
    fn ready(&self) -> Result<()> {
        self.usable()?;
        self.confirm()
    }

    /// Fails for a pool that is read-only, closed or suspended.
    fn usable(&self) -> Result<()> {
        if let Some(reason) = self.suspended.reason() {
            return Err(PoolError::Suspended { durable: self.durable(), reason: reason.clone() });
        }
        if !self.writable || self.closed.load(Ordering::Acquire) {
            return Err(PoolError::Refused("the pool is not open for writing".to_owned()));
        }
        Ok(())
    }

    /// Whether frames are accepted although the store is suspended.
    fn keeps_in_memory(&self) -> bool {
        self.suspended.reason().is_some() && self.keeps_unwritten.load(Ordering::Acquire)
    }

    /// Fails if the store accepts no frames.
    fn accepts_frames(&self) -> Result<()> {
        if self.keeps_in_memory() { Ok(()) } else { self.usable() }
    }

    /// Memory of frames that are not on devices, bytes: writes in progress, and failed ones.
    #[must_use]
    pub fn held_unwritten(&self) -> u64 {
        self.appenders.all().map(|appender| appender.lock().unsettled()).sum()
    }

    /// Accepts frames while the store is suspended. They stay in memory and are read from there; no commit makes them
    /// durable.
    pub fn keep_unwritten(&self, on: bool) {
        self.keeps_unwritten.store(on, Ordering::Release);
    }

    /// Suspends the store: after a failed write it is unknown what the device holds.
    pub(crate) fn suspend(&self, error: &PoolError) -> PoolError {
        let reason = self.suspended.stop(error);
        PoolError::Suspended { durable: self.durable(), reason: reason.clone() }
    }

    /// Location of a frame's header: the segment, its location, and the offset in it in bytes. Every way of reading
    /// frames begins here, so sealed frames in a pool without that feature are refused here.
    fn find(&self, pointer: &Pointer) -> Result<Location> {
        if pointer.is_sealed() && !self.is_sealed() {
            let damage = Damage::Structure("a sealed frame in a pool without encryption");
            return Err(PoolError::Frame { pointer: *pointer, damage });
        }
        let missing = PoolError::Frame { pointer: *pointer, damage: Damage::Structure("its segment is not there") };
        let found = {
            let map = self.map.read();
            let find = |table: &SegmentTable| table.find(pointer.segment, pointer.index, pointer.offset);
            find(&map.table).or_else(|| map.before.as_ref().and_then(find)).ok_or(missing)?
        };
        let offset = u64::from(found.offset) * u64::from(Pointer::UNIT);
        if offset + pointer.charged() > self.backend.capacity(&found.place) {
            return Err(PoolError::Frame {
                pointer: *pointer,
                damage: Damage::Structure("behind the end of its segment"),
            });
        }
        Ok(Location { segment: found.segment, stream: found.stream, place: found.place, offset })
    }

    fn read_stored_at(
        &self,
        pointer: &Pointer,
        at: &Location,
        way: Way,
        buffer: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        self.read_range(pointer.birth, at, way, u64::from(Pointer::HEADER), buffer, sources)
    }

    /// Reads a part of a frame: from the backend, or from memory where it is not written yet.
    fn read_range(
        &self,
        birth: Txg,
        at: &Location,
        way: Way,
        skip: u64,
        buffer: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        let offset = at.offset + skip;
        let missing: Vec<Range<usize>> = match at.stream {
            // Committed frames are on the device; and moved frames are found at their new location only once they are
            // written.
            _ if birth <= self.durable() => std::iter::once(0..buffer.len()).collect(),
            WriteStream::Metadata => self.appenders.metadata.read(at.segment, offset, buffer),
            WriteStream::Data => self.appenders.read_data(at.segment, offset, buffer),
            WriteStream::Relocated | WriteStream::RelocatedMetadata | WriteStream::Table => {
                std::iter::once(0..buffer.len()).collect()
            }
        };
        for range in missing {
            let (base, from) = (range.start, offset + range.start as u64);
            if let Some(part) = buffer.get_mut(range) {
                sources.within(base, |sources| self.backend.read_noting(at.at(), way, from, part, sources))?;
            }
        }
        Ok(())
    }

    /// The kind of damage of a frame: `damage`, or a wrong header.
    fn diagnose(&self, pointer: &Pointer, at: &Location, way: Way, damage: Damage) -> Damage {
        let mut header = [0; Pointer::HEADER as usize];
        let read = self.read_range(pointer.birth, at, way, 0, &mut header, &mut Sources::default());
        match read.and_then(|()| Header::decode(&header)) {
            Ok(header) if header.is_of(pointer) => damage,
            _ => Damage::Header,
        }
    }

    /// Appends to a stream: opens segments as needed, and writes full pieces after the lock is released.
    fn append<T>(
        &self,
        appender: &Appender,
        charged: u64,
        put: impl Fn(&mut AppenderState, &mut Vec<Arc<Piece>>) -> Option<T>,
    ) -> Result<T> {
        let mut full = Vec::new();
        let appended = loop {
            let mut state = appender.lock();
            if state.fits(charged)
                && !state.open_segment().is_some_and(|open| self.backend.lacks(open))
                && let Some(appended) = put(&mut state, &mut full)
            {
                break appended;
            }
            if appender.may_open(&mut state) {
                drop(state);
                let opened = self.open_segment(appender);
                appender.opened();
                opened?;
            }
        };
        self.write_pieces(appender, full)?;
        Ok(appended)
    }

    /// Allocates a segment for a stream, sealing its open one.
    fn open_segment(&self, appender: &Appender) -> Result<()> {
        let (id, place) = self.take_place(appender.stream)?;
        let mut full = Vec::new();
        let mut state = appender.lock();
        let growth = state.seal(&mut full);
        let learnt = self.learn(growth);
        let shape = self.shape(&place);
        state.begin(id, place, shape, (0, 0));
        drop(state);
        self.write_pieces(appender, full)?;
        learnt.map_err(|error| self.suspend(&error))
    }

    fn shape(&self, place: &Place) -> Shape {
        Shape { capacity: self.backend.capacity(place), row: self.backend.row(place) }
    }

    /// Allocates a segment: its number and its location.
    fn take_place(&self, stream: WriteStream) -> Result<(u32, Place)> {
        loop {
            {
                let mut map = self.map.write();
                if let Some((id, place)) = self.begin_segment(&mut map, stream, cleaner::reserve(stream))? {
                    map.table.apply(Op::Open { id, stream, place: place.clone() })?;
                    if stream.is_of_moved() {
                        map.arriving.insert(id);
                    }
                    return Ok((id, place));
                }
            }
            // A writer in need uses held-back space.
            if self.backend.reclaim() {
                continue;
            }
            if stream.is_of_moved() {
                return Err(PoolError::NoSpace);
            }
            self.relieve(stream)?;
        }
    }

    fn begin_segment(&self, map: &mut Map, stream: WriteStream, spare: u64) -> Result<Option<(u32, Place)>> {
        let id = map.next_segment;
        let next = id.checked_add(1).filter(|next| *next < u32::MAX);
        let next = next.ok_or_else(|| PoolError::Refused("the pool has used up its segment numbers".to_owned()))?;
        let Some(place) = self.backend.begin(id, stream, spare)? else { return Ok(None) };
        map.next_segment = next;
        Ok(Some((id, place)))
    }

    /// Applies the growth of a stream to the table; under the stream's lock, to keep the order.
    fn learn(&self, growth: Growth) -> Result<()> {
        if growth.ops.is_empty() {
            return Ok(());
        }
        let mut map = self.map.write();
        map.uncommitted.extend(growth.uncommitted);
        for op in growth.ops {
            let sealed = if let Op::Seal { id } = op { Some(id) } else { None };
            map.table.apply(op)?;
            if let Some((id, segment)) = sealed.and_then(|id| Some((id, map.table.segments().get(&id)?))) {
                self.backend.finish(SegmentAt { segment: id, place: &segment.place }, u64::from(segment.bytes));
            }
        }
        Ok(())
    }

    fn write_pieces(&self, appender: &Appender, full: Vec<Arc<Piece>>) -> Result<()> {
        let mut outcome = Ok(());
        let mut waiting = VecDeque::from(full);
        while let Some(piece) = waiting.pop_front() {
            if outcome.is_ok() && appender.stream == WriteStream::Data && piece.is_full {
                outcome = self.write_behind(appender, piece);
                continue;
            }
            let guard = OnPanic(|| {
                self.suspend(&PoolError::Refused("a write was ended by a panic".to_owned()));
                appender.settle(&piece, false);
            });
            let written = match &outcome {
                Ok(()) => self.write_piece(appender, &piece).map(|more| waiting.extend(more)),
                Err(_) => Err(PoolError::NoSpace),
            };
            drop(guard);
            appender.settle(&piece, written.is_ok());
            match written {
                Ok(()) => appender.recycle(piece),
                Err(error) if outcome.is_ok() => outcome = Err(self.suspend(&error)),
                Err(_) => {}
            }
        }
        match outcome {
            Err(_) => self.accepts_frames(),
            written => written,
        }
    }

    /// Writes all pieces of a stream, and waits until they are on the device (not durable).
    fn flush(&self, appender: &Appender) -> Result<()> {
        let mut full = Vec::new();
        let mut state = appender.lock();
        let growth = state.flush(&mut full);
        let learnt = self.learn(growth);
        drop(state);
        self.write_pieces(appender, full)?;
        learnt.map_err(|error| self.suspend(&error))?;
        if appender.wait_settled() {
            Ok(())
        } else {
            self.usable()?;
            Err(self.suspend(&PoolError::Refused("a write of another thread has failed".to_owned())))
        }
    }
}

/// Location of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Location {
    segment: u32,
    stream: WriteStream,
    place: Place,
    offset: u64,
}

impl Location {
    fn at(&self) -> SegmentAt<'_> {
        SegmentAt { segment: self.segment, place: &self.place }
    }
}
