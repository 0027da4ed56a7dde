//! The only inode table: the kernel's node ids, the files they stand for, and their lookup counts.
//!
//! Called by the handlers (every request), by `passthrough.rs` (state of open files) and by `invalidate.rs` (file ->
//! node id). Invariants:
//! * a node id is a shard, a slot in that shard and a reuse counter, so it is independent of `st_ino` and never means
//!   two files in turn;
//! * one file ([`FileId`]) has one node id as long as the kernel knows it, however many names lead to it;
//! * a record lives while its lookup count is above zero; the root's lives as long as the table;
//! * no code of a layer runs under a shard's lock: removed nodes and files are returned to the caller, which drops
//!   them.
//!
//! For layers whose files are found by inode number, `inodes/numbers.rs` replaces this table.
//!
//! Frugal by design: 80 bytes a file with its share of the hash table (`tests::a_million_files_stay_small`). Chunks
//! of slots are freed as soon as they are empty.

mod left;
mod numbers;
mod search;

use crate::{
    open_files::OpenState,
    survival::{
        Survival,
        nodes::{NodePlace, Nodes},
        numbers::Sets,
    },
};
use hashbrown::{DefaultHashBuilder, HashTable};
use left::Kept;
use nacre_vfs::{Attr, Errno, FileId, Kind, Layer, Node};
use numbers::Numbers;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::BTreeSet,
    hash::BuildHasher,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::Sender,
    },
};

/// The kernel's node id of every mount's root (FUSE_ROOT_ID).
pub(crate) const ROOT: u64 = 1;

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
const CHUNK: usize = 256;

/// Record of one file.
struct Slot {
    /// `None`: the slot is free.
    node: Option<Node>,
    id: FileId,
    lookups: u64,
    open: Option<Box<OpenState>>,
    /// Directories: inode number of the parent, for `..` of listings. Files: digest of size and times at the last
    /// open in cached mode.
    extra: u64,
    reuse: u32,
    kind: Kind,
    /// Not 0: see [`InodeRecord::outlived`].
    outlived: u8,
    /// The file is known from the handoff state of a previous process: its node is looked up at first use.
    left: bool,
}

impl Slot {
    /// Slot of a file that is being opened.
    pub fn open(node: Node, id: FileId) -> Slot {
        Slot { lookups: 0, ..Slot::taken(node, id, Kind::File) }
    }

    /// Slot of a file with lookup count 1.
    fn taken(node: Node, id: FileId, kind: Kind) -> Slot {
        Slot { node: Some(node), id, lookups: 1, open: None, extra: 0, reuse: 0, kind, outlived: 0, left: false }
    }

    /// Whether the slot stands for a file.
    fn is_taken(&self) -> bool {
        self.node.is_some() || self.left
    }

    /// Returns any open file.
    pub fn any_file(&self) -> Option<nacre_vfs::Opened> {
        self.open.as_ref().and_then(|open| open.any_file())
    }

    /// Whether nothing is open and no state of open files is kept.
    pub fn is_idle(&self) -> bool {
        self.open.as_ref().is_none_or(|open| open.is_idle())
    }

    /// Whether no file is open; state of closed files may be kept.
    pub fn is_closed(&self) -> bool {
        self.open.as_ref().is_none_or(|open| open.is_closed())
    }

    /// Takes out the node and the state of open files.
    pub fn into_removed(self) -> Option<Removed> {
        Some(Removed { node: self.node?, open: self.open })
    }
}

/// A run of slots that is allocated and freed as a whole.
#[derive(Default)]
struct Chunk {
    slots: Vec<Slot>,
    /// Indices of free slots in `slots`.
    free: Vec<u16>,
}

impl Chunk {
    fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == CHUNK
    }
}

#[derive(Default)]
struct Shard {
    chunks: Vec<Option<Chunk>>,
    /// Chunks (also absent ones) with free slots, lowest first so that the high ones empty.
    roomy: BTreeSet<u32>,
    /// The one empty chunk that stays allocated: otherwise a file that comes and goes would allocate and free it each
    /// time.
    spare: Option<u32>,
    /// File -> slot number in the shard. A slot whose inode number now belongs to a file of another type is not in
    /// it.
    places: HashTable<u32>,
    reuse: u32,
}

