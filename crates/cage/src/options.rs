//! Options and reports of a cage. Plain data.

use super::{
    charge_rule::Storage,
    ledger::{Limits, Refused},
};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// Default patterns for names of rotated logs.
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

/// Whether writes reach the cage one by one or by write-back.
pub use crate::settings::Writes;

/// Action when something does not fit.
pub use crate::settings::WhenFull;

/// Error of a call that exceeds a limit.
pub use crate::settings::LimitError;

/// Options of a cage.
#[derive(Clone, Debug)]
pub struct CageOptions {
    /// Limits; `dirs` by index of [`CageOptions::dirs`].
    pub limits: Limits,
    /// The directories that have a limit of their own, as paths below the root (`nginx`, `a/b`).
    pub dirs: Vec<Vec<u8>>,
    /// Write mode.
    pub writes: Writes,
    /// Action when something does not fit.
    pub when_full: WhenFull,
    /// Error of a call that exceeds the limit of the whole cage or of a directory.
    pub error: LimitError,
    /// Globs of files that are never removed or cut: names, or paths below the root.
    pub keep: Vec<String>,
    /// Globs of files that are removed first; empty means [`ROTATED`].
    pub rotated: Vec<String>,
    /// A command for `/bin/sh -c`, run when usage reaches the soft limit and when it has fallen
    /// below it again.
    pub on_soft: Option<String>,
    /// Name of this cage for the command and the log.
    pub name: String,
    /// Directory for the saved accounts; without it, all files are counted at each start.
    pub state: Option<PathBuf>,
    /// Allocation behaviour of the storage below.
    pub storage: Storage,
}

impl CageOptions {
    /// Default options with these limits, for unknown storage.
    pub fn new(limits: Limits) -> CageOptions {
        CageOptions {
            limits,
            dirs: Vec::new(),
            writes: Writes::default(),
            when_full: WhenFull::default(),
            error: LimitError::default(),
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

/// Usage of one user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserReport {
    /// User id.
    pub uid: u32,
    /// Bytes used.
    pub used: u64,
    /// Files of any kind.
    pub inodes: u64,
    /// Limit in bytes, if there is one.
    pub limit: Option<u64>,
}

/// Usage of a directory with a limit of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirReport {
    /// The path below the root; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Bytes used.
    pub used: u64,
    /// Files of any kind.
    pub inodes: u64,
    /// Limit in bytes.
    pub limit: u64,
}

/// Data removed to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    /// Whole files.
    pub files: u64,
    /// Files that lost their beginning.
    pub heads: u64,
    /// Bytes freed.
    pub bytes: u64,
}

/// State of the recounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecountReport {
    /// A recount is running.
    pub running: bool,
    /// Number of finished recounts.
    pub done: u64,
    /// Duration of the last recount, seconds.
    pub seconds: f64,
    /// Bytes by which the last recount corrected the usage (positive: the files use more than was
    /// booked).
    pub corrected: i64,
    /// A recount is due, since changes from outside can only be booked by one.
    pub due: bool,
}

/// The state of a cage, for people and programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CageReport {
    /// Name of the cage.
    pub name: String,
    /// Limit in bytes, if there is one.
    pub limit: Option<u64>,
    /// Bytes used, reservations included.
    pub used: u64,
    /// Bytes that still fit; `None` without a limit.
    pub free: Option<u64>,
    /// The soft limit, bytes.
    pub soft: Option<u64>,
    /// Use is above the soft limit.
    pub soft_exceeded: bool,
    /// Limit of files of any kind, if there is one.
    pub inode_limit: Option<u64>,
    /// Files of any kind that exist (the root is not counted).
    pub inodes: u64,
    /// All users who have a limit, and the ten greatest others, by usage.
    pub users: Vec<UserReport>,
    /// Directories that have a limit.
    pub dirs: Vec<DirReport>,
    /// Number of calls that failed, by limit.
    pub refused: Refused,
    /// Write mode: `collected` (write-back) or `through`.
    pub writes: String,
    /// Write-back without reservations is allowed at present.
    pub unannounced: bool,
    /// No dirty data exists at present that is not booked.
    pub settled: bool,
    /// Bytes that are kept free for dirty data of the front end.
    pub held: u64,
    /// Number of files that are open with write-back.
    pub collected_files: u64,
    /// Data removed to make room.
    pub dropped: Dropped,
    /// State of the recounts.
    pub recount: RecountReport,
    /// How the accounts were found at the start: `new`, `clean`, `crashed`, `lost`, or `counted`
    /// where none are saved.
    pub start: String,
    /// Number of clamps in the ledger, which are bugs in the bookkeeping; always 0.
    pub clamped: u64,
}
