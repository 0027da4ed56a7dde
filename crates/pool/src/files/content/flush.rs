//! The flush: changes in memory go into the table, before a txg is frozen.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Form, form_of};
use crate::error::PoolError;
use crate::files::buffered::Buffered;
use crate::files::flush_pace::LITTLE;
use crate::files::inodes::{ACTIVE, Apart, Editing};
use crate::files::throttle::{SlowedWriters, Throttle};
use crate::files::{Batch, FileError, Files, Inode, Result, Table};
use crate::frames::NewFrame;
use crate::patience;
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
        flush_most(&self.throttle, [self]).map(drop)
    }

    /// Flushes an inode into the table, with all of its content in memory.
    pub(in crate::files) fn flush_one(&self, txg: Txg, inode: &Arc<Inode>) -> Result<Flushed> {
        self.flush_part(txg, inode, &mut Progress::at_once())
    }

    /// Flushes an inode into the table, with all or a part of its content in memory.
    pub(in crate::files) fn flush_part(
        &self,
        txg: Txg,
        inode: &Arc<Inode>,
        progress: &mut Progress,
    ) -> Result<Flushed> {
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
            return Ok(self.set_apart(txg, inode, edited, Unstored { error, in_parts: progress.in_parts }));
        }
        let mut batch = Batch::default();
        loop {
            let some = take_some(&mut edited, progress);
            if some.is_empty() {
                break;
            }
            match self.flush_records(txg, &mut edited, some, &mut batch) {
                Ok(()) => {}
                Err(error) if error.is_rotten() => progress.unstored = Some(error),
                Err(error) if is_of_one_file(&error) => {
                    // Later records would find no room either.
                    progress.unstored = Some(error);
                    progress.left = Some(0);
                    break;
                }
                Err(error) => {
                    // Records stored before count; the failed ones are in memory again.
                    edited.put(&mut batch);
                    self.apply_flushed(txg, &batch)?;
                    return Err(error);
                }
            }
            if progress.in_parts {
                break;
            }
        }
        let row = edited.row;
        if edited.active.as_ref().is_none_or(|active| active.records.range(progress.next..).next().is_none()) {
            progress.left = Some(0);
        }
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
            Err(error) if !holds && error.is_rotten() => {
                return Ok(self.set_apart(txg, inode, edited, Unstored { error, in_parts: progress.in_parts }));
            }
            Err(error) => return Err(self.lose(error)),
        }
        if !progress.is_done() {
            return Ok(Flushed::Part);
        }
        if let Some(error) = progress.unstored.take() {
            return Ok(self.set_apart(txg, inode, edited, Unstored { error, in_parts: progress.in_parts }));
        }
        if edited.active.as_ref().is_some_and(|active| !active.records.is_empty()) {
            // Written between the parts.
            return Ok(Flushed::Part);
        }
        inode.apart.lock().take_if(|apart| !apart.lost);
        self.note_stored(inode.number());
        self.forget_dirty(inode);
        self.finish(inode, edited);
        Ok(Flushed::Whole)
    }

    fn forget_dirty(&self, inode: &Inode) {
        if self.dirty.lock().remove(&inode.number()).is_some() {
            self.buffered.shrink(ACTIVE);
            self.throttle.stored_content(ACTIVE);
        }
    }

    /// Keeps changes of a file in memory that need damaged rows, or find no room, so that commits
    /// of other files succeed. Later commits try again; after some of them the changes are given
    /// up. A sync of the file fails from now on.
    fn set_apart(
        &self,
        txg: Txg,
        inode: &Arc<Inode>,
        mut edited: Editing<'_>,
        Unstored { error, in_parts }: Unstored,
    ) -> Flushed {
        let row = edited.row;
        let given_up = {
            let mut apart = inode.apart.lock();
            if apart.as_ref().is_none_or(|apart| apart.lost) {
                tracing::error!(dataset = self.dataset, inode = inode.number(), %error, "what was written to a file cannot be stored now");
                *apart = Some(Apart { since: txg, began: patience::now(), error: error.clone(), lost: false });
            }
            apart.as_mut().is_some_and(|apart| {
                let can_wait = in_parts || self.throttle.is_at_ease();
                let time = can_wait.then(|| apart.began.elapsed());
                apart.lost = is_given_up(txg.0.saturating_sub(apart.since.0), time, error.is_rotten());
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

/// Flushes most changes of several datasets while operations continue, so that little is left for the moment when they
/// have to wait. Writers are slowed until the returned value is dropped, which is when the txg is closed.
///
/// # Errors
/// As [`Files::flush`].
pub(crate) fn flush_most<'a, 'b, T: Table + 'b>(
    throttle: &'a Throttle,
    datasets: impl IntoIterator<Item = &'b Files<T>>,
) -> Result<SlowedWriters<'a>> {
    let slowed = throttle.slow_writers();
    let mut flushing: Vec<Flushing<'b, T>> = datasets.into_iter().map(Flushing::new).collect();
    let mut before = u64::MAX;
    let mut lacks_room = false;
    for _ in 0..ROUNDS {
        let mut left = Left::default();
        for one in &mut flushing {
            left.add(one.round(&mut lacks_room)?);
        }
        let is_little = left.bytes < LITTLE && left.inodes < FEW;
        if is_little || left.bytes >= before {
            break;
        }
        before = left.bytes;
    }
    // What is left is stored while all operations wait.
    if let Some(one) = flushing.first_mut() {
        one.make_room(throttle.needed_room().min(LEFT_ROOM), &mut lacks_room)?;
    }
    Ok(slowed)
}

/// Flush of a dataset while operations continue.
struct Flushing<'a, T: Table> {
    files: &'a Files<T>,
    /// Inodes with content that cannot be stored now.
    apart: HashSet<u64>,
}

/// Changes that were made during a round of a flush.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    /// Bytes of content, without content that cannot be stored.
    bytes: u64,
    /// Number of inodes.
    inodes: usize,
}

