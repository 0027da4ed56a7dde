//! Commits: a tree is frozen in constant time, written out while it is changed further, and
//! settled.
//!
//! Callers: the commit of a txg, for each tree that changed in it.
//!
//! Invariants:
//! - Children are written before the node that references them: a returned root reaches only
//!   written frames.
//! - A dirty node is written by the first freeze that contains it; later ones use its pointer.
//! - After settling, the live tree holds no stored node in memory; the cache does, as long as there
//!   is room.

use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Node, header};
use super::{Context, Tree, View};
use crate::error::PoolError;
use crate::frames::{CompressionSetting, NewFrame, Owner, WriteStream};
use crate::pointer::{ChecksumKind, Pointer, Txg};

/// Parameters of written nodes.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The txg that is committed.
    pub txg: Txg,
    /// Compression.
    pub compression: CompressionSetting,
    /// Checksum.
    pub checksum: ChecksumKind,
}

/// Result of writing a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The root; `None` for a tree without rows.
    pub root: Option<Pointer>,
    /// Space that the new frames are charged ([`Pointer::charged`]), bytes.
    pub bytes: u64,
    /// Length of their content before compression, bytes.
    pub logical: u64,
    /// Number of written frames.
    pub frames: u64,
}

/// A frozen tree. It keeps its nodes in memory: drop it when it is settled.
#[derive(Debug)]
pub struct Frozen {
    root: Option<Child>,
    generation: u64,
    dataset: u64,
    /// Rows were put or removed since the previous freeze. The root may be clean all the same:
    /// after removals it may be a stored node.
    changed: bool,
}

impl Tree {
    /// Freezes the current tree for a commit, in constant time.
    pub fn freeze(&mut self) -> Frozen {
        let changed = std::mem::take(&mut self.changed);
        let frozen = Frozen { root: self.root.clone(), generation: self.generation, dataset: self.dataset, changed };
        self.unsettled.push((self.generation, self.dirty));
        self.dirty = 0;
        self.generation += 1;
        frozen
    }

    /// Processes a written freeze: releases its nodes, and makes those dead that the live tree has
    /// replaced.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a freeze that was not written out; nothing is changed then.
    pub fn settle(&mut self, frozen: &Frozen) -> Result<(), PoolError> {
        if let Some(Child::Dirty(root)) = &frozen.root
            && root.stored.get().is_none()
        {
            return Err(PoolError::Refused("a freeze is settled before it is written out".to_owned()));
        }
        if let Some(root) = &mut self.root {
            settle(root, frozen.generation, self.generation, &mut self.dirty);
        }
        self.dead.settle(frozen.generation);
        self.unsettled.retain(|(generation, _)| *generation > frozen.generation);
        Ok(())
    }
}

/// Whether settling changes anything at this child.
fn is_due(child: &Child, settled: u64, live: u64) -> bool {
    match child {
        Child::Clean(_) => false,
        Child::Dirty(node) => node.generation == live || (node.generation <= settled && node.stored.get().is_some()),
    }
}

fn settle(child: &mut Child, settled: u64, live: u64, dirty: &mut u64) {
    let Child::Dirty(node) = child else { return };
    if node.generation <= settled {
        if let Some(pointer) = node.stored.get() {
            *child = Child::Clean(*pointer);
        }
        return;
    }
    // A node of a later freeze is settled with that one: as a whole, since it must stay the node
    // that is written.
    let Body::Inner(inner) = &node.body else { return };
    if node.generation != live || !inner.children.iter().any(|child| is_due(child, settled, live)) {
        return;
    }
    if Arc::get_mut(node).is_none() {
        // It is shared with a view.
        let copy = node.thaw(live);
        *dirty = (*dirty + copy.cost()).saturating_sub(node.cost());
        *node = Arc::new(copy);
    }
    if let Some(Node { body: Body::Inner(inner), .. }) = Arc::get_mut(node) {
        for child in &mut inner.children {
            settle(child, settled, live, dirty);
        }
    }
}

impl Frozen {
    /// A view of the frozen tree.
    #[must_use]
    pub fn view(&self) -> View {
        View { root: self.root.clone() }
    }

    /// Whether the root may differ from that of the previous freeze, or is not written out yet:
    /// whether there is anything to commit.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.changed || matches!(&self.root, Some(Child::Dirty(node)) if node.stored.get().is_none())
    }

    /// Writes the nodes that are not stored yet, in the order of their keys, each inner node after
    /// its children. Called by one thread at a time; after an error it can be called again, and
    /// continues.
    ///
    /// # Errors
    /// Errors of [`crate::Frames::write`].
    pub fn write_out(&self, ctx: &Context<'_>, form: Form) -> Result<Written, PoolError> {
        let mut writer = NodeWriter { ctx, form, dataset: self.dataset, bytes: 0, logical: 0, frames: 0 };
        let root = match &self.root {
            Some(root) => Some(writer.child(root)?),
            None => None,
        };
        Ok(Written { root, bytes: writer.bytes, logical: writer.logical, frames: writer.frames })
    }
}