/// State of a file removed from the table, to be dropped outside of all locks.
pub(crate) struct Removed {
    /// The layer's node.
    pub node: Node,
    /// State of open files, if there was any.
    pub open: Option<Box<OpenState>>,
}

/// Access to one record, under the lock of its shard.
pub(crate) struct InodeRecord<'a> {
    slot: &'a mut Slot,
}

impl InodeRecord<'_> {
    /// The layer's node.
    pub fn node(&self) -> Option<Node> {
        self.slot.node.clone()
    }

    /// State of open files; created at first use.
    pub fn open_state(&mut self) -> &mut OpenState {
        self.slot.open.get_or_insert_default()
    }

    /// State of open files, if there is any.
    pub fn open_state_if_any(&mut self) -> Option<&mut OpenState> {
        self.slot.open.as_deref_mut()
    }

    /// Frees the state of open files if it is idle.
    pub fn tidy(&mut self) {
        if self.slot.open.as_ref().is_some_and(|open| open.is_idle()) {
            self.slot.open = None;
        }
    }

    /// Not 0 where a mapping of the file may have outlived the open file that it was made with; a different number
    /// for each such open file. 0 once it is known that there is none.
    pub fn outlived(&mut self) -> &mut u8 {
        &mut self.slot.outlived
    }

    /// Replaces the digest of content (files) or the inode number of the parent (directories) and returns the old
    /// one.
    pub fn replace_extra(&mut self, extra: u64) -> u64 {
        std::mem::replace(&mut self.slot.extra, extra)
    }
}

/// The location at which a file was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found<'a> {
    /// The directory's node id and the name in it; an empty name where the file cannot be found again by name.
    pub place: NodePlace<'a>,
    /// The directory's inode number.
    pub ino: u64,
}

impl<'a> Found<'a> {
    /// A name in the directory with this node id and identity.
    pub fn at(parent: u64, id: FileId, name: &'a [u8]) -> Found<'a> {
        Found { place: NodePlace { parent, name }, ino: id.ino }
    }

    /// The directory with this inode number, without a name.
    pub fn below(ino: u64) -> Found<'a> {
        Found { place: NodePlace { parent: 0, name: &[] }, ino }
    }
}

/// Result of [`Inodes::register`], for the reply that names the file.
pub(crate) struct Registered {
    /// Its node id.
    pub nodeid: u64,
    /// The existing node where the file was already known under another node: the layer has to merge the new node
    /// into it ([`Layer::adopt`]).
    pub known: Option<Node>,
}

/// The inode table of a mount.
pub(crate) struct Inodes {
    shards: Box<[Mutex<Shard>]>,
    hasher: DefaultHashBuilder,
    root: u64,
    /// The kernel shows users another inode as the root, with the table's own id ([`Inodes::promote_root`]).
    promoted: AtomicBool,
    count: AtomicUsize,
    /// Replaces this table for layers whose files are found by inode number.
    numbers: Option<Numbers>,
    /// Handoff state, where the mount survives its process.
    kept: Option<Kept>,
}

impl Inodes {
    /// Creates the table of a layer, with the layer's root in it. Restored from `memory` if that holds the state of a
    /// previous process; changes are recorded in `memory`.
    ///
    /// # Errors
    /// ESTALE where the recorded root is a different file.
    pub fn over(layer: &Arc<dyn Layer>, root: Node, attr: &Attr, memory: Option<&Survival>) -> Result<Inodes, Errno> {
        if let Some(numbers) = Numbers::new(layer, attr.id, memory.map(Sets::new)) {
            if memory.is_some_and(|memory| !memory.is_root(&attr.id)) {
                return Err(Errno::ESTALE);
            }
            return Ok(Inodes { numbers: Some(numbers), ..Inodes::empty(None).with_root(&root, attr) });
        }
        let kept = memory.map(|memory| Kept::new(Nodes::new(memory), layer));
        if kept.as_ref().is_some_and(Kept::resumes) {
            return Inodes::empty(kept).resumed(root, attr);
        }
        Ok(Inodes::empty(kept).with_root(&root, attr))
    }

