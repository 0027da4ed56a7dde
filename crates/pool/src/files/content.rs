//! File content: read, write; sizes and holes; the flush of content in memory.
//!
//! A file is divided into records of its record size. A write that covers a whole record becomes a
//! frame at once; parts of records wait in memory for the next flush. A record of zeros is a hole
//! if compression is on (as in ZFS); content up to [`crate::rows::extent::INLINE_FILE`] bytes is
//! stored in the row.

mod flush;
mod precompressed;
mod settling;
mod sizes;

pub(crate) use flush::flush_most;
pub(super) use flush::graver;
#[cfg(test)]
pub(super) use flush::{Flushed, Progress};
#[cfg(test)]
pub(super) use sizes::STEP;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::precompressed::Precompressed;
use super::buffered::{Buffered, overlap};
use super::inodes::{Editing, Pending};
use super::keeping::ROWS;
use super::quota_check::{Admit, Needs, Replaced, worst};
use super::row_charges::of_content;
use super::stored_patches::{self, StoredPatch, is_split};
use super::streams::StreamRead;
use super::{Batch, FileError, Files, Inode, Result, Storing, Table};
use crate::frames::{CompressionSetting, NewFrame, Owner, Wanted, WriteStream};
use crate::log::LogChange;
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::extent::INLINE_FILE;
use crate::rows::inode::flags::HAS_XATTRS;
use crate::rows::{Extent, FileType, InodeRow, keys};

/// Leaves of extents that are read before the table's lock is taken: more than a read of ordinary
/// records needs.
const WARMED_LEAVES: usize = 8;

/// The largest size that a file is given, bytes: half of what signed offsets reach, so that the end of its last record, and
/// the sum of an offset in it and a length, are offsets as well.
pub const SIZE_MOST: u64 = (1 << 62) - 1;

/// Where content can end, bytes: offsets are signed. Files of earlier versions, and what a kernel has collected of a file,
/// may lie behind [`SIZE_MOST`].
const CONTENT_MOST: u64 = i64::MAX as u64;

/// Length of a single read from which on it belongs to a stream, bytes: the kernel's reads of a
/// file that is read sequentially.
const STREAM: usize = 256 << 10;

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOutcome {
    /// Bytes accepted, from the beginning of the data.
    pub written: usize,
    /// Offset of the first of them.
    pub offset: u64,
    /// The file has extended attributes, some of which are dropped by a write.
    pub has_attributes: bool,
}

/// Target of a seek (lseek(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTo {
    /// The next data.
    Data,
    /// The next hole; the end of the file is one.
    Hole,
}

/// A part of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordPart {
    pub(super) record: u64,
    /// Offset in the record.
    pub(super) from: usize,
    pub(super) length: usize,
}

/// A write, and how it is done.
#[derive(Clone, Copy)]
struct Write<'w> {
    /// Offset; `None`: at the end.
    offset: Option<u64>,
    data: &'w [u8],
    /// Its whole records, if they were compressed before.
    ahead: Option<&'w Precompressed>,
    admit: Admit,
    /// The times of the file do not change.
    timed: bool,
}

/// Rows of the whole records of a write, before they are applied.
struct StoredRecords<'w> {
    batch: &'w mut Batch,
    /// Largest possible charge of these records to the owners' accounts in memory, bytes.
    counted: &'w mut i64,
}

/// The parts of records that a range consists of.
fn pieces(offset: u64, length: u64, shift: u8) -> impl Iterator<Item = RecordPart> {
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
        Some(RecordPart { record, from: from as usize, length: length as usize })
    })
}

/// Copy of a record's row: where its content is.
enum StoredRecord {
    Frame(Pointer),
    Inline(Vec<u8>),
}

