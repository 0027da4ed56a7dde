//! Listings: the entries of a directory in the order of their creation, with attributes on request.
//!
//! An entry's sequence is the cookie: it is unique, never assigned twice, and stays as long as the
//! name; so a listing can be interrupted and continued at any time, also after a remount, and shows
//! every name that exists throughout exactly once. New names have higher ones: a listing that ends
//! at the sequence that was next when it began is finite, whatever is created or renamed meanwhile.
//!
//! Inodes are numbered in the order in which their names were created, so the attributes of a
//! directory's files are close together as well: then they are read in one pass, parallel to that
//! over the names, not one by one.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{FileError, Files, Inode, Result, Table};
use crate::error::PoolError;
use crate::rows::{Entry, FileType, InodeRow, keys};

/// An entry of a directory.
#[derive(Clone, Debug)]
pub struct ListedEntry {
    /// Cookie to continue after it.
    pub sequence: u64,
    /// The name.
    pub name: Vec<u8>,
    /// Number of its inode.
    pub number: u64,
    /// Its type.
    pub file_type: FileType,
    /// The inode and its attributes, if they were requested.
    pub file: Option<(Arc<Inode>, InodeRow)>,
}

/// An entry of a directory, borrowed, for a visitor.
#[derive(Clone, Copy, Debug)]
pub struct SeenEntry<'a> {
    /// Cookie to continue after it.
    pub sequence: u64,
    /// The name.
    pub name: &'a [u8],
    /// Number of its inode.
    pub number: u64,
    /// Its type.
    pub file_type: FileType,
    /// Its attributes, if they were requested.
    pub row: Option<&'a InodeRow>,
}

/// Number of entries read under one hold of the table's lock.
const TOGETHER: usize = 512;
/// And at least so many, if more are needed than expected.
const FEWEST: usize = 16;
/// Number of entries from which on files without extended attributes are cached: programs that read
/// so many often ask for the access control list of each.
const LONG: usize = 64;
/// Attributes are read in one pass if there are at most so many inodes between the first and the
/// last for each requested one.
const DENSE: u64 = 8;

/// Selects the inodes whose attributes are requested.
pub type InodeFilter<'a> = &'a dyn Fn(u64) -> bool;

/// Some entries: their names in one buffer, their attributes, if requested, in another one: most
/// listings need none, and would write and read them once more for each entry.
#[derive(Default)]
struct Chunk {
    names: Vec<u8>,
    entries: Vec<ChunkEntry>,
    /// As many as entries, or none.
    rows: Vec<Option<InodeRow>>,
    /// Inodes that had changes in memory when the rows were read, by the index of their entry.
    active: Vec<(usize, Arc<Inode>)>,
}

struct ChunkEntry {
    sequence: u64,
    number: u64,
    /// End of its name; it begins at the end of the one before.
    end: u32,
    file_type: FileType,
}

impl Chunk {
    fn clear(&mut self) {
        self.names.clear();
        self.entries.clear();
        self.rows.clear();
        self.active.clear();
    }

    fn add(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<(), PoolError> {
        let Some(sequence) = keys::sequence_of_entry(key)? else { return Ok(()) };
        let Entry { inode, file_type, name } = Entry::decode(value)?;
        self.names.extend_from_slice(name);
        // Names have at most 255 bytes, and there are a few hundred entries.
        let end = self.names.len() as u32;
        self.entries.push(ChunkEntry { sequence, number: inode, end, file_type });
        Ok(())
    }
}

/// Number of leaves that hold the entries that are read at once, or nearly all of them.
const CHUNK_LEAVES: usize = 8;
/// Readahead starts if one of so many leaves is missing ...
const NEAR_LEAVES: usize = 24;
/// ... and reads so many of them: 2 MiB.
const FAR_LEAVES: usize = 64;
/// Number of times that rows are looked at again after missing nodes were read; after that they are
/// read under the lock.
const LOOKS_MOST: usize = 3;

/// The rows of inodes from one to another.
fn inodes(first: u64, last: u64) -> Range<Vec<u8>> {
    keys::inode(first).to_vec()..keys::inode(last.saturating_add(1)).to_vec()
}

/// The entries of a directory after one sequence and before another.
fn entries(directory: u64, behind: u64, end: u64) -> Range<Vec<u8>> {
    let first = behind.saturating_add(1);
    keys::entry(directory, first).to_vec()..keys::entry(directory, end.max(first)).to_vec()
}

impl<T: Table> Files<T> {
    /// Returns up to `most` entries after the sequence `behind` (0: from the beginning).
    ///
    /// # Errors
    /// [`FileError::NotDirectory`], errors of the engine.
    pub fn list(&self, directory: &Inode, behind: u64, attributes: bool, most: usize) -> Result<Vec<ListedEntry>> {
        let mut listed = Vec::new();
        let all = |_| true;
        let wanted = attributes.then_some(&all as InodeFilter<'_>);
        self.visit(directory, (behind, u64::MAX), wanted, most, &mut |seen| {
            let SeenEntry { sequence, name, number, file_type, row } = *seen;
            let file = row.map(|row| (self.known.get(number), *row));
            listed.push(ListedEntry { sequence, name: name.to_vec(), number, file_type, file });
            listed.len() < most
        })?;
        Ok(listed)
    }

    /// Returns a number above the sequences of all existing names, and not above those of future
    /// names.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.numbers.next.load(Ordering::Relaxed)
    }

