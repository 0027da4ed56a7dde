//! The contract of `Layer` as a list of named checks. Every layer, filter and stack that is
//! writable passes [`run`]; one that refuses changes passes [`read_only`].
//!
//! Callers: `crates/layers/tests/conformance.rs` and tests of single layers. Each check gets a
//! fresh layer; a check of an operation that the layer lacks (EOPNOTSUPP, ENOSYS) reports that and
//! passes, everything else has to hold.

mod attributes;
mod content;
mod listing;
mod locks;
mod names;
mod open_files;
mod read_only;
mod renames;
mod threads;
mod xattrs;

pub use read_only::{populate, read_only};

use crate::World;
use nacre_vfs::{Errno, Layer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// One check of the contract, with its name.
pub type Check = (&'static str, fn(&World));

/// Intended differences of a stack, whose checks do not apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changes {
    /// Nothing: every check applies.
    Nothing,
    /// Owners or modes, shown or stored: the checks named `attributes::*` about them are left out.
    Owners,
}

/// All checks, in the order in which they run.
pub fn checks() -> Vec<Check> {
    [
        names::CHECKS,
        content::CHECKS,
        open_files::CHECKS,
        attributes::CHECKS,
        renames::CHECKS,
        listing::CHECKS,
        xattrs::CHECKS,
        locks::CHECKS,
        threads::CHECKS,
    ]
    .concat()
}

/// Runs every check on a layer that `make` builds anew, empty, for each.
///
/// # Panics
/// After the last check, with the names of the failed ones.
pub fn run(make: impl Fn() -> Arc<dyn Layer>) {
    run_with(Changes::Nothing, make);
}

/// Runs the checks on a stack with intended differences, without those that do not apply.
///
/// # Panics
/// After the last check, with the names of the failed ones.
pub fn run_with(changes: Changes, make: impl Fn() -> Arc<dyn Layer>) {
    let mut failed = Vec::new();
    for (name, check) in checks() {
        if changes == Changes::Owners && attributes::ABOUT_OWNERS.contains(&name) {
            continue;
        }
        let world = World::new(make());
        if catch_unwind(AssertUnwindSafe(|| check(&world))).is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "{} checks of the contract failed: {}", failed.len(), failed.join(", "));
}

/// Whether the result means that the layer lacks an operation; reports that in the test's output.
pub(crate) fn lacks<T>(what: &str, answer: &Result<T, Errno>) -> bool {
    let lacks = matches!(answer, Err(Errno::EOPNOTSUPP | Errno::ENOSYS));
    if lacks {
        println!("note: the layer has no {what}");
    }
    lacks
}
