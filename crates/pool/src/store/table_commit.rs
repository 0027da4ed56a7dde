//! Writing of the segment table by a commit: its changes, and pages that changed some commits ago.
//!
//! Caller: `commit.rs`. Invariants:
//! - A root names the complete table: its pages, and its deltas from the first operation on that a page lacks. No page
//!   is overwritten; pages that only older roots name stay until those roots are no longer retained.
//! - The amount written depends on the amount changed, not on the size of the table: a page is written when the oldest
//!   delta that it needs has to be dropped. Segments of the table with low utilization are emptied, no faster than
//!   others are filled.
//! - Pages are encoded under the lock of the table, a few at a time, and written without it.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::{Committed, Map, Result, Store};
use crate::backend::{Copies, SegmentAt};
use crate::checksum;
use crate::compress;
use crate::error::{Damage, PoolError};
use crate::frame::{Header, Sealer};
use crate::frames::{CompressionSetting, Owner, WriteStream};
use crate::label::{Root, TableSegment};
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer};
use crate::segment::cleaner;
use crate::segment::pages::{self, NodeName, TOP};

/// Number of older roots that stay importable.
const KEPT: u64 = 3;
/// Maximum number of deltas that a root names.
pub const DELTAS: usize = 24;
/// Maximum number of deltas where each commit begins a segment of the table (object stores).
const DELTAS_OF_OBJECTS: usize = 8;
/// Number of pages encoded under one hold of the table's lock.
const AT_ONCE: usize = 8;
/// Number of rounds in which pages are written while operations arrive faster than a delta could hold them.
const ROUNDS: usize = 3;
/// Size of the write buffer, bytes.
const HELD: usize = 1 << 20;
/// Number of segments that may hold pages beyond twice the number that these need.
const SPARE: u64 = 2;
/// Number of segments that may hold pages beyond twice the number that these need, where each commit begins one
/// (object stores).
const SPARE_OBJECTS: u64 = 12;

/// An encoded page: its number, the first operation that it lacks (`known`), and whether it is empty.
struct Image {
    page: u32,
    known: u64,
    is_hollow: bool,
    content: Vec<u8>,
}

fn images(map: &mut Map, wanted: &[u32]) -> Vec<Image> {
    let each = wanted.iter().map(|page| {
        let content = pages::write_page(&map.table, *page);
        let is_hollow = map.table.page(*page).next().is_none();
        map.table.stored(*page);
        Image { page: *page, known: map.table.next(), is_hollow, content }
    });
    each.collect()
}

/// Writer of the table's frames in one commit.
struct TableFrames<'a> {
    store: &'a Store,
    committed: &'a mut Committed,
    root: &'a mut Root,
    /// The nodes that have to be written.
    changed: BTreeSet<NodeName>,
    /// Buffer of bytes that follow the written part of the open segment.
    held: Vec<u8>,
}

impl Store {
    /// Writes the changes of the table, and records them in the root.
    pub(super) fn write_table(&self, committed: &mut Committed, root: &mut Root, urgent: bool) -> Result<()> {
        let open = committed.open_table;
        if let Some(open) = root.table_segments.iter_mut().find(|segment| Some(segment.id) == open) {
            open.bytes = open.bytes.next_multiple_of(4096);
        }
        // A table of earlier versions is rewritten in pages.
        let renew = std::mem::take(&mut committed.renew) || root.table.is_some();
        let mut to = TableFrames { store: self, committed, root, changed: BTreeSet::new(), held: Vec::new() };
        let wanted = if renew { to.everything() } else { to.due() };
        to.put_pages(&wanted)?;
        for _ in 0..ROUNDS {
            let all = {
                let mut map = self.map.write();
                map.table.forget_stored();
                if self.is_much(&map) { map.table.dirty_before(u64::MAX) } else { Vec::new() }
            };
            to.put_pages(&all)?;
        }
        let (last, first, needed, ops, uncommitted) = {
            let mut map = self.map.write();
            let room = self.backend.room();
            let Map { table, arriving, uncommitted, .. } = &mut *map;
            // The table learns of frames copied there later; until then their segment must not be freed.
            table.finish(to.root.generation, arriving)?;
            uncommitted.retain(|run| run.birth > to.root.txg);
            let short = urgent || cleaner::pressure(room.empty(), room.total) == cleaner::Pressure::Urgent;
            let generation = to.root.generation;
            to.root.kept = if short { generation } else { to.root.kept.max(generation.saturating_sub(KEPT)) };
            let last = if renew || self.is_much(&map) {
                let all = map.table.dirty_before(u64::MAX);
                images(&mut map, &all)
            } else {
                Vec::new()
            };
            map.table.forget_stored();
            let (first, needed) = (map.table.first_recorded(), map.table.first_needed());
            (last, first, needed, map.table.take_ops(), map.uncommitted.clone())
        };
        to.put_images(last)?;
        to.put_nodes()?;
        let delta = pages::write_delta(to.root.generation, first, &ops, &uncommitted);
        to.put_delta(&delta, first, needed)?;
        to.flush()?;
        to.end()?;
        to.put_list()
    }

