//! The block cache: decoded nodes of trees and decompressed file content by the name of their
//! frame, under one limit in bytes.
//!
//! Callers: `tree` (nodes), the dataset layer (file content). One cache serves a whole pool.
//!
//! Invariants:
//! - A frame's name (segment and index) is never given to another frame, and a frame is never
//!   changed: an entry cannot be stale.
//! - What is cached is immutable; its weight is taken once.
//! - Several readers of a missing frame read it once; the others wait for the first.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quick_cache::sync::{Cache as Store, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};

use crate::error::{Damage, PoolError};
use crate::frames::Frames;
use crate::pointer::{FrameKind, Pointer};
use crate::tree::node::Node;

/// What an entry takes beside its content: the reference counts, the slot and the index of the
/// cache. Bytes, measured roughly.
const OVERHEAD: u64 = 128;
/// Each shard of the cache has at least this much, so that a few large frames do not push
/// everything else out. Bytes.
const SHARD: u64 = 8 << 20;

#[derive(Clone)]
enum Entry {
    Node(Arc<Node>),
    Data(Arc<[u8]>),
}

#[derive(Clone)]
struct Weight;

impl Weighter<u64, Entry> for Weight {
    fn weight(&self, _: &u64, entry: &Entry) -> u64 {
        OVERHEAD
            + match entry {
                Entry::Node(node) => node.cost(),
                Entry::Data(content) => content.len() as u64,
            }
    }
}

/// Frame names are dense small numbers that nobody outside chooses: one multiplication and shift
/// spreads them.
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

/// What the cache did so far, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Nodes of trees that were there.
    pub node_hits: u64,
    /// Nodes that were read.
    pub node_misses: u64,
    /// File content that was there.
    pub data_hits: u64,
    /// File content that was read.
    pub data_misses: u64,
    /// What is held now, bytes.
    pub bytes: u64,
    /// The limit, bytes.
    pub limit: u64,
    /// How many frames are held now.
    pub frames: u64,
}

/// Nodes and file content in memory.
pub struct Cache {
    entries: Store<u64, Entry, Weight, Spread, DefaultLifecycle<u64, Entry>>,
    stripes: [Stripe; 8],
    /// Nodes that were not there, in one place: it is written seldom and read often.
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
    /// A cache of so many bytes.
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
            // All three numbers are given, which is all that the builder checks; the plain
            // constructor takes the same ones.
            Err(_) => Store::with(items, limit, Weight, Spread::default(), DefaultLifecycle::default()),
        };
        Self { entries, stripes: Default::default(), misses: AtomicU64::new(0) }
    }

    /// How many nodes were not there so far.
    pub(crate) fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Changes the limit; what is too much goes at once.
    pub fn set_limit(&self, limit: u64) {
        self.entries.set_capacity(limit);
    }

    /// The content of a frame that is no node, read if it is not there.
    ///
    /// # Errors
    /// Those of [`Frames::read`].
    pub fn data(&self, frames: &dyn Frames, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        if let Some(content) = self.cached_data(pointer) {
            return Ok(content);
        }
        match self.entries.get_or_insert_with(&name(pointer), || frames.read(pointer).map(Entry::Data))? {
            Entry::Data(content) => Ok(content),
            Entry::Node(_) => Err(wrong_kind(pointer)),
        }
    }

    /// The content of a frame that is no node, if it is there.
    #[must_use]
    pub fn cached_data(&self, pointer: &Pointer) -> Option<Arc<[u8]>> {
        let stripe = self.stripe(pointer);
        if let Some(Entry::Data(content)) = self.entries.get(&name(pointer)) {
            stripe.data_hits.fetch_add(1, Ordering::Relaxed);
            return Some(content);
        }
        stripe.data_misses.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Keeps content that was just written or read in another way.
    pub fn insert_data(&self, pointer: &Pointer, content: Arc<[u8]>) {
        self.entries.insert(name(pointer), Entry::Data(content));
    }

    /// Whether the frame is held.
    #[must_use]
    pub fn holds(&self, pointer: &Pointer) -> bool {
        self.entries.contains_key(&name(pointer))
    }

    /// Lets a frame go that nobody will ask for again, because it was freed.
    pub fn forget(&self, pointer: &Pointer) {
        self.entries.remove(&name(pointer));
    }

    /// Lets everything go.
    pub fn clear(&self) {
        self.entries.clear();
    }

    /// What the cache did so far.
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

    /// A node, read and decoded if it is not there. `level` is the height at which it must be; none
    /// for a root.
    pub(crate) fn node(
        &self,
        frames: &dyn Frames,
        pointer: &Pointer,
        level: Option<u8>,
    ) -> Result<Arc<Node>, PoolError> {
        let stripe = self.stripe(pointer);
        let node = match self.entries.get(&name(pointer)) {
            Some(Entry::Node(node)) => {
                stripe.node_hits.fetch_add(1, Ordering::Relaxed);
                node
            }
            Some(Entry::Data(_)) => return Err(wrong_kind(pointer)),
            None => {
                stripe.node_misses.fetch_add(1, Ordering::Relaxed);
                self.misses.fetch_add(1, Ordering::Relaxed);
                match self.entries.get_or_insert_with(&name(pointer), || read_node(frames, pointer).map(Entry::Node))? {
                    Entry::Node(node) => node,
                    Entry::Data(_) => return Err(wrong_kind(pointer)),
                }
            }
        };
        check_level(&node, pointer, level)?;
        Ok(node)
    }

    /// A node from the cache if it is there, otherwise read and not kept: for walks over
    /// everything, which would push out what is in use.
    pub(crate) fn node_in_passing(
        &self,
        frames: &dyn Frames,
        pointer: &Pointer,
        level: Option<u8>,
    ) -> Result<Arc<Node>, PoolError> {
        let node = match self.entries.peek(&name(pointer)) {
            Some(Entry::Node(node)) => node,
            Some(Entry::Data(_)) => return Err(wrong_kind(pointer)),
            None => read_node(frames, pointer)?,
        };
        check_level(&node, pointer, level)?;
        Ok(node)
    }

    /// A node if it is there.
    pub(crate) fn cached_node(&self, pointer: &Pointer) -> Option<Arc<Node>> {
        match self.entries.get(&name(pointer)) {
            Some(Entry::Node(node)) => Some(node),
            Some(Entry::Data(_)) | None => None,
        }
    }

    /// Keeps a node that was just written.
    pub(crate) fn insert_node(&self, pointer: &Pointer, node: Arc<Node>) {
        self.entries.insert(name(pointer), Entry::Node(node));
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

/// Heights fall strictly on each way down, so that damage cannot lead a reader round in circles.
fn check_level(node: &Node, pointer: &Pointer, level: Option<u8>) -> Result<(), PoolError> {
    if level.is_none_or(|level| level == node.level()) {
        return Ok(());
    }
    Err(PoolError::Frame { pointer: *pointer, damage: Damage::Structure("a node at the wrong height of its tree") })
}

#[cfg(test)]
mod tests;
