//! Keys and rows of the catalog, byte by byte.

use std::ops::Range;

use crate::codec::{Reader, Writer};
use crate::deadlist::ListId;
use crate::error::{Damage, PoolError};
use crate::names::check_part;
use crate::pointer::{Pointer, Txg};
use crate::space::Usage;

/// Kind byte of the head.
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
/// Kind byte of properties that were received; they hold where nothing was set.
pub const RECEIVED: u8 = 0x1b;
/// Kind byte of frames that several rows name.
pub const SHARED: u8 = 0x1c;
/// Kind byte of properties that snapshots have for themselves.
pub const SNAPSHOT_PROPERTY: u8 = 0x1d;

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// A key: the kind, big-endian numbers, a name.
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

/// All keys that begin so.
#[must_use]
pub fn below(kind: u8, numbers: &[u64]) -> Range<Vec<u8>> {
    let start = key(kind, numbers, b"");
    let end = crate::tree::after_prefix(&start).unwrap_or_default();
    start..end
}

/// The numbers and the name of a key with `N` numbers.
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

/// A value that `read` takes from the whole of a row.
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

/// What a half received difference is called below the file system that it is for; users have no
/// such names.
pub const PARTIAL: &str = "%recv";

/// The longest name of a property and the longest tag of a hold, bytes.
const LABEL_MOST: usize = 256;

/// The last part of the name of a file system, or what follows the `@` or `#`. Directories are made of
/// names, so one that nobody could have given is damage: an image may come from anywhere.
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

/// The name of a property, or the tag of a hold: text of one line.
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

/// What the catalog itself needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolHead {
    /// The next dataset's number.
    pub next: u64,
    /// The dataset that has the pool's name.
    pub root: u64,
    /// The deadlist of what is being freed.
    pub freeing: ListId,
    /// The next number of the history.
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
    /// [`PoolError::Format`] for other bytes, as for all rows here.
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

/// A dataset: a file system that can be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetRow {
    /// The dataset above; 0 for the pool's root.
    pub parent: u64,
    /// The last part of its name.
    pub name: String,
    /// Its number in the world.
    pub guid: u64,
    /// The txg that made it.
    pub created: Txg,
    /// When that was, seconds since 1970.
    pub created_at: i64,
    /// The root of its tree as of the last commit.
    pub root: Option<Pointer>,
    /// Its deadlist.
    pub list: ListId,
    /// What it uses.
    pub usage: Usage,
    /// The snapshot that it was cloned from: dataset, txg.
    pub origin: Option<(u64, Txg)>,
    /// The newest snapshot that it descends from, the origin included; 0 where there is none.
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
    /// Its name behind the `@`.
    pub name: String,
    /// Its number in the world; stays when it is sent.
    pub guid: u64,
    /// When it was taken, seconds since 1970.
    pub created_at: i64,
    /// The root of the tree.
    pub root: Option<Pointer>,
    /// The deadlist: what the snapshot before references and this one does not.
    pub list: ListId,
    /// What it references, charged bytes.
    pub referenced: u64,
    /// The same before compression, bytes.
    pub logical: u64,
    /// It goes as soon as no clone and no hold is left.
    pub deferred: bool,
    /// How many holds there are.
    pub holds: u64,
    /// How many clones there are.
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

/// What stays of a snapshot so that increments can begin there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookmarkRow {
    /// The snapshot's txg.
    pub txg: Txg,
    /// The snapshot's number in the world.
    pub guid: u64,
    /// When the snapshot was taken, seconds since 1970.
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

/// Where a stored property comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PropertySource {
    /// It was set here.
    Local = 1,
    /// It was received with a stream.
    Received = 2,
    /// Here it is as if nothing had been received: the value is inherited.
    Masked = 3,
}

/// A property as it is stored: what is inherited or a default has no row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PropertyRow {
    /// Where it comes from.
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

/// A frame that several rows name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRow {
    /// How many rows name it beside the first.
    pub more: u64,
    /// What it is charged, bytes.
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

/// The root of a tree that nobody uses any more: its frames are freed step by step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoomedRow {
    /// The root.
    pub root: Pointer,
    /// What was born later is freed; the rest is a snapshot's.
    pub since: Txg,
    /// The first key that was not freed yet.
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
    /// When, seconds since 1970.
    pub at: i64,
    /// The txg in which it took effect.
    pub txg: Txg,
    /// Who asked for it.
    pub uid: u32,
    /// Something that the pool did itself.
    pub internal: bool,
    /// On which machine.
    pub host: String,
    /// The command line, or what was done.
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
