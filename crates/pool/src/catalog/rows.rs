//! Keys and rows of the catalog, byte by byte.

use std::ops::Range;

use crate::codec::{Reader, Writer};
use crate::deadlist::ListId;
use crate::error::{Damage, PoolError};
use crate::names::check_part;
use crate::pointer::{Pointer, Txg};
use crate::space::Usage;

/// Kind byte of the catalog's header.
pub const HEAD: u8 = 0x10;
/// Kind byte of datasets.
pub const DATASET: u8 = 0x11;
/// Kind byte of children by name.
pub const CHILD: u8 = 0x12;
/// Kind byte of properties.
pub const PROPERTY: u8 = 0x13;
/// Kind byte of snapshots.
pub const SNAPSHOT: u8 = 0x14;
/// Kind byte of snapshots by name.
pub const SNAPSHOT_NAME: u8 = 0x15;
/// Kind byte of bookmarks.
pub const BOOKMARK: u8 = 0x16;
/// Kind byte of holds.
pub const HOLD: u8 = 0x17;
/// Kind byte of clones.
pub const CLONE: u8 = 0x18;
/// Kind byte of the history.
pub const HISTORY: u8 = 0x19;
/// Kind byte of roots whose frames are being freed.
pub const DOOMED: u8 = 0x1a;
/// Kind byte of received properties; they are effective where no local value is set.
pub const RECEIVED: u8 = 0x1b;
/// Kind byte of frames that several rows reference.
pub const SHARED: u8 = 0x1c;
/// Kind byte of properties set on snapshots.
pub const SNAPSHOT_PROPERTY: u8 = 0x1d;

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// Builds a key: the kind, big-endian numbers, a name.
#[must_use]
pub fn key(kind: u8, numbers: &[u64], name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + numbers.len() * 8 + name.len());
    key.push(kind);
    for number in numbers {
        key.extend_from_slice(&number.to_be_bytes());
    }
    key.extend_from_slice(name);
    key
}

/// Range of all keys with this prefix.
#[must_use]
pub fn below(kind: u8, numbers: &[u64]) -> Range<Vec<u8>> {
    let start = key(kind, numbers, b"");
    let end = crate::tree::after_prefix(&start).unwrap_or_default();
    start..end
}

/// Splits a key with `N` numbers into the numbers and the name.
///
/// # Errors
/// [`PoolError::Format`] for a shorter key.
pub fn parts<const N: usize>(bytes: &[u8]) -> Result<([u64; N], &[u8]), PoolError> {
    let mut from = Reader::new(bytes.get(1..).unwrap_or_default());
    let mut numbers = [0; N];
    for number in &mut numbers {
        *number = u64::from_be_bytes(from.array()?);
    }
    Ok((numbers, from.rest()))
}

/// Decodes a value that fills the whole row.
fn whole<T>(bytes: &[u8], read: impl FnOnce(&mut Reader<'_>) -> Result<T, PoolError>) -> Result<T, PoolError> {
    let mut reader = Reader::new(bytes);
    let value = read(&mut reader)?;
    if reader.is_empty() { Ok(value) } else { Err(damaged("bytes after the end of a row of the catalog")) }
}

fn put_root(to: &mut Writer, root: Option<&Pointer>) {
    to.u8(root.is_some().into());
    if let Some(root) = root {
        root.encode(to);
    }
}

fn take_root(from: &mut Reader<'_>) -> Result<Option<Pointer>, PoolError> {
    match from.u8()? {
        0 => Ok(None),
        1 => Pointer::decode(from).map(Some),
        _ => Err(damaged("the root of a tree")),
    }
}

/// Name of the temporary dataset that receives an incremental stream, below the destination; users
/// cannot choose it.
pub const PARTIAL: &str = "%recv";

/// Longest name of a property and longest tag of a hold, bytes.
const LABEL_MOST: usize = 256;

/// Decodes the last component of a file system's name, or the part after `@` or `#`. Directories
/// get these names, so an invalid one is damage: an image may come from anywhere.
///
/// # Errors
/// [`PoolError::Format`] with `what`.
pub fn name_part(bytes: &[u8], what: &'static str) -> Result<String, PoolError> {
    let name = std::str::from_utf8(bytes).map_err(|_| damaged(what))?;
    match check_part(name) {
        Ok(()) => Ok(name.to_owned()),
        Err(_) => Err(damaged(what)),
    }
}

/// Decodes the name of a property, or the tag of a hold: text of one line.
///
/// # Errors
/// [`PoolError::Format`] with `what`.
pub fn label(bytes: &[u8], what: &'static str) -> Result<String, PoolError> {
    let text = std::str::from_utf8(bytes).map_err(|_| damaged(what))?;
    if text.is_empty() || text.len() > LABEL_MOST || text.chars().any(char::is_control) {
        return Err(damaged(what));
    }
    Ok(text.to_owned())
}

fn filesystem_name(from: &mut Reader<'_>) -> Result<String, PoolError> {
    match from.string()? {
        name if name == PARTIAL.as_bytes() => Ok(PARTIAL.to_owned()),
        name => name_part(name, "the name of a file system"),
    }
}

/// The catalog's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolHead {
    /// The next dataset's number.
    pub next: u64,
    /// The root dataset, which has the pool's name.
    pub root: u64,
    /// The deadlist of frames that are being freed.
    pub freeing: ListId,
    /// Number of the next line of the history.
    pub history: u64,
}

