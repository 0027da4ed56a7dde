//! Explanations for users: where a path is on the branches, where it would be created or moved, and why.
//!
//! Called by commands, never by operations. The decision is made by the functions that operations use; nothing
//! is changed, and round-robin policies do not advance.

use crate::{
    OWN, Union, UnionShared,
    branches::Branch,
    grow::{CopyChoice, NewChoice},
    marks::Seen,
    node::UnionNode,
    policy::{Explanation, Placement},
};
use nacre_vfs::{Errno, Kind, Layer, Name, Result};
use std::sync::Arc;

/// The presence of a path on one branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The visible file.
    Shown,
    /// A part of the visible directory.
    Merged,
    /// A file that is hidden by a branch above.
    Hidden,
    /// A whiteout.
    Whiteout,
}

/// The explanation of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The branches that have a file or whiteout at the path, from the top.
    pub here: Vec<(usize, Presence)>,
    /// The deciding rule, as the user wrote it (`create=mfs:30`, `route=*.iso`, `cpup=tdp`).
    pub rule: String,
    /// The decision: for an existing file, where it would be changed; else where it would be created.
    pub next: Explanation,
}

impl Report {
    /// Formats the report for users. `names` are those of all branches.
    pub fn text(&self, names: &[String]) -> String {
        let mut text = String::new();
        for (index, presence) in &self.here {
            let name = names.get(*index).map_or("?", String::as_str);
            let what = match presence {
                Presence::Shown => "shown",
                Presence::Merged => "merged",
                Presence::Hidden => "hidden by a branch above",
                Presence::Whiteout => "a whiteout",
            };
            text.push_str(&format!("{name}: {what}\n"));
        }
        text.push_str(&format!("{}: {}", self.rule, self.next.text(names)));
        text
    }
}

impl Union {
    /// Explains a path, names divided by slashes from the union's root. `directory` is whether a missing path
    /// is to be a directory.
    ///
    /// # Errors
    /// ENOENT or ENOTDIR where the path does not lead to a directory, EINVAL for the root itself, and errors of
    /// the branches.
    pub fn explain(&self, path: &[u8], directory: bool) -> Result<Report> {
        let shared = self.shared();
        let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).collect();
        let name = Name::new(parts.pop().ok_or(Errno::EINVAL)?)?;
        let mut at = self.root()?.node;
        for part in parts {
            at = self.lookup(&OWN, &at, Name::new(part)?)?.node;
        }
        let _branches = shared.gate.read();
        shared.explain(&shared.directory(&at)?, name, directory)
    }
}

impl UnionShared {
    fn explain(&self, parent: &Arc<UnionNode>, name: Name<'_>, directory: bool) -> Result<Report> {
        let here = self.presences(parent, name)?;
        let sight = self.sight(&OWN, &parent.view(), name)?;
        let Some(found) = sight.found else {
            let limit = sight.limit;
            let (rule, policy) = match self.choice_for_new(parent, Some(name), directory, limit)? {
                NewChoice::Only(branch) => {
                    let rules = self.rules();
                    let policy = rules.create_directories.filter(|_| directory).unwrap_or(rules.create);
                    let views = self.views_for(policy, parent)?;
                    let placement = Placement { branches: &views, limit, directory };
                    let by_policy = policy.explain(&placement, &self.placing.policy);
                    let next =
                        self.only(&branch, by_policy, "the only one that takes new files where they would be seen");
                    return Ok(Report { here, rule: format!("create={policy}"), next });
                }
                NewChoice::Route { branch, pattern } => {
                    let next = self.chosen(&branch, "the route leads there", "the route leads elsewhere");
                    return Ok(Report { here, rule: format!("route={pattern}"), next });
                }
                NewChoice::Policy { policy, route: Some(pattern), passed_over: false } => {
                    (format!("route={pattern}"), policy)
                }
                NewChoice::Policy { policy, route: Some(pattern), passed_over: true } => {
                    (format!("route={pattern} (nothing can be put there now), create={policy}"), policy)
                }
                NewChoice::Policy { policy, route: None, .. } => (format!("create={policy}"), policy),
            };
            let views = self.views_for(policy, parent)?;
            let next = policy.explain(&Placement { branches: &views, limit, directory }, &self.placing.policy);
            return Ok(Report { here, rule, next });
        };
        let top = &found.top()?.branch;
        let rule = format!("cpup={}", self.options.copy_up);
        if top.is_writable() {
            let next = self.options.copy_up.explain(&self.views(Some(&parent.view())), top.index());
            return Ok(Report { here, rule, next });
        }
        let next = match self.choice_for_copy(Some(&parent.view()), top.index(), usize::MAX) {
            CopyChoice::Only(branch) => {
                let by_policy = self.options.copy_up.explain(&self.views(Some(&parent.view())), top.index());
                self.only(&branch, by_policy, "the only one above that takes copies")
            }
            CopyChoice::Policy(views) => self.options.copy_up.explain(&views, top.index()),
        };
        Ok(Report { here, rule, next })
    }

    /// An explanation for a choice without an alternative, in the policy's words if it chooses the same branch.
    fn only(&self, branch: &Branch, by_policy: Explanation, because: &str) -> Explanation {
        if by_policy.chosen == Ok(branch.index()) {
            return by_policy;
        }
        let mut next = self.chosen(branch, because, "read-only, or it would not be seen there");
        for (index, why) in &mut next.refused {
            if self.branches().get(*index).is_some_and(|other| !other.creates()) {
                *why = "read-only".to_owned();
            }
        }
        next
    }

    /// An explanation for a choice with the same reason against all other branches.
    fn chosen(&self, branch: &Branch, because: &str, not_others: &str) -> Explanation {
        let others = (0..self.branches().len()).filter(|other| *other != branch.index());
        Explanation {
            chosen: Ok(branch.index()),
            because: because.to_owned(),
            refused: others.map(|other| (other, not_others.to_owned())).collect(),
        }
    }

    /// The presence of a name on each branch of its directory.
    pub(crate) fn presences(&self, parent: &Arc<UnionNode>, name: Name<'_>) -> Result<Vec<(usize, Presence)>> {
        let (mut here, mut ended, mut merging) = (Vec::new(), false, false);
        for part in parent.view().parts.iter() {
            let branch = &part.branch;
            match branch.marks().look(&*branch.layer, &OWN, &part.node, name, branch.reads_marks(), part.x_directory)? {
                Seen::Absent => {}
                Seen::WhitedOut => {
                    here.push((branch.index(), Presence::Whiteout));
                    ended = true;
                }
                Seen::Found(entry) => {
                    let is_directory = entry.attr.kind == Kind::Directory;
                    let presence = match (ended, merging) {
                        (true, _) => Presence::Hidden,
                        (false, true) if is_directory => Presence::Merged,
                        (false, true) => Presence::Hidden,
                        (false, false) => Presence::Shown,
                    };
                    here.push((branch.index(), presence));
                    let opaque = is_directory
                        && branch.reads_marks()
                        && branch.marks().opacity(&*branch.layer, &entry.node)?.opaque;
                    (ended, merging) = (ended || !is_directory || opaque, true);
                }
            }
        }
        Ok(here)
    }
}
