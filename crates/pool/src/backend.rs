//! What lies below the store: segments, root records, the pool's identity. The store names segments
//! and never devices or objects; where a segment lies is a [`Place`], which it keeps and does not
//! look into.
//!
//! Callers: the store. Implementations: [`Disks`] (labels and slots on devices, several copies,
//! healing) and [`Objects`] (a bucket of an object store). The suite that each must pass is
//! `tests/backends.rs`.
//!
//! Invariants:
//! - What was written is durable when a later [`Backend::flush`] has returned; what a root names is
//!   durable before [`Backend::put_root`] is called.
//! - A range of a segment is written once; only [`Backend::heal`] writes again what is damaged,
//!   with what was there.
//! - Numbers of segments are never used again.
//! - Where others may write as well ([`Backend::is_shared`]), a root is put by one writer only, and
//!   nothing that is removed goes before a root of the same writer is the newest.

mod disks;
mod objects;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use disks::{
    DeviceHealth, Disks, Evenness, MINIMUM_DEVICE, NewGroup, NewMembers, NewShape, TrimStep, name_of, slots,
};
pub use objects::{
    Bucket, CacheFigures, Cached, LastWriter, LocalLog, MemoryBucket, ObjectTag, Objects, Parts, Put, Requests,
    SeenRoots, Silence, WriterId, longest_object,
};

use crate::error::PoolError;
use crate::frames::{Reach, WriteStream};
use crate::label::{Identity, LogStart, Place, Root};
use crate::log::Blocks;

/// Writes begin and end at multiples of this where nothing else is said, bytes.
pub const ROW: u32 = 4096;

type Result<T> = std::result::Result<T, PoolError>;

/// A segment: its number, and where it lies.
#[derive(Clone, Copy, Debug)]
pub struct SegmentAt<'a> {
    /// The number.
    pub segment: u32,
    /// The place.
    pub place: &'a Place,
}

/// The room there is, in segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// All of it.
    pub total: u64,
    /// The part that is no room for segments: the intent log's.
    pub reserved: u64,
    /// What can be begun now.
    pub free: u64,
    /// What is free as well, after [`Backend::reclaim`] or a little later.
    pub held_back: u64,
    /// What file content can take in all, bytes: without the intent log, copies and parity.
    pub size: u64,
    /// The same of what is free or held back.
    pub free_size: u64,
}

impl Room {
    /// What holds nothing.
    #[must_use]
    pub fn empty(&self) -> u64 {
        self.free + self.held_back
    }
}

/// Where a write has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Copies {
    /// To all copies.
    All,
    /// To fewer than the segment should have, for the first time: what comes next had better go to
    /// another segment ([`Backend::lacks`]).
    Fewer,
}

/// How putting a root went.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum PutRoot {
    /// It is durable, and the newest.
    Durable,
    /// Another writer has put a root of this generation: the pool is its own now.
    Fenced {
        /// Whose machine that is, in words.
        by: String,
    },
}

/// The root to begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewestRoot {
    /// The newest that can be read.
    pub root: Root,
    /// How many came after it that cannot be read any more.
    pub lost: u64,
}

/// Segments that no root names.
#[derive(Debug, Default)]
pub struct Unknown {
    /// They, or some of them.
    pub segments: Vec<(u32, Place)>,
    /// The latest epoch in names of segments, known or not; 0 where there are no epochs.
    pub latest: u32,
}

/// What a sweep has read of a segment.
#[derive(Debug)]
pub struct SweptRange {
    /// The content, as of [`Backend::read`].
    pub bytes: Vec<u8>,
    /// All copies are the same and parity fits, as far as devices are there; none that is lacks
    /// something.
    pub agree: bool,
}

/// Ranges of segments read one after the other, with all copies and parity, past caches as far as that
/// goes; devices work at them ahead of whoever takes them, each in the order in which they were asked
/// for.
pub trait Sweep {
    /// Asks for a range: whole rows, up to where the segment is written.
    fn ask(&mut self, at: SegmentAt<'_>, offset: u64, length: usize);

    /// What was asked for first of what was not taken yet.
    ///
    /// # Errors
    /// [`PoolError::Device`] where it cannot be read in any way; [`PoolError::Format`] where nothing
    /// was asked for.
    fn take(&mut self) -> Result<SweptRange>;

    /// Memory of something taken that is not needed any more.
    fn give_back(&mut self, bytes: Vec<u8>) {
        drop(bytes);
    }
}

/// What was written anew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Healed {
    /// How many copies, or columns.
    pub columns: u64,
    /// What of that should have been right: not what lies on devices that are known to lack something.
    pub wrong: Vec<HealedPart>,
}

