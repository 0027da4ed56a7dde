//! Space that the rows of an inode are charged to its owner: attributes, names, link targets, small
//! content, extended attributes, and the rows of records and patches.
//!
//! Every batch of rows passes [`Files::row_charges`] before it is applied, under the table's lock:
//! there the charge of each inode in the batch is updated from the rows, and the usage of its user
//! and group from the charge. So no operation has to count its rows itself.
//!
//! ```text
//!  row            belongs to                charged
//!  inode          itself                    INODE
//!  entry          the inode that it names   2 ROW + HASH + value + value without the name: the row for
//!                                           look-ups, too
//!  xattr          its inode                 ROW + name + value, or FRAME if the value has a frame
//!  content        its inode                 ROW + content, if it is in the row
//! ```
//!
//! Frames are in [`InodeRow::charged`]; rows that reference frames of content are charged nothing:
//! they take less than a hundredth of the frames' space.
//!
//! Invariants: the table's inode rows hold the charge, no row in memory does; the usage of an owner
//! is the sum of the charges of its inodes, whatever a charge is. An inode last written by an older
//! version has no charge: all its rows are counted with its next change, or in the background
//! ([`Files::recount_rows`]), which notes its progress in a row of its own.

use super::owner_accounts::{OwnerId, owners_of};
use super::row_recount::recount;
use super::{Batch, Change, Files, Result, RowChange, Table};
use crate::rows::{Entry, InodeRow, keys, pointer_of};

/// Charge of an inode's own row, bytes: the times differ from inode to inode, and are not
/// compressed away. It and the constants below are chosen so that the sum comes within 5 % of what
/// a file system of one kind of rows uses (`what_owners_use_adds_up_to_what_is_used`).
pub(super) const INODE: u64 = 32;
/// Charge of a row in addition to its value, bytes: the compressed part of its key in the leaf, and
/// its share of the nodes above.
const ROW: u64 = 16;
/// Charge of the key of a name in addition to that, bytes: its hash and its sequence differ from
/// those of its neighbours.
const HASH: u64 = 16;
/// Charge of the value of a row that references a frame, bytes, however the frame is shared.
const FRAME: u64 = 56;
/// Position of the inode's number in a key, after the kind of the row.
const NUMBER: std::ops::Range<usize> = 1..9;

/// Changes of charges by a batch.
#[derive(Default)]
pub(super) struct RowCharges {
    /// The rows of the inodes in the batch, in the order of their numbers.
    inodes: Vec<ChargedInode>,
    /// Changes of the usage of owners, bytes.
    pub(super) uses: Vec<(OwnerId, i64)>,
}

/// The row of an inode with its charge.
struct ChargedInode {
    key: [u8; NUMBER.end],
    row: Vec<u8>,
}

impl RowCharges {
    /// Returns the changes of the batch with these charges, for the table.
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

/// Charge of a name of an inode, bytes: an entry and the row for look-ups.
pub(super) fn of_name(name: &[u8]) -> u64 {
    const TYPE_AND_NUMBER: u64 = 10;
    2 * (ROW + TYPE_AND_NUMBER) + HASH + name.len() as u64
}

/// Charge of an extended attribute with its value in the row, bytes.
pub(super) fn of_attribute(name: &[u8], value: &[u8]) -> u64 {
    ROW + 1 + (name.len() + value.len()) as u64
}

/// Charge of content in its row, bytes.
pub(super) fn of_content(content: &[u8]) -> u64 {
    ROW + 1 + content.len() as u64
}

/// Charge of the target of a symbolic link, bytes.
pub(super) fn of_target(target: &[u8]) -> u64 {
    of_content(target)
}

/// The inode to which a row is charged, and the charge; `None` for rows that belong to no inode, or
/// are damaged.
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

/// Whether a row with this key can have a charge. Of the rows of content, only record 0 can hold
/// its content.
fn has_charge(key: &[u8]) -> bool {
    match key.first() {
        Some(&(keys::ENTRY | keys::XATTR)) => true,
        Some(&keys::EXTENT) => key.get(NUMBER.end..) == Some(&[0; 8]),
        _ => false,
    }
}

/// The inode's number in the key of an inode row.
pub(super) fn inode_of(key: &[u8]) -> Option<u64> {
    if key.first() != Some(&keys::INODE) || key.len() != NUMBER.end {
        return None;
    }
    Some(u64::from_be_bytes(key.get(NUMBER)?.try_into().ok()?))
}

impl<T: Table> Files<T> {
    /// Computes the changes of inodes' charges by a batch, and those of their owners' usage.
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

    /// Charge of an inode for the rows in the table.
    fn charge_before(&self, table: &T, number: u64, after: &InodeRow, before: Option<(InodeRow, u64)>) -> Result<u64> {
        match before {
            Some((row, 0)) => recount(table, number, &row),
            Some((_, rows)) => Ok(rows),
            // The log has rows of a new file before its inode.
            None if self.is_replaying() => recount(table, number, after),
            None => Ok(INODE),
        }
    }

    /// Current charge of an inode for its rows, for a change of its owner.
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

/// Growth of the rows of inodes, bytes, in the order of their numbers; inodes of which only the own
/// row changes are included.
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

/// Adds up the values of equal keys.
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
