//! Interface between files and the dataset's tree: rows are read one by one or in ranges, and
//! changed in batches. Tests implement it with an ordered map.

use std::ops::Range;

use crate::deadlist::{Dead, RowVisitor};
use crate::error::PoolError;
use crate::log::LogChange;
use crate::pointer::Txg;
use crate::rows::{InodeRow, OwnerKind, keys};

/// Reads nodes that a table lacks in memory.
pub type Absent = Box<dyn FnOnce() -> Result<(), PoolError> + Send>;

/// The rows of a dataset.
pub trait Table: Send + Sync {
    /// Returns a row.
    ///
    /// # Errors
    /// Damage of the tree, a device that fails.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError>;

    /// Returns a read that is necessary before a row can be read or changed without waiting for a
    /// device: run it without the table's lock, then call this again. `None` if nothing is known to
    /// be missing; a table may return that although something is.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn absent(&self, key: &[u8]) -> Result<Option<Absent>, PoolError> {
        let _ = key;
        Ok(None)
    }

    /// As [`Self::absent`] for the rows of a range, up to so many leaves.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn absent_in(&self, range: &Range<Vec<u8>>, leaves: usize) -> Result<Option<Absent>, PoolError> {
        self.absent_ahead(range, (leaves, leaves))
    }

    /// As [`Self::absent_in`] if one of the first `near` leaves is missing; the read then includes
    /// the first `far`.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn absent_ahead(&self, range: &Range<Vec<u8>>, (near, far): (usize, usize)) -> Result<Option<Absent>, PoolError> {
        let _ = (range, near, far);
        Ok(None)
    }

    /// Visits the rows of a range in the order of their keys, until `visit` returns false.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn scan(&self, range: Range<Vec<u8>>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), PoolError>;

    /// As [`Self::scan`]; an error of a visit ends it.
    ///
    /// # Errors
    /// As [`Self::get`], and errors of `visit`.
    fn try_scan(&self, range: Range<Vec<u8>>, visit: &mut RowVisitor<'_>) -> Result<(), PoolError> {
        let mut outcome = Ok(true);
        self.scan(range, &mut |key, row| {
            outcome = visit(key, row);
            matches!(outcome, Ok(true))
        })?;
        outcome.map(drop)
    }

    /// Makes all these changes, in their order.
    ///
    /// # Errors
    /// As [`Self::get`]. Either nothing is changed, or the table prevents the commit of a partial
    /// change.
    fn change(&mut self, txg: Txg, changes: &[Change<'_>]) -> Result<(), PoolError>;

    /// Bytes of the table that the next commits will write.
    fn dirty_bytes(&self) -> u64;
}

/// A change of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// Key of the row.
    pub key: Vec<u8>,
    /// The new row; `None` removes it.
    pub row: Option<Vec<u8>>,
}

/// A change of one row, borrowed, for a table.
#[derive(Clone, Copy, Debug)]
pub struct Change<'b> {
    /// Key of the row.
    pub key: &'b [u8],
    /// The new row; `None` removes it.
    pub row: Option<&'b [u8]>,
}

impl RowChange {
    /// The change for a table.
    #[must_use]
    pub fn as_row(&self) -> Change<'_> {
        Change { key: &self.key, row: self.row.as_deref() }
    }

    /// The change for the intent log.
    #[must_use]
    pub fn as_change(&self) -> LogChange<'_> {
        match &self.row {
            Some(value) => LogChange::Put { key: &self.key, value },
            None => LogChange::Delete { key: &self.key },
        }
    }
}

/// The changes of one operation, and their consequences, which take effect only after the table has
/// taken the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    changes: Vec<RowChange>,
    /// Frames that no row references any more afterwards.
    pub(super) dead: Vec<Dead>,
    /// Frames that were written for its rows: they are freed if the table does not take the rows.
    pub(super) written: Vec<Dead>,
    /// Changes of the usage of owners, bytes.
    pub(super) uses: Vec<((OwnerKind, u32), i64)>,
    /// Change of the charge of the changed file, bytes.
    pub(super) charged: i64,
    /// Rows for the replay journal that differ from the table's, by their keys.
    pub(super) kept_as: Vec<(Vec<u8>, Vec<u8>)>,
    /// Rows for both logs instead of rows that reference frames: long values in full, by their
    /// keys.
    pub(super) logged_as: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Batch {
    /// Puts a row.
    pub fn put(&mut self, key: &[u8], row: Vec<u8>) {
        self.changes.push(RowChange { key: key.to_vec(), row: Some(row) });
    }

    /// Removes a row, if it exists.
    pub fn remove(&mut self, key: &[u8]) {
        self.changes.push(RowChange { key: key.to_vec(), row: None });
    }

    /// Charges a file for more bytes; its row has the charge already.
    pub(super) fn charge(&mut self, row: &InodeRow, bytes: i64) {
        self.charged = self.charged.saturating_add(bytes);
        self.uses.extend([(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)].map(|owner| (owner, bytes)));
    }

    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The changes for a table, without charges for rows.
    #[must_use]
    pub fn uncharged(&self) -> Vec<Change<'_>> {
        self.changes.iter().map(RowChange::as_row).collect()
    }

    /// The changes for the intent log.
    pub(super) fn logged(&self) -> Vec<LogChange<'_>> {
        let rows = self.changes.iter().map(RowChange::as_change);
        if self.logged_as.is_empty() {
            return rows.collect();
        }
        // A long value is no row: a replay sets it, and needs its inode before.
        let is_inode = |change: &LogChange<'_>| change.kind() == Some(keys::INODE);
        let mut logged: Vec<LogChange<'_>> = rows.clone().filter(is_inode).collect();
        for (change, row) in self.changes.iter().zip(rows) {
            let long = self.logged_as.iter().find(|(key, _)| *key == change.key);
            logged.push(long.map_or(row, |(key, value)| LogChange::Put { key, value }));
        }
        logged
    }

    /// The changes in their order.
    #[must_use]
    pub fn changes(&self) -> &[RowChange] {
        &self.changes
    }
}
