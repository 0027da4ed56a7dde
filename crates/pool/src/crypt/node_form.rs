//! The short form of a node, in which it is sealed: each pointer is a place in the lists of children.
//!
//! Callers: the adapter between the engine and the store. Byte tables: `docs/decisions/encryption.md`, 3.3. Invariant:
//! a node that was shortened is restored to the same bytes, byte for byte.

use super::child_entry::ChildEntry;
use super::stored_form::CHILDREN_MAX;
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::keys::{EXTENT, PATCH, XATTR};
use crate::rows::{EXTENT_FRAME, EXTENT_SHARED, XATTR_FRAME};
use crate::tree::{MAX_CONTENT, MAX_LEVEL, NODE_HEADER};

const fn bad(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// Pointers to sealed nodes have the rounded length in memory as well: only the node itself knows the exact one.
const NODE_LENGTH: PoolError = bad("the exact length of a sealed node");

/// A node in its short form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShortNode {
    /// Height above the leaves.
    pub height: u8,
    /// The children, in the order of the rows.
    pub children: Vec<ChildEntry>,
    /// The content, with places instead of pointers.
    pub content: Vec<u8>,
}

/// Length of a pointer in the short form, bytes: a place (u16) and the difference between the rounded and the exact
/// length of the content (u8).
const REFERENCE: usize = 3;

impl ShortNode {
    /// Shortens the content of a node.
    ///
    /// # Errors
    /// [`PoolError::Format`] for content that is no node.
    pub fn new(content: &[u8]) -> Result<Self, PoolError> {
        if content.len() > MAX_CONTENT {
            return Err(bad("a node is too long"));
        }
        let mut from = Reader::new(content);
        let header = from.take(NODE_HEADER)?;
        let (height, count) = height_and_count(header)?;
        let mut node = Self { height, children: Vec::new(), content: Vec::new() };
        let mut to = Writer::with_room(content.len());
        to.bytes(header);
        for _ in 0..count {
            if height == 0 { node.shorten_row(&mut from, &mut to)? } else { node.shorten_child(&mut from, &mut to)? }
        }
        if !from.is_empty() {
            return Err(bad("bytes after the last entry of a node"));
        }
        node.content = to.finish();
        Ok(node)
    }

    /// Restores the content in its form in memory.
    ///
    /// # Errors
    /// [`PoolError::Format`] for places that are not those of the children in their order, and for rows that do not
    /// fit their children.
    pub fn restore(&self) -> Result<Vec<u8>, PoolError> {
        let mut from = Reader::new(&self.content);
        let header = from.take(NODE_HEADER)?;
        let (height, count) = height_and_count(header)?;
        if height != self.height {
            return Err(bad("the height of a node is not that of its frame"));
        }
        let mut to = Writer::with_room(self.content.len() + self.children.len() * Pointer::LENGTH);
        to.bytes(header);
        let mut children = self.children.iter().enumerate();
        for _ in 0..count {
            if height == 0 {
                restore_row(&mut from, &mut children, &mut to)?
            } else {
                restore_child(&mut from, &mut children, &mut to)?
            }
            if to.len() > MAX_CONTENT {
                return Err(bad("a node is too long"));
            }
        }
        if children.next().is_some() || !from.is_empty() {
            return Err(bad("bytes after the last entry of a node"));
        }
        Ok(to.finish())
    }

    /// Appends a child, and its reference to the short form.
    fn push(&mut self, pointer: &Pointer, height: u8, since: Option<Txg>, to: &mut Writer) -> Result<(), PoolError> {
        if self.children.len() >= CHILDREN_MAX {
            return Err(bad("a node with too many children"));
        }
        let (child, difference) = ChildEntry::new(pointer, height, since)?;
        if self.height > 0 && pointer.is_sealed() && difference != 0 {
            return Err(NODE_LENGTH);
        }
        to.u16(self.children.len() as u16);
        to.u8(difference);
        self.children.push(child);
        Ok(())
    }

    fn shorten_child(&mut self, from: &mut Reader<'_>, to: &mut Writer) -> Result<(), PoolError> {
        let key = u16_string(from)?;
        to.u16(key.len() as u16);
        to.bytes(key);
        let pointer = Pointer::decode(from)?;
        self.push(&pointer, self.height - 1, None, to)
    }

    fn shorten_row(&mut self, from: &mut Reader<'_>, to: &mut Writer) -> Result<(), PoolError> {
        let (key_length, value_length) = (from.u16()?, from.u16()?);
        let (key, value) = (from.take(usize::from(key_length))?, from.take(usize::from(value_length))?);
        let Some(reference) = reference_of(key, value)? else {
            to.u16(key_length);
            to.u16(value_length);
            to.bytes(key);
            to.bytes(value);
            return Ok(());
        };
        let Reference { tag, since, behind } = reference;
        let rest = value.get(behind..).ok_or(bad("a row that ends in its pointer"))?;
        let mut pointer = Reader::new(rest);
        let frame = Pointer::decode(&mut pointer)?;
        let rest = pointer.rest();
        to.u16(key_length);
        to.u16((usize::from(tag.is_some()) + REFERENCE + rest.len()) as u16);
        to.bytes(key);
        if let Some(tag) = tag {
            to.u8(tag);
        }
        self.push(&frame, 0, since, to)?;
        to.bytes(rest);
        Ok(())
    }
}

