//! The layer `cage`: a hard limit for everything that is stored in the layer below.
//!
//! Made by the stack builder; controlled by the program (resize, status, end). The files stay plain
//! files in the layer below. How it works:
//! * the ledger (`ledger.rs`) holds usage, per account, and limits; every operation that can
//!   allocate space charges it first and fails with ENOSPC or EDQUOT where the charge does not fit
//!   (`books.rs`, `layer.rs`, `names.rs`, `file.rs`);
//! * a file's cost is a function of its attributes (`charge_rule.rs`), so that the accounts can be
//!   compared with the files;
//! * a FUSE front end may use write-back caching for appends as long as there is room for all dirty
//!   data that it can hold (`writeback.rs`);
//! * the accounts survive the end of the process, clean or not (`saved.rs`), and are recounted in
//!   the background (`recount.rs`, `background.rs`);
//! * changes by other processes in the layer below are booked when they are noticed (`outside.rs`),
//!   or recounted before the accounts are used (`resting.rs`).
//!
//! Order of locks: the recount lock (`Resting::counting`), names, then files by identity, then
//! the write-back lock, then the ledger and the saved accounts. No wait for a FUSE front end
//! happens under a file's lock; the front end is only notified (`recall`), which does not wait.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod allocated;
mod background;
mod books;
mod charge_rule;
mod disk;
mod doors;
mod file;
mod inodes;
mod layer;
pub mod ledger;
mod make_room;
mod names;
mod options;
mod outside;
pub mod recount;
mod resting;
pub mod saved;
pub mod settings;
mod start;
mod sync;
#[cfg(test)]
mod waiting_tests;
mod writeback;

pub use charge_rule::{ChargeRule, Storage};
pub(crate) use make_room::check_globs;
pub use options::{
    CageError, CageOptions, CageReport, DirReport, Dropped, LimitError, ROTATED, RecountReport, UserReport, WhenFull,
    Writes,
};

use background::Background;
use disk::DiskRoom;
use doors::Doors;
use inodes::{Inode, Inodes};
use ledger::{Ledger, Limits};
use make_room::Dropping;
use nacre_layers::{
    clock::Clock,
    context::{Context, Tell},
};
use nacre_vfs::{FileId, Layer};
use names::NameLocks;
use parking_lot::{Mutex, RwLock};
use resting::Resting;
use saved::Saved;
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// The layer itself. Dropping it is [`Cage::shut_down`].
pub struct Cage {
    shared: Arc<CageShared>,
    /// How the accounts were found at the start: a word for status, like `clean` or `crashed`.
    start: &'static str,
    /// Serializes resizes; true once the cage has been shut down.
    ended: Mutex<bool>,
}

impl fmt::Debug for Cage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cage")
            .field("name", &self.shared.name)
            .field("ledger", &self.shared.ledger)
            .finish_non_exhaustive()
    }
}

/// State that all parts of a cage share; each file adds the operations of its subject.
struct CageShared {
    below: Arc<dyn Layer>,
    name: String,
    root: FileId,
    rule: ChargeRule,
    /// Directories occupy blocks in this storage, so that a new name may cost something.
    directories_cost: bool,
    policy: Policy,
    ledger: Ledger,
    inodes: Arc<Inodes>,
    dirs: LimitedDirs,
    saved: Option<Saved>,
    /// The sums are based on a complete count.
    exact: AtomicBool,
    locks: CageLocks,
    doors: Doors,
    disk: DiskRoom,
    dropping: Dropping,
    clock: Arc<dyn Clock>,
    told_full: ToldFull,
    /// Files that are open for writing, by the address of the lowest layer's open file: identifies
    /// the target of a copy.
    written: Mutex<HashMap<usize, Arc<Inode>>>,
    background: Background,
    resting: Resting,
}

/// Limits how often the event "cage full" is reported, however often a limit is met.
struct ToldFull {
    /// Time of the last report, by the cage's clock.
    at: Mutex<Option<Duration>>,
    tell: Tell,
}

/// Options chosen by the user.
struct Policy {
    writes: Writes,
    when_full: WhenFull,
    error: LimitError,
}

/// The directories that have a limit of their own.
struct LimitedDirs {
    /// Their paths, by group.
    paths: Vec<Vec<u8>>,
    /// Identities of the directories that exist, with their group.
    found: RwLock<HashMap<FileId, usize>>,
}

/// Locks of the cage; their order is in the file's head.
#[derive(Default)]
struct CageLocks {
    /// Held for reading while a file is created or moved, from the reservation until it is booked
    /// by its attributes; held for writing by checkpoints and recounts, which need no such
    /// operation in flight. Comes before all other locks.
    naming: RwLock<()>,
    names: NameLocks,
    /// Held for reading while a change is recorded in the saved accounts and booked; held for
    /// writing where the accounts must not change.
    changing: RwLock<()>,
}

