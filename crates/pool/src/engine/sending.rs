//! Sending a snapshot: all its rows, or the rows that differ from an earlier one, with the content
//! of their frames.
//!
//! Called by the verbs `send` and `replicate`, which keep both snapshots from being destroyed
//! meanwhile. Both trees are walked together, and nodes that they share are not read: the cost is
//! that of the changes. If only a bookmark of the earlier snapshot exists, nodes born since then
//! are walked, and the stream also states the ranges without rows. A partially received dataset is
//! sent like a snapshot, as far as it was received. Invariants: rows are in the order of their
//! keys, so that a key is the position in a stream; memory is that of a few records.

use std::sync::Arc;

use super::Pool;
use crate::catalog::SnapshotRow;
use crate::codec::Writer;
use crate::error::{Damage, PoolError};
use crate::pointer::{Compression, Pointer, Txg};
use crate::rows::{InodeRow, dead_of, keys, pointer_of};
use crate::send_stream::record::{self, travels};
use crate::send_stream::{ResumeToken, RowOp, SentFrame, StreamError};
use crate::tree::cursor::Cursor;
use crate::tree::diff::Diff;
use crate::tree::since::{Since, SinceWalk};
use crate::tree::{Context, Settings, Tree, View};

/// Bytes of rows and content at which a record is complete: with one more row, of any content, it
/// stays within the length limit of a record.
const RECORD: usize = 512 << 10;
/// The first records of a stream are full with so many: a receiver keeps whole records of a stream that
/// is cut, and a short stream can be resumed as well.
const FIRST_RECORD: usize = 128 << 10;
/// And with so many rows.
const RECORD_ROWS: usize = record::ROWS_MOST / 2;

/// A snapshot: its dataset's number, and the txg in which it was taken.
pub type Moment = (u64, Txg);

/// Base of an incremental stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Earlier {
    /// A snapshot.
    Snapshot(Moment),
    /// A destroyed snapshot of the same file system, by a bookmark's txg.
    Bookmark(Txg),
}

/// Source of the rows that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Later {
    /// A snapshot.
    Snapshot(Moment),
    /// A partially received state, stored in this dataset.
    Saved(u64),
}

/// Request for a stream.
#[derive(Clone, Debug)]
pub struct ToSend {
    /// Source of the rows.
    pub to: Later,
    /// Incremental base; `None`: a full stream.
    pub from: Option<Earlier>,
    /// Position after which a resumed stream begins; empty: the beginning.
    pub after: Vec<u8>,
    /// Sends frames compressed, as they are stored.
    pub stored: bool,
}

/// A partially received state: as long as this value lives, it is neither resumed nor destroyed.
pub struct Saved {
    pool: Arc<Pool>,
    /// Number of the dataset that has the rows.
    pub id: u64,
    /// Position up to which the rows were received.
    pub token: ResumeToken,
    /// The snapshot of which the dataset is a clone.
    pub base: Option<Moment>,
}

impl std::fmt::Debug for Saved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved").field("id", &self.id).field("token", &self.token).finish_non_exhaustive()
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        self.pool.receiving.lock().remove(&self.id);
    }
}

/// A row or a range of keys that is sent.
struct Sent {
    key: Vec<u8>,
    fate: Fate,
}

/// New state of a row.
enum Fate {
    Becomes(Vec<u8>, Option<Pointer>),
    Goes,
    /// There are no rows from its key to this one; empty: to the end.
    NothingTo(Vec<u8>),
}

impl Sent {
    /// The sent form of a row, or of its removal (`None`).
    fn of(key: &[u8], value: Option<&[u8]>) -> Result<Self, PoolError> {
        let fate = match value {
            // The receiver recounts the space that its rows are charged.
            Some(value) if key.first() == Some(&keys::INODE) => Fate::Becomes(InodeRow::decode(value)?.encode(), None),
            Some(value) => Fate::Becomes(value.to_vec(), pointer_of(key, value)?),
            None => Fate::Goes,
        };
        Ok(Self { key: key.to_vec(), fate })
    }

    fn pointer(&self) -> Option<&Pointer> {
        match &self.fate {
            Fate::Becomes(_, pointer) => pointer.as_ref(),
            Fate::Goes | Fate::NothingTo(_) => None,
        }
    }

