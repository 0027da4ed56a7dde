//! Storage format of the segment table: pages, nodes above them, deltas, and the list of the segments that store
//! these.
//!
//! A page holds [`PAGE`] segments with consecutive numbers, in the state after all operations before the number that
//! it records. Nodes name [`FAN`] pages each, by number, up to a single node at [`TOP`]. A delta holds the operations
//! from some number on. So the table is the union of all pages, and of all deltas from the lowest operation on that a
//! page lacks, no matter when each page was written.
//!
//! Callers: the store's commit and import. The format is in `docs/pool-format.md`. Invariant: any input gives a
//! possible table or an error.

use std::collections::{BTreeMap, BTreeSet};

use crate::codec::{Reader, Writer};
use crate::error::PoolError;
use crate::label::{TableSegment, small};
use crate::pointer::Pointer;

use super::table::{Op, PAGE, Segment, SegmentTable};
use super::table_log::{
    UncommittedRun, begin, check, check_segment, expect_kind, read_op, read_segment, read_uncommitted, write_op,
    write_segment, write_uncommitted, wrong,
};

const PAGE_KIND: u8 = 4;
const NODE: u8 = 5;
const DELTA: u8 = 6;
const LIST: u8 = 7;

/// Number of children of a node.
pub const FAN: u32 = 64;
/// Height of the single top node: pages have height 0, and the levels cover all possible segment numbers.
pub const TOP: u8 = 5;
/// Maximum number of frames of a page or node.
const MOST_FRAMES: u64 = 4096;

/// Name of a page or node: its height, and its number at this height.
pub type NodeName = (u8, u32);

/// Name of the parent node.
#[must_use]
pub fn parent((height, number): NodeName) -> NodeName {
    (height + 1, number / FAN)
}

/// Encodes a page in its current state.
#[must_use]
pub fn write_page(table: &SegmentTable, page: u32) -> Vec<u8> {
    let mut to = begin(PAGE_KIND, table.next());
    to.varint(u64::from(page));
    to.varint(table.page(page).count() as u64);
    for (id, segment) in table.page(page) {
        to.varint(u64::from(*id));
        write_segment(&mut to, segment);
    }
    to.finish()
}

/// Encodes a node from the frames of its children.
#[must_use]
pub fn write_node<'a>(
    generation: u64,
    (height, number): NodeName,
    children: impl Iterator<Item = (u32, &'a [Pointer])>,
) -> Vec<u8> {
    let children: Vec<_> = children.collect();
    let mut to = begin(NODE, generation);
    to.u8(height);
    to.varint(u64::from(number));
    to.varint(children.len() as u64);
    for (child, frames) in children {
        to.varint(u64::from(child));
        write_pointers(&mut to, frames);
    }
    to.finish()
}

/// Decodes the children of a node, with their frames.
///
/// # Errors
/// [`PoolError::Format`] for bytes that are not this node.
pub fn read_node(bytes: &[u8], (height, number): NodeName) -> Result<Vec<(NodeName, Vec<Pointer>)>, PoolError> {
    let mut from = Reader::new(bytes);
    expect_kind(&mut from, NODE)?;
    if (from.u8()?, small(&mut from)?) != (height, number) {
        return wrong("another node of the segment table");
    }
    let Some(below) = height.checked_sub(1) else { return wrong("a page of the segment table is a node") };
    let mut children: Vec<(NodeName, Vec<Pointer>)> = Vec::new();
    for _ in 0..from.varint()? {
        let child = small(&mut from)?;
        let is_next = children.last().is_none_or(|((_, before), _)| *before < child);
        if child / FAN != number || !is_next {
            return wrong("a page of the segment table is in the wrong place");
        }
        children.push(((below, child), read_pointers(&mut from)?));
    }
    Ok(children)
}

fn write_pointers(to: &mut Writer, pointers: &[Pointer]) {
    to.varint(pointers.len() as u64);
    pointers.iter().for_each(|pointer| pointer.encode(to));
}