/// A row's reference to a frame.
struct Reference {
    /// The value's first byte, which extents and extended attributes have.
    tag: Option<u8>,
    /// The txg since which another record shares the frame.
    since: Option<Txg>,
    /// Position of the pointer in the value.
    behind: usize,
}

/// The reference in a row's value; `None` for a row without one.
fn reference_of(key: &[u8], value: &[u8]) -> Result<Option<Reference>, PoolError> {
    let tag = value.first().copied();
    Ok(match (key.first(), tag) {
        (Some(&EXTENT), Some(EXTENT_FRAME)) | (Some(&XATTR), Some(XATTR_FRAME)) => {
            Some(Reference { tag, since: None, behind: 1 })
        }
        (Some(&EXTENT), Some(EXTENT_SHARED)) => {
            let mut from = Reader::new(value.get(1..).unwrap_or_default());
            let since = Txg(from.varint()?);
            Some(Reference { tag, since: Some(since), behind: value.len() - from.rest().len() })
        }
        (Some(&PATCH), _) => Some(Reference { tag: None, since: None, behind: 0 }),
        _ => None,
    })
}

/// Children that are not restored yet, with their places.
type Children<'a> = std::iter::Enumerate<std::slice::Iter<'a, ChildEntry>>;

/// Decodes a reference, which has to be to the next child; returns the child and its pointer.
fn next_child<'a>(from: &mut Reader<'_>, children: &mut Children<'a>) -> Result<(&'a ChildEntry, Pointer), PoolError> {
    let (place, difference) = (from.u16()?, from.u8()?);
    match children.next() {
        Some((next, child)) if next == usize::from(place) => Ok((child, child.exact(difference)?)),
        _ => Err(bad("a place in the children of a node")),
    }
}

fn restore_child(from: &mut Reader<'_>, children: &mut Children<'_>, to: &mut Writer) -> Result<(), PoolError> {
    let key = u16_string(from)?;
    to.u16(key.len() as u16);
    to.bytes(key);
    let (child, pointer) = next_child(from, children)?;
    if pointer.is_sealed() && pointer.logical != child.pointer.logical {
        return Err(NODE_LENGTH);
    }
    pointer.encode(to);
    Ok(())
}

fn restore_row(from: &mut Reader<'_>, children: &mut Children<'_>, to: &mut Writer) -> Result<(), PoolError> {
    let (key_length, value_length) = (from.u16()?, from.u16()?);
    let (key, value) = (from.take(usize::from(key_length))?, from.take(usize::from(value_length))?);
    let tag = value.first().copied();
    let (tag, kind, is_shared) = match (key.first(), tag) {
        (Some(&EXTENT), Some(EXTENT_FRAME)) => (tag, FrameKind::Data, false),
        (Some(&EXTENT), Some(EXTENT_SHARED)) => (tag, FrameKind::Data, true),
        (Some(&XATTR), Some(XATTR_FRAME)) => (tag, FrameKind::Value, false),
        (Some(&PATCH), _) => (None, FrameKind::Data, false),
        _ => {
            to.u16(key_length);
            to.u16(value_length);
            to.bytes(key);
            to.bytes(value);
            return Ok(());
        }
    };
    let mut rest = Reader::new(value.get(usize::from(tag.is_some())..).unwrap_or_default());
    let (child, pointer) = next_child(&mut rest, children)?;
    if pointer.kind != kind || child.since.is_some() != is_shared {
        return Err(bad("a row that names a frame of another kind"));
    }
    let mut restored = Writer::with_room(value.len() + Pointer::LENGTH);
    if let Some(tag) = tag {
        restored.u8(tag);
    }
    if let Some(since) = child.since {
        restored.varint(since.0);
    }
    pointer.encode(&mut restored);
    restored.bytes(rest.rest());
    let restored = restored.finish();
    to.u16(key_length);
    to.u16(u16::try_from(restored.len()).map_err(|_| bad("a row is too long"))?);
    to.bytes(key);
    to.bytes(&restored);
    Ok(())
}

fn u16_string<'a>(from: &mut Reader<'a>) -> Result<&'a [u8], PoolError> {
    let length = from.u16()?;
    from.take(usize::from(length))
}

/// Height and number of entries in the header of a node.
fn height_and_count(header: &[u8]) -> Result<(u8, u32), PoolError> {
    let mut from = Reader::new(header);
    let (_version, height, _reserved, count) = (from.u8()?, from.u8()?, from.u16()?, from.u32()?);
    if height > MAX_LEVEL { Err(bad("the height of a node is not that of its kind")) } else { Ok((height, count)) }
}

#[cfg(test)]
mod tests;
