//! The pools that a command names, as far as they can be had.

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

/// Pools as far as they can be had.
pub(super) struct Chosen {
    /// Those that are imported.
    pub owned: Vec<Owned>,
    /// Those that should be.
    pub lost: Vec<Expected>,
    /// Why others are not there.
    pub missing: Option<Failure>,
}

/// The pools of these names, all where none is named. Those that are there are shown, whatever has
/// become of others.
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

/// Of several failures, the last one is for the end; those before it are told.
pub fn note(last: &mut Option<Failure>, failure: Failure) {
    if let Some(before) = last.replace(failure) {
        tell(&before.what);
    }
}

/// Does something to each; one that fails keeps no other from it.
pub fn each<T>(
    last: &mut Option<Failure>,
    all: impl IntoIterator<Item = T>,
    mut act: impl FnMut(T) -> Result<(), Failure>,
) {
    all.into_iter().filter_map(|one| act(one).err()).for_each(|failure| note(last, failure));
}

/// What is named twice is meant once.
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
