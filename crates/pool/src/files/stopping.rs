//! Stopping the operations of one dataset for as long as its tree is replaced by another: rollback
//! of a file system in use.
//!
//! Invariant: operations wait before they hold anything, so whoever stops them can commit; reads go
//! on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::{Files, Result, Table};
use crate::error::PoolError;
use crate::rows::{DatasetHead, keys};

/// Whether operations wait.
#[derive(Debug, Default)]
pub(super) struct Stop {
    on: AtomicBool,
    state: Mutex<()>,
    over: Condvar,
}

impl Stop {
    /// Whether whoever holds the gate now has to let go and wait.
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Waits until operations may go on.
    pub(super) fn wait(&self) {
        let mut state = self.state.lock();
        while self.is_on() {
            self.over.wait(&mut state);
        }
    }

    fn set(&self, on: bool) {
        let _state = self.state.lock();
        self.on.store(on, Ordering::Release);
        self.over.notify_all();
    }
}

/// Operations of a dataset wait until this is dropped.
#[derive(Debug)]
pub struct StoppedFiles<'a, T: Table> {
    files: &'a Files<T>,
}

impl<T: Table> Drop for StoppedFiles<'_, T> {
    fn drop(&mut self) {
        self.files.stop.set(false);
    }
}

impl<T: Table> Files<T> {
    /// Stops operations: those that begin after the next closing of a txg wait. By one at a time,
    /// who has the administration of the pool.
    pub fn stop(&self) -> StoppedFiles<'_, T> {
        self.stop.set(true);
        StoppedFiles { files: self }
    }
}

impl<T: Table> StoppedFiles<'_, T> {
    /// The files are those of another table from now on, of the same dataset at another time:
    /// whoever holds an inode has what has its number there, or nothing. Called when a commit has
    /// taken all that memory held.
    ///
    /// # Errors
    /// Those of the table; nothing is changed then.
    pub fn replace(&self, table: T) -> std::result::Result<(), PoolError> {
        let files = self.files;
        let head = DatasetHead::decode(&table.get(&keys::head())?.unwrap_or_default())?;
        let _names = files.names.lock();
        let held = files.known.all();
        {
            let mut old = files.table.write();
            files.recent.clear();
            *old = table;
        }
        held.iter().for_each(|inode| files.empty(inode));
        let forgotten = files.dirty.lock().drain().count() as u64;
        files.buffered.shrink(forgotten * super::inodes::ACTIVE);
        files.owners.clear();
        *files.recounted.lock() = super::row_recount::Recounted::Unknown;
        // Numbers that were given since are not given again: somebody may hold them.
        files.numbers.next.fetch_max(head.next, Ordering::Relaxed);
        files.numbers.objects.store(head.objects, Ordering::Relaxed);
        Ok(())
    }
}

impl<T: Table> Files<T> {
    /// Nobody uses the dataset any more, after a commit: what that could not store is lost.
    pub fn give_up(&self) {
        let left: Vec<Arc<super::Inode>> = self.dirty.lock().drain().map(|(_, inode)| inode).collect();
        for inode in &left {
            tracing::error!(dataset = self.dataset, inode = inode.number(), "what was written to a file is lost");
            self.buffered.shrink(super::inodes::ACTIVE);
            self.empty(inode);
        }
    }

    /// Takes out of memory what is there of an inode: nothing, after a commit, but where rows are
    /// damaged.
    fn empty(&self, inode: &super::Inode) {
        let txg = self.gate.enter().txg();
        let active = inode.active.write().take();
        inode.apart.lock().take();
        self.note_stored(inode.number());
        active
            .iter()
            .for_each(|active| active.records.values().for_each(|buffered| self.release(txg, &active.row, buffered)));
    }

    /// Marks what is held and has no name, after a table was replaced: it goes when its last holder
    /// lets go. Other inodes without a name are freed.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn adopt_orphans(&self) -> Result<()> {
        let held: Vec<Arc<super::Inode>> = self.known.all();
        for inode in &held {
            if self.table.read().get(&keys::orphan(inode.number()))?.is_some() {
                let mut edited = self.edit(inode)?;
                edited.lose_last_name();
            }
        }
        let keep = held.iter().map(|inode| inode.number()).collect();
        self.let_orphans_go(&keep)
    }
}
