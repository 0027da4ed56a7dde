//! Reading the segment table that a root names.
//!
//! Callers: imports, followers, `scrub.rs` and `copies.rs` for single frames. Invariant: unreadable or inconsistent
//! parts are an error.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::Result;
use super::blame::Reading;
use super::pieces::put_together;
use crate::backend::{Backend, SegmentAt};
use crate::error::{Damage, PoolError};
use crate::frame::stored;
use crate::frames::WriteStream;
use crate::label::Root;
use crate::pointer::Pointer;
use crate::segment::pages::{NodeName, PageTree, ReadTable, TOP, TableReader, read_list, read_node};
use crate::segment::table::{Op, SegmentTable};
use crate::segment::table_log::{self, UncommittedRun};

/// Number of pages in memory at once, in encoded form.
const AT_ONCE: usize = 4096;
/// Maximum length of adjacent frames that are read together, bytes.
const TOGETHER: u64 = 1 << 20;
/// Maximum unused gap between such frames, bytes.
const BETWEEN: u64 = 64 << 10;
/// Number of parallel reads.
const READS: usize = 8;

/// The table as read.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    pub(super) table: SegmentTable,
    uncommitted: Vec<UncommittedRun>,
    pub(super) tree: PageTree,
    pub(super) hollow: BTreeMap<u32, u64>,
    pub(super) firsts: Vec<u64>,
}

impl Loaded {
    /// Charged size of the table itself, bytes.
    pub(super) fn charged(&self, root: &Root) -> u64 {
        let others = root.deltas.iter().chain(&root.table).chain(&root.table_list);
        self.tree.charged().values().sum::<u64>() + others.map(Pointer::charged).sum::<u64>()
    }
}

fn structure<T>(what: &'static str) -> Result<T> {
    Err(PoolError::Format(Damage::Structure(what)))
}

/// Reads the table, and completes the root's list of the table's own segments.
pub(super) fn load(backend: &dyn Backend, root: &mut Root) -> Result<Loaded> {
    let listed = match root.table_list.as_slice() {
        [] => Vec::new(),
        frames => read_list(&read_frames(backend, root, frames)?.concat())?,
    };
    root.complete(listed);
    let loaded = match &root.table {
        Some(table) => load_full(backend, root, table)?,
        None => load_pages(backend, root)?,
    };
    let last = loaded
        .table
        .segments()
        .last_key_value()
        .map_or(0, |(id, _)| *id)
        .max(root.table_segments.iter().map(|segment| segment.id).max().unwrap_or(0));
    if root.next_segment <= last {
        return structure("the number of the next segment is in use");
    }
    Ok(loaded)
}

fn load_pages(backend: &dyn Backend, root: &Root) -> Result<Loaded> {
    if root.deltas.is_empty() {
        return structure("a root record without a segment table");
    }
    let (mut tree, mut reader) = (PageTree::default(), TableReader::default());
    let mut level: Vec<(NodeName, Vec<Pointer>)> = Vec::new();
    if !root.table_top.is_empty() {
        level.push(((TOP, 0), root.table_top.clone()));
    }
    while !level.is_empty() {
        let mut below = Vec::new();
        for part in level.chunks(AT_ONCE) {
            let frames: Vec<Pointer> = part.iter().flat_map(|(_, frames)| frames).copied().collect();
            let mut read = read_frames(backend, root, &frames)?.into_iter();
            for (name, frames) in part {
                let bytes = read.by_ref().take(frames.len()).collect::<Vec<_>>().concat();
                match *name {
                    (0, page) => reader.page(&bytes, page)?,
                    name => below.extend(read_node(&bytes, name)?),
                }
                tree.set(*name, frames.clone());
            }
        }
        level = below;
    }
    for delta in read_frames(backend, root, &root.deltas)? {
        reader.delta(&delta)?;
    }
    let ReadTable { table, uncommitted, firsts, hollow } = reader.finish()?;
    Ok(Loaded { table, uncommitted, tree, hollow, firsts })
}

