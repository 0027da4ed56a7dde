//! Which branch gets what: placement policies as pure functions over a few figures of the branches.
//!
//! Where no branch takes something new, the call fails with EROFS; where those that would take it
//! have less than `min_free` bytes left, with ENOSPC.
//!
//! Called wherever something new is put on a branch: creation, copy-up, link, rename. Names and
//! rules are those of aufs and mergerfs. Whatever a policy says, what it places must be seen: a
//! branch below the limit that a whiteout or an opaque directory sets is never chosen. Invariants:
//! * the same function decides and explains ([`CreatePolicy::explain`]), so an explanation cannot
//!   differ from what happens;
//! * one operation writes to one branch: policies that act on several are refused when they are
//!   read.

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

/// What a policy knows of a branch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchView {
    /// New files may be put there.
    pub creates: bool,
    /// Files there may be changed.
    pub writable: bool,
    /// The directory in question is there, as part of the union's directory.
    pub parent_exists: bool,
    /// How many components of the directory's path are there; asked for where
    /// [`CreatePolicy::needs_depth`].
    pub parent_depth: u32,
    /// When names in the directory last changed there; asked for where
    /// [`CreatePolicy::needs_times`].
    pub parent_changed: Time,
    /// Bytes free for ordinary users; asked for where [`CreatePolicy::needs_space`], or where
    /// `min_free` is not 0.
    pub free: u64,
    /// Bytes used, as `free`.
    pub used: u64,
    /// All bytes, as `free`.
    pub total: u64,
    /// Nothing new is put there while less is free, bytes; 0 for no such limit.
    pub min_free: u64,
}

impl BranchView {
    /// Whether something new may be put there now.
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

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// All branches, from the top.
    pub branches: &'a [BranchView],
    /// The last branch on which it would be seen: that of the whiteout which hides the name, or
    /// where an opaque directory ends the merge.
    pub limit: usize,
    /// It is a directory.
    pub directory: bool,
}

/// Which branches a policy of the pooling kind looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All.
    Anywhere,
    /// Those that have the directory (`ep...`).
    Existing,
    /// Those that have most of the directory's path (`msp...`).
    MostSpecific,
}

/// What a policy of the pooling kind prefers.
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
    /// Any (`rand`).
    Random,
    /// Any, in proportion to free bytes (`pfrd`).
    RandomByFree,
    /// Where names in the directory changed last (`newest`).
    Newest,
}

/// Where new files go (`create=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CreatePolicy {
    /// The highest branch that has the directory; where that cannot be written, the next above that
    /// can, and where there is none, the next below.
    #[default]
    TopDownParent,
    /// The highest with more than `low` bytes free; where there is none, as `MostFree`.
    TopDownMostFree {
        /// Bytes.
        low: u64,
        /// How long figures stay good.
        hold: Hold,
    },
    /// One after the other, from the bottom up; directories do not move it on.
    RoundRobin,
    /// Most free bytes; of equal ones the lower.
    MostFree {
        /// How long figures stay good.
        hold: Hold,
    },
    /// As `MostFree`, but in turn once the best has less than `low` bytes free.
    MostFreeRoundRobin {
        /// Bytes.
        low: u64,
        /// How long figures stay good.
        hold: Hold,
    },
    /// Most free bytes among those that have the directory; of equal ones the upper. Where none of
    /// them can be written, as `TopDownParent`.
    ParentMostFree {
        /// How long figures stay good.
        hold: Hold,
    },
    /// As `ParentMostFree`, but as `MostFreeRoundRobin` once it has less than `low` bytes free.
    ParentMostFreeRoundRobin {
        /// Bytes.
        low: u64,
        /// How long figures stay good.
        hold: Hold,
    },
    /// As mergerfs.
    Pool(Reach, Preference),
}

/// How long figures of free space are used again, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold(pub u32);

impl Hold {
    /// aufs' own.
    pub const DEFAULT: Hold = Hold(30);
    /// The longest.
    pub const MAX: u32 = 3600;