    /// Creates a table with the root in it.
    #[cfg(test)]
    pub fn new(root: Node, attr: &Attr) -> Inodes {
        Inodes::empty(None).with_root(&root, attr)
    }

    fn empty(kept: Option<Kept>) -> Inodes {
        Inodes {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: DefaultHashBuilder::default(),
            root: 0,
            promoted: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            numbers: None,
            kept,
        }
    }

    fn with_root(mut self, root: &Node, attr: &Attr) -> Inodes {
        self.root = self.register(root, attr, Found::below(attr.id.ino)).nodeid;
        self.kept.iter().for_each(|kept| kept.set_root(self.root));
        self
    }

    /// Sets whether the root has an id of its own instead of [`ROOT`] (which still means it, too).
    pub fn promote_root(&self, promoted: bool) {
        self.numbers.iter().for_each(|numbers| numbers.promote_root(promoted));
        self.promoted.store(promoted, Ordering::Relaxed);
    }

    /// Whether a node id is the root's.
    pub fn is_root(&self, nodeid: u64) -> bool {
        if let Some(numbers) = &self.numbers {
            return numbers.is_root(nodeid);
        }
        self.inner(nodeid) == self.root
    }

    /// Whether the root has an id of its own.
    pub fn root_is_promoted(&self) -> bool {
        self.promoted.load(Ordering::Relaxed)
    }

    /// Number of known files.
    pub fn len(&self) -> usize {
        if let Some(numbers) = &self.numbers {
            return numbers.len();
        }
        self.count.load(Ordering::Relaxed)
    }

    /// Increments a file's lookup count and returns its node id.
    pub fn register(&self, node: &Node, attr: &Attr, found: Found<'_>) -> Registered {
        if let Some(numbers) = &self.numbers {
            return Registered { nodeid: numbers.register(&attr.id), known: None };
        }
        let hash = self.hash(&attr.id);
        let shard_number = shard_of_id(&attr.id);
        let mut shard = self.shard(shard_number);
        if let Some(place) = shard.find(hash, &attr.id) {
            if let Some(slot) = shard.slot_at(place).filter(|slot| slot.kind == attr.kind) {
                slot.lookups += 1;
                if attr.kind == Kind::Directory {
                    slot.extra = found.ino;
                }
                let inner = nodeid(shard_number, place, slot.reuse);
                if let Some(kept) = &self.kept {
                    kept.found(inner, slot, node, found.place);
                }
                let known = slot.node.as_ref().filter(|known| !known.same(node)).cloned();
                let nodeid = self.outer(inner);
                return Registered { nodeid, known };
            }
            // The inode number now belongs to a file of another type and the layer cannot distinguish the two: the
            // old record ends with the kernel's last reference to it, and is no longer found.
            shard.unlist(hash, place);
            self.kept.iter().for_each(|kept| kept.unlisted(shard_number, place));
        }
        let extra = if attr.kind == Kind::Directory { found.ino } else { 0 };
        let (place, reuse) = shard.insert(Slot { extra, ..Slot::taken(node.clone(), attr.id, attr.kind) });
        shard.list(hash, place, &self.hasher);
        if let Some(kept) = &self.kept {
            kept.made(nodeid(shard_number, place, reuse), found.place, attr);
        }
        drop(shard);
        self.count.fetch_add(1, Ordering::Relaxed);
        Registered { nodeid: self.outer(nodeid(shard_number, place, reuse)), known: None }
    }

    /// The layer's node of a node id.
    pub fn node(&self, nodeid: u64) -> Option<Node> {
        if let Some(numbers) = &self.numbers {
            return numbers.node(nodeid);
        }
        self.look_up_left(nodeid);
        self.locate(nodeid, |slot| slot.node.clone()).flatten()
    }