/// Reads the format of earlier versions.
fn load_full(backend: &dyn Backend, root: &Root, table: &Pointer) -> Result<Loaded> {
    let pieces = table_log::read_index(&read_frame(backend, root, table)?)?;
    let body = read_frames(backend, root, &pieces)?.concat();
    let (mut table, mut uncommitted) = table_log::read_full(&body)?;
    for delta in &root.deltas {
        // Only the runs of the last delta are still uncommitted.
        uncommitted = table_log::replay_delta(&read_frame(backend, root, delta)?, &mut table)?;
    }
    Ok(Loaded { table, uncommitted, ..Loaded::default() })
}

/// Location of a frame of the table, which only the root's own list knows.
pub(super) fn table_place<'a>(root: &'a Root, pointer: &Pointer) -> Option<SegmentAt<'a>> {
    let segment = root.table_segment(pointer.segment)?;
    Some(SegmentAt { segment: segment.id, place: &segment.place }).filter(|at| !at.place.is_empty())
}

/// Adjacent frames of one segment: their indices in the request, start and end.
struct Run<'a> {
    at: SegmentAt<'a>,
    start: u64,
    end: u64,
    frames: Vec<usize>,
}

/// Reads frames of the table, adjacent ones together and several runs in parallel.
fn read_frames(backend: &dyn Backend, root: &Root, wanted: &[Pointer]) -> Result<Vec<Vec<u8>>> {
    let mut order: Vec<(u32, u64, usize)> = wanted
        .iter()
        .enumerate()
        .map(|(at, pointer)| (pointer.segment, u64::from(pointer.offset) * u64::from(Pointer::UNIT), at))
        .collect();
    order.sort_unstable();
    let mut runs: Vec<Run<'_>> = Vec::new();
    for (_, start, number) in order {
        let Some(pointer) = wanted.get(number) else { continue };
        let Some(at) = table_place(root, pointer) else {
            let damage = Damage::Structure("its segment is not there");
            return Err(PoolError::Frame { pointer: *pointer, damage });
        };
        let end = start + pointer.charged();
        match runs.last_mut() {
            Some(run) if run.at.segment == at.segment && start <= run.end + BETWEEN && end <= run.start + TOGETHER => {
                run.end = run.end.max(end);
                run.frames.push(number);
            }
            _ => runs.push(Run { at, start, end, frames: vec![number] }),
        }
    }
    let read = Mutex::new(vec![Vec::new(); wanted.len()]);
    let next = AtomicUsize::new(0);
    let along = || -> Result<()> {
        while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let contents = read_run(backend, root, wanted, run)?;
            let mut read = read.lock();
            for (number, content) in contents {
                if let Some(place) = read.get_mut(number) {
                    *place = content;
                }
            }
        }
        Ok(())
    };
    match runs.len() {
        0 => {}
        1 => along()?,
        many => std::thread::scope(|scope| {
            let start = |_| std::thread::Builder::new().name("pool-table".to_owned()).spawn_scoped(scope, along);
            let others: Vec<_> = (1..many.min(READS)).filter_map(|number| start(number).ok()).collect();
            let gone = || Err(PoolError::Refused("a thread that read the segment table is gone".to_owned()));
            let own = along();
            others.into_iter().map(|other| other.join().unwrap_or_else(|_| gone())).fold(own, Result::and)
        })?,
    }
    Ok(read.into_inner())
}

