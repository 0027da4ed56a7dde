//! File sizes and holes: truncation, zeroing, seeking.
//!
//! Invariants:
//! - A truncation changes the size in one step, and records it; the rows after the end are removed
//!   in steps, each as long as a commit may wait for. An inode with [`CUT`] may still have rows
//!   there, whatever happens in between: they are removed before the file grows over them.
//! - Changes of records in memory are made once the table has taken the operation's rows
//!   ([`Files::settle`]).

use std::sync::Arc;

use super::{CONTENT_MOST, SIZE_MOST, SeekTo, StoredRecord, check_regular};
use crate::files::inodes::{Editing, Pending};
use crate::files::keeping::ROWS;
use crate::files::quota_check::{Admit, worst};
use crate::files::{Batch, Entered, FileError, Files, Inode, Result, Table};
use crate::log::LogChange;
use crate::pointer::Txg;
use crate::rows::inode::flags::CUT;
use crate::rows::{InodeRow, keys};
use crate::space::Purpose;

/// Number of records that one step removes: a step holds the txg open. Few in tests, for many
/// steps.
pub(in crate::files) const STEP: usize = if cfg!(test) { 5 } else { 1024 };

impl Editing<'_> {
    /// Whether there may be rows between the end of the file and this offset.
    pub(in crate::files) fn is_cut_before(&self, end: u64) -> bool {
        self.row.flags & CUT != 0 && end > self.row.size
    }
}

