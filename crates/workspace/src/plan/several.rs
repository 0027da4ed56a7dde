//! Commits of a workspace over several directories: all changes go into the topmost one.
//!
//! A changed file of a directory below gets a copy there, as in the upper, and hides its original. What lies below cannot
//! be removed or renamed so: the union of the directories would go on showing it.

use super::{Found, difference};
use crate::{
    Base, Result, WorkspaceError,
    compare::{Comparison, TARGET},
    meta::Meta,
    trouble::{During, shown},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Names that an error lists.
const LISTED: usize = 20;

/// Refuses changes that only a directory below the topmost one could get. `comparison` is that with all directories.
pub(super) fn check(
    below: &Base,
    comparison: &Comparison,
    items: &BTreeSet<PathBuf>,
    removed: &BTreeSet<PathBuf>,
) -> Result<()> {
    let mut refused: BTreeSet<&Path> = BTreeSet::new();
    for path in removed {
        if below.meta(path)?.is_some() {
            refused.insert(path);
        }
    }
    for path in items {
        let Some(item) = comparison.items.get(path) else { continue };
        let old = item.base.as_ref().filter(|_| item.renamed).map(|base| base.path.as_path()).or(item.lost.as_deref());
        if let Some(old) = old
            && below.meta(old)?.is_some()
        {
            refused.insert(old);
        }
        // A further name of a file is not in the upper, so it would keep leading to the old content.
        if item.in_links.is_some() && below.meta(path)?.is_some() {
            refused.insert(path);
        }
    }
    let Some(first) = refused.first() else { return Ok(()) };
    let mut names: Vec<String> = refused.iter().take(LISTED).map(|path| shown(path)).collect();
    if refused.len() > LISTED {
        names.push(format!("and {} more", refused.len() - LISTED));
    }
    Err(WorkspaceError {
        what: format!(
            "{} is in {}, below the topmost directory of the workspace, and a commit goes into the topmost one: it cannot \
             remove or rename a name there, nor change a file with several names; nothing is committed; name the other \
             paths to commit; in the way are: {}",
            shown(first),
            shown(&below.path_with(first)?),
            names.join(", ")
        ),
        errno: None,
    })
}

/// Conflicts of changes whose originals lie below the topmost directory: with what others did there.
pub(super) fn conflicts(
    base: &Base,
    comparison: &Comparison,
    items: &BTreeSet<PathBuf>,
) -> Result<BTreeMap<PathBuf, Found>> {
    let mut conflicts = BTreeMap::new();
    for view in items {
        let Some(path) = comparison.items.get(view).and_then(|item| item.natural.as_ref()) else { continue };
        let Some(line) = comparison.scan.hidden.get(path).filter(|line| line.branch > TARGET) else { continue };
        let Some(tree) = base.trees.get(line.branch - TARGET) else { continue };
        let now: Option<Meta> = tree.meta(path).during("read", &tree.path_of(path))?;
        let Some(theirs) = difference(Some(line), now.as_ref()) else { continue };
        let found = Found { ours: "modified", theirs, items: BTreeSet::from([view.clone()]), ..Found::default() };
        conflicts.insert(path.clone(), found);
    }
    Ok(conflicts)
}
