//! The check before a branch is removed: files and directories that only this branch shows, and removed names
//! that only its whiteouts hide.
//!
//! Called before a writable branch is removed without force ([`Control::remove`](crate::Control::remove)).
//! Nothing is changed.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    marks,
    node::{Part, UnionNode, path_in, source},
};
use nacre_vfs::{Errno, Name, Result};
use std::sync::Arc;

/// Count at which the check stops.
const MOST: usize = 10_000;
/// Maximal number of example names in the error.
const NAMED: usize = 3;

/// What users would miss without the branch.
#[derive(Debug, Default)]
pub(crate) struct RemovalCheck {
    shown: MissedNames,
    hidden: MissedNames,
    /// Number of names checked.
    pub(crate) looked_at: usize,
}

#[derive(Debug, Default)]
struct MissedNames {
    count: usize,
    examples: Vec<Vec<u8>>,
}

impl MissedNames {
    fn add(&mut self, path: impl FnOnce() -> Vec<u8>) {
        self.count += 1;
        if self.examples.len() < NAMED {
            self.examples.push(path());
        }
    }

    fn told(&self) -> String {
        let mut text = self.examples.iter().map(|path| path.escape_ascii().to_string()).collect::<Vec<_>>().join(", ");
        if self.count > self.examples.len() {
            text.push_str(", ...");
        }
        text
    }
}

impl RemovalCheck {
    fn is_enough(&self) -> bool {
        self.shown.count.max(self.hidden.count) >= MOST
    }

    /// The reason against the removal; `None` if the visible tree would not change.
    pub(crate) fn reason(&self, branch: &Branch) -> Option<String> {
        let most = if self.is_enough() { "at least " } else { "" };
        let name = branch.name.display();
        let shown = match self.shown.count {
            0 => None,
            1 => Some(format!(
                "1 file or directory is shown from {name} alone ({}) and would no longer be seen",
                self.shown.told()
            )),
            count => Some(format!(
                "{most}{count} files and directories are shown from {name} alone ({}) and would no longer be seen",
                self.shown.told()
            )),
        };
        let hidden = match self.hidden.count {
            0 => None,
            1 => Some(format!("1 removed name is hidden by {name} alone ({}) and would come back", self.hidden.told())),
            count => Some(format!(
                "{most}{count} removed names are hidden by {name} alone ({}) and would come back",
                self.hidden.told()
            )),
        };
        let reasons: Vec<String> = shown.into_iter().chain(hidden).collect();
        (!reasons.is_empty()).then(|| format!("{}: drain the branch (again), or use force", reasons.join("; ")))
    }
}

impl UnionShared {
    /// Finds the names that users would miss without a branch. `step` is called for each directory and returns
    /// a guard that keeps the list of branches unchanged meanwhile.
    ///
    /// # Errors
    /// Errors of the branches.
    pub(crate) fn check_removal<G>(&self, branch: &Arc<Branch>, step: impl Fn() -> G) -> Result<RemovalCheck> {
        let mut check = RemovalCheck::default();
        let mut waiting = vec![Arc::clone(&self.root)];
        while let Some(directory) = waiting.pop() {
            let _step = step();
            match self.check_removal_in(&directory, branch, &mut check, &mut waiting) {
                // Removed meanwhile.
                Ok(()) | Err(Errno::ENOENT | Errno::ESTALE) => {}
                Err(error) => return Err(error),
            }
            if check.is_enough() {
                break;
            }
        }
        Ok(check)
    }

    fn check_removal_in(
        &self,
        directory: &Arc<UnionNode>,
        branch: &Arc<Branch>,
        check: &mut RemovalCheck,
        waiting: &mut Vec<Arc<UnionNode>>,
    ) -> Result<()> {
        self.revalidate(directory)?;
        let _names = directory.names.read();
        let Some(part) = directory.part_on(branch) else { return Ok(()) };
        let names = self.listings.names(&branch.marks(), directory.id, &[source(&part)], |_, _| true)?;
        let view = directory.view();
        for bytes in names {
            let name = Name::new(&bytes)?;
            check.looked_at += 1;
            let Some(found) = self.sight(&OWN, &view, name)?.found else { continue };
            let Some(there) = found.parts.iter().find(|found| found.branch.slot == branch.slot).cloned() else {
                continue;
            };
            let is_only = found.parts.len() == 1;
            if found.is_directory() {
                if self.ends_here(directory, &part, &there, name)? {
                    check.hidden.add(|| path_in(directory, &bytes));
                }
                waiting.push(self.known(directory, name, found)?);
            }
            if is_only {
                check.shown.add(|| path_in(directory, &bytes));
            }
        }
        for bytes in self.hidden_by(&part)? {
            let name = Name::new(&bytes)?;
            check.looked_at += 1;
            let hides = self.sight(&OWN, &view, name)?.whiteout == Some(branch.index());
            if hides && self.shows_below(&view, name, branch.index())? {
                check.hidden.add(|| path_in(directory, &bytes));
            }
        }
        Ok(())
    }

    /// Whether a directory is opaque on the branch and this hides content on a branch below.
    fn ends_here(&self, directory: &UnionNode, home: &Part, part: &Part, name: Name<'_>) -> Result<bool> {
        let layer = &*part.branch.layer;
        if !(part.branch.marks().opacity(layer, &part.node)?.opaque || marks::stands_beside(layer, &home.node, name)?) {
            return Ok(false);
        }
        let below = self.sight_from(&OWN, &directory.view(), name, part.branch.index().saturating_add(1))?.found;
        Ok(below.is_some_and(|below| below.is_directory()))
    }
}
