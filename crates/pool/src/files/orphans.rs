//! Orphan inodes: inodes without a name live while they are held, and are freed step by step
//! afterwards; after a crash, at the next import.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::{Batch, Files, Result, Table};
use crate::deadlist::Dead;
use crate::rows::inode::flags::CUT;
use crate::rows::{InodeRow, dead_of, keys};

/// Number of rows that one step frees: a step holds the txg open.
const STEP: usize = 1024;

/// Result of a step of freeing orphan inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Number of freed inodes.
    pub gone: u64,
    /// Whether there are more to be freed.
    pub more: bool,
}

/// Result of freeing one inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freed {
    /// It was freed.
    Gone,
    /// It has a name again, or was freed before.
    Kept,
    /// A part of its rows remains.
    More,
}

impl<T: Table> Files<T> {
    /// Frees inodes without holders until about so many rows are removed.
    ///
    /// # Errors
    /// Errors of the engine; the remainder is freed at the next import.
    pub fn free_released(&self, rows: u64) -> Result<Swept> {
        let (mut left, mut gone) = (rows, 0);
        let mut waiting = self.known.take_released().into_iter();
        let mut outcome = Ok(());
        while left > 0
            && let Some(number) = waiting.next()
        {
            match self.free(number, &mut left) {
                Ok(Freed::More) => self.known.put_released(std::iter::once(number)),
                Ok(Freed::Gone) => gone += 1,
                Ok(Freed::Kept) => {}
                // Inodes after one that cannot be read are freed all the same.
                Err(error) => outcome = Err(error),
            }
        }
        self.known.put_released(waiting);
        outcome.map(|()| Swept { gone, more: self.known.has_released() })
    }

    /// Frees all orphans of the table at once: after an import, when none can be held. Returns
    /// their number.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn free_orphans(&self) -> Result<u64> {
        self.let_orphans_go(&HashSet::new())?;
        self.free_released(u64::MAX).map(|swept| swept.gone)
    }

    /// Schedules the orphans of the table for being freed step by step, except those in `held`:
    /// after an import, or when the table was replaced. There may be very many of them.
    ///
    /// # Errors
    /// Errors of reading the table.
    pub fn let_orphans_go(&self, held: &HashSet<u64>) -> Result<()> {
        let mut numbers = self.orphans()?;
        // An orphan that is held by now is freed when its holder drops it, or at the next import.
        numbers.retain(|number| !held.contains(number) && !self.known.is_held(*number));
        self.known.put_released(numbers);
        self.find_cuts()
    }

    /// Returns the orphan inodes of the table.
    pub(super) fn orphans(&self) -> Result<Vec<u64>> {
        let mut numbers = Vec::new();
        self.table.read().scan(keys::of_kind(keys::ORPHAN), &mut |key, _| {
            if let Ok(keys::Key::Orphan(number)) = keys::Key::decode(key) {
                numbers.push(number);
            }
            true
        })?;
        Ok(numbers)
    }

    /// Frees one inode, if it is still an orphan, up to so many rows.
    fn free(&self, number: u64, left: &mut u64) -> Result<Freed> {
        loop {
            let entered = self.gate.enter();
            if self.stop.is_on() {
                // Its table is being replaced, and its orphans are looked up afterwards.
                return Ok(Freed::Kept);
            }
            // It is freed when its holder drops it.
            if self.is_left(number) || self.known.held(number).is_some_and(|inode| inode.is_nameless()) {
                return Ok(Freed::Kept);
            }
            let table = self.table.read();
            // A new holder may have opened it by number, and given it a name again.
            if table.get(&keys::orphan(number))?.is_none() {
                return Ok(Freed::Kept);
            }
            let Some(row) = table.get(&keys::inode(number))? else {
                drop(table);
                let mut batch = Batch::default();
                batch.remove(&keys::orphan(number));
                self.apply(entered.txg(), &batch)?;
                return Ok(Freed::Kept);
            };
            let mut row = InodeRow::decode(&row)?;
            let mut batch = Batch::default();
            let (freed, complete) = self.collect(&table, number, &mut batch)?;
            drop(table);
            *left = left.saturating_sub(batch.changes().len() as u64 + 2);
            let bytes: u64 = freed.iter().map(|dead| dead.owner_charge).sum();
            row.charged = row.charged.saturating_sub(bytes);
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX).saturating_neg();
            if complete {
                batch.remove(&keys::inode(number));
                batch.remove(&keys::orphan(number));
                if row.flags & CUT != 0 {
                    batch.remove(&keys::cut(number));
                }
            } else {
                batch.put(&keys::inode(number), row.encode());
            }
            self.apply(entered.txg(), &batch)?;
            // The rows are removed: now their frames are free.
            self.freed.lock().extend(freed);
            self.count_owner(&row, bytes, if complete { -1 } else { 0 });
            if complete {
                self.numbers.objects.fetch_sub(1, Ordering::Relaxed);
            }
            match (complete, *left) {
                (true, _) => return Ok(Freed::Gone),
                (false, 0) => return Ok(Freed::More),
                (false, _) => {}
            }
        }
    }

    /// Collects the next rows of an inode to remove, and the frames that they reference; `true` if
    /// these are all.
    fn collect(&self, table: &T, number: u64, batch: &mut Batch) -> Result<(Vec<Dead>, bool)> {
        let (mut freed, mut rows) = (Vec::new(), 0);
        for range in [keys::extents(number, 0, u64::MAX), keys::xattrs(number), keys::patches(number, 0, u64::MAX)] {
            table.try_scan(range, &mut |key, row| {
                if rows == STEP {
                    return Ok(false);
                }
                freed.extend(dead_of(key, row)?);
                batch.remove(key);
                rows += 1;
                Ok(true)
            })?;
        }
        Ok((freed, rows < STEP))
    }
}