impl<T: Table> Files<T> {
    /// Reads into the buffer; fills it except at the end of the file.
    ///
    /// # Errors
    /// [`FileError::IsDirectory`], [`FileError::Invalid`] for other things without content; damage.
    pub fn read(&self, inode: &Inode, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let active = inode.active.read();
        let row = match active.as_ref() {
            Some(active) => active.row,
            None => self.kept_or_stored(inode.number())?,
        };
        check_regular(&row)?;
        let length = row.size.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let Some(buffer) = buffer.get_mut(..length).filter(|buffer| !buffer.is_empty()) else { return Ok(0) };
        let shift = self.shift_of(&row);
        let (first, last) = (offset >> shift, (offset + length as u64 - 1) >> shift);
        let stored = self.stored_records(inode.number(), first, last)?;
        let patches = self.stored_patches(&row, inode.number(), first, last)?;
        self.expect_stored(inode, &row, (first, last, length), (&stored, &patches))?;
        let waiting = |record: u64| active.as_ref().and_then(|active| active.records.get(&record));
        let mut rest = &mut *buffer;
        // Whole records are read directly into the buffer.
        let mut direct = Vec::with_capacity(stored.len());
        for piece in pieces(offset, length as u64, shift) {
            let (part, behind) = rest.split_at_mut(piece.length);
            rest = behind;
            if let Some(record) = waiting(piece.record).filter(|record| !record.is_sparse()) {
                copy_or_zero(part, &record.content, piece.from);
                continue;
            }
            if stored_patches::cover(&patches, piece.record, &(piece.from..piece.from + piece.length)) {
                continue;
            }
            match stored
                .binary_search_by_key(&piece.record, |(record, _)| *record)
                .ok()
                .and_then(|found| stored.get(found))
            {
                None => part.fill(0),
                Some((_, StoredRecord::Inline(content))) => copy_or_zero(part, content, piece.from),
                Some((_, StoredRecord::Frame(pointer)))
                    if piece.from == 0 && pointer.logical as usize <= part.len() =>
                {
                    let (target, behind) = part.split_at_mut(pointer.logical as usize);
                    behind.fill(0);
                    direct.push(Wanted { pointer: *pointer, target });
                }
                Some((_, StoredRecord::Frame(pointer))) => copy_or_zero(part, &self.frames.read(pointer)?, piece.from),
            }
        }
        self.frames.read_all(&mut direct)?;
        if patches.is_empty() && active.as_ref().is_none_or(|active| active.records.is_empty()) {
            return Ok(length);
        }
        let mut rest = &mut *buffer;
        let mut direct = Vec::new();
        for piece in pieces(offset, length as u64, shift) {
            let (part, behind) = rest.split_at_mut(piece.length);
            rest = behind;
            if waiting(piece.record).is_none_or(Buffered::is_sparse) {
                self.lay_patches(part, &piece, &patches, &mut direct)?;
            }
        }
        self.frames.read_all(&mut direct)?;
        let mut rest = buffer;
        for piece in pieces(offset, length as u64, shift) {
            let (part, behind) = rest.split_at_mut(piece.length);
            rest = behind;
            for (from, bytes) in waiting(piece.record).iter().flat_map(|record| record.fragments.parts()) {
                overlap(part, piece.from, from, bytes);
            }
        }
        Ok(length)
    }

    /// Starts reads on the devices: of the frames wanted now, and, for a stream, of the next ones.
    fn expect_stored(
        &self,
        inode: &Inode,
        row: &InodeRow,
        (first, last, length): (u64, u64, usize),
        (stored, patches): (&[(u64, StoredRecord)], &[StoredPatch]),
    ) -> Result<()> {
        let (shift, ahead) = (self.shift_of(row), self.frames.ahead());
        let records = |bytes: u64| bytes.div_ceil(1 << shift);
        let (least, begins, most) = (records(ahead.least), records(ahead.begins), records(ahead.most));
        let read = StreamRead { inode: inode.number(), first, last, least, begins, most };
        let is_stream = length >= STREAM;
        if is_stream || stored.len() > 1 {
            let now = frames_of(stored, patches);
            if (is_stream || now.len() > 1) && !self.streams.has_asked(&read) {
                self.frames.expect(&now);
            }
        }
        let next = if is_stream { self.streams.go_on(&read) } else { 0..0 };
        if !next.is_empty() && next.start << shift < row.size {
            // Threads that write a file in parallel store its records out of order, some far apart.
            let beyond = if ahead.block > 0 { most } else { 0 };
            let last = next.end.saturating_add(beyond) - 1;
            let coming = self.stored_records(inode.number(), next.start, last)?;
            let (wanted, beyond) = coming.split_at(coming.partition_point(|(record, _)| *record < next.end));
            let patches = self.stored_patches(row, inode.number(), next.start, last)?;
            let (wanted_patches, beyond_patches) =
                patches.split_at(patches.partition_point(|patch| patch.record < next.end));
            self.frames.expect_later(&frames_of(wanted, wanted_patches), &frames_of(beyond, beyond_patches));
        }
        Ok(())
    }