    /// Shows the entries after the sequence `behind` (0: from the beginning) and before `end` until
    /// `visit` returns false, with the attributes at least of the requested inodes. About
    /// `expected` of them will be looked at. No lock is held during a visit.
    ///
    /// # Errors
    /// [`FileError::NotDirectory`], errors of the engine.
    pub fn visit(
        &self,
        directory: &Inode,
        (behind, end): (u64, u64),
        attributes: Option<InodeFilter<'_>>,
        expected: usize,
        visit: &mut dyn FnMut(&SeenEntry<'_>) -> bool,
    ) -> Result<()> {
        let row = self.attributes(directory)?;
        if row.file_type() != Some(FileType::Directory) {
            return Err(FileError::NotDirectory);
        }
        let mut chunk = Chunk::default();
        let (mut behind, mut left) = (behind, expected);
        loop {
            let wanted = left.clamp(FEWEST, TOGETHER);
            self.read_chunk(entries(directory.number(), behind, end), (attributes, wanted), &mut chunk)?;
            if chunk.entries.len() == wanted {
                // Every listing begins with a few entries with attributes.
                let inodes_of = (attributes.is_some() && wanted > FEWEST).then_some(row.size);
                self.read_ahead((directory.number(), end), inodes_of, &chunk)?;
            }
            if attributes.is_some() {
                self.show_active(&mut chunk)?;
            }
            let mut from = 0;
            for (at, found) in chunk.entries.iter().enumerate() {
                let ChunkEntry { sequence, number, end, file_type } = *found;
                let name = chunk.names.get(from..end as usize).unwrap_or_default();
                let row = chunk.rows.get(at).and_then(Option::as_ref);
                from = end as usize;
                if !visit(&SeenEntry { sequence, name, number, file_type, row }) {
                    return Ok(());
                }
                behind = sequence;
            }
            if chunk.entries.len() < wanted {
                return Ok(());
            }
            left = left.saturating_sub(wanted);
        }
    }

    /// Whether a file is known, without reading the table, to have no extended attributes, and so
    /// no access control list: because a listing with attributes has just shown it, or because it
    /// was looked up.
    #[must_use]
    pub fn is_bare(&self, number: u64) -> bool {
        self.recent.is_bare(number)
    }

    /// Reads ahead the entries after these, in parallel, and on request the inodes of so many
    /// names.
    fn read_ahead(&self, (directory, end): (u64, u64), inodes_of: Option<u64>, chunk: &Chunk) -> Result<()> {
        let Some(last) = chunk.entries.last() else { return Ok(()) };
        let leaves = (NEAR_LEAVES, FAR_LEAVES);
        let table = self.table.read();
        let names = table.absent_ahead(&entries(directory, last.sequence, end), leaves)?;
        // If the inodes are in the order of the names, those of the next names follow.
        let ordered =
            chunk.entries.is_sorted_by(|one, next| one.number < next.number && next.number - one.number <= DENSE);
        let rows = match inodes_of.filter(|_| ordered) {
            Some(names) => table.absent_ahead(&inodes(last.number, last.number.saturating_add(names)), leaves)?,
            None => None,
        };
        drop(table);
        names.into_iter().chain(rows).for_each(|read| self.readahead.go(read));
        Ok(())
    }

    /// Reads the next entries, and their attributes in the table, as they are at one moment.
    fn read_chunk(
        &self,
        range: Range<Vec<u8>>,
        (attributes, wanted): (Option<InodeFilter<'_>>, usize),
        chunk: &mut Chunk,
    ) -> Result<()> {
        self.warm_range(&range, CHUNK_LEAVES)?;
        let mut looks = 0..LOOKS_MOST;
        let (table, order) = loop {
            chunk.clear();
            let table = self.table.read();
            table.try_scan(range.clone(), &mut |key, value| {
                chunk.add(key, value)?;
                Ok(chunk.entries.len() < wanted)
            })?;
            let Some(is_wanted) = attributes else { return Ok(()) };
            // Entries created with their inodes are in the inodes' order; links and renamed files
            // are anywhere.
            let mut order: Vec<(u64, usize)> =
                chunk.entries.iter().enumerate().map(|(at, found)| (found.number, at)).collect();
            order.retain(|(number, _)| is_wanted(*number));
            order.sort_unstable();
            if looks.next().is_none() {
                break (table, order);
            }
            // No operation is to wait for a device under the table's lock: missing nodes are read
            // without it, then everything is looked at again.
            let mut absent = Vec::new();
            for group in order.chunk_by(|(one, _), (next, _)| next - one <= DENSE) {
                if let (Some((first, _)), Some((last, _))) = (group.first(), group.last()) {
                    absent.extend(table.absent_in(&inodes(*first, *last), group.len().max(2))?);
                }
            }
            if absent.is_empty() {
                break (table, order);
            }
            drop(table);
            absent.into_iter().for_each(super::hint);
        };
        chunk.rows.resize(chunk.entries.len(), None);
        for group in order.chunk_by(|(one, _), (next, _)| next - one <= DENSE) {
            Self::read_rows(&table, group, &mut chunk.rows)?;
        }
        self.note_active(chunk);
        if chunk.entries.len() >= LONG {
            let numbers = chunk.entries.iter().map(|found| found.number);
            self.recent.note_bare(numbers.zip(&chunk.rows).filter_map(|(number, row)| Some((number, row.as_ref()?))));
        }
        if order.iter().any(|(_, at)| chunk.rows.get(*at).is_none_or(Option::is_none)) {
            return Err(FileError::NotFound);
        }
        Ok(())
    }

    /// Reads the attributes of inodes that are close together.
    fn read_rows(table: &T, group: &[(u64, usize)], rows: &mut [Option<InodeRow>]) -> Result<()> {
        let (Some((first, _)), Some((last, _))) = (group.first(), group.last()) else { return Ok(()) };
        if group.len() < 4 {
            for (number, at) in group {
                if let Some(place) = rows.get_mut(*at) {
                    *place = Some(Self::stored_in(table, *number)?);
                }
            }
            return Ok(());
        }
        let mut wanted = group.iter().peekable();
        table.try_scan(inodes(*first, *last), &mut |key, value| {
            let Ok(keys::Key::Inode(number)) = keys::Key::decode(key) else { return Ok(true) };
            while wanted.next_if(|(of, _)| *of < number).is_some() {}
            if wanted.peek().is_none_or(|(of, _)| *of != number) {
                return Ok(wanted.peek().is_some());
            }
            let row = InodeRow::decode(value)?;
            // A file may have several names here.
            while let Some((_, at)) = wanted.next_if(|(of, _)| *of == number) {
                if let Some(place) = rows.get_mut(*at) {
                    *place = Some(row);
                }
            }
            Ok(wanted.peek().is_some())
        })?;
        Ok(())
    }

    /// Updates the attributes of inodes that were active when their rows were read: from memory, or
    /// from the table if they were flushed meanwhile.
    fn show_active(&self, chunk: &mut Chunk) -> Result<()> {
        for (at, inode) in std::mem::take(&mut chunk.active) {
            let row = match self.attributes(&inode) {
                Ok(row) => row,
                // It was removed meanwhile: it is listed as it was.
                Err(FileError::NotFound) => continue,
                Err(error) => return Err(error),
            };
            if let Some(place) = chunk.rows.get_mut(at) {
                *place = Some(row);
            }
        }
        Ok(())
    }

    /// Notes which of the entries are active, under the table's lock under which their rows were
    /// read: a flush changes the table before it removes an inode from `dirty`.
    fn note_active(&self, chunk: &mut Chunk) {
        let dirty = self.dirty.lock();
        if dirty.is_empty() {
            return;
        }
        for (at, found) in chunk.entries.iter().enumerate() {
            if let Some(inode) = dirty.get(&found.number) {
                chunk.active.push((at, Arc::clone(inode)));
            }
        }
    }
}
