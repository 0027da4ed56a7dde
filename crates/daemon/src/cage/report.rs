//! Report of a cage: the data of `nacre cage status` and of `nacre metrics`, the same for every engine.
//!
//! Reports of cages that a process of ours serves come over its control socket inside of [`crate::report::Report`];
//! [`super::find`] makes those of the kernel's engines. The JSON form is an interface for scripts: fields are
//! added, never renamed.

use serde::{Deserialize, Serialize};

/// Usage of one user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserReport {
    /// The user's name, or its number where it has none.
    pub user: String,
    /// The user's number.
    pub uid: u32,
    /// Bytes in the user's files.
    pub used: u64,
    /// Limit of the user's bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Usage of a directory that has a limit of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryReport {
    /// Path of the directory within the cage.
    pub path: String,
    /// Bytes below the directory.
    pub used: u64,
    /// Limit of the bytes below the directory.
    pub limit: u64,
}

/// Number of operations that were refused, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedReport {
    /// By the limit of bytes.
    pub size: u64,
    /// By the limit of inodes.
    pub inodes: u64,
    /// By the limit of a user.
    pub user: u64,
    /// By the limit of a directory.
    pub directory: u64,
}

impl RefusedReport {
    /// Returns the total.
    pub fn total(self) -> u64 {
        [self.size, self.inodes, self.user, self.directory].into_iter().fold(0, u64::saturating_add)
    }
}

/// Files and bytes that `drop-oldest` has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedReport {
    /// Files deleted as a whole.
    pub files: u64,
    /// Bytes of these files and of heads of files that were cut off.
    pub bytes: u64,
}

/// Write-back of appends by the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectingReport {
    /// The reason why there is no write-back, if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// Number of files open for write-back.
    pub files: u64,
    /// Number of appends that were reserved first.
    pub announced: u64,
    /// Number of reservations that were refused.
    pub refused: u64,
    /// Number of times that the permission for write-back was recalled.
    pub recalls: u64,
    /// Most dirty bytes that the kernel can hold in its page cache.
    pub most_held: u64,
}

/// Report of one cage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CageReport {
    /// The directory that is limited.
    pub directory: String,
    /// Mount point: the limit applies to writes through it.
    pub mountpoint: String,
    /// `fuse`, `loop` or `quota`.
    pub engine: String,
    /// Reason for this engine.
    #[serde(default)]
    pub engine_reason: String,
    /// How it works at this moment: `collected` (write-back), `announced` (reserved writes) or `through`
    /// (write-through); for a kernel engine, its parts.
    pub mode: String,
    /// Whether the limit is in force: a cage of a kernel engine may be recorded and not mounted.
    pub attached: bool,
    /// `deny` or `drop-oldest`.
    #[serde(default)]
    pub when_full: String,
    /// Limit of bytes; `None`: unlimited.
    pub limit: Option<u64>,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that still fit.
    pub free: u64,
    /// Limit of inodes.
    pub inode_limit: Option<u64>,
    /// Inodes in use; `None` where the engine does not report them.
    pub inodes: Option<u64>,
    /// Soft limit in bytes: exceeding it is reported.
    #[serde(default)]
    pub soft: Option<u64>,
    /// The users with the highest usage, in descending order; users with a limit are always among them.
    #[serde(default)]
    pub users: Vec<UserReport>,
    /// The directories that have a limit.
    #[serde(default)]
    pub directories: Vec<DirectoryReport>,
    /// Operations that were refused since the mount.
    #[serde(default)]
    pub refused: RefusedReport,
    /// Files that were removed to make room.
    #[serde(default)]
    pub dropped: DroppedReport,
    /// Write-back of appends, where this program serves the cage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collecting: Option<CollectingReport>,
    /// Whether the figures are right to the byte: `exact`, or the state of the recount.
    pub accounting: String,
    /// State of the accounts at the mount: `new`, `clean`, `crashed`, `lost`; empty where the kernel keeps them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub start: String,
    /// Number of full recounts since then.
    #[serde(default)]
    pub recounts: u64,
    /// Bytes by which the last recount corrected the usage.
    #[serde(default)]
    pub corrected: i64,
    /// Process that serves the cage; 0: none.
    pub pid: u32,
    /// User id of that process.
    pub uid: u32,
    /// Seconds since the mount; 0 where it is unknown.
    pub uptime: u64,
    /// Remarks for the user, sentences.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl CageReport {
    /// Returns the part of the report that everybody may read who can see the mount.
    #[must_use]
    pub fn for_all(self, mountpoint: &str) -> CageReport {
        CageReport {
            directory: mountpoint.to_owned(),
            engine_reason: String::new(),
            users: Vec::new(),
            directories: Vec::new(),
            notes: Vec::new(),
            ..self
        }
    }

    /// Returns the used part of the limit in percent, rounded up: 100 only where nothing is free.
    pub fn percent(&self) -> Option<u64> {
        let limit = self.limit?;
        if limit == 0 {
            return Some(100);
        }
        let exact = (u128::from(self.used) * 100).div_ceil(u128::from(limit));
        let percent = u64::try_from(exact).unwrap_or(u64::MAX);
        Some(if self.used < limit { percent.min(99) } else { percent })
    }
}