impl Left {
    fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.inodes += other.inodes;
    }
}

impl<'a, T: Table> Flushing<'a, T> {
    fn new(files: &'a Files<T>) -> Self {
        Self { files, apart: HashSet::new() }
    }

    /// Flushes the content that is in memory now; returns what was written meanwhile. `lacks_room` as for [`Self::make_room`].
    fn round(&mut self, lacks_room: &mut bool) -> Result<Left> {
        let files = self.files;
        let dirty: Vec<Arc<Inode>> = files.dirty.lock().values().cloned().collect();
        let mut apart_bytes = 0;
        for inode in &dirty {
            if !self.apart.contains(&inode.number()) && self.flush_in_parts(inode, lacks_room)? == Flushed::Apart {
                self.apart.insert(inode.number());
            }
            if self.apart.contains(&inode.number()) {
                apart_bytes += inode.buffered();
            }
        }
        let inodes = files.dirty.lock().len().saturating_sub(self.apart.len());
        Ok(Left { bytes: files.buffered().saturating_sub(apart_bytes), inodes })
    }

    /// Makes room before locks are held: cleaning may take long. Where it has failed once in a flush, which `lacks_room`
    /// notes for all datasets, it is not tried again.
    fn make_room(&self, bytes: u64, lacks_room: &mut bool) -> Result<()> {
        if !*lacks_room {
            *lacks_room = !self.files.frames.make_room(bytes)?;
        }
        Ok(())
    }

    /// Flushes an inode in parts, between which programs may write to the file. It ends after as many records as are
    /// in memory at its beginning, also where a program keeps writing ahead of it.
    fn flush_in_parts(&self, inode: &Arc<Inode>, lacks_room: &mut bool) -> Result<Flushed> {
        let files = self.files;
        let mut progress = Progress::in_parts();
        loop {
            self.make_room(PART_ROOM.min(files.needed.bytes()), lacks_room)?;
            let entered = files.gate.enter();
            let flushed = files.flush_part(entered.txg(), inode, &mut progress)?;
            drop(entered);
            files.throttle.flushed_part();
            if flushed != Flushed::Part || progress.is_done() {
                return Ok(flushed);
            }
        }
    }
}

