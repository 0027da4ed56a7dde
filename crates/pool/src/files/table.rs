//! The edge between files and the dataset's tree: rows read one by one or in ranges, and changed in batches. Tests put an ordered map behind it.

use std::ops::Range;

use crate::error::PoolError;
use crate::log::Change;
use crate::pointer::Txg;

/// Reads something that a table needs.
pub type Absent = Box<dyn FnOnce() -> Result<(), PoolError>>;

/// The rows of a dataset.
pub trait Table: Send + Sync {
    /// A row.
    ///
    /// # Errors
    /// Damage of the tree, a device that fails.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError>;

    /// What must be read before a row can be got or changed without waiting for a device: read it without the table's lock, then ask again. `None`
    /// where nothing is known to be missing; a table may say so although something is.
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
        let _ = (range, leaves);
        Ok(None)
    }

    /// The rows of a range in the order of their keys, until `visit` answers false.
    ///
    /// # Errors
    /// As [`Self::get`].
    fn scan(&self, range: Range<Vec<u8>>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), PoolError>;

    /// Makes all changes of a batch, in its order.
    ///
    /// # Errors
    /// As [`Self::get`]. Either nothing is changed, or the table has seen to it that what is half changed is never committed.
    fn change(&mut self, txg: Txg, batch: &Batch) -> Result<(), PoolError>;

    /// What the next commits will write of the table, bytes.
    fn dirty_bytes(&self) -> u64 {
        0
    }
}

/// A change of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// Which row.
    pub key: Vec<u8>,
    /// What it becomes; `None` where it goes.
    pub row: Option<Vec<u8>>,
}

impl RowChange {
    /// The change as the intent log has it.
    #[must_use]
    pub fn as_change(&self) -> Change<'_> {
        match &self.row {
            Some(value) => Change::Put { key: &self.key, value },
            None => Change::Delete { key: &self.key },
        }
    }
}

/// What one operation changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    changes: Vec<RowChange>,
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

    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The changes in their order.
    #[must_use]
    pub fn changes(&self) -> &[RowChange] {
        &self.changes
    }
}