    /// As a duration.
    pub fn duration(self) -> Duration {
        Duration::from_secs(u64::from(self.0))
    }
}

/// Where files go that are changed and cannot be changed where they are (`cpup=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyUpPolicy {
    /// The highest branch that has the directory; where nothing may be put there, the next above
    /// where it may.
    #[default]
    TopDownParent,
    /// The next branch above that has the directory; where there is none, as `BottomUp`.
    BottomUpParent,
    /// The next branch above.
    BottomUp,
}

/// What policies remember: whose turn it is, and the state of the dice.
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

/// The turn and the throw for one decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dice {
    pub(crate) turn: u64,
    pub(crate) random: u64,
}

impl PolicyState {
    /// With dice that start from a number.
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

/// Why a branch was chosen, and why each other was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The branch, or the error that the operation ends with.
    pub chosen: Result<usize>,
    /// Why.
    pub because: String,
    /// The other branches, from the top, each with the reason.
    pub refused: Vec<(usize, String)>,
}

impl Explanation {
    /// For people: one line for what happens, one for each other branch. `names` are those of all
    /// branches.
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

/// Takes down what a decision goes by; nothing is put into words that nobody wants to read.
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
        // The first reason is the one that counted.
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
    /// Whether figures of free space have to be filled in, and for how long they are good.
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

    /// Whether [`BranchView::parent_depth`] has to be filled in.
    pub fn needs_depth(&self) -> bool {
        matches!(self, CreatePolicy::Pool(Reach::MostSpecific, _))
    }

    /// Whether [`BranchView::parent_changed`] has to be filled in.
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

    /// The branch for something new.
    ///
    /// # Errors
    /// EROFS where nothing may be put on any branch that counts; ENOSPC where it might, but too
    /// little is free.
    pub fn choose(&self, placement: &Placement<'_>, state: &PolicyState) -> Result<usize> {
        let mut dice = state.dice(true);
        if self.takes_turns() && !placement.directory {
            dice.turn = state.take_turn();
        }
        select::create(*self, placement, dice, &mut Silent)
    }

    /// What [`CreatePolicy::choose`] would do now, and why.
    pub fn explain(&self, placement: &Placement<'_>, state: &PolicyState) -> Explanation {
        let mut notes = Written::default();
        let chosen = select::create(*self, placement, state.dice(false), &mut notes);
        notes.explanation(chosen, placement.branches.len())
    }
}

impl CopyUpPolicy {
    /// The branch that gets a copy of a file on `source`; `source` itself where files there may be
    /// changed.
    ///
    /// # Errors
    /// EROFS where nothing may be put on any branch above.
    pub fn choose(&self, branches: &[BranchView], source: usize) -> Result<usize> {
        select::copy_up(*self, branches, source, &mut Silent)
    }

    /// What [`CopyUpPolicy::choose`] would do, and why.
    pub fn explain(&self, branches: &[BranchView], source: usize) -> Explanation {
        let mut notes = Written::default();
        let chosen = select::copy_up(*self, branches, source, &mut notes);
        notes.explanation(chosen, branches.len())
    }

    /// The branch on which a file gets another name (link, rename): its own where files there may
    /// be changed, else as for a copy; never one below `limit`, the branch of the name that is
    /// replaced or what hides the new name.
    ///
    /// # Errors
    /// EROFS where that cannot be written.
    pub fn choose_for_name(&self, branches: &[BranchView], source: usize, limit: usize) -> Result<usize> {
        select::within(branches, self.choose(branches, source)?, limit, &mut Silent)
    }
}

/// Bytes for people.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)];
        match units.iter().find(|(_, shift)| self.0 >> shift > 0) {
            // Cut off, never rounded up: what is shown as free is there.
            Some((unit, shift)) => {
                let tenths = (u128::from(self.0) * 10) >> shift;
                write!(f, "{}.{}{unit}", tenths / 10, tenths % 10)
            }
            None => write!(f, "{}", self.0),
        }
    }
}
