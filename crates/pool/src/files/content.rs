//! Content: read, write, resize, holes, and the flush of what is held in memory.
//!
//! A file is cut into records of its record size. A write that covers a whole record becomes a frame at once; parts of records are collected in memory
//! until the next flush. A record that is all zeros is a hole where content may be packed (as ZFS has it); content up to
//! [`crate::rows::extent::INLINE_FILE`] bytes lies in the row.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::inodes::{Buffered, Editing};
use super::{Batch, FileError, Files, Inode, Result, Table};
use crate::frames::{NewFrame, Owner, Packing, Stream};
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::extent::INLINE_FILE;
use crate::rows::{Extent, FileType, Inode as Row, keys};

/// The largest size of a file, bytes: offsets are signed.
const SIZE_MOST: u64 = i64::MAX as u64;

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOutcome {
    /// Bytes accepted, from the front of the data.
    pub written: usize,
    /// Where the first of them went.
    pub offset: u64,
}

/// What is sought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTo {
    /// The next content.
    Data,
    /// The next hole; the end of the file is one.
    Hole,
}

/// A part of a record.
#[derive(Clone, Copy, Debug)]
struct Piece {
    record: u64,
    /// Where in the record it begins.
    from: usize,
    length: usize,
}

/// The parts of records that a range consists of.
fn pieces(offset: u64, length: u64, shift: u8) -> impl Iterator<Item = Piece> {
    let size = 1u64 << shift;
    let end = offset.saturating_add(length);
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (record, from) = (at >> shift, at & (size - 1));
        let length = (size - from).min(end - at);
        at += length;
        Some(Piece { record, from: from as usize, length: length as usize })
    })
}

/// Where a record's content is, owned.
enum Stored {
    Frame(Pointer),
    Inline(Vec<u8>),
}

impl<T: Table> Files<T> {
    /// Reads into the buffer; fewer bytes than fit only at the end of the file.
    ///
    /// # Errors
    /// [`FileError::IsDirectory`], [`FileError::Invalid`] for other things without content; damage.
    pub fn read(&self, inode: &Inode, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let active = inode.active.read();
        let row = match active.as_ref() {
            Some(active) => active.row,
            None => self.stored(inode.number())?,
        };
        check_regular(&row)?;
        let length = row.size.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let Some(buffer) = buffer.get_mut(..length).filter(|buffer| !buffer.is_empty()) else { return Ok(0) };
        let shift = self.shift_of(&row);
        let (first, last) = (offset >> shift, (offset + length as u64 - 1) >> shift);
        let stored = self.stored_records(inode.number(), first, last)?;
        let frames: Vec<Pointer> =
            stored.iter().filter_map(|(_, stored)| if let Stored::Frame(pointer) = stored { Some(*pointer) } else { None }).collect();
        if frames.len() > 1 {
            self.frames.expect(&frames);
        }
        let mut rest = buffer;
        for piece in pieces(offset, length as u64, shift) {
            let (part, behind) = rest.split_at_mut(piece.length);
            rest = behind;
            if let Some(record) = active.as_ref().and_then(|active| active.records.get(&piece.record)) {
                copy_or_zero(part, &record.content, piece.from);
                continue;
            }
            match stored.binary_search_by_key(&piece.record, |(record, _)| *record).ok().and_then(|found| stored.get(found)) {
                None => part.fill(0),
                Some((_, Stored::Inline(content))) => copy_or_zero(part, content, piece.from),
                Some((_, Stored::Frame(pointer))) => copy_or_zero(part, &self.frames.read(pointer)?, piece.from),
            }
        }
        Ok(length)
    }

