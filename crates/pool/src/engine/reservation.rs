//! Reservations of space: each operation reserves what it may write before it is accepted, so that
//! accepted writes always find room.
//!
//! ```text
//!  an operation   admit: reserved in the accounts of its dataset and all above it, and in the store
//!  a frame        charge: the reservation becomes what the frame is charged, until its txg is settled
//!  rows           dirtied: the nodes of the tree that a commit will write
//!  a commit       settle: the reservations of its txg become the dataset's usage, at the same moment
//! ```
//!
//! `judge` refuses an operation, in this order: a quota of its dataset, or of one above it, is
//! exceeded (EDQUOT); the pool has no space besides what is reserved for others (ENOSPC).
//!
//! Callers: files of datasets through [`Admission`]; commits; administration, which gets the
//! accounts ([`QuotaTree`]) from here.
//!
//! Invariant: the lock here is the last one in the lock order; nothing is waited for under it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use super::{Pool, Storage};
use crate::error::PoolError;
use crate::files::{Admission, FileError, Overwrite};
use crate::pointer::Txg;
use crate::space::{AccountError, Purpose, QuotaTree, Shortage, UsageChange};

/// Growth of rows with an operation, in addition to what is reserved for it: a few rows, and a node
/// that is split. Bytes.
const ROWS: u64 = 4096;
/// Space is short below this fraction (1/n) of the pool, or of what a dataset may use.
const SHORT_SHARE: u64 = 10;

/// Makes room, if a commit can.
type Relief = Box<dyn Fn() -> Result<(), PoolError> + Send + Sync>;

/// Space that operations have reserved in a pool, in addition to the usage of its datasets.
pub(super) struct Reservations {
    storage: Arc<dyn Storage>,
    books: Mutex<Books>,
    relief: OnceLock<Relief>,
    /// Everything is admitted: a replay in memory takes no space.
    unlimited: AtomicBool,
}

struct Books {
    quotas: QuotaTree,
    /// Reservations of the open txgs, by txg and dataset.
    due: BTreeMap<(Txg, u64), Due>,
    /// Bytes that are reserved and not written to the store yet.
    outstanding: u64,
}

/// Reservations of a dataset in a txg.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    promised: u64,
    outstanding: u64,
}

impl std::fmt::Debug for Reservations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservations").finish_non_exhaustive()
    }
}

impl Reservations {
    pub(super) fn new(storage: Arc<dyn Storage>, quotas: QuotaTree) -> Self {
        let books = Books { quotas, due: BTreeMap::new(), outstanding: 0 };
        Self { storage, books: Mutex::new(books), relief: OnceLock::new(), unlimited: AtomicBool::new(false) }
    }

    /// Admits everything from now on: nothing will be written.
    pub(super) fn admit_everything(&self) {
        self.unlimited.store(true, Ordering::Relaxed);
    }

    fn is_unlimited(&self) -> bool {
        self.unlimited.load(Ordering::Relaxed)
    }

    /// Locks the accounts.
    pub(super) fn quota_tree(&self) -> MappedMutexGuard<'_, QuotaTree> {
        MutexGuard::map(self.books.lock(), |books| &mut books.quotas)
    }

    /// Sets the function that makes room by a commit, called when space is short.
    pub(super) fn set_relief(&self, relief: impl Fn() -> Result<(), PoolError> + Send + Sync + 'static) {
        // Set once, when the pool begins to run by itself.
        let _ = self.relief.set(Box::new(relief));
    }

    /// Turns the reservations of a dataset up to a txg into this change of its usage.
    pub(super) fn settle(&self, dataset: u64, txg: Txg, change: UsageChange) -> Result<(), PoolError> {
        let mut books = self.books.lock();
        let due = books.take_due(dataset, txg);
        books.outstanding = books.outstanding.saturating_sub(due.outstanding);
        books.quotas.settle(dataset, due.promised, change)
    }

    /// Measures how much space there really is: after a commit, and when a pool is opened.
    pub(super) fn measure(&self) {
        let room = self.storage.room(Purpose::Write);
        let mut books = self.books.lock();
        // Writes of open txgs are in the store and not in the accounts yet.
        let written =
            books.due.values().map(|due| due.promised.saturating_sub(due.outstanding)).fold(0, u64::saturating_add);
        books.quotas.set_room(room.saturating_add(written));
    }

    /// Drops the reservations of a destroyed dataset.
    pub(super) fn forget(&self, dataset: u64) {
        let mut books = self.books.lock();
        let due = books.take_due(dataset, Txg(u64::MAX));
        books.outstanding = books.outstanding.saturating_sub(due.outstanding);
    }

    /// Bytes that are reserved and not written to the store yet.
    pub(super) fn outstanding(&self) -> u64 {
        self.books.lock().outstanding
    }

    /// Bytes that may still be written to a dataset at this moment.
    pub(super) fn room(&self, dataset: u64) -> Result<u64, PoolError> {
        let physical = self.storage.room(Purpose::Write);
        let books = self.books.lock();
        Ok(books.quotas.room(dataset)?.min(physical.saturating_sub(books.outstanding)))
    }

    fn judge(&self, books: &Books, dataset: u64, bytes: u64, purpose: Purpose) -> Result<(), FileError> {
        if bytes == 0 || self.is_unlimited() {
            return Ok(());
        }
        let bytes = bytes.saturating_add(ROWS);
        books.quotas.admits(dataset, bytes, purpose).map_err(refusal)?;
        let full = self.storage.room(purpose) < books.outstanding.saturating_add(bytes);
        if full { Err(PoolError::NoSpace.into()) } else { Ok(()) }
    }
}

