//! The records of a stream of snapshots, and errors of streams.
//!
//! Called by the reader and the writer of streams, and by the engine, which makes rows of them.
//! Invariants: every decoder accepts arbitrary bytes and returns a record or an error; an encoded
//! record is decoded to an equal one.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::{ChecksumKind, Compression};
use crate::rows::keys;

/// The first bytes of a stream.
pub const MAGIC: [u8; 8] = *b"nacresnd";
/// The version of the format.
pub const VERSION: u32 = 1;
/// Length of a stream's beginning: magic, version, four bytes 0.
pub const PREAMBLE: usize = 16;
/// Length of a record's header: kind, three bytes 0, length.
pub const HEADER: usize = 8;
/// Length of the checksum after the payload: of all bytes from the beginning of the stream.
pub const CHECKSUM: usize = 8;
/// Longest payload, bytes: a frame of 16 MiB with its row, and the rows before it.
pub const LONGEST: usize = (16 << 20) + (1 << 20);
/// Most rows of a record: a receiver needs not much more memory than the record's bytes.
pub const ROWS_MOST: usize = 8192;
/// Most elements of any other list in a record.
const MANY_MOST: u64 = 1 << 19;
/// Longest key and row of a tree, bytes.
const ROW_MOST: usize = 16 << 10;