fn read_run(backend: &dyn Backend, root: &Root, wanted: &[Pointer], run: &Run<'_>) -> Result<Vec<(usize, Vec<u8>)>> {
    let is_possible = run.end <= backend.capacity(run.at.place);
    let mut bytes = Vec::new();
    if is_possible && run.frames.len() > 1 {
        bytes.resize((run.end - run.start) as usize, 0);
        if backend.read_any(run.at, run.start, &mut bytes).is_err() {
            bytes.clear();
        }
    }
    let each = run.frames.iter().filter_map(|number| Some((*number, wanted.get(*number)?)));
    each.map(|(number, pointer)| {
        let offset = u64::from(pointer.offset) * u64::from(Pointer::UNIT) + u64::from(Pointer::HEADER);
        let from = (offset - run.start) as usize;
        let stored = bytes.get(from..from.saturating_add(pointer.stored as usize));
        let end = backend.capacity(run.at.place);
        let whole =
            stored.filter(|_| u64::from(pointer.logical) <= end).and_then(|stored| content(pointer, stored).ok());
        Ok((number, whole.map_or_else(|| read_frame(backend, root, pointer), Ok)?))
    })
    .collect()
}

/// Reads a frame of the table from the first copy or reconstruction that is right.
fn read_frame(backend: &dyn Backend, root: &Root, pointer: &Pointer) -> Result<Vec<u8>> {
    let missing = PoolError::Frame { pointer: *pointer, damage: Damage::Structure("its segment is not there") };
    let mut read = Err(missing);
    let at = table_place(root, pointer);
    for (at, way) in at.iter().flat_map(|at| (0..backend.ways(*at)).map(move |way| (*at, way))) {
        read = read_table_copy(backend, at, way, pointer, &mut Reading::default());
        if read.is_ok() {
            return read;
        }
    }
    if let (Some(at), Err(PoolError::Frame { damage: Damage::Checksum | Damage::Compression, .. })) = (at, &read) {
        let offset = u64::from(pointer.offset) * u64::from(Pointer::UNIT) + u64::from(Pointer::HEADER);
        if let Some((_, content, _)) = put_together(backend, at, offset, pointer, &mut |_| true)? {
            return Ok(content);
        }
    }
    read
}

/// Reads a frame of the table from copy or reconstruction `way`, and keeps the reading.
pub(super) fn read_table_copy(
    backend: &dyn Backend,
    at: SegmentAt<'_>,
    way: usize,
    pointer: &Pointer,
    reading: &mut Reading,
) -> Result<Vec<u8>> {
    let offset = u64::from(pointer.offset) * u64::from(Pointer::UNIT);
    let end = backend.capacity(at.place);
    if offset + pointer.charged() > end || u64::from(pointer.logical) > end {
        let damage = Damage::Structure("behind the end of its segment");
        return Err(PoolError::Frame { pointer: *pointer, damage });
    }
    let Reading { stored, sources } = reading;
    stored.resize(pointer.stored as usize, 0);
    backend.read_noting(at, Some(way), offset + u64::from(Pointer::HEADER), stored, sources)?;
    content(pointer, stored)
}

/// Decompresses and verifies the content of a frame.
fn content(pointer: &Pointer, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut content = vec![0; pointer.content_length() as usize];
    if let Some(damage) = stored::unpack(pointer, bytes, &mut content) {
        return Err(PoolError::Frame { pointer: *pointer, damage });
    }
    Ok(content)
}

/// Frees uncommitted frames, and seals open segments unless they may be resumed.
pub(super) fn settle(loaded: &mut Loaded, resume: bool, of_content: usize) -> Result<()> {
    for run in std::mem::take(&mut loaded.uncommitted) {
        loaded.table.apply(Op::Free { segment: run.segment, index: run.index, count: run.count, units: run.units })?;
    }
    let open: Vec<(u32, WriteStream)> = loaded
        .table
        .segments()
        .iter()
        .filter(|(_, segment)| !segment.sealed)
        .map(|(id, segment)| (*id, segment.stream))
        .collect();
    for (id, stream) in &open {
        let many = if *stream == WriteStream::Data { of_content } else { 1 };
        let last = open.iter().rev().filter(|(_, of)| of == stream).take(many).any(|(last, _)| last == id);
        if !(resume && last) {
            loaded.table.apply(Op::Seal { id: *id })?;
        }
    }
    Ok(())
}