    /// The layer's node and identity of a node id.
    pub fn node_and_id(&self, nodeid: u64) -> Option<(Node, FileId)> {
        if let Some(numbers) = &self.numbers {
            return numbers.node(nodeid).map(|node| (node, numbers.id(nodeid)));
        }
        self.look_up_left(nodeid);
        self.locate(nodeid, |slot| slot.node.clone().map(|node| (node, slot.id))).flatten()
    }

    /// The layer's node and any open file of it, which answers where the file has no name any more.
    pub fn node_and_file(&self, nodeid: u64) -> Option<(Node, Option<nacre_vfs::Opened>)> {
        if let Some(numbers) = &self.numbers {
            return numbers.node(nodeid).map(|node| (node, numbers.any_file(nodeid)));
        }
        self.look_up_left(nodeid);
        self.locate(nodeid, |slot| slot.node.clone().map(|node| (node, slot.any_file()))).flatten()
    }

    /// Node of a directory with its own and its parent's inode number.
    pub fn directory(&self, nodeid: u64) -> Option<(Node, u64, u64)> {
        if let Some(numbers) = &self.numbers {
            return numbers.directory(nodeid);
        }
        self.look_up_left(nodeid);
        self.locate(nodeid, |slot| slot.node.clone().map(|node| (node, slot.id.ino, slot.extra))).flatten()
    }

    /// Whether a node id stands for a directory.
    pub fn is_directory(&self, nodeid: u64) -> bool {
        if let Some(numbers) = &self.numbers {
            return numbers.is_a(nodeid, Kind::Directory);
        }
        self.locate(nodeid, |slot| slot.kind == Kind::Directory).unwrap_or(false)
    }

    /// Whether a node id stands for a regular file.
    pub fn is_file(&self, nodeid: u64) -> bool {
        if let Some(numbers) = &self.numbers {
            return numbers.is_a(nodeid, Kind::File);
        }
        self.locate(nodeid, |slot| slot.kind == Kind::File).unwrap_or(false)
    }

