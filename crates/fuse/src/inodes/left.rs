//! The inode table of a mount that outlives its process: noted as it changes, and made again from
//! what is noted.
//!
//! A node that a process before this one knew is not looked up before somebody asks for it: the
//! directories above it first, then its name, and what is found is the file if it has its identity.
//! Where another process has renamed it meanwhile, or removed one of its names, it is looked for by its
//! identity (`search.rs`), once: a process that works in it asks by no path. A file that is nowhere is
//! ESTALE.
//!
//! Called by `inodes.rs` under the lock of a node's shard, and by who asks for a node, without.

use super::{
    CHUNK, Inodes, SHARDS, Shard, Slot, place_of, reuse_of,
    search::{FoundFile, search},
    shard_of,
};
use crate::survival::nodes::{NodePlace, NodeRecord, Nodes};
use nacre_vfs::{Attr, Caller, Errno, FileId, Kind, Layer, Name, Node};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The most directories above a file that are looked up for it.
const DEPTH_MAX: usize = 1 << 17;

/// How many files and directories on the way to one file are searched for: each search finds at least one.
const SEARCHES: usize = 64;

/// What is kept of the table for a process that goes on after this one, and how nodes are found that
/// are known from it.
pub(super) struct Kept {
    nodes: Nodes,
    layer: Arc<dyn Layer>,
    /// How many nodes have not been looked up again.
    left: AtomicUsize,
    /// The node ids of files that are nowhere. Locked during a search: there is one at a time.
    lost: Mutex<HashSet<u64>>,
}

/// Why the node of a file was not found: by the name that was noted of it or of a directory above it.
struct Missing {
    error: Errno,
    /// What was noted of the file or directory that is not at its name.
    record: Option<NodeRecord>,
}

impl From<Errno> for Missing {
    fn from(error: Errno) -> Missing {
        Missing { error, record: None }
    }
}

impl Kept {
    pub fn new(nodes: Nodes, layer: &Arc<dyn Layer>) -> Kept {
        Kept { nodes, layer: Arc::clone(layer), left: AtomicUsize::new(0), lost: Mutex::default() }
    }

    /// Whether the table is to be made from records.
    pub fn resumes(&self) -> bool {
        self.nodes.resumes()
    }

    pub fn set_root(&self, root: u64) {
        self.nodes.set_root(root);
    }

    /// A new node, at the place where it was found.
    pub fn made(&self, nodeid: u64, place: NodePlace<'_>, attr: &Attr) {
        self.nodes.made(record_of(nodeid), nodeid, place, attr.id, attr.kind);
    }

    /// A known one was found again, as `fresh`.
    pub fn found(&self, nodeid: u64, slot: &mut Slot, fresh: &Node, place: NodePlace<'_>) {
        self.counted(nodeid, slot.lookups);
        self.no_longer_left(slot);
        slot.node.get_or_insert_with(|| fresh.clone());
        if !place.name.is_empty() {
            self.nodes.found(record_of(nodeid), nodeid, place);
        }
    }

    /// Its look-ups are so many now; with the last one it goes.
    pub fn counted(&self, nodeid: u64, lookups: u64) {
        match lookups {
            0 => self.nodes.forgotten(record_of(nodeid)),
            _ => self.nodes.counted(record_of(nodeid), lookups),
        }
    }

    pub fn unlisted(&self, shard: usize, place: u32) {
        self.nodes.unlisted(record_of(super::nodeid(shard, place, 0)));
    }

    /// A chunk of a shard is gone.
    pub fn given_back(&self, shard: usize, chunk: u32) {
        self.nodes.given_back((chunk as usize * SHARDS + shard) * CHUNK, CHUNK);
    }