fn read_pointers(from: &mut Reader<'_>) -> Result<Vec<Pointer>, PoolError> {
    let count = from.varint()?;
    if count == 0 || count > MOST_FRAMES {
        return wrong("a page of the segment table in too many frames");
    }
    (0..count).map(|_| Pointer::decode(from)).collect()
}

/// Encodes a delta: operations from number `first` on.
#[must_use]
pub fn write_delta(generation: u64, first: u64, ops: &[Op], uncommitted: &[UncommittedRun]) -> Vec<u8> {
    let mut to = begin(DELTA, generation);
    to.varint(first);
    to.varint(ops.len() as u64);
    for op in ops {
        write_op(&mut to, op);
    }
    write_uncommitted(&mut to, uncommitted);
    to.finish()
}

/// Encodes the list of the table's own segments.
#[must_use]
pub fn write_list(generation: u64, segments: &[TableSegment]) -> Vec<u8> {
    let mut to = begin(LIST, generation);
    to.varint(segments.len() as u64);
    segments.iter().for_each(|segment| segment.encode(&mut to));
    to.finish()
}

/// Decodes the list of the table's own segments.
///
/// # Errors
/// [`PoolError::Format`] for other bytes.
pub fn read_list(bytes: &[u8]) -> Result<Vec<TableSegment>, PoolError> {
    let mut from = Reader::new(bytes);
    expect_kind(&mut from, LIST)?;
    let mut segments: Vec<TableSegment> = Vec::new();
    for _ in 0..from.varint()? {
        let segment = TableSegment::decode(&mut from)?;
        if segments.last().is_some_and(|before| before.id >= segment.id) {
            return wrong("the segments of the table are not in their order");
        }
        segments.push(segment);
    }
    Ok(segments)
}

/// Reader of a table: first all pages, then all deltas, then [`TableReader::finish`].
#[derive(Debug, Default)]
pub struct TableReader {
    segments: BTreeMap<u32, Segment>,
    /// For each page, the number of the first operation that it lacks.
    known: BTreeMap<u32, u64>,
    /// For each empty page, the number of the first operation that it lacks.
    hollow: BTreeMap<u32, u64>,
    replayed: Option<Replayed>,
}

#[derive(Debug)]
struct Replayed {
    table: SegmentTable,
    uncommitted: Vec<UncommittedRun>,
    firsts: Vec<u64>,
}

/// The table as read from all pages and deltas.
#[derive(Debug, Default)]
pub struct ReadTable {
    /// The table.
    pub table: SegmentTable,
    /// The uncommitted frames recorded in the last delta.
    pub uncommitted: Vec<UncommittedRun>,
    /// First operation numbers of the deltas.
    pub firsts: Vec<u64>,
    /// Empty pages, each with the number of the first operation that it lacks.
    pub hollow: BTreeMap<u32, u64>,
}

impl TableReader {
    /// Adds the page with this number.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are not that page.
    pub fn page(&mut self, bytes: &[u8], page: u32) -> Result<(), PoolError> {
        let mut from = Reader::new(bytes);
        let number = expect_kind(&mut from, PAGE_KIND)?;
        if small(&mut from)? != page || self.known.insert(page, number).is_some() {
            return wrong("another page of the segment table");
        }
        let count = from.varint()?;
        for _ in 0..count {
            let id = small(&mut from)?;
            if id / PAGE != page || self.segments.insert(id, read_segment(&mut from)?).is_some() {
                return wrong("a segment in the wrong page");
            }
        }
        if count == 0 {
            self.hollow.insert(page, number);
        }
        Ok(())
    }

