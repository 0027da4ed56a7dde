//! Checks that the rows of a received stream are a consistent file system: checksums prove that
//! they arrived as they were sent, not that the sender is honest.
//!
//! Called when all rows of a snapshot have arrived ([`super::receiving`]), before the snapshot
//! becomes visible. The rows are compared with those of the base, which is a consistent file
//! system: unchanged rows are not read.
//!
//! Invariants: each name refers to an inode of the type that it states, and each inode has as many
//! names as its link count; a directory has one name, where its hint points, and lies below the
//! root; each inode without a name is in the list of orphans; content belongs to an inode of a
//! fitting type. Memory: some 100 bytes for each inode of which a row or a name has changed, and at
//! most for [`INODES_AT_ONCE`] of them; no count of the stream is trusted.

use std::collections::{BTreeMap, HashSet};

use crate::error::{Damage, PoolError};
use crate::rows::inode::flags::HAS_PATCHES;
use crate::rows::{DatasetHead, Entry, Extent, FileType, InodeRow, Key, NameTarget, keys, pointer_of};
use crate::tree::{Context, View};

/// Number of inodes that are checked together: with more, the changes are read several times.
const INODES_AT_ONCE: usize = if cfg!(test) { 8 } else { 4 << 20 };

/// After each this many slices the number of inodes that are checked together doubles.
const SLICES: usize = 16;

/// Inode number of the root directory in all file systems.
const ROOT: u64 = 1;

/// Changes of an inode and of its names.
#[derive(Default)]
struct Delta {
    /// Change of the number of names that refer to it.
    names: i64,
    /// Change of the number of names in it, and of the directories among them.
    entries: i64,
    directories: i64,
    /// Rows in the order of listings minus rows by name, as a sum of hashes: zero if both match.
    unindexed: u64,
    /// The type that its new names state.
    named_as: Option<FileType>,
}

/// The changes of the inodes that are checked together.
struct Slice {
    first: u64,
    last: u64,
    most: usize,
    deltas: BTreeMap<u64, Delta>,
}

impl Slice {
    /// Notes a change of an inode or its names; if there are too many inodes, the upper half moves
    /// to the next slice.
    fn note(&mut self, number: u64, change: impl FnOnce(&mut Delta)) {
        if number < self.first || number > self.last {
            return;
        }
        change(self.deltas.entry(number).or_default());
        if self.deltas.len() > self.most
            && let Some(middle) = self.deltas.keys().nth(self.most / 2).copied()
        {
            drop(self.deltas.split_off(&middle));
            self.last = middle - 1;
        }
    }
}

/// Highest number of names with one hash in a directory: they are compared in memory, and by chance
/// two have the same hash only in a directory of billions.
const SAME_HASH_MOST: usize = 1 << 14;

/// A directory and a hash of names in it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct HashPlace {
    directory: u64,
    hash: u64,
}

/// The rows of the base and the received ones.
pub(super) struct ReceivedShape<'a> {
    pub(super) context: Context<'a>,
    pub(super) old: View,
    pub(super) new: View,
}

fn wrong<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}

fn row_sum(key: &[u8], target: NameTarget) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(&target.encode(), xxhash_rust::xxh3::xxh3_64(key))
}

/// Number of names of an inode, by its row.
fn names_of(number: u64, row: Option<&InodeRow>, root: u64) -> i64 {
    match row {
        None => 0,
        Some(row) if row.file_type() == Some(FileType::Directory) => i64::from(number != root && row.links != 0),
        Some(row) => row.links.into(),
    }
}

/// Number of names in a directory, and of directories among them, by its row.
fn held_by(row: Option<&InodeRow>) -> (i64, i64) {
    match row {
        Some(row) if row.file_type() == Some(FileType::Directory) => {
            (i64::try_from(row.size).unwrap_or(i64::MAX), i64::from(row.links.saturating_sub(2)))
        }
        _ => (0, 0),
    }
}