    /// Writes at an offset; `None` appends.
    ///
    /// # Errors
    /// As [`Self::read`]; [`FileError::TooLarge`]; [`crate::PoolError::NoSpace`] where nothing could be written.
    pub fn write(&self, inode: &Arc<Inode>, offset: Option<u64>, data: &[u8]) -> Result<WriteOutcome> {
        let entered = self.gate.enter();
        let mut edited = self.edit(inode)?;
        check_regular(&edited.row)?;
        let offset = offset.unwrap_or(edited.row.size);
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= SIZE_MOST).ok_or(FileError::TooLarge)?;
        if data.is_empty() {
            return Ok(WriteOutcome { written: 0, offset });
        }
        if edited.row.record_shift == 0 {
            edited.row.record_shift = self.storing.read().record_shift;
        }
        let shift = edited.row.record_shift;
        let mut batch = Batch::default();
        let mut written = 0usize;
        let mut failed = None;
        let mut rest = data;
        for piece in pieces(offset, end - offset, shift) {
            let (part, behind) = rest.split_at(piece.length);
            rest = behind;
            let done = if piece.length == 1 << shift {
                self.write_record(entered.txg(), &mut edited, piece.record, part, &mut batch)
            } else {
                self.buffer_part(&mut edited, piece, part)
            };
            if let Err(error) = done {
                failed = Some(error);
                break;
            }
            written += piece.length;
        }
        if let (0, Some(error)) = (written, failed) {
            return Err(error);
        }
        let now = (self.clock)();
        let row = &mut edited.row;
        row.size = row.size.max(offset + written as u64);
        (row.modified, row.changed) = (now, now);
        let row = *row;
        let active = edited.activate();
        (active.row, active.changed) = (row, true);
        self.apply(entered.txg(), &batch)?;
        self.finish(inode, edited);
        Ok(WriteOutcome { written, offset })
    }

    /// Replaces a whole record.
    fn write_record(&self, txg: Txg, edited: &mut Editing<'_>, record: u64, content: &[u8], batch: &mut Batch) -> Result<()> {
        let new = self.store(txg, edited.number, record, edited.row.record_shift, content)?;
        let active = edited.activate();
        if let Some(buffered) = active.records.remove(&record) {
            self.buffered.fetch_sub(buffered.content.len() as u64, Ordering::Relaxed);
        }
        active.frames_in = txg;
        self.replace(edited, record, new, batch)
    }

    /// A frame that was written for a row that could not be made is free again.
    fn give_back(&self, new: Option<&Extent<'_>>) {
        self.freed.lock().extend(new.and_then(Extent::pointer));
    }

    /// The record's row becomes this; the frame that it named is freed.
    fn replace(&self, edited: &mut Editing<'_>, record: u64, new: Option<Extent<'_>>, batch: &mut Batch) -> Result<()> {
        let key = keys::extent(edited.number, record);
        let read = self.table.read().get(&key);
        let named = read.and_then(|old| {
            let pointer = old.as_deref().map(Extent::decode).transpose()?.and_then(|extent| extent.pointer().copied());
            Ok((old.is_some(), pointer))
        });
        let (existed, old) = named.inspect_err(|_| self.give_back(new.as_ref()))?;
        let mut charged = 0i64;
        if let Some(pointer) = old {
            charged -= pointer.charged() as i64;
            self.freed.lock().push(pointer);
        }
        match &new {
            Some(extent) => {
                charged += extent.pointer().map_or(0, |pointer| pointer.charged() as i64);
                batch.put(&key, extent.encode());
            }
            None if existed => batch.remove(&key),
            None => {}
        }
        self.charge(edited, charged);
        Ok(())
    }

    /// A record's row goes, and the frame that it names.
    pub(super) fn forget_extent(&self, edited: &mut Editing<'_>, key: &[u8], batch: &mut Batch) -> Result<()> {
        if let keys::Key::Extent { record, .. } = keys::Key::decode(key)? {
            self.replace(edited, record, None, batch)?;
        }
        Ok(())
    }

    fn charge(&self, edited: &mut Editing<'_>, bytes: i64) {
        if bytes != 0 {
            edited.row.charged = edited.row.charged.saturating_add_signed(bytes);
            self.count_owner(&edited.row, bytes, 0);
        }
    }

    /// Where a record's content comes to lie; `None` for a hole.
    fn store<'a>(&self, txg: Txg, number: u64, record: u64, shift: u8, content: &'a [u8]) -> Result<Option<Extent<'a>>> {
        let storing = *self.storing.read();
        if storing.packing != Packing::Off && is_zero(content) || content.is_empty() {
            return Ok(None);
        }
        if record == 0 && content.len() <= INLINE_FILE {
            return Ok(Some(Extent::Inline(content)));
        }
        let owner = Owner { dataset: self.dataset, object: number, offset: record << shift };
        let (packing, checksum) = (storing.packing, storing.checksum);
        let frame = NewFrame { stream: Stream::Data, kind: FrameKind::Data, owner, birth: txg, content, packing, checksum };
        Ok(Some(Extent::Frame(self.write_frame(&frame)?)))
    }

    /// Takes a part of a record into memory.
    fn buffer_part(&self, edited: &mut Editing<'_>, piece: Piece, part: &[u8]) -> Result<()> {
        let buffer = self.buffered_record(edited, piece.record)?;
        let before = buffer.content.len();
        let end = piece.from + piece.length;
        if before < end {
            buffer.content.resize(end, 0);
        }
        if let Some(place) = buffer.content.get_mut(piece.from..end) {
            place.copy_from_slice(part);
        }
        buffer.changed(piece.from..end);
        let grown = buffer.content.len() - before;
        self.buffered.fetch_add(grown as u64, Ordering::Relaxed);
        Ok(())
    }

    /// The record in memory, read where it is not there yet.
    fn buffered_record<'a>(&self, edited: &'a mut Editing<'_>, record: u64) -> Result<&'a mut Buffered> {
        let (number, size) = (edited.number, edited.row.size);
        let shift = edited.row.record_shift;
        let missing = !edited.activate().records.contains_key(&record);
        let read = if missing {
            let within = size.saturating_sub(record << shift).min(1 << shift) as usize;
            let mut content = if within == 0 { Vec::new() } else { self.load(number, record)? };
            content.truncate(within);
            self.buffered.fetch_add(content.len() as u64, Ordering::Relaxed);
            content
        } else {
            Vec::new()
        };
        Ok(edited.activate().records.entry(record).or_insert(Buffered { content: read, unrecorded: None }))
    }

    /// A record's stored content; empty for a hole.
    fn load(&self, number: u64, record: u64) -> Result<Vec<u8>> {
        let row = self.table.read().get(&keys::extent(number, record))?;
        Ok(match row.as_deref().map(Extent::decode).transpose()? {
            None => Vec::new(),
            Some(Extent::Inline(content)) => content.to_vec(),
            Some(Extent::Frame(pointer) | Extent::Shared(pointer)) => self.frames.read(&pointer)?.to_vec(),
        })
    }

    /// The stored records of a range, in order; holes are left out.
    fn stored_records(&self, number: u64, first: u64, last: u64) -> Result<Vec<(u64, Stored)>> {
        let mut range = keys::extents(number, first);
        range.end = keys::extents(number, last.saturating_add(1)).start;
        let mut found = Vec::new();
        let mut damage: std::result::Result<(), crate::PoolError> = Ok(());
        self.table.read().scan(range, &mut |key, row| {
            let one = || {
                let keys::Key::Extent { record, .. } = keys::Key::decode(key)? else { return Ok(None) };
                Ok::<_, crate::PoolError>(Some((
                    record,
                    match Extent::decode(row)? {
                        Extent::Inline(content) => Stored::Inline(content.to_vec()),
                        Extent::Frame(pointer) | Extent::Shared(pointer) => Stored::Frame(pointer),
                    },
                )))
            };
            match one() {
                Ok(record) => found.extend(record),
                Err(error) => damage = Err(error),
            }
            damage.is_ok()
        })?;
        damage?;
        Ok(found)
    }

    fn shift_of(&self, row: &Row) -> u8 {
        if row.record_shift == 0 { self.storing.read().record_shift } else { row.record_shift }
    }

    /// Changes the size. What is cut off reads as zeros when the file grows again.
    pub(super) fn resize(&self, edited: &mut Editing<'_>, size: u64, batch: &mut Batch) -> Result<()> {
        if size > SIZE_MOST {
            return Err(FileError::TooLarge);
        }
        let old = edited.row.size;
        edited.row.size = size;
        if size < old {
            self.drop_records(edited, size, batch)?;
        }
        let row = edited.row;
        let active = edited.activate();
        active.row = row;
        if active.records.is_empty() {
            active.stored_size = size;
        } else {
            active.stored_size = active.stored_size.min(size);
        }
        Ok(())
    }

    /// Takes everything behind `size` out of memory and out of the table.
    fn drop_records(&self, edited: &mut Editing<'_>, size: u64, batch: &mut Batch) -> Result<()> {
        let shift = self.shift_of(&edited.row);
        let whole = size.div_ceil(1 << shift);
        let cut = edited.activate().records.split_off(&whole);
        let dropped: u64 = cut.values().map(|record| record.content.len() as u64).sum();
        self.buffered.fetch_sub(dropped, Ordering::Relaxed);
        for (record, _) in self.stored_records(edited.number, whole, u64::MAX - 1)? {
            self.replace(edited, record, None, batch)?;
        }
        let keep = (size & ((1 << shift) - 1)) as usize;
        if keep != 0 {
            let last = size >> shift;
            let shorter = match edited.activate().records.get(&last) {
                Some(record) => record.content.len() > keep,
                None => self.stored_records(edited.number, last, last)?.iter().any(|(_, stored)| match stored {
                    Stored::Inline(content) => content.len() > keep,
                    Stored::Frame(pointer) => pointer.logical as usize > keep,
                }),
            };
            if shorter {
                edited.row.record_shift = shift;
                // Read as far as the file still goes: the rest is cut off by that.
                let buffer = self.buffered_record(edited, last)?;
                let cut = buffer.content.len().saturating_sub(keep);
                buffer.content.truncate(keep);
                // The record of the new size cuts there as well.
                let part = buffer.unrecorded.take();
                buffer.unrecorded = part.map(|part| part.start.min(keep)..part.end.min(keep)).filter(|part| !part.is_empty());
                self.buffered.fetch_sub(cut as u64, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Makes a range read as zeros; whole records become holes. With `grow` the file ends no earlier than the range.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn zero(&self, inode: &Arc<Inode>, offset: u64, length: u64, grow: bool) -> Result<()> {
        let entered = self.gate.enter();
        let mut edited = self.edit(inode)?;
        check_regular(&edited.row)?;
        let end = offset.checked_add(length).filter(|end| *end <= SIZE_MOST).ok_or(FileError::TooLarge)?;
        let shift = self.shift_of(&edited.row);
        edited.row.record_shift = shift;
        let mut batch = Batch::default();
        let within = end.min(edited.row.size).saturating_sub(offset);
        let (first, last) = (offset >> shift, end >> shift);
        // Only records that hold something are looked at: a range of any length costs what is in it.
        let mut present: Vec<u64> = self.stored_records(inode.number(), first, last)?.into_iter().map(|(record, _)| record).collect();
        present.extend(edited.activate().records.range(first..=last).map(|(record, _)| *record));
        present.sort_unstable();
        present.dedup();
        for record in present {
            let start = record << shift;
            let (from, to) = (offset.max(start), (offset + within).min(start + (1 << shift)));
            if from >= to {
                continue;
            }
            let covered = from == start && (to == start + (1 << shift) || to >= edited.row.size);
            if covered {
                if let Some(buffered) = edited.activate().records.remove(&record) {
                    self.buffered.fetch_sub(buffered.content.len() as u64, Ordering::Relaxed);
                }
                self.replace(&mut edited, record, None, &mut batch)?;
                edited.activate().frames_in = entered.txg();
            } else {
                let buffer = self.buffered_record(&mut edited, record)?;
                let end = ((to - start) as usize).min(buffer.content.len());
                let part = (from - start) as usize..end;
                if let Some(zeroed) = buffer.content.get_mut(part.clone()) {
                    zeroed.fill(0);
                    buffer.changed(part);
                }
            }
        }
        let now = (self.clock)();
        (edited.row.modified, edited.row.changed) = (now, now);
        if grow {
            edited.row.size = edited.row.size.max(end);
        }
        let row = edited.row;
        let active = edited.activate();
        (active.row, active.changed) = (row, true);
        self.apply(entered.txg(), &batch)?;
        self.finish(inode, edited);
        Ok(())
    }

    /// Where the next content or hole begins, at or behind an offset.
    ///
    /// # Errors
    /// [`FileError::NoData`] behind the end, or where only holes follow.
    pub fn seek(&self, inode: &Inode, offset: u64, to: SeekTo) -> Result<u64> {
        let active = inode.active.read();
        let row = match active.as_ref() {
            Some(active) => active.row,
            None => self.stored(inode.number())?,
        };
        check_regular(&row)?;
        if offset >= row.size {
            return Err(FileError::NoData);
        }
        let shift = self.shift_of(&row);
        let (first, last) = (offset >> shift, (row.size - 1) >> shift);
        let mut present: Vec<u64> = self.stored_records(inode.number(), first, last)?.into_iter().map(|(record, _)| record).collect();
        present.extend(active.iter().flat_map(|active| active.records.range(first..=last)).map(|(record, _)| *record));
        present.sort_unstable();
        present.dedup();
        match to {
            SeekTo::Data => present.first().map(|record| offset.max(record << shift)).ok_or(FileError::NoData),
            SeekTo::Hole => {
                let mut at = first;
                for record in present {
                    if record != at {
                        break;
                    }
                    at += 1;
                }
                Ok(if at == first { offset } else { (at << shift).min(row.size) })
            }
        }
    }

    /// Puts everything that memory holds into the table. Called before a txg is frozen: once while operations go on, to have most of it done, and
    /// once when nobody is inside, which makes it complete.
    ///
    /// # Errors
    /// Those of the engine; what could not be flushed stays in memory.
    pub fn flush(&self, txg: Txg) -> Result<()> {
        loop {
            let Some(inode) = ({
                let dirty = self.dirty.lock();
                dirty.values().next().cloned()
            }) else {
                break;
            };
            self.flush_one(txg, &inode)?;
        }
        let mut batch = Batch::default();
        self.put_counters(&self.table.read(), &mut batch)?;
        self.apply(txg, &batch)
    }

    fn flush_one(&self, txg: Txg, inode: &Arc<Inode>) -> Result<()> {
        let mut edited = self.edit(inode)?;
        // What goes into the table here was in no record: an fsync that finds it there must wait for the commit.
        self.recorder.get().iter().for_each(|recorder| recorder.cannot_record(txg));
        let mut batch = Batch::default();
        let shift = self.shift_of(&edited.row);
        let records: Vec<u64> = edited.active.iter().flat_map(|active| active.records.keys().copied()).collect();
        for record in records {
            let Some(buffered) = edited.activate().records.remove(&record) else { continue };
            let stored = self.store(txg, inode.number(), record, shift, &buffered.content).and_then(|new| {
                if matches!(new, Some(Extent::Frame(_))) {
                    edited.activate().frames_in = txg;
                }
                self.replace(&mut edited, record, new, &mut batch)
            });
            if let Err(error) = stored {
                // What was stored before counts; this record and those behind it stay in memory.
                edited.activate().records.insert(record, buffered);
                edited.put(&mut batch);
                self.apply(txg, &batch)?;
                return Err(error);
            }
            self.buffered.fetch_sub(buffered.content.len() as u64, Ordering::Relaxed);
        }
        let row = edited.row;
        if let Some(active) = edited.active.as_mut() {
            (active.row, active.stored_size, active.changed) = (row, row.size, false);
        }
        edited.put(&mut batch);
        self.apply(txg, &batch)?;
        self.dirty.lock().remove(&inode.number());
        self.finish(inode, edited);
        Ok(())
    }
}

fn check_regular(row: &Row) -> Result<()> {
    match row.file_type() {
        Some(FileType::Regular) => Ok(()),
        Some(FileType::Directory) => Err(FileError::IsDirectory),
        _ => Err(FileError::Invalid),
    }
}

/// Fills `part` with the content from `from` on, and with zeros behind its end.
fn copy_or_zero(part: &mut [u8], content: &[u8], from: usize) {
    let content = content.get(from..).unwrap_or_default();
    let there = content.len().min(part.len());
    let (front, behind) = part.split_at_mut(there);
    front.copy_from_slice(content.get(..there).unwrap_or_default());
    behind.fill(0);
}

fn is_zero(content: &[u8]) -> bool {
    content.iter().all(|byte| *byte == 0)
}