    /// Writes at an offset; `None` appends.
    ///
    /// # Errors
    /// As [`Self::read`]; [`FileError::TooLarge`]; [`crate::PoolError::NoSpace`] if nothing could
    /// be written.
    pub fn write(&self, inode: &Arc<Inode>, offset: Option<u64>, data: &[u8]) -> Result<WriteOutcome> {
        self.write_parts(offset, data, |offset, data| self.write_stored_or_asked(inode, offset, data, false))
    }

    fn write_stored_or_asked(
        &self,
        inode: &Arc<Inode>,
        offset: Option<u64>,
        data: &[u8],
        timed: bool,
    ) -> Result<WriteOutcome> {
        let ahead = self.compress_ahead(inode, offset, data);
        self.with_relief(|| {
            self.check_writable()?;
            self.write_admitted(inode, &Write { offset, data, ahead: ahead.as_ref(), admit: Admit::Asked, timed })
        })
    }

    /// Writes in as many parts as the replay journal requires: without one it is one.
    fn write_parts(
        &self,
        offset: Option<u64>,
        data: &[u8],
        write: impl Fn(Option<u64>, &[u8]) -> Result<WriteOutcome>,
    ) -> Result<WriteOutcome> {
        let most = self.written_at_once();
        let (first, mut rest) = data.split_at(data.len().min(most));
        let mut outcome = write(offset, first)?;
        while !rest.is_empty() && outcome.written == data.len() - rest.len() {
            let (part, behind) = rest.split_at(rest.len().min(most));
            rest = behind;
            match write(Some(outcome.offset.saturating_add(outcome.written as u64)), part) {
                Ok(more) => outcome.written += more.written,
                // The parts accepted before count.
                Err(_) => break,
            }
        }
        Ok(outcome)
    }

    /// As [`Self::write`], for a page that was stored through a memory mapping: it was not admitted
    /// before. With `timed` the times do not change, as in [`Self::write_held`].
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_stored(&self, inode: &Arc<Inode>, offset: u64, data: &[u8], timed: bool) -> Result<WriteOutcome> {
        self.write_parts(Some(offset), data, |offset, data| self.write_stored_or_asked(inode, offset, data, timed))
    }

    /// As [`Self::write`], for kernel write-back that was accepted before: no limit refuses it any
    /// more. With `timed` the times do not change: the kernel sends them by itself, before or
    /// after.
    ///
    /// # Errors
    /// As [`Self::read`]; [`FileError::TooLarge`]; [`crate::PoolError::NoSpace`] if the pool has no
    /// room at all.
    pub fn write_held(
        &self,
        inode: &Arc<Inode>,
        offset: Option<u64>,
        data: &[u8],
        timed: bool,
    ) -> Result<WriteOutcome> {
        self.write_parts(offset, data, |offset, data| {
            let ahead = self.compress_ahead(inode, offset, data);
            self.with_relief_for(Admit::Held, || {
                self.write_admitted(inode, &Write { offset, data, ahead: ahead.as_ref(), admit: Admit::Held, timed })
            })
        })
    }