impl ReceivedShape<'_> {
    /// Refuses rows that are no consistent file system.
    ///
    /// # Errors
    /// [`PoolError::Format`] with the reason; errors of reading.
    pub(super) fn check(&self) -> Result<(), PoolError> {
        let head = self.check_heads()?;
        let (mut next, mut done) = (Some(0), 0);
        while let Some(first) = next {
            let most = INODES_AT_ONCE << (done / SLICES).min(16);
            let mut slice = Slice { first, last: u64::MAX, most, deltas: BTreeMap::new() };
            self.check_slice(&head, &mut slice)?;
            next = slice.last.checked_add(1);
            done += 1;
        }
        Ok(())
    }

    /// Checks the header row, whose rules for names must be those of the base; returns it.
    fn check_heads(&self) -> Result<DatasetHead, PoolError> {
        let head = |view: &View| {
            let row = view.get(&self.context, &keys::head())?;
            row.map(|row| DatasetHead::decode(&row)).transpose()
        };
        let old = head(&self.old)?;
        let Some(new) = head(&self.new)? else { return wrong("a file system without a head") };
        let same = |old: DatasetHead| {
            (old.root, old.seed, old.hashing, old.folding) == (new.root, new.seed, new.hashing, new.folding)
        };
        if old.is_some_and(|old| !same(old)) {
            return wrong("other rules for names than in the base");
        }
        if old.is_some_and(|old| new.next < old.next) || new.next >= keys::NUMBER_MOST {
            return wrong("a counter of inodes that is lower than in the base, or leaves no room for more");
        }
        if new.root != ROOT {
            return wrong("a root directory with another number");
        }
        let root = self.inode(&self.new, new.root)?;
        if root
            .is_none_or(|root| root.file_type() != Some(FileType::Directory) || root.links < 2 || root.hint.is_some())
        {
            return wrong("no root directory");
        }
        Ok(new)
    }

    fn inode(&self, view: &View, number: u64) -> Result<Option<InodeRow>, PoolError> {
        let row = view.get(&self.context, &keys::inode(number))?;
        row.map(|row| InodeRow::decode(&row)).transpose()
    }

    /// Reads all changes, and checks one slice of the inodes.
    fn check_slice(&self, head: &DatasetHead, slice: &mut Slice) -> Result<(), PoolError> {
        let is_first = slice.first == 0;
        let (mut owner, mut looked_at) = (None, None);
        let mut rows = self.old.diff(self.context, &self.new)?;
        while let Some(row) = rows.next()? {
            let key = Key::decode(row.key)?;
            match key {
                Key::Inode(number) => {
                    if number == 0 || number >= head.next {
                        return wrong("an inode above the counter of the head");
                    }
                    slice.note(number, |_| {});
                }
                Key::Entry { directory, sequence } => {
                    if sequence == 0 || sequence >= head.next {
                        return wrong("a name above the counter of the head, or without a number");
                    }
                    for (value, sign) in [(row.old, -1), (row.new, 1)] {
                        let Some(entry) = value.map(Entry::decode).transpose()? else { continue };
                        let is_directory = i64::from(entry.file_type == FileType::Directory);
                        let by_name = keys::name(directory, head.hash(entry.name), sequence);
                        let sum = row_sum(&by_name, NameTarget { inode: entry.inode, file_type: entry.file_type });
                        slice.note(directory, |delta| {
                            delta.entries += sign;
                            delta.directories += sign * is_directory;
                            delta.unindexed = delta.unindexed.wrapping_add_signed((sum as i64).wrapping_mul(sign));
                        });
                        let mut differs = false;
                        slice.note(entry.inode, |delta| {
                            delta.names += sign;
                            if sign > 0 {
                                differs = delta.named_as.is_some_and(|named| named != entry.file_type);
                                delta.named_as = Some(entry.file_type);
                            }
                        });
                        if differs {
                            return wrong("names of one inode that say different types");
                        }
                    }
                }
                Key::Name { directory, hash, .. } => {
                    let place = HashPlace { directory, hash };
                    if is_first && row.new.is_some() && looked_at.replace(place) != Some(place) {
                        self.check_single(head, place)?;
                    }
                    for (value, sign) in [(row.old, -1), (row.new, 1)] {
                        let Some(target) = value.map(NameTarget::decode).transpose()? else { continue };
                        let sum = (row_sum(row.key, target) as i64).wrapping_mul(-sign);
                        slice.note(directory, |delta| delta.unindexed = delta.unindexed.wrapping_add_signed(sum));
                    }
                }
                Key::Orphan(number) => slice.note(number, |_| {}),
                Key::Extent { .. } | Key::Xattr { .. } | Key::Patch { .. } | Key::Cut(_) => {
                    if is_first && let Some(value) = row.new {
                        self.check_content(&key, row.key, value, &mut owner)?;
                    }
                }
                Key::Head | Key::OwnerUse(..) | Key::Received | Key::Recounted => {}
            }
        }
        // In the order of the inodes' rows.
        let mut below_root = HashSet::from([head.root]);
        for (number, delta) in &slice.deltas {
            self.check_inode(*number, delta, head.root, &mut below_root)?;
        }
        Ok(())
    }

    fn check_inode(
        &self,
        number: u64,
        delta: &Delta,
        root: u64,
        below_root: &mut HashSet<u64>,
    ) -> Result<(), PoolError> {
        let (old, new) = (self.inode(&self.old, number)?, self.inode(&self.new, number)?);
        if names_of(number, new.as_ref(), root) - names_of(number, old.as_ref(), root) != delta.names {
            return wrong("an inode that counts other names than it has");
        }
        let (was, is) = (held_by(old.as_ref()), held_by(new.as_ref()));
        if (is.0 - was.0, is.1 - was.1) != (delta.entries, delta.directories) {
            return wrong("a directory that counts other names than it holds");
        }
        if delta.unindexed != 0 {
            return wrong("names that are not found, or lead elsewhere than listings say");
        }
        let Some(new) = new else { return self.check_gone(number) };
        let is_same = |old: &InodeRow| old.file_type() == new.file_type();
        if delta.named_as.is_some_and(|named| Some(named) != new.file_type()) || !old.as_ref().is_none_or(is_same) {
            return wrong("a name or an inode of another type");
        }
        if new.file_type() == Some(FileType::Directory) && new.links == 0 && new.size != 0 {
            return wrong("a directory without a name that holds names");
        }
        let content_of = |row: &InodeRow| (row.record_shift, row.flags & HAS_PATCHES);
        if old.is_some_and(|old| content_of(&old) != content_of(&new)) {
            self.check_unchanged_content(number, &new)?;
        }
        let is_orphan = self.new.get(&self.context, &keys::orphan(number))?.is_some();
        if is_orphan != (new.links == 0) {
            return wrong("an inode without a name that is none");
        }
        match new.file_type() {
            Some(FileType::Directory) if new.links != 0 && number != root => {
                self.check_directory(number, &new, below_root)
            }
            Some(FileType::Symlink) => match self.new.get(&self.context, &keys::extent(number, 0))? {
                Some(row) if matches!(Extent::decode(&row)?, Extent::Inline(to) if to.len() as u64 == new.size && new.size > 0) => {
                    Ok(())
                }
                _ => wrong("a symbolic link without its target"),
            },
            Some(FileType::Regular) if i64::try_from(new.size).is_err() => wrong("a file that is too long"),
            _ => Ok(()),
        }
    }

    /// Checks that no two names with this hash in a directory are equal, and that they are few.
    fn check_single(&self, head: &DatasetHead, place: HashPlace) -> Result<(), PoolError> {
        let range = keys::names(place.directory, place.hash);
        let mut sequences = Vec::new();
        let mut rows = self.new.cursor(self.context, &range.start, Some(&range.end))?;
        while let Some((key, _)) = rows.next()? {
            if let Key::Name { sequence, .. } = Key::decode(key)? {
                sequences.push(sequence);
            }
            if sequences.len() > SAME_HASH_MOST {
                return wrong("names that were chosen for their hash");
            }
        }
        if sequences.len() < 2 {
            return Ok(());
        }
        let mut names = HashSet::new();
        for sequence in sequences {
            let entry = self.new.get(&self.context, &keys::entry(place.directory, sequence))?;
            let name = entry.map(|row| Entry::decode(&row).map(|entry| head.folding.fold(entry.name).into_owned()));
            if !names.insert(name.transpose()?) {
                return wrong("two names of a directory that are the same");
            }
        }
        Ok(())
    }

    /// Checks that content rows of the base still fit an inode whose record size or patch flag has
    /// changed.
    fn check_unchanged_content(&self, number: u64, row: &InodeRow) -> Result<(), PoolError> {
        let mut owner = Some((number, *row));
        for range in [keys::extents(number, 0, u64::MAX), keys::patches(number, 0, u64::MAX)] {
            let mut rows = self.new.cursor(self.context, &range.start, Some(&range.end))?;
            while let Some((key, value)) = rows.next()? {
                self.check_content(&Key::decode(key)?, key, value, &mut owner)?;
            }
        }
        Ok(())
    }

    /// Checks that a directory has its one name where its hint points, and that its parents lead to
    /// the root.
    fn check_directory(&self, number: u64, row: &InodeRow, below_root: &mut HashSet<u64>) -> Result<(), PoolError> {
        let (mut at, mut row, mut passed) = (number, *row, HashSet::new());
        while !below_root.contains(&at) {
            let Some(hint) = row.hint else { return wrong("a directory without a place") };
            let named = self.new.get(&self.context, &keys::entry(hint.directory, hint.sequence))?;
            let Some(named) = named else { return wrong("a directory that is not where it says") };
            if Entry::decode(&named)?.inode != at || !passed.insert(at) {
                return wrong("a directory that is not where it says, or below itself");
            }
            at = hint.directory;
            match self.inode(&self.new, at)? {
                Some(above) if above.file_type() == Some(FileType::Directory) && above.links != 0 => row = above,
                _ => return wrong("a directory in something else"),
            }
        }
        below_root.extend(passed);
        Ok(())
    }

    /// Checks that an inode that is gone has no rows any more.
    fn check_gone(&self, number: u64) -> Result<(), PoolError> {
        let patches = keys::patches(number, 0, u64::MAX);
        for range in [keys::xattrs(number), keys::extents(number, 0, u64::MAX), patches] {
            let mut rows = self.new.cursor(self.context, &range.start, Some(&range.end))?;
            if rows.next()?.is_some() {
                return wrong("content of a file that is not there");
            }
        }
        match self.new.get(&self.context, &keys::orphan(number))? {
            Some(_) => wrong("an inode without a name that is not there"),
            None => Ok(()),
        }
    }

    /// Checks that a content row fits its inode; `owner` caches the inode of the previous row.
    fn check_content(
        &self,
        key: &Key,
        bytes: &[u8],
        value: &[u8],
        owner: &mut Option<(u64, InodeRow)>,
    ) -> Result<(), PoolError> {
        let (Key::Extent { inode, .. } | Key::Xattr { inode, .. } | Key::Patch { inode, .. } | Key::Cut(inode)) = key
        else {
            return Ok(());
        };
        let row = match owner {
            Some((number, row)) if number == inode => *row,
            _ => {
                let Some(row) = self.inode(&self.new, *inode)? else {
                    return wrong("content of a file that is not there");
                };
                *owner = Some((*inode, row));
                row
            }
        };
        let kind = row.file_type();
        let logical = pointer_of(bytes, value)?.map_or(0, |pointer| u64::from(pointer.logical));
        let is_file = kind == Some(FileType::Regular);
        let record = match row.record_shift {
            0 => u64::MAX,
            shift => 1 << shift,
        };
        let fits = match key {
            Key::Extent { record: at, .. } => {
                let is_inline = matches!(Extent::decode(value)?, Extent::Inline(_));
                let in_range =
                    *at == 0 || !is_inline && at.checked_mul(record).is_some_and(|from| from <= i64::MAX as u64);
                (is_file || kind == Some(FileType::Symlink) && is_inline) && in_range && logical <= record
            }
            Key::Patch { .. } => is_file && row.flags & HAS_PATCHES != 0 && logical <= record,
            // Without its flag an extended attribute is not visible, and is removed with its file
            // all the same.
            Key::Xattr { .. } => true,
            _ => is_file,
        };
        if fits { Ok(()) } else { wrong("content that does not fit its file") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_are_looked_at_in_slices_whatever_their_numbers() {
        let numbers: Vec<u64> =
            (0..1000u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).chain([0, u64::MAX]).collect();
        let (mut seen, mut next) = (HashSet::new(), Some(0));
        while let Some(first) = next {
            let mut slice = Slice { first, last: u64::MAX, most: 8, deltas: BTreeMap::new() };
            for number in &numbers {
                slice.note(*number, |delta| delta.names += 1);
                assert!(slice.deltas.len() <= 8);
            }
            for (number, delta) in &slice.deltas {
                let times = numbers.iter().filter(|other| *other == number).count();
                assert!(seen.insert(*number) && delta.names == times as i64, "{number}");
            }
            next = slice.last.checked_add(1);
        }
        assert_eq!(seen.len(), 1001);
    }
}
