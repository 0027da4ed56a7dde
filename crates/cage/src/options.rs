//! What a cage is asked for, and what it says about itself. Plain data.

use super::{
    charge_rule::Storage,
    ledger::{Limits, Refused},
};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// Names that are taken for rotated logs where none are given.
pub const ROTATED: [&str; 10] = [
    "*.gz",
    "*.xz",
    "*.zst",
    "*.bz2",
    "*.old",
    "*.[0-9]",
    "*.[0-9][0-9]",
    "*.[0-9][0-9][0-9]",
    "*[-.][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]",
    "*@*-*-*.journal",
];

/// Which writes reach the cage one by one.
pub use crate::settings::Writes;

/// What is done when something does not fit.
pub use crate::settings::WhenFull;

/// How a cage is set up.
#[derive(Clone, Debug)]
pub struct CageOptions {
    /// What may be used; `dirs` by index of [`CageOptions::dirs`].
    pub limits: Limits,
    /// The directories that have a limit of their own, as paths below the root (`nginx`, `a/b`).
    pub dirs: Vec<Vec<u8>>,
    /// How writes are taken.
    pub writes: Writes,
    /// What to do when something does not fit.
    pub when_full: WhenFull,
    /// Globs of what is never removed or cut: names, or paths below the root.
    pub keep: Vec<String>,
    /// Globs of what is removed first; empty means [`ROTATED`].
    pub rotated: Vec<String>,
    /// A command for `/bin/sh -c`, run when use reaches the soft limit and when it has fallen below
    /// it again.
    pub on_soft: Option<String>,
    /// What the command and the log call this cage.
    pub name: String,
    /// Where the accounts are saved; without it, all is counted at each start.
    pub state: Option<PathBuf>,
    /// How the storage below allocates.
    pub storage: Storage,
}

impl CageOptions {
    /// The defaults, with these limits, for storage that nothing is known of.
    pub fn new(limits: Limits) -> CageOptions {
        CageOptions {
            limits,
            dirs: Vec::new(),
            writes: Writes::default(),
            when_full: WhenFull::default(),
            keep: Vec::new(),
            rotated: Vec::new(),
            on_soft: None,
            name: String::new(),
            state: None,
            storage: Storage::Lagging,
        }
    }
}

/// Why a cage cannot be made or changed: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CageError(pub(crate) String);

impl fmt::Display for CageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CageError {}

/// One user's part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserReport {
    /// User id.
    pub uid: u32,
    /// Bytes used.
    pub used: u64,
    /// Files of any kind.
    pub inodes: u64,
    /// Bytes that may be used.
    pub limit: Option<u64>,
}

/// The part of a directory that has a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirReport {
    /// The path below the root; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Bytes used.
    pub used: u64,
    /// Files of any kind.
    pub inodes: u64,
    /// Bytes that may be used.
    pub limit: u64,
}

/// What was removed to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    /// Whole files.
    pub files: u64,
    /// Files that lost their beginning.
    pub heads: u64,
    /// Bytes.
    pub bytes: u64,
}

/// How far counting is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecountReport {
    /// One is running.
    pub running: bool,
    /// How many have ended.
    pub done: u64,
    /// Seconds that the last one took.
    pub seconds: f64,
    /// Bytes by which the last one corrected the use (positive: more was there than was known).
    pub corrected: i64,
    /// Files were changed from outside in a way that only a recount can book; one is due.
    pub due: bool,
}

/// The state of a cage, for people and programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CageReport {
    /// What the cage is called.
    pub name: String,
    /// Bytes that may be used.
    pub limit: Option<u64>,
    /// Bytes used, reservations included.
    pub used: u64,
    /// Bytes that still fit; `None` without a limit.
    pub free: Option<u64>,
    /// The soft limit, bytes.
    pub soft: Option<u64>,
    /// Use is above the soft limit.
    pub soft_exceeded: bool,
    /// Files of any kind that may exist.
    pub inode_limit: Option<u64>,
    /// Files of any kind that exist (the root is not counted).
    pub inodes: u64,
    /// Everybody who has a limit, and the ten greatest others, by use.
    pub users: Vec<UserReport>,
    /// Directories that have a limit.
    pub dirs: Vec<DirReport>,
    /// Calls that failed at a limit.
    pub refused: Refused,
    /// How writes are taken: `collected` or `through`.
    pub writes: String,
    /// Collected writes pass without a question at present.
    pub unannounced: bool,
    /// Nothing is held back at present that the accounts do not hold.
    pub settled: bool,
    /// Bytes that are kept free for what the door may hold back.
    pub held: u64,
    /// Files that are open for collected writes.
    pub collected_files: u64,
    /// What was removed to make room.
    pub dropped: Dropped,
    /// Counting.
    pub recount: RecountReport,
    /// How the accounts were found at the start: `new`, `clean`, `crashed`, `lost`, or `counted`
    /// where none are saved.
    pub start: String,
    /// Faults in the bookkeeping that were caught; always 0.
    pub clamped: u64,
}
