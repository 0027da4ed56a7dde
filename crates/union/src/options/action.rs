//! The policies of mergerfs for changes of existing files (`category.action=`, `func.chmod=` and so on):
//! whether all branches are changed or only the highest. Pure.

use crate::policy::CreatePolicy;
use std::fmt;

/// A change of a file or directory, as mergerfs names it (`func.NAME=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Change of the mode.
    Chmod,
    /// Change of the owner or group.
    Chown,
    /// Creation of another name.
    Link,
    /// Removal of an extended attribute.
    RemoveXattr,
    /// Change of the name.
    Rename,
    /// Removal of a directory.
    Rmdir,
    /// Setting an extended attribute.
    SetXattr,
    /// Change of the length, by truncate(2).
    Truncate,
    /// Removal of a name.
    Unlink,
    /// Change of the times.
    Utimens,
}

impl Action {
    /// All actions, in the order of their declaration.
    pub const ALL: [Action; 10] = [
        Action::Chmod,
        Action::Chown,
        Action::Link,
        Action::RemoveXattr,
        Action::Rename,
        Action::Rmdir,
        Action::SetXattr,
        Action::Truncate,
        Action::Unlink,
        Action::Utimens,
    ];

    /// The name in mergerfs' words.
    pub fn name(self) -> &'static str {
        match self {
            Action::Chmod => "chmod",
            Action::Chown => "chown",
            Action::Link => "link",
            Action::RemoveXattr => "removexattr",
            Action::Rename => "rename",
            Action::Rmdir => "rmdir",
            Action::SetXattr => "setxattr",
            Action::Truncate => "truncate",
            Action::Unlink => "unlink",
            Action::Utimens => "utimens",
        }
    }

    /// The action with this name.
    pub fn named(name: &str) -> Option<Action> {
        Action::ALL.into_iter().find(|action| action.name() == name)
    }
}

/// The branches on which a change is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionPolicy {
    /// All branches that have the file (`all`).
    All,
    /// As `All` (`epall`).
    ExistingAll,
    /// The highest branch. mergerfs' other policies are kept as they were written.
    One(CreatePolicy),
}

impl ActionPolicy {
    /// Whether all writable branches are changed.
    pub fn is_everywhere(self) -> bool {
        !matches!(self, ActionPolicy::One(_))
    }
}

impl fmt::Display for ActionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ActionPolicy::All => f.write_str("all"),
            ActionPolicy::ExistingAll => f.write_str("epall"),
            ActionPolicy::One(policy) => policy.fmt(f),
        }
    }
}

/// The policy of each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionPolicies([ActionPolicy; Action::ALL.len()]);

impl Default for ActionPolicies {
    /// The highest branch alone, as in a union that copies up.
    fn default() -> ActionPolicies {
        use crate::{Preference, Reach};
        ActionPolicies::all_by(ActionPolicy::One(CreatePolicy::Pool(Reach::Existing, Preference::First)))
    }
}

impl ActionPolicies {
    /// One policy for all changes.
    pub fn all_by(policy: ActionPolicy) -> ActionPolicies {
        ActionPolicies([policy; Action::ALL.len()])
    }

    /// The policy of a change.
    pub fn of(&self, action: Action) -> ActionPolicy {
        self.0.get(action as usize).copied().unwrap_or(ActionPolicy::ExistingAll)
    }

    /// Whether a change is made on all writable branches.
    pub fn are_everywhere(&self, action: Action) -> bool {
        self.of(action).is_everywhere()
    }

    /// Sets the policy of a change.
    pub fn set(&mut self, action: Action, policy: ActionPolicy) {
        if let Some(present) = self.0.get_mut(action as usize) {
            *present = policy;
        }
    }
}
