//! Files whose content cannot be stored, because rows that it belongs to are damaged: who syncs,
//! snapshots or exports all of a file system is told.
//!
//! Callers: the flush notes them; the engine asks. Invariant: a file is here from the flush that
//! found it until one has stored it, or has given it up.

use std::collections::BTreeMap;

use super::{FileError, Files, Result, Table};
use crate::pointer::Txg;

/// What waits in memory and cannot be stored, and what was lost.
#[derive(Debug, Default)]
pub(super) struct Unstored {
    now: BTreeMap<u64, FileError>,
    lost: Option<Lost>,
}

/// The last file that was given up.
#[derive(Debug)]
struct Lost {
    /// By which txg.
    by: Txg,
    /// Why.
    error: FileError,
    /// Somebody knows.
    told: bool,
}

impl<T: Table> Files<T> {
    /// Something of an inode cannot be stored now.
    pub(super) fn note_unstored(&self, number: u64, error: &FileError) {
        self.unstored.lock().now.insert(number, error.clone());
    }

    /// It is stored, or is nobody's any more.
    pub(super) fn note_stored(&self, number: u64) {
        let mut unstored = self.unstored.lock();
        if !unstored.now.is_empty() {
            unstored.now.remove(&number);
        }
    }

    /// It is given up.
    pub(super) fn note_lost(&self, txg: Txg, number: u64, error: &FileError) {
        let mut unstored = self.unstored.lock();
        unstored.now.remove(&number);
        unstored.lost = Some(Lost { by: txg, error: error.clone(), told: false });
    }

    /// How many files hold what cannot be stored, and why one of them does.
    #[must_use]
    pub fn unstored(&self) -> Option<(usize, FileError)> {
        let unstored = self.unstored.lock();
        unstored.now.values().next().map(|error| (unstored.now.len(), error.clone()))
    }

    /// After a commit: whether all that was written before is stored. What was given up is told
    /// once.
    ///
    /// # Errors
    /// Why something is not.
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

    /// Whether the tree that this txg has frozen lacks something that was written before.
    pub(crate) fn lacks_at(&self, txg: Txg) -> Option<FileError> {
        let unstored = self.unstored.lock();
        let lost = unstored.lost.as_ref().filter(|lost| lost.by >= txg).map(|lost| &lost.error);
        unstored.now.values().next().or(lost).cloned()
    }
}