    /// Looks at or changes a record under its shard's lock. `f` must be short and call no layer.
    pub fn with<T>(&self, nodeid: u64, f: impl FnOnce(&mut InodeRecord<'_>) -> T) -> Option<T> {
        if let Some(numbers) = &self.numbers {
            return numbers.with(nodeid, f);
        }
        self.look_up_left(nodeid);
        self.locate(nodeid, |slot| f(&mut InodeRecord { slot }))
    }

    /// Reads or changes a record like [`Inodes::with`], but creates none for a file that nobody has open.
    pub fn with_any<T>(&self, nodeid: u64, f: impl FnOnce(&mut InodeRecord<'_>) -> T) -> Option<T> {
        match &self.numbers {
            Some(numbers) => numbers.with_any(nodeid, f),
            None => self.with(nodeid, f),
        }
    }

    /// Returns the node id of a file, where the kernel knows it.
    pub fn find(&self, id: &FileId) -> Option<u64> {
        if let Some(numbers) = &self.numbers {
            return numbers.find(id);
        }
        let hash = self.hash(id);
        let shard_number = shard_of_id(id);
        let mut shard = self.shard(shard_number);
        let place = shard.find(hash, id)?;
        let reuse = shard.slot_at(place)?.reuse;
        Some(self.outer(nodeid(shard_number, place, reuse)))
    }

    /// Notes whether the kernel may cache all attributes of a file. Recorded only for layers whose files are found by
    /// inode number.
    pub fn keeps(&self, nodeid: u64, kept: bool) {
        self.numbers.iter().for_each(|numbers| numbers.keeps(nodeid, kept));
    }

    /// Whether the kernel caches all attributes of the file with an inode number, as far as is known.
    pub fn is_kept(&self, number: u64) -> bool {
        self.numbers.as_ref().is_some_and(|numbers| numbers.is_kept(number))
    }

    /// Whether the kernel knows the file of a node id.
    pub fn is_known(&self, nodeid: u64) -> bool {
        match &self.numbers {
            Some(numbers) => numbers.is_known(nodeid),
            None => self.locate(nodeid, |_| ()).is_some(),
        }
    }

    /// Whether the kernel knows a file with an inode number from `from` to `to`; only for layers whose files are
    /// found by inode number.
    pub fn knows_any(&self, from: u64, to: u64) -> bool {
        self.numbers.as_ref().is_some_and(|numbers| numbers.knows_any(from, to))
    }

    /// The inode number of a node id, for layers whose files are found by inode number; 0 for others.
    pub fn number(&self, nodeid: u64) -> u64 {
        self.numbers.as_ref().map_or(0, |numbers| numbers.inner(nodeid))
    }

    /// The node id of an inode number, for layers whose files are found by inode number.
    pub fn nodeid(&self, number: u64) -> Option<u64> {
        self.numbers.as_ref().map(|numbers| numbers.outer(number))
    }

    /// Number of lookups of a file in this process, if a previous process may have had lookups of it as well; only
    /// for layers whose files are found by inode number.
    pub fn told_since(&self, nodeid: u64) -> Option<u64> {
        self.numbers.as_ref()?.told_since(nodeid)
    }

    /// Removes a file that the kernel does not know; false where it was looked up more than `told` times meanwhile.
    /// Also returns the state to be dropped. Only for layers whose files are found by inode number.
    pub fn is_unknown(&self, nodeid: u64, told: u64) -> (bool, Option<Removed>) {
        self.numbers.as_ref().map_or((false, None), |numbers| numbers.is_unknown(nodeid, told))
    }

    /// Sets the channel for node ids of files of which the kernel has to be asked whether it knows them.
    pub fn doubt_with(&self, doubts: Option<Sender<u64>>) {
        self.numbers.iter().for_each(|numbers| numbers.doubt_with(doubts.clone()));
    }

    /// Has the kernel asked about a file.
    pub fn doubt(&self, nodeid: u64) {
        self.numbers.iter().for_each(|numbers| numbers.doubt(nodeid));
    }

    /// Counts a lookup for a reply that a previous process had recorded and that is sent now.
    pub fn told_again(&self, nodeid: u64) {
        if let Some(numbers) = &self.numbers {
            numbers.register(&numbers.id(nodeid));
        }
    }

    /// Whether files are found by inode number: nodes need no update of their names then.
    pub fn by_number(&self) -> bool {
        self.numbers.is_some()
    }

    /// Subtracts `lookups` from a lookup count; returns the state to be dropped when it becomes 0.
    pub fn forget(&self, nodeid: u64, lookups: u64) -> Option<Removed> {
        if let Some(numbers) = &self.numbers {
            return numbers.forget(nodeid, lookups);
        }
        let inner = self.inner(nodeid);
        if inner == self.root {
            return None;
        }
        let mut shard = self.shard(shard_of(inner));
        let place = place_of(inner);
        let slot = shard.slot_at(place).filter(|slot| slot.reuse == reuse_of(inner))?;
        slot.lookups = slot.lookups.saturating_sub(lookups);
        self.kept.iter().for_each(|kept| kept.counted(inner, slot.lookups));
        if slot.lookups > 0 {
            return None;
        }
        let hash = self.hash(&slot.id);
        if let Some(kept) = &self.kept {
            kept.no_longer_left(slot);
        }
        shard.unlist(hash, place);
        let (removed, gone) = shard.remove(place, &self.hasher);
        if let Some((kept, chunk)) = self.kept.as_ref().zip(gone) {
            kept.given_back(shard_of(inner), chunk);
        }
        drop(shard);
        self.count.fetch_sub(1, Ordering::Relaxed);
        removed
    }

    /// Calls `f` with the node ids of all files, in batches of bounded size and outside of the locks. Files that come
    /// or go meanwhile may be missed.
    pub fn for_each(&self, mut f: impl FnMut(u64)) {
        if let Some(numbers) = &self.numbers {
            return numbers.for_each(f);
        }
        let mut batch = Vec::with_capacity(CHUNK);
        for shard_number in 0..SHARDS {
            let mut chunk_number = 0;
            loop {
                {
                    let shard = self.shard(shard_number);
                    let Some(chunk) = shard.chunks.get(chunk_number) else { break };
                    let slots = chunk.iter().flat_map(|chunk| chunk.slots.iter().enumerate());
                    let live = slots.filter(|(_, slot)| slot.is_taken());
                    batch.extend(
                        live.map(|(i, slot)| self.outer(nodeid(shard_number, place(chunk_number, i), slot.reuse))),
                    );
                }
                batch.drain(..).for_each(&mut f);
                chunk_number += 1;
            }
        }
    }

    /// Removes every file: the mount is gone.
    pub fn clear(&self) {
        if let Some(numbers) = &self.numbers {
            numbers.clear();
        }
        for shard_number in 0..SHARDS {
            let gone = std::mem::take(&mut *self.shard(shard_number));
            let files = gone.chunks.iter().flatten().map(Chunk::live).sum::<usize>();
            self.count.fetch_sub(files, Ordering::Relaxed);
        }
    }

    fn locate<T>(&self, nodeid: u64, f: impl FnOnce(&mut Slot) -> T) -> Option<T> {
        let inner = self.inner(nodeid);
        let mut shard = self.shard(shard_of(inner));
        shard.slot_at(place_of(inner)).filter(|slot| slot.reuse == reuse_of(inner)).map(f)
    }

    fn hash(&self, id: &FileId) -> u64 {
        self.hasher.hash_one(id)
    }

    fn shard(&self, number: usize) -> MutexGuard<'_, Shard> {
        // The number is masked to the number of shards wherever it is made.
        #[allow(clippy::indexing_slicing)]
        self.shards[number & (SHARDS - 1)].lock()
    }

    /// The table's own id for an id from the kernel.
    fn inner(&self, nodeid: u64) -> u64 {
        if nodeid == ROOT { self.root } else { nodeid }
    }

    /// The kernel's id for an id of the table.
    fn outer(&self, nodeid: u64) -> u64 {
        if nodeid == self.root && !self.promoted.load(Ordering::Relaxed) { ROOT } else { nodeid }
    }
}

impl Shard {
    fn find(&self, hash: u64, id: &FileId) -> Option<u32> {
        self.places.find(hash, |&place| self.slot(place).is_some_and(|slot| slot.id == *id)).copied()
    }