    /// Applies the next delta.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are not the next delta of this table.
    pub fn delta(&mut self, bytes: &[u8]) -> Result<(), PoolError> {
        let mut from = Reader::new(bytes);
        expect_kind(&mut from, DELTA)?;
        let first = from.varint()?;
        let count = from.varint()?;
        if first.checked_add(count).is_none() {
            return wrong("a number of an operation that no pool comes to");
        }
        let segments = &mut self.segments;
        let Replayed { table, uncommitted, firsts } = self.replayed.get_or_insert_with(|| {
            let mut table = SegmentTable::with(std::mem::take(segments));
            table.set_next(first);
            Replayed { table, uncommitted: Vec::new(), firsts: Vec::new() }
        });
        // Operations between two deltas may be in all pages.
        if first < table.next() {
            return wrong("the deltas of the segment table are not in their order");
        }
        table.set_next(first);
        for _ in 0..count {
            let op = read_op(&mut from)?;
            let number = table.next();
            table.replay_of(&op, &|id| self.known.get(&(id / PAGE)).is_none_or(|known| *known <= number))?;
        }
        *uncommitted = read_uncommitted(&mut from)?;
        firsts.push(first);
        Ok(())
    }

    /// Checks and returns the table.
    ///
    /// # Errors
    /// [`PoolError::Format`] where pages and deltas are inconsistent.
    pub fn finish(self) -> Result<ReadTable, PoolError> {
        let Some(Replayed { table, uncommitted, firsts }) = self.replayed else {
            return wrong("a segment table without a delta");
        };
        if self.known.values().any(|known| *known > table.next()) {
            return wrong("a page of the segment table is newer than its deltas");
        }
        // Other pages were checked when they were read.
        for page in table.dirty_before(u64::MAX) {
            table.page(page).try_for_each(|(_, segment)| check_segment(segment))?;
        }
        check(table.segments())?;
        Ok(ReadTable { table, uncommitted, firsts, hollow: self.hollow })
    }
}

/// Locations of pages and nodes.
#[derive(Clone, Debug, Default)]
pub struct PageTree {
    frames: BTreeMap<NodeName, Box<[Pointer]>>,
    /// Pages and nodes by segment.
    lying: BTreeSet<(u32, NodeName)>,
    /// Charged size of the pages and nodes in each segment, bytes.
    charged: BTreeMap<u32, u64>,
}

impl PageTree {
    /// The frames of a page or node.
    #[must_use]
    pub fn frames(&self, name: NodeName) -> Option<&[Pointer]> {
        self.frames.get(&name).map(|frames| &**frames)
    }

    /// All pages and nodes from this one on, with their frames.
    pub fn from(&self, name: NodeName) -> impl Iterator<Item = (&NodeName, &Box<[Pointer]>)> {
        self.frames.range(name..)
    }

    /// Number of pages and nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The children of a node.
    pub fn children(&self, (height, number): NodeName) -> impl Iterator<Item = (u32, &[Pointer])> {
        let first = u64::from(number) * u64::from(FAN);
        let last = (first + u64::from(FAN) - 1).min(u64::from(u32::MAX)) as u32;
        let below = height.saturating_sub(1);
        self.frames
            .range((below, first.min(u64::from(u32::MAX)) as u32)..=(below, last))
            .map(|((_, child), frames)| (*child, &**frames))
    }

    /// Sets the frames of a page or node; removes it if there are none.
    pub fn set(&mut self, name: NodeName, frames: Vec<Pointer>) {
        for pointer in self.frames.remove(&name).unwrap_or_default() {
            self.lying.remove(&(pointer.segment, name));
            if let Some(charged) = self.charged.get_mut(&pointer.segment) {
                *charged = charged.saturating_sub(pointer.charged());
                if *charged == 0 {
                    self.charged.remove(&pointer.segment);
                }
            }
        }
        for pointer in &frames {
            self.lying.insert((pointer.segment, name));
            *self.charged.entry(pointer.segment).or_default() += pointer.charged();
        }
        if !frames.is_empty() {
            self.frames.insert(name, frames.into_boxed_slice());
        }
    }

    /// Charged size of the pages and nodes in each segment, bytes.
    #[must_use]
    pub fn charged(&self) -> &BTreeMap<u32, u64> {
        &self.charged
    }

    /// The pages and nodes with a frame in a segment.
    pub fn lying_in(&self, segment: u32) -> impl Iterator<Item = NodeName> {
        self.lying.range((segment, (0, 0))..=(segment, (u8::MAX, u32::MAX))).map(|(_, name)| *name)
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
