//! Cache of recently read attributes: each operation on a file begins with them, and a descent of
//! the tree is the most expensive part of it. And a cache of files without extended attributes: a
//! long listing (`ls -l`) asks for the ACL of each file that it has just listed.
//!
//! Read and filled by `inodes.rs` and `listing.rs`, kept up to date by all changes of the table.
//! Invariants: the cache has the table's rows, since it is filled under the table's lock, and
//! updated under the same lock held for writing; nothing is allocated before the first use.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Change;
use crate::rows::inode::flags::HAS_XATTRS;
use crate::rows::{FileType, InodeRow, keys};

/// Number of cached attributes.
const PLACES: usize = 64;
/// Number of cached files without extended attributes: more than a program takes from a listing
/// before it asks for them. 16 KiB.
const BARE: usize = 2048;

/// The attributes of an inode, and the charge for its rows.
#[derive(Clone, Copy, Debug)]
struct Noted {
    number: u64,
    row: InodeRow,
    charge: u64,
}

type CachedRow = Mutex<Option<Noted>>;

/// The caches; see the head of this file.
#[derive(Debug, Default)]
pub(super) struct Recent {
    places: OnceLock<Box<[CachedRow]>>,
    /// Numbers of inodes without extended attributes, in slots by number; 0: none. Allocated with
    /// the first long listing.
    bare: OnceLock<Box<[AtomicU64]>>,
}

impl Recent {
    /// Returns the attributes of an inode, if they are cached.
    pub(super) fn get(&self, number: u64) -> Option<InodeRow> {
        self.noted(number).map(|noted| noted.row)
    }

    /// Returns the attributes of an inode and the charge for its rows, if they are cached.
    pub(super) fn get_charged(&self, number: u64) -> Option<(InodeRow, u64)> {
        self.noted(number).map(|noted| (noted.row, noted.charge))
    }

    fn noted(&self, number: u64) -> Option<Noted> {
        let noted = *self.place(number)?.lock();
        noted.filter(|noted| noted.number == number)
    }

    /// Caches a row of the table, while its lock is held.
    pub(super) fn note(&self, number: u64, (row, charge): &(InodeRow, u64)) {
        let places = self.places.get_or_init(|| (0..PLACES).map(|_| Mutex::default()).collect());
        if let Some(place) = places.get(number as usize % PLACES) {
            *place.lock() = Some(Noted { number, row: *row, charge: *charge });
        }
        if let Some(place) = self.bare_place(number) {
            keep_bare(place, number, row);
        }
    }

    /// Caches which of these inodes have no extended attributes in the table, while its lock is
    /// held.
    pub(super) fn note_bare<'a>(&self, rows: impl Iterator<Item = (u64, &'a InodeRow)>) {
        let places = self.bare.get_or_init(|| (0..BARE).map(|_| AtomicU64::new(0)).collect());
        for (number, row) in rows {
            if let Some(place) = places.get(number as usize % BARE) {
                keep_bare(place, number, row);
            }
        }
    }

    /// Whether an inode is known to have no extended attributes.
    pub(super) fn is_bare(&self, number: u64) -> bool {
        number != 0 && self.bare_place(number).is_some_and(|place| place.load(Ordering::Acquire) == number)
    }

    fn bare_place(&self, number: u64) -> Option<&AtomicU64> {
        self.bare.get()?.get(number as usize % BARE)
    }

    /// Follows changes of the table; after a failed change the affected entries are dropped. The
    /// table's lock is held for writing.
    pub(super) fn follow(&self, changes: &[Change<'_>], failed: bool) {
        for change in changes {
            let Some((&keys::INODE, number)) = change.key.split_first() else { continue };
            let Some(number) = number.first_chunk::<8>().map(|number| u64::from_be_bytes(*number)) else { continue };
            let row = change.row.filter(|_| !failed).and_then(|row| InodeRow::decode_charged(row).ok());
            if row.is_none()
                && let Some(place) = self.bare_place(number)
            {
                forget(place, number);
            }
            match (row, self.place(number)) {
                (Some(row), _) => self.note(number, &row),
                (None, Some(place)) => {
                    let mut place = place.lock();
                    *place = place.filter(|noted| noted.number != number);
                }
                (None, None) => {}
            }
        }
    }

    /// Drops everything: the table may have changed in any way.
    pub(super) fn clear(&self) {
        self.places.get().into_iter().flatten().for_each(|place| *place.lock() = None);
        self.bare.get().into_iter().flatten().for_each(|place| place.store(0, Ordering::Release));
    }

    fn place(&self, number: u64) -> Option<&CachedRow> {
        self.places.get()?.get(number as usize % PLACES)
    }
}