    fn slot(&self, place: u32) -> Option<&Slot> {
        let chunk = self.chunks.get(place as usize / CHUNK)?.as_ref()?;
        chunk.slots.get(place as usize % CHUNK).filter(|slot| slot.is_taken())
    }

    fn slot_at(&mut self, place: u32) -> Option<&mut Slot> {
        let chunk = self.chunks.get_mut(place as usize / CHUNK)?.as_mut()?;
        chunk.slots.get_mut(place as usize % CHUNK).filter(|slot| slot.is_taken())
    }

    fn list(&mut self, hash: u64, place: u32, hasher: &DefaultHashBuilder) {
        let Shard { places, chunks, .. } = self;
        places.insert_unique(hash, place, |&place| hash_of_place(chunks, place, hasher));
    }

    fn unlist(&mut self, hash: u64, place: u32) {
        if let Ok(entry) = self.places.find_entry(hash, |&other| other == place) {
            entry.remove();
        }
    }

    fn insert(&mut self, slot: Slot) -> (u32, u32) {
        // Never 0, so that no node id is as small as the root's.
        self.reuse = self.reuse.checked_add(1).unwrap_or(1);
        let reuse = self.reuse;
        let fresh = Slot { reuse, ..slot };
        let number = self.roomy.first().copied().unwrap_or(self.chunks.len() as u32);
        if number as usize >= self.chunks.len() {
            self.chunks.push(None);
            self.roomy.insert(number);
        }
        let mut within = 0;
        self.spare = self.spare.filter(|spare| *spare != number);
        if let Some(entry) = self.chunks.get_mut(number as usize) {
            let chunk = entry.get_or_insert_with(|| Chunk { slots: Vec::with_capacity(CHUNK), free: Vec::new() });
            within = chunk.free.pop().unwrap_or(chunk.slots.len() as u16);
            match chunk.slots.get_mut(usize::from(within)) {
                Some(slot) => *slot = fresh,
                None => chunk.slots.push(fresh),
            }
            if chunk.full() {
                self.roomy.remove(&number);
            }
        }
        (place(number as usize, usize::from(within)), reuse)
    }