    /// Length without content, bytes.
    fn row(&self) -> usize {
        self.key.len()
            + match &self.fate {
                Fate::Becomes(value, _) | Fate::NothingTo(value) => value.len(),
                Fate::Goes => 0,
            }
    }

    fn bytes(&self) -> usize {
        self.row() + self.pointer().map_or(0, |pointer| pointer.logical as usize)
    }
}

/// Whether two inode rows differ only in the space that the inode's rows are charged, which is not
/// sent.
fn is_recounted(key: &[u8], old: Option<&[u8]>, new: Option<&[u8]>) -> Result<bool, PoolError> {
    match (key.first(), old, new) {
        (Some(&keys::INODE), Some(old), Some(new)) => Ok(InodeRow::decode(old)? == InodeRow::decode(new)?),
        _ => Ok(false),
    }
}

/// Rows to send, in the order of their keys.
enum Walk<'a> {
    All(Cursor<'a>),
    Difference(Diff<'a>),
    Since(SinceWalk<'a>, Txg),
}

impl Walk<'_> {
    fn next(&mut self) -> Result<Option<Sent>, PoolError> {
        loop {
            let (key, value) = match self {
                Self::All(rows) => match rows.next()? {
                    Some((key, value)) => (key, Some(value)),
                    None => return Ok(None),
                },
                Self::Difference(rows) => match rows.next()? {
                    Some(row) if is_recounted(row.key, row.old, row.new)? => continue,
                    Some(row) => (row.key, row.new),
                    None => return Ok(None),
                },
                Self::Since(steps, since) => match steps.next()? {
                    // A frame that is older than the base belongs to a row that the base has too.
                    Some(Since::Row(key, value)) if dead_of(key, value)?.is_some_and(|dead| dead.birth <= *since) => {
                        continue;
                    }
                    Some(Since::Row(key, value)) => (key, Some(value)),
                    Some(Since::Nothing(from, to)) => {
                        let fate = Fate::NothingTo(to.unwrap_or_default().to_vec());
                        return Ok(Some(Sent { key: from.to_vec(), fate }));
                    }
                    None => return Ok(None),
                },
            };
            if travels(key) {
                return Sent::of(key, value).map(Some);
            }
        }
    }

    /// Some rows, one record of them; none at the end. `sent`: bytes of the records before, to which
    /// those of this one are added.
    fn some(&mut self, sent: &mut usize) -> Result<Vec<Sent>, PoolError> {
        let full = (*sent / 4).clamp(FIRST_RECORD, RECORD);
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while bytes < full && rows.len() < RECORD_ROWS {
            let Some(row) = self.next()? else { break };
            bytes += row.bytes();
            rows.push(row);
        }
        *sent = sent.saturating_add(bytes);
        Ok(rows)
    }
}

impl Pool {
    /// Passes the payloads of the stream's row records to `take`.
    ///
    /// # Errors
    /// Errors of the store; damage; errors that `take` returns.
    pub fn send_rows(
        &self,
        what: &ToSend,
        take: &mut dyn FnMut(&[u8]) -> Result<(), StreamError>,
    ) -> Result<(), StreamError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let mut walk = self.walk(context, what)?;
        let mut sent = 0;
        let mut rows = self.expected(walk.some(&mut sent)?);
        while !rows.is_empty() {
            // The next ones are read ahead while these are sent.
            let next = self.expected(walk.some(&mut sent)?);
            take(&self.payload(&rows, what.stored)?)?;
            rows = next;
        }
        Ok(())
    }

    /// Estimates the length of a stream's rows, bytes.
    ///
    /// # Errors
    /// Errors of the store; damage.
    pub fn send_size(&self, what: &ToSend) -> Result<u64, PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let mut walk = self.walk(context, what)?;
        let mut size = 0;
        while let Some(row) = walk.next()? {
            let content = row.pointer().map_or(0, |pointer| if what.stored { pointer.stored } else { pointer.logical });
            size += row.row() as u64 + u64::from(content);
        }
        Ok(size)
    }

    /// Locks the resumable, partially received state of a dataset, if there is any.
    ///
    /// # Errors
    /// [`PoolError::Busy`] while it is being received or sent; errors of the store.
    pub fn saved(self: &Arc<Self>, target: u64) -> Result<Option<Saved>, PoolError> {
        let admin = self.admin.lock();
        let Some((id, token)) = self.resumable(&admin, target)? else { return Ok(None) };
        let base = admin.catalog.dataset(id)?.origin;
        if !self.receiving.lock().insert(id) {
            return Err(PoolError::Busy);
        }
        Ok(Some(Saved { pool: Arc::clone(self), id, token, base }))
    }

    /// Finds the snapshot with this GUID, anywhere in the pool.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn snapshot_with_guid(&self, guid: u64) -> Result<Option<(Moment, SnapshotRow)>, PoolError> {
        let admin = self.admin.lock();
        for (id, _) in admin.catalog.datasets()? {
            let found = admin.catalog.snapshots(id)?.into_iter().find(|(_, row)| row.guid == guid);
            if let Some((txg, row)) = found {
                return Ok(Some(((id, txg), row)));
            }
        }
        Ok(None)
    }

    fn walk<'a>(&'a self, context: Context<'a>, what: &ToSend) -> Result<Walk<'a>, PoolError> {
        let view = |later: Later| {
            let admin = self.admin.lock();
            let root = match later {
                Later::Snapshot((id, txg)) => admin.catalog.snapshot(id, txg)?.root,
                Later::Saved(id) => admin.catalog.dataset(id)?.root,
            };
            Ok::<View, PoolError>(Tree::open(root, 0, Settings::default()).view())
        };
        let new = view(what.to)?;
        // The smallest key after the last one sent.
        let mut first = what.after.clone();
        if !first.is_empty() {
            first.push(0);
        }
        Ok(match what.from {
            Some(Earlier::Snapshot(from)) => {
                Walk::Difference(view(Later::Snapshot(from))?.diff_from(context, &new, &first)?)
            }
            Some(Earlier::Bookmark(since)) => Walk::Since(new.since(context, since, &first), since),
            None => Walk::All(new.cursor(context, &first, None)?),
        })
    }

    fn expected(&self, rows: Vec<Sent>) -> Vec<Sent> {
        let pointers: Vec<Pointer> = rows.iter().filter_map(|row| row.pointer().copied()).collect();
        if !pointers.is_empty() {
            self.content.expect_later(&pointers, &[]);
        }
        rows
    }

    fn payload(&self, rows: &[Sent], stored: bool) -> Result<Vec<u8>, PoolError> {
        let mut to = Writer::default();
        to.reserve(rows.iter().map(|row| row.bytes() + 64).sum());
        let mut buffer = Vec::new();
        for Sent { key, fate } in rows {
            match fate {
                Fate::Goes => RowOp::Gone { key }.encode(&mut to),
                Fate::NothingTo(until) => RowOp::Nothing { key, until }.encode(&mut to),
                Fate::Becomes(value, None) => RowOp::Put { key, value }.encode(&mut to),
                Fate::Becomes(_, Some(pointer)) if pointer.is_sealed() => {
                    return Err(PoolError::Frame { pointer: *pointer, damage: Damage::Seal });
                }
                Fate::Becomes(value, Some(pointer)) => {
                    let packed = if stored { self.frames.read_stored(pointer)? } else { None };
                    let (compression, bytes) = match &packed {
                        Some(bytes) => (pointer.compression, bytes.as_slice()),
                        None => (Compression::Off, self.content_of(pointer, &mut buffer)?),
                    };
                    let frame = SentFrame {
                        compression,
                        checksum_kind: pointer.checksum_kind,
                        checksum: pointer.checksum,
                        logical: pointer.logical,
                        bytes,
                    };
                    RowOp::Framed { key, pieces: pieces(key, value)?, frame }.encode(&mut to);
                }
            }
        }
        Ok(to.finish())
    }

    fn content_of<'b>(&self, pointer: &Pointer, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], PoolError> {
        buffer.resize(pointer.logical as usize, 0);
        self.content.read_all(&mut [crate::frames::Wanted { pointer: *pointer, target: buffer.as_mut_slice() }])?;
        Ok(buffer)
    }
}

/// The part after the pointer in a patch row.
fn pieces<'v>(key: &[u8], value: &'v [u8]) -> Result<&'v [u8], PoolError> {
    if key.first() != Some(&keys::PATCH) {
        return Ok(&[]);
    }
    value.get(Pointer::LENGTH..).ok_or(PoolError::Format(Damage::Structure("a patch that is too short")))
}
