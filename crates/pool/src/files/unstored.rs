//! Files whose content cannot be stored, because rows that it needs are damaged: reported to a
//! sync, snapshot or export of the whole file system.
//!
//! Callers: the flush notes them; the engine asks for them. Invariant: a file is listed from the
//! flush that failed until one has stored its content, or has given it up.

use std::collections::BTreeMap;

use super::{FileError, Files, Result, Table};
use crate::pointer::Txg;

/// Files with content in memory that cannot be stored, and the last loss.
#[derive(Debug, Default)]
pub(super) struct Unstored {
    now: BTreeMap<u64, FileError>,
    lost: Option<Lost>,
}

/// A file whose content was given up.
#[derive(Debug)]
struct Lost {
    /// Txg that gave it up.
    by: Txg,
    /// The reason.
    error: FileError,
    /// The loss was reported.
    told: bool,
}

impl<T: Table> Files<T> {
    /// Notes that content of an inode cannot be stored now.
    pub(super) fn note_unstored(&self, number: u64, error: &FileError) {
        self.unstored.lock().now.insert(number, error.clone());
    }

    /// Notes that it is stored, or dropped.
    pub(super) fn note_stored(&self, number: u64) {
        let mut unstored = self.unstored.lock();
        if !unstored.now.is_empty() {
            unstored.now.remove(&number);
        }
    }

    /// Notes that it is given up.
    pub(super) fn note_lost(&self, txg: Txg, number: u64, error: &FileError) {
        let mut unstored = self.unstored.lock();
        unstored.now.remove(&number);
        unstored.lost = Some(Lost { by: txg, error: error.clone(), told: false });
    }

    /// Number of files with content that cannot be stored, and the error of one of them.
    #[must_use]
    pub fn unstored(&self) -> Option<(usize, FileError)> {
        let unstored = self.unstored.lock();
        unstored.now.values().next().map(|error| (unstored.now.len(), error.clone()))
    }

    /// Checks after a commit that all content written before is stored. A loss is reported once.
    ///
    /// # Errors
    /// The reason why some content is not stored.
    pub fn check_all_stored(&self) -> Result<()> {
        let mut unstored = self.unstored.lock();
        if let Some(error) = unstored.now.values().next() {
            return Err(error.clone());
        }
        match unstored.lost.as_mut().filter(|lost| !lost.told) {
            None => Ok(()),
            Some(lost) => {
                lost.told = true;
                Err(lost.error.clone())
            }
        }
    }

    /// The error if the tree that this txg froze lacks content that was written before.
    pub(crate) fn lacks_at(&self, txg: Txg) -> Option<FileError> {
        let unstored = self.unstored.lock();
        let lost = unstored.lost.as_ref().filter(|lost| lost.by >= txg).map(|lost| &lost.error);
        unstored.now.values().next().or(lost).cloned()
    }
}
