//! The pools that a command names, found as far as possible.

use nacre_admin::pool::{Figures, PoolAnswer, PoolRequest};
use nacre_daemon::{
    failure::Failure,
    pool::{
        client::{self, Owned},
        expected::{self, Expected},
    },
    report::tell,
    runtime::Whose,
};
use std::collections::HashSet;

/// The pools that were found, and the failures for the others.
pub(super) struct Chosen {
    /// The imported pools.
    pub owned: Vec<Owned>,
    /// The pools whose process has ended without an export.
    pub lost: Vec<Expected>,
    /// The failure of the pools that do not exist or are not imported.
    pub missing: Option<Failure>,
}

/// Finds the pools of these names, all where none is named. A missing pool does not hide the
/// others.
pub(super) fn some(names: &[String], everybody: bool) -> Chosen {
    if names.is_empty() {
        return Chosen { owned: client::all(&Whose::told(everybody)), lost: expected::lost(names), missing: None };
    }
    let (mut owned, mut lost, mut missing) = (Vec::new(), Vec::new(), None);
    for name in names {
        match client::owned(name) {
            Ok(found) => owned.push(found),
            Err(failure) => match expected::lost(std::slice::from_ref(name)).pop() {
                Some(found) => lost.push(found),
                None => note(&mut missing, failure),
            },
        }
    }
    Chosen { owned, lost, missing }
}

/// Keeps the last of several failures to return it; the earlier ones are printed.
pub fn note(last: &mut Option<Failure>, failure: Failure) {
    if let Some(before) = last.replace(failure) {
        tell(&before.what);
    }
}

/// Runs `act` on each item; a failure does not prevent the others.
pub fn each<T>(
    last: &mut Option<Failure>,
    all: impl IntoIterator<Item = T>,
    mut act: impl FnMut(T) -> Result<(), Failure>,
) {
    all.into_iter().filter_map(|one| act(one).err()).for_each(|failure| note(last, failure));
}

/// Removes repeated names.
pub fn once(mut names: Vec<String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

pub(super) fn figures(names: &[String], everybody: bool) -> (Vec<Figures>, Option<Failure>) {
    let mut all = Vec::new();
    let Chosen { owned, lost, mut missing } = some(names, everybody);
    let (answers, failures) = client::ask_each(owned, |owned| owned.pool("", PoolRequest::List, &mut |_| {}));
    for answer in answers {
        if let PoolAnswer::Listed(figures) = answer {
            all.push(*figures);
        }
    }
    failures.into_iter().for_each(|failure| note(&mut missing, failure));
    all.extend(lost.iter().map(Expected::figures));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    (all, missing)
}
