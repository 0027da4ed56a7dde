//! The arithmetic of a cage: what is used, by whom, and what still fits. No files, no clock, no
//! policy.
//!
//! A refusal is made here: [`Ledger::charge`] names the limit that stands in the way ([`Full`]), and
//! [`Full::errno`] is the error number that the caller sees.
//!
//! Called by the cage for every change of what a file costs, by the recount and by the saved
//! accounting. Everything is behind one short mutex; only the room that is left can be asked
//! without it. Invariants:
//! * a charge is made in the whole cage, the user's account and the group's account together, or
//!   nowhere;
//! * [`Ledger::charge`], [`Ledger::charge_up_to`] and [`Ledger::transfer`] never bring an account
//!   above its limit (they may find it there: limits are lowered under load, and [`Ledger::force`]
//!   books what is on disk already);
//! * an account never wraps: what would go below zero or above `u64::MAX` stops there, is counted,
//!   and is logged once.

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

/// What may be used. `None`, and a user who is not named, is unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of the whole cage.
    pub bytes: Option<u64>,
    /// Files of any kind in the whole cage.
    pub inodes: Option<u64>,
    /// Bytes of the whole cage from which on a warning is due (see [`Ledger::on_soft`]).
    pub soft: Option<u64>,
    /// Bytes by user id.
    pub users: BTreeMap<u32, u64>,
    /// Bytes by group index.
    pub dirs: Vec<u64>,
}

/// Whose account a file burdens, besides the whole cage's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// User id of the owner.
    pub uid: u32,
    /// Index of the per-directory limit that the file lies under; `None` under none.
    pub group: Option<usize>,
}

/// The limit that stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Full {
    /// Bytes of the whole cage.
    Whole,
    /// Files of the whole cage.
    Inodes,
    /// Bytes of the user.
    User,
    /// Bytes of the directory.
    Dir,
}

impl Full {
    /// What the call that met the limit fails with: EDQUOT at a user's limit, ENOSPC at the others
    /// (as project quotas have it).
    pub const fn errno(self) -> Errno {
        match self {
            Full::User => Errno::EDQUOT,
            Full::Whole | Full::Inodes | Full::Dir => Errno::ENOSPC,
        }
    }
}

/// What one account holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// Bytes.
    pub bytes: u64,
    /// Files of any kind.
    pub inodes: u64,
}

/// What all accounts hold: what is saved, and what a recount finds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    /// The whole cage.
    pub whole: Sum,
    /// By user id; users who own nothing are left out.
    pub users: BTreeMap<u32, Sum>,
    /// By group index; groups that hold nothing may be left out.
    pub dirs: BTreeMap<usize, Sum>,
}

/// How often a limit stood in the way of a call that failed for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// At the bytes of the whole cage.
    pub bytes: u64,
    /// At its number of files.
    pub inodes: u64,
    /// At a user's limit.
    pub user: u64,
    /// At a directory's limit.
    pub dir: u64,
}

/// Everything that the ledger knows, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// What is used.
    pub sums: Sums,
    /// What may be.
    pub limits: Limits,
    /// What was refused since the ledger was made.
    pub refused: Refused,
    /// Whether use is above the soft limit (with the distance of [`Ledger::on_soft`]).
    pub soft_exceeded: bool,
    /// How often an account would have gone below zero or above `u64::MAX`; anything but 0 is a
    /// fault in the bookkeeping.
    pub clamped: u64,
}

impl Totals {
    /// Bytes that still fit into the whole cage; `None` without a limit.
    pub fn free(&self) -> Option<u64> {
        self.limits.bytes.map(|limit| limit.saturating_sub(self.sums.whole.bytes))
    }
}

/// Told of each crossing of the soft limit: true upwards, false downwards.
pub type SoftHook = Box<dyn Fn(bool) + Send + Sync>;

struct Watcher {
    hook: Option<SoftHook>,
    told: bool,
}

/// The ledger.
pub struct Ledger {
    books: Mutex<Books>,
    /// Bytes that fit into the whole cage, as the books had it last.
    room: AtomicU64,
    watcher: Mutex<Watcher>,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ledger").field(&self.totals()).finish()
    }
}

impl Ledger {
    /// A ledger in which nothing is used.
    pub fn new(limits: Limits) -> Ledger {
        let books = Books::new(limits);
        let room = AtomicU64::new(books.room());
        Ledger { books: Mutex::new(books), room, watcher: Mutex::new(Watcher { hook: None, told: false }) }
    }

