//! Requests to a mounted union, and its answers.

use crate::{
    failure::Failure,
    union::report::{
        BalanceReport, BranchReport, DrainReport, FindingReport, PathReport, TierRunReport, TieringReport,
    },
};
use nacre_union::BranchMode;
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf};

/// Request to a mounted union.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnionRequest {
    /// Lists its branches.
    List,
    /// Explains where a path is, and which branch an operation on it would use.
    Explain {
        /// Path relative to the union's root.
        path: Vec<u8>,
        /// A new entry would be a directory.
        directory: bool,
    },
    /// Checks the branches.
    Check {
        /// Repair the problems that are found.
        repair: bool,
    },
    /// Adds a branch.
    Add {
        /// The branch, as the user wrote it.
        branch: Vec<u8>,
        /// Position of the new branch.
        place: BranchPosition,
    },
    /// Removes a branch.
    Remove {
        /// Path of the branch.
        branch: Vec<u8>,
        /// Remove it also while files on it are open.
        force: bool,
    },
    /// Changes the mode of a branch.
    Modify {
        /// The path of the branch.
        branch: Vec<u8>,
        /// The mode, as the user wrote it.
        mode: String,
    },
    /// Changes an option of the policies.
    Word {
        /// The option, as written after `-o`.
        word: String,
    },
    /// Move one file to another branch.
    Move {
        /// Path relative to the union's root.
        path: Vec<u8>,
        /// To a higher branch.
        up: bool,
    },
    /// Asks for the state of tiering.
    Tier,
    /// Replaces the rules of tiering.
    TierRules {
        /// All rules, as the user wrote them.
        rules: String,
    },
    /// Starts a tiering run.
    TierRun {
        /// Only report what would be done.
        dry: bool,
    },
    /// Moves everything off a branch.
    Drain {
        /// Path of the branch.
        branch: Vec<u8>,
    },
    /// Balances the usage of branches.
    Balance {
        /// Allowed difference in usage, in hundredths of a percent.
        spread: u32,
        /// Smaller files stay.
        min_size: u64,
        /// Larger files stay.
        max_size: Option<u64>,
        /// Patterns of files to move.
        include: Vec<String>,
        /// Patterns of files that stay.
        exclude: Vec<String>,
    },
    /// Stops the balance.
    StopBalance,
    /// Asks for the progress of the balance.
    BalanceStatus,
    /// Stops a drain.
    StopDrain {
        /// The path of the branch.
        branch: Vec<u8>,
    },
    /// Asks for the progress of the drain.
    DrainStatus,
}

impl UnionRequest {
    /// Whether the request changes the layers of the mount.
    pub fn changes_layers(&self) -> bool {
        matches!(
            self,
            UnionRequest::Add { .. }
                | UnionRequest::Remove { .. }
                | UnionRequest::Modify { .. }
                | UnionRequest::Word { .. }
                | UnionRequest::TierRules { .. }
        )
    }
}

/// Answer of a mounted union.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnionAnswer {
    /// Branches of the union.
    Branches(Vec<BranchReport>),
    /// Location of a path.
    Path(Box<PathReport>),
    /// Problems that a check has found.
    Findings(Vec<FindingReport>),
    /// Progress of a drain.
    Drain(DrainReport),
    /// Progress of a balance.
    Balance(BalanceReport),
    /// A file of this many bytes has been moved.
    Moved(u64),
    /// State of tiering.
    Tier(Box<TieringReport>),
    /// Result of a tiering run.
    TierRun(Box<TierRunReport>),
    /// The change is made, possibly with warnings.
    Changed {
        /// Sentences for the user.
        warnings: Vec<String>,
    },
}

/// Converts a branch's path in a request.
pub fn named(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

/// Parses the mode of a branch.
///
/// # Errors
/// It is not understood.
pub fn mode(text: &str) -> Result<BranchMode, Failure> {
    BranchMode::parse(text).map_err(|error| Failure::usage(error.to_string()))
}

/// Position at which a branch is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BranchPosition {
    /// Above all others.
    Top,
    /// Below all others.
    Bottom,
    /// At this position, counted from the top, starting at 1.
    At(usize),
}
