//! Stops the operations of one dataset while its tree is replaced by another one: rollback of a
//! file system in use.
//!
//! Invariant: operations wait before they hold anything, so the rollback can commit; reads
//! continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::{Files, Result, Table};
use crate::error::PoolError;
use crate::rows::{DatasetHead, keys};

/// Whether operations have to wait.
#[derive(Debug, Default)]
pub(super) struct Stop {
    on: AtomicBool,
    state: Mutex<()>,
    over: Condvar,
}

impl Stop {
    /// Whether an operation that has just entered the gate has to leave it and wait.
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Waits until operations may continue.
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

/// Keeps the operations of a dataset stopped until it is dropped.
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
    /// Stops operations: those that begin after the next closing of a txg wait. The caller holds
    /// the pool's administration lock, so only one does this at a time.
    pub fn stop(&self) -> StoppedFiles<'_, T> {
        self.stop.set(true);
        StoppedFiles { files: self }
    }
}

impl<T: Table> StoppedFiles<'_, T> {
    /// Replaces the table by one of the same dataset at another time: a held inode then refers to
    /// the inode of its number in the new table, if there is one. Called after a commit, which has
    /// taken all changes from memory.
    ///
    /// # Errors
    /// Errors of the table; nothing is changed then.
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
        // Inode numbers assigned since are not assigned again: they may still be held.
        files.numbers.next.fetch_max(head.next, Ordering::Relaxed);
        files.numbers.objects.store(head.objects, Ordering::Relaxed);
        Ok(())
    }
}

impl<T: Table> Files<T> {
    /// Drops changes that a commit could not store: the dataset is closed afterwards, and they are
    /// lost.
    pub fn give_up(&self) {
        let left: Vec<Arc<super::Inode>> = self.dirty.lock().drain().map(|(_, inode)| inode).collect();
        for inode in &left {
            tracing::error!(dataset = self.dataset, inode = inode.number(), "what was written to a file is lost");
            self.buffered.shrink(super::inodes::ACTIVE);
            self.empty(inode);
        }
    }

    /// Drops the changes of an inode from memory: after a commit there are none, except for damaged
    /// rows.
    fn empty(&self, inode: &super::Inode) {
        let txg = self.gate.enter().txg();
        let active = inode.active.write().take();
        inode.apart.lock().take();
        self.note_stored(inode.number());
        active
            .iter()
            .for_each(|active| active.records.values().for_each(|buffered| self.release(txg, &active.row, buffered)));
    }

    /// Marks held inodes that have no name in the new table: they are freed when their last holder
    /// drops them. Other inodes without a name are freed now.
    ///
    /// # Errors
    /// Errors of the engine.
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
