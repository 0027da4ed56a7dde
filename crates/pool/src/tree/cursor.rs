//! Scans: rows in the order of their keys from any key on, while the tree is changed.
//!
//! Callers: listings, `diff` for users, sending, the walker that frees destroyed datasets.
//!
//! Invariants:
//! - A cursor returns the rows of its view, whatever changes in the tree.
//! - Read-ahead begins at the second leaf and doubles: a read of a few rows requests no frame that
//!   it does not need.

use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Inner, Node};
use super::{Context, Row, View};
use crate::error::PoolError;
use crate::pointer::Pointer;

/// Number of leaves that are requested ahead at first.
const FIRST_WINDOW: usize = 4;
/// Largest number of leaves that are requested ahead: about 2 MiB.
const LARGEST_WINDOW: usize = 64;

/// An inner node on the path to the leaf.
#[derive(Debug)]
struct Step {
    node: Arc<Node>,
    at: usize,
    /// Frames of the children before this one were requested.
    named: usize,
}

impl Step {
    fn inner(&self) -> Result<&Inner, PoolError> {
        match &self.node.body {
            Body::Inner(inner) => Ok(inner),
            Body::Leaf(_) => Err(BROKEN),
        }
    }
}

/// Position of a scan.
#[derive(Debug)]
pub struct Cursor<'a> {
    ctx: Context<'a>,
    /// The path from the root down.
    steps: Vec<Step>,
    leaf: Option<Arc<Node>>,
    row: usize,
    /// End of the range in the leaf.
    end: usize,
    until: Option<Vec<u8>>,
    window: usize,
    keep: bool,
}

impl View {
    /// Returns the rows from `from` up to before `to` (`None`: to the end).
    ///
    /// # Errors
    /// Errors of [`crate::Frames::read`], and damage, which names the frame.
    pub fn cursor<'a>(&self, ctx: Context<'a>, from: &[u8], to: Option<&[u8]>) -> Result<Cursor<'a>, PoolError> {
        let mut cursor = Cursor {
            ctx,
            steps: Vec::new(),
            leaf: None,
            row: 0,
            end: 0,
            until: to.map(<[u8]>::to_vec),
            window: 0,
            keep: true,
        };
        if let Some(root) = &self.root {
            let node = cursor.node(root, None)?;
            cursor.enter(node, Some(from))?;
        }
        Ok(cursor)
    }

    /// Returns all rows, for a single pass: nodes read for it are not put into the cache.
    ///
    /// # Errors
    /// As [`Self::cursor`].
    pub fn scan<'a>(&self, ctx: Context<'a>) -> Result<Cursor<'a>, PoolError> {
        let mut cursor = Self::default().cursor(ctx, &[], None)?;
        cursor.keep = false;
        cursor.window = LARGEST_WINDOW;
        if let Some(root) = &self.root {
            let node = cursor.node(root, None)?;
            cursor.enter(node, None)?;
        }
        Ok(cursor)
    }
}

