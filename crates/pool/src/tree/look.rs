//! Reads of single rows: the first, the last, the one at a key, the one before it.
//!
//! Callers: files and the catalog, through [`Tree`] and [`View`].
//!
//! Invariant: a read never copies a node: dirty nodes are borrowed, clean ones are held while they
//! are used.

use std::sync::Arc;

use super::node::{BROKEN, Body, Child, Node};
use super::{Context, Row, Tree, View};
use crate::cache::Cache;
use crate::error::PoolError;
use crate::pointer::{FrameKind, Pointer};

/// A node that a look-up needs and that is not in the cache: for [`Context::fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    pub(super) pointer: Pointer,
    pub(super) level: Option<u8>,
}

#[cfg(test)]
impl Fetch {
    pub(crate) fn pointer(&self) -> Pointer {
        self.pointer
    }
}

/// Direction of a descent.
#[derive(Clone, Copy)]
enum Way<'k> {
    To(&'k [u8]),
    First,
    Last,
}

impl Way<'_> {
    fn step<'n>(&self, node: &'n Node) -> Result<Step<'n>, PoolError> {
        let inner = match &node.body {
            Body::Leaf(_) => return Ok(Step::Leaf),
            Body::Inner(inner) => inner,
        };
        let at = match self {
            Self::To(key) => inner.find(key),
            Self::First => 0,
            Self::Last => inner.len().saturating_sub(1),
        };
        Ok(Step::Child(inner.child(at).ok_or(BROKEN)?, inner.level().checked_sub(1).ok_or(BROKEN)?))
    }
}

enum Step<'n> {
    Leaf,
    Child(&'n Child, u8),
}

/// Descends to a leaf and passes it to `then`.
fn descend<R>(ctx: &Context<'_>, root: &Child, way: Way<'_>, then: impl FnOnce(&Node) -> R) -> Result<R, PoolError> {
    let mut child = root;
    let mut level = None;
    // Dirty nodes are above, and borrowed; from the first clean one on all are clean.
    let mut node: Arc<Node> = loop {
        match child {
            Child::Clean(pointer) => break ctx.node(pointer, level)?,
            Child::Dirty(node) => match way.step(node)? {
                Step::Leaf => return Ok(then(node)),
                Step::Child(next, below) => (child, level) = (next, Some(below)),
            },
        }
    };
    loop {
        node = match way.step(&node)? {
            Step::Leaf => return Ok(then(&node)),
            Step::Child(Child::Clean(pointer), below) => ctx.node(pointer, Some(below))?,
            // Impossible below a node that was read, but harmless.
            Step::Child(Child::Dirty(next), _) => Arc::clone(next),
        };
    }
}

fn value<'n>(node: &'n Node, key: &[u8]) -> Option<&'n [u8]> {
    match &node.body {
        Body::Leaf(leaf) => leaf.get(key),
        Body::Inner(_) => None,
    }
}

fn get_with<R>(
    root: Option<&Child>,
    ctx: &Context<'_>,
    key: &[u8],
    then: impl FnOnce(Option<&[u8]>) -> R,
) -> Result<R, PoolError> {
    match root {
        None => Ok(then(None)),
        Some(root) => descend(ctx, root, Way::To(key), |leaf| then(value(leaf, key))),
    }
}

