//! Recount of the rows of inodes that were last written by a version that charged no owner for
//! rows.
//!
//! Called by `row_charges.rs` with the next change of an inode without a charge, and by the pool's
//! chores (`engine/committer.rs`), which count all others in the background, ordered by number.
//!
//! Invariants: an inode's charge and the usage of its owners change under one lock of the table;
//! the progress is a row that changes with them, so a crash never leaves it ahead of them. Nothing
//! of this is in the intent log: rows lost by a crash are counted again.

use std::ops::Range;

use super::row_charges::{INODE, charge_of, inode_of};
use super::{Batch, FileError, Files, Result, Table};
use crate::error::PoolError;
use crate::rows::inode::flags::HAS_XATTRS;
use crate::rows::{Entry, FileType, InodeRow, keys};
use crate::space::Purpose;

/// Most attributes of an inode that are counted: the table's lock is held.
const COUNTED_MOST: usize = 65_536;
/// Number of inodes that are checked under one lock of the table.
const STEP: usize = 128;
/// Leaves with rows of a step that are read before the table is locked.
const WARMED_LEAVES: usize = 8;

/// Progress of the recount in a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Recounted {
    /// The table was not read yet.
    #[default]
    Unknown,
    /// Inodes with lower numbers have a charge.
    Before(u64),
    /// All inodes have a charge, or unreadable rows end the recount.
    All,
}

/// The progress row of a completed recount.
pub(super) fn all_counted() -> Vec<u8> {
    u64::MAX.to_be_bytes().to_vec()
}

fn progress_of(row: Option<&[u8]>) -> Recounted {
    match row.and_then(|row| row.try_into().ok()).map(u64::from_be_bytes) {
        Some(u64::MAX) => Recounted::All,
        Some(number) => Recounted::Before(number),
        None => Recounted::Before(0),
    }
}

impl<T: Table> Files<T> {
    /// Counts the rows of some inodes without a charge, if there are any; returns whether there may
    /// be more. Not to be called under any lock.
    ///
    /// # Errors
    /// Errors of the engine; the inodes are counted later. Rows that cannot be read end the count until the
    /// file system is opened again: their inodes are counted when they change.
    pub fn recount_rows(&self) -> Result<bool> {
        if *self.recounted.lock() == Recounted::All || self.rules.read().read_only || self.is_replaying() {
            return Ok(false);
        }
        match self.recount_some() {
            Err(error) if error.is_unreadable() => {
                tracing::warn!(dataset = self.dataset, %error, "the small rows of some files count for no owner: they cannot be read");
                *self.recounted.lock() = Recounted::All;
                Ok(false)
            }
            // There may be room another time.
            Err(FileError::Quota | FileError::Pool(PoolError::NoSpace | PoolError::Quota { .. })) => Ok(false),
            outcome => outcome,
        }
    }

    fn recount_some(&self) -> Result<bool> {
        let known = *self.recounted.lock();
        let from = match known {
            Recounted::Before(number) => number,
            Recounted::All => return Ok(false),
            Recounted::Unknown => return self.find_progress(),
        };
        self.admit_rows(Purpose::Write)?;
        let step = self.uncounted(from)?;
        let entered = self.enter()?;
        let mut progress = self.recounted.lock();
        // The table may have been replaced by a rollback.
        if *progress != Recounted::Before(from) {
            return Ok(true);
        }
        let next = step.next.unwrap_or(u64::MAX);
        self.change_with(entered.txg(), |table| {
            let mut batch = Batch::default();
            // With nothing to count, the file system is left unchanged: a received snapshot stays
            // unmodified.
            if step.numbers.is_empty() && table.get(&keys::recounted())?.is_none() {
                return Ok(batch);
            }
            for number in &step.numbers {
                let key = keys::inode(*number);
                if let Some(row) = table.get(&key)? {
                    batch.put(&key, row);
                }
            }
            batch.put(&keys::recounted(), next.to_be_bytes().to_vec());
            Ok(batch)
        })?;
        *progress = if step.next.is_none() { Recounted::All } else { Recounted::Before(next) };
        Ok(step.next.is_some())
    }

