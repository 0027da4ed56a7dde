//! The inode table of a mount that survives its process: records changes in the handoff state, and restores the table
//! from it.
//!
//! A node of a previous process is looked up at its first use: first the directories above it, then its name; the
//! result counts only if it has the recorded identity. Where another process has renamed it meanwhile, or removed one
//! of its names, it is searched for by its identity (`search.rs`), once: a process whose working directory it is uses
//! no path. A file that is not found is ESTALE.
//!
//! Called by `inodes.rs` under the lock of a node's shard, and by users of a node, without a lock.

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

/// Maximum number of directories above a file that are looked up for it.
const DEPTH_MAX: usize = 1 << 17;

/// Maximum number of searches for one file and its directories: each search finds at least one of them.
const SEARCHES: usize = 64;

/// The table's handoff state for the next process, and what is needed to find the nodes of a previous one.
pub(super) struct Kept {
    nodes: Nodes,
    layer: Arc<dyn Layer>,
    /// Number of nodes that have not been looked up again.
    left: AtomicUsize,
    /// Node ids of files that no search has found. Locked during a search: there is one at a time.
    lost: Mutex<HashSet<u64>>,
}

/// Why a file's node was not found by the recorded names of the file and of the directories above it.
struct Missing {
    error: Errno,
    /// Record of the file or directory that is not at its name.
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

    /// Whether the table has to be restored from records.
    pub fn resumes(&self) -> bool {
        self.nodes.resumes()
    }

    pub fn set_root(&self, root: u64) {
        self.nodes.set_root(root);
    }

    /// Records a new node, with the location at which it was found.
    pub fn made(&self, nodeid: u64, place: NodePlace<'_>, attr: &Attr) {
        self.nodes.made(record_of(nodeid), nodeid, place, attr.id, attr.kind);
    }

    /// Records that a known node was found again, as `fresh`.
    pub fn found(&self, nodeid: u64, slot: &mut Slot, fresh: &Node, place: NodePlace<'_>) {
        self.counted(nodeid, slot.lookups);
        self.no_longer_left(slot);
        slot.node.get_or_insert_with(|| fresh.clone());
        if !place.name.is_empty() {
            self.nodes.found(record_of(nodeid), nodeid, place);
        }
    }

    /// Records a lookup count; 0 removes the record.
    pub fn counted(&self, nodeid: u64, lookups: u64) {
        match lookups {
            0 => self.nodes.forgotten(record_of(nodeid)),
            _ => self.nodes.counted(record_of(nodeid), lookups),
        }
    }

    pub fn unlisted(&self, shard: usize, place: u32) {
        self.nodes.unlisted(record_of(super::nodeid(shard, place, 0)));
    }

    /// Frees the records of a freed chunk.
    pub fn given_back(&self, shard: usize, chunk: u32) {
        self.nodes.given_back((chunk as usize * SHARDS + shard) * CHUNK, CHUNK);
    }

    /// Notes that a node has been looked up, or is forgotten.
    pub fn no_longer_left(&self, slot: &mut Slot) {
        if std::mem::take(&mut slot.left) {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Inodes {
    /// Restores the table from its records.
    pub(super) fn resumed(mut self, root: Node, attr: &Attr) -> Result<Inodes, Errno> {
        let Some(kept) = &self.kept else { return Err(Errno::EIO) };
        kept.nodes.end_move();
        self.root = kept.nodes.root();
        for (number, shard) in self.shards.iter().enumerate() {
            // Continues the reuse counter: what the kernel sends about an old id must not hit a new one.
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

    /// Records the last known location of a file, for the next process.
    pub fn found_at(&self, nodeid: u64, place: NodePlace<'_>) {
        if let Some(kept) = &self.kept {
            // Under the lock of its shard, so that the record belongs to this node.
            self.locate(nodeid, |_| kept.nodes.found(record_of(self.inner(nodeid)), self.inner(nodeid), place));
        }
    }

    /// Sets the node of a file without names, whose open file was restored. False where the record has another
    /// identity.
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

    /// Looks up the node of an id from a previous process, where it has not been looked up yet and can be.
    pub(super) fn look_up_left(&self, nodeid: u64) {
        let Some(kept) = self.kept.as_ref().filter(|kept| kept.left.load(Ordering::Relaxed) > 0) else { return };
        if self.locate(nodeid, |slot| slot.left) == Some(true)
            && let Err(error) = self.find_left(kept, nodeid)
        {
            tracing::debug!(nodeid, %error, "a file from before the restart is not where it was");
        }
    }

    /// Finds the nodes of open files; one search finds all that were renamed.
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

    /// Searches for files by their records; returns whether any was found, or had been by another thread.
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

    /// Looks up a node by the recorded names, from its nearest known directory down.
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
    /// Puts a recorded node into its slot.
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

    /// Fills the lists of free slots, after all taken ones have been restored.
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

/// Index of a node's record: the records of a chunk are contiguous, so that their memory is freed with it.
fn record_of(inner: u64) -> usize {
    let (place, shard) = (place_of(inner) as usize, shard_of(inner));
    (place / CHUNK * SHARDS + shard) * CHUNK + place % CHUNK
}
