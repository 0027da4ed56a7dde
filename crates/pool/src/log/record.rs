//! Records of the intent log and of the replay journal: the changes of one operation to the rows of one dataset.
//! Replay applies them in order and knows nothing of files except their content; applying one twice has the same
//! effect as once.

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::Txg;

const PUT: u8 = 1;
const DELETE: u8 = 2;
const DELETE_RANGE: u8 = 3;
const WRITE: u8 = 4;
const ZERO: u8 = 5;
const SHARE: u8 = 6;

/// A change of a row or of content; its bytes are borrowed from the operation, or from the block on replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogChange<'a> {
    /// Sets a row.
    Put {
        /// The row's key.
        key: &'a [u8],
        /// The row's value.
        value: &'a [u8],
    },
    /// Deletes a row.
    Delete {
        /// The row's key.
        key: &'a [u8],
    },
    /// Deletes all rows of a range: the records behind the end of a file.
    DeleteRange {
        /// The first key.
        from: &'a [u8],
        /// The key after the last.
        to: &'a [u8],
    },
    /// Writes content to a file; its data records are created anew from it. The inode's row is a change of its own.
    Write {
        /// Number of the file's inode.
        inode: u64,
        /// The offset, bytes.
        offset: u64,
        /// The content.
        data: &'a [u8],
    },
    /// Zeroes a range of a file. Only in the replay journal.
    Zero {
        /// Number of the file's inode.
        inode: u64,
        /// The offset, bytes.
        offset: u64,
        /// The length, bytes.
        length: u64,
    },
    /// Shares a range of a file with another file (reflink). Only in the replay journal.
    Share {
        /// Number of the source file's inode.
        from: u64,
        /// Number of the target file's inode.
        to: u64,
        /// The offsets in the source and in the target.
        at: (u64, u64),
        /// The length, bytes.
        length: u64,
    },
}

impl LogChange<'_> {
    /// Kind of the changed row, if the change is one of a row.
    pub(crate) fn kind(&self) -> Option<u8> {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key.first().copied(),
            _ => None,
        }
    }
}

/// Maximum length of an encoded number, bytes.
const NUMBER: usize = 10;

/// Length of a change in a record, bytes.
fn length_of(change: &LogChange<'_>) -> usize {
    let string = |bytes: &[u8]| Writer::length_of(bytes.len() as u64) + bytes.len();
    let numbers = |numbers: &[u64]| numbers.iter().map(|number| Writer::length_of(*number)).sum::<usize>();
    1 + match change {
        LogChange::Put { key, value } => string(key) + string(value),
        LogChange::Delete { key } => string(key),
        LogChange::DeleteRange { from, to } => string(from) + string(to),
        LogChange::Write { inode, offset, data } => numbers(&[*inode, *offset]) + string(data),
        LogChange::Zero { inode, offset, length } => numbers(&[*inode, *offset, *length]),
        LogChange::Share { from, to, at, length } => numbers(&[*from, *to, at.0, at.1, *length]),
    }
}

/// The changes of one operation. They are applied completely or, where a commit holds its txg, not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord<'a> {
    /// The txg that the operation belongs to.
    pub txg: Txg,
    /// The dataset; 0 is the catalog.
    pub dataset: u64,
    /// The changes, in order.
    pub changes: Vec<LogChange<'a>>,
}

impl<'a> LogRecord<'a> {
    /// Encodes the record: its length, then its fields.
    #[must_use]
    pub fn encoded(&self) -> Vec<u8> {
        let length = self.length();
        let mut to = Writer::with_room(NUMBER + length);
        to.varint(length as u64);
        to.varint(self.txg.0);
        to.varint(self.dataset);
        for change in &self.changes {
            match change {
                LogChange::Put { key, value } => {
                    to.u8(PUT);
                    to.string(key);
                    to.string(value);
                }
                LogChange::Delete { key } => {
                    to.u8(DELETE);
                    to.string(key);
                }
                LogChange::DeleteRange { from, to: end } => {
                    to.u8(DELETE_RANGE);
                    to.string(from);
                    to.string(end);
                }
                LogChange::Write { inode, offset, data } => {
                    to.u8(WRITE);
                    to.varint(*inode);
                    to.varint(*offset);
                    to.string(data);
                }
                LogChange::Zero { inode, offset, length } => {
                    to.u8(ZERO);
                    [inode, offset, length].into_iter().for_each(|number| to.varint(*number));
                }
                LogChange::Share { from, to: into, at, length } => {
                    to.u8(SHARE);
                    [from, into, &at.0, &at.1, length].into_iter().for_each(|number| to.varint(*number));
                }
            }
        }
        to.finish()
    }

    /// Length of its fields, bytes.
    fn length(&self) -> usize {
        let numbers = Writer::length_of(self.txg.0) + Writer::length_of(self.dataset);
        numbers + self.changes.iter().map(length_of).sum::<usize>()
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// [`PoolError::Format`] for malformed bytes.
    pub fn decode(from: &mut Reader<'a>) -> Result<Self, PoolError> {
        let mut body = Reader::new(from.string()?);
        let (txg, dataset) = (Txg(body.varint()?), body.varint()?);
        let mut changes = Vec::new();
        while !body.is_empty() {
            changes.push(match body.u8()? {
                PUT => LogChange::Put { key: body.string()?, value: body.string()? },
                DELETE => LogChange::Delete { key: body.string()? },
                DELETE_RANGE => LogChange::DeleteRange { from: body.string()?, to: body.string()? },
                WRITE => LogChange::Write { inode: body.varint()?, offset: body.varint()?, data: body.string()? },
                ZERO => LogChange::Zero { inode: body.varint()?, offset: body.varint()?, length: body.varint()? },
                SHARE => LogChange::Share {
                    from: body.varint()?,
                    to: body.varint()?,
                    at: (body.varint()?, body.varint()?),
                    length: body.varint()?,
                },
                _ => return Err(PoolError::Format(Damage::Structure("unknown change in a log record"))),
            });
        }
        Ok(Self { txg, dataset, changes })
    }
}
