//! The arithmetic of a cage: usage, per account, and remaining room. No files, no clock, no policy.
//!
//! Refusals are made here: [`Ledger::charge`] names the limit that was exceeded ([`Full`]), and
//! [`Full::errno`] is the error number that the caller sees.
//!
//! Called by the cage for every change of a file's cost, by the recount and by the saved
//! accounting. All state is behind one short mutex; only the remaining room can be read without it.
//! Invariants:
//! * a charge is made in the whole cage, the user's account and the group's account together, or in
//!   none of them;
//! * [`Ledger::charge`], [`Ledger::charge_up_to`] and [`Ledger::transfer`] never bring an account
//!   above its limit (it may be above already: limits are lowered under load, and [`Ledger::force`]
//!   books data that is on disk already);
//! * an account never wraps: it is clamped at zero and at `u64::MAX`; each clamp is counted, and
//!   the first one is logged.

mod accounts;
#[cfg(test)]
mod tests;

use accounts::{Amount, Books};
use nacre_vfs::Errno;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// Limits of a cage. `None`, and a user who is not named, is unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of the whole cage.
    pub bytes: Option<u64>,
    /// Files of any kind in the whole cage.
    pub inodes: Option<u64>,
    /// Soft limit: bytes of the whole cage from which on a warning is due (see
    /// [`Ledger::on_soft`]).
    pub soft: Option<u64>,
    /// Limit in bytes by user id.
    pub users: BTreeMap<u32, u64>,
    /// Limit in bytes by group index.
    pub dirs: Vec<u64>,
}

/// The accounts that a file is charged to, in addition to the whole cage's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// User id of the owner.
    pub uid: u32,
    /// Index of the per-directory limit that the file lies under; `None` under none.
    pub group: Option<usize>,
}

/// The limit that refused a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Full {
    /// The byte limit of the whole cage.
    Whole,
    /// The file limit of the whole cage.
    Inodes,
    /// The byte limit of the user.
    User,
    /// The byte limit of the directory.
    Dir,
}

impl Full {
    /// Error number of the refused call: EDQUOT at a user's limit, `limit` at the others (by default ENOSPC, like project
    /// quotas).
    pub const fn errno(self, limit: Errno) -> Errno {
        match self {
            Full::User => Errno::EDQUOT,
            Full::Whole | Full::Inodes | Full::Dir => limit,
        }
    }
}

/// Usage of one account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// Bytes.
    pub bytes: u64,
    /// Files of any kind.
    pub inodes: u64,
}

/// Usage of all accounts: the saved state, and the result of a recount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    /// Usage of the whole cage.
    pub whole: Sum,
    /// Usage by user id; users without files are left out.
    pub users: BTreeMap<u32, Sum>,
    /// Usage by group index; groups without files may be left out.
    pub dirs: BTreeMap<usize, Sum>,
}

/// Number of calls that failed, by limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Refusals at the byte limit of the whole cage.
    pub bytes: u64,
    /// Refusals at its file limit.
    pub inodes: u64,
    /// Refusals at a user's limit.
    pub user: u64,
    /// Refusals at a directory's limit.
    pub dir: u64,
}

/// A consistent copy of the ledger's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Current usage.
    pub sums: Sums,
    /// Current limits.
    pub limits: Limits,
    /// Refusals since the ledger was made.
    pub refused: Refused,
    /// Whether usage is above the soft limit (with the hysteresis of [`Ledger::on_soft`]).
    pub soft_exceeded: bool,
    /// Number of clamps at zero or `u64::MAX`; anything but 0 is a bug in the bookkeeping.
    pub clamped: u64,
}

impl Totals {
    /// Bytes that still fit into the whole cage; `None` without a limit.
    pub fn free(&self) -> Option<u64> {
        self.limits.bytes.map(|limit| limit.saturating_sub(self.sums.whole.bytes))
    }
}

/// Callback for each crossing of the soft limit: true upwards, false downwards.
pub type SoftHook = Box<dyn Fn(bool) + Send + Sync>;

struct Watcher {
    hook: Option<SoftHook>,
    told: bool,
}

/// Accounts and limits of a cage behind one lock.
pub struct Ledger {
    books: Mutex<Books>,
    /// Bytes that fit into the whole cage, as of the last change.
    room: AtomicU64,
    watcher: Mutex<Watcher>,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ledger").field(&self.totals()).finish()
    }
}

impl Ledger {
    /// Creates a ledger without usage.
    pub fn new(limits: Limits) -> Ledger {
        let books = Books::new(limits);
        let room = AtomicU64::new(books.room());
        Ledger { books: Mutex::new(books), room, watcher: Mutex::new(Watcher { hook: None, told: false }) }
    }

    /// Charges all accounts concerned, or none. A charge of nothing always succeeds, even above a
    /// limit; so does a charge of files only, where only bytes are short.
    ///
    /// # Errors
    /// The exceeded limit, checked in the order whole, files, user, directory. It is not counted as
    /// refused: see [`Ledger::refused`].
    pub fn charge(&self, owner: Owner, bytes: u64, inodes: u64) -> Result<(), Full> {
        self.change(|books| books.charge(owner, Amount { bytes, inodes }))
    }