impl PoolHead {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.varint(self.next);
        to.varint(self.root);
        to.varint(self.freeing.0);
        to.varint(self.history);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes, as for all rows here.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            Ok(Self {
                next: from.varint()?,
                root: from.varint()?,
                freeing: ListId(from.varint()?),
                history: from.varint()?,
            })
        })
    }
}

/// A dataset: a writable file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetRow {
    /// Number of the parent dataset; 0 for the root dataset.
    pub parent: u64,
    /// Last component of its name.
    pub name: String,
    /// Its GUID.
    pub guid: u64,
    /// The txg that created it.
    pub created: Txg,
    /// Time of its creation, seconds since 1970.
    pub created_at: i64,
    /// The root of its tree as of the last commit.
    pub root: Option<Pointer>,
    /// Its deadlist.
    pub list: ListId,
    /// The space that it uses.
    pub usage: Usage,
    /// Its origin snapshot: dataset, txg.
    pub origin: Option<(u64, Txg)>,
    /// Txg of the newest snapshot that it descends from, the origin included; 0 if there is none.
    pub newest: Txg,
}

impl DatasetRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.varint(self.parent);
        to.string(self.name.as_bytes());
        to.u64(self.guid);
        to.varint(self.created.0);
        to.u64(self.created_at as u64);
        put_root(&mut to, self.root.as_ref());
        to.varint(self.list.0);
        let Usage { dataset, snapshots, referenced, unique, logical_used, logical_referenced } = self.usage;
        for part in [dataset, snapshots, referenced, unique, logical_used, logical_referenced] {
            to.varint(part);
        }
        let (dataset, txg) = self.origin.unwrap_or_default();
        to.varint(dataset);
        to.varint(txg.0);
        to.varint(self.newest.0);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            let (parent, name, guid) = (from.varint()?, filesystem_name(from)?, from.u64()?);
            let (created, created_at) = (Txg(from.varint()?), from.u64()? as i64);
            let (root, list) = (take_root(from)?, ListId(from.varint()?));
            let usage = Usage {
                dataset: from.varint()?,
                snapshots: from.varint()?,
                referenced: from.varint()?,
                unique: from.varint()?,
                logical_used: from.varint()?,
                logical_referenced: from.varint()?,
            };
            let (origin, origin_txg, newest) = (from.varint()?, Txg(from.varint()?), Txg(from.varint()?));
            let origin = match (origin, origin_txg) {
                (0, Txg(0)) => None,
                (0, _) | (_, Txg(0)) => return Err(damaged("the origin of a dataset")),
                origin => Some(origin),
            };
            Ok(Self { parent, name, guid, created, created_at, root, list, usage, origin, newest })
        })
    }
}

/// A snapshot. Its key has the txg whose commit took it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRow {
    /// Its name after the `@`.
    pub name: String,
    /// Its GUID, which is kept when it is sent.
    pub guid: u64,
    /// Time of the snapshot, seconds since 1970.
    pub created_at: i64,
    /// Root of its tree.
    pub root: Option<Pointer>,
    /// Its deadlist: frames that the previous snapshot references and this one does not.
    pub list: ListId,
    /// Referenced space, charged bytes.
    pub referenced: u64,
    /// Referenced space before compression, bytes.
    pub logical: u64,
    /// Destroyed as soon as there are no clones and no holds any more.
    pub deferred: bool,
    /// Number of holds.
    pub holds: u64,
    /// Number of clones.
    pub clones: u64,
}

