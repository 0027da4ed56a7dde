//! Records of nodes: which file each node id stands for, one record per slot of the inode table.
//!
//! Written by `inodes.rs` under the lock of the slot's shard. A record is valid while its first word is the node id.
//! A change of location is first written to a journal record of its own (`MOVE`), from which it is completed where
//! the process died in the middle of it.

use super::{
    ENDS_AT, HEADER, Head, MOVE, NODES_AT, Survival, bytes, get, keep_order, publish, put, put_bytes, retract,
};
use nacre_vfs::{FileId, Kind};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

/// Maximum number of files of one mount that can be recorded.
const MOST: usize = 1 << 26;
/// Words of a record, with the first 72 bytes of its name; words for the remainder of the name, in a separate area.
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
/// Kind (8 bits), whether it is no longer found by its identity (1), length of the name.
const SHAPE: usize = 6;
const NAME: usize = 7;
const NAME_WORDS: usize = RECORD - NAME;

/// Location of a file: the directory's node id and the name in it; an empty name where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodePlace<'a> {
    pub parent: u64,
    pub name: &'a [u8],
}

/// Record of a node.
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
    /// Held while a location changes.
    moving: Arc<Mutex<()>>,
    /// Whether any name has a remainder in the separate area.
    long_names: Arc<AtomicBool>,
}

impl Nodes {
    pub fn new(memory: &Survival) -> Nodes {
        Nodes {
            memory: memory.clone(),
            moving: Arc::default(),
            long_names: Arc::new(AtomicBool::new(memory.resumes())),
        }
    }

    /// Whether there are records of a previous process.
    pub fn resumes(&self) -> bool {
        self.memory.resumes()
    }

    /// Returns the table's id of the root.
    pub fn root(&self) -> u64 {
        self.memory.head(Head::Root)
    }

    pub fn set_root(&self, nodeid: u64) {
        self.memory.set(Head::Root, nodeid);
    }

    /// Returns the reuse counter of a shard.
    pub fn reuse(&self, shard: usize) -> u32 {
        get(self.memory.part(0, HEADER), Head::Reuse as usize + shard) as u32
    }

    /// Records a node with lookup count 1 before the kernel gets it; `at`: index of its record.
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

    /// Records a lookup count.
    pub fn counted(&self, at: usize, lookups: u64) {
        if let Some(record) = self.record(at) {
            put(record, LOOKUPS, lookups);
        }
    }

    /// Removes the record of a node that the kernel has forgotten.
    pub fn forgotten(&self, at: usize) {
        if let Some(record) = self.record(at) {
            retract(record, NODEID);
        }
    }

    /// Records that another file has its identity.
    pub fn unlisted(&self, at: usize) {
        if let Some(record) = self.record(at) {
            put(record, SHAPE, get(record, SHAPE) | 1 << 8);
        }
    }

    /// Frees `count` records from an index on.
    pub fn given_back(&self, at: usize, count: usize) {
        if at + count <= MOST {
            self.memory.shared.clear(NODES_AT + at * RECORD, count * RECORD);
            if self.long_names.load(Relaxed) {
                self.memory.shared.clear(ENDS_AT + at * END, count * END);
            }
        }
    }

    /// Records a location, if it has changed.
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

    /// Completes a change of location that the previous process had begun.
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

    /// Reads a record.
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

    /// Returns all records.
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
        if !rest.is_empty() {
            self.long_names.store(true, Relaxed);
            put_bytes(end, rest);
        }
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
        // A small memory has no node records.
        Some(self.memory.part(NODES_AT + at * RECORD, RECORD)).filter(|record| !record.is_empty())
    }

    fn end(&self, at: usize) -> Option<&[AtomicU64]> {
        (at < MOST).then(|| self.memory.part(ENDS_AT + at * END, END))
    }
}

fn shape(kind: Kind, unlisted: bool) -> u64 {
    u64::from(kind.d_type()) | u64::from(unlisted) << 8
}
