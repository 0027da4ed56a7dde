//! The interface below the store: segments, root records, the pool's identity. The store names segments by number and
//! never names devices or objects; where a segment is stored is a [`Place`] (its location), which the store keeps and
//! does not interpret.
//!
//! Callers: the store. Implementations: [`Disks`] (labels and slots on devices, several copies,
//! healing) and [`Objects`] (a bucket of an object store). The suite that each must pass is
//! `tests/backends.rs`.
//!
//! Invariants:
//! - A write is durable when a later [`Backend::flush`] has returned; everything that a root names is
//!   durable before [`Backend::put_root`] is called.
//! - A range of a segment is written once; only [`Backend::heal`] writes to it again, replacing damaged
//!   bytes with the original ones.
//! - Segment numbers are never reused.
//! - In a shared backend ([`Backend::is_shared`]), only one writer puts roots, and removed segments are
//!   deleted only after a root of the same writer has become the newest.

mod disks;
mod erasable;
mod objects;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use disks::{
    DeviceHealth, Disks, Evenness, MINIMUM_DEVICE, NewGroup, NewMembers, NewShape, TrimStep, name_of, slots,
};
pub use erasable::ErasableKeys;
pub use objects::{
    Bucket, CacheFigures, Cached, LastWriter, LocalLog, MemoryBucket, ObjectTag, Objects, Parts, Put, Requests,
    SeenRoots, Silence, WriterId, longest_object,
};

use crate::error::PoolError;
use crate::frames::{Reach, WriteStream};
use crate::label::{Identity, LogStart, Place, Root};
use crate::log::Blocks;

/// Alignment of writes unless a backend states another one ([`Backend::row`]), bytes.
pub const ROW: u32 = 4096;

type Result<T> = std::result::Result<T, PoolError>;

/// A segment: its number and its location.
#[derive(Clone, Copy, Debug)]
pub struct SegmentAt<'a> {
    /// The segment's number.
    pub segment: u32,
    /// The segment's location.
    pub place: &'a Place,
}

/// Space of a backend, in segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// All segments that fit.
    pub total: u64,
    /// The part reserved for the intent log.
    pub reserved: u64,
    /// Segments that can be allocated now.
    pub free: u64,
    /// Segments that become free after [`Backend::reclaim`] or a little later.
    pub held_back: u64,
    /// Capacity for file content, bytes: without the intent log, copies and parity.
    pub size: u64,
    /// Capacity for file content in the free and held-back segments, bytes.
    pub free_size: u64,
}

impl Room {
    /// Number of segments that hold nothing: free or held back.
    #[must_use]
    pub fn empty(&self) -> u64 {
        self.free + self.held_back
    }
}

/// Result of a write: how many copies it reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Copies {
    /// All copies were written.
    All,
    /// A copy failed for the first time in this segment, which now has less redundancy than it should: the next write
    /// should go to another segment ([`Backend::lacks`]).
    Fewer,
}

/// Result of writing a root record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum PutRoot {
    /// The root is durable and the newest.
    Durable,
    /// Fenced: another writer has put a root of this generation and now owns the pool.
    Fenced {
        /// The other writer's machine, for messages.
        by: String,
    },
}

/// The root that an import starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewestRoot {
    /// The newest readable root.
    pub root: Root,
    /// Number of newer roots that can no longer be read.
    pub lost: u64,
}

/// Unreferenced segments: no root names them.
#[derive(Debug, Default)]
pub struct Unknown {
    /// The segments, or some of them.
    pub segments: Vec<(u32, Place)>,
    /// The latest epoch in segment names, referenced or not; 0 where the backend has no epochs.
    pub latest: u32,
}

/// A range of a segment that a sequential scrub has read.
#[derive(Debug)]
pub struct SweptRange {
    /// The content, as [`Backend::read`] returns it.
    pub bytes: Vec<u8>,
    /// All copies are equal and the parity matches, as far as the devices are present; no present device lacks a
    /// part.
    pub agree: bool,
}

/// Sequential scrub: reads ranges of segments with all copies and parity, bypassing caches where possible. The
/// devices read ahead of the consumer, each in the order of the requests.
pub trait Sweep {
    /// Queues a range: whole rows, up to the end of what is written of the segment.
    fn ask(&mut self, at: SegmentAt<'_>, offset: u64, length: usize);

    /// Returns the oldest queued range that was not taken yet.
    ///
    /// # Errors
    /// [`PoolError::Device`] where neither a copy nor a reconstruction can be read; [`PoolError::Format`] where no
    /// range is queued.
    fn take(&mut self) -> Result<SweptRange>;

    /// Returns the buffer of a taken range for reuse.
    fn give_back(&mut self, bytes: Vec<u8>) {
        drop(bytes);
    }
}

/// Result of a repair ([`Backend::heal`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Healed {
    /// Number of copies or columns that were rewritten.
    pub columns: u64,
    /// The parts that should have been right: devices that are known to lack data are left out.
    pub wrong: Vec<HealedPart>,
}

