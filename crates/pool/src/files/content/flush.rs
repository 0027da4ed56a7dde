//! The flush: changes in memory go into the table, before a txg is frozen.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Form, form_of};
use crate::error::PoolError;
use crate::files::buffered::Buffered;
use crate::files::inodes::{Apart, Editing};
use crate::files::{Batch, FileError, Files, Inode, Result, Table};
use crate::frames::NewFrame;
use crate::pointer::{Pointer, Txg};
use crate::rows::Extent;

impl<T: Table> Files<T> {
    /// Flushes all changes in memory into the table, while no operation is running, right before a
    /// txg is frozen. Changes that need damaged rows, or find no room, stay in memory,
    /// [apart](Self::set_apart).
    ///
    /// # Errors
    /// Errors of the engine; what could not be flushed stays in memory.
    pub fn flush(&self, txg: Txg) -> Result<()> {
        let mut apart = HashSet::new();
        loop {
            let Some(inode) = ({
                let dirty = self.dirty.lock();
                dirty.iter().find(|(number, _)| !apart.contains(*number)).map(|(_, inode)| Arc::clone(inode))
            }) else {
                break;
            };
            if self.flush_one(txg, &inode)? == Flushed::Apart {
                apart.insert(inode.number());
            }
        }
        let mut batch = Batch::default();
        self.put_counters(&self.table.read(), &mut batch)?;
        self.apply(txg, &batch)
    }

    /// Flushes most changes while operations continue, so that little is left for the moment when
    /// they have to wait.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub fn flush_most(&self) -> Result<()> {
        // New writes may need another round, and that one another: each is shorter than the one
        // before, or it is the last.
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

    pub(in crate::files) fn flush_one(&self, txg: Txg, inode: &Arc<Inode>) -> Result<Flushed> {
        let mut edited = match self.edit_active(inode) {
            Some(edited) => edited,
            None => {
                self.forget_dirty(inode);
                return Ok(Flushed::Whole);
            }
        };
        // Content that goes into the table here was in no record of the log: an fsync that finds it
        // there must wait for the commit.
        self.recorder.get().iter().for_each(|recorder| recorder.cannot_record(txg));
        let holds = edited.active.as_ref().is_some_and(|active| !active.records.is_empty());
        // Before content is taken out of memory, its inode row must be readable.
        if holds
            && let Err(error) = self.stored(inode.number())
            && error.is_rotten()
        {
            return Ok(self.set_apart(txg, inode, edited, error));
        }
        let mut batch = Batch::default();
        let (mut from, mut unstored) = (0, None);
        loop {
            let some = take_some(&mut edited, &mut from);
            if some.is_empty() {
                break;
            }
            match self.flush_records(txg, &mut edited, some, &mut batch) {
                Ok(()) => {}
                Err(error) if error.is_rotten() => unstored = Some(error),
                Err(error) if is_of_one_file(&error) => {
                    // Later records would find no room either.
                    unstored = Some(error);
                    break;
                }
                Err(error) => {
                    // Records stored before count; the failed ones are in memory again.
                    edited.put(&mut batch);
                    self.apply_flushed(txg, &batch)?;
                    return Err(error);
                }
            }
        }
        let row = edited.row;
        if let Some(active) = edited.active.as_mut() {
            active.row = row;
            // The file ends where its content does, or it would end in holes that no program made.
            let first = active.records.keys().next().map_or(u64::MAX, |record| record << row.record_shift);
            active.stored_size = row.size.min(first.max(active.stored_size));
            active.changed = false;
        }
        edited.put(&mut batch);
        match self.apply(txg, &batch) {
            Ok(()) => {}
            Err(error) if !holds && error.is_rotten() => return Ok(self.set_apart(txg, inode, edited, error)),
            Err(error) => return Err(self.lose(error)),
        }
        if let Some(error) = unstored {
            return Ok(self.set_apart(txg, inode, edited, error));
        }
        inode.apart.lock().take_if(|apart| !apart.lost);
        self.note_stored(inode.number());
        self.forget_dirty(inode);
        self.finish(inode, edited);
        Ok(Flushed::Whole)
    }

    fn forget_dirty(&self, inode: &Inode) {
        if self.dirty.lock().remove(&inode.number()).is_some() {
            self.buffered.shrink(crate::files::inodes::ACTIVE);
        }
    }

