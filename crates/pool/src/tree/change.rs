//! Changes of a tree: put, remove, split, merge, and the nodes that become dead by them.
//!
//! Callers: [`super::Tree`] only.
//!
//! Invariants:
//! - A node is changed in place exactly if it belongs to the live generation and is not shared;
//!   otherwise it is replaced by a copy.
//! - The replacement of a stored node makes its frame dead. The replacement of a node of a frozen
//!   tree makes that node abandoned: it becomes dead once the block address at which it was stored
//!   is known.
//! - Nodes become dead only after every step that can fail.

use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Inner, Node};
use super::page::{HEADER, Leaf};
use super::{Context, Settings};
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};

/// Frames that the live tree does not reference any more, and nodes that will be dead frames once
/// they are stored.
#[derive(Debug, Default)]
pub(super) struct DeadNodes {
    by_txg: Vec<(Txg, Vec<Pointer>)>,
    abandoned: Vec<(Txg, Arc<Node>)>,
}

impl DeadNodes {
    fn add(&mut self, txg: Txg, pointer: Pointer) {
        match self.by_txg.iter_mut().rev().find(|(of, _)| *of == txg) {
            Some((_, pointers)) => pointers.push(pointer),
            None => self.by_txg.push((txg, vec![pointer])),
        }
    }

    /// Takes the frames freed by the txgs up to this one.
    pub(super) fn take(&mut self, txg: Txg) -> Vec<Pointer> {
        let mut taken = Vec::new();
        self.by_txg.retain_mut(|(of, pointers)| {
            let due = *of <= txg;
            if due {
                taken.append(pointers);
            }
            !due
        });
        taken
    }

    /// Processes a written freeze: nodes of it and of older ones have their block addresses.
    pub(super) fn settle(&mut self, generation: u64) {
        for (txg, node) in std::mem::take(&mut self.abandoned) {
            if node.generation > generation {
                self.abandoned.push((txg, node));
            } else if let Some(pointer) = node.stored.get() {
                self.add(txg, *pointer);
            }
        }
    }
}

/// A new right neighbour, and the separator key.
pub(super) struct Split {
    key: Vec<u8>,
    child: Child,
}

/// Whether a row exists; `None` if a node on its path is not exclusively the live generation's, and
/// would have to be copied before a change.
pub(super) fn is_in_own(child: &Child, generation: u64, key: &[u8]) -> Option<bool> {
    let Child::Dirty(node) = child else { return None };
    if node.generation != generation || Arc::strong_count(node) > 1 {
        return None;
    }
    match &node.body {
        Body::Leaf(leaf) => Some(leaf.get(key).is_some()),
        Body::Inner(inner) => is_in_own(inner.child(inner.find(key))?, generation, key),
    }
}

/// State of a node after a removal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// Nothing to do in its parent.
    Fine,
    /// It has become small enough to try a merge.
    Small,
    /// It is empty.
    Gone,
}

/// The nodes and frames of a dropped subtree.
#[derive(Default)]
struct Remains {
    pointers: Vec<Pointer>,
    abandoned: Vec<Arc<Node>>,
    cost: u64,
}

/// One change of a tree.
pub(super) struct TreeChange<'t> {
    pub(super) ctx: &'t Context<'t>,
    pub(super) txg: Txg,
    pub(super) generation: u64,
    pub(super) settings: Settings,
    pub(super) dead: &'t mut DeadNodes,
    pub(super) dirty: &'t mut u64,
}

