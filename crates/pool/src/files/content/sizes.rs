//! Sizes and holes: what is cut off, zeroed, and found again.

use std::sync::Arc;

use super::{SIZE_MOST, SeekTo, Stored, check_regular};
use crate::files::admission::Admit;
use crate::files::inodes::Editing;
use crate::files::{Batch, FileError, Files, Inode, Result, Table};
use crate::pointer::Txg;
use crate::space::Purpose;

impl<T: Table> Files<T> {
    /// Changes the size. What is cut off reads as zeros when the file grows again.
    pub(in crate::files) fn resize(&self, txg: Txg, edited: &mut Editing<'_>, size: u64, batch: &mut Batch) -> Result<()> {
        if size > SIZE_MOST {
            return Err(FileError::TooLarge);
        }
        let old = edited.row.size;
        // In memory with the size that it has: what is refused leaves it so.
        edited.activate();
        edited.row.size = size;
        if size < old
            && let Err(refused) = self.drop_records(txg, edited, size, batch)
        {
            edited.row.size = old;
            return Err(refused);
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
    fn drop_records(&self, txg: Txg, edited: &mut Editing<'_>, size: u64, batch: &mut Batch) -> Result<()> {
        let shift = self.shift_of(&edited.row);
        let whole = size.div_ceil(1 << shift);
        let keep = (size & ((1 << shift) - 1)) as usize;
        if keep != 0 {
            let last = size >> shift;
            let shorter = match edited.activate().records.get(&last) {
                // Of a record that is not all in memory the parts behind the cut must go as well.
                Some(record) => record.is_sparse() || record.content.len() > keep,
                None => self.stored_records(edited.number, last, last)?.iter().any(|(_, stored)| match stored {
                    Stored::Inline(content) => content.len() > keep,
                    Stored::Frame(pointer) => pointer.logical as usize > keep,
                }),
            };
            if shorter {
                edited.row.record_shift = shift;
                // Read as far as the file still goes: the rest is cut off by that.
                let buffer = self.promised_record(txg, edited, last, keep, Admit::Freeing)?;
                let cut = buffer.content.len().saturating_sub(keep);
                buffer.content.truncate(keep);
                // The record of the new size cuts there as well.
                let part = buffer.unrecorded.take();
                buffer.unrecorded = part.map(|part| part.start.min(keep)..part.end.min(keep)).filter(|part| !part.is_empty());
                self.buffered.shrink(cut as u64);
            }
        }
        // The last record first, which may be refused: nothing is cut then.
        for buffered in edited.activate().records.split_off(&whole).into_values() {
            self.let_go(txg, &edited.row, &buffered);
        }
        for (record, _) in self.stored_records(edited.number, whole, u64::MAX - 1)? {
            self.replace(edited, record, None, batch)?;
        }
        Ok(())
    }

    /// Makes a range read as zeros; whole records become holes. With `grow` the file ends no earlier than the range.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn zero(&self, inode: &Arc<Inode>, offset: u64, length: u64, grow: bool) -> Result<()> {
        self.with_relief(|| {
            self.admit_rows(Purpose::Free)?;
            self.zero_admitted(inode, offset, length, grow)
        })
    }

    fn zero_admitted(&self, inode: &Arc<Inode>, offset: u64, length: u64, grow: bool) -> Result<()> {
        let entered = self.enter()?;
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
                    self.let_go(entered.txg(), &edited.row, &buffered);
                }
                self.replace(&mut edited, record, None, &mut batch)?;
                edited.activate().frames_in = entered.txg();
            } else {
                let buffer = self.promised_record(entered.txg(), &mut edited, record, 0, Admit::Freeing)?;
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
}
