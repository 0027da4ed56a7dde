//! Placement policies: choose the branch for a new file or copy, as pure functions over a few figures of the
//! branches.
//!
//! If no branch takes a new file, the call fails with EROFS; if the branches that would take it have fewer than
//! `min_free` bytes free, with ENOSPC.
//!
//! Called wherever a new file is placed on a branch: creation, copy-up, link, rename. Names and rules are those
//! of aufs and mergerfs. Whatever the policy, the new file must be visible: a branch below the limit that a
//! whiteout or an opaque directory sets is never chosen. Invariants:
//! * the same function decides and explains ([`CreatePolicy::explain`]), so an explanation cannot differ from
//!   the decision;
//! * one operation writes to one branch: policies that create on several are refused by the parser.

mod grammar;
mod route;
mod select;
mod space;
#[cfg(test)]
mod tests;

pub use route::{Route, Routes, Target, Way};
pub use space::{Space, SpaceCache};

use crate::splitmix;
use nacre_vfs::{Errno, Result, Time};
use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The figures of a branch that policies use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchView {
    /// Whether new files may be created there.
    pub creates: bool,
    /// Whether files there may be changed.
    pub writable: bool,
    /// Whether the directory is there, as part of the union's directory.
    pub parent_exists: bool,
    /// How many components of the directory's path are there; set where [`CreatePolicy::needs_depth`].
    pub parent_depth: u32,
    /// When names in the directory last changed there; set where [`CreatePolicy::needs_times`].
    pub parent_changed: Time,
    /// Bytes free for ordinary users; set where [`CreatePolicy::needs_space`], or where `min_free` is not 0.
    pub free: u64,
    /// Bytes used, as `free`.
    pub used: u64,
    /// Size in bytes, as `free`.
    pub total: u64,
    /// No new files are created there while less is free, bytes; 0 for no limit.
    pub min_free: u64,
}

impl BranchView {
    /// Checks whether a new file may be created there now.
    ///
    /// # Errors
    /// EROFS, or ENOSPC where too little is free.
    fn admits(&self) -> Result<()> {
        if !self.creates {
            Err(Errno::EROFS)
        } else if self.free < self.min_free {
            Err(Errno::ENOSPC)
        } else {
            Ok(())
        }
    }
}

/// A file to place.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// All branches, from the top.
    pub branches: &'a [BranchView],
    /// The last branch on which it would be visible: that of the whiteout which hides the name, or where an
    /// opaque directory ends the merge.
    pub limit: usize,
    /// Whether it is a directory.
    pub directory: bool,
}

/// The branches among which a mergerfs policy chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All branches.
    Anywhere,
    /// Branches that have the directory (`ep...`).
    Existing,
    /// Branches that have most of the directory's path (`msp...`).
    MostSpecific,
}

/// The branch that a mergerfs policy prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// The highest (`ff`).
    First,
    /// Most free bytes; of equal ones the higher (`epmfs`, `mspmfs`).
    MostFree,
    /// Fewest free bytes (`lfs`).
    LeastFree,
    /// Fewest used bytes (`lus`).
    LeastUsed,
    /// The smallest part used (`lup`).
    LeastUsedShare,
    /// A random one (`rand`).
    Random,
    /// A random one, in proportion to free bytes (`pfrd`).
    RandomByFree,
    /// The one where names in the directory changed last (`newest`).
    Newest,
}

/// The policy for new files (`create=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CreatePolicy {
    /// The highest branch that has the directory; if that cannot be written, the next writable one above, and
    /// if there is none, the next below.
    #[default]
    TopDownParent,
    /// The highest with more than `low` bytes free; where there is none, as `MostFree`.
    TopDownMostFree {
        /// Bytes.
        low: u64,
        /// Validity of the figures.
        hold: Hold,
    },
    /// Round robin from the bottom up; directories do not advance it.
    RoundRobin,
    /// Most free bytes; of equal ones the lower.
    MostFree {
        /// Validity of the figures.
        hold: Hold,
    },
    /// As `MostFree`, but round robin once the best has less than `low` bytes free.
    MostFreeRoundRobin {
        /// Bytes.
        low: u64,
        /// Validity of the figures.
        hold: Hold,
    },
    /// Most free bytes among the branches that have the directory; of equal ones the upper. If none of them can
    /// be written, as `TopDownParent`.
    ParentMostFree {
        /// Validity of the figures.
        hold: Hold,
    },
    /// As `ParentMostFree`, but as `MostFreeRoundRobin` once it has less than `low` bytes free.
    ParentMostFreeRoundRobin {
        /// Bytes.
        low: u64,
        /// Validity of the figures.
        hold: Hold,
    },
    /// A policy of mergerfs.
    Pool(Reach, Preference),
}

