//! Differing rows of two roots: both are walked together, and shared subtrees are skipped without
//! being read.
//!
//! Callers: `nacre fs diff`, incremental sending between two snapshots, `check`.
//!
//! Invariants:
//! - Rows are returned in the order of their keys, each once, and only differing ones.
//! - A subtree is skipped exactly if both sides reach the same frame at the same time. For a
//!   snapshot and a later state this is every subtree born before the snapshot; it also works for
//!   clones and for any two other roots.

use std::cmp::Ordering;
use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Inner, Node};
use super::page::Leaf;
use super::{Context, View};
use crate::error::PoolError;

/// A row that differs between both roots. At least one value is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The value in the old root; `None` for a new row.
    pub old: Option<&'a [u8]>,
    /// The value in the new root; `None` for a removed row.
    pub new: Option<&'a [u8]>,
}

/// A part of a tree that was not walked yet.
#[derive(Debug)]
enum Part {
    /// Children of an inner node from a position on, and the node's lower bound.
    Inner(Arc<Node>, usize, Vec<u8>),
    /// Rows of a leaf from a position on.
    Leaf(Arc<Node>, usize),
}

/// The next element of a side.
enum SideHead<'s> {
    End,
    Row(&'s [u8], &'s [u8]),
    /// A subtree that was not entered yet, its height, and a lower bound of its keys.
    Below(&'s Child, u8, &'s [u8]),
}

#[derive(Debug, Default)]
struct Side {
    parts: Vec<Part>,
    /// Rows before this key are skipped.
    from: Vec<u8>,
}

/// The next action, decided while both heads are borrowed.
enum Next {
    End,
    Skip,
    Enter { old: bool, new: bool },
    Equal,
    Yield { old: bool, new: bool },
}

/// Iterator over the differing rows.
#[derive(Debug)]
pub struct Diff<'a> {
    ctx: Context<'a>,
    old: Side,
    new: Side,
}

fn inner(node: &Node) -> Result<&Inner, PoolError> {
    match &node.body {
        Body::Inner(inner) => Ok(inner),
        Body::Leaf(_) => Err(BROKEN),
    }
}

fn leaf(node: &Node) -> Result<&Leaf, PoolError> {
    match &node.body {
        Body::Leaf(leaf) => Ok(leaf),
        Body::Inner(_) => Err(BROKEN),
    }
}

fn is_same(a: &Child, b: &Child) -> bool {
    match (a, b) {
        (Child::Clean(a), Child::Clean(b)) => a == b,
        (Child::Dirty(a), Child::Dirty(b)) => Arc::ptr_eq(a, b),
        _ => false,
    }
}

impl Side {
    fn load(ctx: &Context<'_>, child: &Child, level: Option<u8>) -> Result<Arc<Node>, PoolError> {
        match child {
            Child::Dirty(node) => Ok(Arc::clone(node)),
            Child::Clean(pointer) => ctx.cache.node_in_passing(ctx.frames, pointer, level),
        }
    }

    fn push(&mut self, node: Arc<Node>, bound: Vec<u8>) {
        let at = match &node.body {
            Body::Inner(inner) => inner.find(&self.from),
            Body::Leaf(leaf) => leaf.find(&self.from).unwrap_or_else(|at| at),
        };
        self.parts.push(match node.body {
            Body::Inner(_) => Part::Inner(node, at, bound),
            Body::Leaf(_) => Part::Leaf(node, at),
        });
    }

    /// Removes the parts that were walked completely.
    fn tidy(&mut self) -> Result<(), PoolError> {
        while let Some(part) = self.parts.last() {
            let more = match part {
                Part::Inner(node, at, _) => *at < inner(node)?.len(),
                Part::Leaf(node, at) => *at < leaf(node)?.len(),
            };
            if more {
                break;
            }
            self.parts.pop();
        }
        Ok(())
    }

    fn head(&self) -> Result<SideHead<'_>, PoolError> {
        match self.parts.last() {
            None => Ok(SideHead::End),
            Some(Part::Leaf(node, at)) => {
                let (key, value) = leaf(node)?.row(*at).ok_or(BROKEN)?;
                Ok(SideHead::Row(key, value))
            }
            Some(Part::Inner(node, at, bound)) => {
                let inner = inner(node)?;
                let low = if *at == 0 { bound } else { inner.key(*at) };
                Ok(SideHead::Below(inner.child(*at).ok_or(BROKEN)?, inner.level().checked_sub(1).ok_or(BROKEN)?, low))
            }
        }
    }

    fn step(&mut self) {
        if let Some(Part::Inner(_, at, _) | Part::Leaf(_, at)) = self.parts.last_mut() {
            *at += 1;
        }
    }

    fn enter(&mut self, ctx: &Context<'_>) -> Result<(), PoolError> {
        let SideHead::Below(child, level, low) = self.head()? else { return Err(BROKEN) };
        let (node, low) = (Self::load(ctx, child, Some(level))?, low.to_vec());
        self.step();
        self.push(node, low);
        Ok(())
    }

    /// The row before the current position of the side.
    fn last_row(&self) -> Result<(&[u8], &[u8]), PoolError> {
        match self.parts.last() {
            Some(Part::Leaf(node, at)) => at.checked_sub(1).and_then(|at| leaf(node).ok()?.row(at)).ok_or(BROKEN),
            _ => Err(BROKEN),
        }
    }
}