/// Reason why a stream cannot be received or displayed.
#[derive(Clone, Debug)]
pub enum StreamError {
    /// It ends too early.
    Cut,
    /// It cannot be read, or written.
    Io(Arc<io::Error>),
    /// It is no stream of this format; the text describes what it seems to be.
    Foreign(&'static str),
    /// It has a version that this program does not know.
    Version(u32),
    /// It was damaged since it was sent.
    Damaged(&'static str),
    /// An error of the engine.
    Pool(PoolError),
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The words that replication programs wait for before they resume.
            Self::Cut => f.write_str("checksum mismatch or incomplete stream"),
            Self::Io(error) => error.fmt(f),
            Self::Foreign(what) => write!(f, "invalid stream ({what})"),
            Self::Version(version) => {
                write!(f, "the stream has version {version} of its format; this program knows version {VERSION}")
            }
            Self::Damaged(what) => write!(f, "invalid stream (checksum mismatch: {what})"),
            Self::Pool(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StreamError {}

impl From<PoolError> for StreamError {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

impl From<io::Error> for StreamError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// Description of the whole stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamHead {
    /// Full name of the file system that was sent.
    pub root: String,
    /// GUID of the sending pool.
    pub pool: u64,
    /// A replication stream with all descendants: the receiver may be asked to destroy what the
    /// sender does not have.
    pub package: bool,
    /// The sender's snapshots, in a replication stream: the file system's name below the root, the
    /// snapshot's name, its GUID.
    pub there: Vec<(String, String, u64)>,
}

/// A property in a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentProperty {
    /// Its stored name.
    pub name: String,
    /// Its stored value.
    pub value: String,
}

/// A snapshot whose rows follow: all of them, or the differences to another snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotHead {
    /// Name of the file system below the root of the stream: empty, or `/a/b`.
    pub below: String,
    /// Full name at the sender.
    pub name: String,
    /// Its GUID.
    pub guid: u64,
    /// Time of the snapshot, seconds since 1970.
    pub created: i64,
    /// GUID of the incremental base; 0: none.
    pub from: u64,
    /// The base belongs to another file system, of which this one is a clone.
    pub clone: bool,
    /// Frames are sent compressed, as they are stored.
    pub stored: bool,
    /// Access control lists are in effect at the sender.
    pub lists: bool,
    /// Properties of the file system that are its rules for names.
    pub spelling: Vec<SentProperty>,
    /// A resumed stream starts after this key; empty: at the beginning.
    pub after: Vec<u8>,
    /// Properties of the file system.
    pub properties: Vec<SentProperty>,
    /// Properties of the snapshot.
    pub of_snapshot: Vec<SentProperty>,
    /// Tags of its holds.
    pub holds: Vec<String>,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The first record.
    Stream(StreamHead),
    /// Start of a snapshot.
    Snapshot(SnapshotHead),
    /// Rows of the snapshot, for [`rows`].
    Rows(Vec<u8>),
    /// End of the rows of the snapshot with this GUID.
    SnapshotEnd(u64),
    /// The last record.
    End,
}

const STREAM: u8 = 1;
const SNAPSHOT: u8 = 2;
const ROWS: u8 = 3;
const SNAPSHOT_END: u8 = 4;
const END: u8 = 5;

const DAMAGED: StreamError = StreamError::Damaged("a record that is none");

fn damaged(_: PoolError) -> StreamError {
    DAMAGED
}

fn text(from: &mut Reader<'_>) -> Result<String, PoolError> {
    let bytes = from.string()?;
    String::from_utf8(bytes.to_vec()).map_err(|_| PoolError::Format(Damage::Structure("a name that is not UTF-8")))
}

fn many<T>(
    from: &mut Reader<'_>,
    mut one: impl FnMut(&mut Reader<'_>) -> Result<T, PoolError>,
) -> Result<Vec<T>, PoolError> {
    let count = from.varint()?;
    if count > MANY_MOST {
        return Err(PoolError::Format(Damage::Structure("too many of something in a record")));
    }
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(one(from)?);
    }
    Ok(all)
}

fn property(from: &mut Reader<'_>) -> Result<SentProperty, PoolError> {
    Ok(SentProperty { name: text(from)?, value: text(from)? })
}

fn put_properties(to: &mut Writer, properties: &[SentProperty]) {
    to.varint(properties.len() as u64);
    for SentProperty { name, value } in properties {
        to.string(name.as_bytes());
        to.string(value.as_bytes());
    }
}

impl Record {
    /// Encodes a record: its kind, and its payload.
    #[must_use]
    pub fn encode(&self) -> (u8, Vec<u8>) {
        let mut to = Writer::default();
        let kind = match self {
            Self::Stream(head) => {
                to.string(head.root.as_bytes());
                to.u64(head.pool);
                to.u8(u8::from(head.package));
                to.varint(head.there.len() as u64);
                for (filesystem, snapshot, guid) in &head.there {
                    to.string(filesystem.as_bytes());
                    to.string(snapshot.as_bytes());
                    to.u64(*guid);
                }
                STREAM
            }
            Self::Snapshot(head) => {
                to.string(head.below.as_bytes());
                to.string(head.name.as_bytes());
                to.u64(head.guid);
                to.u64(head.created as u64);
                to.u64(head.from);
                to.u8(u8::from(head.clone) | u8::from(head.stored) << 1 | u8::from(head.lists) << 2);
                to.string(&head.after);
                put_properties(&mut to, &head.spelling);
                put_properties(&mut to, &head.properties);
                put_properties(&mut to, &head.of_snapshot);
                to.varint(head.holds.len() as u64);
                head.holds.iter().for_each(|tag| to.string(tag.as_bytes()));
                SNAPSHOT
            }
            Self::Rows(rows) => {
                to.bytes(rows);
                ROWS
            }
            Self::SnapshotEnd(guid) => {
                to.u64(*guid);
                SNAPSHOT_END
            }
            Self::End => END,
        };
        (kind, to.finish())
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// [`StreamError::Damaged`] for invalid bytes.
    pub fn decode(kind: u8, payload: Vec<u8>) -> Result<Self, StreamError> {
        if kind == ROWS {
            return Ok(Self::Rows(payload));
        }
        let mut from = Reader::new(&payload);
        let record = Self::read(kind, &mut from).map_err(damaged)?;
        if from.is_empty() { Ok(record) } else { Err(DAMAGED) }
    }

    fn read(kind: u8, from: &mut Reader<'_>) -> Result<Self, PoolError> {
        Ok(match kind {
            STREAM => Self::Stream(StreamHead {
                root: text(from)?,
                pool: from.u64()?,
                package: from.u8()? != 0,
                there: many(from, |from| Ok((text(from)?, text(from)?, from.u64()?)))?,
            }),
            SNAPSHOT => {
                let (below, name) = (text(from)?, text(from)?);
                let (guid, created, origin) = (from.u64()?, from.u64()? as i64, from.u64()?);
                let flags = from.u8()?;
                Self::Snapshot(SnapshotHead {
                    below,
                    name,
                    guid,
                    created,
                    from: origin,
                    clone: flags & 1 != 0,
                    stored: flags & 2 != 0,
                    lists: flags & 4 != 0,
                    after: from.string()?.to_vec(),
                    spelling: many(from, property)?,
                    properties: many(from, property)?,
                    of_snapshot: many(from, property)?,
                    holds: many(from, text)?,
                })
            }
            SNAPSHOT_END => Self::SnapshotEnd(from.u64()?),
            END => Self::End,
            _ => return Err(PoolError::Format(Damage::Structure("an unknown kind of record"))),
        })
    }
}

/// The content of a frame in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentFrame<'a> {
    /// Compression of the bytes.
    pub compression: Compression,
    /// Kind of the checksum.
    pub checksum_kind: ChecksumKind,
    /// Checksum of the content.
    pub checksum: [u8; 16],
    /// Length of the content, bytes.
    pub logical: u32,
    /// The content, or its compressed form as it was stored.
    pub bytes: &'a [u8],
}

/// A change of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOp<'a> {
    /// The row gets this value.
    Put {
        /// Its key.
        key: &'a [u8],
        /// Its value.
        value: &'a [u8],
    },
    /// The row is removed.
    Gone {
        /// Its key.
        key: &'a [u8],
    },
    /// There are no rows in a range of keys.
    Nothing {
        /// First key of the range.
        key: &'a [u8],
        /// End of the range, exclusive; empty: to the end.
        until: &'a [u8],
    },
    /// The row references this frame.
    Framed {
        /// Its key.
        key: &'a [u8],
        /// The pieces of a patch, as in its row; otherwise empty.
        pieces: &'a [u8],
        /// The frame.
        frame: SentFrame<'a>,
    },
}

const PUT: u8 = 1;
const GONE: u8 = 2;
const FRAMED: u8 = 3;
const NOTHING: u8 = 4;

impl<'a> RowOp<'a> {
    /// The row's key.
    #[must_use]
    pub fn key(&self) -> &'a [u8] {
        match self {
            Self::Put { key, .. } | Self::Gone { key } | Self::Nothing { key, .. } | Self::Framed { key, .. } => key,
        }
    }