/// How long figures of free space are reused, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold(pub u32);

impl Hold {
    /// aufs' default.
    pub const DEFAULT: Hold = Hold(30);
    /// The maximum.
    pub const MAX: u32 = 3600;

    /// As a duration.
    pub fn duration(self) -> Duration {
        Duration::from_secs(u64::from(self.0))
    }
}

/// The policy for copy-up: the destination of files that are changed and are on a read-only branch (`cpup=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyUpPolicy {
    /// The highest branch that has the directory; if no files may be created there, the next one above that
    /// takes them.
    #[default]
    TopDownParent,
    /// The next branch above that has the directory; if there is none, as `BottomUp`.
    BottomUpParent,
    /// The next branch above.
    BottomUp,
}

/// The state of policies: the round-robin counter, and the random generator.
#[derive(Debug)]
pub struct PolicyState {
    turn: AtomicU64,
    random: AtomicU64,
}

impl Default for PolicyState {
    #[expect(clippy::disallowed_methods, reason = "where users have not said which branch; tests take new")]
    fn default() -> PolicyState {
        PolicyState::new(RandomState::new().hash_one(0))
    }
}

/// The round-robin counter and the random number for one decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dice {
    pub(crate) turn: u64,
    pub(crate) random: u64,
}

impl PolicyState {
    /// Creates a state with a seed for the random generator.
    pub fn new(seed: u64) -> PolicyState {
        PolicyState { turn: AtomicU64::new(0), random: AtomicU64::new(seed) }
    }

    fn dice(&self, moves_on: bool) -> Dice {
        let state = self.random.fetch_add(if moves_on { splitmix::STEP } else { 0 }, Ordering::Relaxed);
        Dice { turn: self.turn.load(Ordering::Relaxed), random: splitmix::mix(state) }
    }

    fn take_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }
}

/// Why a branch was chosen, and why the others were not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The branch, or the error of the operation.
    pub chosen: Result<usize>,
    /// The reason.
    pub because: String,
    /// The other branches, from the top, each with the reason.
    pub refused: Vec<(usize, String)>,
}

impl Explanation {
    /// Formats the explanation for users: one line for the choice, one for each other branch. `names` are those
    /// of all branches.
    pub fn text(&self, names: &[String]) -> String {
        let name = |index: usize| names.get(index).map_or("?", String::as_str);
        let mut text = match self.chosen {
            Ok(index) => format!("{}: {}\n", name(index), self.because),
            Err(error) => format!("nowhere ({error}): {}\n", self.because),
        };
        for (index, why) in &self.refused {
            text.push_str(&format!("  not {}: {why}\n", name(*index)));
        }
        text
    }
}

/// Records the reasons of a decision; texts are made only if they are requested.
pub(crate) trait Notes {
    fn refuse(&mut self, branch: usize, why: impl FnOnce() -> String);
    fn because(&mut self, why: impl FnOnce() -> String);
}

struct Silent;

impl Notes for Silent {
    fn refuse(&mut self, _branch: usize, _why: impl FnOnce() -> String) {}
    fn because(&mut self, _why: impl FnOnce() -> String) {}
}

#[derive(Default)]
struct Written {
    refused: std::collections::BTreeMap<usize, String>,
    because: String,
}

impl Notes for Written {
    fn refuse(&mut self, branch: usize, why: impl FnOnce() -> String) {
        // The first reason was decisive.
        self.refused.entry(branch).or_insert_with(why);
    }
    fn because(&mut self, why: impl FnOnce() -> String) {
        // The last rule decided.
        self.because = why();
    }
}

