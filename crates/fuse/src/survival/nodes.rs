//! Which file each node id stands for: one record for each slot of the inode table.
//!
//! Written by `inodes.rs` under the lock of the slot's shard. A record is valid while its first word
//! is the node id. A change of place is noted apart first, in a record of its own (`MOVE`), from which
//! it is made again where the process died in the middle of it.

use super::{
    ENDS_AT, HEADER, Head, MOVE, NODES_AT, Survival, bytes, get, keep_order, publish, put, put_bytes, retract,
};
use nacre_vfs::{FileId, Kind};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// The most files of one mount that can be noted.
const MOST: usize = 1 << 26;
/// Words of a record, with the first 72 bytes of its name; and of the rest of the name, elsewhere.
const RECORD: usize = 16;
const END: usize = 24;
pub(super) const WORDS: usize = MOST * RECORD;
pub(super) const END_WORDS: usize = MOST * END;

const NODEID: usize = 0;
const PARENT: usize = 1;
const FS: usize = 2;
const INO: usize = 3;
const GENERATION: usize = 4;
const LOOKUPS: usize = 5;
/// Kind (8 bits), whether it is found by its identity no more (1), length of the name.
const SHAPE: usize = 6;
const NAME: usize = 7;
const NAME_WORDS: usize = RECORD - NAME;

/// A place in a directory, by the directory's node id; no name where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodePlace<'a> {
    pub parent: u64,
    pub name: &'a [u8],
}

/// What is noted of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeRecord {
    pub nodeid: u64,
    pub parent: u64,
    pub name: Vec<u8>,
    pub id: FileId,
    pub kind: Kind,
    pub lookups: u64,
    /// Another file has its identity now.
    pub unlisted: bool,
}

/// The records of all nodes.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    memory: Survival,
    /// Held while a place changes.
    moving: Arc<Mutex<()>>,
}

impl Nodes {
    pub fn new(memory: &Survival) -> Nodes {
        Nodes { memory: memory.clone(), moving: Arc::default() }
    }

    /// Whether there are records of another process.
    pub fn resumes(&self) -> bool {
        self.memory.resumes()
    }

    /// The table's id of the root.
    pub fn root(&self) -> u64 {
        self.memory.head(Head::Root)
    }

    pub fn set_root(&self, nodeid: u64) {
        self.memory.set(Head::Root, nodeid);
    }

    /// The counter of reuse of a shard.
    pub fn reuse(&self, shard: usize) -> u32 {
        get(self.memory.part(0, HEADER), Head::Reuse as usize + shard) as u32
    }

    /// A node that the kernel is about to be told of, looked up once; at the place `at` of the records.
    pub fn made(&self, at: usize, nodeid: u64, place: NodePlace<'_>, id: FileId, kind: Kind) {
        let Some(record) = self.record(at) else {
            return self.memory.give_up("it has too many files in use");
        };
        put(self.memory.part(0, HEADER), Head::Reuse as usize + (nodeid as usize & 15), nodeid >> 32);
        put(record, FS, id.fs);
        put(record, INO, id.ino);
        put(record, GENERATION, id.generation);
        put(record, LOOKUPS, 1);
        self.put_place(at, place, shape(kind, false));
        publish(record, NODEID, nodeid);
        self.memory.raise(Head::NodesEnd, at as u64 + 1);
    }

    /// It has been looked up so many times.
    pub fn counted(&self, at: usize, lookups: u64) {
        if let Some(record) = self.record(at) {
            put(record, LOOKUPS, lookups);
        }
    }

    /// The kernel has forgotten it.
    pub fn forgotten(&self, at: usize) {
        if let Some(record) = self.record(at) {
            retract(record, NODEID);
        }
    }

    /// Another file has its identity.
    pub fn unlisted(&self, at: usize) {
        if let Some(record) = self.record(at) {
            put(record, SHAPE, get(record, SHAPE) | 1 << 8);
        }
    }

    /// None of so many records from a place on is needed any more.
    pub fn given_back(&self, at: usize, count: usize) {
        if at + count <= MOST {
            self.memory.shared.clear(NODES_AT + at * RECORD, count * RECORD);
            self.memory.shared.clear(ENDS_AT + at * END, count * END);
        }
    }

