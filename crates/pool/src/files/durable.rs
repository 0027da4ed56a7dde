//! Making a file durable for an fsync, and the replay of recorded operations.
//!
//! Content in memory is recorded when a program calls fsync, never before; content that was already
//! written as frames becomes durable with the next commit only. The replay runs before the dataset
//! is used; it ends with a commit.
//!
//! Invariant: applying a record twice is applying it once.

use std::sync::Arc;

use super::inodes::Editing;
use super::{
    AttributeChange, Batch, ChangedTime, FileError, Files, FlagChange, Inode, Range, Recorder, Result, Table,
    TimeChange,
};
use crate::error::PoolError;
use crate::log::{LogChange, LogRecord, Ticket};
use crate::pointer::Txg;
use crate::rows::inode::flags::{CUT, HAS_PATCHES};
use crate::rows::xattr::INLINE_MOST;
use crate::rows::{DatasetHead, Entry, Extent, FileType, InodeRow, Xattr, keys};

/// Bytes that a replay copies at once where it cannot share.
const COPIED_AT_ONCE: usize = 1 << 20;

/// How a file becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// By flushing the log up to this record.
    Logged(Ticket),
    /// By committing the open txg.
    Committed,
    /// The file itself is durable already; its names may still wait in the log.
    Recorded,
}