impl Healed {
    /// The devices that held wrong bytes.
    #[must_use]
    pub fn devices(&self) -> BTreeSet<u16> {
        self.wrong.iter().map(|part| part.device).collect()
    }

    /// How much of what should have been right was written anew, bytes of devices.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.wrong.iter().map(|part| part.bytes).sum()
    }
}

/// A part of a segment that was wrong on a device, and was written anew there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealedPart {
    /// The number of the device.
    pub device: u16,
    /// The range of the segment that depends on it, bytes: of parity, whole rows.
    pub range: Range<u64>,
    /// How much was written to the device, bytes.
    pub bytes: u64,
}

/// The devices from which the parts of a buffer were read.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Where in the buffer of the caller the part begins that is being read.
    base: usize,
    parts: Vec<SourcePart>,
}

/// A part of a buffer, and the device that it was read from; `None` where it was computed from others.
#[derive(Clone, Debug)]
struct SourcePart {
    range: Range<usize>,
    device: Option<u16>,
}

impl Sources {
    /// Has ranges be counted from a part of the buffer that begins there, until that is read.
    pub fn within<T>(&mut self, base: usize, read: impl FnOnce(&mut Self) -> T) -> T {
        self.base += base;
        let done = read(self);
        self.base -= base;
        done
    }

    /// This range of the buffer was read from that device.
    pub fn note(&mut self, range: Range<usize>, device: Option<u16>) {
        self.parts.push(SourcePart { range: self.base + range.start..self.base + range.end, device });
    }

    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// What was noted behind the first ones is read again.
    pub(crate) fn forget_behind(&mut self, count: usize) {
        self.parts.truncate(count);
    }

    /// The devices whose bytes differ, where `read` was read at this offset of the buffer and should have
    /// been `right`.
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

/// Something that holds the segments and roots of one pool.
pub trait Backend: Send + Sync {
    /// The longest segment, bytes.
    fn segment_length(&self) -> u64;

    /// The longest segment at a place, bytes.
    fn capacity(&self, place: &Place) -> u64 {
        let _ = place;
        self.segment_length()
    }

    /// Writes to a segment at this place begin and end at multiples of this, bytes: a divisor of
    /// its capacity, at least 4 KiB and at most 1 MiB.
    fn row(&self, place: &Place) -> u32 {
        let _ = place;
        ROW
    }

    /// What so many bytes at this place take of [`Room::size`].
    fn cost(&self, place: &Place, bytes: u64) -> u64 {
        let _ = place;
        bytes
    }

    /// Whether others may try to write to the same pool at any time: then whoever imports it puts a
    /// root first, and is the only one whose next roots are taken.
    fn is_shared(&self) -> bool;

    /// Whether a segment that was flushed can be written further at no cost. Where it cannot, a
    /// commit ends all open segments.
    fn extends(&self) -> bool;

    /// The pool is opened with this root and these segments, each with its number: their places are
    /// in use, and so is what the root says of the log.
    ///
    /// # Errors
    /// [`PoolError::Format`] for places that cannot be.
    fn adopt(&self, root: &Root, segments: &mut dyn Iterator<Item = (u32, &Place)>) -> Result<()>;

    /// Begins a segment, if more than `spare` others could be begun; `None` if not. Does not wait.
    ///
    /// # Errors
    /// As for [`Self::write`].
    fn begin(&self, id: u32, stream: WriteStream, spare: u64) -> Result<Option<Place>>;

