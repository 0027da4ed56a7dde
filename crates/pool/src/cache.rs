//! The block cache (like ZFS' ARC): decoded tree nodes and decompressed file content by the name of their frame,
//! under one limit in bytes.
//!
//! Callers: `tree` (nodes), the dataset layer (file content). One cache serves a whole pool.
//!
//! Invariants:
//! - A frame's name (segment and index) is never reused, and a frame is never changed: an entry cannot be
//!   stale.
//! - The names of sealed frames are not authenticated, their ids are: an entry has the id of its frame, and a lookup
//!   with another id is a miss. Otherwise a forged address would show cached content of another file system.
//! - Entries are immutable; their weight is computed once.
//! - Concurrent readers of a missing frame read it once; the others wait for the first.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quick_cache::sync::{Cache as Store, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};

use crate::error::{Damage, PoolError};
use crate::frames::Frames;
use crate::pointer::{FrameKind, Pointer};
use crate::tree::node::Node;

/// Memory of an entry in addition to its content: reference counts, slot and index of the cache. Bytes, measured
/// roughly.
const OVERHEAD: u64 = 128;
/// Minimum size of a shard, so that a few large frames do not evict everything else, bytes.
const SHARD: u64 = 8 << 20;

/// The id of a sealed frame; zeros for other frames.
type FrameId = [u8; 16];

#[derive(Clone)]
enum Entry {
    Node(FrameId, Arc<Node>),
    Data(FrameId, Arc<[u8]>),
}

impl Entry {
    fn is_of(&self, pointer: &Pointer) -> bool {
        let (Self::Node(id, _) | Self::Data(id, _)) = self;
        *id == id_of(pointer)
    }
}

fn id_of(pointer: &Pointer) -> FrameId {
    if pointer.is_sealed() { pointer.checksum } else { FrameId::default() }
}

#[derive(Clone)]
struct Weight;

impl Weighter<u64, Entry> for Weight {
    fn weight(&self, _: &u64, entry: &Entry) -> u64 {
        OVERHEAD
            + match entry {
                Entry::Node(_, node) => node.cost(),
                Entry::Data(_, content) => content.len() as u64,
            }
    }
}

/// Hash of frame names: they are dense small numbers that no user chooses, so a multiplication and a shift are
/// enough.
#[derive(Clone, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.0 ^= self.0 >> 29;
    }
}

impl BuildHasher for Spread {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        Self::default()
    }
}

/// Counters on a cache line of their own: readers on several processors must not share one.
#[derive(Default)]
#[repr(align(64))]
struct Stripe {
    node_hits: AtomicU64,
    node_misses: AtomicU64,
    data_hits: AtomicU64,
    data_misses: AtomicU64,
}

/// Statistics of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tree nodes found in the cache.
    pub node_hits: u64,
    /// Tree nodes that had to be read.
    pub node_misses: u64,
    /// File content found in the cache.
    pub data_hits: u64,
    /// File content that had to be read.
    pub data_misses: u64,
    /// Current size, bytes.
    pub bytes: u64,
    /// Maximum size, bytes.
    pub limit: u64,
    /// Current number of frames.
    pub frames: u64,
}

/// Nodes and file content in memory.
pub struct Cache {
    entries: Store<u64, Entry, Weight, Spread, DefaultLifecycle<u64, Entry>>,
    stripes: [Stripe; 8],
    /// Total of node misses, in one word: it is written seldom and read often.
    misses: AtomicU64,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("counters", &self.counters()).finish_non_exhaustive()
    }
}

fn name(pointer: &Pointer) -> u64 {
    u64::from(pointer.segment) << 32 | u64::from(pointer.index)
}

fn wrong_kind(pointer: &Pointer) -> PoolError {
    PoolError::Frame { pointer: *pointer, damage: Damage::Structure("a frame is named as a node and as file content") }
}