impl<T: Table> Files<T> {
    /// Records the content and attributes of a file, if records can hold them.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn record_content(&self, inode: &Arc<Inode>) -> Result<Durability> {
        let Some(recorder) = self.recorder.get() else { return Ok(Durability::Committed) };
        self.throttle.check()?;
        let entered = self.enter_now();
        let mut edited = self.edit(inode)?;
        Ok(self.record_edited(&**recorder, entered.txg(), &mut edited))
    }

    /// Records a file that is about to replace another one in a rename: programs rely on finding
    /// either the old or the new file complete after a crash. Without this the log would restore
    /// the name, and not the content written before.
    pub(super) fn record_before_replacing(&self, txg: Txg, moving: &mut Editing<'_>) {
        if let Some(recorder) = self.recorder.get()
            && self.record_edited(&**recorder, txg, moving) == Durability::Committed
        {
            recorder.cannot_record(txg);
        }
    }

    fn record_edited(&self, recorder: &dyn Recorder, txg: Txg, edited: &mut Editing<'_>) -> Durability {
        let (inode, row) = (edited.number, edited.row);
        let shift = row.record_shift;
        let Some(active) = edited.active.as_mut() else { return Durability::Recorded };
        if active.frames_in == txg {
            return Durability::Committed;
        }
        let encoded = row.encode();
        let key = keys::inode(inode);
        let mut changes = Vec::new();
        for (record, buffered) in &active.records {
            if let Some(part) = &buffered.unrecorded
                && let Some(data) = buffered.content.get(part.clone())
            {
                changes.push(LogChange::Write { inode, offset: (record << shift) + part.start as u64, data });
            }
            for (from, data) in buffered.fragments.unrecorded() {
                changes.push(LogChange::Write { inode, offset: (record << shift) + from as u64, data });
            }
        }
        let sized = row.file_type() == Some(FileType::Regular) && active.stored_size != row.size;
        if changes.is_empty() && !active.changed && !sized {
            return Durability::Recorded;
        }
        changes.push(LogChange::Put { key: &key, value: &encoded });
        let ticket = recorder.record(txg, LogRecord { txg, dataset: self.dataset, changes }.encoded());
        for buffered in active.records.values_mut() {
            buffered.unrecorded = None;
            buffered.fragments.recorded();
        }
        // The log has all of it now: later rows of the inode in the log (a new name, other times)
        // must not truncate the file.
        active.stored_size = row.size;
        Durability::Logged(ticket)
    }

    /// Checks whether the rows that a recorded change needs can be read.
    ///
    /// # Errors
    /// The error of reading them.
    pub fn look_at(&self, change: &LogChange<'_>) -> Result<()> {
        let row = |key: &[u8]| {
            self.warm(key)?;
            Ok::<_, FileError>(self.table.read().get(key)?)
        };
        match change {
            LogChange::Put { key, .. } | LogChange::Delete { key } => {
                row(key)?;
                match keys::Key::decode(key)? {
                    keys::Key::Extent { inode, .. }
                    | keys::Key::Patch { inode, .. }
                    | keys::Key::Xattr { inode, .. } => row(&keys::inode(inode)).map(drop),
                    _ => Ok(()),
                }
            }
            LogChange::Write { inode, offset, data } => match self.stored(*inode) {
                Err(FileError::NotFound) => Ok(()),
                Err(error) => Err(error),
                Ok(row) => self.look_at_records(&row, *inode, *offset, data.len() as u64),
            },
            LogChange::DeleteRange { .. } | LogChange::Zero { .. } | LogChange::Share { .. } => Ok(()),
        }
    }

    /// Applies a recorded change that was not committed.
    ///
    /// # Errors
    /// Errors of the engine; damaged rows.
    pub fn replay(&self, change: &LogChange<'_>) -> Result<()> {
        use std::sync::atomic::Ordering::Relaxed;
        self.replaying.store(true, Relaxed);
        let outcome = self.replay_change(change);
        self.replaying.store(false, Relaxed);
        outcome
    }

    fn replay_change(&self, change: &LogChange<'_>) -> Result<()> {
        match change {
            LogChange::Write { inode, offset, data } => {
                let inode = self.known.get(*inode);
                match self.write(&inode, Some(*offset), data) {
                    Ok(outcome) if outcome.written < data.len() => Err(PoolError::NoSpace.into()),
                    // It lost its last name later, and was freed by an earlier replay.
                    Err(FileError::NotFound) => Ok(()),
                    done => done.map(drop),
                }
            }
            LogChange::Zero { inode, offset, length } => {
                match self.zero(&self.known.get(*inode), *offset, *length, false) {
                    Err(FileError::NotFound) => Ok(()),
                    done => done,
                }
            }
            LogChange::Share { from, to, at, length } => {
                let range = Range { from: at.0, to: at.1, length: *length };
                match self.replay_share(&self.known.get(*from), &self.known.get(*to), range) {
                    Err(FileError::NotFound) => Ok(()),
                    done => done,
                }
            }
            LogChange::Put { key, value } => self.replay_put(key, value),
            LogChange::Delete { key } => self.replay_delete(key),
            LogChange::DeleteRange { .. } => {
                Err(PoolError::Refused("a log with ranges, which this version does not write".to_owned()).into())
            }
        }
    }

    fn replay_put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let number = match keys::Key::decode(key)? {
            keys::Key::Inode(number) => {
                self.replay_inode(number, &InodeRow::decode(value)?)?;
                number
            }
            keys::Key::Entry { sequence, .. } => {
                self.replay_row(key, value)?;
                Entry::decode(value)?.inode.max(sequence)
            }
            keys::Key::Name { sequence, .. } => {
                self.replay_row(key, value)?;
                sequence
            }
            keys::Key::Xattr { inode, name } => {
                self.replay_attribute(key, value, inode, &name)?;
                0
            }
            keys::Key::Orphan(number) => {
                self.replay_row(key, value)?;
                self.note_left(number);
                number
            }
            // Only its counter of numbers is used; the table has the other fields.
            keys::Key::Head => DatasetHead::decode(value)?.next.saturating_sub(1),
            // The truncation in the record makes this row by itself.
            keys::Key::Cut(_) => 0,
            keys::Key::Patch { .. } => {
                return Err(PoolError::Refused(
                    "a log that names frames, which this version does not write".to_owned(),
                )
                .into());
            }
            keys::Key::Extent { .. } if !matches!(Extent::decode(value)?, Extent::Inline(_)) => {
                return Err(PoolError::Refused(
                    "a log that names frames, which this version does not write".to_owned(),
                )
                .into());
            }
            _ => {
                self.replay_row(key, value)?;
                0
            }
        };
        // Numbers that the log has assigned are never assigned again.
        let next = number.saturating_add(1).min(keys::NUMBER_MOST);
        self.numbers.next.fetch_max(next, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }

    fn replay_attribute(&self, key: &[u8], value: &[u8], inode: u64, name: &[u8]) -> Result<()> {
        let Xattr::Inline(content) = Xattr::decode_logged(value)? else {
            return Err(
                PoolError::Refused("a log that names frames, which this version does not write".to_owned()).into()
            );
        };
        match self.set_attribute(&self.known.get(inode), name, content, None, None) {
            // The attributes of a new file come before its inode, except in records with long
            // values, which are no rows.
            Err(FileError::NotFound) if content.len() <= INLINE_MOST => self.replay_row(key, value),
            done => done,
        }
    }

    /// Replays sharing: records that are in memory now, or stored in another form, are copied.
    fn replay_share(&self, from: &Arc<Inode>, to: &Arc<Inode>, range: Range) -> Result<()> {
        let mut done = self.share(from, to, range)?;
        let mut content = vec![0; COPIED_AT_ONCE];
        while done < range.length {
            let rest = Range {
                from: range.from.saturating_add(done),
                to: range.to.saturating_add(done),
                length: range.length - done,
            };
            let mut left = usize::try_from(rest.length).unwrap_or(usize::MAX).min(content.len());
            // Content in memory remains there, record by record; later records are shared.
            if self.throttle.is_in_memory()
                && let Some(until) = self.until_sharing(from, to, rest)?
            {
                left = left.min(usize::try_from(until).unwrap_or(usize::MAX));
            }
            let part = content.get_mut(..left).unwrap_or_default();
            let read = self.read(from, rest.from, part)?;
            let part = part.get(..read).filter(|part| !part.is_empty());
            let Some(part) = part else { break };
            let written = self.write(to, Some(rest.to), part)?.written;
            if written < part.len() {
                return Err(PoolError::NoSpace.into());
            }
            done += written as u64;
            if self.throttle.is_in_memory() && done < range.length {
                let (from_at, to_at) = (range.from.saturating_add(done), range.to.saturating_add(done));
                done += self.share(from, to, Range { from: from_at, to: to_at, length: range.length - done })?;
            }
        }
        Ok(())
    }

    fn replay_row(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let entered = self.gate.enter();
        let mut batch = Batch::default();
        batch.put(key, value.to_vec());
        self.apply(entered.txg(), &batch)
    }

    /// Replays an inode row; its charge stays the one that the engine knows.
    fn replay_inode(&self, number: u64, row: &InodeRow) -> Result<()> {
        let inode = self.known.get(number);
        let there = self.attributes(&inode);
        if let Ok(there) = &there
            && self.replay_same_size(&inode, there, row)?
        {
            return Ok(());
        }
        if matches!(there, Err(FileError::NotFound)) {
            let entered = self.gate.enter();
            let mut batch = Batch::default();
            let new = InodeRow {
                size: if row.file_type() == Some(FileType::Regular) { 0 } else { row.size },
                charged: 0,
                ..*row
            };
            batch.put(&keys::inode(number), new.encode());
            self.apply(entered.txg(), &batch)?;
            self.numbers.objects.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.count_owner(&new, 0, 1);
            if new.size == row.size {
                return Ok(());
            }
        }
        let change = AttributeChange {
            permissions: Some(row.mode & 0o7777),
            uid: Some(row.uid),
            gid: Some(row.gid),
            size: (row.file_type() == Some(FileType::Regular)).then_some(row.size),
            accessed: Some(TimeChange::To(row.accessed)),
            modified: Some(TimeChange::To(row.modified)),
            changed: ChangedTime::To(row.changed),
            kill_privileges: false,
            outside_group: false,
            only_longer: false,
            flags: Some(FlagChange { mask: u32::MAX, bits: row.flags }),
            refused_by: 0,
        };
        let now = self.set_attributes(&inode, &change)?;
        // Unreadable rows after the end do not prevent an import: they are removed before the file
        // grows.
        if let Err(error) = self.finish_cut(&inode, now) {
            if !error.is_unreadable() {
                return Err(error);
            }
            tracing::warn!(inode = number, %error, "what was cut off a file cannot be freed now");
        }
        let entered = self.gate.enter();
        let mut edited = self.edit(&inode)?;
        let mut batch = Batch::default();
        (edited.row.links, edited.row.hint, edited.row.changed) = (row.links, row.hint, row.changed);
        if row.file_type() == Some(FileType::Directory) {
            edited.row.size = row.size;
        }
        self.replay_links(&mut edited);
        edited.put(&mut batch);
        self.apply(entered.txg(), &batch)?;
        self.finish(&inode, edited);
        Ok(())
    }

    /// As [`Self::replay_inode`] in one step, for the usual case that neither owner nor size
    /// change.
    fn replay_same_size(&self, inode: &Arc<Inode>, there: &InodeRow, row: &InodeRow) -> Result<bool> {
        let regular = row.file_type() == Some(FileType::Regular);
        if (there.uid, there.gid) != (row.uid, row.gid) || (regular && there.size != row.size) || there.flags & CUT != 0
        {
            return Ok(false);
        }
        let entered = self.gate.enter();
        let mut edited = self.edit(inode)?;
        let now = edited.row;
        edited.row = InodeRow {
            charged: now.charged,
            flags: row.flags & !(HAS_PATCHES | CUT) | now.flags & (HAS_PATCHES | CUT),
            record_shift: if now.record_shift == 0 { row.record_shift } else { now.record_shift },
            ..*row
        };
        self.replay_links(&mut edited);
        let mut batch = Batch::default();
        edited.put(&mut batch);
        self.apply(entered.txg(), &batch)?;
        self.finish(inode, edited);
        Ok(true)
    }

    /// Updates the state of an active inode from the link count of the row.
    fn replay_links(&self, edited: &mut Editing<'_>) {
        if edited.row.links > 0
            && let Some(active) = edited.active.as_mut()
        {
            (active.nameless, active.linkable) = (false, false);
        }
    }

    fn replay_delete(&self, key: &[u8]) -> Result<()> {
        let entered = self.gate.enter();
        let mut batch = Batch::default();
        match keys::Key::decode(key)? {
            // A record or a patch after the end of a file, a long attribute: the frame is freed
            // with the row.
            keys::Key::Extent { inode, .. } => {
                let inode = self.known.get(inode);
                let mut edited = match self.edit(&inode) {
                    Err(FileError::NotFound) => return Ok(()),
                    edited => edited?,
                };
                self.forget_extent(&mut edited, key, &mut batch)?;
                edited.put(&mut batch);
                self.apply(entered.txg(), &batch)?;
                self.finish(&inode, edited);
                return Ok(());
            }
            keys::Key::Patch { inode, record, number } => {
                let inode = self.known.get(inode);
                let mut edited = match self.edit(&inode) {
                    Err(FileError::NotFound) => return Ok(()),
                    edited => edited?,
                };
                let mut patches = self.stored_patches(&edited.row, inode.number(), record, record)?;
                patches.retain(|patch| patch.number == number);
                let charged = self.drop_patches(patches, inode.number(), &mut batch);
                self.charge(&mut edited, -(charged as i64), &mut batch);
                edited.put(&mut batch);
                self.apply(entered.txg(), &batch)?;
                self.finish(&inode, edited);
                return Ok(());
            }
            keys::Key::Xattr { inode, name } => {
                drop(entered);
                return match self.remove_attribute(&self.known.get(inode), &name) {
                    Err(FileError::NoData | FileError::NotFound) => Ok(()),
                    done => done,
                };
            }
            keys::Key::Cut(_) => return Ok(()),
            _ => batch.remove(key),
        }
        self.apply(entered.txg(), &batch)
    }
}