    /// Writes to a segment.
    ///
    /// # Errors
    /// [`PoolError::Device`] where not even one copy could be written.
    fn write(&self, at: SegmentAt<'_>, stream: WriteStream, offset: u64, bytes: &[u8]) -> Result<Copies>;

    /// Waits while what was written before goes on its way more slowly than it comes. For callers that
    /// nobody waits for; [`Self::write`] itself waits only where memory would not do.
    fn await_room(&self) {}

    /// Nothing will be written to a segment beyond this length, bytes. Does not wait.
    fn finish(&self, at: SegmentAt<'_>, length: u64);

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// [`PoolError::Device`]: nobody knows then what is durable.
    fn flush(&self) -> Result<()>;

    /// In how many ways a segment can be read that do not depend on each other; at least one.
    fn ways(&self, at: SegmentAt<'_>) -> usize;

    /// Fills the buffer from a segment, in one of the ways. Whoever reads checks what he gets, and
    /// tries the next way where it is damaged.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Format`] for a place that does not exist.
    fn read(&self, at: SegmentAt<'_>, way: usize, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Whether [`Self::read_any`] chooses among copies.
    fn chooses(&self, at: SegmentAt<'_>) -> bool {
        let _ = at;
        false
    }

    /// Fills the buffer from a segment in whatever way is fastest now, another one for each part of
    /// it: whoever finds it damaged tries all ways.
    ///
    /// # Errors
    /// As for [`Self::read`].
    fn read_any(&self, at: SegmentAt<'_>, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read(at, 0, offset, into)
    }

    /// As [`Self::read`], or without a way as [`Self::read_any`]; notes the devices that were read.
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

    /// Whether a device should hold all of what a segment has there: it is not known to lack something.
    fn should_hold(&self, at: SegmentAt<'_>, device: u16) -> bool {
        let _ = (at, device);
        true
    }

    /// Segments of different lanes lie on different devices, but for second copies of metadata: they
    /// can be read at the same time.
    fn lane(&self, at: SegmentAt<'_>) -> u64 {
        let _ = at;
        0
    }

    /// How many segments can be written at the same time that share no device, about.
    fn independent(&self) -> usize {
        1
    }

    /// Segments of a lane lie in the order of this.
    fn position(&self, at: SegmentAt<'_>) -> u64 {
        at.segment.into()
    }

    /// Reads much, to verify all copies.
    fn sweep(&self) -> Box<dyn Sweep + '_>;

    /// Fills the buffer from a segment where none of the ways reads all of it right: with pieces that
    /// different ways read, such that they are right together. `left` is how much may be judged for
    /// that, bytes, and becomes less. Answers the numbers of the devices that are wrong somewhere in
    /// it; `None` where it was not found.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a place that does not exist.
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

    /// The number of the device that a way reads first.
    fn member(&self, at: SegmentAt<'_>, way: usize) -> u16;

    /// The number of the device whose bytes are wrong, where what the first way reads is damaged and
    /// what this one reads is not.
    fn blamed(&self, at: SegmentAt<'_>, way: usize) -> u16 {
        let _ = way;
        self.member(at, 0)
    }

    /// Tells that a range will be read soon.
    fn expect(&self, at: SegmentAt<'_>, offset: u64, length: u64);

    /// Where nobody has put a root for a while: how many segments were removed, and wait for a root after
    /// which their places can be given up.
    fn waiting(&self) -> Option<usize> {
        None
    }

    /// What people call the place of a segment.
    fn label_of(&self, at: SegmentAt<'_>) -> String {
        format!("segment {}", at.segment)
    }

    /// How far ahead of readers that is worth doing.
    fn ahead(&self) -> Reach {
        Reach::OF_DEVICES
    }

    /// Makes every copy of a range of a segment what it should be, and the parity of all rows that
    /// lie in it whole. Answers which were not; `None` where the place is not the segment's any more. Where only
    /// the whole segment can be replaced, that happens if `is_whole` says so of all of it.
    ///
    /// # Errors
    /// [`PoolError::Device`] for one that cannot be written.
    fn heal(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Healed>>;

    /// No root that is kept names these segments: their places are free. A shared backend removes
    /// them after its next root.
    fn remove(&self, segments: &[(u32, Place)]);

    /// Segments that are there and that `is_known` does not know; a shared backend may answer with some of them.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn list_unknown(&self, is_known: &dyn Fn(u32, &Place) -> bool) -> Result<Unknown>;

    /// What a shared backend writes from now on lies in an epoch that no other writer has had, later than `beyond`;
    /// answers whether it has begun one for that.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] where others begin one after the other.
    fn begin_epoch(&self, beyond: u32) -> Result<bool> {
        let _ = beyond;
        Ok(false)
    }

    /// The room.
    fn room(&self) -> Room;

    /// Gives writers room that is held back, or waits until somebody does who is about to; answers
    /// whether there is more now.
    fn reclaim(&self) -> bool;

    /// How many copies segments of a stream have.
    fn copies(&self, stream: WriteStream) -> usize;

    /// Where metadata has groups of its own: how many segments can be begun there, and all that
    /// there is room for. [`Room`] does not count them.
    fn special_room(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Whether a place is there: what lies at it takes nothing of [`Room::size`].
    fn is_special(&self, place: &Place) -> bool {
        let _ = place;
        false
    }

    /// Whether a segment has less redundancy than its place says: a write has failed.
    fn lacks(&self, id: u32) -> bool;

    /// Whether what lies at this place would have more redundancy elsewhere.
    fn is_weak(&self, at: SegmentAt<'_>, stream: WriteStream) -> bool {
        stream.is_metadata() && at.place.len() < self.copies(stream) || self.lacks(at.segment)
    }

    /// Whether segments have more redundancy than a second copy of metadata: then they are restored
    /// as a whole.
    fn is_grouped(&self) -> bool {
        false
    }

    /// The place of a segment to which nothing is added any more, with copies where they are missing
    /// on devices that may lack something: they hold nothing yet, [`Self::heal`] has to follow. `None`
    /// where there is nothing to be added.
    fn widen(&self, at: SegmentAt<'_>) -> Option<Place> {
        let _ = at;
        None
    }

    /// Whether [`Self::widen`] would add copies, if there is room for them.
    fn would_widen(&self, at: SegmentAt<'_>) -> bool {
        let _ = at;
        false
    }

    /// Whether other devices hold the same as those that a place names.
    fn is_paired(&self, at: SegmentAt<'_>) -> bool {
        let _ = at;
        false
    }

    /// All of a segment was verified and healed.
    fn restored(&self, id: u32) {
        let _ = id;
    }

    /// The blocks of the intent log; `None` where they lie in an area of devices, which the store
    /// writes itself.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn log(&self) -> Result<Option<Box<dyn Blocks>>>;

    /// Where a log begins that replays nothing of what is there.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn fresh_log(&self) -> Result<LogStart>;

    /// What the newest root needs of a log that is not there, in words.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn missing_log(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// The pool is imported without that log.
    fn give_up_log(&self) {}

    /// Whoever writes to the log that begins there can append nothing to it any more.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] where another program has imported the pool since.
    fn end_log(&self, start: LogStart) -> Result<()> {
        let _ = start;
        Ok(())
    }

    /// Who the pool is, as was written last, where others may do that; `None` where they cannot.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Format`].
    fn newest_identity(&self) -> Result<Option<Identity>> {
        Ok(None)
    }

    /// Writes who the pool is, durably.
    ///
    /// # Errors
    /// [`PoolError::Device`], [`PoolError::Refused`] for one that does not fit.
    fn put_identity(&self, identity: &Identity) -> Result<()>;

    /// Writes a root, durably. Everything that it names was flushed.
    ///
    /// # Errors
    /// [`PoolError::Device`]: nobody knows then whether it is there. [`PoolError::Refused`] for one
    /// that does not fit.
    fn put_root(&self, root: &Root) -> Result<PutRoot>;

    /// The newest root; `None` where there is none.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn newest_root(&self) -> Result<Option<NewestRoot>>;

    /// A root that another program has put since this generation; `None` where none is known. Cheap:
    /// readers that follow a writer ask all the time.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn newer_root(&self, generation: u64) -> Result<Option<Root>> {
        let _ = generation;
        Ok(None)
    }

    /// All roots that can still be read, by their generations.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn roots(&self) -> Result<BTreeMap<u64, Root>>;

    /// Makes sure that damage of roots to come is seen ([`Root::guarded`]); answers whether it
    /// will be.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn guard(&self) -> Result<bool>;

    /// Verifies all copies of the identity and of the roots, and writes those anew that are
    /// damaged. Answers how many were, for each device.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    fn scrub_roots(&self, identity: &Identity) -> Result<Vec<u64>>;
}