/// Symbolic links are not cached: no program asks for their attributes.
fn keep_bare(place: &AtomicU64, number: u64, row: &InodeRow) {
    if row.flags & HAS_XATTRS == 0 && row.file_type() != Some(FileType::Symlink) {
        place.store(number, Ordering::Release);
    } else {
        forget(place, number);
    }
}

/// Drops a number from its slot, if it is there.
fn forget(place: &AtomicU64, number: u64) {
    // A number of another inode stays.
    let _ = place.compare_exchange(number, 0, Ordering::AcqRel, Ordering::Acquire);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Batch;
    use crate::rows::{FileType, Timestamp};

    #[test]
    fn what_is_kept_follows_the_table() {
        let recent = Recent::default();
        let row = |links| InodeRow { links, ..InodeRow::new(FileType::Regular, 0o644, Timestamp::default()) };
        assert_eq!(recent.get(5), None);
        recent.note(5, &(row(1), 0));
        assert_eq!((recent.get(5), recent.get(5 + PLACES as u64)), (Some(row(1)), None));
        let mut batch = Batch::default();
        batch.put(&keys::inode(5), row(2).encode());
        batch.put(&keys::inode(6), row(3).encode());
        batch.remove(&keys::orphan(7));
        recent.follow(&batch.uncharged(), false);
        assert_eq!((recent.get(5), recent.get(6)), (Some(row(2)), Some(row(3))));
        recent.follow(&batch.uncharged(), true);
        assert_eq!((recent.get(5), recent.get(6)), (None, None), "what failed is asked of the table");
        recent.follow(&batch.uncharged(), false);
        let mut gone = Batch::default();
        gone.remove(&keys::inode(5 + PLACES as u64));
        recent.follow(&gone.uncharged(), false);
        assert_eq!(recent.get(5), Some(row(2)), "another one with the same place");
        gone.remove(&keys::inode(5));
        recent.follow(&gone.uncharged(), false);
        assert_eq!(recent.get(5), None);
        recent.clear();
        assert_eq!(recent.get(6), None);
    }

    #[test]
    fn who_has_no_extended_attributes_is_known_after_a_long_listing() {
        let recent = Recent::default();
        let row = |flags| InodeRow { flags, ..InodeRow::new(FileType::Regular, 0o644, Timestamp::default()) };
        let link = InodeRow::new(FileType::Symlink, 0o777, Timestamp::default());
        recent.note(5, &(row(0), 0));
        assert!(!recent.is_bare(5) && !recent.is_bare(0), "nothing is kept before there is a listing");
        recent.note_bare([(5, &row(0)), (6, &row(HAS_XATTRS)), (7, &link)].into_iter());
        assert_eq!(
            [0, 5, 6, 7, 5 + BARE as u64].map(|number| recent.is_bare(number)),
            [false, true, false, false, false]
        );
        recent.note(8, &(row(0), 0));
        assert!(recent.is_bare(8));
        let put = |number, flags| {
            let mut batch = Batch::default();
            batch.put(&keys::inode(number), row(flags).encode());
            batch
        };
        recent.follow(&put(5, 0).uncharged(), false);
        recent.follow(&put(5 + BARE as u64, HAS_XATTRS).uncharged(), false);
        assert!(recent.is_bare(5), "another one with the same place");
        recent.follow(&put(5, HAS_XATTRS).uncharged(), false);
        assert!(!recent.is_bare(5) && recent.is_bare(8));
        recent.follow(&put(8, 0).uncharged(), true);
        assert!(!recent.is_bare(8), "what failed is asked of the table");
        recent.follow(&put(5, 0).uncharged(), false);
        assert!(recent.is_bare(5));
        let mut gone = Batch::default();
        gone.remove(&keys::inode(5));
        recent.follow(&gone.uncharged(), false);
        assert!(!recent.is_bare(5));
        recent.follow(&put(9, 0).uncharged(), false);
        recent.clear();
        assert!(!recent.is_bare(9));
    }
}
