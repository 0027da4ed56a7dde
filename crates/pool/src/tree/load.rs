//! Bulk loading: sorted rows become full leaves directly, without a tree in memory.
//!
//! Callers: receiving a stream, copying a dataset; [`Tree::load_sorted`] makes one.
//!
//! Invariant: at most one node of each height is in memory.

use super::commit::{Form, NodeWriter, Written};
use super::node::{BROKEN, Body, Child, Inner, Node};
use super::page::{Leaf, row_length, separator};
use super::{Context, Settings, Tree};
use crate::error::PoolError;
use crate::pointer::Pointer;

/// Loads rows in the order of their keys.
pub struct Loader<'a> {
    ctx: Context<'a>,
    dataset: u64,
    settings: Settings,
    form: Form,
    leaf: Leaf,
    /// Lower bound of the leaf.
    bound: Vec<u8>,
    /// The open inner nodes from the lowest level up, and their lower bounds.
    open: Vec<(Inner, Vec<u8>)>,
    written: Written,
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("written", &self.written).finish_non_exhaustive()
    }
}

impl<'a> Loader<'a> {
    pub(super) fn new(ctx: Context<'a>, dataset: u64, settings: Settings, form: Form) -> Self {
        Self {
            ctx,
            dataset,
            settings,
            form,
            leaf: Leaf::default(),
            bound: Vec::new(),
            open: Vec::new(),
            written: Written::default(),
        }
    }

    /// Adds the next row.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a key that is not greater than the last one or a row that is too
    /// long; errors of [`crate::Frames::write`].
    pub fn push(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        self.settings.check(key, value)?;
        if let Some(last) = self.leaf.len().checked_sub(1) {
            let last = self.leaf.key(last);
            if last >= key {
                return Err(PoolError::Refused("rows to load are not in order".to_owned()));
            }
            if self.leaf.used() + row_length(key, value) > self.settings.leaf(key) {
                let next = separator(last, key);
                self.close_leaf(next)?;
            }
        }
        self.leaf.push(key, value);
        Ok(())
    }

    /// Writes all open nodes. The root is for [`Tree::open`] or a row of the catalog.
    ///
    /// # Errors
    /// Errors of [`crate::Frames::write`].
    pub fn finish(mut self) -> Result<Written, PoolError> {
        if self.leaf.len() == 0 {
            return Ok(self.written);
        }
        self.close_leaf(Vec::new())?;
        let mut height = 0;
        loop {
            let (inner, _) = self.open.get(height).ok_or(BROKEN)?;
            if let ([Child::Clean(pointer)], true) = (inner.children.as_slice(), height + 1 == self.open.len()) {
                self.written.root = Some(*pointer);
                return Ok(self.written);
            }
            self.close_inner(height, Vec::new())?;
            height += 1;
        }
    }

    fn close_leaf(&mut self, next: Vec<u8>) -> Result<(), PoolError> {
        let leaf = std::mem::take(&mut self.leaf);
        let bound = std::mem::replace(&mut self.bound, next);
        let pointer = self.write(Body::Leaf(leaf), &[])?;
        self.add(0, bound, pointer)
    }

    fn close_inner(&mut self, height: usize, next: Vec<u8>) -> Result<(), PoolError> {
        let level = u8::try_from(height + 1).map_err(|_| BROKEN)?;
        let (inner, bound) = self.open.get_mut(height).ok_or(BROKEN)?;
        let inner = std::mem::replace(inner, Inner::empty(level));
        let bound = std::mem::replace(bound, next);
        let pointers: Vec<Pointer> = inner.children.iter().filter_map(Child::pointer).collect();
        let pointer = self.write(Body::Inner(inner), &pointers)?;
        self.add(height + 1, bound, pointer)
    }

    /// Adds a written node to the open one above it.
    fn add(&mut self, height: usize, bound: Vec<u8>, pointer: Pointer) -> Result<(), PoolError> {
        let Some((inner, _)) = self.open.get(height) else {
            let level = u8::try_from(height + 1).map_err(|_| BROKEN)?;
            self.open.push((Inner::over(level, Child::Clean(pointer)), bound));
            return Ok(());
        };
        let empty = inner.len() == 0;
        if !empty && inner.used_with(&bound) > self.settings.page() {
            self.close_inner(height, bound.clone())?;
        }
        let (inner, _) = self.open.get_mut(height).ok_or(BROKEN)?;
        // The first key of a node is empty: its bound is in the parent.
        inner.push(if inner.len() == 0 { &[] } else { &bound }, Child::Clean(pointer));
        Ok(())
    }

    fn write(&mut self, body: Body, pointers: &[Pointer]) -> Result<Pointer, PoolError> {
        let mut writer =
            NodeWriter { ctx: &self.ctx, form: self.form, dataset: self.dataset, bytes: 0, logical: 0, frames: 0 };
        let pointer = writer.node(&Node::new(0, body), pointers)?;
        self.written.bytes += writer.bytes;
        self.written.logical += writer.logical;
        self.written.frames += writer.frames;
        Ok(pointer)
    }
}

impl Tree {
    /// Opens the tree that a loader has written.
    #[must_use]
    pub fn loaded(written: &Written, dataset: u64, settings: Settings) -> Self {
        Self::open(written.root, dataset, settings)
    }
}
