//! The layer `union`: several branches shown as one tree, with copy-on-write, whiteouts and
//! placement policies.
//!
//! Branches are layers themselves (host directories, trees in memory, whole stacks); nothing here
//! knows a path of the host. The parts:
//! * `union.rs` is the layer, `UnionShared` below what all parts share, `node.rs` what is kept for
//!   each file, `branches.rs` a branch at work with its own directories (`work.rs`);
//! * `lookup.rs` finds names over all branches, `marks.rs` reads and writes what hides names,
//!   `listing.rs` merges listings;
//! * `copy_up.rs`, `grow.rs` and `copy_up_dir.rs` bring files, directories and trees to branches
//!   where they may be changed, `redirect.rs` saves that;
//! * `relocate.rs` moves files between branches: off full ones, off those that are being drained
//!   (`drain.rs`), between tiers (`tier.rs`), and when they are opened (`on_open.rs`); `locate.rs`
//!   tells where they are;
//! * `hardlinks/` does so with files that have several names, and keeps these one file on the way;
//! * `per_name.rs` gives doors a file for each name, for the words of mergerfs that need it:
//!   `link_cow.rs` breaks hard links before writes;
//! * `control.rs` changes the list of branches while operations go on; `membership.rs` is how others
//!   give way, `revalidate.rs` what is known of files then, and `removal_check.rs` says what users
//!   would miss without a branch;
//! * `create.rs`, `remove.rs`, `rename.rs`, `open_file.rs` and `attributes.rs` are the operations;
//! * `duplicates.rs` does to copies of a file on lower branches what is done to the file, as mergerfs has it;
//! * `check.rs` looks for what a crash has left behind, `interrupted.rs` ends a rename that a killed process
//!   had begun;
//! * `identity.rs` keeps inode numbers what they were, `hardlinks/index.rs` hard links; `watch.rs`
//!   passes on what branches notice;
//! * `pattern.rs` finds branches that are named by a pattern;
//! * `branch.rs` is the grammar of branches, `options.rs` that of `-o` words, `policy.rs` decides
//!   where things go: all are pure; `explain.rs` says what it would decide, and why.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod attributes;
mod balance;
mod branch;
mod branches;
mod check;
mod control;
mod control_file;
mod copy_up;
mod copy_up_dir;
mod create;
mod drain;
mod duplicates;
mod explain;
mod grow;
mod hardlinks;
mod identity;
mod interrupted;
mod link_cow;
mod listing;
mod locate;
mod lookup;
mod marks;
mod membership;
mod node;
mod on_open;
mod open_file;
mod options;
mod pattern;
mod per_name;
mod policy;
mod redirect;
mod relocate;
mod removal_check;
mod remove;
mod rename;
mod resting;
mod revalidate;
mod splitmix;
mod swap;
mod tier;
mod union;
mod watch;
mod work;

pub use balance::{BalanceReport, BalanceRules};
pub use branch::{
    BRANCHES_MAX, BranchMode, CopyOnOpen, ParseError, Permission, XattrClasses, check_overlap, escape_path,
    parse_branches, parse_one, parse_overlay, parse_pool, parse_size,
};
pub use branches::Member;
pub use check::{Finding, Problem};
pub use control::{BranchStatus, ChangeError, Control};
pub use drain::{DrainProgress, DrainReport};
pub use explain::{Presence, Report};
pub use locate::{Direction, Location};
pub use marks::{Namespace, Style};
pub use options::{Action, ActionPolicies, ActionPolicy, Ignored, Udba, UnionOptions, Words};
pub use pattern::matching_directories;
pub use policy::{
    BranchView, CopyUpPolicy, CreatePolicy, Explanation, Hold, Placement, PolicyState, Preference, Reach, Route,
    Routes, Space, SpaceCache, Target, Way,
};
pub use relocate::{Left, Stay};
pub use tier::{Candidate, PlannedMove, Step, TierFigures, TierReport, TierRules, TierStatus, TierView, Why, plan};
pub use union::{Edit, UnionError};

use arc_swap::ArcSwap;
use branches::Branch;
use hardlinks::index::HardlinkIndex;
use identity::Identities;
use listing::Listings;
use membership::Membership;
use nacre_vfs::{AttachedDoor, Caller, Invalidation};
use node::{Nodes, UnionNode};
use options::LiveRules;
use parking_lot::{Mutex, RwLock};
use per_name::Names;
use std::{
    sync::{Arc, OnceLock, atomic::AtomicU64, mpsc::Sender},
    time::Instant,
};
use tier::Tiering;

/// Who does the union's own work on branches.
pub(crate) const OWN: Caller = Caller::ROOT;

/// How often an operation starts over because what it found has changed meanwhile.
pub(crate) const ATTEMPTS: usize = 100;

/// What decides where new files and copies go.
pub(crate) struct PlacementState {
    /// Which branches routes lead to.
    pub(crate) routes: ArcSwap<Routes>,
    /// The options that change while mounted.
    pub(crate) rules: ArcSwap<LiveRules>,
    pub(crate) policy: PolicyState,
    pub(crate) space: SpaceCache,
    /// The clock of `space`.
    pub(crate) started: Instant,
}

/// What has changed and did not come through the union.
#[derive(Default)]
pub(crate) struct Notices {
    /// Who is told.
    pub(crate) watchers: Mutex<Vec<Sender<Invalidation>>>,
    pub(crate) unheard: watch::Unheard,
}

/// Directories as a tree.
#[derive(Default)]
pub(crate) struct TreeMoves {
    /// Held while a directory moves, goes, or comes to be on one more branch.
    pub(crate) lock: Mutex<()>,
    /// How many directories have moved so far.
    pub(crate) count: AtomicU64,
}

/// What all operations share; each file adds the operations that it is about.
pub(crate) struct UnionShared {
    /// Who knows which files are open.
    pub(crate) door: AttachedDoor,
    branches: ArcSwap<Vec<Arc<Branch>>>,
    /// Held for reading by every operation that looks at branches: they change only while nobody
    /// does. Never taken twice by one thread.
    pub(crate) gate: RwLock<()>,
    pub(crate) membership: Membership,
    pub(crate) options: UnionOptions,
    pub(crate) root: Arc<UnionNode>,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) identities: Arc<Identities>,
    pub(crate) hardlinks: HardlinkIndex,
    pub(crate) listings: Listings,
    pub(crate) placing: PlacementState,
    pub(crate) tree: TreeMoves,
    pub(crate) tiering: Tiering,
    pub(crate) notices: Notices,
    /// What doors know of files by their names, where they do.
    pub(crate) names: Option<Arc<Names>>,
    /// Who changes the union where a user of the mount asks for it.
    pub(crate) editor: OnceLock<Box<union::Editor>>,
}

/// Several branches as one tree.
pub struct Union {
    shared: Arc<UnionShared>,
}
