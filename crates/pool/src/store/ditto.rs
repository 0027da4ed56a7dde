//! Missing second copies (like ZFS' ditto blocks): of metadata written before the pool had them, while slots were
//! short, or where a write failed in one slot.
//!
//! Callers: the store's writers, which report failed writes; its cleaner, which moves such frames to segments with
//! two copies; commands.
//!
//! Invariant: a write that fails in one of two slots does not fail the operation: the next writes go to another
//! segment, and the segment's frames are moved to one with two copies.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::cleaning::{Cleaned, Outcome};
use super::{Map, Result, Store};
use crate::backend::{Copies, ErasableKeys, SegmentAt};
use crate::crypt::SecretKey;
use crate::error::PoolError;
use crate::frame::Sealer;
use crate::frames::{Compressed, WriteStream};
use crate::label::Identity;
use crate::pointer::Pointer;
use crate::segment::cleaner::Pressure;
use crate::segment::stream::{Appender, Piece};
use crate::segment::table::Segment;

/// Segments of relocated file content that hold tree nodes as well, from a time when the pool had no second copies;
/// `None` until they are searched.
pub(super) type Mixed = Mutex<Option<BTreeSet<u32>>>;

impl Store {
    /// Whether metadata is written twice.
    #[must_use]
    pub fn has_redundant_metadata(&self) -> bool {
        self.backend.copies(WriteStream::Metadata) > 1
    }

    /// Whether new file systems use the ordered name hash, by which names with neighbouring numbers are adjacent.
    #[must_use]
    pub fn has_ordered_names(&self) -> bool {
        self.ordered_names.load(Ordering::Acquire)
    }

    /// Whether a file system with folded names (case or normalization insensitive) was ever created in the pool.
    #[must_use]
    pub fn is_folding(&self) -> bool {
        self.identity().incompatible & Identity::FOLDED != 0
    }

    /// Allows file systems with folded names (case or normalization insensitive), before the first of them is
    /// created: programs without this feature cannot import the pool any more. `time` is now, seconds since 1970.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if the labels cannot be written.
    pub fn allow_folding(&self, time: u64) -> Result<()> {
        if self.is_folding() {
            return Ok(());
        }
        self.relabel(time.max(self.identity().time), |identity| identity.incompatible |= Identity::FOLDED)
    }