impl Written {
    fn explanation(mut self, chosen: Result<usize>, branches: usize) -> Explanation {
        for other in 0..branches {
            self.refused.entry(other).or_insert_with(|| match chosen {
                Ok(_) => "the policy takes another one".to_owned(),
                Err(_) => "the policy does not go there".to_owned(),
            });
        }
        if let Ok(index) = chosen {
            self.refused.remove(&index);
        }
        Explanation { chosen, because: self.because, refused: self.refused.into_iter().collect() }
    }
}

impl CreatePolicy {
    /// Whether figures of free space have to be set, and for how long they are valid.
    pub fn needs_space(&self) -> Option<Hold> {
        match *self {
            CreatePolicy::TopDownParent | CreatePolicy::RoundRobin => None,
            CreatePolicy::TopDownMostFree { hold, .. }
            | CreatePolicy::MostFree { hold }
            | CreatePolicy::MostFreeRoundRobin { hold, .. }
            | CreatePolicy::ParentMostFree { hold }
            | CreatePolicy::ParentMostFreeRoundRobin { hold, .. } => Some(hold),
            CreatePolicy::Pool(_, Preference::First | Preference::Random | Preference::Newest) => None,
            CreatePolicy::Pool(..) => Some(Hold(1)),
        }
    }

    /// Whether [`BranchView::parent_depth`] has to be set.
    pub fn needs_depth(&self) -> bool {
        matches!(self, CreatePolicy::Pool(Reach::MostSpecific, _))
    }

    /// Whether [`BranchView::parent_changed`] has to be set.
    pub fn needs_times(&self) -> bool {
        matches!(self, CreatePolicy::Pool(_, Preference::Newest))
    }

    fn takes_turns(&self) -> bool {
        matches!(
            self,
            CreatePolicy::RoundRobin
                | CreatePolicy::MostFreeRoundRobin { .. }
                | CreatePolicy::ParentMostFreeRoundRobin { .. }
        )
    }

    /// Chooses the branch for a new file.
    ///
    /// # Errors
    /// EROFS if no considered branch takes new files; ENOSPC if one would, but too little is free.
    pub fn choose(&self, placement: &Placement<'_>, state: &PolicyState) -> Result<usize> {
        let mut dice = state.dice(true);
        if self.takes_turns() && !placement.directory {
            dice.turn = state.take_turn();
        }
        select::create(*self, placement, dice, &mut Silent)
    }

    /// The present choice of [`CreatePolicy::choose`], with its reasons.
    pub fn explain(&self, placement: &Placement<'_>, state: &PolicyState) -> Explanation {
        let mut notes = Written::default();
        let chosen = select::create(*self, placement, state.dice(false), &mut notes);
        notes.explanation(chosen, placement.branches.len())
    }
}

impl CopyUpPolicy {
    /// Chooses the branch for the copy of a file on `source`; `source` itself if files there may be changed.
    ///
    /// # Errors
    /// EROFS if no branch above takes new files.
    pub fn choose(&self, branches: &[BranchView], source: usize) -> Result<usize> {
        select::copy_up(*self, branches, source, &mut Silent)
    }

    /// The choice of [`CopyUpPolicy::choose`], with its reasons.
    pub fn explain(&self, branches: &[BranchView], source: usize) -> Explanation {
        let mut notes = Written::default();
        let chosen = select::copy_up(*self, branches, source, &mut notes);
        notes.explanation(chosen, branches.len())
    }

    /// Chooses the branch on which a file gets another name (link, rename): its own if files there may be
    /// changed, else as for a copy; never one below `limit`, the branch of the replaced name or of the whiteout
    /// that hides the new name.
    ///
    /// # Errors
    /// EROFS if that branch cannot be written.
    pub fn choose_for_name(&self, branches: &[BranchView], source: usize, limit: usize) -> Result<usize> {
        select::within(branches, self.choose(branches, source)?, limit, &mut Silent)
    }
}

/// A number of bytes, formatted for users.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)];
        match units.iter().find(|(_, shift)| self.0 >> shift > 0) {
            // Truncated, never rounded up: the shown free bytes are really free.
            Some((unit, shift)) => {
                let tenths = (u128::from(self.0) * 10) >> shift;
                write!(f, "{}.{}{unit}", tenths / 10, tenths % 10)
            }
            None => write!(f, "{}", self.0),
        }
    }
}