    fn write_admitted(&self, inode: &Arc<Inode>, write: &Write<'_>) -> Result<WriteOutcome> {
        let Write { offset, data, .. } = *write;
        // Waits now, so that no commit has to wait for this later.
        self.frames.await_room();
        self.throttle.slow_down(|| self.admission.room_before_cleaning());
        self.throttle.await_flush();
        let behind = |row: &InodeRow| offset.unwrap_or(row.size).saturating_add(data.len() as u64);
        let (entered, mut edited) = self.enter_growing(inode, ROWS + data.len() as u64, behind)?;
        check_regular(&edited.row)?;
        let in_memory = self.throttle.is_in_memory();
        if !in_memory {
            inode.check_stored()?;
        }
        let offset = offset.unwrap_or(edited.row.size);
        let end =
            offset.checked_add(data.len() as u64).filter(|end| *end <= CONTENT_MOST).ok_or(FileError::TooLarge)?;
        if data.is_empty() {
            return Ok(WriteOutcome { written: 0, offset, has_attributes: false });
        }
        if edited.row.record_shift == 0 {
            edited.row.record_shift = self.storing.read().record_shift;
        }
        // It must fit into the first record.
        let is_small = data.len() <= INLINE_FILE.min(1 << edited.row.record_shift);
        if edited.active.is_none() && edited.row.size == 0 && offset == 0 && is_small {
            return self.write_small(entered.txg(), edited, write);
        }
        let shift = edited.row.record_shift;
        inode.shift.store(shift, Ordering::Relaxed);
        let mut batch = Batch::default();
        let owned = edited.row;
        // The charge of whole records is not in the table before the end.
        let mut counted = 0;
        let mut written = 0usize;
        let mut failed = None;
        let mut rest = data;
        let parts: Vec<(RecordPart, &[u8])> = pieces(offset, end - offset, shift)
            .map(|piece| {
                let (part, behind) = rest.split_at(piece.length);
                rest = behind;
                (piece, part)
            })
            .collect();
        // Files of a stream or an image may have longer records than this pool can hold.
        let longest = self.longest_record;
        if 1 << shift > longest
            && !self.is_replaying()
            && parts.iter().any(|(piece, _)| (piece.from + piece.length) as u64 > longest)
        {
            return Err(FileError::TooLarge);
        }
        let is_whole = |(piece, _): &(RecordPart, &[u8])| piece.length == 1 << shift && !in_memory;
        for group in parts.chunk_by(|one, next| is_whole(one) && is_whole(next)) {
            let (done, error) = match group {
                [one, ..] if is_whole(one) => {
                    let mut stored = StoredRecords { batch: &mut batch, counted: &mut counted };
                    self.write_records(entered.txg(), &mut edited, (write, group), &mut stored)
                }
                [(piece, part)] => match self.buffer_part(entered.txg(), &mut edited, *piece, part, write.admit) {
                    Ok(()) => (piece.length, None),
                    Err(error) => (0, Some(error)),
                },
                _ => (0, None),
            };
            written += done;
            failed = error;
            if failed.is_some() {
                break;
            }
        }
        if let (0, Some(error)) = (written, failed) {
            self.abandon(&batch);
            self.finish(inode, edited);
            self.owners.count_waiting(&owned, -counted);
            return Err(error);
        }
        let row = &mut edited.row;
        row.size = row.size.max(offset + written as u64);
        self.stamp_written(row, write.timed);
        let row = *row;
        let active = edited.activate();
        (active.row, active.changed) = (row, true);
        let data = data.get(..written).unwrap_or_default();
        let change = LogChange::Write { inode: inode.number(), offset, data };
        let applied = self.apply_and_finish(entered.txg(), inode, edited, (&batch, change));
        self.owners.count_waiting(&owned, -counted);
        applied?;
        Ok(WriteOutcome { written, offset, has_attributes: row.flags & HAS_XATTRS != 0 })
    }

    pub(super) fn stamp_written(&self, row: &mut InodeRow, timed: bool) {
        if !timed {
            let now = (self.clock)();
            (row.modified, row.changed) = (now, now);
        }
    }

