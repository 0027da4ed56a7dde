//! The layer `cage`: what lies below cannot outgrow a limit.
//!
//! Made by the stack builder; steered by the program (resize, status, end). The files stay plain
//! files below. How it works:
//! * the ledger (`ledger.rs`) holds what is used, by whom, and what may be; every operation
//!   that can allocate asks it first and fails with ENOSPC or EDQUOT where it does not fit
//!   (`books.rs`, `layer.rs`, `names.rs`, `file.rs`);
//! * what a file costs is a rule of its attributes (`charge_rule.rs`), so that the books can
//!   be compared with what is there;
//! * a door may collect appends as long as there is room for all that it can hold back
//!   (`writeback.rs`);
//! * the accounts survive the end of the process, in order or not (`saved.rs`), and are
//!   counted anew in the background (`recount.rs`, `background.rs`);
//! * changes that others make below are booked when they are noticed (`outside.rs`), or
//!   counted before the books are used (`resting.rs`).
//!
//! Order of locks: the turn of counting, names, then files by identity, then the writeback gate,
//! then the ledger and the saved accounts. A door is never waited for under a lock of a file; it is
//! only told (`recall`), which does not wait.
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
mod writeback;

pub use charge_rule::{ChargeRule, Storage};
pub(crate) use make_room::check_globs;
pub use options::{
    CageError, CageOptions, CageReport, DirReport, Dropped, ROTATED, RecountReport, UserReport, WhenFull, Writes,
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

/// The layer. Dropping it is [`Cage::shut_down`].
pub struct Cage {
    shared: Arc<CageShared>,
    /// How the accounts were found.
    start: &'static str,
    /// Resizing is one after the other; ended is for good.
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

/// What all parts of a cage share; each file adds the operations that it is about.
struct CageShared {
    below: Arc<dyn Layer>,
    name: String,
    root: FileId,
    rule: ChargeRule,
    /// Directories occupy blocks here, so that a new name may cost something.
    directories_cost: bool,
    policy: Policy,
    ledger: Ledger,
    inodes: Arc<Inodes>,
    dirs: LimitedDirs,
    saved: Option<Saved>,
    /// The sums rest on a count.
    exact: AtomicBool,
    locks: CageLocks,
    doors: Doors,
    disk: DiskRoom,
    dropping: Dropping,
    clock: Arc<dyn Clock>,
    told_full: ToldFull,
    /// Files that are open for writing, by the address of the file that the lowest layer made: what
    /// a copy's target is known by.
    written: Mutex<HashMap<usize, Arc<Inode>>>,
    background: Background,
    resting: Resting,
}

/// Others are told that it is full now and then, however often that is met.
struct ToldFull {
    /// When that was last, by the cage's clock.
    at: Mutex<Option<Duration>>,
    tell: Tell,
}

/// What its owner has decided.
struct Policy {
    writes: Writes,
    when_full: WhenFull,
}

/// The directories that have a limit of their own.
struct LimitedDirs {
    /// Their paths, by group.
    paths: Vec<Vec<u8>>,
    /// The directories themselves as far as they exist.
    found: RwLock<HashMap<FileId, usize>>,
}

/// See the order of locks in the file's head.
#[derive(Default)]
struct CageLocks {
    /// Held for reading while something is made, from before it is booked in advance until it is
    /// booked as what it is; for writing where nothing may be under way. Comes before all other
    /// locks.
    naming: RwLock<()>,
    names: NameLocks,
    /// Held for reading while something is noted and booked; for writing where the books must stand
    /// still.
    changing: RwLock<()>,
}

/// Users who are reported though they have no limit.
const USERS_SHOWN: usize = 10;

impl Cage {
    /// Puts a cage over a layer. Where nothing is known of what is there, this counts it first.
    ///
    /// # Errors
    /// Limits that contradict each other, globs that are not understood, a root that cannot be
    /// read, a state directory that cannot be used.
    pub fn new(below: Arc<dyn Layer>, options: CageOptions, context: &Context) -> Result<Arc<Cage>, CageError> {
        let (shared, start) = start::start(below, options, context)?;
        Ok(Arc::new(Cage { shared, start, ended: Mutex::new(false) }))
    }

    /// Puts other limits in place, of whatever use: where more is used than allowed, nothing grows
    /// until enough is removed. Takes effect at once.
    ///
    /// # Errors
    /// Another number of directories with a limit: those are agreed upon when the cage is made.
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
                    // What is held back was let in under the old limit.
                    writeback.forgive();
                    writeback.recall(&gate);
                }
            }
        }
        drop(ended);
        Ok(())
    }

    /// The limits in place.
    pub fn limits(&self) -> Limits {
        self.shared.ledger.limits()
    }

    /// How writes are taken: `collected` or `through`.
    pub(crate) fn writes(&self) -> &'static str {
        if self.shared.writes_back() { "collected" } else { "through" }
    }

    /// The state.
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

    /// Ends what the cage does by itself and saves the accounts. To be called when no door serves
    /// it any more; operations that come all the same are still booked. Once.
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