    /// It was found at a place, where it may have been before.
    pub fn found(&self, at: usize, nodeid: u64, place: NodePlace<'_>) {
        let Some(record) = self.record(at) else { return };
        if get(record, PARENT) == place.parent && self.has_name(at, record, place.name) {
            return;
        }
        let _moving = self.moving.lock();
        let noted = self.memory.part(HEADER, MOVE);
        put(noted, 1, at as u64);
        put(noted, 2, place.parent);
        put(noted, 3, place.name.len() as u64);
        put_bytes(noted.get(4..).unwrap_or_default(), place.name);
        publish(noted, 0, nodeid);
        keep_order();
        self.put_place(at, place, get(record, SHAPE));
        keep_order();
        retract(noted, 0);
    }

    /// Makes a change of place that the last process was in the middle of.
    pub fn end_move(&self) {
        let noted = self.memory.part(HEADER, MOVE);
        let (nodeid, at) = (get(noted, 0), get(noted, 1) as usize);
        if nodeid == 0 {
            return;
        }
        if let Some(record) = self.record(at).filter(|record| get(record, NODEID) == nodeid) {
            let name = bytes(noted.get(4..).unwrap_or_default(), (get(noted, 3) as usize).min(255));
            self.put_place(at, NodePlace { parent: get(noted, 2), name: &name }, get(record, SHAPE));
        }
        keep_order();
        retract(noted, 0);
    }

    /// What is noted at a place.
    pub fn read(&self, at: usize) -> Option<NodeRecord> {
        let record = self.record(at)?;
        let nodeid = Some(get(record, NODEID)).filter(|nodeid| *nodeid != 0)?;
        let shape = get(record, SHAPE);
        let length = (shape >> 16) as usize;
        let mut name = bytes(record.get(NAME..)?, length.min(NAME_WORDS * 8));
        name.extend(bytes(self.end(at)?, length - name.len()));
        Some(NodeRecord {
            nodeid,
            parent: get(record, PARENT),
            name,
            id: FileId { fs: get(record, FS), ino: get(record, INO), generation: get(record, GENERATION) },
            kind: Kind::from_mode((shape as u32 & 0xff) << 12)?,
            lookups: get(record, LOOKUPS),
            unlisted: shape & 1 << 8 != 0,
        })
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (usize, NodeRecord)> + '_ {
        let end = (self.memory.head(Head::NodesEnd) as usize).min(MOST);
        (0..end).filter_map(|at| Some((at, self.read(at)?)))
    }

    fn put_place(&self, at: usize, place: NodePlace<'_>, shape: u64) {
        let (Some(record), Some(end)) = (self.record(at), self.end(at)) else { return };
        put(record, PARENT, place.parent);
        put(record, SHAPE, shape & 0xffff | (place.name.len() as u64) << 16);
        let (first, rest) = place.name.split_at(place.name.len().min(NAME_WORDS * 8));
        put_bytes(record.get(NAME..).unwrap_or_default(), first);
        put_bytes(end, rest);
    }

    fn has_name(&self, at: usize, record: &[AtomicU64], name: &[u8]) -> bool {
        let words = record.get(NAME..).unwrap_or_default().iter().chain(self.end(at).unwrap_or_default());
        get(record, SHAPE) >> 16 == name.len() as u64
            && words.zip(name.chunks(8)).all(|(word, eight)| word.load(Relaxed).to_ne_bytes().starts_with(eight))
    }

    fn record(&self, at: usize) -> Option<&[AtomicU64]> {
        if at >= MOST {
            return None;
        }
        // There are none in a small memory.
        Some(self.memory.part(NODES_AT + at * RECORD, RECORD)).filter(|record| !record.is_empty())
    }

    fn end(&self, at: usize) -> Option<&[AtomicU64]> {
        (at < MOST).then(|| self.memory.part(ENDS_AT + at * END, END))
    }
}

fn shape(kind: Kind, unlisted: bool) -> u64 {
    u64::from(kind.d_type()) | u64::from(unlisted) << 8
}