    /// Whether frames of the pool may be sealed (encrypted).
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.sealed_frames.load(Ordering::Acquire)
    }

    /// Allows sealed frames, before the first of them is written: programs without this feature cannot import the
    /// pool any more. `time` is now, seconds since 1970.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if the labels cannot be written.
    pub fn allow_sealed(&self, time: u64) -> Result<()> {
        if self.is_sealed() {
            return Ok(());
        }
        let time = time.max(self.identity().time);
        self.relabel(time, |identity| identity.incompatible |= Identity::UNFINISHED_ENCRYPTION)?;
        self.sealed_frames.store(true, Ordering::Release);
        Ok(())
    }

    fn erasable(&self) -> Result<&dyn ErasableKeys> {
        let keys = self.backend.erasable().filter(|_| self.is_sealed());
        keys.ok_or_else(|| PoolError::Refused("a pool without encryption has no erasable keys".to_owned()))
    }

    /// The pool's erasable keys with their numbers, as [`ErasableKeys::keys`]; none without encrypted file systems.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn erasable_keys(&self) -> Result<Vec<(u64, SecretKey)>> {
        if self.is_sealed() { self.erasable()?.keys() } else { Ok(Vec::new()) }
    }

    /// Adds an erasable key durably, the first one of a pool, or the next one in a renewal; returns its number.
    ///
    /// # Errors
    /// [`PoolError::Refused`] in a pool without encryption, and as [`ErasableKeys::add`].
    pub fn add_erasable(&self, key: &SecretKey) -> Result<u64> {
        self.ready()?;
        // No other thread writes labels or roots meanwhile.
        let _committed = self.committed.lock();
        self.erasable()?.add(key)
    }

    /// Destroys all erasable keys but this one: rows that are sealed under the others can never be opened again. Returns
    /// the names of absent devices, which still have the others until they return.
    ///
    /// # Errors
    /// As [`ErasableKeys::keep`].
    pub fn keep_erasable(&self, sequence: u64) -> Result<Vec<String>> {
        self.ready()?;
        let _committed = self.committed.lock();
        self.erasable()?.keep(sequence)
    }

    /// Refuses a sealed frame in a pool without that feature, and one that is not what the format requires.
    pub(super) fn check_sealed(&self, compressed: &Compressed) -> Result<()> {
        let pointer = &compressed.pointer;
        if !pointer.is_sealed() && compressed.sealed.is_none() {
            return Ok(());
        }
        let refused = |why: &str| Err(PoolError::Refused(why.to_owned()));
        if !self.is_sealed() {
            return refused("a sealed frame in a pool without encryption");
        }
        let (Some(stored), Some(sealed)) = (&compressed.stored, &compressed.sealed) else {
            return refused("a sealed frame without its stored bytes");
        };
        pointer.check_seal()?;
        let Sealer { family, ordinal } = sealed.sealer;
        if stored.len() != pointer.stored as usize || family == 0 || ordinal < pointer.pin {
            return refused("a sealed frame without a key generation");
        }
        if u64::from(pointer.stored) + u64::from(Pointer::HEADER) > self.slot {
            return refused("a sealed frame longer than a segment");
        }
        Ok(())
    }

    /// Enables all features of this version: metadata is written twice, and existing metadata gets its second copies
    /// by cleaning; new file systems use the ordered name hash. Returns whether a feature is new. Programs
    /// without these features cannot import the pool any more.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if the labels cannot be written.
    pub fn upgrade(&self, time: u64) -> Result<bool> {
        let single = self.disks.as_ref().filter(|_| !self.has_redundant_metadata());
        if single.is_none() && self.has_ordered_names() {
            return Ok(false);
        }
        // The labels first: no second copy exists before they record the feature.
        let new = Identity::ORDERED_NAMES | if single.is_some() { Identity::REDUNDANT_METADATA } else { 0 };
        self.relabel(time, |identity| identity.incompatible |= new)?;
        self.ordered_names.store(true, Ordering::Release);
        let Some(disks) = single else { return Ok(true) };
        disks.set_redundant();
        let appenders = &self.appenders;
        for appender in [&appenders.metadata, &appenders.relocated, &appenders.relocated_metadata] {
            self.end_segment(appender)?;
        }
        let mut committed = self.committed.lock();
        (committed.open_table, committed.renew) = (None, true);
        Ok(true)
    }

    /// Seals a stream's open segment; the next writes go to another one.
    pub(super) fn end_segment(&self, appender: &Appender) -> Result<()> {
        let mut full = Vec::new();
        let mut state = appender.lock();
        let growth = state.seal(&mut full);
        let learnt = self.learn(growth);
        drop(state);
        self.write_pieces(appender, full)?;
        learnt.map_err(|error| self.suspend(&error))
    }

    /// Live metadata with one copy that should have two, bytes.
    #[must_use]
    pub fn lies_once(&self) -> u64 {
        if !self.has_redundant_metadata() {
            return 0;
        }
        let map = self.map.read();
        let mixed = self.mixed_segments(&map);
        let of_trees = |map: &Map| {
            map.table
                .segments()
                .iter()
                .filter(|(id, segment)| self.lacks_copy(**id, segment))
                .map(|(_, segment)| bytes(segment))
                .sum::<u64>()
        };
        of_trees(&map) + mixed.iter().filter_map(|id| map.table.segments().get(id)).map(bytes).sum::<u64>()
    }

    /// Writes a piece. Where its segment gets less redundancy by that, it is sealed: the pieces cut off by the seal
    /// are returned and have to be written next.
    pub(super) fn write_piece(&self, appender: &Appender, piece: &Piece) -> Result<Vec<Arc<Piece>>> {
        if self.backend.write(piece.at(), appender.stream, u64::from(piece.start), &piece.bytes)? == Copies::All {
            return Ok(Vec::new());
        }
        let mut full = Vec::new();
        let mut state = appender.lock();
        if state.is_open(piece.segment) {
            let growth = state.seal(&mut full);
            self.learn(growth)?;
        }
        Ok(full)
    }

    /// Number of writes that failed in one slot and succeeded in another.
    #[must_use]
    pub fn unwritten(&self) -> u64 {
        self.disks.as_ref().map_or(0, |disks| disks.unwritten())
    }

    pub(super) fn lacks_copy(&self, id: u32, segment: &Segment) -> bool {
        let at = SegmentAt { segment: id, place: &segment.place };
        segment.live_frames > 0 && !segment.place.is_empty() && self.backend.is_weak(at, segment.stream)
    }

    /// Segments of relocated file content that hold frames of metadata segments.
    fn mixed_segments(&self, map: &Map) -> BTreeSet<u32> {
        let mut mixed = self.mixed.lock();
        let segments = map.table.segments();
        let found = mixed.get_or_insert_with(|| {
            let trees = segments.values().filter(|segment| segment.stream == WriteStream::Metadata);
            let held = trees.flat_map(|segment| segment.moved.iter().map(|(_, (to, _))| to)).collect::<BTreeSet<u32>>();
            held.into_iter()
                .filter(|id| segments.get(id).is_some_and(|segment| segment.stream == WriteStream::Relocated))
                .collect()
        });
        found.retain(|id| segments.get(id).is_some_and(|segment| segment.live_frames > 0));
        found.clone()
    }

    /// The next segment to move to one with two copies, and whether only its frames of trees are to be moved.
    fn next_single(&self, excluded: &BTreeSet<u32>) -> Option<(u32, bool)> {
        let (durable, map) = (self.durable().0, self.map.read());
        if !self.has_redundant_metadata() || self.urgency() != Pressure::None {
            return None;
        }
        let segments = map.table.segments();
        let may = |id: &u32, segment: &Segment| segment.sealed && segment.newest.0 <= durable && !excluded.contains(id);
        if let Some((id, _)) = segments.iter().find(|(id, segment)| may(id, segment) && self.lacks_copy(**id, segment))
        {
            return Some((*id, false));
        }
        let mixed = self.mixed_segments(&map);
        mixed.into_iter().find(|id| segments.get(id).is_some_and(|segment| may(id, segment))).map(|id| (id, true))
    }

    /// Whether [`Self::double`] has anything to do.
    pub(super) fn is_single(&self, excluded: &BTreeSet<u32>) -> bool {
        self.next_single(excluded).is_some()
    }

    /// Moves metadata with one copy to segments with two, within the budget.
    pub(super) fn double(&self, budget: u64, uncleanable: &mut BTreeSet<u32>, done: &mut Cleaned) -> Result<()> {
        while done.bytes < budget
            && let Some((id, only_trees)) = self.next_single(uncleanable)
        {
            match self.move_out(id, budget, only_trees, done) {
                Ok(Outcome::Budget) | Err(PoolError::NoSpace) => break,
                Ok(_) if only_trees => {
                    self.mixed.lock().as_mut().map(|mixed| mixed.remove(&id));
                }
                Ok(Outcome::Empty) => done.segments += 1,
                Ok(Outcome::Damaged) => {
                    uncleanable.insert(id);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn bytes(segment: &Segment) -> u64 {
    u64::from(segment.live_units) * u64::from(crate::pointer::Pointer::UNIT)
}
