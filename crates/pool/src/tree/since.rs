//! What a root may differ in from an earlier one of its history that is gone: the nodes that were
//! born since are walked, and between all other rows it is said where there are none.
//!
//! Caller: incremental sending from a bookmark.
//!
//! Invariants:
//! - Steps come in the order of their keys. What no step speaks of is as it was.
//! - A node born before is one of the earlier root too: all rows that there were between its first
//!   and its last one are in it. Beside it rows may have gone without a trace in a node that is
//!   there (an empty node is taken out of the one above), so its outermost leaves are read.

use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Node};
use super::{Context, View};
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};

/// So many children are named to the frames at once.
const WINDOW: usize = 64;

/// What is told of the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since<'a> {
    /// A row that may be another than before.
    Row(&'a [u8], &'a [u8]),
    /// There are no rows at the first key and before the second; none: to the end.
    Nothing(&'a [u8], Option<&'a [u8]>),
}

/// The steps, one after the other.
#[derive(Debug)]
pub struct SinceWalk<'a> {
    ctx: Context<'a>,
    since: Txg,
    /// Nodes from the root down, with what comes next in each.
    parts: Vec<(Arc<Node>, usize)>,
    /// What is in front of this key was told.
    low: Vec<u8>,
    /// A root that is not entered yet.
    root: Option<Child>,
    /// The ends of what was told last.
    told: (Vec<u8>, Vec<u8>),
    ended: bool,
}

impl View {
    /// What has become of the root since a txg, from a key on.
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

/// The least key behind a key.
fn behind(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

impl SinceWalk<'_> {
    /// The next step; none at the end.
    ///
    /// # Errors
    /// Those of reading, and damage, which names the frame. The walk cannot go on then.
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

    /// The row before where the leaf is.
    fn last_row(&self) -> Result<Since<'_>, PoolError> {
        let (node, at) = self.parts.last().ok_or(BROKEN)?;
        let Body::Leaf(leaf) = &node.body else { return Err(BROKEN) };
        let (key, value) = at.checked_sub(1).and_then(|at| leaf.row(at)).ok_or(BROKEN)?;
        Ok(Since::Row(key, value))
    }

    /// Enters a child that was born since; passes one that was there, and says whether there is
    /// something in front of it to tell.
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
