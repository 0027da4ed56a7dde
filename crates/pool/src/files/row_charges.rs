//! What the rows of an inode are charged to its owner: attributes, names, link targets, small
//! content, extended attributes, and the rows of records and patches.
//!
//! Every batch of rows passes [`Files::row_charges`] before the table takes it, under the table's
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

use super::owner_accounts::{OwnerId, owners_of};
use super::row_recount::recount;
use super::{Batch, Change, Files, Result, RowChange, Table};
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

/// What a batch changes of the charges.
#[derive(Default)]
pub(super) struct RowCharges {
    /// The rows of the inodes that the batch concerns, in the order of their numbers.
    inodes: Vec<ChargedInode>,
    /// By what the use of owners changes, bytes.
    pub(super) uses: Vec<(OwnerId, i64)>,
}

/// The row of an inode with its charge.
struct ChargedInode {
    key: [u8; NUMBER.end],
    row: Vec<u8>,
}

impl RowCharges {
    /// The batch with these charges, as the table takes it.
    pub(super) fn changes<'b>(&'b self, batch: &'b Batch) -> Vec<Change<'b>> {
        let has_charge = |key: &[u8]| self.inodes.binary_search_by(|inode| inode.key.as_slice().cmp(key)).is_ok();
        let others = batch.changes().iter().filter(|change| change.row.is_none() || !has_charge(&change.key));
        let inodes = self.inodes.iter().map(|inode| Change { key: &inode.key, row: Some(&inode.row) });
        others.map(RowChange::as_row).chain(inodes).collect()
    }

    fn count(&mut self, row: &InodeRow, bytes: i64) {
        self.uses.extend(owners_of(row).map(|owner| (owner, bytes)));
    }
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

/// What content that lies in its row is charged, bytes.
pub(super) fn of_content(content: &[u8]) -> u64 {
    ROW + 1 + content.len() as u64
}

/// What the target of a symbolic link is charged, bytes.
pub(super) fn of_target(target: &[u8]) -> u64 {
    of_content(target)
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
    /// What a batch changes of the charges of inodes, and what follows for their owners.
    ///
    /// # Errors
    /// Errors of reading the table.
    pub(super) fn row_charges(&self, table: &T, batch: &Batch) -> Result<RowCharges> {
        let mut charges = RowCharges::default();
        let changes = last_changes(batch);
        for (number, growth) in growths(table, &changes)? {
            let key = keys::inode(number);
            let before = match self.recent.get_charged(number) {
                None => table.get(&key)?.and_then(|row| InodeRow::decode_charged(&row).ok()),
                kept => kept,
            };
            let after = match changes.binary_search_by(|change| change.key.as_slice().cmp(&key)) {
                Ok(at) => changes.get(at).and_then(|change| InodeRow::decode(change.row.as_deref()?).ok()),
                Err(_) => before.map(|(row, _)| row),
            };
            if let Some((row, rows)) = before {
                charges.count(&row, -signed(rows));
            }
            if let Some(row) = after {
                let rows = self.charge_before(table, number, &row, before)?.saturating_add_signed(growth).max(INODE);
                charges.count(&row, signed(rows));
                charges.inodes.push(ChargedInode { key, row: row.encode_charged(rows) });
            }
        }
        sum_up(&mut charges.uses);
        charges.uses.retain(|(_, change)| *change != 0);
        Ok(charges)
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

/// The last change of each row of a batch, in the order of their keys.
fn last_changes(batch: &Batch) -> Vec<&RowChange> {
    let mut changes: Vec<&RowChange> = batch.changes().iter().rev().collect();
    changes.sort_by(|one, other| one.key.cmp(&other.key));
    changes.dedup_by(|earlier, later| earlier.key == later.key);
    changes
}

/// By how much the rows of inodes grow, bytes, in the order of their numbers; also of those whose own row alone changes.
fn growths<T: Table>(table: &T, changes: &[&RowChange]) -> Result<Vec<(u64, i64)>> {
    let mut growths = Vec::with_capacity(changes.len());
    for RowChange { key, row } in changes {
        if let Some(number) = inode_of(key) {
            growths.push((number, 0));
        } else if has_charge(key) {
            let old = table.get(key)?;
            let old = old.as_deref().and_then(|old| charge_of(key, old));
            let new = row.as_deref().and_then(|row| charge_of(key, row));
            growths.extend(old.map(|(inode, bytes)| (inode, -signed(bytes))));
            growths.extend(new.map(|(inode, bytes)| (inode, signed(bytes))));
        }
    }
    sum_up(&mut growths);
    Ok(growths)
}

/// Adds up what belongs to the same.
fn sum_up<K: Ord + Copy>(sums: &mut Vec<(K, i64)>) {
    sums.sort_by_key(|(of, _)| *of);
    sums.dedup_by(|next, first| {
        let same = next.0 == first.0;
        if same {
            first.1 = first.1.saturating_add(next.1);
        }
        same
    });
}

pub(super) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
