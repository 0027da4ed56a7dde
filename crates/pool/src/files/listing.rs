//! Listings: the entries of a directory in the order of their creation, with attributes where they
//! are wanted.
//!
//! An entry's sequence is the cookie: it is unique, never given twice, and stays while the name
//! stays; so a listing may be left and taken up again at any time, over a remount as well, and
//! shows every name that is there throughout exactly once. New names have higher ones: a listing
//! that ends at the sequence that was next when it began ends, whatever is made or renamed
//! meanwhile.
//!
//! Inodes are numbered in the order in which their names were made, so the attributes of a
//! directory's files lie together as well: where they do, they are read in one pass beside that
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
    /// Where to go on behind it.
    pub sequence: u64,
    /// The name.
    pub name: Vec<u8>,
    /// What it names.
    pub number: u64,
    /// Its type.
    pub file_type: FileType,
    /// The inode and its attributes, where they were asked for.
    pub file: Option<(Arc<Inode>, InodeRow)>,
}

/// An entry of a directory as a visitor sees it.
#[derive(Clone, Copy, Debug)]
pub struct SeenEntry<'a> {
    /// Where to go on behind it.
    pub sequence: u64,
    /// The name.
    pub name: &'a [u8],
    /// What it names.
    pub number: u64,
    /// Its type.
    pub file_type: FileType,
    /// Its attributes, where they were asked for.
    pub row: Option<&'a InodeRow>,
}

/// So many entries are looked at under one hold of the table's lock.
const TOGETHER: usize = 512;
/// And at least so many, where more are wanted than were expected.
const FEWEST: usize = 16;
/// Of so many files it is kept which have no extended attributes: whoever wants so many often asks
/// for the access control list of each.
const LONG: usize = 64;
/// Attributes are read in one pass where at most so many inodes lie between the first and the last
/// for each that is wanted.
const DENSE: u64 = 8;

/// Whether the attributes of an inode are wanted.
pub type InodeFilter<'a> = &'a dyn Fn(u64) -> bool;

/// Some entries, their names in one buffer, their attributes, where they are wanted, in another
/// one: most listings go without, and each entry is written and read once more on its way.
#[derive(Default)]
struct Chunk {
    names: Vec<u8>,
    entries: Vec<ChunkEntry>,
    /// As many as entries, or none.
    rows: Vec<Option<InodeRow>>,
    /// Inodes that had changes in memory when the rows were read, by the place of their entry.
    active: Vec<(usize, Arc<Inode>)>,
}

struct ChunkEntry {
    sequence: u64,
    number: u64,
    /// Where its name ends; it begins where the one before ends.
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
        // Names are of 255 bytes at most, entries a few hundred.
        let end = self.names.len() as u32;
        self.entries.push(ChunkEntry { sequence, number: inode, end, file_type });
        Ok(())
    }
}

/// So many leaves hold the entries that are read at once, or nearly all of them.
const CHUNK_LEAVES: usize = 8;
/// What comes next is read ahead where one of so many leaves is missing ...
const NEAR_LEAVES: usize = 24;
/// ... so many of them: 2 MiB.
const FAR_LEAVES: usize = 64;
/// So often rows are looked at again after something that was missing was read; then they are read
/// as they are.
const LOOKS_MOST: usize = 3;

/// The rows of inodes from one to another.
fn inodes(first: u64, last: u64) -> Range<Vec<u8>> {
    keys::inode(first).to_vec()..keys::inode(last.saturating_add(1)).to_vec()
}

/// The entries of a directory behind one sequence and below another.
fn entries(directory: u64, behind: u64, end: u64) -> Range<Vec<u8>> {
    let first = behind.saturating_add(1);
    keys::entry(directory, first).to_vec()..keys::entry(directory, end.max(first)).to_vec()
}

impl<T: Table> Files<T> {
    /// Up to `most` entries behind the sequence `behind` (0: from the beginning).
    ///
    /// # Errors
    /// [`FileError::NotDirectory`], those of the engine.
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

    /// Above the sequences of all names that are there now, and not above those of names that will
    /// be.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.numbers.next.load(Ordering::Relaxed)
    }

    /// Shows the entries behind the sequence `behind` (0: from the beginning) and below `end` until
    /// `visit` answers false, with the attributes of those inodes at least that are wanted. About
    /// `expected` of them will be looked at. The visitor may do whatever it likes: no lock is held.
    ///
    /// # Errors
    /// [`FileError::NotDirectory`], those of the engine.
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
                // A few entries with attributes are what every listing begins with.
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

    /// Whether a file is known, without a look at the table, to have no extended attributes, and so
    /// no access control list. Those are that a listing with attributes has just shown, or that
    /// were looked at.
    #[must_use]
    pub fn is_bare(&self, number: u64) -> bool {
        self.recent.is_bare(number)
    }

    /// Has what comes behind these entries read beside whoever gets them now, with the inodes of so
    /// many names where they are wanted.
    fn read_ahead(&self, (directory, end): (u64, u64), inodes_of: Option<u64>, chunk: &Chunk) -> Result<()> {
        let Some(last) = chunk.entries.last() else { return Ok(()) };
        let leaves = (NEAR_LEAVES, FAR_LEAVES);
        let table = self.table.read();
        let names = table.absent_ahead(&entries(directory, last.sequence, end), leaves)?;
        // Where inodes lie in the order of the names, those of the names to come follow.
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

    /// Reads the next entries, and the attributes that the table has of them, as they are at one
    /// moment.
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
            // Entries made with their inodes are in the inodes' order; links and renamed files are
            // among them anywhere.
            let mut order: Vec<(u64, usize)> =
                chunk.entries.iter().enumerate().map(|(at, found)| (found.number, at)).collect();
            order.retain(|(number, _)| is_wanted(*number));
            order.sort_unstable();
            if looks.next().is_none() {
                break (table, order);
            }
            // Nobody is to wait at the table for a device: what is missing is read without its
            // lock, then all is looked at again.
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

    /// Reads the attributes of inodes that lie close together.
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

    /// Takes the attributes of inodes that were active when their rows were read from memory, or from the table where
    /// a flush has put them meanwhile.
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

    /// Notes which of the entries are active, while the lock of the table is held that their rows were read from: a
    /// flush changes the table before it takes an inode from `dirty`.
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
