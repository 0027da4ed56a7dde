//! The list of changes for callers.

use crate::{
    Base, Change, ChangeKind, Result, Selection, Upper,
    compare::{self, Comparison, bytes, path_of},
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// The paths of all changes.
pub(crate) struct All {
    /// Paths in the view.
    pub(crate) items: BTreeSet<PathBuf>,
}

/// The paths of all changed entries of the upper.
pub(crate) fn all(comparison: &Comparison) -> All {
    let changed = comparison.items.iter().filter(|(_, item)| item.is_changed());
    All { items: changed.map(|(path, _)| path.clone()).collect() }
}

/// Whether a path is selected.
fn is_selected(selection: &[PathBuf], path: &Path) -> bool {
    selection.is_empty() || selection.iter().any(|selected| path.starts_with(selected))
}

/// The changes of a workspace, in the order of their paths.
///
/// # Errors
/// Something in upper or base cannot be read.
pub fn changes(base: &Base, upper: &Upper, selection: &Selection) -> Result<Vec<Change>> {
    let comparison = compare::compare(base, upper)?;
    let selection: Vec<PathBuf> = selection.paths.iter().map(|path| path_of(path)).collect();
    let mut changes = Vec::new();
    for path in all(&comparison).items {
        let Some(item) = comparison.items.get(&path) else { continue };
        let from = item.base.as_ref().filter(|_| item.renamed).map(|base| &base.path);
        if !is_selected(&selection, &path) && !from.is_some_and(|from| is_selected(&selection, from)) {
            continue;
        }
        let kind = match from {
            Some(from) => ChangeKind::Renamed { from: bytes(from), aspects: item.aspects },
            None if item.reference().is_some() => ChangeKind::Modified(item.aspects),
            None => ChangeKind::Added,
        };
        let old = item.reference().map(|there| there.meta.entry());
        changes.push((path.clone(), Change { path: bytes(&path), kind, old, new: Some(item.upper.meta.entry()) }));
    }
    for (path, meta) in &comparison.removed {
        if is_selected(&selection, path) {
            let old = Some(meta.entry());
            changes.push((path.clone(), Change { path: bytes(path), kind: ChangeKind::Removed, old, new: None }));
        }
    }
    changes.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(changes.into_iter().map(|(_, change)| change).collect())
}
