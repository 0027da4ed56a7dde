//! What a cage tells about itself: the data of `nacre cage status` and of `nacre metrics`, the same
//! for every engine.
//!
//! Those that a process of ours serves come over its control socket inside of
//! [`crate::report::Report`]; those of the kernel are asked for by [`super::find`]. The JSON form
//! is an interface for scripts: fields are added, never renamed.

use serde::{Deserialize, Serialize};

/// The use of one user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserReport {
    /// The user's name, or its number where it has none.
    pub user: String,
    /// Its number.
    pub uid: u32,
    /// Bytes in its files.
    pub used: u64,
    /// How many it may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// The use of a directory that has a limit of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryReport {
    /// Its path within the cage.
    pub path: String,
    /// Bytes below it.
    pub used: u64,
    /// How many there may be.
    pub limit: u64,
}

/// Operations that did not fit.
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
    /// All of them.
    pub fn total(self) -> u64 {
        [self.size, self.inodes, self.user, self.directory].into_iter().fold(0, u64::saturating_add)
    }
}

/// What `drop-oldest` has taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedReport {
    /// Files deleted as a whole.
    pub files: u64,
    /// Bytes, of these and of heads of files.
    pub bytes: u64,
}

/// How appends are collected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectingReport {
    /// Why they are not, where they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// Files open for it.
    pub files: u64,
    /// Appends that were asked for first.
    pub announced: u64,
    /// Of these, refused.
    pub refused: u64,
    /// How often the permission was recalled.
    pub recalls: u64,
    /// The most that the kernel can hold back, bytes.
    pub most_held: u64,
}

/// Everything about one cage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CageReport {
    /// The directory that is limited.
    pub directory: String,
    /// Where the limit holds: what has to be written to.
    pub mountpoint: String,
    /// `fuse`, `loop` or `quota`.
    pub engine: String,
    /// Why this engine.
    #[serde(default)]
    pub engine_reason: String,
    /// How it works at this moment: `collected`, `announced` or `through`, or what the kernel's
    /// engine consists of.
    pub mode: String,
    /// Whether it is in force: a kernel's cage may be known and not mounted.
    pub attached: bool,
    /// `deny` or `drop-oldest`.
    #[serde(default)]
    pub when_full: String,
    /// Bytes that it may hold; none: any number.
    pub limit: Option<u64>,
    /// Bytes that it holds.
    pub used: u64,
    /// Bytes that still fit.
    pub free: u64,
    /// Inodes that it may hold.
    pub inode_limit: Option<u64>,
    /// Inodes that it holds; none where the engine does not tell.
    pub inodes: Option<u64>,
    /// The threshold that is reported, bytes.
    #[serde(default)]
    pub soft: Option<u64>,
    /// The users who use most, the greatest first; those who have a limit are always among them.
    #[serde(default)]
    pub users: Vec<UserReport>,
    /// The directories that have a limit.
    #[serde(default)]
    pub directories: Vec<DirectoryReport>,
    /// What did not fit since it was mounted.
    #[serde(default)]
    pub refused: RefusedReport,
    /// What was taken away to make room.
    #[serde(default)]
    pub dropped: DroppedReport,
    /// How appends are collected, where this program serves the cage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collecting: Option<CollectingReport>,
    /// Whether the figures are right to the byte: `exact`, or what is being done about it.
    pub accounting: String,
    /// How the accounts were found when it was mounted: `new`, `clean`, `crashed`, `lost`; empty
    /// where the kernel keeps them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub start: String,
    /// How often everything was counted since then.
    #[serde(default)]
    pub recounts: u64,
    /// Bytes by which the last one corrected the use.
    #[serde(default)]
    pub corrected: i64,
    /// The process that serves it; 0: none.
    pub pid: u32,
    /// Whose it is.
    pub uid: u32,
    /// Seconds since it was mounted; 0 where nobody remembers.
    pub uptime: u64,
    /// Things to know about it, sentences.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl CageReport {
    /// What everybody may know who sees the mount that it is part of.
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

    /// How much of the limit is used, percent, rounded up: 100 only where nothing is free.
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
