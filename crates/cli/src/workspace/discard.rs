//! The end of workspaces without a commit.

use super::of_pool;
use crate::{output, union::run::json};
use nacre_daemon::{
    failure::Failure,
    workspace::{
        store::{LockMode, Store},
        view,
    },
};
use serde::Serialize;
use std::process::ExitCode;

/// Result of the discarding of one workspace, as JSON.
#[derive(Serialize)]
struct DiscardReport {
    name: String,
    discarded: bool,
    error: Option<String>,
}

/// `nacre workspace discard`: discards all of these that can be; the exit code is that of the first failure.
///
/// # Errors
/// The result cannot be printed.
pub fn all(store: &Store, names: &[String], is_json: bool) -> Result<ExitCode, Failure> {
    let (mut reports, mut code) = (Vec::new(), None);
    for name in names {
        let error = match one(store, name) {
            Ok(()) => None,
            Err(failure) => {
                let own = failure.report("nacre");
                code.get_or_insert(own);
                Some(failure.what)
            }
        };
        reports.push(DiscardReport { name: name.clone(), discarded: error.is_none(), error });
    }
    if is_json {
        output::print(&json(&reports)?)?;
    }
    Ok(code.unwrap_or(ExitCode::SUCCESS))
}

/// Removes a workspace with all that belongs to it.
///
/// # Errors
/// It is in use, or cannot be removed.
pub fn one(store: &Store, name: &str) -> Result<(), Failure> {
    let (workspace, _lock) = store.open_locked(name, LockMode::Exclusive)?;
    workspace.check_no_commit()?;
    // Nobody can change its directories while they are removed, also from another mount namespace.
    view::unmount_whole(&workspace)?;
    store.remove(&workspace)?;
    of_pool::release(&workspace.settings)
}