impl Cursor<'_> {
    /// Returns the next row; `None` at the end of the range.
    ///
    /// # Errors
    /// As [`View::cursor`]. The cursor is at its end then.
    #[allow(clippy::should_implement_trait, reason = "rows are borrowed from the cursor, which an iterator cannot say")]
    pub fn next(&mut self) -> Result<Option<Row<'_>>, PoolError> {
        while self.row >= self.end {
            if let Err(error) = self.advance() {
                self.leaf = None;
                self.steps.clear();
                return Err(error);
            }
            if self.leaf.is_none() {
                return Ok(None);
            }
        }
        let at = self.row;
        self.row += 1;
        match self.leaf.as_deref() {
            Some(Node { body: Body::Leaf(leaf), .. }) => Ok(Some(leaf.row(at).ok_or(BROKEN)?)),
            _ => Err(BROKEN),
        }
    }

    /// Moves to the next leaf of the range; `false` at its end.
    ///
    /// # Errors
    /// As [`View::cursor`].
    pub(crate) fn skip_leaf(&mut self) -> Result<bool, PoolError> {
        self.row = self.end;
        self.advance()?;
        Ok(self.leaf.is_some())
    }

    fn node(&self, child: &Child, level: Option<u8>) -> Result<Arc<Node>, PoolError> {
        match child {
            Child::Dirty(node) => Ok(Arc::clone(node)),
            Child::Clean(pointer) if self.keep => self.ctx.node(pointer, level),
            Child::Clean(pointer) => self.ctx.cache.node_in_passing(self.ctx.frames, pointer, level),
        }
    }

    /// Descends from a node to the leaf of `from`, or to its first leaf.
    fn enter(&mut self, mut node: Arc<Node>, from: Option<&[u8]>) -> Result<(), PoolError> {
        loop {
            let at = match &node.body {
                Body::Leaf(leaf) => {
                    self.row = from.map_or(0, |from| leaf.find(from).unwrap_or_else(|at| at));
                    self.end = match &self.until {
                        Some(until) => leaf.find(until).unwrap_or_else(|at| at),
                        None => leaf.len(),
                    };
                    self.leaf = Some(node);
                    return Ok(());
                }
                Body::Inner(inner) => from.map_or(0, |from| inner.find(from)),
            };
            self.steps.push(Step { node, at, named: at + 1 });
            node = self.below()?;
        }
    }

    /// Returns the child at the position of the lowest step.
    fn below(&mut self) -> Result<Arc<Node>, PoolError> {
        self.name_ahead()?;
        let step = self.steps.last().ok_or(BROKEN)?;
        let inner = step.inner()?;
        self.node(inner.child(step.at).ok_or(BROKEN)?, inner.level().checked_sub(1))
    }

    /// Moves to the next leaf, or to none at the end.
    fn advance(&mut self) -> Result<(), PoolError> {
        // A leaf that extends beyond the end of the range is the last.
        let rest = match self.leaf.as_deref() {
            Some(Node { body: Body::Leaf(leaf), .. }) => self.end < leaf.len(),
            _ => true,
        };
        self.leaf = None;
        if rest {
            self.steps.clear();
        }
        while let Some(step) = self.steps.last_mut() {
            step.at += 1;
            let at = step.at;
            let inner = step.inner()?;
            if at >= inner.len() {
                self.steps.pop();
                continue;
            }
            if self.until.as_deref().is_some_and(|until| inner.key(at) >= until) {
                self.steps.clear();
                return Ok(());
            }
            if inner.level() == 1 {
                self.window = (self.window * 2).clamp(FIRST_WINDOW, LARGEST_WINDOW);
            }
            let node = self.below()?;
            return self.enter(node, None);
        }
        Ok(())
    }

    /// Requests the next leaves when half of those requested before are used; near the end of an
    /// inner node also the next inner node.
    fn name_ahead(&mut self) -> Result<(), PoolError> {
        let window = self.window;
        let Some((step, above)) = self.steps.split_last_mut() else { return Ok(()) };
        let inner = step.inner()?;
        if window == 0 || inner.level() != 1 || step.named > step.at + window / 2 {
            return Ok(());
        }
        let within = |key: &[u8]| self.until.as_deref().is_none_or(|until| key < until);
        let end = (step.at + 1 + window).min(inner.len());
        let from = step.named.max(step.at + 1).min(end);
        let mut pointers: Vec<Pointer> = Vec::with_capacity(end - from + 1);
        for at in from..end {
            let Some(pointer) = inner.child(at).and_then(Child::pointer) else { continue };
            if within(inner.key(at)) && !self.ctx.cache.holds(&pointer) {
                pointers.push(pointer);
            }
        }
        if end == inner.len()
            && let Some(parent) = above.last_mut()
        {
            let next = parent.at + 1;
            let above = parent.inner()?;
            if next < above.len()
                && parent.named <= next
                && within(above.key(next))
                && let Some(pointer) = above.child(next).and_then(Child::pointer)
                && !self.ctx.cache.holds(&pointer)
            {
                pointers.push(pointer);
            }
            parent.named = next + 1;
        }
        // Everything up to the end counts as requested, so that a full window in the cache is not
        // checked again at each leaf.
        step.named = if end == inner.len() { usize::MAX } else { end };
        if !pointers.is_empty() {
            self.ctx.frames.expect(&pointers);
        }
        Ok(())
    }
}
