//! What the rows of an inode are charged to its owner: attributes, names, link targets, small
//! content, extended attributes, and the rows of records and patches.
//!
//! Every batch of rows passes [`Files::charged_batch`] before the table takes it, under the table's
//! lock: there the charge of each inode that the batch concerns follows the rows, and the use of its
//! user and group follows the charge. So nothing that changes rows has to count them itself.
//!
//! ```text
//!  row            belongs to                charged
//!  inode          itself                    INODE
//!  entry          the inode that it names   2 ROW + HASH + value + value without the name: the row for
//!                                           look-ups, too
//!  xattr          its inode                 ROW + name + value, or FRAME where the value has a frame
//!  content        its inode                 ROW + content, where it is in the row
//! ```
//!
//! Frames are in [`InodeRow::charged`]; rows that name frames of content are charged nothing: they
//! take less than a hundredth of them.
//!
//! Invariants: the table's inode rows hold the charge, no row in memory does; the use of an owner
//! is the sum of the charges of its inodes, whatever a charge is. An inode that an older version
//! wrote last has none: all its rows are counted with its next change, or in the background
//! ([`Files::recount_rows`]), which notes its progress in a row of its own.

use std::collections::BTreeMap;

use super::owner_accounts::{OwnerId, owners_of};
use super::row_recount::recount;
use super::{Batch, Files, Result, Table};
use crate::rows::{Entry, InodeRow, keys, pointer_of};

/// What an inode's own row is charged, bytes: the times differ from inode to inode, and are not
/// compressed away. It and the constants below are chosen so that the sum comes within 5 % of what a
/// file system of one kind of rows uses (`what_owners_use_adds_up_to_what_is_used`).
pub(super) const INODE: u64 = 32;
/// What a row is charged beside its value, bytes: what is left of its key when the leaf has been
/// compressed, and its part of the nodes above.
const ROW: u64 = 16;
/// What the key of a name is charged beside that, bytes: its hash and its sequence differ from
/// their neighbours'.
const HASH: u64 = 16;
/// What the value of a row that names a frame is charged, bytes, however the frame is shared.
const FRAME: u64 = 56;
/// The number of the inode that a key belongs to lies behind the kind.
const NUMBER: std::ops::Range<usize> = 1..9;

/// A batch as the table takes it.
pub(super) struct ChargedBatch {
    /// The rows with their charges.
    pub(super) batch: Batch,
    /// By what the use of owners changes, bytes.
    pub(super) uses: Vec<(OwnerId, i64)>,
}

/// What a name of an inode is charged, bytes: an entry and the row for look-ups.
pub(super) fn of_name(name: &[u8]) -> u64 {
    const TYPE_AND_NUMBER: u64 = 10;
    2 * (ROW + TYPE_AND_NUMBER) + HASH + name.len() as u64
}

/// What an extended attribute with a value in its row is charged, bytes.
pub(super) fn of_attribute(name: &[u8], value: &[u8]) -> u64 {
    ROW + 1 + (name.len() + value.len()) as u64
}

/// What the target of a symbolic link is charged, bytes.
pub(super) fn of_target(target: &[u8]) -> u64 {
    ROW + 1 + target.len() as u64
}

/// What a row is charged, and to which inode; none for rows that are nobody's, or damaged.
pub(super) fn charge_of(key: &[u8], value: &[u8]) -> Option<(u64, u64)> {
    if !has_charge(key) {
        return None;
    }
    if key.first() == Some(&keys::ENTRY) {
        let entry = Entry::decode(value).ok()?;
        let look_up = HASH + (value.len() - entry.name.len()) as u64;
        return Some((entry.inode, 2 * ROW + value.len() as u64 + look_up));
    }
    let inode = u64::from_be_bytes(key.get(NUMBER)?.try_into().ok()?);
    let in_key = if key.first() == Some(&keys::XATTR) { key.len().saturating_sub(NUMBER.end) as u64 } else { 0 };
    let value = match (pointer_of(key, value).ok()?, *key.first()?) {
        (None, _) => value.len() as u64,
        (Some(_), keys::XATTR) => FRAME,
        (Some(_), _) => return None,
    };
    Some((inode, ROW + in_key + value))
}

/// Whether a row with this key can be charged. Of the rows of content, only that of record 0 can hold it.
fn has_charge(key: &[u8]) -> bool {
    match key.first() {
        Some(&(keys::ENTRY | keys::XATTR)) => true,
        Some(&keys::EXTENT) => key.get(NUMBER.end..) == Some(&[0; 8]),
        _ => false,
    }
}

