//! Deadlists (as in ZFS): the frames of a snapshot that its successor does not reference any more,
//! so that destroying a snapshot costs what it frees and not what it holds. The catalog stores them
//! as rows; a commit appends to them; destroy, rollback and the figures of snapshots read them.
//!
//! A history is a chain of points: snapshots from the oldest on, those of origins included, then
//! the live dataset (head). The list of a point holds the frames that the previous point referenced
//! and this one does not. A list is divided into buckets by birth: the bucket `after` holds frames
//! born after that snapshot and not after the next.
//!
//! ```text
//!  head frees a frame:    born after the newest snapshot ? free it : append it to the head's list
//!  snapshot S:            S takes the head's list; the head gets an empty one
//!  destroy S (P S N):     of N's list the frames born in (P, S] are freed; the remainder and S's list become N's list
//!  rollback to S:         the head's list is dropped: the frames are referenced again
//!  clone from S:          an empty list; its history is that of S
//!  promote:               snapshots change their owner; lists and histories stay: buckets follow births, not owners
//! ```
//!
//! Invariants: a frame is in at most one list per history after the snapshot that holds it; a
//! bucket's totals are those of its chunks; a bucket whose snapshot was destroyed belongs to the
//! interval that contains it, so a destroy changes two lists only.

use std::ops::Range;

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::{Pointer, Txg};

pub mod history;

pub use history::{Fate, Point, killed};

/// Kind byte of the row with the counters of lists and chunks.
pub const COUNTERS: u8 = 0x30;
/// Kind byte of buckets: list, after -> totals.
pub const BUCKET: u8 = 0x31;
/// Kind byte of a bucket's chunks: list, after, chunk -> totals of the chunk.
pub const PART: u8 = 0x32;
/// Kind byte of chunks: chunk -> entries.
pub const CHUNK: u8 = 0x33;

/// Length of a chunk, in bytes, at which the next one is started.
const CHUNK_BYTES: usize = 6144;

/// Chunks of fewer entries are merged when lists are; larger ones are moved without being read.
const SMALL_CHUNK: u64 = 256;

/// Longest encoded entry, bytes.
const ENTRY_BYTES: usize = 5 + 5 + 10 + 5 + 10;

/// Visitor of rows, key and value; returns whether to continue.
pub type RowVisitor<'a> = dyn FnMut(&[u8], &[u8]) -> Result<bool, PoolError> + 'a;

/// Rows in the order of their keys: the catalog's tree, or a map.
pub trait Rows {
    /// Returns the value of a key.
    ///
    /// # Errors
    /// Errors of the tree, as for all functions here.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError>;

    /// Sets the value of a key.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError>;

    /// Removes a key, if it is there.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn delete(&mut self, key: &[u8]) -> Result<(), PoolError>;

    /// Visits the rows of a range in order, as long as the visitor returns `true`.
    ///
    /// # Errors
    /// As [`Self::get`], and errors of the visitor.
    fn range(&self, range: Range<Vec<u8>>, visit: &mut RowVisitor<'_>) -> Result<(), PoolError>;
}

/// Number of a list. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListId(pub u64);

/// A frame that waits to be freed: the fields of its pointer that freeing needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dead {
    /// As [`Pointer::segment`].
    pub segment: u32,
    /// As [`Pointer::index`].
    pub index: u32,
    /// As [`Pointer::charged`], bytes.
    pub charged: u64,
    /// As [`Pointer::owner_charge`], bytes; in entries of deadlists, which no inode is charged for, as `charged`.
    pub owner_charge: u64,
    /// As [`Pointer::counted_logical`], bytes.
    pub logical: u32,
    /// Birth of the row's reference: [`Pointer::birth`], or later if the row shares the frame with
    /// another row that has it from its birth.
    pub birth: Txg,
    /// The row shares the frame with another one: it is freed with the last of them.
    pub shared: bool,
}

impl Dead {
    /// The frame of a pointer.
    #[must_use]
    pub fn of(pointer: &Pointer, shared: bool) -> Self {
        Self {
            segment: pointer.segment,
            index: pointer.index,
            charged: pointer.charged(),
            owner_charge: pointer.owner_charge(),
            logical: pointer.counted_logical(),
            birth: pointer.birth,
            shared,
        }
    }