    /// Writes the first content of a file, stored in its row: nothing of it stays in memory, and a
    /// record of the log holds it.
    fn write_small(&self, txg: Txg, mut edited: Editing<'_>, write: &Write<'_>) -> Result<WriteOutcome> {
        let data = write.data;
        let promised = worst(data.len());
        let needs = Needs { bytes: promised, content: data.len() as u64, owned: of_content(data) };
        self.admit_over(&edited.row, needs, write.admit, || Ok(Replaced::default()))?;
        let mut batch = Batch::default();
        if form_of(&self.storing.read(), 0, data) != Form::Hole {
            batch.put(&keys::extent(edited.number, 0), Extent::Inline(data).encode());
        }
        edited.row.size = data.len() as u64;
        self.stamp_written(&mut edited.row, write.timed);
        let has_attributes = edited.row.flags & HAS_XATTRS != 0;
        edited.put(&mut batch);
        let applied = self.apply_and(txg, &batch, || {
            self.record_rows(txg, &batch, None);
            self.keep_row(txg, &edited, Some(LogChange::Write { inode: edited.number, offset: 0, data }));
        });
        self.admission.charge(self.dataset, txg, promised, 0);
        applied.map(|()| WriteOutcome { written: data.len(), offset: 0, has_attributes })
    }

