//! Files that are received row by row from a stream of a snapshot.
//!
//! Called by the engine (`engine/receiving.rs`) with the rows of the sending pool; frames are
//! written here, and rows get the pointers to them. The files are not used otherwise meanwhile.
//!
//! Invariants: a file and its owners are charged for the space used here, not at the sender; the
//! position of the stream is a row that changes with the others, so a crash never leaves it ahead
//! of them or behind them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as MapEntry;

use super::owner_accounts::owners_of;
use super::quota_check::worst;
use super::row_recount::all_counted;
use super::{Batch, Entered, Files, FilesConfig, Result, Storing, Table};
use crate::deadlist::Dead;
use crate::error::{Damage, PoolError};
use crate::frames::{Compressed, NewFrame, Owner, WriteStream};
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::keys::{self, Key};
use crate::rows::{DatasetHead, Entry, Extent, Folding, InodeRow, NameTarget, OwnerKind, Patch, Xattr, dead_of};
use crate::send_stream::{RowOp, SentFrame, record};
use crate::space::Purpose;

/// An inode whose row or charge changes: its previous and its new row.
#[derive(Clone, Copy)]
struct Touched {
    before: Option<InodeRow>,
    after: Option<InodeRow>,
}

/// Changes by a record of a stream.
struct Arriving<'a> {
    inodes: BTreeMap<u64, Touched>,
    batch: Batch,
    pointers: std::vec::IntoIter<Pointer>,
    ops: &'a [RowOp<'a>],
    /// The table was empty when the stream began: nothing is replaced.
    fresh: bool,
}

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// Greater than all keys.
const BEHIND_ALL: &[u8] = &[0xff];

/// Header of a dataset for which nothing was received yet.
const NOTHING: DatasetHead =
    DatasetHead { next: 2, root: 1, seed: 0, hashing: keys::Hashing::Ordered, folding: Folding::EXACT, objects: 0 };

/// Kind of a frame in this dataset, the write stream for it, and its owner.
fn place(dataset: u64, key: &[u8]) -> std::result::Result<(FrameKind, WriteStream, Owner), PoolError> {
    match Key::decode(key)? {
        Key::Extent { inode, record } => {
            // The record size is in the inode; the record's number identifies the frame in
            // diagnostics.
            Ok((FrameKind::Data, WriteStream::Data, Owner { dataset, object: inode, offset: record }))
        }
        Key::Patch { inode, record, .. } => {
            Ok((FrameKind::Data, WriteStream::Data, Owner { dataset, object: inode, offset: record }))
        }
        Key::Xattr { inode, .. } => {
            Ok((FrameKind::Value, WriteStream::Metadata, Owner { dataset, object: inode, offset: 0 }))
        }
        _ => Err(damaged("a row that can have no frame")),
    }
}

/// The row of a key that references this frame.
fn framed(key: &[u8], pieces: &[u8], pointer: Pointer) -> std::result::Result<Vec<u8>, PoolError> {
    match key.first() {
        Some(&keys::EXTENT) if pieces.is_empty() => {
            let row = Extent::Frame(pointer).encode();
            Extent::decode(&row)?;
            Ok(row)
        }
        Some(&keys::XATTR) if pieces.is_empty() => {
            let row = Xattr::Frame(pointer).encode();
            Xattr::decode(&row)?;
            Ok(row)
        }
        Some(&keys::PATCH) => {
            let mut row = crate::codec::Writer::default();
            pointer.encode(&mut row);
            row.bytes(pieces);
            let row = row.finish();
            Patch::decode(&row)?;
            Ok(row)
        }
        _ => Err(damaged("a row that can have no frame")),
    }
}

/// Checks a row without a frame.
fn check(key: &Key, value: &[u8]) -> std::result::Result<(), PoolError> {
    match key {
        Key::Head => DatasetHead::decode(value).map(drop),
        Key::Inode(_) => InodeRow::decode(value).map(drop),
        Key::Entry { .. } => Entry::decode(value).map(drop),
        Key::Name { .. } => NameTarget::decode(value).map(drop),
        Key::Extent { .. } => match Extent::decode(value)? {
            Extent::Inline(_) => Ok(()),
            Extent::Frame(_) | Extent::Shared { .. } => Err(damaged("a frame of another pool")),
        },
        Key::Xattr { .. } => match Xattr::decode(value)? {
            Xattr::Inline(_) => Ok(()),
            Xattr::Frame(_) => Err(damaged("a frame of another pool")),
        },
        Key::Orphan(_) | Key::Cut(_) if value.is_empty() => Ok(()),
        _ => Err(damaged("a row that does not travel")),
    }
}