    fn encode(&self, to: &mut Writer) {
        to.varint(self.segment.into());
        to.varint(self.index.into());
        to.varint((self.charged / u64::from(Pointer::UNIT)) << 1 | u64::from(self.shared));
        to.varint(self.logical.into());
        to.varint(self.birth.0);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let mut small = || u32::try_from(from.varint()?).map_err(|_| damaged("a number of more than 32 bits"));
        let (segment, index) = (small()?, small()?);
        let units = from.varint()?;
        let logical = u32::try_from(from.varint()?).map_err(|_| damaged("a number of more than 32 bits"))?;
        let birth = Txg(from.varint()?);
        let charged =
            (units >> 1).checked_mul(Pointer::UNIT.into()).ok_or_else(|| damaged("the length of a dead frame"))?;
        Ok(Self { segment, index, charged, owner_charge: charged, logical, birth, shared: units & 1 != 0 })
    }
}

/// A range of births: after one txg, up to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Births {
    /// The txg before the range.
    pub after: Txg,
    /// The last txg of the range.
    pub through: Txg,
}

impl Births {
    /// All of them.
    pub const ALL: Self = Self { after: Txg(0), through: Txg(u64::MAX) };

    /// Those after a txg.
    #[must_use]
    pub fn after(txg: Txg) -> Self {
        Self { after: txg, through: Txg(u64::MAX) }
    }

    /// Those up to a txg.
    #[must_use]
    pub fn through(txg: Txg) -> Self {
        Self { after: Txg(0), through: txg }
    }

    /// The keys of a list's buckets for these births, which begin and end at snapshots.
    fn buckets(&self, kind: u8, list: ListId) -> Range<Vec<u8>> {
        key(kind, &[list.0, self.after.0])..key(kind, &[list.0, self.through.0])
    }
}

/// Amount of frames in a list or a part of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Sum of the charged bytes.
    pub bytes: u64,
    /// Sum of the bytes before compression.
    pub logical: u64,
    /// Number of frames.
    pub entries: u64,
}

impl Totals {
    fn plus(self, other: Self) -> Result<Self, PoolError> {
        self.joined(other, u64::checked_add)
    }

    fn minus(self, other: Self) -> Result<Self, PoolError> {
        self.joined(other, u64::checked_sub)
    }

    fn joined(self, other: Self, join: impl Fn(u64, u64) -> Option<u64>) -> Result<Self, PoolError> {
        let join = |a, b| join(a, b).ok_or_else(|| damaged("the totals of a deadlist"));
        let (bytes, logical) = (join(self.bytes, other.bytes)?, join(self.logical, other.logical)?);
        Ok(Self { bytes, logical, entries: join(self.entries, other.entries)? })
    }

    fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.varint(self.bytes);
        to.varint(self.logical);
        to.varint(self.entries);
        to.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(bytes);
        let totals = Self { bytes: from.varint()?, logical: from.varint()?, entries: from.varint()? };
        if from.is_empty() { Ok(totals) } else { Err(damaged("bytes after the totals of a deadlist")) }
    }
}

/// The deadlists in a table of rows.
#[derive(Debug)]
pub struct Deadlists<'a, R: Rows + ?Sized> {
    rows: &'a mut R,
}

impl<'a, R: Rows + ?Sized> Deadlists<'a, R> {
    /// Accesses the deadlists in these rows.
    pub fn new(rows: &'a mut R) -> Self {
        Self { rows }
    }

    /// Creates an empty list: for a new live dataset, after a snapshot, or for frames to free.
    ///
    /// # Errors
    /// Errors of the rows; [`PoolError::Format`] for damaged ones, as for all functions here.
    pub fn create(&mut self) -> Result<ListId, PoolError> {
        let (list, chunk) = self.counters()?;
        self.set_counters(list.wrapping_add(1), chunk)?;
        Ok(ListId(list))
    }