    /// The node has been looked up, or is forgotten.
    pub fn no_longer_left(&self, slot: &mut Slot) {
        if std::mem::take(&mut slot.left) {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Inodes {
    /// The table as it is noted.
    pub(super) fn resumed(mut self, root: Node, attr: &Attr) -> Result<Inodes, Errno> {
        let Some(kept) = &self.kept else { return Err(Errno::EIO) };
        kept.nodes.end_move();
        self.root = kept.nodes.root();
        for (number, shard) in self.shards.iter().enumerate() {
            // On from the last one: what the kernel still says of an old id is not taken for a new one.
            shard.lock().reuse = kept.nodes.reuse(number);
        }
        let mut count = 0;
        for (_, record) in kept.nodes.all() {
            let extra = if record.kind == Kind::Directory {
                kept.nodes.read(record_of(self.inner(record.parent))).map_or(0, |parent| parent.id.ino)
            } else {
                0
            };
            let hash = self.hash(&record.id);
            self.shard(shard_of(record.nodeid)).put_left(&record, extra);
            if !record.unlisted {
                self.shard(shard_of(record.nodeid)).list(hash, place_of(record.nodeid), &self.hasher);
            }
            count += 1;
        }
        self.shards.iter().for_each(|shard| shard.lock().find_room());
        self.count.store(count, Ordering::Relaxed);
        kept.left.store(count, Ordering::Relaxed);
        let same = self.locate(self.root, |slot| {
            kept.no_longer_left(slot);
            slot.node = Some(root);
            slot.id == attr.id
        });
        if same == Some(true) { Ok(self) } else { Err(Errno::ESTALE) }
    }

    /// Where the file of a node id was found last, for a process that goes on after this one.
    pub fn found_at(&self, nodeid: u64, place: NodePlace<'_>) {
        if let Some(kept) = &self.kept {
            // Under the lock of its shard, so that the record is that of this node.
            self.locate(nodeid, |_| kept.nodes.found(record_of(self.inner(nodeid)), self.inner(nodeid), place));
        }
    }

    /// The node of a file that no name leads to, of which an open file was taken up. False where
    /// another file was noted.
    pub fn settle_left(&self, nodeid: u64, node: &Node, id: FileId) -> bool {
        let Some(kept) = &self.kept else { return false };
        let settled = self.locate(nodeid, |slot| {
            let same = (slot.id.ino, slot.id.generation) == (id.ino, id.generation);
            if same && slot.node.is_none() {
                kept.no_longer_left(slot);
                slot.node = Some(node.clone());
            }
            same
        });
        settled == Some(true)
    }

    /// Finds the node of an id that is known from a process before this one, where it has not been
    /// looked up yet and can be.
    pub(super) fn look_up_left(&self, nodeid: u64) {
        let Some(kept) = self.kept.as_ref().filter(|kept| kept.left.load(Ordering::Relaxed) > 0) else { return };
        if self.locate(nodeid, |slot| slot.left) == Some(true)
            && let Err(error) = self.find_left(kept, nodeid)
        {
            tracing::debug!(nodeid, %error, "a file from before the restart is not where it was");
        }
    }

    /// Finds the nodes of files that are open, all that were renamed by one search.
    pub fn find_open(&self, nodeids: &[u64]) {
        let Some(kept) = self.kept.as_ref() else { return };
        // The directories above a file are found before its own name can be used.
        for _ in 0..SEARCHES {
            let missing: Vec<NodeRecord> =
                nodeids.iter().filter_map(|nodeid| self.walk(kept, *nodeid).err()?.record).collect();
            if !self.search_left(kept, &missing) {
                return;
            }
        }
    }

    fn find_left(&self, kept: &Kept, nodeid: u64) -> Result<(), Errno> {
        for _ in 0..SEARCHES {
            match self.walk(kept, nodeid) {
                Ok(()) => return Ok(()),
                Err(Missing { error, record }) => {
                    if !self.search_left(kept, record.as_slice()) {
                        return Err(error);
                    }
                }
            }
        }
        Err(Errno::ESTALE)
    }

    /// Searches for files by what was noted of them; whether any was found, or had been by another thread.
    fn search_left(&self, kept: &Kept, missing: &[NodeRecord]) -> bool {
        let mut lost = kept.lost.lock();
        let (mut wanted, mut known) = (HashMap::new(), false);
        for record in missing.iter().filter(|record| !record.unlisted && !lost.contains(&record.nodeid)) {
            if self.locate(record.nodeid, |slot| slot.node.is_some()) == Some(true) {
                known = true;
            } else {
                wanted.insert(record.id, record.kind);
            }
        }
        if wanted.is_empty() {
            return known;
        }
        let found = search(&*kept.layer, &wanted);
        for record in missing {
            match found.iter().find(|found| found.entry.attr.id == record.id) {
                Some(found) => self.settle_found(kept, record, found),
                None => drop(lost.insert(record.nodeid)),
            }
        }
        known || !found.is_empty()
    }

    fn settle_found(&self, kept: &Kept, record: &NodeRecord, found: &FoundFile) {
        let parent = self.find(&found.parent);
        self.locate(record.nodeid, |slot| {
            kept.no_longer_left(slot);
            slot.node.get_or_insert_with(|| found.entry.node.clone());
            if record.kind == Kind::Directory {
                slot.extra = found.parent.ino;
            }
            if let Some(parent) = parent {
                let place = NodePlace { parent, name: &found.name };
                kept.nodes.found(record_of(record.nodeid), record.nodeid, place);
            }
        });
        tracing::info!(name = %found.name.escape_ascii(), "a file was found that had been renamed without this mount");
    }

    /// Goes the way to a node by the names that were noted.
    fn walk(&self, kept: &Kept, nodeid: u64) -> Result<(), Missing> {
        let mut way: Vec<NodeRecord> = Vec::new();
        let mut at = self.inner(nodeid);
        let mut above = loop {
            match self.locate(at, |slot| slot.node.clone()) {
                Some(Some(node)) => break node,
                Some(None) if way.len() < DEPTH_MAX => {}
                _ => return Err(Errno::ESTALE.into()),
            }
            let record = kept.nodes.read(record_of(at)).filter(|record| record.nodeid == at).ok_or(Errno::ESTALE)?;
            at = self.inner(record.parent);
            way.push(record);
        };
        for record in way.into_iter().rev() {
            let found = kept.layer.lookup(&Caller::ROOT, &above, Name::new(&record.name)?);
            let found = match found {
                Ok(found) if found.attr.id == record.id && found.attr.kind == record.kind => found,
                Ok(_) | Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ESTALE) => {
                    return Err(Missing { error: Errno::ESTALE, record: Some(record) });
                }
                Err(error) => return Err(error.into()),
            };
            let node = self.locate(record.nodeid, |slot| {
                kept.no_longer_left(slot);
                slot.node.get_or_insert_with(|| found.node.clone()).clone()
            });
            above = node.ok_or(Errno::ESTALE)?;
        }
        Ok(())
    }
}

impl Shard {
    /// Puts what is known of a node into its slot.
    fn put_left(&mut self, record: &NodeRecord, extra: u64) {
        let place = place_of(record.nodeid) as usize;
        let (number, within) = (place / CHUNK, place % CHUNK);
        while self.chunks.len() <= number {
            self.chunks.push(None);
        }
        let Some(entry) = self.chunks.get_mut(number) else { return };
        let chunk = entry.get_or_insert_with(super::Chunk::default);
        while chunk.slots.len() <= within {
            chunk.slots.push(Slot::left(record, 0));
        }
        if let Some(slot) = chunk.slots.get_mut(within) {
            *slot = Slot { left: true, reuse: reuse_of(record.nodeid), ..Slot::left(record, extra) };
        }
    }

    /// Finds out which slots are free, when all that are taken are.
    fn find_room(&mut self) {
        for (number, entry) in self.chunks.iter_mut().enumerate() {
            let Some(chunk) = entry else {
                self.roomy.insert(number as u32);
                continue;
            };
            let free = chunk.slots.iter().enumerate().filter(|(_, slot)| !slot.is_taken());
            chunk.free = free.map(|(within, _)| within as u16).collect();
            if !chunk.full() {
                self.roomy.insert(number as u32);
            }
        }
    }
}

impl Slot {
    fn left(record: &NodeRecord, extra: u64) -> Slot {
        Slot {
            node: None,
            id: record.id,
            lookups: record.lookups,
            open: None,
            extra,
            reuse: 0,
            kind: record.kind,
            outlived: 0,
            left: false,
        }
    }
}

/// Where the record of a node is: those of a chunk lie together, so that their memory goes with it.
fn record_of(inner: u64) -> usize {
    let (place, shard) = (place_of(inner) as usize, shard_of(inner));
    (place / CHUNK * SHARDS + shard) * CHUNK + place % CHUNK
}
