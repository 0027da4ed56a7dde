//! Sharing (reflink, block cloning): a range of one file becomes a range of another without
//! copying. Both reference the same frames afterwards.
//!
//! The references of a frame are counted in the catalog with the commit; for everything that
//! depends on births, the frame is as old as the new row. Each file is charged as if it had the
//! content for itself.
//!
//! Invariant: a record is shared as a whole, with all its content.

use std::sync::Arc;

use super::inodes::{Editing, Pending};
use super::quota_check::{Admit, worst};
use super::{Batch, FileError, Files, Inode, Result, Table};
use crate::log::LogChange;
use crate::pointer::{Pointer, Txg};
use crate::rows::{Extent, FileType, keys};

/// Number of records shared in one step: a step holds the txg open and names locked.
const RECORDS_AT_ONCE: u64 = 1024;

/// A range of one file that is to become one of another. Offsets and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset in the source file.
    pub from: u64,
    /// Offset in the target file.
    pub to: u64,
    /// Length.
    pub length: u64,
}

/// Copy of a row of the source.
enum Source {
    Hole,
    Inline(Vec<u8>),
    Frame(Pointer),
}

impl<T: Table> Files<T> {
    /// Shares as much of a range as possible, from its beginning; returns the shared length. The
    /// caller copies the remainder: parts of records, content in memory, records with patches,
    /// files of different record sizes, a range of the same file. At the end of the source an
    /// incomplete record can be shared.
    ///
    /// # Errors
    /// As for a write.
    pub fn share(&self, from: &Arc<Inode>, to: &Arc<Inode>, range: Range) -> Result<u64> {
        self.share_timed(from, to, range, false)
    }