    /// Appends frames. `history` has the txgs of the snapshots that the list's point descends from,
    /// in ascending order, origins included.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn append(&mut self, list: ListId, history: &[Txg], dead: &[Dead]) -> Result<(), PoolError> {
        let mut sorted: Vec<(Txg, &Dead)> = dead.iter().map(|entry| (bucket_of(history, entry.birth), entry)).collect();
        sorted.sort_by_key(|(after, _)| *after);
        for group in sorted.chunk_by(|(a, _), (b, _)| a == b) {
            if let Some((after, _)) = group.first() {
                self.append_to_bucket(list, *after, group.iter().map(|(_, entry)| **entry))?;
            }
        }
        Ok(())
    }

    /// Returns the totals of the frames of a list with these births.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn totals(&self, list: ListId, births: Births) -> Result<Totals, PoolError> {
        let mut sum = Totals::default();
        self.rows.range(births.buckets(BUCKET, list), &mut |_, value| {
            sum = sum.plus(Bucket::decode(value)?.totals)?;
            Ok(true)
        })?;
        Ok(sum)
    }

    /// Visits the frames of a list with these births.
    ///
    /// # Errors
    /// As [`Self::create`], and errors of the visitor.
    pub fn visit(
        &self,
        list: ListId,
        births: Births,
        visit: &mut dyn FnMut(&Dead) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        for part in self.parts(births.buckets(PART, list), usize::MAX)? {
            for entry in &self.chunk(part.chunk)? {
                visit(entry)?;
            }
        }
        Ok(())
    }

    /// Moves the frames with these births from one list to another, chunk by chunk.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn transfer(&mut self, from: ListId, births: Births, to: ListId) -> Result<Totals, PoolError> {
        let parts = self.parts(births.buckets(PART, from), usize::MAX)?;
        let mut moved = Totals::default();
        for part in parts {
            self.detach(from, &part)?;
            self.attach(to, &part)?;
            moved = moved.plus(part.totals)?;
        }
        Ok(moved)
    }

    /// Destroys a snapshot that has neither clones nor holds: frames that only it references go to
    /// `freeing`. Returns their totals, and the new list of the next point. The smaller list is
    /// moved into the larger one.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn destroy_snapshot(
        &mut self,
        previous: Txg,
        snapshot: &Point,
        next: ListId,
        freeing: ListId,
    ) -> Result<(Totals, ListId), PoolError> {
        let freed = self.transfer(next, Births { after: previous, through: snapshot.txg }, freeing)?;
        let (own, rest) = (self.totals(snapshot.list, Births::ALL)?, self.totals(next, Births::ALL)?);
        let (from, to) = if own.entries <= rest.entries { (snapshot.list, next) } else { (next, snapshot.list) };
        self.transfer(from, Births::ALL, to)?;
        Ok((freed, to))
    }

    /// Removes frames from a list, a chunk at a time, until there are at least so many: for
    /// background freeing in one txg. The list is empty when the result is. A damaged chunk is
    /// skipped: its frames are never freed.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn drain(&mut self, list: ListId, least: usize) -> Result<Vec<Dead>, PoolError> {
        let mut taken = Vec::new();
        while taken.len() < least {
            let parts = self.parts(Births::ALL.buckets(PART, list), 1)?;
            let Some(part) = parts.first() else { break };
            match self.chunk(part.chunk) {
                Ok(entries) => taken.extend(entries),
                // It may be readable another time.
                Err(error @ PoolError::Device { .. }) if taken.is_empty() => return Err(error),
                Err(PoolError::Device { .. }) => break,
                // The chunk's frames are lost; stopping here would lose all others as well.
                Err(error) => {
                    tracing::error!(%error, "a piece of a list of dead frames cannot be read: their room is lost")
                }
            }
            self.detach(list, part)?;
            if let Err(error) = self.rows.delete(&key(CHUNK, &[part.chunk])) {
                tracing::error!(%error, "a piece of a list of dead frames cannot be removed");
            }
        }
        Ok(taken)
    }

    /// Drops a list without freeing anything: the frames are referenced again (rollback), or by
    /// other datasets (a clone is destroyed).
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn forget(&mut self, list: ListId) -> Result<(), PoolError> {
        for part in self.parts(Births::ALL.buckets(PART, list), usize::MAX)? {
            self.detach(list, &part)?;
            self.rows.delete(&key(CHUNK, &[part.chunk]))?;
        }
        Ok(())
    }

    fn append_to_bucket(
        &mut self,
        list: ListId,
        after: Txg,
        entries: impl Iterator<Item = Dead>,
    ) -> Result<(), PoolError> {
        let mut open = self.last_part(list, after)?;
        let mut content = Writer::default();
        if let Some(part) = &open {
            content.bytes(&self.chunk_bytes(part.chunk)?);
        }
        let mut added = Totals::default();
        for entry in entries {
            if content.len() + ENTRY_BYTES > CHUNK_BYTES {
                self.store_part(list, after, &mut open, std::mem::take(&mut content), std::mem::take(&mut added))?;
                open = None;
            }
            entry.encode(&mut content);
            added = added.plus(Totals { bytes: entry.charged, logical: entry.logical.into(), entries: 1 })?;
        }
        if added.entries > 0 {
            self.store_part(list, after, &mut open, content, added)?;
        }
        Ok(())
    }

    fn store_part(
        &mut self,
        list: ListId,
        after: Txg,
        open: &mut Option<Part>,
        content: Writer,
        added: Totals,
    ) -> Result<(), PoolError> {
        let (chunk, before) = match open.take() {
            Some(part) => (part.chunk, part.totals),
            None => {
                let (next_list, next_chunk) = self.counters()?;
                self.set_counters(next_list, next_chunk.wrapping_add(1))?;
                (next_chunk, Totals::default())
            }
        };
        self.rows.put(&key(CHUNK, &[chunk]), &content.finish())?;
        self.rows.put(&key(PART, &[list.0, after.0, chunk]), &before.plus(added)?.encode())?;
        let totals = self.bucket(list, after)?.totals.plus(added)?;
        self.rows.put(&key(BUCKET, &[list.0, after.0]), &Bucket { totals, last: chunk }.encode())
    }

    /// Returns the chunk that was last appended to, if it has room.
    fn last_part(&self, list: ListId, after: Txg) -> Result<Option<Part>, PoolError> {
        let last = self.bucket(list, after)?.last;
        let Some(value) = self.rows.get(&key(PART, &[list.0, after.0, last]))? else { return Ok(None) };
        let room = self.chunk_bytes(last)?.len() + ENTRY_BYTES <= CHUNK_BYTES;
        let part = Part { after, chunk: last, totals: Totals::decode(&value)? };
        Ok(room.then_some(part))
    }

    fn parts(&self, range: Range<Vec<u8>>, most: usize) -> Result<Vec<Part>, PoolError> {
        let mut parts = Vec::new();
        self.rows.range(range, &mut |key, value| {
            parts.push(Part::decode(key, value)?);
            Ok(parts.len() < most)
        })?;
        Ok(parts)
    }

    fn detach(&mut self, list: ListId, part: &Part) -> Result<(), PoolError> {
        self.rows.delete(&key(PART, &[list.0, part.after.0, part.chunk]))?;
        let bucket = self.bucket(list, part.after)?;
        let left = Bucket {
            totals: bucket.totals.minus(part.totals)?,
            last: if bucket.last == part.chunk { 0 } else { bucket.last },
        };
        let key = key(BUCKET, &[list.0, part.after.0]);
        if left.totals.entries == 0 { self.rows.delete(&key) } else { self.rows.put(&key, &left.encode()) }
    }

    /// Adds a chunk to a list: by its number, or, if it is small, by its entries, so that many
    /// small merges do not leave many small chunks.
    fn attach(&mut self, list: ListId, part: &Part) -> Result<(), PoolError> {
        if part.totals.entries < SMALL_CHUNK
            && let Some(mut open) = self.last_part(list, part.after)?
        {
            let content = self.chunk_bytes(part.chunk)?;
            let mut joined = self.chunk_bytes(open.chunk)?;
            if joined.len() + content.len() <= CHUNK_BYTES {
                joined.extend_from_slice(&content);
                open.totals = open.totals.plus(part.totals)?;
                self.rows.put(&key(CHUNK, &[open.chunk]), &joined)?;
                self.rows.put(&key(PART, &[list.0, part.after.0, open.chunk]), &open.totals.encode())?;
                self.rows.delete(&key(CHUNK, &[part.chunk]))?;
                return self.add_to_bucket(list, part, open.chunk);
            }
        }
        self.rows.put(&key(PART, &[list.0, part.after.0, part.chunk]), &part.totals.encode())?;
        self.add_to_bucket(list, part, part.chunk)
    }

    fn add_to_bucket(&mut self, list: ListId, part: &Part, last: u64) -> Result<(), PoolError> {
        let totals = self.bucket(list, part.after)?.totals.plus(part.totals)?;
        self.rows.put(&key(BUCKET, &[list.0, part.after.0]), &Bucket { totals, last }.encode())
    }

    fn bucket(&self, list: ListId, after: Txg) -> Result<Bucket, PoolError> {
        self.rows.get(&key(BUCKET, &[list.0, after.0]))?.map_or(Ok(Bucket::default()), |value| Bucket::decode(&value))
    }

    fn chunk_bytes(&self, chunk: u64) -> Result<Vec<u8>, PoolError> {
        self.rows.get(&key(CHUNK, &[chunk]))?.ok_or_else(|| damaged("a deadlist without one of its chunks"))
    }

    fn chunk(&self, chunk: u64) -> Result<Vec<Dead>, PoolError> {
        decode_chunk(&self.chunk_bytes(chunk)?)
    }

    fn counters(&self) -> Result<(u64, u64), PoolError> {
        let Some(value) = self.rows.get(&[COUNTERS])? else { return Ok((1, 1)) };
        let mut from = Reader::new(&value);
        Ok((from.varint()?, from.varint()?))
    }

    fn set_counters(&mut self, list: u64, chunk: u64) -> Result<(), PoolError> {
        let mut to = Writer::default();
        to.varint(list);
        to.varint(chunk);
        self.rows.put(&[COUNTERS], &to.finish())
    }
}

