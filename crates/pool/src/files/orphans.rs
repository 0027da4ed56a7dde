//! Inodes without a name: they live while somebody holds them, and are freed piece by piece afterwards; after a crash, at the next start.

use std::sync::atomic::Ordering;

use super::{Batch, Files, Result, Table};
use crate::rows::{Extent, Inode as Row, Xattr, keys};

/// How many rows one step frees: a step holds the txg open.
const STEP: usize = 1024;

impl<T: Table> Files<T> {
    /// Frees the inodes that nobody holds any more; answers how many are gone.
    ///
    /// # Errors
    /// Those of the engine; what is left is freed at the next start.
    pub fn free_let_go(&self) -> Result<u64> {
        let mut gone = 0;
        for number in self.known.take_let_go() {
            gone += u64::from(self.free(number)?);
        }
        Ok(gone)
    }

    /// Frees all orphans of the table: after a start, when nobody can hold one. Answers how many are gone.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn free_orphans(&self) -> Result<u64> {
        let mut numbers = Vec::new();
        self.table.read().scan(keys::of_kind(keys::ORPHAN), &mut |key, _| {
            if let Ok(keys::Key::Orphan(number)) = keys::Key::decode(key) {
                numbers.push(number);
            }
            true
        })?;
        let mut gone = 0;
        for number in numbers {
            gone += u64::from(self.free(number)?);
        }
        Ok(gone)
    }

    /// Frees one inode, where it is still one without a name.
    fn free(&self, number: u64) -> Result<bool> {
        loop {
            let entered = self.gate.enter();
            let table = self.table.read();
            // Another holder may have come through its number, and given it a name again.
            if table.get(&keys::orphan(number))?.is_none() {
                return Ok(false);
            }
            let Some(row) = table.get(&keys::inode(number))? else {
                drop(table);
                let mut batch = Batch::default();
                batch.remove(&keys::orphan(number));
                self.apply(entered.txg(), &batch)?;
                return Ok(false);
            };
            let mut row = Row::decode(&row)?;
            let mut batch = Batch::default();
            let (freed, complete) = self.collect(&table, number, &mut batch)?;
            drop(table);
            let bytes: u64 = freed.iter().map(crate::Pointer::charged).sum();
            row.charged = row.charged.saturating_sub(bytes);
            self.freed.lock().extend(freed);
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX).saturating_neg();
            if complete {
                batch.remove(&keys::inode(number));
                batch.remove(&keys::orphan(number));
                self.numbers.objects.fetch_sub(1, Ordering::Relaxed);
                self.count_owner(&row, bytes, -1);
            } else {
                batch.put(&keys::inode(number), row.encode());
                self.count_owner(&row, bytes, 0);
            }
            self.apply(entered.txg(), &batch)?;
            if complete {
                return Ok(true);
            }
        }
    }

    /// The next rows of an inode to remove, the frames that they name, and whether that is all.
    fn collect(&self, table: &T, number: u64, batch: &mut Batch) -> Result<(Vec<crate::Pointer>, bool)> {
        let (mut freed, mut rows) = (Vec::new(), 0);
        let mut damage = Ok(());
        for range in [keys::extents(number, 0), keys::xattrs(number)] {
            table.scan(range, &mut |key, row| {
                if rows == STEP {
                    return false;
                }
                let pointer = if key.first() == Some(&keys::EXTENT) {
                    Extent::decode(row).map(|extent| extent.pointer().copied())
                } else {
                    Xattr::decode(row).map(|value| if let Xattr::Frame(pointer) = value { Some(pointer) } else { None })
                };
                match pointer {
                    Ok(pointer) => freed.extend(pointer),
                    Err(error) => damage = Err(error),
                }
                batch.remove(key);
                rows += 1;
                damage.is_ok()
            })?;
        }
        damage?;
        Ok((freed, rows < STEP))
    }
}