    /// Charges as much of `bytes` as fits: all, or the greatest multiple of `unit` (0 counts as 1).
    /// Returns the charged bytes and, where that is not all, the limit that was exceeded.
    pub fn charge_up_to(&self, owner: Owner, bytes: u64, unit: u64) -> (u64, Option<Full>) {
        self.change(|books| books.charge_up_to(owner, bytes, unit.max(1)))
    }

    /// Undoes a charge.
    pub fn release(&self, owner: Owner, bytes: u64, inodes: u64) {
        self.change(|books| books.release(owner, Amount { bytes, inodes }));
    }

    /// Charges data that is on disk already: may exceed every limit.
    pub fn force(&self, owner: Owner, bytes: u64, inodes: u64) {
        self.change(|books| books.force(owner, Amount { bytes, inodes }));
    }

    /// Changes a charge from `was` to `is` bytes to match the disk: forces or releases the
    /// difference.
    pub fn correct(&self, owner: Owner, was: u64, is: u64) {
        if is >= was {
            self.force(owner, is - was, 0);
        } else {
            self.release(owner, was - is, 0);
        }
    }

    /// Moves a charge from one owner to another, if it fits there; the whole cage's account stays
    /// the same. Accounts that both owners share are not touched.
    ///
    /// # Errors
    /// User or Dir: nothing was moved.
    pub fn transfer(&self, from: Owner, to: Owner, bytes: u64, inodes: u64) -> Result<(), Full> {
        self.change(|books| books.transfer(from, to, Amount { bytes, inodes }))
    }

    /// Moves the charge of a file whose owner has changed already: may exceed every limit.
    pub fn force_transfer(&self, from: Owner, to: Owner, bytes: u64, inodes: u64) {
        self.change(|books| books.force_transfer(from, to, Amount { bytes, inodes }));
    }

    /// Bytes that still fit into the whole cage; `u64::MAX` without a limit. Takes no lock, so a
    /// concurrent charge may be missing.
    pub fn room(&self) -> u64 {
        self.room.load(Ordering::Acquire)
    }

    /// Bytes that still fit for `owner`, over all the limits that concern it.
    pub fn room_of(&self, owner: Owner) -> u64 {
        self.books.lock().room_of(owner).0
    }

    /// Replaces the limits. Below the current usage, nothing fits until usage has fallen below.
    pub fn set_limits(&self, limits: Limits) {
        self.change(|books| books.set_limits(limits));
    }

    /// The current limits.
    pub fn limits(&self) -> Limits {
        self.books.lock().limits().clone()
    }

    /// Whether users or directories have limits of their own. Room for write-back is reserved in
    /// the whole cage only: under these limits, each write is booked when it happens.
    pub fn has_limits_within(&self) -> bool {
        let books = self.books.lock();
        let limits = books.limits();
        !limits.users.is_empty() || !limits.dirs.is_empty()
    }

    /// Counts one call that failed at this limit.
    pub fn refused(&self, full: Full) {
        self.books.lock().refused(full);
    }

    /// Registers a callback for the soft limit: called when usage reaches it, and when usage has
    /// fallen a twentieth below it (usage that moves about the limit must not start a command with
    /// every write). If usage is above already, it is called at once. Calls are serialized and
    /// alternate between up and down; they come from the thread that made the change, outside the
    /// ledger's lock. The callback must be short (wake a thread) and must not change the ledger; it
    /// may read it.
    pub fn on_soft(&self, hook: impl Fn(bool) + Send + Sync + 'static) {
        *self.watcher.lock() = Watcher { hook: Some(Box::new(hook)), told: false };
        self.tell_soft();
    }

    /// Everything, consistently.
    pub fn totals(&self) -> Totals {
        self.books.lock().totals()
    }

    /// Usage of all accounts, consistently.
    pub fn sums(&self) -> Sums {
        self.books.lock().sums()
    }

    /// Replaces the usage of all accounts by saved sums, or by the result of a recount.
    pub fn replace(&self, sums: &Sums) {
        self.change(|books| books.replace(sums));
    }

    /// Raises each account to at least `sums`: the part that an incomplete recount found.
    pub fn raise(&self, sums: &Sums) {
        self.change(|books| books.raise(sums));
    }

    fn change<T>(&self, change: impl FnOnce(&mut Books) -> T) -> T {
        let mut books = self.books.lock();
        let clamped = books.clamped();
        let result = change(&mut books);
        self.room.store(books.room(), Ordering::Release);
        let (crossed, clamps) = (books.note_soft(), books.clamped());
        drop(books);
        if clamped == 0 && clamps != 0 {
            tracing::error!(
                "a cage's account would have gone below zero or out of range; it was stopped there (logged once, counted further)"
            );
        }
        if crossed {
            self.tell_soft();
        }
        result
    }

    /// Calls the hook if its last notification is out of date. A second thread finds nothing to do:
    /// crossings that undo each other meanwhile are one.
    fn tell_soft(&self) {
        let mut watcher = self.watcher.lock();
        let above = self.books.lock().soft_exceeded();
        if watcher.told != above
            && let Some(hook) = &watcher.hook
        {
            hook(above);
            watcher.told = above;
        }
    }
}
