//! What unions tell: the data of their commands, as it goes over the control socket and into JSON.
//! Fields are added, never renamed.

use serde::{Deserialize, Serialize};

/// One branch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchReport {
    /// Where the union is mounted.
    pub mountpoint: String,
    /// Its place from the top, from 1 on; 0 where it is missing.
    pub place: usize,
    /// What it consists of: its directory.
    pub branch: String,
    /// What may be done with it (`rw`, `ro+wh`).
    pub mode: String,
    /// `active`, `draining`, or `missing`.
    pub state: String,
    /// Bytes of its file system.
    pub size: Option<u64>,
    /// Bytes in use there.
    pub used: Option<u64>,
    /// Bytes that may be used still.
    pub free: Option<u64>,
    /// Open files on it.
    pub open_files: u64,
}

impl BranchReport {
    /// How much of it is used, percent.
    pub fn percent(&self) -> Option<u64> {
        let (used, free) = (self.used?, self.free?);
        Some(used.saturating_mul(100).div_ceil(used.saturating_add(free).max(1)))
    }
}

/// What a branch has under a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceReport {
    /// The branch.
    pub branch: String,
    /// `shown`, `merged`, `hidden` or `whiteout`.
    pub state: String,
}

/// Where a path is, and what would become of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// The path, as it was asked for.
    pub path: String,
    /// The branch that the file shown is on; none where there is no file.
    pub branch: Option<String>,
    /// Its path there.
    pub file: Option<String>,
    /// It is pinned to its branch.
    #[serde(default)]
    pub pinned: bool,
    /// All branches that have something there, from the top.
    pub here: Vec<PlaceReport>,
    /// What decides about a change or a new file (`create=mfs`).
    pub rule: String,
    /// The branch that it chooses; none where the operation fails.
    pub chosen: Option<String>,
    /// Why.
    pub because: String,
    /// The other branches, each with the reason.
    pub refused: Vec<(String, String)>,
}

/// Something that a check has found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingReport {
    /// The branch.
    pub branch: String,
    /// Where on it.
    pub path: String,
    /// `leftover`, `useless-whiteout` or `too-many-links`.
    pub problem: String,
    /// What it means.
    pub text: String,
    /// It has been put right.
    pub repaired: bool,
}

/// How far a branch is drained.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReport {
    /// The branch.
    pub branch: String,
    /// Nothing is under way any more.
    pub ended: bool,
    /// Why it ended early.
    pub failed: Option<String>,
    /// Files that have been moved.
    pub moved: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How much could not be moved.
    pub stays: u64,
    /// The first of it: path and reason.
    pub left: Vec<(String, String)>,
}

/// How far a balance is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalanceReport {
    /// Nothing is under way any more.
    pub ended: bool,
    /// Why it ended early.
    pub failed: Option<String>,
    /// Files that have been moved.
    pub moved: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that have to be moved, as far as that can be told.
    pub expected: u64,
    /// By how much the use of the fullest and the emptiest branch differs, hundredths of a percent.
    pub spread: u32,
    /// How many files could not be moved.
    pub stays: u64,
    /// The first of them: path and reason.
    pub left: Vec<(String, String)>,
}

/// A tier now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierBranchReport {
    /// The branch.
    pub branch: String,
    /// Bytes used.
    pub used: u64,
    /// All bytes.
    pub size: u64,
}

/// Tiering now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TieringReport {
    /// What is to be where, as it is written.
    pub rules: String,
    /// The tiers, the fastest first.
    pub tiers: Vec<TierBranchReport>,
    /// Files are being moved.
    pub busy: bool,
    /// Files moved up since the mount.
    pub moved_up: u64,
    /// Files moved down.
    pub moved_down: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Seconds since files were last looked at.
    pub last_run: Option<u64>,
}

/// A file that is moved between tiers, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierMoveReport {
    /// Which.
    pub path: String,
    /// From which branch.
    pub from: String,
    /// To which branch.
    pub to: String,
    /// Bytes.
    pub bytes: u64,
    /// Why.
    pub why: String,
}

/// What a look at all tiers has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierRunReport {
    /// What was decided.
    pub planned: Vec<TierMoveReport>,
    /// Files moved.
    pub moved: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What stays although it should go: path and reason.
    pub left: Vec<(String, String)>,
}