impl<T: Table> Files<T> {
    /// Files that are received into a table, which may have an earlier state, or a part of the
    /// rows.
    ///
    /// # Errors
    /// [`PoolError`] of the table.
    pub fn receiving(config: FilesConfig, table: T) -> std::result::Result<Self, PoolError> {
        let head = table.get(&keys::head())?.map_or(Ok(NOTHING), |row| DatasetHead::decode(&row))?;
        let files = Self::over(config, table, head);
        files.receiving.store(true, std::sync::atomic::Ordering::Relaxed);
        Ok(files)
    }

    /// Applies rows of a stream, in the order of their keys, together with its position: all of
    /// them or none. `owner` is the dataset to which the frames will belong; `fresh`: the table was
    /// empty when the stream began.
    ///
    /// # Errors
    /// [`super::FileError::Quota`], [`PoolError::NoSpace`]; invalid rows; errors of the engine.
    pub fn receive(&self, ops: &[RowOp<'_>], (owner, fresh): (u64, bool), progress: &[u8]) -> Result<()> {
        self.with_relief(|| self.take_rows(ops, (owner, fresh), progress))
    }

    fn take_rows(&self, ops: &[RowOp<'_>], (owner, fresh): (u64, bool), progress: &[u8]) -> Result<()> {
        let entered = self.enter()?;
        let pointers = self.write_frames(&entered, owner, ops)?;
        let written: Vec<Dead> = pointers.iter().map(|pointer| Dead::of(pointer, false)).collect();
        let mut batch = Batch::default();
        batch.written = written;
        let mut arriving = Arriving { inodes: BTreeMap::new(), batch, pointers: pointers.into_iter(), ops, fresh };
        let noted = self.note_rows(&mut arriving);
        let Arriving { mut batch, inodes, .. } = arriving;
        noted.inspect_err(|_| self.abandon(&batch))?;
        // All inodes come with this stream, and get charges.
        if fresh && self.table.read().get(&keys::received())?.is_none() {
            batch.put(&keys::recounted(), all_counted());
        }
        batch.put(&keys::received(), progress.to_vec());
        for (number, touched) in &inodes {
            if let Some(row) = touched.after {
                batch.put(&keys::inode(*number), row.encode());
            }
        }
        self.apply(entered.txg(), &batch)?;
        for touched in inodes.values() {
            for (row, sign) in [(touched.before, -1), (touched.after, 1)] {
                if let Some(row) = row {
                    let bytes = i64::try_from(row.charged).unwrap_or(i64::MAX);
                    self.owners.change(owners_of(&row).map(|owner: (OwnerKind, u32)| (owner, (sign * bytes, sign))));
                }
            }
        }
        Ok(())
    }

    /// Removes rows from a key up to before another (empty: to the end), in steps, for a range that
    /// the stream states to be empty; `progress`: the position of the stream before.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn take_away(&self, (from, until): (&[u8], &[u8]), owner: (u64, bool), progress: &[u8]) -> Result<()> {
        let until = if until.is_empty() { BEHIND_ALL } else { until };
        if from >= until {
            return Ok(());
        }
        loop {
            let mut gone: Vec<Vec<u8>> = Vec::new();
            self.table.read().scan(from.to_vec()..until.to_vec(), &mut |key, _| {
                if record::travels(key) {
                    gone.push(key.to_vec());
                }
                gone.len() < record::ROWS_MOST
            })?;
            if gone.is_empty() {
                return Ok(());
            }
            let ops: Vec<RowOp<'_>> = gone.iter().map(|key| RowOp::Gone { key }).collect();
            self.receive(&ops, owner, progress)?;
        }
    }

    /// Removes the position of the stream, which is complete.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn received(&self) -> Result<()> {
        let entered = self.enter_now();
        let mut batch = Batch::default();
        batch.remove(&keys::received());
        self.apply(entered.txg(), &batch)
    }