    /// Maximum length of a frame of the table, bytes.
    fn longest_piece(&self) -> usize {
        (self.slot / 4).min(8 << 20) as usize
    }

    /// Whether the changes do not fit into one delta.
    fn is_much(&self, map: &Map) -> bool {
        map.table.recorded() > self.longest_piece() as u64
    }

    fn open_table_segment(&self) -> Result<TableSegment> {
        let begin = || self.begin_segment(&mut self.map.write(), WriteStream::Table, 0);
        let begun = match begin()? {
            None if self.backend.reclaim() => begin()?,
            begun => begun,
        };
        let (id, place) = begun.ok_or(PoolError::NoSpace)?;
        Ok(TableSegment { id, place, frames: 0, bytes: 0, dead_since: None })
    }
}

impl TableFrames<'_> {
    /// All pages, for rewriting the whole table elsewhere.
    fn everything(&mut self) -> Vec<u32> {
        let mut wanted = self.store.map.read().table.pages();
        for (name, _) in self.committed.tree.from((0, 0)) {
            match *name {
                (0, page) => drop(wanted.insert(page)),
                node => drop(self.changed.insert(node)),
            }
        }
        (self.root.table_list, self.root.listed) = (Vec::new(), [].into());
        wanted.into_iter().collect()
    }

    /// The pages that are due: those that need the oldest delta when the number of deltas is at its limit, and those
    /// in segments that are to be emptied.
    fn due(&mut self) -> Vec<u32> {
        let extends = self.store.backend.extends();
        let most = if extends { DELTAS } else { DELTAS_OF_OBJECTS };
        let firsts = &self.committed.firsts;
        let staying = firsts.len().checked_sub(most - 1).and_then(|at| firsts.get(at)).copied().unwrap_or(0);
        let mut wanted: BTreeSet<u32> = self.store.map.read().table.dirty_before(staying).into_iter().collect();
        for segment in self.sparse(if extends { SPARE } else { SPARE_OBJECTS }) {
            for name in self.committed.tree.lying_in(segment) {
                match name {
                    (0, page) => drop(wanted.insert(page)),
                    node => drop(self.changed.insert(node)),
                }
            }
        }
        // No delta contains anything of these pages any more.
        let oldest = self.committed.firsts.first().copied().unwrap_or(0);
        let gone: Vec<u32> =
            self.committed.hollow.iter().filter(|(_, known)| **known <= oldest).map(|(page, _)| *page).collect();
        for page in gone.into_iter().filter(|page| !wanted.contains(page)) {
            self.committed.hollow.remove(&page);
            self.committed.tree.set((0, page), Vec::new());
            self.changed.insert(pages::parent((0, page)));
        }
        wanted.into_iter().collect()
    }

    /// Segments with such low utilization that their pages are written elsewhere.
    fn sparse(&self, spare: u64) -> Vec<u32> {
        let charged = self.committed.tree.charged();
        let full = (charged.values().sum::<u64>() * 2).div_ceil(self.store.longest.max(1));
        let mut count = charged.len() as u64;
        if count <= full + spare {
            return Vec::new();
        }
        let mut each: Vec<(u64, u32)> =
            charged.iter().filter(|(id, _)| !self.is_held(**id)).map(|(id, charged)| (*charged, *id)).collect();
        each.sort_unstable();
        let (mut sparse, mut moved) = (Vec::new(), 0);
        for (charged, id) in each {
            if count <= full + spare / 2 || moved > self.store.longest {
                break;
            }
            sparse.push(id);
            (count, moved) = (count - 1, moved + charged);
        }
        sparse
    }

    /// Whether a segment is kept by anything other than pages.
    fn is_held(&self, id: u32) -> bool {
        let listed = self.root.deltas.iter().chain(&self.root.table_list).any(|pointer| pointer.segment == id);
        listed || self.committed.open_table == Some(id)
    }

    fn put_pages(&mut self, wanted: &[u32]) -> Result<()> {
        wanted.chunks(AT_ONCE).try_for_each(|some| {
            let made = images(&mut self.store.map.write(), some);
            self.put_images(made)
        })
    }

    fn put_images(&mut self, images: Vec<Image>) -> Result<()> {
        for Image { page, known, is_hollow, content } in images {
            let name = (0, page);
            let frames = self.put_pieces(&content)?;
            self.committed.tree.set(name, frames);
            self.changed.insert(pages::parent(name));
            if is_hollow {
                self.committed.hollow.insert(page, known);
            } else {
                self.committed.hollow.remove(&page);
            }
        }
        Ok(())
    }

    /// Writes the nodes above the changed pages.
    fn put_nodes(&mut self) -> Result<()> {
        while let Some(name) = self.changed.pop_first() {
            let tree = &self.committed.tree;
            let is_empty = tree.children(name).next().is_none();
            let content = pages::write_node(self.root.generation, name, tree.children(name));
            let frames = if is_empty { Vec::new() } else { self.put_pieces(&content)? };
            self.committed.tree.set(name, frames);
            if name.0 < TOP {
                self.changed.insert(pages::parent(name));
            }
        }
        self.root.table_top = self.committed.tree.frames((TOP, 0)).unwrap_or_default().to_vec();
        Ok(())
    }

    /// Adds a delta that begins with operation `first`; drops the oldest deltas that contain only operations before
    /// `needed`.
    fn put_delta(&mut self, delta: &[u8], first: u64, needed: u64) -> Result<()> {
        if self.root.table.take().is_some() {
            self.root.deltas.clear();
        }
        let ends = self.committed.firsts.iter().skip(1).chain([&first]);
        let gone = ends.take_while(|end| **end <= needed).count();
        self.committed.firsts.drain(..gone.min(self.committed.firsts.len()));
        self.root.deltas.drain(..gone.min(self.root.deltas.len()));
        let pointer = self.put(delta)?;
        self.root.deltas.push(pointer);
        self.committed.firsts.push(first);
        Ok(())
    }

    /// Marks unused segments of the table as dead, and updates its charged size.
    fn end(&mut self) -> Result<()> {
        let charged = self.committed.tree.charged();
        let others = self.root.deltas.iter().chain(&self.root.table_list);
        let mut used: BTreeSet<u32> = charged.keys().copied().chain(self.committed.open_table).collect();
        used.extend(others.clone().map(|pointer| pointer.segment));
        let all = charged.values().sum::<u64>() + others.map(Pointer::charged).sum::<u64>();
        self.store.sums.table.store(all, Ordering::Relaxed);
        for segment in self.root.table_segments.iter_mut().filter(|segment| !used.contains(&segment.id)) {
            segment.dead_since.get_or_insert(self.root.generation);
        }
        self.root.next_segment = self.store.map.read().next_segment;
        Ok(())
    }

    /// Writes the list of the table's segments where the root record has no space for all of them.
    fn put_list(&mut self) -> Result<()> {
        if self.root.encode().is_ok() {
            return Ok(());
        }
        let all = self.root.table_segments.clone();
        self.root.table_list = self.put_pieces(&pages::write_list(self.root.generation, &all))?;
        self.root.listed = all.into();
        self.flush()?;
        self.root.next_segment = self.store.map.read().next_segment;
        Ok(())
    }

    fn put_pieces(&mut self, content: &[u8]) -> Result<Vec<Pointer>> {
        content.chunks(self.store.longest_piece()).map(|piece| self.put(piece)).collect()
    }

    /// Appends a frame to the open segment, or to a new one.
    fn put(&mut self, content: &[u8]) -> Result<Pointer> {
        let compressed = compress::compress(CompressionSetting::Zstd(1), content);
        let (compression, stored) =
            compressed.as_ref().map_or((Compression::Off, content), |(how, compressed)| (*how, compressed.as_slice()));
        let pointer = Pointer {
            segment: 0,
            index: 0,
            offset: 0,
            stored: stored.len() as u32,
            logical: content.len() as u32,
            kind: FrameKind::Table,
            compression,
            checksum_kind: ChecksumKind::Xxh3,
            pin: 0,
            birth: self.root.txg,
            checksum: checksum::structure(content),
        };
        let fits = |segment: &TableSegment| {
            u64::from(segment.bytes) + pointer.charged() <= self.store.backend.capacity(&segment.place)
        };
        let open = self.committed.open_table;
        if !self.root.table_segments.iter().any(|segment| Some(segment.id) == open && fits(segment)) {
            self.flush()?;
            let segment = self.store.open_table_segment()?;
            self.committed.open_table = Some(segment.id);
            self.root.table_segments.push(segment);
        }
        let segment = self.open()?;
        let named = Pointer { segment: segment.id, index: segment.frames, ..pointer };
        let offset = segment.bytes;
        segment.frames += 1;
        segment.bytes += pointer.charged() as u32;
        let header = Header { pointer: named, owner: Owner::default(), sealer: Sealer::default() };
        let end = self.held.len() + pointer.charged() as usize;
        self.held.extend_from_slice(&header.encode());
        self.held.extend_from_slice(stored);
        self.held.resize(end, 0);
        if self.held.len() >= HELD {
            self.flush()?;
        }
        Ok(Pointer { offset: offset / Pointer::UNIT, ..named })
    }

    fn open(&mut self) -> Result<&mut TableSegment> {
        let open = self.committed.open_table;
        let found = self.root.table_segments.iter_mut().rev().find(|segment| Some(segment.id) == open);
        found.ok_or(PoolError::Format(Damage::Structure("no open segment for the table")))
    }

    /// Writes the buffer.
    fn flush(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let held = std::mem::take(&mut self.held);
        let segment = self.open()?;
        let (id, place, offset) = (segment.id, segment.place.clone(), u64::from(segment.bytes) - held.len() as u64);
        let at = SegmentAt { segment: id, place: &place };
        if self.store.backend.write(at, WriteStream::Table, offset, &held)? == Copies::Fewer {
            // This frame has fewer copies: the next commit rewrites the whole table elsewhere.
            (self.committed.open_table, self.committed.renew) = (None, true);
        }
        self.store.sums.written_table.fetch_add(held.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}
