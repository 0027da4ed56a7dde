//! Nodes of a tree: leaves of rows, and inner nodes of children with the keys between them.
//!
//! Callers: everything in `tree`, and `cache`, which keeps decoded ones. Byte table:
//! `docs/pool-format.md`, "Trees".
//!
//! Invariants:
//! - Child `i` of an inner node has the keys from key `i` (the first: from the node's own lower
//!   bound) to before key `i + 1`.
//! - A node of the live generation belongs to one tree only and is changed in place; any other is
//!   never changed again.
//! - A node in the cache has clean children only, so that its weight is all the memory that it
//!   keeps alive.

use std::cmp::Ordering;
use std::sync::{Arc, OnceLock};

use super::page::{HEADER, Leaf, MAX_CONTENT, equal_in_front, head, shared_prefix};
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::{FrameKind, Pointer};

/// Highest level of a tree: with two children per node a higher one would have more rows than there
/// are bytes.
pub(crate) const MAX_LEVEL: u8 = 40;
/// Version of the format of nodes.
const VERSION: u8 = 1;
/// Space of a child in a page, in addition to its key: a length and a pointer, bytes.
pub(crate) const CHILD: usize = 2 + Pointer::LENGTH;

const fn bad(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// Error for an impossible state, instead of a panic.
pub(crate) const BROKEN: PoolError = bad("a tree in memory breaks its own rules");

/// A child of an inner node, or the root.
#[derive(Clone, Debug)]
pub(crate) enum Child {
    /// A stored node.
    Clean(Pointer),
    /// A node changed since the last settled commit.
    Dirty(Arc<Node>),
}

impl Child {
    /// Pointer of a stored child; `None` for a dirty one.
    pub(crate) fn pointer(&self) -> Option<Pointer> {
        match self {
            Self::Clean(pointer) => Some(*pointer),
            Self::Dirty(_) => None,
        }
    }
}

/// A node.
#[derive(Debug)]
pub(crate) struct Node {
    /// The generation of the tree in which it was created; 0 for one that was read.
    pub(crate) generation: u64,
    /// Pointer to the frame as which a commit has written it.
    pub(crate) stored: OnceLock<Pointer>,
    pub(crate) body: Body,
}

#[derive(Debug)]
pub(crate) enum Body {
    Leaf(Leaf),
    Inner(Inner),
}

/// An inner node.
#[derive(Clone, Debug)]
pub(crate) struct Inner {
    level: u8,
    /// The keys one after the other; the first is empty.
    keys: Vec<u8>,
    /// End of each key in `keys`.
    ends: Vec<u32>,
    /// The heads of the keys from the second on, as in a leaf, after the common prefix of their
    /// kind. Of another length while children are pushed: then a search does not use them.
    heads: Vec<u32>,
    /// The keys grouped by their first byte.
    kinds: Vec<KeyKind>,
    pub(crate) children: Vec<Child>,
}

/// Neighbouring keys of an inner node that begin with the same byte. Keys of different kinds have
/// no common prefix, and heads would only tell their kind.
#[derive(Clone, Copy, Debug)]
struct KeyKind {
    first: u8,
    /// The first child of them. Its key is short, since it only has to be greater than those of
    /// another kind: it has no head.
    start: usize,
    /// Length of the common prefix of the others.
    skip: usize,
}

impl Node {
    pub(crate) fn new(generation: u64, body: Body) -> Self {
        Self { generation, stored: OnceLock::new(), body }
    }

    /// Decodes a node. `leaf` is its kind according to its pointer.
    pub(crate) fn decode(content: Arc<[u8]>, leaf: bool) -> Result<Self, PoolError> {
        let mut reader = Reader::new(&content);
        if reader.u8()? != VERSION {
            return Err(bad("a node of an unknown version"));
        }
        let level = reader.u8()?;
        if level > MAX_LEVEL || (level == 0) != leaf {
            return Err(bad("the height of a node is not that of its kind"));
        }
        if reader.u16()? != 0 {
            return Err(bad("reserved bytes of a node"));
        }
        let count = reader.u32()?;
        let body = if leaf {
            Body::Leaf(Leaf::decode(content, count)?)
        } else {
            Body::Inner(Inner::decode(&content, level, count)?)
        };
        if count == 0 {
            return Err(bad("a node without entries"));
        }
        Ok(Self::new(0, body))
    }

    /// Height above the leaves.
    pub(crate) fn level(&self) -> u8 {
        match &self.body {
            Body::Leaf(_) => 0,
            Body::Inner(inner) => inner.level,
        }
    }

    /// Memory of the node, bytes.
    pub(crate) fn cost(&self) -> u64 {
        let body = match &self.body {
            Body::Leaf(leaf) => leaf.cost(),
            Body::Inner(inner) => inner.cost(),
        };
        body + size_of::<Self>() as u64
    }

    /// Returns a copy for changes in this generation.
    pub(crate) fn thaw(&self, generation: u64) -> Self {
        let body = match &self.body {
            Body::Leaf(leaf) => Body::Leaf(leaf.thaw()),
            Body::Inner(inner) => Body::Inner(inner.clone()),
        };
        Self::new(generation, body)
    }

    pub(crate) fn kind(&self) -> FrameKind {
        if self.level() == 0 { FrameKind::Leaf } else { FrameKind::Inner }
    }
}

/// The header of a node's content.
pub(crate) fn header(level: u8, count: usize) -> [u8; HEADER] {
    let [a, b, c, d] = (count as u32).to_le_bytes();
    [VERSION, level, 0, 0, a, b, c, d]
}

impl Inner {
    /// Creates an inner node with one child.
    pub(crate) fn over(level: u8, child: Child) -> Self {
        Self { ends: vec![0], children: vec![child], ..Self::empty(level) }
    }

    /// Creates an inner node without children, for loading.
    pub(crate) fn empty(level: u8) -> Self {
        Self { level, keys: Vec::new(), ends: Vec::new(), heads: Vec::new(), kinds: Vec::new(), children: Vec::new() }
    }

    fn decode(content: &[u8], level: u8, count: u32) -> Result<Self, PoolError> {
        if content.len() > MAX_CONTENT {
            return Err(bad("a node is too long"));
        }
        let room = (count as usize).min(content.len() / CHILD);
        let mut inner =
            Self { ends: Vec::with_capacity(room), children: Vec::with_capacity(room), ..Self::empty(level) };
        let mut reader = Reader::new(content);
        reader.take(HEADER)?;
        let mut last: Option<&[u8]> = None;
        for _ in 0..count {
            let length = reader.u16()?;
            let key = reader.take(usize::from(length))?;
            if last.is_some_and(|last| last >= key) || (last.is_none() && !key.is_empty()) {
                return Err(bad("the keys of a node do not rise"));
            }
            last = Some(key);
            let pointer = Pointer::decode(&mut reader)?;
            let kind = if level == 1 { FrameKind::Leaf } else { FrameKind::Inner };
            if pointer.kind != kind || pointer.logical as usize > MAX_CONTENT {
                return Err(bad("a child of a node is no node one below"));
            }
            inner.push(key, Child::Clean(pointer));
        }
        inner.index();
        if reader.is_empty() { Ok(inner) } else { Err(bad("bytes after the last entry of a node")) }
    }

    /// Appends the node's encoded content, header included; `pointers` are those of the children.
    pub(crate) fn encode(&self, pointers: &[Pointer], to: &mut Vec<u8>) {
        let mut writer = Writer::default();
        writer.bytes(&header(self.level, pointers.len()));
        for (at, pointer) in pointers.iter().enumerate() {
            let key = self.key(at);
            // Keys are checked against the limit before.
            writer.u16(key.len() as u16);
            writer.bytes(key);
            pointer.encode(&mut writer);
        }
        to.extend_from_slice(&writer.finish());
    }

    /// Returns this node with all its children clean, for the cache.
    pub(crate) fn settled(&self, pointers: &[Pointer]) -> Self {
        Self {
            level: self.level,
            keys: self.keys.clone(),
            ends: self.ends.clone(),
            heads: self.heads.clone(),
            kinds: self.kinds.clone(),
            children: pointers.iter().copied().map(Child::Clean).collect(),
        }
    }

    pub(crate) fn level(&self) -> u8 {
        self.level
    }

    pub(crate) fn len(&self) -> usize {
        self.children.len()
    }

    /// Length of the encoded node, bytes.
    pub(crate) fn used(&self) -> usize {
        HEADER + self.keys.len() + self.children.len() * CHILD
    }

    /// Length of the encoded node with one more child.
    pub(crate) fn used_with(&self, key: &[u8]) -> usize {
        self.used() + key.len() + CHILD
    }

    pub(crate) fn cost(&self) -> u64 {
        (self.keys.capacity()
            + 4 * (self.ends.capacity() + self.heads.capacity())
            + size_of::<KeyKind>() * self.kinds.capacity()
            + size_of::<Child>() * self.children.capacity()) as u64
    }

    /// Lower bound of a child; empty for the first.
    pub(crate) fn key(&self, at: usize) -> &[u8] {
        let start = at.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        let end = self.ends.get(at).copied().unwrap_or(start);
        self.keys.get(start as usize..end as usize).unwrap_or(&[])
    }

    /// Recomputes the heads.
    pub(crate) fn index(&mut self) {
        let (mut heads, mut kinds) = (std::mem::take(&mut self.heads), std::mem::take(&mut self.kinds));
        heads.clear();
        kinds.clear();
        let mut start = 1;
        while let Some(&first) = self.key(start).first() {
            let alike = (start + 1..self.len()).take_while(|at| self.key(*at).first() == Some(&first)).count();
            let end = start + 1 + alike;
            let skip = if alike > 0 { shared_prefix(self.key(start + 1), self.key(end - 1)) } else { 0 };
            kinds.push(KeyKind { first, start, skip });
            heads.push(0);
            heads.extend((start + 1..end).map(|at| head(self.key(at), skip)));
            start = end;
        }
        (self.heads, self.kinds) = (heads, kinds);
    }

    /// Returns the child that a key belongs to.
    pub(crate) fn find(&self, key: &[u8]) -> usize {
        // The result is at or after `low` and before `high`: the first key is less than all.
        let (mut low, mut high) = (0, self.len());
        if self.heads.len() + 1 == self.len()
            && let Some(&first) = key.first()
        {
            let behind = self.kinds.iter().take_while(|kind| kind.first <= first).count();
            let end = self.kinds.get(behind).map_or(self.len(), |next| next.start);
            let KeyKind { start, skip, .. } = match behind.checked_sub(1).and_then(|at| self.kinds.get(at)) {
                None => return 0,
                Some(kind) if kind.first < first => return end - 1,
                Some(kind) => *kind,
            };
            if key < self.key(start) {
                return start - 1;
            }
            let beginning = self.key(start + 1).get(..skip).unwrap_or(&[]);
            match key.get(..skip).unwrap_or(key).cmp(beginning) {
                _ if start + 1 == end => return start,
                Ordering::Less => return start,
                Ordering::Greater => return end - 1,
                Ordering::Equal => {}
            }
            // Child `at` has its head at `at - 1`.
            let (wanted, heads) = (head(key, skip), self.heads.get(start..end - 1).unwrap_or(&[]));
            let lower = heads.partition_point(|head| *head < wanted);
            low = start + lower;
            high = low + 1 + equal_in_front(heads.get(lower..).unwrap_or(&[]), |head| *head == wanted);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.key(middle) <= key { low = middle } else { high = middle }
        }
        low
    }

    pub(crate) fn child(&self, at: usize) -> Option<&Child> {
        self.children.get(at)
    }

    /// Appends a child whose keys are greater than all others.
    pub(crate) fn push(&mut self, key: &[u8], child: Child) {
        self.keys.extend_from_slice(key);
        self.ends.push(self.keys.len() as u32);
        self.children.push(child);
    }

    /// Inserts a child between others.
    pub(crate) fn insert(&mut self, at: usize, key: &[u8], child: Child) {
        let at = at.min(self.len());
        let start = at.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.keys.splice(start as usize..start as usize, key.iter().copied());
        self.ends.insert(at, start);
        for end in self.ends.iter_mut().skip(at) {
            *end += key.len() as u32;
        }
        self.children.insert(at, child);
        self.index();
    }

    /// Removes a child; its key range then belongs to the previous one, or, for the first, to the
    /// next one.
    pub(crate) fn remove(&mut self, at: usize) -> Option<Child> {
        if at >= self.len() {
            return None;
        }
        // The next child takes over the lower bound of a removed first child: its key is removed
        // instead.
        let key = if at == 0 { 1 } else { at };
        let length = self.key(key).len() as u32;
        if key < self.len() {
            let start = self.ends.get(key - 1).copied().unwrap_or(0);
            self.keys.drain(start as usize..(start + length) as usize);
            self.ends.remove(key);
            for end in self.ends.iter_mut().skip(key) {
                *end -= length;
            }
        } else {
            self.ends.pop();
        }
        let child = self.children.remove(at);
        self.index();
        Some(child)
    }

    /// Splits a node: returns the separator key, and the node with the children after it.
    pub(crate) fn split(&mut self, inserted: usize) -> (Vec<u8>, Self) {
        // Ascending keys leave full nodes behind, as in leaves.
        let cut = if inserted + 1 >= self.len() { self.len().saturating_sub(1) } else { self.middle() };
        let separator = self.key(cut).to_vec();
        let mut right = Self::empty(self.level);
        let children = self.children.split_off(cut.min(self.len()));
        for (offset, child) in children.into_iter().enumerate() {
            let key: &[u8] = if offset == 0 { &[] } else { self.key(cut + offset) };
            right.push(key, child);
        }
        self.ends.truncate(cut);
        self.keys.truncate(self.ends.last().copied().unwrap_or(0) as usize);
        self.index();
        right.index();
        (separator, right)
    }

    /// The child that divides the bytes in half; at least one child stays on either side.
    fn middle(&self) -> usize {
        let half = (self.used() - HEADER) / 2;
        let mut left = 0;
        for at in 0..self.len() {
            if left >= half && at > 0 {
                return at;
            }
            left += self.key(at).len() + CHILD;
        }
        self.len().saturating_sub(1)
    }

    /// Appends the children of the next node; `separator` is the lower bound of its first child.
    pub(crate) fn append(&mut self, separator: &[u8], next: &Self) {
        for (at, child) in next.children.iter().enumerate() {
            self.push(if at == 0 { separator } else { next.key(at) }, child.clone());
        }
        self.index();
    }
}

#[cfg(test)]
mod tests;
