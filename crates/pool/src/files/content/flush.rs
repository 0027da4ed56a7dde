//! The flush: what memory holds comes into the table, before a txg is frozen.

use std::sync::Arc;

use super::{Form, form_of};
use crate::files::inodes::{Buffered, Editing};
use crate::files::{Batch, FileError, Files, Inode, Result, Table};
use crate::frames::NewFrame;
use crate::pointer::{Pointer, Txg};
use crate::rows::Extent;

impl<T: Table> Files<T> {
    /// Puts everything that memory holds into the table: when nobody is inside, right before a txg is frozen.
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

    /// Puts most of what memory holds into the table while operations go on, so that little is left for the moment when they must wait.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub fn flush_most(&self) -> Result<()> {
        // What is written meanwhile may need another round, and that one another: each is shorter than the one before, or it is the last.
        let mut before = usize::MAX;
        for _ in 0..FLUSH_ROUNDS {
            let dirty: Vec<Arc<Inode>> = self.dirty.lock().values().cloned().collect();
            if dirty.len() >= before || (before != usize::MAX && self.buffered() < FLUSH_LITTLE && dirty.len() < 1000) {
                break;
            }
            before = dirty.len();
            for inode in dirty {
                let entered = self.gate.enter();
                self.flush_one(entered.txg(), &inode)?;
            }
        }
        Ok(())
    }

    pub(in crate::files) fn flush_one(&self, txg: Txg, inode: &Arc<Inode>) -> Result<()> {
        let mut edited = self.edit(inode)?;
        // What goes into the table here was in no record: an fsync that finds it there must wait for the commit.
        self.recorder.get().iter().for_each(|recorder| recorder.cannot_record(txg));
        let mut batch = Batch::default();
        loop {
            let some = take_some(&mut edited);
            if some.is_empty() {
                break;
            }
            if let Err(error) = self.flush_records(txg, &mut edited, some, &mut batch) {
                // What was stored before counts; the records that failed are in memory again.
                edited.put(&mut batch);
                self.apply_flushed(txg, &batch)?;
                return Err(error);
            }
        }
        let row = edited.row;
        if let Some(active) = edited.active.as_mut() {
            (active.row, active.stored_size, active.changed) = (row, row.size, false);
        }
        edited.put(&mut batch);
        self.apply_flushed(txg, &batch)?;
        if self.dirty.lock().remove(&inode.number()).is_some() {
            self.buffered.shrink(crate::files::inodes::ACTIVE);
        }
        self.finish(inode, edited);
        Ok(())
    }

    /// Applies what was in memory and is there no more.
    fn apply_flushed(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply(txg, batch).inspect_err(|error| {
            // What was accepted is lost to memory: nobody may go on as if it had been stored. What is in the intent log is done again.
            if let FileError::Pool(error) = error {
                self.buffered.fail(error);
            }
        })
    }

    /// Stores records that were in memory; those that cannot be stored go back there.
    fn flush_records(&self, txg: Txg, edited: &mut Editing<'_>, some: Vec<(u64, Buffered)>, batch: &mut Batch) -> Result<()> {
        let (some, patched) = self.flush_patches(txg, edited, some, batch);
        let storing = *self.storing.read();
        let (number, shift) = (edited.number, self.shift_of(&edited.row));
        let forms: Vec<Form> = some.iter().map(|(record, buffered)| form_of(&storing, *record, &buffered.content)).collect();
        let framed = some.iter().zip(&forms).filter(|(_, form)| **form == Form::Frame);
        let frames: Vec<NewFrame<'_>> =
            framed.map(|((record, buffered), _)| self.new_frame(&storing, txg, (number, record << shift), &buffered.content)).collect();
        let mut written = Vec::with_capacity(frames.len());
        let mut outcome = patched.and(self.frames.write_all(&frames, &mut written).map_err(FileError::from));
        written.iter().for_each(|pointer| self.count_written(pointer));
        if !written.is_empty() {
            edited.activate().frames_in = txg;
        }
        let mut written = written.into_iter();
        for ((record, buffered), form) in some.into_iter().zip(forms) {
            let new = match form {
                Form::Hole => Ok(None),
                Form::Inline => Ok(Some(Extent::Inline(&buffered.content))),
                Form::Frame => written.next().map(|pointer| Some(Extent::Frame(pointer))).ok_or(()),
            };
            let charged = new.as_ref().ok().and_then(|new| new.as_ref()?.pointer().map(Pointer::charged)).unwrap_or(0);
            let stored = match new {
                Ok(new) => self.replace(edited, record, new, batch).map_err(|error| outcome = Err(error)),
                Err(()) => Err(()),
            };
            match stored {
                Ok(()) => {
                    self.became(txg, &edited.row, &buffered, charged);
                }
                Err(()) => {
                    edited.activate().records.insert(record, buffered);
                }
            }
        }
        outcome
    }
}

/// How many rounds a flush makes beside operations.
const FLUSH_ROUNDS: usize = 4;
/// So little need not be flushed beside operations, bytes.
const FLUSH_LITTLE: u64 = 4 << 20;
/// How much of a file is stored together, bytes: enough for several threads to pack.
const FLUSHED_TOGETHER: usize = 4 << 20;

/// The first records in memory, to be stored together.
fn take_some(edited: &mut Editing<'_>) -> Vec<(u64, Buffered)> {
    let Some(active) = edited.active.as_mut() else { return Vec::new() };
    let (mut some, mut bytes) = (Vec::new(), 0);
    while bytes < FLUSHED_TOGETHER
        && let Some((record, buffered)) = active.records.pop_first()
    {
        // Parts may have to become the whole record.
        bytes += buffered.content.len().max(buffered.base);
        some.push((record, buffered));
    }
    some
}
