//! What can be asked of a mounted union, and what it answers.

use crate::{
    failure::Failure,
    union::report::{
        BalanceReport, BranchReport, DrainReport, FindingReport, PathReport, TierRunReport, TieringReport,
    },
};
use nacre_union::BranchMode;
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf};

/// What can be asked of a mounted union.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnionRequest {
    /// Its branches.
    List,
    /// Where a path is, and what would become of it.
    Explain {
        /// Names from the union's top.
        path: Vec<u8>,
        /// What would be made is a directory.
        directory: bool,
    },
    /// A check.
    Check {
        /// Put right what is found.
        repair: bool,
    },
    /// Another branch.
    Add {
        /// As it is written.
        branch: Vec<u8>,
        /// Where.
        place: BranchPosition,
    },
    /// A branch less.
    Remove {
        /// Its path.
        branch: Vec<u8>,
        /// Also while files on it are open.
        force: bool,
    },
    /// Other attributes.
    Modify {
        /// The path of the branch.
        branch: Vec<u8>,
        /// As they are written.
        mode: String,
    },
    /// Another word for where new files go.
    Word {
        /// As it is written after `-o`.
        word: String,
    },
    /// Move one file to another branch.
    Move {
        /// Names from the union's top.
        path: Vec<u8>,
        /// To a higher one.
        up: bool,
    },
    /// How tiering is.
    Tier,
    /// Other rules for it.
    TierRules {
        /// All of them, as they are written.
        rules: String,
    },
    /// A look at all tiers now.
    TierRun {
        /// Only say what would be done.
        dry: bool,
    },
    /// Move everything off a branch.
    Drain {
        /// Its path.
        branch: Vec<u8>,
    },
    /// Even out how full branches are.
    Balance {
        /// Hundredths of a percent.
        spread: u32,
        /// Smaller files stay.
        min_size: u64,
        /// Larger files stay.
        max_size: Option<u64>,
        /// Patterns: only these go.
        include: Vec<String>,
        /// Patterns: these stay.
        exclude: Vec<String>,
    },
    /// Stop that.
    StopBalance,
    /// How far it is.
    BalanceStatus,
    /// Stop a drain.
    StopDrain {
        /// The path of the branch.
        branch: Vec<u8>,
    },
    /// How far that is.
    DrainStatus,
}

impl UnionRequest {
    /// Whether it changes what the mount consists of.
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

/// What a mounted union answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnionAnswer {
    /// Its branches.
    Branches(Vec<BranchReport>),
    /// Where a path is.
    Path(Box<PathReport>),
    /// What a check has found.
    Findings(Vec<FindingReport>),
    /// How far a drain is.
    Drain(DrainReport),
    /// How far a balance is.
    Balance(BalanceReport),
    /// A file has been moved, with so many bytes.
    Moved(u64),
    /// How tiering is.
    Tier(Box<TieringReport>),
    /// What a look at all tiers has come to.
    TierRun(Box<TierRunReport>),
    /// It is done, and there is something to say about it.
    Changed {
        /// Sentences for the user.
        warnings: Vec<String>,
    },
}

/// A branch by its path as a command names it.
pub fn named(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

/// Attributes as a command writes them.
///
/// # Errors
/// Attributes that are not understood.
pub fn mode(text: &str) -> Result<BranchMode, Failure> {
    BranchMode::parse(text).map_err(|error| Failure::usage(error.to_string()))
}

/// Where a branch is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BranchPosition {
    /// Above all others.
    Top,
    /// Below all others.
    Bottom,
    /// There, counted from the top from 1 on.
    At(usize),
}