    /// Appends it.
    pub fn encode(&self, to: &mut Writer) {
        match self {
            Self::Put { key, value } => {
                to.u8(PUT);
                to.string(key);
                to.string(value);
            }
            Self::Gone { key } => {
                to.u8(GONE);
                to.string(key);
            }
            Self::Nothing { key, until } => {
                to.u8(NOTHING);
                to.string(key);
                to.string(until);
            }
            Self::Framed { key, pieces, frame } => {
                to.u8(FRAMED);
                to.string(key);
                to.string(pieces);
                to.u8(frame.compression as u8);
                to.u8(frame.checksum_kind as u8);
                to.bytes(&frame.checksum);
                to.varint(frame.logical.into());
                to.string(frame.bytes);
            }
        }
    }

    fn read(from: &mut Reader<'a>) -> Result<Self, PoolError> {
        let tag = from.u8()?;
        let key = from.string()?;
        let op = match tag {
            PUT => Self::Put { key, value: from.string()? },
            GONE => Self::Gone { key },
            NOTHING => Self::Nothing { key, until: from.string()? },
            FRAMED => {
                let pieces = from.string()?;
                let (compression, checksum_kind) = (from.u8()?.try_into()?, from.u8()?.try_into()?);
                if checksum_kind == ChecksumKind::Sealed {
                    return Err(PoolError::Format(Damage::Structure("a sealed frame in a stream of content")));
                }
                let checksum = from.array()?;
                let logical = u32::try_from(from.varint()?)
                    .map_err(|_| PoolError::Format(Damage::Structure("the length of a frame")))?;
                let frame = SentFrame { compression, checksum_kind, checksum, logical, bytes: from.string()? };
                Self::Framed { key, pieces, frame }
            }
            _ => return Err(PoolError::Format(Damage::Structure("an unknown change of a row"))),
        };
        let fits = match op {
            Self::Put { key, value } => key.len() + value.len() <= ROW_MOST,
            Self::Gone { key } => key.len() <= ROW_MOST,
            Self::Nothing { key, until } => {
                key.len() <= ROW_MOST && until.len() <= ROW_MOST && (until.is_empty() || key < until)
            }
            Self::Framed { key, pieces, .. } => key.len() + pieces.len() <= ROW_MOST,
        };
        if fits { Ok(op) } else { Err(PoolError::Format(Damage::Structure("a row that is too long"))) }
    }
}

/// Decodes a record of rows, in the order of their keys.
///
/// # Errors
/// [`StreamError::Damaged`] for invalid bytes, and for keys out of order.
pub fn rows(payload: &[u8]) -> Result<Vec<RowOp<'_>>, StreamError> {
    let mut from = Reader::new(payload);
    let mut ops: Vec<RowOp<'_>> = Vec::new();
    while !from.is_empty() {
        let op = RowOp::read(&mut from).map_err(damaged)?;
        let in_order = ops.last().is_none_or(|last| match last {
            RowOp::Nothing { until, .. } => !until.is_empty() && *until <= op.key(),
            last => last.key() < op.key(),
        });
        if !in_order {
            return Err(StreamError::Damaged("rows out of order"));
        }
        if ops.len() == ROWS_MOST {
            return Err(StreamError::Damaged("a record with too many rows"));
        }
        ops.push(op);
    }
    Ok(ops)
}

/// Whether rows with this key are sent: usage of owners is counted by the receiver, and the position
/// of another stream is no part of a snapshot.
#[must_use]
pub fn travels(key: &[u8]) -> bool {
    !matches!(key.first(), None | Some(&keys::OWNER_USE | &keys::RECEIVED | &keys::RECOUNTED))
}
