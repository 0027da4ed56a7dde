//! Reports of unions: the data of their commands, for the control socket and as JSON. Fields are added, never
//! renamed.

use serde::{Deserialize, Serialize};

/// Report of one branch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchReport {
    /// Mount point of the union.
    pub mountpoint: String,
    /// Position of the branch from the top, starting at 1; 0 where it is missing.
    pub place: usize,
    /// Directory of the branch.
    pub branch: String,
    /// Mode of the branch (`rw`, `ro+wh`).
    pub mode: String,
    /// `active`, `draining`, or `missing`.
    pub state: String,
    /// Bytes of its file system.
    pub size: Option<u64>,
    /// Bytes in use there.
    pub used: Option<u64>,
    /// Bytes that are still available.
    pub free: Option<u64>,
    /// Number of open files on the branch.
    pub open_files: u64,
}

impl BranchReport {
    /// Returns the used part in percent.
    pub fn percent(&self) -> Option<u64> {
        let (used, free) = (self.used?, self.free?);
        Some(used.saturating_mul(100).div_ceil(used.saturating_add(free).max(1)))
    }
}

/// Entry of a branch for a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceReport {
    /// Directory of the branch.
    pub branch: String,
    /// `shown`, `merged`, `hidden` or `whiteout`.
    pub state: String,
}

/// Location of a path, and the branch that an operation on it would use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// The path, as requested.
    pub path: String,
    /// The branch of the visible file; `None` where there is no file.
    pub branch: Option<String>,
    /// Path of the visible file on that branch.
    pub file: Option<String>,
    /// The file is pinned to its branch.
    #[serde(default)]
    pub pinned: bool,
    /// All branches with an entry for the path, topmost first.
    pub here: Vec<PlaceReport>,
    /// Policy for a change or a new file (`create=mfs`).
    pub rule: String,
    /// The branch that it chooses; `None` where the operation fails.
    pub chosen: Option<String>,
    /// Why the policy chooses this branch, or why the operation fails.
    pub because: String,
    /// The other branches, each with the reason.
    pub refused: Vec<(String, String)>,
}

/// A problem found by a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingReport {
    /// Directory of the branch with the problem.
    pub branch: String,
    /// Path on the branch.
    pub path: String,
    /// `leftover`, `useless-whiteout` or `too-many-links`.
    pub problem: String,
    /// Explanation of the problem.
    pub text: String,
    /// The problem has been repaired.
    pub repaired: bool,
}

/// Progress of a drain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReport {
    /// Directory of the branch that is drained.
    pub branch: String,
    /// The drain is not running any more.
    pub ended: bool,
    /// Why the drain ended early.
    pub failed: Option<String>,
    /// Files that have been moved.
    pub moved: u64,
    /// Bytes of the moved files.
    pub bytes: u64,
    /// Number of files that could not be moved.
    pub stays: u64,
    /// The first files that could not be moved: path and reason.
    pub left: Vec<(String, String)>,
}

/// Progress of a balance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalanceReport {
    /// The balance is not running any more.
    pub ended: bool,
    /// Why the balance ended early.
    pub failed: Option<String>,
    /// Files that have been moved.
    pub moved: u64,
    /// Bytes of the moved files.
    pub bytes: u64,
    /// Bytes that have to be moved, as an estimate.
    pub expected: u64,
    /// Difference in usage of the fullest and the emptiest branch, in hundredths of a percent.
    pub spread: u32,
    /// Number of files that could not be moved.
    pub stays: u64,
    /// The first files that could not be moved: path and reason.
    pub left: Vec<(String, String)>,
}

/// State of a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierBranchReport {
    /// Directory of the tier's branch.
    pub branch: String,
    /// Used bytes of its file system.
    pub used: u64,
    /// Size of its file system in bytes.
    pub size: u64,
}

/// State of tiering.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TieringReport {
    /// The rules of tiering, as the user wrote them.
    pub rules: String,
    /// The tiers, fastest first.
    pub tiers: Vec<TierBranchReport>,
    /// Files are being moved.
    pub busy: bool,
    /// Files moved up since the mount.
    pub moved_up: u64,
    /// Files moved down.
    pub moved_down: u64,
    /// Bytes of the moved files.
    pub bytes: u64,
    /// Seconds since the last run.
    pub last_run: Option<u64>,
}

/// A file that is moved between tiers, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierMoveReport {
    /// Path of the file.
    pub path: String,
    /// Branch that the file is moved from.
    pub from: String,
    /// Branch that the file is moved to.
    pub to: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Why the file is moved.
    pub why: String,
}

/// Result of a tiering run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierRunReport {
    /// Moves that were planned.
    pub planned: Vec<TierMoveReport>,
    /// Number of files moved.
    pub moved: u64,
    /// Bytes of the moved files.
    pub bytes: u64,
    /// Files that could not be moved: path and reason.
    pub left: Vec<(String, String)>,
}