    /// Frees a slot; returns the state to be dropped, and the number of a chunk that was freed with it.
    fn remove(&mut self, place: u32, hasher: &DefaultHashBuilder) -> (Option<Removed>, Option<u32>) {
        let number = place / CHUNK as u32;
        let Some(chunk) = self.chunks.get_mut(number as usize).and_then(Option::as_mut) else { return (None, None) };
        let Some(slot) = chunk.slots.get_mut(place as usize % CHUNK) else { return (None, None) };
        slot.left = false;
        let (node, open) = (slot.node.take(), slot.open.take());
        chunk.free.push((place as usize % CHUNK) as u16);
        let gone = if chunk.live() == 0 { self.empty(number) } else { None };
        if let Some(entry) = gone.and_then(|gone| self.chunks.get_mut(gone as usize)) {
            *entry = None;
        }
        self.roomy.insert(number);
        self.shrink(hasher);
        (node.map(|node| Removed { node, open }), gone)
    }

    /// Keeps the lowest of the empty chunks; returns the other one, which has to be freed.
    fn empty(&mut self, number: u32) -> Option<u32> {
        let other = self.spare.replace(number)?;
        self.spare = Some(other.min(number));
        Some(other.max(number))
    }

    /// Frees memory of the hash table when most of it is empty.
    fn shrink(&mut self, hasher: &DefaultHashBuilder) {
        while self.chunks.last().is_some_and(Option::is_none) {
            self.chunks.pop();
            self.roomy.remove(&(self.chunks.len() as u32));
        }
        let Shard { places, chunks, .. } = self;
        if places.capacity() > 1024 && places.len() < places.capacity() / 4 {
            places.shrink_to(places.len() * 2, |&place| hash_of_place(chunks, place, hasher));
        }
    }
}

/// The hash of the file in a slot, for the hash table when it moves its entries; all these slots are taken.
fn hash_of_place(chunks: &[Option<Chunk>], place: u32, hasher: &DefaultHashBuilder) -> u64 {
    let chunk = chunks.get(place as usize / CHUNK).and_then(Option::as_ref);
    chunk.and_then(|chunk| chunk.slots.get(place as usize % CHUNK)).map_or(0, |slot| hasher.hash_one(slot.id))
}

fn place(chunk: usize, within: usize) -> u32 {
    (chunk * CHUNK + within) as u32
}

/// Layout of a node id: reuse counter (32 bits), slot number (28), shard (4).
fn nodeid(shard: usize, place: u32, reuse: u32) -> u64 {
    u64::from(reuse) << 32 | u64::from(place) << SHARD_BITS | shard as u64
}

fn shard_of(nodeid: u64) -> usize {
    nodeid as usize & (SHARDS - 1)
}

/// The shard of a file. The same in each process: node ids survive the process.
fn shard_of_id(id: &FileId) -> usize {
    let mixed = id.ino ^ id.generation.rotate_left(21) ^ id.fs.rotate_left(42);
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize & (SHARDS - 1)
}

fn place_of(nodeid: u64) -> u32 {
    nodeid as u32 >> SHARD_BITS
}

fn reuse_of(nodeid: u64) -> u32 {
    (nodeid >> 32) as u32
}

#[cfg(test)]
#[path = "inodes_tests.rs"]
mod tests;