/// Number of leaves that are written at once: about 2 MiB.
const WRITTEN_TOGETHER: usize = 64;

/// Writes nodes and puts them into the cache.
pub(super) struct NodeWriter<'a> {
    pub(super) ctx: &'a Context<'a>,
    pub(super) form: Form,
    pub(super) dataset: u64,
    pub(super) bytes: u64,
    pub(super) logical: u64,
    pub(super) frames: u64,
}

impl NodeWriter<'_> {
    fn child(&mut self, child: &Child) -> Result<Pointer, PoolError> {
        let node = match child {
            Child::Clean(pointer) => return Ok(*pointer),
            Child::Dirty(node) => node,
        };
        if let Some(pointer) = node.stored.get() {
            return Ok(*pointer);
        }
        let pointers = match &node.body {
            Body::Leaf(_) => Vec::new(),
            Body::Inner(inner) => {
                if inner.level() == 1 {
                    self.leaves(&inner.children)?;
                }
                inner.children.iter().map(|child| self.child(child)).collect::<Result<_, _>>()?
            }
        };
        let pointer = self.node(node, &pointers)?;
        node.stored.set(pointer).map_err(|_| BROKEN)?;
        Ok(pointer)
    }

    /// Writes the dirty ones of neighbouring leaves, many at once, so that several threads can
    /// compress them.
    fn leaves(&mut self, children: &[Child]) -> Result<(), PoolError> {
        let dirty: Vec<&Arc<Node>> = children
            .iter()
            .filter_map(|child| match child {
                Child::Dirty(node) if node.stored.get().is_none() => Some(node),
                _ => None,
            })
            .collect();
        for some in dirty.chunks(WRITTEN_TOGETHER) {
            let contents: Vec<Vec<u8>> = some.iter().map(|node| content_of(node, &[])).collect();
            let frames: Vec<NewFrame<'_>> =
                some.iter().zip(&contents).map(|(node, content)| self.frame(node, content)).collect();
            let mut written = Vec::with_capacity(frames.len());
            let outcome = self.ctx.frames.write_all(&frames, &mut written);
            for ((node, content), pointer) in some.iter().zip(contents).zip(written) {
                self.keep(node, pointer, content, &[]);
                node.stored.set(pointer).map_err(|_| BROKEN)?;
            }
            outcome?;
        }
        Ok(())
    }

    fn frame<'a>(&self, node: &Node, content: &'a [u8]) -> NewFrame<'a> {
        NewFrame {
            stream: WriteStream::Metadata,
            kind: node.kind(),
            owner: Owner { dataset: self.dataset, object: 0, offset: u64::from(node.level()) },
            birth: self.form.txg,
            content,
            compression: self.form.compression,
            checksum: self.form.checksum,
        }
    }

    /// Counts a written node and puts it into the cache.
    fn keep(&mut self, node: &Node, pointer: Pointer, content: Vec<u8>, pointers: &[Pointer]) {
        self.bytes += pointer.charged();
        self.logical += u64::from(pointer.counted_logical());
        self.frames += 1;
        let body = match &node.body {
            Body::Leaf(leaf) => Body::Leaf(leaf.settled(content.into())),
            Body::Inner(inner) => Body::Inner(inner.settled(pointers)),
        };
        self.ctx.cache.insert_node(&pointer, Arc::new(Node::new(0, body)));
    }

    /// Writes one node with the pointers of its children.
    pub(super) fn node(&mut self, node: &Node, pointers: &[Pointer]) -> Result<Pointer, PoolError> {
        let content = content_of(node, pointers);
        let pointer = self.ctx.frames.write(&self.frame(node, &content))?;
        self.keep(node, pointer, content, pointers);
        Ok(pointer)
    }
}

/// The encoded content of a node.
fn content_of(node: &Node, pointers: &[Pointer]) -> Vec<u8> {
    let mut content = Vec::new();
    match &node.body {
        Body::Leaf(leaf) => {
            content.reserve_exact(leaf.used());
            content.extend_from_slice(&header(0, leaf.len()));
            leaf.encode(&mut content);
        }
        Body::Inner(inner) => inner.encode(pointers, &mut content),
    }
    content
}
