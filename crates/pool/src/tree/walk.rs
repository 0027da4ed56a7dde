//! Walks: all frames of a stored root, each before those below it.
//!
//! Callers: `check` and scrub by dataset (everything), incremental sending from a bookmark (frames
//! born after it), salvage. A dataset is destroyed by [`harvest`], in steps whose progress is
//! committed.
//!
//! Invariants:
//! - Nodes read by a walk are not put into the cache.
//! - Levels are descending on each path: a walk ends, whatever the frames contain.

use super::node::{BROKEN, Body, Child, Node};
use super::{Context, page::Leaf};
use crate::error::PoolError;
use crate::pointer::{FrameKind, Pointer, Txg};

/// Number of leaves whose frames are requested ahead at once.
const WINDOW: usize = 64;

/// Receives the frames and rows of a walk.
pub trait Visitor {
    /// Visits a node's frame. Returns whether to visit its rows or children.
    ///
    /// # Errors
    /// Any error ends the walk.
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError>;

    /// Visits a row of a leaf for which [`Self::frame`] returned true.
    ///
    /// # Errors
    /// Any error ends the walk.
    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError>;

    /// Visits a frame that cannot be read; nodes below it are unknown.
    ///
    /// # Errors
    /// Any error ends the walk; the default implementation returns the given one.
    fn damaged(&mut self, pointer: &Pointer, error: PoolError) -> Result<(), PoolError> {
        let _ = pointer;
        Err(error)
    }
}

/// Visits the frames of a root that were born after `since` (`Txg(0)`: all), parents first, in the
/// order of their keys. A node is not older than the nodes below it, so a skipped one has nothing
/// younger below it.
///
/// # Errors
/// Errors of the visitor, and, unless it accepts damage, of reading.
pub fn walk(ctx: &Context<'_>, root: &Pointer, since: Txg, visitor: &mut dyn Visitor) -> Result<(), PoolError> {
    visit(ctx, root, None, since, visitor)
}

fn visit(
    ctx: &Context<'_>,
    pointer: &Pointer,
    level: Option<u8>,
    since: Txg,
    visitor: &mut dyn Visitor,
) -> Result<(), PoolError> {
    if pointer.birth <= since || !visitor.frame(pointer)? {
        return Ok(());
    }
    let level = if pointer.kind == FrameKind::Leaf { Some(0) } else { level };
    let node = match ctx.cache.node_in_passing(ctx.frames, pointer, level) {
        Ok(node) => node,
        Err(error) => return visitor.damaged(pointer, error),
    };
    match &node.body {
        Body::Leaf(leaf) => rows(leaf, visitor),
        Body::Inner(_) => children(ctx, &node, since, visitor),
    }
}

fn rows(leaf: &Leaf, visitor: &mut dyn Visitor) -> Result<(), PoolError> {
    for at in 0..leaf.len() {
        let (key, value) = leaf.row(at).ok_or(BROKEN)?;
        visitor.row(key, value)?;
    }
    Ok(())
}

fn children(ctx: &Context<'_>, node: &Node, since: Txg, visitor: &mut dyn Visitor) -> Result<(), PoolError> {
    let Body::Inner(inner) = &node.body else { return Err(BROKEN) };
    let below = inner.level().checked_sub(1).ok_or(BROKEN)?;
    let pointers: Vec<Pointer> =
        inner.children.iter().filter_map(Child::pointer).filter(|pointer| pointer.birth > since).collect();
    for window in pointers.chunks(WINDOW) {
        ctx.frames.expect(window);
        for pointer in window {
            visit(ctx, pointer, Some(below), since, visitor)?;
        }
    }
    Ok(())
}

/// An element of a harvest.
#[derive(Clone, Copy, Debug)]
pub enum Reaped<'a> {
    /// A node's frame, after everything below it.
    Frame(&'a Pointer),
    /// A row.
    Row(&'a [u8], &'a [u8]),
    /// A node that cannot be read: the nodes below it are unknown.
    Damaged(&'a Pointer, &'a PoolError),
}

/// Visits the frames of a root that were born after `since`, and their rows, children before
/// parents, from a key on; stops after about `budget` of them, and returns the key to continue
/// with. A frame is visited when nothing below it will be read again.
///
/// # Errors
/// Errors of the visitor.
pub fn harvest(
    ctx: &Context<'_>,
    root: &Pointer,
    since: Txg,
    from: &[u8],
    budget: &mut u64,
    visit: &mut dyn FnMut(Reaped<'_>) -> Result<(), PoolError>,
) -> Result<Option<Vec<u8>>, PoolError> {
    reap(ctx, root, None, (since, from), budget, visit)
}

fn reap(
    ctx: &Context<'_>,
    pointer: &Pointer,
    level: Option<u8>,
    (since, from): (Txg, &[u8]),
    budget: &mut u64,
    visit: &mut dyn FnMut(Reaped<'_>) -> Result<(), PoolError>,
) -> Result<Option<Vec<u8>>, PoolError> {
    if pointer.birth <= since {
        return Ok(None);
    }
    let level = if pointer.kind == FrameKind::Leaf { Some(0) } else { level };
    match ctx.cache.node_in_passing(ctx.frames, pointer, level) {
        Err(error) => visit(Reaped::Damaged(pointer, &error))?,
        Ok(node) => match &node.body {
            Body::Leaf(leaf) => {
                for at in 0..leaf.len() {
                    let (key, value) = leaf.row(at).ok_or(BROKEN)?;
                    visit(Reaped::Row(key, value))?;
                }
                *budget = budget.saturating_sub(leaf.len() as u64);
            }
            Body::Inner(inner) => {
                let below = inner.level().checked_sub(1).ok_or(BROKEN)?;
                let first = inner.find(from);
                let ahead: Vec<Pointer> =
                    inner.children.iter().skip(first).take(WINDOW).filter_map(Child::pointer).collect();
                ctx.frames.expect(&ahead);
                for at in first..inner.len() {
                    let Some(child) = inner.child(at).and_then(Child::pointer) else { return Err(BROKEN) };
                    let from = if at == first { from } else { &[] };
                    let paused = reap(ctx, &child, Some(below), (since, from), budget, visit)?;
                    if paused.is_some() {
                        return Ok(paused);
                    }
                    if *budget == 0 && at + 1 < inner.len() {
                        return Ok(Some(inner.key(at + 1).to_vec()));
                    }
                }
            }
        },
    }
    visit(Reaped::Frame(pointer))?;
    *budget = budget.saturating_sub(1);
    Ok(None)
}
