//! The records of a stream of snapshots, and why a stream is refused.
//!
//! Called by the reader and the writer of streams, and by the engine, which makes rows of them.
//! Invariants: every decoder takes any bytes and gives a record or an error; what is encoded is
//! decoded to the same record.

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
/// What a stream begins with: magic, version, four bytes 0.
pub const PREAMBLE: usize = 16;
/// What is in front of the payload of a record: kind, three bytes 0, length.
pub const HEADER: usize = 8;
/// What follows it: the checksum of all bytes from the beginning of the stream on.
pub const CHECKSUM: usize = 8;
/// The longest payload, bytes: a frame of 16 MiB with its row, and what came before it.
pub const LONGEST: usize = (16 << 20) + (1 << 20);
/// The most rows of a record: what a receiver holds of one is not much more than its bytes.
pub const ROWS_MOST: usize = 8192;
/// The most of anything else in a record.
const MANY_MOST: u64 = 1 << 19;
/// The longest key and row of a tree, bytes.
const ROW_MOST: usize = 16 << 10;

/// Why a stream cannot be received or shown.
#[derive(Clone, Debug)]
pub enum StreamError {
    /// It ends in the middle.
    Cut,
    /// It cannot be read, or nobody takes it.
    Io(Arc<io::Error>),
    /// It is none of ours; the text says what it seems to be.
    Foreign(&'static str),
    /// It is of a version that this program does not know.
    Version(u32),
    /// It is not as it was sent.
    Damaged(&'static str),
    /// The engine's reason.
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

/// What the whole stream is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamHead {
    /// The file system that was sent, by its whole name.
    pub root: String,
    /// The guid of the pool that it comes from.
    pub pool: u64,
    /// With everything below it: what the receiver has besides may be meant to go.
    pub package: bool,
    /// The snapshots that the sender has, where it is a package: the name of the file system below
    /// the root, that of the snapshot, its guid.
    pub there: Vec<(String, String, u64)>,
}

/// A property that travels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentProperty {
    /// As it is stored.
    pub name: String,
    /// As it is stored.
    pub value: String,
}

/// A snapshot that follows: its rows, or how they differ from those of another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotHead {
    /// The file system by its name below the root of the stream: nothing, or `/a/b`.
    pub below: String,
    /// The whole name where it was sent.
    pub name: String,
    /// Its guid.
    pub guid: u64,
    /// When it was taken, seconds since 1970.
    pub created: i64,
    /// The guid of the snapshot that it is the difference to; 0: of none.
    pub from: u64,
    /// That one is of another file system: this is a clone of it.
    pub clone: bool,
    /// Frames come as they are stored.
    pub stored: bool,
    /// Access control lists count where it comes from.
    pub lists: bool,
    /// The rules for names of the file system, as properties.
    pub spelling: Vec<SentProperty>,
    /// What comes is what follows this key; empty: all of it.
    pub after: Vec<u8>,
    /// Properties of the file system.
    pub properties: Vec<SentProperty>,
    /// Properties of the snapshot.
    pub of_snapshot: Vec<SentProperty>,
    /// The tags that hold it.
    pub holds: Vec<String>,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The first one.
    Stream(StreamHead),
    /// A snapshot begins.
    Snapshot(SnapshotHead),
    /// Rows of it, as [`rows`] reads them.
    Rows(Vec<u8>),
    /// All rows of the snapshot with this guid were there.
    SnapshotEnd(u64),
    /// The last one.
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
    /// Its kind as a byte, and its payload.
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

    /// Reads a record.
    ///
    /// # Errors
    /// [`StreamError::Damaged`] for bytes that are none.
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

/// The content of a frame on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentFrame<'a> {
    /// How the bytes decompress to the content.
    pub compression: Compression,
    /// What the checksum is.
    pub checksum_kind: ChecksumKind,
    /// Checksum of the content.
    pub checksum: [u8; 16],
    /// Length of the content, bytes.
    pub logical: u32,
    /// The content, or as it was stored.
    pub bytes: &'a [u8],
}

/// What becomes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOp<'a> {
    /// It becomes this.
    Put {
        /// Its key.
        key: &'a [u8],
        /// Its value.
        value: &'a [u8],
    },
    /// It goes.
    Gone {
        /// Its key.
        key: &'a [u8],
    },
    /// There are no rows from it on to another key.
    Nothing {
        /// The first key.
        key: &'a [u8],
        /// There may be one here; empty: none to the end.
        until: &'a [u8],
    },
    /// It becomes what names this frame.
    Framed {
        /// Its key.
        key: &'a [u8],
        /// Where the parts of a patch belong, as its row has them; otherwise nothing.
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

/// What a record of rows says, in the order of their keys.
///
/// # Errors
/// [`StreamError::Damaged`] for bytes that are none, and for keys that are not in their order.
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

/// Whether rows with this key travel: what owners use is counted where they arrive, and how far
/// another stream had come is no part of a snapshot.
#[must_use]
pub fn travels(key: &[u8]) -> bool {
    !matches!(key.first(), None | Some(&keys::OWNER_USE | &keys::RECEIVED | &keys::RECOUNTED))
}