impl Cache {
    /// A cache with this limit in bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        let shards = (limit / SHARD).clamp(1, 16) as usize;
        // 16 KiB is between a small row's inline content and a whole node: the estimate only sizes
        // the index.
        let items = (limit >> 14).max(64) as usize;
        let mut options = OptionsBuilder::new();
        options.shards(shards).estimated_items_capacity(items).weight_capacity(limit);
        let entries = match options.build() {
            Ok(options) => Store::with_options(options, Weight, Spread::default(), DefaultLifecycle::default()),
            // All three values are set, which is all that the builder checks; the plain constructor takes the same
            // ones.
            Err(_) => Store::with(items, limit, Weight, Spread::default(), DefaultLifecycle::default()),
        };
        Self { entries, stripes: Default::default(), misses: AtomicU64::new(0) }
    }

    /// Number of node misses so far.
    pub(crate) fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Changes the limit; excess entries are evicted at once.
    pub fn set_limit(&self, limit: u64) {
        self.entries.set_capacity(limit);
    }

    /// Returns the content of a frame other than a node, and reads it if it is not cached.
    ///
    /// # Errors
    /// Errors of [`Frames::read`].
    pub fn data(&self, frames: &dyn Frames, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        if let Some(content) = self.cached_data(pointer) {
            return Ok(content);
        }
        let read = || frames.read(pointer).map(|content| Entry::Data(id_of(pointer), content));
        match self.read_through(pointer, read)? {
            Entry::Data(_, content) => Ok(content),
            Entry::Node(..) => Err(wrong_kind(pointer)),
        }
    }

    /// The entry of a frame, if it is cached.
    fn entry(&self, pointer: &Pointer) -> Option<Entry> {
        self.entries.get(&name(pointer)).filter(|entry| entry.is_of(pointer))
    }

    /// The entry of a frame, which is read if it is not cached. An entry of another frame with this name is replaced.
    fn read_through(&self, pointer: &Pointer, read: impl Fn() -> Result<Entry, PoolError>) -> Result<Entry, PoolError> {
        let entry = self.entries.get_or_insert_with(&name(pointer), &read)?;
        if entry.is_of(pointer) {
            return Ok(entry);
        }
        let entry = read()?;
        self.entries.insert(name(pointer), entry.clone());
        Ok(entry)
    }

    /// Returns the content of a frame other than a node, if it is cached.
    #[must_use]
    pub fn cached_data(&self, pointer: &Pointer) -> Option<Arc<[u8]>> {
        let stripe = self.stripe(pointer);
        if let Some(Entry::Data(_, content)) = self.entry(pointer) {
            stripe.data_hits.fetch_add(1, Ordering::Relaxed);
            return Some(content);
        }
        stripe.data_misses.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Caches content that was just written or read in another way.
    pub fn insert_data(&self, pointer: &Pointer, content: Arc<[u8]>) {
        self.entries.insert(name(pointer), Entry::Data(id_of(pointer), content));
    }

    /// Whether the frame is cached.
    #[must_use]
    pub fn holds(&self, pointer: &Pointer) -> bool {
        self.entries.peek(&name(pointer)).is_some_and(|entry| entry.is_of(pointer))
    }

    /// Removes a freed frame, which will not be read again.
    pub fn forget(&self, pointer: &Pointer) {
        self.entries.remove(&name(pointer));
    }

    /// Removes all entries.
    pub fn clear(&self) {
        self.entries.clear();
    }

    /// Statistics so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let sum =
            |of: fn(&Stripe) -> &AtomicU64| self.stripes.iter().map(|stripe| of(stripe).load(Ordering::Relaxed)).sum();
        Counters {
            node_hits: sum(|stripe| &stripe.node_hits),
            node_misses: sum(|stripe| &stripe.node_misses),
            data_hits: sum(|stripe| &stripe.data_hits),
            data_misses: sum(|stripe| &stripe.data_misses),
            bytes: self.entries.weight(),
            limit: self.entries.capacity(),
            frames: self.entries.len() as u64,
        }
    }

    /// Returns a node; reads and decodes it if it is not cached. `level` is its required height; `None` for a root.
    pub(crate) fn node(
        &self,
        frames: &dyn Frames,
        pointer: &Pointer,
        level: Option<u8>,
    ) -> Result<Arc<Node>, PoolError> {
        let stripe = self.stripe(pointer);
        let node = match self.entry(pointer) {
            Some(Entry::Node(_, node)) => {
                stripe.node_hits.fetch_add(1, Ordering::Relaxed);
                node
            }
            Some(Entry::Data(..)) => return Err(wrong_kind(pointer)),
            None => {
                stripe.node_misses.fetch_add(1, Ordering::Relaxed);
                self.misses.fetch_add(1, Ordering::Relaxed);
                let read = || read_node(frames, pointer).map(|node| Entry::Node(id_of(pointer), node));
                match self.read_through(pointer, read)? {
                    Entry::Node(_, node) => node,
                    Entry::Data(..) => return Err(wrong_kind(pointer)),
                }
            }
        };
        check_level(&node, pointer, level)?;
        Ok(node)
    }

    /// Returns a node from the cache, or reads it without caching: for walks over everything, which would evict what
    /// is in use.
    pub(crate) fn node_in_passing(
        &self,
        frames: &dyn Frames,
        pointer: &Pointer,
        level: Option<u8>,
    ) -> Result<Arc<Node>, PoolError> {
        let node = match self.entries.peek(&name(pointer)).filter(|entry| entry.is_of(pointer)) {
            Some(Entry::Node(_, node)) => node,
            Some(Entry::Data(..)) => return Err(wrong_kind(pointer)),
            None => read_node(frames, pointer)?,
        };
        check_level(&node, pointer, level)?;
        Ok(node)
    }

    /// Returns a node if it is cached.
    pub(crate) fn cached_node(&self, pointer: &Pointer) -> Option<Arc<Node>> {
        match self.entry(pointer) {
            Some(Entry::Node(_, node)) => Some(node),
            Some(Entry::Data(..)) | None => None,
        }
    }

    /// Caches a node that was just written.
    pub(crate) fn insert_node(&self, pointer: &Pointer, node: Arc<Node>) {
        self.entries.insert(name(pointer), Entry::Node(id_of(pointer), node));
    }

    fn stripe(&self, pointer: &Pointer) -> &Stripe {
        let [a, b, c, d, e, f, g, h] = &self.stripes;
        match pointer.index & 7 {
            0 => a,
            1 => b,
            2 => c,
            3 => d,
            4 => e,
            5 => f,
            6 => g,
            _ => h,
        }
    }
}

fn read_node(frames: &dyn Frames, pointer: &Pointer) -> Result<Arc<Node>, PoolError> {
    let content = frames.read(pointer)?;
    let in_frame = |error| match error {
        PoolError::Format(damage) => PoolError::Frame { pointer: *pointer, damage },
        other => other,
    };
    Node::decode(content, pointer.kind == FrameKind::Leaf).map(Arc::new).map_err(in_frame)
}

/// Checks that heights decrease strictly from a node to its children, so that damage cannot cause endless loops.
fn check_level(node: &Node, pointer: &Pointer, level: Option<u8>) -> Result<(), PoolError> {
    if level.is_none_or(|level| level == node.level()) {
        return Ok(());
    }
    Err(PoolError::Frame { pointer: *pointer, damage: Damage::Structure("a node at the wrong height of its tree") })
}

#[cfg(test)]
mod tests;