impl Healed {
    /// The devices that held wrong bytes.
    #[must_use]
    pub fn devices(&self) -> BTreeSet<u16> {
        self.wrong.iter().map(|part| part.device).collect()
    }

    /// Number of rewritten bytes that should have been right, summed over the devices.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.wrong.iter().map(|part| part.bytes).sum()
    }
}

/// A damaged part of a segment on one device, which was rewritten there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealedPart {
    /// The device's number.
    pub device: u16,
    /// The range of the segment that depends on that part, bytes; for parity, whole rows.
    pub range: Range<u64>,
    /// Number of bytes written to the device.
    pub bytes: u64,
}

/// The devices from which the parts of a buffer were read: blames the right device for a checksum error.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Offset in the caller's buffer of the part that is being read.
    base: usize,
    parts: Vec<SourcePart>,
}

/// A part of a buffer, and the device that it was read from; `None` where it was reconstructed from others.
#[derive(Clone, Debug)]
struct SourcePart {
    range: Range<usize>,
    device: Option<u16>,
}

impl Sources {
    /// Runs `read` with ranges counted from offset `base` of the buffer.
    pub fn within<T>(&mut self, base: usize, read: impl FnOnce(&mut Self) -> T) -> T {
        self.base += base;
        let done = read(self);
        self.base -= base;
        done
    }

    /// Records that a range of the buffer was read from a device.
    pub fn note(&mut self, range: Range<usize>, device: Option<u16>) {
        self.parts.push(SourcePart { range: self.base + range.start..self.base + range.end, device });
    }

    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// Drops the records after the first `count`, since their ranges are read again.
    pub(crate) fn forget_behind(&mut self, count: usize) {
        self.parts.truncate(count);
    }

    /// Numbers of the devices whose bytes differ from `right`, where `read` are the bytes at this offset of the
    /// buffer.
    #[must_use]
    pub fn wrong(&self, offset: usize, read: &[u8], right: &[u8]) -> BTreeSet<u16> {
        let end = offset + right.len();
        let mut wrong = BTreeSet::new();
        for SourcePart { range, device } in &self.parts {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            if let Some(device) = device.filter(|_| from < to)
                && read.get(from - offset..to - offset) != right.get(from - offset..to - offset)
            {
                wrong.insert(device);
            }
        }
        wrong
    }
}

/// Storage for the segments and roots of one pool.
pub trait Backend: Send + Sync {
    /// Length of the longest segment, bytes.
    fn segment_length(&self) -> u64;

    /// Length of the longest segment at a location, bytes.
    fn capacity(&self, place: &Place) -> u64 {
        let _ = place;
        self.segment_length()
    }

    /// Alignment of writes to a segment at this location, bytes: a divisor of its capacity, at least 4 KiB and at
    /// most 1 MiB.
    fn row(&self, place: &Place) -> u32 {
        let _ = place;
        ROW
    }

    /// How much of [`Room::size`] a number of bytes at this location uses.
    fn cost(&self, place: &Place, bytes: u64) -> u64 {
        let _ = place;
        bytes
    }

    /// Whether other machines may try to write to the same pool at any time. If so, an importer puts a root first and
    /// is from then on the only writer whose roots are accepted.
    fn is_shared(&self) -> bool;

    /// Whether a flushed segment can be appended to at no cost. If not, a commit finishes all open segments.
    fn extends(&self) -> bool;

    /// Opens the pool at this root: marks the locations of the given segments, and the root's intent log, as
    /// allocated.
    ///
    /// # Errors
    /// [`PoolError::Format`] for impossible locations.
    fn adopt(&self, root: &Root, segments: &mut dyn Iterator<Item = (u32, &Place)>) -> Result<()>;

    /// Allocates a segment if more than `spare` others could be allocated; `None` if not. Does not wait.
    ///
    /// # Errors
    /// As for [`Self::write`].
    fn begin(&self, id: u32, stream: WriteStream, spare: u64) -> Result<Option<Place>>;