    /// Charges all accounts concerned, or none. Charging nothing always succeeds, even above a
    /// limit; so does charging files only, where only bytes are short.
    ///
    /// # Errors
    /// The limit in the way, in the order whole, files, user, directory. It is not counted as
    /// refused: see [`Ledger::refused`].
    pub fn charge(&self, owner: Owner, bytes: u64, inodes: u64) -> Result<(), Full> {
        self.change(|books| books.charge(owner, Amount { bytes, inodes }))
    }

    /// Charges as much of `bytes` as fits: all, or the greatest multiple of `unit` (0 counts as 1).
    /// Answers what was charged and, where that is not all, the limit that was in the way.
    pub fn charge_up_to(&self, owner: Owner, bytes: u64, unit: u64) -> (u64, Option<Full>) {
        self.change(|books| books.charge_up_to(owner, bytes, unit.max(1)))
    }

    /// Takes a charge back.
    pub fn release(&self, owner: Owner, bytes: u64, inodes: u64) {
        self.change(|books| books.release(owner, Amount { bytes, inodes }));
    }

    /// Charges what is on disk already: may exceed every limit.
    pub fn force(&self, owner: Owner, bytes: u64, inodes: u64) {
        self.change(|books| books.force(owner, Amount { bytes, inodes }));
    }

    /// Replaces a charge of `was` bytes by one of `is` bytes that is a fact on disk: forces or
    /// releases the difference.
    pub fn correct(&self, owner: Owner, was: u64, is: u64) {
        if is >= was {
            self.force(owner, is - was, 0);
        } else {
            self.release(owner, was - is, 0);
        }
    }

    /// Moves a charge from one owner to another, if it fits there; the whole cage holds the same as
    /// before. Accounts that both owners share are left alone.
    ///
    /// # Errors
    /// User or Dir: nothing was moved.
    pub fn transfer(&self, from: Owner, to: Owner, bytes: u64, inodes: u64) -> Result<(), Full> {
        self.change(|books| books.transfer(from, to, Amount { bytes, inodes }))
    }

    /// Moves a charge of a file that has changed hands already: may exceed every limit.
    pub fn force_transfer(&self, from: Owner, to: Owner, bytes: u64, inodes: u64) {
        self.change(|books| books.force_transfer(from, to, Amount { bytes, inodes }));
    }

    /// Bytes that still fit into the whole cage; `u64::MAX` without a limit. Takes no lock: a
    /// moment old where others charge.
    pub fn room(&self) -> u64 {
        self.room.load(Ordering::Acquire)
    }

    /// Bytes that still fit for `owner`, over all the limits that concern it.
    pub fn room_of(&self, owner: Owner) -> u64 {
        self.books.lock().room_of(owner).0
    }

    /// Puts other limits in place. Below what is used: nothing more fits until use has fallen
    /// below.
    pub fn set_limits(&self, limits: Limits) {
        self.change(|books| books.set_limits(limits));
    }

    /// The limits in place.
    pub fn limits(&self) -> Limits {
        self.books.lock().limits().clone()
    }

    /// Whether users or directories have limits of their own. Room is kept free in the whole cage
    /// only: below these, each write is booked when it happens.
    pub fn has_limits_within(&self) -> bool {
        let books = self.books.lock();
        let limits = books.limits();
        !limits.users.is_empty() || !limits.dirs.is_empty()
    }

    /// Counts one call that failed at this limit.
    pub fn refused(&self, full: Full) {
        self.books.lock().refused(full);
    }

    /// Has `hook` told when use reaches the soft limit, and when it has fallen below it again by a
    /// twentieth (use that moves about the limit must not start a command with every write). If use
    /// is above already, the hook is told at once. One call at a time, up and down in turn, in the
    /// thread that made the change and outside the ledger's lock: it must be short (wake a thread)
    /// and must not change the ledger; it may ask it.
    pub fn on_soft(&self, hook: impl Fn(bool) + Send + Sync + 'static) {
        *self.watcher.lock() = Watcher { hook: Some(Box::new(hook)), told: false };
        self.tell_soft();
    }

    /// Everything, at one moment.
    pub fn totals(&self) -> Totals {
        self.books.lock().totals()
    }

    /// What all accounts hold, at one moment.
    pub fn sums(&self) -> Sums {
        self.books.lock().sums()
    }

    /// Puts other sums in place of all accounts: what was saved, or what a recount found.
    pub fn replace(&self, sums: &Sums) {
        self.change(|books| books.replace(sums));
    }

    /// Lifts each account to at least what `sums` say: what is known to be there, when there may be
    /// more.
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

    /// Tells the hook what it has not been told yet. Whoever comes second finds it told: crossings
    /// that undo each other meanwhile are one.
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