    /// Replaces whole records, precompressed or compressed by several threads where that pays off;
    /// returns how many bytes of them were written, from the beginning, and the error that stopped
    /// it.
    fn write_records(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        (write, records): (&Write<'_>, &[(RecordPart, &[u8])]),
        stored: &mut StoredRecords<'_>,
    ) -> (usize, Option<FileError>) {
        let storing = *self.storing.read();
        let (number, shift) = (edited.number, edited.row.record_shift);
        let (mut failed, of_owners) = (None, self.has_owner_quotas());
        let admitted = |(piece, content): &&(RecordPart, &[u8])| {
            let bytes = worst(content.len());
            let from = piece.record << shift;
            let replaced = || self.replaced(&edited.row, number, &(from..from + content.len() as u64));
            let admitted = self
                .admit_over(&edited.row, Needs::new(bytes, content.len() as u64), write.admit, replaced)
                .map_err(|error| failed = Some(error))
                .is_ok();
            if admitted && of_owners {
                self.owners.count_waiting(&edited.row, bytes as i64);
                *stored.counted += bytes as i64;
            }
            admitted
        };
        let records: Vec<&(RecordPart, &[u8])> = records.iter().take_while(admitted).collect();
        let forms: Vec<Form> =
            records.iter().map(|(piece, content)| form_of(&storing, piece.record, content)).collect();
        let framed = records.iter().zip(&forms).filter(|(_, form)| **form == Form::Frame);
        let frames: Vec<NewFrame<'_>> = framed
            .map(|((piece, content), _)| self.new_frame(&storing, txg, (number, piece.record << shift), content))
            .collect();
        let mut pointers = Vec::with_capacity(frames.len());
        let outcome = match write
            .ahead
            .and_then(|ahead| ahead.of(&storing, shift, frames.iter().map(|frame| frame.owner.offset >> shift)))
        {
            Some(compressed) => frames.iter().zip(compressed).try_for_each(|(frame, compressed)| {
                pointers.push(self.frames.write_compressed(frame, compressed)?);
                Ok(())
            }),
            None => self.frames.write_all(&frames, &mut pointers),
        };
        if let Err(error) = outcome {
            failed = Some(error.into());
        }
        pointers.iter().for_each(|pointer| self.count_written(pointer));
        let mut pointers = pointers.into_iter();
        let (mut written, mut stopped) = (0, false);
        for ((piece, content), form) in records.into_iter().zip(forms) {
            let pointer = if form == Form::Frame { pointers.next() } else { None };
            let charged = pointer.as_ref().map_or(0, Pointer::charged);
            self.admission.charge(self.dataset, txg, worst(content.len()), charged);
            let new = match form {
                Form::Hole => None,
                Form::Inline => Some(Extent::Inline(content)),
                Form::Frame => pointer.map(Extent::Frame),
            };
            if stopped || (form == Form::Frame && new.is_none()) {
                // Records after the first failed one do not count as written.
                self.give_back(new.as_ref());
                stopped = true;
                continue;
            }
            if let Err(error) = self.replace(edited, piece.record, new, stored.batch) {
                (stopped, failed) = (true, failed.or(Some(error)));
                continue;
            }
            written += content.len();
            edited.activate().frames_in = txg;
            edited.pending.push(Pending::Gone(piece.record));
        }
        (written, failed)
    }

    /// Drops content from memory, and its reservation.
    pub(super) fn release(&self, txg: Txg, row: &InodeRow, buffered: &Buffered) {
        self.became(txg, row, buffered, 0);
    }

    /// Notes that content in memory has become a frame with this charge; 0 if it needed none.
    pub(super) fn became(&self, txg: Txg, row: &InodeRow, buffered: &Buffered, charged: u64) {
        self.buffered.shrink(buffered.held());
        self.throttle.stored_content(buffered.held());
        self.needed.shrink(buffered.promised);
        self.admission.charge(self.dataset, txg, buffered.promised, charged);
        self.owners.count_waiting(row, -(buffered.promised as i64));
    }

    /// Frees a frame whose row could not be changed.
    fn give_back(&self, new: Option<&Extent<'_>>) {
        self.freed.lock().extend(new.and_then(Extent::dead));
    }

    /// Replaces a record's row, and frees the frame that it referenced.
    pub(super) fn replace(
        &self,
        edited: &mut Editing<'_>,
        record: u64,
        new: Option<Extent<'_>>,
        batch: &mut Batch,
    ) -> Result<()> {
        let key = keys::extent(edited.number, record);
        let read = self.table.read().get(&key);
        let named = read.and_then(|old| {
            let dead = old.as_deref().map(Extent::decode).transpose()?.and_then(|extent| extent.dead());
            Ok((old.is_some(), dead))
        });
        let (existed, old) = named.inspect_err(|_| self.give_back(new.as_ref()))?;
        let patches = self
            .stored_patches(&edited.row, edited.number, record, record)
            .inspect_err(|_| self.give_back(new.as_ref()))?;
        let mut charged = -(self.drop_patches(patches, edited.number, batch) as i64);
        if let Some(dead) = old {
            charged -= dead.owner_charge as i64;
            batch.dead.push(dead);
        }
        match &new {
            Some(extent) => {
                charged += extent.pointer().map_or(0, |pointer| pointer.owner_charge() as i64);
                batch.written.extend(extent.dead());
                batch.put(&key, extent.encode());
            }
            None if existed => batch.remove(&key),
            None => {}
        }
        self.charge(edited, charged, batch);
        Ok(())
    }

    /// Removes a record's row, and frees the frame that it references.
    pub(super) fn forget_extent(&self, edited: &mut Editing<'_>, key: &[u8], batch: &mut Batch) -> Result<()> {
        if let keys::Key::Extent { record, .. } = keys::Key::decode(key)? {
            self.replace(edited, record, None, batch)?;
        }
        Ok(())
    }

    pub(super) fn charge(&self, edited: &mut Editing<'_>, bytes: i64, batch: &mut Batch) {
        if bytes != 0 {
            edited.row.charged = edited.row.charged.saturating_add_signed(bytes);
            batch.charge(&edited.row, bytes);
        }
    }

    /// A new frame of file content.
    pub(super) fn new_frame<'a>(
        &self,
        storing: &Storing,
        birth: Txg,
        (object, offset): (u64, u64),
        content: &'a [u8],
    ) -> NewFrame<'a> {
        let owner = Owner { dataset: self.dataset, object, offset };
        let (compression, checksum) = (storing.compression, storing.checksum);
        NewFrame { stream: WriteStream::Data, kind: FrameKind::Data, owner, birth, content, compression, checksum }
    }

    /// Takes a part of a record into memory.
    fn buffer_part(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        piece: RecordPart,
        part: &[u8],
        admit: Admit,
    ) -> Result<()> {
        if piece.length == 1 << edited.row.record_shift {
            // A whole record, in a replay in memory: the previous content is not read.
            let row = edited.row;
            if let Some(before) = edited.activate().records.insert(piece.record, Buffered::default()) {
                self.release(txg, &row, &before);
            }
        } else if self.buffer_fragment(edited, piece, part, admit)? {
            return Ok(());
        }
        let end = piece.from + piece.length;
        let buffer = self.promised_record(txg, edited, piece.record, end, admit)?;
        let before = buffer.content.len();
        if before < end {
            buffer.content.resize(end, 0);
        }
        if let Some(place) = buffer.content.get_mut(piece.from..end) {
            place.copy_from_slice(part);
        }
        buffer.changed(piece.from..end);
        let grown = buffer.content.len() - before;
        self.buffered.grow(grown as u64);
        Ok(())
    }

    /// Returns the record in memory, with space reserved for its future length.
    fn promised_record<'a>(
        &self,
        txg: Txg,
        edited: &'a mut Editing<'_>,
        record: u64,
        end: usize,
        admit: Admit,
    ) -> Result<&'a mut Buffered> {
        let row = edited.row;
        let buffer = self.buffered_record(edited, record)?;
        let promised = buffer.promised;
        let length = buffer.content.len().max(end);
        let need = worst(length).saturating_sub(promised);
        let (number, from, to) = (edited.number, record << row.record_shift, (record + 1) << row.record_shift);
        let replaced = || match promised {
            0 => self.replaced(&row, number, &(from..to)),
            // The stored content was counted before.
            _ => Ok(Replaced::default()),
        };
        if need > 0
            && let Err(refused) = self.admit_over(&row, Needs::new(need, length as u64), admit, replaced)
        {
            // A record that was only read for this need not be stored again.
            if promised == 0
                && let Some(buffered) = edited.activate().records.remove(&record)
            {
                self.release(txg, &row, &buffered);
            }
            return Err(refused);
        }
        self.owners.count_waiting(&row, need as i64);
        let buffer = edited.activate().records.entry(record).or_default();
        buffer.promised += need;
        self.needed.grow(need);
        Ok(buffer)
    }

    /// Returns the record in memory, read from the store if necessary.
    fn buffered_record<'a>(&self, edited: &'a mut Editing<'_>, record: u64) -> Result<&'a mut Buffered> {
        let (number, size) = (edited.number, edited.row.size);
        let shift = edited.row.record_shift;
        let row = edited.row;
        if let Some(buffered) = edited.activate().records.get_mut(&record).filter(|buffered| buffered.is_sparse()) {
            self.fill(&row, number, record, buffered)?;
        }
        let missing = !edited.activate().records.contains_key(&record);
        let read = if missing {
            let within = size.saturating_sub(record << shift).min(1 << shift) as usize;
            let mut content = if within == 0 { Vec::new() } else { self.load(&row, number, record)? };
            content.truncate(within);
            self.buffered.grow(content.len() as u64);
            content
        } else {
            Vec::new()
        };
        Ok(edited.activate().records.entry(record).or_insert(Buffered { content: read, ..Buffered::default() }))
    }

    /// Reads a record's stored content; empty for a hole.
    pub(super) fn load(&self, row: &InodeRow, number: u64, record: u64) -> Result<Vec<u8>> {
        self.warm(&keys::extent(number, record))?;
        let extent = self.table.read().get(&keys::extent(number, record))?;
        Ok(match extent.as_deref().map(Extent::decode).transpose()? {
            None => Vec::new(),
            Some(Extent::Inline(content)) => content.to_vec(),
            Some(Extent::Frame(pointer) | Extent::Shared { pointer, .. }) => {
                let piece = RecordPart { record, from: 0, length: pointer.logical as usize };
                let patches = self.stored_patches(row, number, record, record)?;
                let mut content =
                    match stored_patches::cover(&patches, piece.record, &(piece.from..piece.from + piece.length)) {
                        true => vec![0; piece.length],
                        false => self.frames.read(&pointer)?.to_vec(),
                    };
                let mut direct = Vec::new();
                // Patches are laid over the content that was read, whatever length its row states.
                let piece = RecordPart { length: content.len(), ..piece };
                self.lay_patches(&mut content, &piece, &patches, &mut direct)?;
                self.frames.read_all(&mut direct)?;
                content
            }
        })
    }

    /// Returns the numbers of the first `most` stored records of a range, in order.
    fn stored_numbers(&self, number: u64, first: u64, last: u64, most: usize) -> Result<Vec<u64>> {
        let range = keys::extents(number, first, last);
        self.warm_range(&range, most.min(WARMED_LEAVES))?;
        let mut found = Vec::new();
        self.table.read().try_scan(range, &mut |key, _| {
            if let keys::Key::Extent { record, .. } = keys::Key::decode(key)? {
                found.push(record);
            }
            Ok(found.len() < most)
        })?;
        Ok(found)
    }

    /// Returns the stored records of a range, in order, without holes.
    fn stored_records(&self, number: u64, first: u64, last: u64) -> Result<Vec<(u64, StoredRecord)>> {
        let range = keys::extents(number, first, last);
        self.warm_range(&range, WARMED_LEAVES)?;
        let mut found = Vec::new();
        self.table.read().try_scan(range, &mut |key, row| {
            if let keys::Key::Extent { record, .. } = keys::Key::decode(key)? {
                let stored = match Extent::decode(row)? {
                    Extent::Inline(content) => StoredRecord::Inline(content.to_vec()),
                    Extent::Frame(pointer) | Extent::Shared { pointer, .. } => StoredRecord::Frame(pointer),
                };
                found.push((record, stored));
            }
            Ok(true)
        })?;
        Ok(found)
    }

    pub(super) fn shift_of(&self, row: &InodeRow) -> u8 {
        if row.record_shift == 0 { self.storing.read().record_shift } else { row.record_shift }
    }
}