/// Decodes the entries of a chunk.
///
/// # Errors
/// [`PoolError::Format`] for bytes that are no chunk.
pub fn decode_chunk(bytes: &[u8]) -> Result<Vec<Dead>, PoolError> {
    let mut from = Reader::new(bytes);
    let mut entries = Vec::new();
    while !from.is_empty() {
        entries.push(Dead::decode(&mut from)?);
    }
    Ok(entries)
}

/// Value of a bucket's row: the totals of its chunks, and the chunk that was last appended to (0 if
/// unknown).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bucket {
    totals: Totals,
    last: u64,
}

impl Bucket {
    fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.bytes(&self.totals.encode());
        to.varint(self.last);
        to.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(bytes);
        let totals = Totals { bytes: from.varint()?, logical: from.varint()?, entries: from.varint()? };
        let bucket = Self { totals, last: from.varint()? };
        if from.is_empty() { Ok(bucket) } else { Err(damaged("bytes after the end of a bucket")) }
    }
}

/// A chunk in a bucket.
struct Part {
    after: Txg,
    chunk: u64,
    totals: Totals,
}

impl Part {
    fn decode(key: &[u8], value: &[u8]) -> Result<Self, PoolError> {
        let short = || damaged("the key of a deadlist's chunk");
        let (kind, numbers) = key.split_first().ok_or_else(short)?;
        let (_, numbers) = numbers.split_first_chunk::<8>().ok_or_else(short)?;
        let (after, numbers) = numbers.split_first_chunk::<8>().ok_or_else(short)?;
        let (chunk, rest) = numbers.split_first_chunk::<8>().ok_or_else(short)?;
        if *kind != PART || !rest.is_empty() {
            return Err(short());
        }
        Ok(Self {
            after: Txg(u64::from_be_bytes(*after)),
            chunk: u64::from_be_bytes(*chunk),
            totals: Totals::decode(value)?,
        })
    }
}

/// The newest snapshot before a birth; 0 if there is none.
fn bucket_of(history: &[Txg], birth: Txg) -> Txg {
    let older = history.partition_point(|txg| *txg < birth);
    older.checked_sub(1).and_then(|last| history.get(last)).copied().unwrap_or_default()
}

fn key(kind: u8, numbers: &[u64]) -> Vec<u8> {
    let mut key = vec![kind];
    for number in numbers {
        key.extend_from_slice(&number.to_be_bytes());
    }
    key
}

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

#[cfg(test)]
mod tests;