impl View {
    /// Returns the rows in which `new` differs from this view.
    ///
    /// # Errors
    /// Errors of reading the roots.
    pub fn diff<'a>(&self, ctx: Context<'a>, new: &Self) -> Result<Diff<'a>, PoolError> {
        self.diff_from(ctx, new, &[])
    }

    /// As [`Self::diff`] from a key on; rows before it are not read.
    ///
    /// # Errors
    /// As [`Self::diff`].
    pub fn diff_from<'a>(&self, ctx: Context<'a>, new: &Self, from: &[u8]) -> Result<Diff<'a>, PoolError> {
        let side = || Side { parts: Vec::new(), from: from.to_vec() };
        let mut diff = Diff { ctx, old: side(), new: side() };
        if let (Some(old), Some(new)) = (&self.root, &new.root)
            && is_same(old, new)
        {
            return Ok(diff);
        }
        for (side, root) in [(&mut diff.old, &self.root), (&mut diff.new, &new.root)] {
            if let Some(root) = root {
                let node = Side::load(&ctx, root, None)?;
                side.push(node, Vec::new());
            }
        }
        Ok(diff)
    }
}

impl Diff<'_> {
    /// Returns the next differing row; `None` at the end.
    ///
    /// # Errors
    /// Errors of reading, and damage, which names the frame. The diff cannot continue then.
    #[allow(clippy::should_implement_trait, reason = "rows are borrowed from the diff, which an iterator cannot say")]
    pub fn next(&mut self) -> Result<Option<Changed<'_>>, PoolError> {
        loop {
            self.old.tidy()?;
            self.new.tidy()?;
            match decide(&self.old.head()?, &self.new.head()?) {
                Next::End => return Ok(None),
                Next::Skip | Next::Equal => {
                    self.old.step();
                    self.new.step();
                }
                Next::Enter { old, new } => {
                    if old {
                        self.old.enter(&self.ctx)?;
                    }
                    if new {
                        self.new.enter(&self.ctx)?;
                    }
                }
                Next::Yield { old, new } => {
                    if old {
                        self.old.step();
                    }
                    if new {
                        self.new.step();
                    }
                    let was = if old { Some(self.old.last_row()?) } else { None };
                    let is = if new { Some(self.new.last_row()?) } else { None };
                    let (key, _) = is.or(was).ok_or(BROKEN)?;
                    return Ok(Some(Changed {
                        key,
                        old: was.map(|(_, value)| value),
                        new: is.map(|(_, value)| value),
                    }));
                }
            }
        }
    }
}

/// Advances the side with the lower key; if they are equal, enters the higher subtree, so that both
/// reach shared subtrees at the same time.
fn decide(old: &SideHead<'_>, new: &SideHead<'_>) -> Next {
    const OLD: Next = Next::Yield { old: true, new: false };
    const NEW: Next = Next::Yield { old: false, new: true };
    match (old, new) {
        (SideHead::End, SideHead::End) => Next::End,
        (SideHead::Below(a, ..), SideHead::Below(b, ..)) if is_same(a, b) => Next::Skip,
        (SideHead::Below(_, a_level, a_low), SideHead::Below(_, b_level, b_low)) => {
            match a_low.cmp(b_low).then(b_level.cmp(a_level)) {
                Ordering::Less => Next::Enter { old: true, new: false },
                Ordering::Greater => Next::Enter { old: false, new: true },
                Ordering::Equal => Next::Enter { old: true, new: true },
            }
        }
        (SideHead::Row(..), SideHead::End) => OLD,
        (SideHead::End, SideHead::Row(..)) => NEW,
        (SideHead::Row(key, _), SideHead::Below(_, _, low)) if key < low => OLD,
        (SideHead::Below(_, _, low), SideHead::Row(key, _)) if key < low => NEW,
        (SideHead::Below(..), _) => Next::Enter { old: true, new: false },
        (_, SideHead::Below(..)) => Next::Enter { old: false, new: true },
        (SideHead::Row(a, x), SideHead::Row(b, y)) => match a.cmp(b) {
            Ordering::Less => OLD,
            Ordering::Greater => NEW,
            Ordering::Equal if x == y => Next::Equal,
            Ordering::Equal => Next::Yield { old: true, new: true },
        },
    }
}
