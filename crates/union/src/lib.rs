//! The layer `union`: several branches shown as one tree, with copy-on-write, whiteouts and
//! placement policies.
//!
//! Branches are layers themselves (host directories, trees in memory, whole stacks); nothing here
//! knows a path of the host. The parts:
//! * `union.rs` is the layer, `UnionShared` below the state that all parts share, `node.rs` the state of each
//!   file, `branches.rs` an opened branch with the union's own directories (`work.rs`);
//! * `lookup.rs` finds names over all branches, `marks.rs` reads and writes whiteouts, opaque directories and
//!   redirects, `listing.rs` merges listings;
//! * `copy_up.rs`, `grow.rs` and `copy_up_dir.rs` copy files, directories and trees to branches where they may
//!   be changed; `redirect.rs` avoids the copy of a tree;
//! * `relocate.rs` moves files between branches: off full ones, off those that are being drained (`drain.rs`),
//!   between tiers (`tier.rs`), and when they are opened (`on_open.rs`); `locate.rs` reports where they are;
//! * `hardlinks/` moves files that have several names, and keeps them one file meanwhile;
//! * `per_name.rs` gives FUSE front ends a node for each name, for the mergerfs options that need it:
//!   `link_cow.rs` breaks hard links before writes;
//! * `control.rs` changes the list of branches while operations continue; `membership.rs` lets long jobs yield
//!   to such a change, `revalidate.rs` looks known files up again after it, and `removal_check.rs` reports what
//!   users would miss without a branch;
//! * `create.rs`, `remove.rs`, `rename.rs`, `open_file.rs` and `attributes.rs` are the operations;
//! * `duplicates.rs` repeats changes of a file on its copies on lower branches, as mergerfs does;
//! * `check.rs` finds the remains of a crash, `interrupted.rs` finishes a rename of a killed process;
//! * `identity.rs` keeps inode numbers stable, `hardlinks/index.rs` hard links; `watch.rs` forwards the change
//!   notices of branches;
//! * `base_log.rs` notes which entries of lower branches are hidden, for workspaces;
//! * `pattern.rs` finds branches that are named by a pattern;
//! * `branch.rs` is the grammar of branches, `options.rs` that of `-o` options, `policy.rs` chooses branches
//!   for new files and copies: all are pure; `explain.rs` reports the choice and its reason.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod attributes;
mod balance;
pub mod base_log;
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
pub use work::{HeldWork, WorkLock};

use arc_swap::ArcSwap;
use branches::Branch;
use hardlinks::index::HardlinkIndex;
use identity::Identities;
use listing::Listings;
use membership::Membership;
use nacre_vfs::{AttachedDoor, Caller, Errno, Invalidation, Result};
use node::{Nodes, UnionNode};
use options::LiveRules;
use parking_lot::{Mutex, MutexGuard, RwLock};
use per_name::Names;
use std::{
    sync::{Arc, OnceLock, atomic::AtomicU64, mpsc::Sender},
    time::{Duration, Instant},
};
use tier::Tiering;

/// The caller of the union's own operations on branches.
pub(crate) const OWN: Caller = Caller::ROOT;

/// How often an operation starts over because its look-up results have changed meanwhile.
pub(crate) const ATTEMPTS: usize = 100;

/// The state for choosing branches of new files and copies.
pub(crate) struct PlacementState {
    /// Routes with the branches they lead to.
    pub(crate) routes: ArcSwap<Routes>,
    /// The options that change while mounted.
    pub(crate) rules: ArcSwap<LiveRules>,
    pub(crate) policy: PolicyState,
    pub(crate) space: SpaceCache,
    /// The clock of `space`.
    pub(crate) started: Instant,
}

/// Notices of changes that did not come through the union.
#[derive(Default)]
pub(crate) struct Notices {
    /// The subscribers.
    pub(crate) watchers: Mutex<Vec<Sender<Invalidation>>>,
    pub(crate) unheard: watch::Unheard,
}

/// The lock of the directory tree.
#[derive(Default)]
pub(crate) struct TreeMoves {
    lock: Mutex<()>,
    /// Number of directory moves so far.
    pub(crate) count: AtomicU64,
}

impl TreeMoves {
    /// Takes the lock, to be held while a directory is moved, removed, or created on one more branch. Its holder may
    /// wait for the lock of a file or directory of a branch, which a user can keep for ever
    /// (docs/decisions/locks-that-users-keep.md); so it is waited for with a limit.
    ///
    /// # Errors
    /// EBUSY after [`TREE_LOCK_WAIT`].
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, ()>> {
        self.lock.try_lock_for(TREE_LOCK_WAIT).ok_or_else(|| {
            tracing::warn!(
                "a change of a directory is refused (EBUSY): another one has waited for a lock on a branch for {} s",
                TREE_LOCK_WAIT.as_secs()
            );
            Errno::EBUSY
        })
    }
}

/// Maximum time for which a change of a directory waits for another one.
#[cfg(not(test))]
const TREE_LOCK_WAIT: Duration = Duration::from_secs(20);
#[cfg(test)]
const TREE_LOCK_WAIT: Duration = Duration::from_millis(50);

/// The state that all operations share; each file adds its operations.
pub(crate) struct UnionShared {
    /// The FUSE front end, which knows the open files.
    pub(crate) door: AttachedDoor,
    branches: ArcSwap<Vec<Arc<Branch>>>,
    /// The quiesce lock: held for reading by every operation that uses branches; the list of branches changes
    /// only under the write lock. Never taken twice by one thread.
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
    /// The nodes by name of the per-name layer, if it is used.
    pub(crate) names: Option<Arc<Names>>,
    /// Makes the changes of the union that users request through the mount.
    pub(crate) editor: OnceLock<Box<union::Editor>>,
    /// The log of hidden entries, if there is one.
    pub(crate) base_log: OnceLock<base_log::BaseLog>,
}

/// Several branches as one tree.
pub struct Union {
    shared: Arc<UnionShared>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_directories_that_never_ends_has_the_others_refused() {
        let tree = TreeMoves::default();
        let held = tree.lock().unwrap();
        assert_eq!(tree.lock().err(), Some(Errno::EBUSY));
        drop(held);
        assert!(tree.lock().is_ok());
    }
}