    /// Writes to a segment.
    ///
    /// # Errors
    /// [`PoolError::Device`] where not a single copy could be written.
    fn write(&self, at: SegmentAt<'_>, stream: WriteStream, offset: u64, bytes: &[u8]) -> Result<Copies>;

    /// Waits while earlier writes are slower than new ones arrive. For background callers; [`Self::write`] itself
    /// waits only where memory would run out.
    fn await_room(&self) {}

    /// Marks a segment as complete: nothing will be written beyond this length, bytes. Does not wait.
    fn finish(&self, at: SegmentAt<'_>, length: u64);

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// [`PoolError::Device`]: it is unknown then what is durable.
    fn flush(&self) -> Result<()>;

    /// Number of independent copies and reconstructions by which a segment can be read; at least one.
    fn ways(&self, at: SegmentAt<'_>) -> usize;

    /// Whether the ways of reading lead to one stored object, which is read again: a wrong reading before a right one is
    /// no damage of it.
    fn is_read_again(&self) -> bool {
        false
    }

    /// Fills the buffer from a segment, from copy or reconstruction number `way`. The caller verifies the bytes, and
    /// tries the next number where they are damaged.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a location that does not exist.
    fn read(&self, at: SegmentAt<'_>, way: usize, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Whether [`Self::read_any`] chooses among copies.
    fn chooses(&self, at: SegmentAt<'_>) -> bool {
        let _ = at;
        false
    }

    /// Fills the buffer from the copies that are fastest now, another one for each part of it: a caller that finds it
    /// damaged tries every copy by [`Self::read`].
    ///
    /// # Errors
    /// As for [`Self::read`].
    fn read_any(&self, at: SegmentAt<'_>, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read(at, 0, offset, into)
    }

    /// Reads as [`Self::read`], or as [`Self::read_any`] where `way` is `None`; records the devices that were read.
    ///
    /// # Errors
    /// As for [`Self::read`].
    fn read_noting(
        &self,
        at: SegmentAt<'_>,
        way: Option<usize>,
        offset: u64,
        into: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        sources.note(0..into.len(), Some(self.member(at, way.unwrap_or(0))));
        match way {
            Some(way) => self.read(at, way, offset, into),
            None => self.read_any(at, offset, into),
        }
    }

    /// Whether a device should hold all of its part of a segment: it is not known to lack data.
    fn should_hold(&self, at: SegmentAt<'_>, device: u16) -> bool {
        let _ = (at, device);
        true
    }

    /// Lane of a segment: segments of different lanes are on different devices, except for second copies of metadata,
    /// so that they can be read in parallel.
    fn lane(&self, at: SegmentAt<'_>) -> u64 {
        let _ = at;
        0
    }

    /// Approximate number of segments that can be written in parallel without sharing a device.
    fn independent(&self) -> usize {
        1
    }

    /// Sort key of segments within a lane, in the order of their locations.
    fn position(&self, at: SegmentAt<'_>) -> u64 {
        at.segment.into()
    }

    /// Starts a sequential scrub, which verifies all copies.
    fn sweep(&self) -> Box<dyn Sweep + '_>;

    /// Reconstructs a buffer block by block where no single copy or reconstruction is right as a whole: combines
    /// pieces of different ones until `is_right` accepts the result. `left` is the budget for `is_right`, in bytes
    /// judged; it is decremented. Returns the numbers of the devices that are wrong somewhere in the range; `None`
    /// where no right combination was found.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a location that does not exist.
    fn piece_together(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        into: &mut [u8],
        left: &mut u64,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Option<Vec<u16>>> {
        let _ = (at, offset, into, left, is_right);
        Ok(None)
    }

    /// Number of the device that copy or reconstruction `way` reads first.
    fn member(&self, at: SegmentAt<'_>, way: usize) -> u16;

    /// Number of the device whose bytes are wrong, where copy 0 is damaged and copy or reconstruction `way` is not.
    fn blamed(&self, at: SegmentAt<'_>, way: usize) -> u16 {
        let _ = way;
        self.member(at, 0)
    }

    /// Announces that a range will be read soon (readahead).
    fn expect(&self, at: SegmentAt<'_>, offset: u64, length: u64);

    /// Number of removed segments that wait for the next root before they can be deleted, where no root was put for a
    /// while; `None` otherwise.
    fn waiting(&self) -> Option<usize> {
        None
    }

    /// Location of a segment as users know it, for messages.
    fn label_of(&self, at: SegmentAt<'_>) -> String {
        format!("segment {}", at.segment)
    }

    /// How far readahead is worthwhile.
    fn ahead(&self) -> Reach {
        Reach::OF_DEVICES
    }

    /// Repairs a range of a segment: rewrites each copy that differs from `right`, and the parity of all rows in the
    /// range. Returns what was rewritten; `None` where the location no longer belongs to the segment. Where only
    /// whole segments can be replaced, that is done if `is_whole` accepts the whole segment.
    ///
    /// # Errors
    /// [`PoolError::Device`] for a device that cannot be written.
    fn heal(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Healed>>;

    /// Frees the locations of segments that no retained root names. A shared backend deletes them after its next
    /// root.
    fn remove(&self, segments: &[(u32, Place)]);

    /// Finds stored segments that `is_known` does not know; a shared backend may return only some of them.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn list_unknown(&self, is_known: &dyn Fn(u32, &Place) -> bool) -> Result<Unknown>;

    /// Begins an epoch (a fencing token) for this writer that no other writer has used, later than `beyond`: segments
    /// and log blocks written from now on have it in their names. Returns whether it began one: `false` where this
    /// writer's epoch is late enough already, or the backend has no epochs.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] where other writers keep beginning epochs.
    fn begin_epoch(&self, beyond: u32) -> Result<bool> {
        let _ = beyond;
        Ok(false)
    }

    /// Space of the backend.
    fn room(&self) -> Room;

    /// Makes held-back space available to writers, or waits for a thread that is about to. Returns whether there is
    /// more now.
    fn reclaim(&self) -> bool;

    /// Number of copies of a stream's segments.
    fn copies(&self, stream: WriteStream) -> usize;

    /// Space of the special allocation class, which holds metadata only: number of segments that can be allocated,
    /// and of all that fit. [`Room`] does not include them.
    fn special_room(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Whether a location is in the special allocation class: it uses nothing of [`Room::size`].
    fn is_special(&self, place: &Place) -> bool {
        let _ = place;
        false
    }

    /// Whether a segment has less redundancy than its location should give it, because a write has failed.
    fn lacks(&self, id: u32) -> bool;

    /// Whether a segment would get more redundancy if it were moved.
    fn is_weak(&self, at: SegmentAt<'_>, stream: WriteStream) -> bool {
        stream.is_metadata() && at.place.len() < self.copies(stream) || self.lacks(at.segment)
    }

    /// Whether segments have more redundancy than a second copy of metadata: then they are resilvered as a whole.
    fn is_grouped(&self) -> bool {
        false
    }

    /// Extends the location of a complete segment by the missing copies, on devices that may lack data. The new
    /// copies are empty: [`Self::heal`] has to follow. `None` where there is nothing to add.
    fn widen(&self, at: SegmentAt<'_>) -> Option<Place> {
        let _ = at;
        None
    }

    /// Whether [`Self::widen`] would add copies, given free space.
    fn would_widen(&self, at: SegmentAt<'_>) -> bool {
        let _ = at;
        false
    }

    /// Whether devices of a replacing or spare pair mirror the devices that a location names.
    fn is_paired(&self, at: SegmentAt<'_>) -> bool {
        let _ = at;
        false
    }

    /// Notes that all of a segment was verified and repaired.
    fn restored(&self, id: u32) {
        let _ = id;
    }

    /// Opens the blocks of the intent log; `None` where they are an area of devices, which the store writes itself.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn log(&self) -> Result<Option<Box<dyn Blocks>>>;

    /// Position at which a new log begins, so that nothing of the old log is replayed.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn fresh_log(&self) -> Result<LogStart>;

    /// Description of the log that the newest root needs and that is missing; `None` where nothing is missing.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn missing_log(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Drops the missing log: the pool is imported without it.
    fn give_up_log(&self) {}

    /// Fences the log that begins at `start`: its writer can append nothing to it any more.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] where another process has imported the pool since.
    fn end_log(&self, start: LogStart) -> Result<()> {
        let _ = start;
        Ok(())
    }

    /// Reads the latest identity of the pool, where other machines may write it; `None` where they cannot.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Format`].
    fn newest_identity(&self) -> Result<Option<Identity>> {
        Ok(None)
    }

    /// Writes the pool's identity durably.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Refused`] for an identity that does not fit.
    fn put_identity(&self, identity: &Identity) -> Result<()>;

    /// The pool's erasable keys; `None` where there is no place for them.
    fn erasable(&self) -> Option<&dyn ErasableKeys> {
        None
    }

    /// Writes a root durably. Everything that it names was flushed before.
    ///
    /// # Errors
    /// [`PoolError::Device`]: it is unknown then whether the root is stored. [`PoolError::Refused`] for a root that
    /// does not fit.
    fn put_root(&self, root: &Root) -> Result<PutRoot>;

    /// Reads the newest root; `None` where there is none.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn newest_root(&self) -> Result<Option<NewestRoot>>;

    /// Looks for a root that another process has put since this generation; `None` where none is known. Cheap, since
    /// followers poll it.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn newer_root(&self, generation: u64) -> Result<Option<Root>> {
        let _ = generation;
        Ok(None)
    }

    /// Reads all readable roots, by generation.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn roots(&self) -> Result<BTreeMap<u64, Root>>;

    /// Prepares the root rings so that damage of later roots is detected ([`Root::guarded`]); returns whether it will
    /// be.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn guard(&self) -> Result<bool>;

    /// Verifies all copies of the identity and of the roots, and rewrites the damaged ones. Returns how many were
    /// damaged on each device.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn scrub_roots(&self, identity: &Identity) -> Result<Vec<u64>>;
}
