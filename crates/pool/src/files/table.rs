//! The edge between files and the dataset's tree: rows read one by one or in ranges, and changed in
//! batches. Tests put an ordered map behind it.

use std::ops::Range;

use crate::deadlist::{Dead, RowVisitor};
use crate::error::PoolError;
use crate::log::LogChange;
use crate::pointer::Txg;
use crate::rows::{InodeRow, OwnerKind, keys};

/// Reads something that a table needs.
pub type Absent = Box<dyn FnOnce() -> Result<(), PoolError> + Send>;

/// The rows of a dataset.
pub trait Table: Send + Sync {
    /// A row.
    ///
    /// # Errors
    /// Damage of the tree, a device that fails.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError>;

    /// What must be read before a row can be got or changed without waiting for a device: read it
    /// without the table's lock, then ask again. `None` where nothing is known to be missing; a
    /// table may say so although something is.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn absent(&self, key: &[u8]) -> Result<Option<Absent>, PoolError> {
        let _ = key;
        Ok(None)
    }

    /// The same for the rows of a range, or those of them that so many leaves hold.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn absent_in(&self, range: &Range<Vec<u8>>, leaves: usize) -> Result<Option<Absent>, PoolError> {
        self.absent_ahead(range, (leaves, leaves))
    }

    /// The same where one of the first `near` leaves is missing; then the first `far` are read.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn absent_ahead(&self, range: &Range<Vec<u8>>, (near, far): (usize, usize)) -> Result<Option<Absent>, PoolError> {
        let _ = (range, near, far);
        Ok(None)
    }

    /// The rows of a range in the order of their keys, until `visit` answers false.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn scan(&self, range: Range<Vec<u8>>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), PoolError>;

    /// The same where a visit may fail, which ends it.
    ///
    /// # Errors
    /// As [`Self::get`], and those of `visit`.
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
    /// As [`Self::get`]. Either nothing is changed, or the table has seen to it that what is half
    /// changed is never committed.
    fn change(&mut self, txg: Txg, changes: &[Change<'_>]) -> Result<(), PoolError>;

    /// What the next commits will write of the table, bytes.
    fn dirty_bytes(&self) -> u64;
}

/// A change of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// Which row.
    pub key: Vec<u8>,
    /// What it becomes; `None` where it goes.
    pub row: Option<Vec<u8>>,
}

/// A change of one row, as a table takes it.
#[derive(Clone, Copy, Debug)]
pub struct Change<'b> {
    /// Which row.
    pub key: &'b [u8],
    /// What it becomes; `None` where it goes.
    pub row: Option<&'b [u8]>,
}

impl RowChange {
    /// The change as a table takes it.
    #[must_use]
    pub fn as_row(&self) -> Change<'_> {
        Change { key: &self.key, row: self.row.as_deref() }
    }

    /// The change as the intent log has it.
    #[must_use]
    pub fn as_change(&self) -> LogChange<'_> {
        match &self.row {
            Some(value) => LogChange::Put { key: &self.key, value },
            None => LogChange::Delete { key: &self.key },
        }
    }
}

/// What one operation changes, and what follows from it: nothing of that is told to anybody before
/// the table has taken the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    changes: Vec<RowChange>,
    /// Frames that no row names any more then.
    pub(super) dead: Vec<Dead>,
    /// Frames that were written for its rows: they are nobody's where the table does not take them.
    pub(super) written: Vec<Dead>,
    /// By what the use of owners changes, bytes.
    pub(super) uses: Vec<((OwnerKind, u32), i64)>,
    /// By what the charge of the file that is changed differs, bytes.
    pub(super) charged: i64,
    /// What the kept log has in place of rows: by their keys.
    pub(super) kept_as: Vec<(Vec<u8>, Vec<u8>)>,
    /// What both logs have in place of rows that name frames: long values in full, by their keys.
    pub(super) logged_as: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Batch {
    /// The row becomes this.
    pub fn put(&mut self, key: &[u8], row: Vec<u8>) {
        self.changes.push(RowChange { key: key.to_vec(), row: Some(row) });
    }

    /// The row goes, if it is there.
    pub fn remove(&mut self, key: &[u8]) {
        self.changes.push(RowChange { key: key.to_vec(), row: None });
    }

    /// A file is charged so much more; its row says so already.
    pub(super) fn charge(&mut self, row: &InodeRow, bytes: i64) {
        self.charged = self.charged.saturating_add(bytes);
        self.uses.extend([(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)].map(|owner| (owner, bytes)));
    }

    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The changes as a table takes them, without charges for rows.
    #[must_use]
    pub fn uncharged(&self) -> Vec<Change<'_>> {
        self.changes.iter().map(RowChange::as_row).collect()
    }

    /// The changes as the intent log has them.
    pub(super) fn logged(&self) -> Vec<LogChange<'_>> {
        let rows = self.changes.iter().map(RowChange::as_change);
        if self.logged_as.is_empty() {
            return rows.collect();
        }
        // A long value is no row: replay sets it, and its inode has to be there.
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