/// The number of the inode whose row this key names.
pub(super) fn inode_of(key: &[u8]) -> Option<u64> {
    if key.first() != Some(&keys::INODE) || key.len() != NUMBER.end {
        return None;
    }
    Some(u64::from_be_bytes(key.get(NUMBER)?.try_into().ok()?))
}

impl<T: Table> Files<T> {
    /// The batch with what the inodes are charged for their rows, and what follows for owners.
    ///
    /// # Errors
    /// Errors of reading the table.
    pub(super) fn charged_batch(&self, table: &T, batch: &Batch) -> Result<ChargedBatch> {
        // Where a batch changes a row twice, the last change counts.
        let mut rows: BTreeMap<&[u8], Option<&[u8]>> = BTreeMap::new();
        for change in batch.changes() {
            rows.insert(&change.key, change.row.as_deref());
        }
        let growths = growths(table, &rows)?;
        let mut inodes: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        let mut uses: BTreeMap<OwnerId, i64> = BTreeMap::new();
        let mut count = |row: &InodeRow, bytes: i64| {
            for owner in owners_of(row) {
                let change = uses.entry(owner).or_default();
                *change = change.saturating_add(bytes);
            }
        };
        for (number, growth) in growths {
            let key = keys::inode(number);
            let before = match self.recent.get_charged(number) {
                None => table.get(&key)?.and_then(|row| InodeRow::decode_charged(&row).ok()),
                kept => kept,
            };
            let after = match rows.get(key.as_slice()) {
                Some(changed) => changed.and_then(|row| InodeRow::decode(row).ok()),
                None => before.map(|(row, _)| row),
            };
            let old = before.map_or(0, |(_, rows)| rows);
            let new = match &after {
                Some(row) => self.charge_before(table, number, row, before)?.saturating_add_signed(growth).max(INODE),
                None => 0,
            };
            if let Some((row, _)) = before {
                count(&row, -signed(old));
            }
            if let Some(row) = after {
                count(&row, signed(new));
                inodes.insert(number, row.encode_charged(new));
            }
        }
        uses.retain(|_, change| *change != 0);
        let mut changed = Batch::default();
        for change in batch.changes() {
            match &change.row {
                // The row of an inode that stays comes below.
                Some(_) if inode_of(&change.key).is_some_and(|number| inodes.contains_key(&number)) => {}
                Some(row) => changed.put(&change.key, row.clone()),
                None => changed.remove(&change.key),
            }
        }
        inodes.into_iter().for_each(|(number, row)| changed.put(&keys::inode(number), row));
        Ok(ChargedBatch { batch: changed, uses: uses.into_iter().collect() })
    }

    /// What an inode is charged for the rows that the table has.
    fn charge_before(&self, table: &T, number: u64, after: &InodeRow, before: Option<(InodeRow, u64)>) -> Result<u64> {
        match before {
            Some((row, 0)) => recount(table, number, &row),
            Some((_, rows)) => Ok(rows),
            // The log has rows of a new file before its inode.
            None if self.is_replaying() => recount(table, number, after),
            None => Ok(INODE),
        }
    }

    /// What an inode is charged for its rows now: for who becomes its owner.
    ///
    /// # Errors
    /// Errors of reading the table.
    pub(super) fn row_charge(&self, number: u64) -> Result<u64> {
        let table = self.table.read();
        let Some(stored) = table.get(&keys::inode(number))? else { return Ok(0) };
        match InodeRow::decode_charged(&stored)? {
            (row, 0) => recount(&*table, number, &row),
            (_, rows) => Ok(rows),
        }
    }
}

/// By how much the rows of inodes grow, bytes; also of those whose own row alone changes.
fn growths<T: Table>(table: &T, rows: &BTreeMap<&[u8], Option<&[u8]>>) -> Result<BTreeMap<u64, i64>> {
    let mut growths: BTreeMap<u64, i64> = BTreeMap::new();
    let mut count = |charge: Option<(u64, u64)>, sign: i64| {
        if let Some((inode, bytes)) = charge {
            let growth = growths.entry(inode).or_default();
            *growth = growth.saturating_add(sign * signed(bytes));
        }
    };
    for (key, row) in rows {
        if let Some(number) = inode_of(key) {
            count(Some((number, 0)), 1);
        } else if has_charge(key) {
            let old = table.get(key)?;
            count(old.as_deref().and_then(|old| charge_of(key, old)), -1);
            count(row.and_then(|row| charge_of(key, row)), 1);
        }
    }
    Ok(growths)
}

pub(super) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