fn end_row<R>(
    root: Option<&Child>,
    ctx: &Context<'_>,
    last: bool,
    then: impl FnOnce(Option<Row<'_>>) -> R,
) -> Result<R, PoolError> {
    let Some(root) = root else { return Ok(then(None)) };
    descend(ctx, root, if last { Way::Last } else { Way::First }, |node| match &node.body {
        Body::Leaf(leaf) => then(leaf.row(if last { leaf.len().wrapping_sub(1) } else { 0 })),
        Body::Inner(_) => then(None),
    })
}

/// The last row before `key`. If the leaf of the key has none, it is the last row of the next
/// subtree to the left.
fn before<R>(
    child: &Child,
    level: Option<u8>,
    ctx: &Context<'_>,
    key: &[u8],
    then: &mut Option<impl FnOnce(Option<Row<'_>>) -> R>,
) -> Result<Option<R>, PoolError> {
    let held;
    let node = match child {
        Child::Dirty(node) => node,
        Child::Clean(pointer) => {
            held = ctx.node(pointer, level)?;
            &held
        }
    };
    match &node.body {
        Body::Leaf(leaf) => {
            let at = leaf.find(key).unwrap_or_else(|at| at);
            let Some(row) = at.checked_sub(1).and_then(|at| leaf.row(at)) else { return Ok(None) };
            Ok(then.take().map(|then| then(Some(row))))
        }
        Body::Inner(inner) => {
            let below = inner.level().checked_sub(1);
            let at = inner.find(key);
            let found = before(inner.child(at).ok_or(BROKEN)?, below, ctx, key, then)?;
            if found.is_some() {
                return Ok(found);
            }
            // No child is empty: one step to the left is enough.
            match at.checked_sub(1).and_then(|at| inner.child(at)) {
                Some(left) => before(left, below, ctx, key, then),
                None => Ok(None),
            }
        }
    }
}

fn before_with<R>(
    root: Option<&Child>,
    ctx: &Context<'_>,
    key: &[u8],
    then: impl FnOnce(Option<Row<'_>>) -> R,
) -> Result<R, PoolError> {
    let mut then = Some(then);
    let found = match root {
        Some(root) => before(root, None, ctx, key, &mut then)?,
        None => None,
    };
    match found {
        Some(found) => Ok(found),
        None => then.map(|then| then(None)).ok_or(BROKEN),
    }
}

fn needs(root: Option<&Child>, cache: &Cache, key: &[u8]) -> Result<Option<Fetch>, PoolError> {
    let Some(mut child) = root else { return Ok(None) };
    let mut level = None;
    let mut node: Arc<Node> = loop {
        match child {
            Child::Clean(pointer) => match cache.cached_node(pointer) {
                Some(node) => break node,
                None => return Ok(Some(Fetch { pointer: *pointer, level })),
            },
            Child::Dirty(node) => match Way::To(key).step(node)? {
                Step::Leaf => return Ok(None),
                Step::Child(next, below) => (child, level) = (next, Some(below)),
            },
        }
    };
    loop {
        node = match Way::To(key).step(&node)? {
            Step::Leaf => return Ok(None),
            Step::Child(Child::Clean(pointer), below) => match cache.cached_node(pointer) {
                // A node at the wrong level: reading it reports the damage.
                Some(node) if node.level() == below => node,
                Some(_) | None => return Ok(Some(Fetch { pointer: *pointer, level: Some(below) })),
            },
            Step::Child(Child::Dirty(next), _) => Arc::clone(next),
        };
    }
}

/// Whether one of the nodes of a range, up to so many leaves, is not in memory.
fn lacks(child: &Child, cache: &Cache, range: (Option<&[u8]>, &[u8]), left: &mut usize) -> bool {
    let held;
    let node = match child {
        Child::Dirty(node) => node,
        Child::Clean(pointer) if pointer.kind == FrameKind::Leaf => {
            *left = left.saturating_sub(1);
            return !cache.holds(pointer);
        }
        Child::Clean(pointer) => match cache.cached_node(pointer) {
            None => return true,
            Some(node) => {
                held = node;
                &held
            }
        },
    };
    let Body::Inner(inner) = &node.body else {
        *left = left.saturating_sub(1);
        return false;
    };
    let (from, to) = range;
    let first = from.map_or(0, |from| inner.find(from));
    for at in first..inner.len() {
        if *left == 0 || (at > first && !to.is_empty() && inner.key(at) >= to) {
            return false;
        }
        let from = from.filter(|_| at == first);
        if inner.child(at).is_some_and(|child| lacks(child, cache, (from, to), left)) {
            return true;
        }
    }
    false
}

impl Tree {
    /// Visits the rows of one leaf from `from` up to before `to` (empty: to the end), until `visit`
    /// returns false: most ranges of a few rows are in one leaf, and nothing is copied or held for
    /// them. Returns the key from which a cursor finds the remaining rows; `None` if there are
    /// none.
    ///
    /// # Errors
    /// As [`Self::get_with`].
    pub(crate) fn scan_leaf(
        &self,
        ctx: &Context<'_>,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<Option<Vec<u8>>, PoolError> {
        let Some(root) = &self.root else { return Ok(None) };
        descend(ctx, root, Way::To(from), |node| {
            let Body::Leaf(leaf) = &node.body else { return None };
            let first = leaf.find(from).unwrap_or_else(|at| at);
            let mut at = first;
            while let Some((key, value)) = leaf.row(at) {
                if !to.is_empty() && key >= to || !visit(key, value) {
                    return None;
                }
                at += 1;
            }
            // The smallest key after the last one.
            Some(if at == first { from.to_vec() } else { [leaf.key(at - 1), &[0]].concat() })
        })
    }
}

impl View {
    /// Whether reading the rows from `from` up to before `to` (empty: to the end), up to so many
    /// leaves, would wait for a device.
    pub(crate) fn lacks(&self, cache: &Cache, from: &[u8], to: &[u8], leaves: usize) -> bool {
        self.root.as_ref().is_some_and(|root| lacks(root, cache, (Some(from), to), &mut leaves.max(1)))
    }
}

fn copied((key, value): Row<'_>) -> (Vec<u8>, Vec<u8>) {
    (key.to_vec(), value.to_vec())
}

macro_rules! looks {
    ($what:ty) => {
        impl $what {
            /// Passes the value of a key to `then`, without a copy; `None` if there is no row.
            ///
            /// # Errors
            /// Errors of [`crate::Frames::read`], and damage, which names the frame.
            pub fn get_with<R>(
                &self,
                ctx: &Context<'_>,
                key: &[u8],
                then: impl FnOnce(Option<&[u8]>) -> R,
            ) -> Result<R, PoolError> {
                get_with(self.root.as_ref(), ctx, key, then)
            }

            /// Returns the value of a key.
            ///
            /// # Errors
            /// As [`Self::get_with`].
            pub fn get(&self, ctx: &Context<'_>, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError> {
                self.get_with(ctx, key, |value| value.map(<[u8]>::to_vec))
            }

            /// Returns the first row.
            ///
            /// # Errors
            /// As [`Self::get_with`].
            pub fn first(&self, ctx: &Context<'_>) -> Result<Option<(Vec<u8>, Vec<u8>)>, PoolError> {
                end_row(self.root.as_ref(), ctx, false, |row| row.map(copied))
            }

            /// Returns the last row.
            ///
            /// # Errors
            /// As [`Self::get_with`].
            pub fn last(&self, ctx: &Context<'_>) -> Result<Option<(Vec<u8>, Vec<u8>)>, PoolError> {
                end_row(self.root.as_ref(), ctx, true, |row| row.map(copied))
            }

            /// Passes the last row whose key is less than `key` to `then`.
            ///
            /// # Errors
            /// As [`Self::get_with`].
            pub fn before_with<R>(
                &self,
                ctx: &Context<'_>,
                key: &[u8],
                then: impl FnOnce(Option<Row<'_>>) -> R,
            ) -> Result<R, PoolError> {
                before_with(self.root.as_ref(), ctx, key, then)
            }

            /// Returns the last row whose key is less than `key`.
            ///
            /// # Errors
            /// As [`Self::get_with`].
            pub fn before(&self, ctx: &Context<'_>, key: &[u8]) -> Result<Option<(Vec<u8>, Vec<u8>)>, PoolError> {
                self.before_with(ctx, key, |row| row.map(copied))
            }

            /// Returns the next node on the path to a key that is not in memory; `None` if
            /// [`Self::get_with`] would read nothing. With it a lock can be released before waiting
            /// for a device: call, fetch, call again.
            ///
            /// # Errors
            /// Only for a tree that breaks its own rules.
            pub fn needs(&self, cache: &Cache, key: &[u8]) -> Result<Option<Fetch>, PoolError> {
                needs(self.root.as_ref(), cache, key)
            }
        }
    };
}
looks!(Tree);
looks!(View);