    fn write_frames(&self, entered: &Entered<'_>, owner: u64, ops: &[RowOp<'_>]) -> Result<Vec<Pointer>> {
        let storing = *self.storing.read();
        let mut frames: Vec<(NewFrame<'_>, Option<Compressed>)> = Vec::new();
        for op in ops {
            if let RowOp::Framed { key, frame, .. } = op {
                let (kind, stream, owner) = place(owner, key)?;
                frames.push(new_frame(entered.txg(), storing, (kind, stream, owner), frame));
            }
        }
        if frames.is_empty() {
            return Ok(Vec::new());
        }
        let promised = frames.iter().map(|(frame, _)| worst(frame.content.len())).fold(0, u64::saturating_add);
        self.admission.admit(self.dataset, promised, Some(Purpose::Write))?;
        let mut written = Vec::with_capacity(frames.len());
        let outcome = if frames.iter().all(|(_, stored)| stored.is_none()) {
            let frames: Vec<NewFrame<'_>> = frames.iter().map(|(frame, _)| *frame).collect();
            self.frames.write_all(&frames, &mut written)
        } else {
            frames.iter().try_for_each(|(frame, stored)| {
                let pointer = match stored {
                    Some(stored) => self.frames.write_compressed(frame, stored),
                    None => self.frames.write(frame),
                };
                written.push(pointer?);
                Ok(())
            })
        };
        let charged = written.iter().map(Pointer::charged).fold(0, u64::saturating_add);
        self.admission.charge(self.dataset, entered.txg(), promised, charged);
        written.iter().for_each(|pointer| self.count_written(pointer));
        if let Err(error) = outcome {
            self.freed.lock().extend(written.iter().map(|pointer| Dead::of(pointer, false)));
            return Err(error.into());
        }
        Ok(written)
    }

    fn note_rows(&self, arriving: &mut Arriving<'_>) -> Result<()> {
        for op in arriving.ops {
            if matches!(op, RowOp::Nothing { .. }) {
                // They were removed before.
                continue;
            }
            let key = Key::decode(op.key())?;
            let old = if arriving.fresh { None } else { self.table.read().get(op.key())? };
            match (&key, op) {
                (Key::Inode(number), RowOp::Put { value, .. }) => {
                    let old = old.map(|row| InodeRow::decode(&row)).transpose()?;
                    let mut row = InodeRow::decode(value)?;
                    row.charged = old.map_or(0, |old| old.charged);
                    arriving.inodes.insert(*number, Touched { before: old, after: Some(row) });
                }
                (Key::Inode(number), RowOp::Gone { key }) => {
                    let old = old.map(|row| InodeRow::decode(&row)).transpose()?;
                    arriving.inodes.insert(*number, Touched { before: old, after: None });
                    arriving.batch.remove(key);
                }
                (Key::Head, RowOp::Gone { .. }) => return Err(damaged("a file system without a head").into()),
                (Key::Received | Key::Recounted | Key::OwnerUse(..), _) => {
                    return Err(damaged("a row that does not travel").into());
                }
                _ => self.note_row(arriving, &key, op, old)?,
            }
        }
        Ok(())
    }

    /// Any other row; a file is charged for the frame that it references.
    fn note_row(&self, arriving: &mut Arriving<'_>, key: &Key, op: &RowOp<'_>, old: Option<Vec<u8>>) -> Result<()> {
        let dead = old.map_or(Ok(None), |row| dead_of(op.key(), &row))?;
        let mut charged = dead.as_ref().map_or(0, |dead| -(dead.owner_charge as i64));
        arriving.batch.dead.extend(dead);
        match op {
            RowOp::Gone { key } => arriving.batch.remove(key),
            RowOp::Nothing { .. } => {}
            RowOp::Put { key: bytes, value } => {
                check(key, value)?;
                arriving.batch.put(bytes, value.to_vec());
            }
            RowOp::Framed { key, pieces, .. } => {
                let pointer = arriving.pointers.next().ok_or_else(|| damaged("a frame that was not written"))?;
                charged = charged.saturating_add(pointer.owner_charge() as i64);
                arriving.batch.put(key, framed(key, pieces, pointer)?);
            }
        }
        let (Key::Extent { inode, .. } | Key::Xattr { inode, .. } | Key::Patch { inode, .. }) = key else {
            return Ok(());
        };
        if charged == 0 {
            return Ok(());
        }
        let touched = match arriving.inodes.entry(*inode) {
            MapEntry::Occupied(entry) => entry.into_mut(),
            MapEntry::Vacant(entry) => {
                let row = self.table.read().get(&keys::inode(*inode))?;
                let row = row.map(|row| InodeRow::decode(&row)).transpose()?;
                entry.insert(Touched { before: row, after: row })
            }
        };
        match &mut touched.after {
            Some(row) => row.charged = row.charged.saturating_add_signed(charged),
            // It was removed with its inode, and so was the charge.
            None if matches!(op, RowOp::Gone { .. }) => {}
            None => return Err(damaged("content of a file that is not there").into()),
        }
        Ok(())
    }
}

/// A frame for this pool: compressed as its properties require, or as it was sent.
fn new_frame<'a>(
    birth: Txg,
    storing: Storing,
    (kind, stream, owner): (FrameKind, WriteStream, Owner),
    sent: &SentFrame<'a>,
) -> (NewFrame<'a>, Option<Compressed>) {
    use crate::pointer::Compression;
    let frame = NewFrame {
        stream,
        kind,
        owner,
        birth,
        content: sent.bytes,
        compression: storing.compression,
        checksum: storing.checksum,
    };
    if sent.compression == Compression::Off {
        return (frame, None);
    }
    let pointer = Pointer {
        segment: 0,
        index: 0,
        offset: 0,
        stored: sent.bytes.len() as u32,
        logical: sent.logical,
        kind,
        compression: sent.compression,
        checksum_kind: sent.checksum_kind,
        pin: 0,
        birth,
        checksum: sent.checksum,
    };
    (frame, Some(Compressed { pointer, stored: None, sealed: None }))
}