    /// Keeps changes of a file in memory that need damaged rows, or find no room, so that commits
    /// of other files succeed. Later commits try again; after some of them the changes are given
    /// up. A sync of the file fails from now on.
    fn set_apart(&self, txg: Txg, inode: &Arc<Inode>, mut edited: Editing<'_>, error: FileError) -> Flushed {
        let row = edited.row;
        let given_up = {
            let mut apart = inode.apart.lock();
            if apart.as_ref().is_none_or(|apart| apart.lost) {
                tracing::error!(dataset = self.dataset, inode = inode.number(), %error, "what was written to a file cannot be stored now");
                *apart = Some(Apart { since: txg, error: error.clone(), lost: false });
            }
            apart.as_mut().is_some_and(|apart| {
                let most = if error.is_rotten() { APART_MOST } else { WITHOUT_ROOM_MOST };
                apart.lost = txg.0 >= apart.since.0.saturating_add(most);
                apart.lost
            })
        };
        if given_up {
            self.note_lost(txg, inode.number(), &error);
        } else {
            self.note_unstored(inode.number(), &error);
        }
        if let Some(active) = edited.active.as_mut() {
            active.changed = true;
            if given_up {
                tracing::error!(dataset = self.dataset, inode = inode.number(), %error, "what was written to a file is lost");
                let records = std::mem::take(&mut active.records);
                (active.stored_size, active.changed) = (row.size, false);
                records.values().for_each(|buffered| self.release(txg, &row, buffered));
                self.forget_dirty(inode);
                self.finish(inode, edited);
                return Flushed::Whole;
            }
        }
        Flushed::Apart
    }

    /// Fails the pool: accepted changes were lost from memory, and no operation may continue as if
    /// they were stored. Changes in the intent log are replayed.
    fn lose(&self, error: FileError) -> FileError {
        if let FileError::Pool(error) = &error {
            self.buffered.fail(error);
        }
        error
    }

    /// Applies changes that are not in memory any more.
    fn apply_flushed(&self, txg: Txg, batch: &Batch) -> Result<()> {
        self.apply(txg, batch).map_err(|error| self.lose(error))
    }

    /// Stores records from memory; those that cannot be stored return to memory.
    fn flush_records(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        some: Vec<(u64, Buffered)>,
        batch: &mut Batch,
    ) -> Result<()> {
        let (some, patched) = self.flush_patches(txg, edited, some, batch);
        let storing = *self.storing.read();
        let (number, shift) = (edited.number, self.shift_of(&edited.row));
        let forms: Vec<Form> =
            some.iter().map(|(record, buffered)| form_of(&storing, *record, &buffered.content)).collect();
        let framed = some.iter().zip(&forms).filter(|(_, form)| **form == Form::Frame);
        let frames: Vec<NewFrame<'_>> = framed
            .map(|((record, buffered), _)| self.new_frame(&storing, txg, (number, record << shift), &buffered.content))
            .collect();
        let mut written = Vec::with_capacity(frames.len());
        let mut outcome = graver(patched, self.frames.write_all(&frames, &mut written).map_err(FileError::from));
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
                Ok(new) => self.replace(edited, record, new, batch).map_err(|error| {
                    outcome = graver(std::mem::replace(&mut outcome, Ok(())), Err(error));
                }),
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

/// Result of the flush of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::files) enum Flushed {
    /// The table has all changes.
    Whole,
    /// Some changes cannot be stored, and wait in memory.
    Apart,
}

/// Whether an error concerns one file only: rows that it needs are damaged, or there is no room for
/// its content. All other files keep working.
fn is_of_one_file(error: &FileError) -> bool {
    error.is_rotten() || matches!(error, FileError::Pool(PoolError::NoSpace))
}

/// The more serious of two results: damage and lack of room concern one file, all other errors the
/// pool.
pub(in crate::files) fn graver(one: Result<()>, other: Result<()>) -> Result<()> {
    match one {
        Ok(()) => other,
        Err(error) if is_of_one_file(&error) => other.and(Err(error)),
        Err(error) => Err(error),
    }
}

/// Number of txgs that try to store changes that need damaged rows.
const APART_MOST: u64 = 3;
/// Number of txgs that try to store changes that find no room: files may be removed meanwhile. Not
/// for ever: memory that is full of them would block all operations.
const WITHOUT_ROOM_MOST: u64 = 60;
/// Number of rounds of a flush while operations continue.
const FLUSH_ROUNDS: usize = 4;
/// Bytes that need not be flushed while operations continue.
const FLUSH_LITTLE: u64 = 4 << 20;
/// Bytes of a file that are stored together: enough for several threads to compress.
const FLUSHED_TOGETHER: usize = 4 << 20;

/// Takes the next records out of memory, to be stored together; records that return to memory are
/// not taken again.
fn take_some(edited: &mut Editing<'_>, from: &mut u64) -> Vec<(u64, Buffered)> {
    let Some(active) = edited.active.as_mut() else { return Vec::new() };
    let (mut some, mut bytes) = (Vec::new(), 0);
    while bytes < FLUSHED_TOGETHER
        && let Some((&record, _)) = active.records.range(*from..).next()
        && let Some(buffered) = active.records.remove(&record)
    {
        *from = record.saturating_add(1);
        // Parts may have to be extended to the whole record.
        bytes += buffered.content.len().max(buffered.base);
        some.push((record, buffered));
    }
    some
}