/// Maximum number of users without a limit in a report.
const USERS_SHOWN: usize = 10;

impl Cage {
    /// Puts a cage over a layer. Without usable saved accounts, all files are counted first.
    ///
    /// # Errors
    /// Limits that contradict each other, globs that are not understood, a root that cannot be
    /// read, a state directory that cannot be used.
    pub fn new(below: Arc<dyn Layer>, options: CageOptions, context: &Context) -> Result<Arc<Cage>, CageError> {
        let (shared, start) = start::start(below, options, context)?;
        Ok(Arc::new(Cage { shared, start, ended: Mutex::new(false) }))
    }

    /// Replaces the limits, whatever the usage: where more is used than allowed, nothing grows
    /// until enough is removed. Takes effect at once.
    ///
    /// # Errors
    /// Another number of directories with a limit: their number is fixed when the cage is made.
    pub fn resize(&self, limits: Limits) -> Result<(), CageError> {
        let ended = self.ended.lock();
        if limits.dirs.len() != self.shared.dirs.paths.len() {
            return Err(CageError(
                "directories with a limit of their own cannot be added or removed while mounted; unmount and mount again".to_owned(),
            ));
        }
        let shared = &self.shared;
        match shared.doors.writeback.get() {
            None => shared.ledger.set_limits(limits),
            Some(writeback) => {
                let gate = writeback.gate();
                shared.ledger.set_limits(limits);
                let within = writeback.opens_unasked() && shared.ledger.has_limits_within();
                if within || shared.writeback_room() < writeback.held() {
                    // The dirty data held now was accepted under the old limit.
                    writeback.forgive();
                    writeback.recall(&gate);
                }
            }
        }
        drop(ended);
        Ok(())
    }

    /// The current limits.
    pub fn limits(&self) -> Limits {
        self.shared.ledger.limits()
    }

    /// Write mode: `collected` (write-back) or `through`.
    pub(crate) fn writes(&self) -> &'static str {
        if self.shared.writes_back() { "collected" } else { "through" }
    }

    /// State of the cage: usage, limits, refusals, write-back and recounts.
    pub fn report(&self) -> CageReport {
        let shared = &self.shared;
        shared.attend();
        let totals = shared.ledger.totals();
        let limits = &totals.limits;
        let mut users: Vec<UserReport> = totals
            .sums
            .users
            .iter()
            .map(|(&uid, sum)| UserReport {
                uid,
                used: sum.bytes,
                inodes: sum.inodes,
                limit: limits.users.get(&uid).copied(),
            })
            .collect();
        for (&uid, &limit) in &limits.users {
            if !totals.sums.users.contains_key(&uid) {
                users.push(UserReport { uid, used: 0, inodes: 0, limit: Some(limit) });
            }
        }
        users.sort_by_key(|user| (std::cmp::Reverse(user.used), user.uid));
        let mut shown = 0;
        users.retain(|user| {
            shown += usize::from(user.limit.is_none());
            user.limit.is_some() || shown <= USERS_SHOWN
        });
        let sum = |group: usize| totals.sums.dirs.get(&group).copied().unwrap_or_default();
        let dirs = shared.dirs.paths.iter().zip(&limits.dirs).enumerate().map(|(group, (path, &limit))| DirReport {
            path: String::from_utf8_lossy(path).into_owned(),
            used: sum(group).bytes,
            inodes: sum(group).inodes,
            limit,
        });
        let writeback = shared.doors.writeback.get();
        CageReport {
            name: shared.name.clone(),
            limit: limits.bytes,
            used: totals.sums.whole.bytes,
            free: totals.free(),
            soft: limits.soft,
            soft_exceeded: totals.soft_exceeded,
            inode_limit: limits.inodes,
            inodes: totals.sums.whole.inodes,
            users,
            dirs: dirs.collect(),
            refused: totals.refused,
            writes: self.writes().to_owned(),
            unannounced: writeback.is_some_and(|writeback| writeback.phase() == writeback::Phase::Free),
            settled: writeback.is_none_or(|writeback| writeback.holding() == 0),
            held: writeback.map_or(0, |writeback| writeback.holding()),
            collected_files: writeback.map_or(0, |writeback| writeback.files() as u64),
            dropped: shared.dropping.report(),
            recount: shared.background.report(),
            start: self.start.to_owned(),
            clamped: totals.clamped,
        }
    }

    /// Ends the background work and saves the accounts. To be called when no FUSE front end serves
    /// the cage any more; operations that arrive all the same are still booked. Takes effect once.
    pub fn shut_down(&self) {
        let mut ended = self.ended.lock();
        if std::mem::replace(&mut *ended, true) {
            return;
        }
        if let Some(writeback) = self.shared.doors.writeback.get() {
            writeback.stop();
        }
        self.shared.background.stop();
        self.shared.close_books();
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        self.shut_down();
    }
}