impl<T: Table> Files<T> {
    /// Begins an operation that appends so many bytes to the journal, and after which the file may
    /// end at `end`: rows that a truncation left there are removed first. Not to be called under
    /// any lock.
    pub(in crate::files) fn enter_growing<'a>(
        &'a self,
        inode: &'a Arc<Inode>,
        bytes: u64,
        end: impl Fn(&InodeRow) -> u64,
    ) -> Result<(Entered<'a>, Editing<'a>)> {
        loop {
            let entered = self.enter_with(bytes)?;
            let edited = self.edit(inode)?;
            if !edited.is_cut_before(end(&edited.row)) {
                return Ok((entered, edited));
            }
            drop(edited);
            drop(entered);
            self.cut_some(inode)?;
        }
    }

    /// Removes the rows that a truncation left, if the file is to grow up to `end`. Not to be
    /// called under any lock.
    pub(in crate::files) fn uncut(&self, inode: &Arc<Inode>, end: u64) -> Result<()> {
        while self.edit(inode)?.is_cut_before(end) {
            self.cut_some(inode)?;
        }
        Ok(())
    }

    /// Removes all rows that a truncation left; returns the attributes.
    pub(in crate::files) fn finish_cut(&self, inode: &Arc<Inode>, row: InodeRow) -> Result<InodeRow> {
        let mut row = row;
        while row.flags & CUT != 0 {
            self.cut_some(inode)?;
            row = self.edit(inode)?.row;
        }
        Ok(row)
    }

    /// Removes about so many rows of truncations that were interrupted, by a crash or by unreadable
    /// rows. Returns whether there are more. Not to be called under any lock, nor by an operation
    /// that a commit waits for.
    ///
    /// # Errors
    /// Errors of the engine; the remaining rows are removed after the next import, or before the
    /// file grows.
    pub fn sweep_cuts(&self, rows: u64) -> Result<bool> {
        let mut left = rows;
        let mut outcome = Ok(());
        while left > 0
            && let Some(number) = self.known.next_cut()
        {
            left = left.saturating_sub(STEP as u64);
            let inode = self.known.get(number);
            let swept = self.cut_some(&inode).and_then(|()| Ok(self.attributes(&inode)?.flags & CUT != 0));
            match swept {
                Ok(true) => self.known.put_cut([number]),
                Ok(false) => {}
                Err(FileError::NotFound) => {
                    let mut batch = Batch::default();
                    batch.remove(&keys::cut(number));
                    outcome = self.enter().and_then(|entered| self.apply(entered.txg(), &batch));
                }
                // Files after one that cannot be read are processed all the same.
                Err(error) => outcome = Err(error),
            }
        }
        outcome.map(|()| self.known.has_cut())
    }

    /// Looks in the table for interrupted truncations, to complete them.
    pub(crate) fn find_cuts(&self) -> Result<()> {
        let mut numbers = Vec::new();
        self.table.read().scan(keys::of_kind(keys::CUT), &mut |key, _| {
            if let Ok(keys::Key::Cut(number)) = keys::Key::decode(key) {
                numbers.push(number);
            }
            true
        })?;
        self.known.put_cut(numbers);
        Ok(())
    }

    /// One step of removing rows after the end.
    fn cut_some(&self, inode: &Arc<Inode>) -> Result<()> {
        // The journal has the size, from which this follows.
        let entered = self.enter_with(0)?;
        let mut edited = self.edit(inode)?;
        if edited.row.flags & CUT == 0 {
            // A row of a replayed log, where fewer rows were left.
            let mut batch = Batch::default();
            if self.table.read().get(&keys::cut(edited.number))?.is_some() {
                batch.remove(&keys::cut(edited.number));
            }
            return self.apply(entered.txg(), &batch);
        }
        let before = edited.row;
        let mut batch = Batch::default();
        let dropped = self.drop_rows(&mut edited, &mut batch).and_then(|()| {
            edited.put(&mut batch);
            self.apply_and(entered.txg(), &batch, || self.record_rows(entered.txg(), &batch, None))
        });
        if dropped.is_err()
            && let Some(active) = edited.active.as_mut()
        {
            active.row = before;
        }
        self.finish(inode, edited);
        dropped
    }

    /// The largest size that a file is given: the log of an earlier version may have a larger one.
    fn size_most(&self) -> u64 {
        if self.is_replaying() { CONTENT_MOST } else { SIZE_MOST }
    }

    /// Changes the size. Truncated content reads as zeros when the file grows again. On an error
    /// the caller restores the edit's state.
    pub(in crate::files) fn resize(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        size: u64,
        batch: &mut Batch,
    ) -> Result<()> {
        if size > self.size_most() {
            return Err(FileError::TooLarge);
        }
        let old = edited.row.size;
        // Active with its old size: an error leaves it so.
        edited.activate();
        edited.row.size = size;
        if size < old {
            self.drop_records(txg, edited, batch)?;
        }
        let whole = size.div_ceil(1 << self.shift_of(&edited.row));
        let row = edited.row;
        let active = edited.activate();
        active.row = row;
        if active.records.range(..whole).next().is_none() {
            active.stored_size = size;
        } else {
            active.stored_size = active.stored_size.min(size);
        }
        Ok(())
    }

    /// Removes all content after the size from memory, and one step of its rows from the table.
    fn drop_records(&self, txg: Txg, edited: &mut Editing<'_>, batch: &mut Batch) -> Result<()> {
        let (size, shift) = (edited.row.size, self.shift_of(&edited.row));
        let whole = size.div_ceil(1 << shift);
        let keep = (size & ((1 << shift) - 1)) as usize;
        if keep != 0 {
            let record = size >> shift;
            let there = edited.activate().records.get(&record);
            let fresh = there.is_none();
            let shorter = match there {
                // Parts after the end of an incomplete record must be removed as well.
                Some(record) => record.is_sparse() || record.content.len() > keep,
                None => self.stored_records(edited.number, record, record)?.iter().any(|(_, stored)| match stored {
                    StoredRecord::Inline(content) => content.len() > keep,
                    StoredRecord::Frame(pointer) => pointer.logical as usize > keep,
                }),
            };
            if shorter {
                edited.row.record_shift = shift;
                // Read up to the new end of the file, which truncates it.
                self.promised_record(txg, edited, record, keep, Admit::Freeing)?;
                edited.pending.push(Pending::Cut { record, keep, fresh });
            }
        }
        let gone: Vec<u64> = edited.activate().records.range(whole..).map(|(record, _)| *record).collect();
        edited.pending.extend(gone.into_iter().map(Pending::Gone));
        self.drop_rows(edited, batch)
    }

    /// Removes one step of the rows of records after the size.
    fn drop_rows(&self, edited: &mut Editing<'_>, batch: &mut Batch) -> Result<()> {
        let whole = edited.row.size.div_ceil(1 << self.shift_of(&edited.row));
        let records = self.stored_numbers(edited.number, whole, u64::MAX - 1, STEP)?;
        for record in &records {
            self.replace(edited, *record, None, batch)?;
        }
        let (was, is) = (edited.row.flags & CUT != 0, records.len() == STEP);
        // Makes an import find it.
        match (was, is) {
            (false, true) => batch.put(&keys::cut(edited.number), Vec::new()),
            (true, false) => batch.remove(&keys::cut(edited.number)),
            _ => {}
        }
        edited.row.flags = if is { edited.row.flags | CUT } else { edited.row.flags & !CUT };
        Ok(())
    }

    /// Checks whether a range of a file could be filled now. Nothing is reserved: content is always
    /// written to a new block address.
    ///
    /// # Errors
    /// As [`Self::write`], without a commit to make room.
    pub fn would_fill(&self, inode: &Inode, offset: u64, length: u64) -> Result<()> {
        let end = offset.checked_add(length).filter(|end| *end <= SIZE_MOST).ok_or(FileError::TooLarge)?;
        if length == 0 {
            return Ok(());
        }
        let row = self.attributes(inode)?;
        check_regular(&row)?;
        let shift = self.shift_of(&row);
        let (first, last) = (offset >> shift, (end - 1) >> shift);
        let fits = |there: u64| {
            let missing = (last - first + 1).saturating_sub(there);
            let bytes = length.min(missing << shift);
            self.would_admit(row.uid, row.gid, bytes.saturating_add(missing.saturating_mul(worst(0))))
        };
        match fits(0) {
            Err(FileError::Quota | FileError::Pool(crate::PoolError::NoSpace)) => {}
            other => return other,
        }
        // Existing records are only overwritten.
        let mut there =
            inode.active.read().as_ref().map_or(0, |active| active.records.range(first..=last).count() as u64);
        let mut from = first;
        while from <= last {
            let stored = self.stored_numbers(inode.number(), from, last, STEP)?;
            there += stored.len() as u64;
            match stored.last() {
                Some(end) if stored.len() == STEP => from = end + 1,
                _ => break,
            }
        }
        fits(there)
    }

    /// Zeroes a range; whole records become holes. With `grow` the file is extended to the end of
    /// the range.
    ///
    /// # Errors
    /// As [`Self::write`]; the range before the error may be zeroed.
    pub fn zero(&self, inode: &Arc<Inode>, offset: u64, length: u64, grow: bool) -> Result<()> {
        self.zero_timed(inode, offset, length, grow, false)
    }

    /// As [`Self::zero`]; with `timed` the times do not change, as in [`Self::write_held`].
    ///
    /// # Errors
    /// As [`Self::zero`].
    pub fn zero_timed(&self, inode: &Arc<Inode>, offset: u64, length: u64, grow: bool, timed: bool) -> Result<()> {
        let most = if grow { self.size_most() } else { CONTENT_MOST };
        let end = offset.checked_add(length).filter(|end| *end <= most).ok_or(FileError::TooLarge)?;
        let mut from = offset;
        loop {
            let reached = self.with_relief(|| {
                self.admit_rows(Purpose::Free)?;
                self.zero_some(inode, (from, end), grow, timed)
            })?;
            if reached >= end {
                return Ok(());
            }
            from = reached;
        }
    }

    /// One step of zeroing; returns the end of the zeroed part.
    fn zero_some(&self, inode: &Arc<Inode>, range: (u64, u64), grow: bool, timed: bool) -> Result<u64> {
        let (offset, end) = range;
        let (entered, mut edited) = self.enter_growing(inode, ROWS, |row| if grow { end } else { row.size })?;
        check_regular(&edited.row)?;
        let txg = entered.txg();
        edited.row.record_shift = self.shift_of(&edited.row);
        // Active as it is: an error leaves it so.
        edited.activate();
        let before = edited.row;
        let mut batch = Batch::default();
        let reached = match self.zero_edited(txg, &mut edited, (offset, end), &mut batch) {
            Ok(reached) => reached,
            Err(error) => {
                self.take_back(txg, &before, &mut edited);
                self.finish(inode, edited);
                return Err(error);
            }
        };
        self.stamp_written(&mut edited.row, timed);
        if grow && reached >= end {
            edited.row.size = edited.row.size.max(end);
        }
        let row = edited.row;
        let active = edited.activate();
        (active.row, active.changed) = (row, true);
        let zeroed = LogChange::Zero { inode: inode.number(), offset, length: reached - offset };
        self.apply_and_finish(txg, inode, edited, (&batch, zeroed))?;
        Ok(reached)
    }

    fn zero_edited(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        (offset, end): (u64, u64),
        batch: &mut Batch,
    ) -> Result<u64> {
        let (size, shift) = (edited.row.size, edited.row.record_shift);
        let stop = end.min(size);
        if offset >= stop {
            return Ok(end);
        }
        let (first, last) = (offset >> shift, (stop - 1) >> shift);
        // Only existing records are processed: the cost depends on the content of a range, not on
        // its length.
        let mut present = self.stored_numbers(edited.number, first, last, STEP)?;
        let (last, reached) = match present.last() {
            Some(last) if present.len() == STEP => (*last, ((last + 1) << shift).min(end)),
            _ => (last, end),
        };
        let stop = stop.min(reached);
        present.extend(edited.activate().records.range(first..=last).map(|(record, _)| *record));
        present.sort_unstable();
        present.dedup();
        let mut covered = Vec::new();
        // First the parts that are most likely to be refused.
        for record in present {
            let start = record << shift;
            let (from, to) = (offset.max(start), stop.min(start + (1 << shift)));
            if from >= to {
                continue;
            }
            if from == start && (to == start + (1 << shift) || to >= size) {
                covered.push(record);
                continue;
            }
            let fresh = !edited.activate().records.contains_key(&record);
            self.promised_record(txg, edited, record, 0, Admit::Freeing)?;
            edited.pending.push(Pending::Zeroed {
                record,
                part: (from - start) as usize..(to - start) as usize,
                fresh,
            });
        }
        for record in covered {
            self.replace(edited, record, None, batch)?;
            edited.activate().frames_in = txg;
            edited.pending.push(Pending::Gone(record));
        }
        Ok(reached)
    }

    /// Checks that the rows of a range of a file can be read.
    pub(in crate::files) fn look_at_records(
        &self,
        row: &InodeRow,
        number: u64,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let shift = self.shift_of(row);
        let (first, last) = (offset >> shift, offset.saturating_add(length.saturating_sub(1)) >> shift);
        // The leaves of the first and the last record are read even if there is no such record.
        for record in [first, last] {
            self.warm(&keys::extent(number, record))?;
            self.table.read().get(&keys::extent(number, record))?;
        }
        self.stored_numbers(number, first, last, usize::MAX)?;
        self.stored_patches(row, number, first, last).map(drop)
    }

    /// Returns the beginning of the next data or hole, at or after an offset.
    ///
    /// # Errors
    /// [`FileError::NoData`] after the end, or if only holes follow.
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
        let waiting = |from: u64| {
            active.as_ref().and_then(|active| active.records.range(from..).next()).map(|(record, _)| *record)
        };
        if to == SeekTo::Data {
            let stored = self.stored_numbers(inode.number(), first, last, 1)?;
            let next = stored.into_iter().chain(waiting(first).filter(|record| *record <= last)).min();
            return next.map(|record| offset.max(record << shift)).ok_or(FileError::NoData);
        }
        let mut at = first;
        // As far as there is no gap, and no further.
        while at <= last {
            let stored = self.stored_numbers(inode.number(), at, last, STEP)?;
            let begin = at;
            for record in stored.into_iter().chain([u64::MAX]) {
                while at < record && waiting(at) == Some(at) {
                    at += 1;
                }
                if record != at {
                    break;
                }
                at += 1;
            }
            if at < begin + STEP as u64 {
                break;
            }
        }
        Ok(if at == first { offset } else { (at << shift).min(row.size) })
    }
}