impl TreeChange<'_> {
    fn new_node(&mut self, body: Body) -> Child {
        let node = Node::new(self.generation, body);
        *self.dirty += node.cost();
        Child::Dirty(Arc::new(node))
    }

    fn account(&mut self, before: u64, after: u64) {
        *self.dirty = (*self.dirty + after).saturating_sub(before);
    }

    /// Returns the node of a child for a change: read, or copied if it is shared.
    fn own<'c>(&mut self, child: &'c mut Child, level: Option<u8>) -> Result<&'c mut Node, PoolError> {
        let replaced = match child {
            Child::Clean(pointer) => {
                let node = self.ctx.node(pointer, level)?.thaw(self.generation);
                self.dead.add(self.txg, *pointer);
                *self.dirty += node.cost();
                Some(node)
            }
            Child::Dirty(node) if node.generation != self.generation => {
                let copy = node.thaw(self.generation);
                self.dead.abandoned.push((self.txg, Arc::clone(node)));
                *self.dirty += copy.cost();
                Some(copy)
            }
            // Shared with a view: it is not stored, so no frame becomes dead.
            Child::Dirty(node) if Arc::strong_count(node) > 1 => {
                let copy = node.thaw(self.generation);
                self.account(node.cost(), copy.cost());
                Some(copy)
            }
            Child::Dirty(_) => None,
        };
        if let Some(node) = replaced {
            *child = Child::Dirty(Arc::new(node));
        }
        match child {
            Child::Dirty(node) => Arc::get_mut(node).ok_or(BROKEN),
            Child::Clean(_) => Err(BROKEN),
        }
    }

    pub(super) fn put_root(&mut self, root: &mut Option<Child>, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        let child = match root {
            Some(child) => child,
            None => root.insert(self.new_node(Body::Leaf(Leaf::default()))),
        };
        let Some(split) = self.put(child, None, key, value)? else { return Ok(()) };
        let level = match child {
            Child::Dirty(node) => node.level() + 1,
            Child::Clean(_) => return Err(BROKEN),
        };
        let Some(left) = root.take() else { return Err(BROKEN) };
        let mut inner = Inner::over(level, left);
        inner.push(&split.key, split.child);
        inner.index();
        *root = Some(self.new_node(Body::Inner(inner)));
        Ok(())
    }

    /// Makes the nodes on the path to a row exclusive, and holds them in memory.
    pub(super) fn hold(&mut self, child: &mut Child, level: Option<u8>, key: &[u8]) -> Result<(), PoolError> {
        let Body::Inner(inner) = &mut self.own(child, level)?.body else { return Ok(()) };
        let (at, below) = (inner.find(key), inner.level().checked_sub(1));
        self.hold(inner.children.get_mut(at).ok_or(BROKEN)?, below, key)
    }

    fn put(
        &mut self,
        child: &mut Child,
        level: Option<u8>,
        key: &[u8],
        value: &[u8],
    ) -> Result<Option<Split>, PoolError> {
        let node = self.own(child, level)?;
        let inner = match &mut node.body {
            Body::Leaf(leaf) => {
                let before = leaf.cost();
                let split = leaf.put(key, value, self.settings.leaf(key));
                self.account(before, leaf.cost());
                return Ok(
                    split.map(|split| Split { key: split.separator, child: self.new_node(Body::Leaf(split.right)) })
                );
            }
            Body::Inner(inner) => inner,
        };
        let at = inner.find(key);
        let below = inner.level().checked_sub(1);
        let Some(split) = self.put(inner.children.get_mut(at).ok_or(BROKEN)?, below, key, value)? else {
            return Ok(None);
        };
        let before = inner.cost();
        inner.insert(at + 1, &split.key, split.child);
        let up = (inner.used() > self.settings.page).then(|| inner.split(at + 1));
        self.account(before, inner.cost());
        Ok(up.map(|(key, right)| Split { key, child: self.new_node(Body::Inner(right)) }))
    }

    pub(super) fn remove_root(&mut self, root: &mut Option<Child>, key: &[u8]) -> Result<(), PoolError> {
        let Some(child) = root else { return Ok(()) };
        let after = self.remove(child, None, key)?;
        self.lower(root, after)
    }

    /// Removes levels that are not needed any more.
    fn lower(&mut self, root: &mut Option<Child>, after: After) -> Result<(), PoolError> {
        if after == After::Gone {
            if let Some(child) = root.take() {
                self.drop_node(&child);
            }
            return Ok(());
        }
        while let Some(Child::Dirty(node)) = root {
            let only = match &node.body {
                Body::Inner(inner) if inner.len() == 1 => inner.child(0).ok_or(BROKEN)?.clone(),
                _ => break,
            };
            if let Some(old) = root.replace(only) {
                self.drop_node(&old);
            }
        }
        Ok(())
    }

    fn remove(&mut self, child: &mut Child, level: Option<u8>, key: &[u8]) -> Result<After, PoolError> {
        let node = self.own(child, level)?;
        let inner = match &mut node.body {
            Body::Leaf(leaf) => {
                let before = leaf.used();
                if let Ok(at) = leaf.find(key) {
                    leaf.remove(at);
                }
                return Ok(self.after_leaf(leaf, before));
            }
            Body::Inner(inner) => inner,
        };
        let at = inner.find(key);
        let below = inner.level().checked_sub(1);
        let after = self.remove(inner.children.get_mut(at).ok_or(BROKEN)?, below, key)?;
        if after == After::Fine {
            return Ok(After::Fine);
        }
        let before = inner.cost();
        self.mend(inner, at, after)?;
        self.account(before, inner.cost());
        Ok(self.after_inner(inner))
    }

    /// A leaf asks for a merge when it falls below a quarter of a page, an eighth, and so on: not
    /// with each row, since its neighbours may be full.
    fn after_leaf(&self, leaf: &Leaf, before: usize) -> After {
        if leaf.len() == 0 {
            return After::Gone;
        }
        let page = self.settings.leaf(leaf.key(0));
        let rank = |used: usize| (page / used.max(1)).checked_ilog2().unwrap_or(0);
        let (before, now) = (rank(before), rank(leaf.used()));
        if now >= 2 && now > before { After::Small } else { After::Fine }
    }

    fn after_inner(&self, inner: &Inner) -> After {
        match inner.len() {
            0 => After::Gone,
            1 => After::Small,
            _ if inner.used() < self.settings.page / 4 => After::Small,
            _ => After::Fine,
        }
    }

    /// Removes an empty child, or merges a small one with a neighbour.
    fn mend(&mut self, inner: &mut Inner, at: usize, after: After) -> Result<(), PoolError> {
        match after {
            After::Fine => {}
            After::Gone => {
                let child = inner.remove(at).ok_or(BROKEN)?;
                self.drop_node(&child);
            }
            After::Small => {
                if !self.merge(inner, at)?
                    && let Some(left) = at.checked_sub(1)
                {
                    self.merge(inner, left)?;
                }
            }
        }
        Ok(())
    }

    /// Merges a child with the next one if both are in memory and fit one node with some room left.
    /// A removal never reads a node for this.
    fn merge(&mut self, inner: &mut Inner, at: usize) -> Result<bool, PoolError> {
        let (Some(left), Some(right)) = (inner.child(at), inner.child(at + 1)) else { return Ok(false) };
        let (Some(left), Some(right)) = (self.in_memory(left), self.in_memory(right)) else { return Ok(false) };
        let separator = inner.key(at + 1).to_vec();
        let (used, page) = match (&left.body, &right.body) {
            // If both kinds of leaves meet, the smaller limit counts.
            (Body::Leaf(left), Body::Leaf(right)) => {
                let page = self.settings.leaf(left.key(0)).min(self.settings.leaf(right.key(0)));
                (left.used() + right.used() - HEADER, page)
            }
            (Body::Inner(left), Body::Inner(right)) if left.level() == right.level() => {
                (left.used() + right.used() - HEADER + separator.len(), self.settings.page)
            }
            _ => return Ok(false),
        };
        if used > page - page / 8 {
            return Ok(false);
        }
        // The reference would make the node look shared.
        drop(left);
        let below = inner.level().checked_sub(1);
        // The left node may have been evicted from the cache and be unreadable now: then they are
        // not merged, and the removal succeeds all the same.
        let Ok(node) = self.own(inner.children.get_mut(at).ok_or(BROKEN)?, below) else { return Ok(false) };
        let before = node.cost();
        match (&mut node.body, &right.body) {
            (Body::Leaf(left), Body::Leaf(right)) => left.append(right),
            (Body::Inner(left), Body::Inner(right)) => left.append(&separator, right),
            _ => return Err(BROKEN),
        }
        self.account(before, node.cost());
        drop(right);
        let gone = inner.remove(at + 1).ok_or(BROKEN)?;
        self.drop_node(&gone);
        Ok(true)
    }

    fn in_memory(&self, child: &Child) -> Option<Arc<Node>> {
        match child {
            Child::Dirty(node) => Some(Arc::clone(node)),
            Child::Clean(pointer) => self.ctx.cache.cached_node(pointer),
        }
    }

    /// Drops a node from the live tree, but not the nodes below it.
    fn drop_node(&mut self, child: &Child) {
        match child {
            Child::Clean(pointer) => self.dead.add(self.txg, *pointer),
            Child::Dirty(node) if node.generation == self.generation => self.account(node.cost(), 0),
            Child::Dirty(node) => self.dead.abandoned.push((self.txg, Arc::clone(node))),
        }
    }

    pub(super) fn remove_range_root(
        &mut self,
        root: &mut Option<Child>,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> Result<(), PoolError> {
        let Some(child) = root else { return Ok(()) };
        let after = self.remove_range(child, None, from, to)?;
        self.lower(root, after)
    }

    fn remove_range(
        &mut self,
        child: &mut Child,
        level: Option<u8>,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> Result<After, PoolError> {
        let node = self.own(child, level)?;
        let inner = match &mut node.body {
            Body::Leaf(leaf) => {
                let before = leaf.used();
                let place = |key: &[u8]| leaf.find(key).unwrap_or_else(|at| at);
                let (first, end) = (place(from), to.map_or(leaf.len(), place));
                leaf.remove_range(first, end);
                return Ok(self.after_leaf(leaf, before));
            }
            Body::Inner(inner) => inner,
        };
        let cost = inner.cost();
        let result = self.remove_children(inner, from, to);
        self.account(cost, inner.cost());
        result?;
        Ok(self.after_inner(inner))
    }

    fn remove_children(&mut self, inner: &mut Inner, from: &[u8], to: Option<&[u8]>) -> Result<(), PoolError> {
        let below = inner.level().checked_sub(1).ok_or(BROKEN)?;
        // Whole children first, in reverse order so that positions stay valid; a child before the
        // last ends where the next begins.
        let first = inner.find(from);
        let last = to.map_or(inner.len().saturating_sub(1), |to| inner.find(to));
        for at in (first + 1..last).rev() {
            self.drop_child(inner, at, below)?;
        }
        let last = last.min(first + 1);
        if last > first {
            // The last child begins inside the range; without an upper end it is dropped as well.
            if to.is_none() {
                self.drop_child(inner, last, below)?;
            } else {
                self.remove_in_child(inner, last, below, from, to)?;
            }
        }
        self.remove_in_child(inner, first, below, from, to)
    }

    fn remove_in_child(
        &mut self,
        inner: &mut Inner,
        at: usize,
        below: u8,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> Result<(), PoolError> {
        // A child without rows to remove is not copied: its lower bound may be the end of the
        // range.
        if to.is_some_and(|to| at > 0 && inner.key(at) >= to) {
            return Ok(());
        }
        let after = self.remove_range(inner.children.get_mut(at).ok_or(BROKEN)?, Some(below), from, to)?;
        self.mend(inner, at, after)
    }

    fn drop_child(&mut self, inner: &mut Inner, at: usize, below: u8) -> Result<(), PoolError> {
        let mut remains = Remains::default();
        self.collect(inner.child(at).ok_or(BROKEN)?, below, &mut remains)?;
        // Drops its reference first: otherwise the abandoned nodes would look shared.
        drop(inner.remove(at));
        for pointer in remains.pointers {
            self.dead.add(self.txg, pointer);
        }
        for node in remains.abandoned {
            self.dead.abandoned.push((self.txg, node));
        }
        self.account(remains.cost, 0);
        Ok(())
    }

    /// Collects the nodes of a subtree: inner nodes are read, leaves are not.
    fn collect(&self, child: &Child, level: u8, remains: &mut Remains) -> Result<(), PoolError> {
        let held;
        let node = match child {
            Child::Clean(pointer) => {
                if level == 0 {
                    remains.pointers.push(*pointer);
                    return Ok(());
                }
                held = self.ctx.cache.node_in_passing(self.ctx.frames, pointer, Some(level))?;
                remains.pointers.push(*pointer);
                &held
            }
            Child::Dirty(node) => {
                if node.generation == self.generation {
                    remains.cost += node.cost();
                } else {
                    remains.abandoned.push(Arc::clone(node));
                }
                node
            }
        };
        if let Body::Inner(inner) = &node.body {
            for child in &inner.children {
                self.collect(child, inner.level().checked_sub(1).ok_or(BROKEN)?, remains)?;
            }
        }
        Ok(())
    }
}