/// How a record's content is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Hole,
    Inline,
    Frame,
}

fn form_of(storing: &Storing, record: u64, content: &[u8]) -> Form {
    if storing.compression != CompressionSetting::Off && is_zero(content) || content.is_empty() {
        Form::Hole
    } else if record == 0 && content.len() <= INLINE_FILE {
        Form::Inline
    } else {
        Form::Frame
    }
}

/// The frames from which records are read: of split ones only the blocks.
fn frames_of(stored: &[(u64, StoredRecord)], patches: &[StoredPatch]) -> Vec<Pointer> {
    let mut frames = Vec::with_capacity(stored.len() + patches.len());
    for (record, stored) in stored {
        let before = frames.len();
        frames.extend(stored_patches::of_record(patches, *record).map(|patch| patch.patch.pointer));
        if let StoredRecord::Frame(pointer) = stored
            && (frames.len() == before || !is_split(pointer.owner_charge(), pointer.logical as usize))
        {
            frames.insert(before, *pointer);
        }
    }
    frames
}

fn check_regular(row: &InodeRow) -> Result<()> {
    match row.file_type() {
        Some(FileType::Regular) => Ok(()),
        Some(FileType::Directory) => Err(FileError::IsDirectory),
        _ => Err(FileError::Invalid),
    }
}

/// Fills `part` with the content from `from` on, and with zeros after its end.
fn copy_or_zero(part: &mut [u8], content: &[u8], from: usize) {
    let content = content.get(from..).unwrap_or_default();
    let there = content.len().min(part.len());
    let (front, behind) = part.split_at_mut(there);
    front.copy_from_slice(content.get(..there).unwrap_or_default());
    behind.fill(0);
}

fn is_zero(content: &[u8]) -> bool {
    // Most content is not zero, as its first bytes show; the remainder is checked in steps that the
    // compiler turns into wide instructions.
    let mut parts = content.chunks(256);
    parts.all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}
