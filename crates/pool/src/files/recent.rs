//! Attributes that were looked at last: each operation on a file begins with them, and a way down the tree costs more than all else about them.
//!
//! Asked and filled by `inodes.rs`, kept true by whoever changes the table. Invariants: what is noted is what the table has, since it is noted under
//! the table's lock, and replaced or taken out under the same lock held for writing; nothing is allocated before anybody asks.

use std::sync::OnceLock;

use parking_lot::Mutex;

use super::Batch;
use crate::rows::{Inode as Row, keys};

/// How many are kept.
const PLACES: usize = 64;

type Place = Mutex<Option<(u64, Row)>>;

/// See the file's head.
#[derive(Debug, Default)]
pub(super) struct Recent {
    places: OnceLock<Box<[Place]>>,
}

impl Recent {
    /// The attributes of an inode, where they are kept.
    pub(super) fn get(&self, number: u64) -> Option<Row> {
        let kept = *self.place(number)?.lock();
        kept.filter(|(of, _)| *of == number).map(|(_, row)| row)
    }

    /// Keeps what the table has, while its lock is held.
    pub(super) fn note(&self, number: u64, row: &Row) {
        let places = self.places.get_or_init(|| (0..PLACES).map(|_| Mutex::default()).collect());
        if let Some(place) = places.get(number as usize % PLACES) {
            *place.lock() = Some((number, *row));
        }
    }

    /// The table has taken a batch, or a part of it where that failed; its lock is held for writing.
    pub(super) fn follow(&self, batch: &Batch, failed: bool) {
        for change in batch.changes() {
            let Some((&keys::INODE, number)) = change.key.split_first() else { continue };
            let Some(number) = number.first_chunk::<8>().map(|number| u64::from_be_bytes(*number)) else { continue };
            let row = change.row.as_deref().filter(|_| !failed).and_then(|row| Row::decode(row).ok());
            match (row, self.place(number)) {
                (Some(row), _) => self.note(number, &row),
                (None, Some(place)) => {
                    let mut place = place.lock();
                    *place = place.filter(|(of, _)| *of != number);
                }
                (None, None) => {}
            }
        }
    }

    /// Anything may have changed.
    pub(super) fn clear(&self) {
        self.places.get().into_iter().flatten().for_each(|place| *place.lock() = None);
    }

    fn place(&self, number: u64) -> Option<&Place> {
        self.places.get()?.get(number as usize % PLACES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{FileType, Timestamp};

    #[test]
    fn what_is_kept_follows_the_table() {
        let recent = Recent::default();
        let row = |links| Row { links, ..Row::new(FileType::Regular, 0o644, Timestamp::default()) };
        assert_eq!(recent.get(5), None);
        recent.note(5, &row(1));
        assert_eq!((recent.get(5), recent.get(5 + PLACES as u64)), (Some(row(1)), None));
        let mut batch = Batch::default();
        batch.put(&keys::inode(5), row(2).encode());
        batch.put(&keys::inode(6), row(3).encode());
        batch.remove(&keys::orphan(7));
        recent.follow(&batch, false);
        assert_eq!((recent.get(5), recent.get(6)), (Some(row(2)), Some(row(3))));
        recent.follow(&batch, true);
        assert_eq!((recent.get(5), recent.get(6)), (None, None), "what failed is asked of the table");
        recent.follow(&batch, false);
        let mut gone = Batch::default();
        gone.remove(&keys::inode(5 + PLACES as u64));
        recent.follow(&gone, false);
        assert_eq!(recent.get(5), Some(row(2)), "another one with the same place");
        gone.remove(&keys::inode(5));
        recent.follow(&gone, false);
        assert_eq!(recent.get(5), None);
        recent.clear();
        assert_eq!(recent.get(6), None);
    }
}