/// A failure to store content of a file.
struct Unstored {
    error: FileError,
    /// Operations continue, so memory may be full of other content, which the commit is about to store.
    in_parts: bool,
}

/// Progress of the flush of an inode.
pub(in crate::files) struct Progress {
    /// The next record to store.
    next: u64,
    /// Number of records that may still be stored; `None` before the first one, then as many as are in memory.
    left: Option<usize>,
    /// Only [a part](FLUSHED_TOGETHER) of the records is stored before the inode's lock is released.
    in_parts: bool,
    /// Why some of the records could not be stored.
    unstored: Option<FileError>,
}

impl Progress {
    fn at_once() -> Self {
        Self { next: 0, left: None, in_parts: false, unstored: None }
    }

    pub(in crate::files) fn in_parts() -> Self {
        Self { in_parts: true, ..Self::at_once() }
    }

    /// Whether no further part is to be stored.
    pub(in crate::files) fn is_done(&self) -> bool {
        self.left == Some(0)
    }
}

/// Result of the flush of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::files) enum Flushed {
    /// The table has all changes.
    Whole,
    /// Further records are in memory: the flush is made in parts, or programs have written them between two parts.
    Part,
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
/// The shortest time for which the same is tried, unless memory is full: where room is short, txgs follow each other
/// fast.
const WITHOUT_ROOM_LEAST: Duration = Duration::from_secs(300);
/// Number of rounds of a flush while operations continue.
const ROUNDS: usize = 8;
/// Number of changed inodes that need not be flushed while operations continue.
const FEW: usize = 1000;
/// Bytes of a file that are stored together: enough for several threads to compress. Fewer in tests, whose files are
/// small.
const FLUSHED_TOGETHER: usize = if cfg!(test) { 64 << 10 } else { 4 << 20 };

/// Room that a part takes at most, with the rows and blocks of its records, bytes.
const PART_ROOM: u64 = 5 << 20;
/// Room that is made for the content that is left when the txg is closed, bytes.
const LEFT_ROOM: u64 = 16 << 20;

/// A record of which parts are in memory counts as so many that are not read: all operations on its file wait
/// meanwhile.
const READ_COST: usize = 4;

/// Whether changes are given up that could not be stored in so many txgs after the first, and for this time where they
/// can wait.
fn is_given_up(txgs: u64, time: Option<Duration>, is_rotten: bool) -> bool {
    if is_rotten {
        return txgs >= APART_MOST;
    }
    txgs >= WITHOUT_ROOM_MOST && time.is_none_or(|time| time >= WITHOUT_ROOM_LEAST)
}

/// Takes the next records out of memory, to be stored together; records that return to memory are
/// not taken again.
fn take_some(edited: &mut Editing<'_>, progress: &mut Progress) -> Vec<(u64, Buffered)> {
    let Some(active) = edited.active.as_mut() else { return Vec::new() };
    let mut left = progress.left.unwrap_or(active.records.len());
    let (mut some, mut bytes) = (Vec::new(), 0);
    while bytes < FLUSHED_TOGETHER
        && left > 0
        && let Some((&record, _)) = active.records.range(progress.next..).next()
        && let Some(buffered) = active.records.remove(&record)
    {
        progress.next = record.saturating_add(1);
        left -= 1;
        // Parts may have to be extended to the whole record, which is read for that.
        bytes += if buffered.is_sparse() { buffered.base * READ_COST } else { buffered.content.len() };
        some.push((record, buffered));
    }
    progress.left = Some(left);
    some
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_without_room_waits_for_minutes_however_fast_commits_are() {
        let (soon, late) = (Some(Duration::from_secs(10)), Some(WITHOUT_ROOM_LEAST));
        assert!(!is_given_up(1000, soon, false) && is_given_up(1000, late, false));
        assert!(!is_given_up(WITHOUT_ROOM_MOST - 1, late, false));
        assert!(is_given_up(WITHOUT_ROOM_MOST, None, false), "memory is full, or commits are made by hand");
        assert!(is_given_up(APART_MOST, soon, true) && !is_given_up(APART_MOST - 1, None, true));
    }
}