impl SnapshotRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.string(self.name.as_bytes());
        to.u64(self.guid);
        to.u64(self.created_at as u64);
        put_root(&mut to, self.root.as_ref());
        to.varint(self.list.0);
        to.varint(self.referenced);
        to.varint(self.logical);
        to.u8(self.deferred.into());
        to.varint(self.holds);
        to.varint(self.clones);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            Ok(Self {
                name: name_part(from.string()?, "the name of a snapshot")?,
                guid: from.u64()?,
                created_at: from.u64()? as i64,
                root: take_root(from)?,
                list: ListId(from.varint()?),
                referenced: from.varint()?,
                logical: from.varint()?,
                deferred: match from.u8()? {
                    0 => false,
                    1 => true,
                    _ => return Err(damaged("the state of a snapshot")),
                },
                holds: from.varint()?,
                clones: from.varint()?,
            })
        })
    }
}

/// A bookmark: the part of a snapshot that an incremental base needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookmarkRow {
    /// The snapshot's txg.
    pub txg: Txg,
    /// The snapshot's GUID.
    pub guid: u64,
    /// Time of the snapshot, seconds since 1970.
    pub created_at: i64,
}

impl BookmarkRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.varint(self.txg.0);
        to.u64(self.guid);
        to.u64(self.created_at as u64);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| Ok(Self { txg: Txg(from.varint()?), guid: from.u64()?, created_at: from.u64()? as i64 }))
    }
}

/// Source of a stored property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PropertySource {
    /// Set locally.
    Local = 1,
    /// Received with a stream.
    Received = 2,
    /// A received value is masked: the value is inherited.
    Masked = 3,
}

/// A stored property: inherited and default values have no row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PropertyRow {
    /// Its source.
    pub source: PropertySource,
    /// Its value, as `get -p` shows it.
    pub value: String,
}

impl PropertyRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u8(self.source as u8);
        to.bytes(self.value.as_bytes());
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let (source, value) = bytes.split_first().ok_or_else(|| damaged("an empty property"))?;
        let source = match source {
            1 => PropertySource::Local,
            2 => PropertySource::Received,
            3 => PropertySource::Masked,
            _ => return Err(damaged("the source of a property")),
        };
        let value = std::str::from_utf8(value).map_err(|_| damaged("a property that is no text"))?;
        Ok(Self { source, value: value.to_owned() })
    }
}

/// A frame that several rows reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRow {
    /// Number of rows that reference it besides the first.
    pub more: u64,
    /// Space that it is charged, bytes.
    pub charged: u64,
}

impl SharedRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.varint(self.more);
        to.varint(self.charged);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let row = whole(bytes, |from| Ok(Self { more: from.varint()?, charged: from.varint()? }))?;
        if row.more == 0 { Err(damaged("a shared frame that nobody shares")) } else { Ok(row) }
    }
}

/// Root of a dropped tree: its frames are freed step by step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoomedRow {
    /// The root.
    pub root: Pointer,
    /// Frames born later are freed; older ones belong to a snapshot.
    pub since: Txg,
    /// First key whose frames were not freed yet.
    pub from: Vec<u8>,
}

impl DoomedRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        self.root.encode(&mut to);
        to.varint(self.since.0);
        to.string(&self.from);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            Ok(Self { root: Pointer::decode(from)?, since: Txg(from.varint()?), from: from.string()?.to_vec() })
        })
    }
}

/// A line of the pool's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryRow {
    /// Time, seconds since 1970.
    pub at: i64,
    /// The txg in which it took effect.
    pub txg: Txg,
    /// The uid of the user who requested it.
    pub uid: u32,
    /// An action of the pool itself.
    pub internal: bool,
    /// Host name.
    pub host: String,
    /// The command line, or the action.
    pub text: String,
}

impl HistoryRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u64(self.at as u64);
        to.varint(self.txg.0);
        to.u32(self.uid);
        to.u8(self.internal.into());
        to.string(self.host.as_bytes());
        to.bytes(self.text.as_bytes());
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(bytes);
        let text = |bytes: &[u8]| {
            std::str::from_utf8(bytes).map(ToOwned::to_owned).map_err(|_| damaged("a history that is no text"))
        };
        Ok(Self {
            at: from.u64()? as i64,
            txg: Txg(from.varint()?),
            uid: from.u32()?,
            internal: match from.u8()? {
                0 => false,
                1 => true,
                _ => return Err(damaged("a line of the history")),
            },
            host: text(from.string()?)?,
            text: text(from.rest())?,
        })
    }
}
