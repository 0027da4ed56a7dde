//! Changes of a root since an earlier root of its history that is gone: the nodes born since are
//! walked, and the ranges between rows are reported as empty.
//!
//! Caller: incremental sending from a bookmark.
//!
//! Invariants:
//! - Steps are in the order of their keys. Keys that no step covers are unchanged.
//! - A node born before is also part of the earlier root: all old rows between its first and its
//!   last one are in it. Next to it rows may have been removed without a trace in an existing node
//!   (an empty node is removed from its parent), so its outermost leaves are read.

use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Node};
use super::{Context, View};
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};

/// Number of children whose frames are requested ahead at once.
const WINDOW: usize = 64;

/// A step of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since<'a> {
    /// A row that may have changed.
    Row(&'a [u8], &'a [u8]),
    /// There are no rows from the first key up to before the second; `None`: to the end.
    Nothing(&'a [u8], Option<&'a [u8]>),
}

/// Walk over the steps.
#[derive(Debug)]
pub struct SinceWalk<'a> {
    ctx: Context<'a>,
    since: Txg,
    /// Nodes from the root down, with the next position in each.
    parts: Vec<(Arc<Node>, usize)>,
    /// All keys before this one were reported.
    low: Vec<u8>,
    /// A root that was not entered yet.
    root: Option<Child>,
    /// Bounds of the last reported range.
    told: (Vec<u8>, Vec<u8>),
    ended: bool,
}

impl View {
    /// Returns the changes of the root since a txg, from a key on.
    #[must_use]
    pub fn since<'a>(&self, ctx: Context<'a>, since: Txg, from: &[u8]) -> SinceWalk<'a> {
        SinceWalk {
            ctx,
            since,
            parts: Vec::new(),
            low: from.to_vec(),
            root: self.root.clone(),
            told: (Vec::new(), Vec::new()),
            ended: false,
        }
    }
}

/// The smallest key after a key.
fn behind(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

impl SinceWalk<'_> {
    /// Returns the next step; `None` at the end.
    ///
    /// # Errors
    /// Errors of reading, and damage, which names the frame. The walk cannot continue then.
    #[allow(clippy::should_implement_trait, reason = "rows are borrowed from the walk, which an iterator cannot say")]
    pub fn next(&mut self) -> Result<Option<Since<'_>>, PoolError> {
        if let Some(root) = self.root.take()
            && self.child(&root, None)?
        {
            return Ok(Some(Since::Nothing(&self.told.0, Some(&self.told.1))));
        }
        loop {
            let Some((node, at)) = self.parts.last_mut() else {
                if std::mem::replace(&mut self.ended, true) {
                    return Ok(None);
                }
                return Ok(Some(Since::Nothing(&self.low, None)));
            };
            let (node, now) = (Arc::clone(node), *at);
            match &node.body {
                Body::Leaf(leaf) => {
                    let Some((key, _)) = leaf.row(now) else {
                        self.parts.pop();
                        continue;
                    };
                    if key < self.low.as_slice() {
                        *at += 1;
                        continue;
                    }
                    if key > self.low.as_slice() {
                        self.told = (std::mem::replace(&mut self.low, key.to_vec()), key.to_vec());
                        return Ok(Some(Since::Nothing(&self.told.0, Some(&self.told.1))));
                    }
                    *at += 1;
                    self.low = behind(key);
                    return self.last_row().map(Some);
                }
                Body::Inner(inner) => {
                    let Some(child) = inner.child(now) else {
                        self.parts.pop();
                        continue;
                    };
                    *at += 1;
                    if inner.level() == 1 && now % WINDOW == 0 {
                        let ahead = (now..now + WINDOW).filter_map(|at| inner.child(at)?.pointer());
                        let ahead: Vec<Pointer> = ahead.filter(|pointer| !self.ctx.cache.holds(pointer)).collect();
                        self.ctx.frames.expect(&ahead);
                    }
                    if self.child(child, inner.level().checked_sub(1))? {
                        return Ok(Some(Since::Nothing(&self.told.0, Some(&self.told.1))));
                    }
                }
            }
        }
    }

    /// The row before the current position of the leaf.
    fn last_row(&self) -> Result<Since<'_>, PoolError> {
        let (node, at) = self.parts.last().ok_or(BROKEN)?;
        let Body::Leaf(leaf) = &node.body else { return Err(BROKEN) };
        let (key, value) = at.checked_sub(1).and_then(|at| leaf.row(at)).ok_or(BROKEN)?;
        Ok(Since::Row(key, value))
    }

    /// Enters a child that was born since; skips an older one, and returns whether there is an
    /// empty range before it to report.
    fn child(&mut self, child: &Child, level: Option<u8>) -> Result<bool, PoolError> {
        let node = self.load(child, level)?;
        if child.pointer().is_none_or(|pointer| pointer.birth > self.since) {
            let at = match &node.body {
                Body::Leaf(leaf) => leaf.find(&self.low).unwrap_or_else(|at| at),
                Body::Inner(inner) => inner.find(&self.low),
            };
            self.parts.push((node, at));
            return Ok(false);
        }
        let (first, last) = (self.edge(Arc::clone(&node), false)?, self.edge(node, true)?);
        let low = behind(&last);
        if low <= self.low {
            return Ok(false);
        }
        let low = std::mem::replace(&mut self.low, low);
        let gap = low < first;
        self.told = (low, first);
        Ok(gap)
    }

    /// The first or the last key below a node.
    fn edge(&self, mut node: Arc<Node>, last: bool) -> Result<Vec<u8>, PoolError> {
        loop {
            node = match &node.body {
                Body::Leaf(leaf) => {
                    let at = if last { leaf.len().checked_sub(1).ok_or(BROKEN)? } else { 0 };
                    return leaf.row(at).map(|(key, _)| key.to_vec()).ok_or(BROKEN);
                }
                Body::Inner(inner) => {
                    let at = if last { inner.len().checked_sub(1).ok_or(BROKEN)? } else { 0 };
                    self.load(inner.child(at).ok_or(BROKEN)?, inner.level().checked_sub(1))?
                }
            };
        }
    }

    fn load(&self, child: &Child, level: Option<u8>) -> Result<Arc<Node>, PoolError> {
        match child {
            Child::Dirty(node) => Ok(Arc::clone(node)),
            Child::Clean(pointer) => self.ctx.cache.node_in_passing(self.ctx.frames, pointer, level),
        }
    }
}