impl Books {
    /// Whether a commit would change the usage or the reservations of a dataset or its descendants.
    fn is_active(&self, dataset: u64) -> Result<bool, PoolError> {
        for (_, of) in self.due.keys() {
            // A dataset that was destroyed meanwhile has nothing to free.
            if self.quotas.ancestors(*of).is_ok_and(|above| above.contains(&dataset)) {
                return Ok(true);
            }
        }
        self.quotas.has_promises(dataset)
    }

    fn take_due(&mut self, dataset: u64, through: Txg) -> Due {
        let mut sum = Due::default();
        self.due.retain(|(txg, of), due| {
            let taken = *of == dataset && *txg <= through;
            if taken {
                sum.promised = sum.promised.saturating_add(due.promised);
                sum.outstanding = sum.outstanding.saturating_add(due.outstanding);
            }
            !taken
        });
        sum
    }
}

impl Pool {
    /// From now on a write that finds no room waits for a commit, which may free some, before it is
    /// refused.
    pub fn make_room_by_commits(self: &Arc<Self>) {
        let pool = Arc::downgrade(self);
        self.reservations.set_relief(move || pool.upgrade().map_or(Ok(()), |pool| pool.commit().map(drop)));
    }

    /// Bytes that may be written to a dataset at this moment, reservations of others excluded:
    /// within its quotas and reservations, those of its ancestors, and the part of the pool that
    /// ordinary writes may use. Takes no lock that a commit holds.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset.
    pub fn room(&self, id: u64) -> Result<u64, PoolError> {
        self.reservations.room(id)
    }
}

/// The pool's error for a change that the accounts refuse.
pub(super) fn refusal(error: AccountError<Shortage>) -> PoolError {
    error.pool_error(|shortage| match shortage {
        Shortage::Quota(dataset) | Shortage::Refquota(dataset) => PoolError::Quota { dataset },
        Shortage::Pool => PoolError::NoSpace,
    })
}

impl Admission for Reservations {
    fn admit(&self, dataset: u64, bytes: u64, purpose: Option<Purpose>) -> Result<(), FileError> {
        let mut books = self.books.lock();
        match purpose {
            Some(purpose) => self.judge(&books, dataset, bytes, purpose)?,
            None if self.is_unlimited() => {}
            None if self.storage.room(Purpose::Destroy) < books.outstanding.saturating_add(bytes) => {
                return Err(PoolError::NoSpace.into());
            }
            None => {}
        }
        books.quotas.promise(dataset, bytes)?;
        books.outstanding = books.outstanding.saturating_add(bytes);
        Ok(())
    }

    fn admit_replacing(&self, dataset: u64, overwrite: &Overwrite) -> Result<(), FileError> {
        let Overwrite { bytes, growth, longer } = *overwrite;
        let mut books = self.books.lock();
        self.judge(&books, dataset, longer, Purpose::Write)?;
        match books.quotas.admits(dataset, growth, Purpose::Write).map_err(refusal) {
            // Whether the pool has room for both versions until the next commit is checked below.
            Ok(()) | Err(PoolError::NoSpace) => {}
            Err(error) => return Err(error.into()),
        }
        if self.storage.room(Purpose::Replace) < books.outstanding.saturating_add(bytes).saturating_add(ROWS) {
            return Err(PoolError::NoSpace.into());
        }
        books.quotas.promise(dataset, bytes)?;
        books.outstanding = books.outstanding.saturating_add(bytes);
        Ok(())
    }

    fn check(&self, dataset: u64, bytes: u64, purpose: Purpose) -> Result<(), FileError> {
        self.judge(&self.books.lock(), dataset, bytes, purpose)
    }

    fn charge(&self, dataset: u64, txg: Txg, promised: u64, charged: u64) {
        let mut books = self.books.lock();
        books.outstanding = books.outstanding.saturating_sub(promised);
        let done = if charged >= promised {
            books.quotas.promise(dataset, charged - promised)
        } else {
            books.quotas.release(dataset, promised - charged)
        };
        // A dataset that is being destroyed has no account any more.
        if done.is_ok() && charged > 0 {
            let due = books.due.entry((txg, dataset)).or_default();
            due.promised = due.promised.saturating_add(charged);
        }
    }

    fn dirtied(&self, dataset: u64, txg: Txg, bytes: u64) {
        let mut books = self.books.lock();
        if books.quotas.promise(dataset, bytes).is_ok() {
            books.outstanding = books.outstanding.saturating_add(bytes);
            let due = books.due.entry((txg, dataset)).or_default();
            due.promised = due.promised.saturating_add(bytes);
            due.outstanding = due.outstanding.saturating_add(bytes);
        }
    }

    fn relieve(&self, dataset: Option<u64>, freed: bool) -> Result<bool, PoolError> {
        let Some(relief) = self.relief.get() else { return Ok(false) };
        {
            let books = self.books.lock();
            let may_help = match dataset {
                None => !books.due.is_empty() || books.outstanding > 0,
                Some(dataset) => books.is_active(dataset)?,
            };
            if !freed && !may_help {
                return Ok(false);
            }
        }
        relief()?;
        Ok(true)
    }

    fn room_before_cleaning(&self) -> u64 {
        self.storage.room_before_cleaning()
    }

    fn room(&self, dataset: u64) -> u64 {
        Self::room(self, dataset).unwrap_or(0)
    }

    fn is_short(&self, dataset: u64) -> bool {
        let physical = self.storage.room(Purpose::Write);
        if physical < self.storage.size() / SHORT_SHARE {
            return true;
        }
        let books = self.books.lock();
        let (Ok(room), Ok(used)) = (books.quotas.room(dataset), books.quotas.expected(dataset)) else { return false };
        room < used.saturating_add(room) / SHORT_SHARE
    }
}