    fn find_progress(&self) -> Result<bool> {
        let _entered = self.enter()?;
        let mut progress = self.recounted.lock();
        *progress = progress_of(self.table.read().get(&keys::recounted())?.as_deref());
        Ok(*progress != Recounted::All)
    }

    /// Finds the next inodes without a charge, and reads their rows into memory.
    fn uncounted(&self, from: u64) -> Result<Step> {
        self.warm_range(&inodes_from(from), WARMED_LEAVES)?;
        let mut step = Step { numbers: Vec::new(), next: None };
        let mut seen = 0;
        self.table.read().try_scan(inodes_from(from), &mut |key, row| {
            let Some(number) = inode_of(key) else { return Ok(true) };
            if seen == STEP {
                step.next = Some(number);
                return Ok(false);
            }
            seen += 1;
            if InodeRow::decode_charged(row)?.1 == 0 {
                step.numbers.push(number);
            }
            Ok(true)
        })?;
        for number in &step.numbers {
            self.warm_range(&keys::xattrs(*number), WARMED_LEAVES)?;
            self.warm_range(&keys::extents(*number, 0, 0), 1)?;
        }
        Ok(step)
    }
}

/// The inodes of one step of the count.
struct Step {
    /// Those without a charge.
    numbers: Vec<u64>,
    /// The first inode of the next step; `None` after the last one.
    next: Option<u64>,
}

fn inodes_from(number: u64) -> Range<Vec<u8>> {
    keys::inode(number).to_vec()..keys::of_kind(keys::INODE).end
}

/// The charge of an inode for its rows in the table, bytes. Names that cannot be found from the
/// inode count like the one that can. Unreadable rows are charged nothing: a change of the inode
/// does not need them.
///
/// # Errors
/// Errors of reading the table, except damage and unreadable devices.
pub(super) fn recount<T: Table>(table: &T, number: u64, row: &InodeRow) -> Result<u64> {
    let mut charge = INODE;
    match count_rows(table, number, row, &mut charge).map_err(FileError::Pool) {
        Err(error) if error.is_unreadable() => {
            tracing::warn!(inode = number, %error, "rows of an inode are charged to nobody: they cannot be read");
            Ok(charge)
        }
        counted => counted.map(|()| charge),
    }
}

fn count_rows<T: Table>(
    table: &T,
    number: u64,
    row: &InodeRow,
    charge: &mut u64,
) -> std::result::Result<(), PoolError> {
    if let Some(hint) = row.hint {
        let key = keys::entry(hint.directory, hint.sequence);
        let names = table.get(&key)?.map_or(0, |value| charge_of_names(&key, &value, number, row));
        *charge = charge.saturating_add(names);
    }
    let mut count = |range: Range<Vec<u8>>| {
        let mut left = COUNTED_MOST;
        table.scan(range, &mut |key, value| {
            *charge = charge.saturating_add(charge_of(key, value).map_or(0, |(_, bytes)| bytes));
            left -= 1;
            left > 0
        })
    };
    if matches!(row.file_type(), Some(FileType::Regular | FileType::Symlink)) {
        count(keys::extents(number, 0, 0))?;
    }
    if row.flags & HAS_XATTRS == 0 { Ok(()) } else { count(keys::xattrs(number)) }
}

/// The charge of the names of an inode, bytes, computed from the entry of one of them.
fn charge_of_names(key: &[u8], value: &[u8], number: u64, row: &InodeRow) -> u64 {
    let Ok(entry) = Entry::decode(value) else { return 0 };
    if entry.inode != number {
        return 0;
    }
    let names = if row.file_type() == Some(FileType::Directory) { 1 } else { u64::from(row.links) };
    charge_of(key, value).map_or(0, |(_, bytes)| bytes).saturating_mul(names)
}