    /// As [`Self::share`]; with `timed` the times of the target do not change, as in
    /// [`Self::write_held`].
    ///
    /// # Errors
    /// As for a write.
    pub fn share_timed(&self, from: &Arc<Inode>, to: &Arc<Inode>, range: Range, timed: bool) -> Result<u64> {
        let mut done = 0;
        if from.number() == to.number() {
            return Ok(done);
        }
        loop {
            let rest = Range {
                from: range.from.saturating_add(done),
                to: range.to.saturating_add(done),
                length: range.length - done,
            };
            let step = self.with_relief(|| {
                self.check_writable()?;
                self.share_some(from, to, rest, timed)
            });
            match step {
                Ok(0) => return Ok(done),
                Ok(shared) => done += shared,
                // Records shared so far remain shared.
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    /// For a range that cannot be shared at its beginning: returns how much of it has to be copied
    /// before sharing may continue, up to the end of the record. `None` if nothing after it can be
    /// shared either: different record sizes, or unaligned offsets.
    ///
    /// # Errors
    /// Errors of reading rows.
    pub fn until_sharing(&self, from: &Arc<Inode>, to: &Arc<Inode>, range: Range) -> Result<Option<u64>> {
        let shift = self.attributes(from)?.record_shift;
        if shift == 0 || from.number() == to.number() || self.attributes(to)?.record_shift != shift {
            return Ok(None);
        }
        let size = 1u64 << shift;
        let aligned = (range.from ^ range.to) & (size - 1) == 0;
        Ok(aligned.then(|| size - (range.from & (size - 1))))
    }

    fn share_some(&self, from: &Arc<Inode>, to: &Arc<Inode>, range: Range, timed: bool) -> Result<u64> {
        self.uncut(to, range.to.saturating_add(range.length))?;
        let entered = self.enter()?;
        let txg = entered.txg();
        let waits = from.active.read().as_ref().is_some_and(|active| !active.records.is_empty());
        if waits && !self.throttle.is_in_memory() {
            self.flush_one(txg, from)?;
            // Content that cannot be stored cannot be shared.
            from.check_stored()?;
        }
        let _names = self.names.lock();
        let source = self.edit(from)?;
        let mut target = self.edit(to)?;
        if target.is_cut_before(range.to.saturating_add(range.length)) {
            // It was truncated meanwhile.
            return Ok(0);
        }
        let Some(records) = plan(&source, &mut target, range)? else { return Ok(0) };
        let shift = source.row.record_shift;
        let mut batch = Batch::default();
        let (mut shared, mut failed) = (0, None);
        for record in 0..records {
            let (at, into) = ((range.from >> shift) + record, (range.to >> shift) + record);
            match self.share_record(txg, (&source, at), (&mut target, into), &mut batch) {
                Ok(true) => shared = ((record + 1) << shift).min(range.length).min(source.row.size - range.from),
                Ok(false) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if shared == 0 {
            self.abandon(&batch);
            self.finish(to, target);
            return failed.map_or(Ok(0), Err);
        }
        target.row.size = target.row.size.max(range.to + shared);
        self.stamp_written(&mut target.row, timed);
        let row = target.row;
        let active = target.activate();
        (active.row, active.changed, active.frames_in) = (row, true, txg);
        let at = (range.from, range.to);
        let change = LogChange::Share { from: from.number(), to: to.number(), at, length: shared };
        self.apply_and_finish(txg, to, target, (&batch, change))?;
        // Held until now: later writes to it are recorded later.
        drop(source);
        Ok(shared)
    }

    /// Shares one record; `false` if that is impossible.
    fn share_record(
        &self,
        txg: Txg,
        (source, at): (&Editing<'_>, u64),
        (target, into): (&mut Editing<'_>, u64),
        batch: &mut Batch,
    ) -> Result<bool> {
        if source.active.as_ref().is_some_and(|active| active.records.contains_key(&at)) {
            return Ok(false);
        }
        // A patch lies over one frame: the record is copied, which merges them.
        if !self.stored_patches(&source.row, source.number, at, at)?.is_empty() {
            return Ok(false);
        }
        let new = match self.source_of(source.number, at)? {
            Source::Hole => None,
            Source::Inline(_) if into != 0 => return Ok(false),
            Source::Inline(content) => {
                self.admit_content(&target.row, worst(content.len()), Admit::Asked)?;
                self.admission.charge(self.dataset, txg, worst(content.len()), 0);
                self.replace(target, into, Some(Extent::Inline(&content)), batch)?;
                target.pending.push(Pending::Gone(into));
                return Ok(true);
            }
            Source::Frame(pointer) => Some(pointer),
        };
        if let Some(pointer) = new {
            self.admit_content(&target.row, pointer.charged(), Admit::Asked)?;
            self.admission.charge(self.dataset, txg, pointer.charged(), pointer.charged());
        }
        let row = new.map(|pointer| Extent::Shared { pointer, since: txg });
        // Counted before the row is put: if that fails, it is dropped like any other reference.
        if let Some(pointer) = new {
            self.count_written(&pointer);
            self.shared.lock().push(pointer);
        }
        self.replace(target, into, row, batch)?;
        target.pending.push(Pending::Gone(into));
        Ok(true)
    }

    fn source_of(&self, number: u64, record: u64) -> Result<Source> {
        let row = self.table.read().get(&keys::extent(number, record))?;
        Ok(match row.as_deref().map(Extent::decode).transpose()? {
            None => Source::Hole,
            Some(Extent::Inline(content)) => Source::Inline(content.to_vec()),
            Some(Extent::Frame(pointer) | Extent::Shared { pointer, .. }) => Source::Frame(pointer),
        })
    }

    /// Takes the frames that rows of the open txg share for the first time; the commit counts them.
    pub fn take_shared(&self) -> Vec<Pointer> {
        std::mem::take(&mut *self.shared.lock())
    }
}

/// Number of records of a range that can be shared; a target without a record size gets that of the
/// source.
fn plan(source: &Editing<'_>, target: &mut Editing<'_>, range: Range) -> Result<Option<u64>> {
    for edited in [source, &*target] {
        match edited.file_type() {
            FileType::Regular => {}
            FileType::Directory => return Err(FileError::IsDirectory),
            _ => return Err(FileError::Invalid),
        }
    }
    let shift = source.row.record_shift;
    let is_empty = target.row.size == 0 && target.active.as_ref().is_none_or(|active| active.records.is_empty());
    if shift != 0 && is_empty {
        target.row.record_shift = shift;
    }
    let size = 1u64 << shift;
    let aligned = (range.from | range.to) & (size - 1) == 0;
    if shift == 0 || target.row.record_shift != shift || !aligned || range.from >= source.row.size {
        return Ok(None);
    }
    let length = range.length.min(source.row.size - range.from);
    let end = range.to.checked_add(length).filter(|end| *end <= i64::MAX as u64).ok_or(FileError::TooLarge)?;
    // The incomplete last record of the source as a whole, if the target ends there.
    let to_end = range.from + length == source.row.size && end >= target.row.size;
    let records = if to_end { length.div_ceil(size) } else { length / size };
    Ok(Some(records.min(RECORDS_AT_ONCE)).filter(|records| *records > 0))
}
