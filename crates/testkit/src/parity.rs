//! Parity: the same calls on two directories, one native and one on a mount. Each case logs its
//! results (return values, error numbers, attributes); the two logs have to be equal, line by line.
//!
//! Callers: the real-mount tests. The native directory is the reference; both directories have to
//! be on (or show) the same file system, because file systems differ from each other. Nothing that
//! differs from run to run goes into a log: no inode numbers, no times.

mod attributes;
mod content;
mod log;
mod names;
mod open_files;
mod xattrs;

pub use log::Log;

use rustix::fs::Mode;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Cases in which no mount of ours can behave like the file system below, with the reason; listed
/// for users in `docs/semantics.md`.
pub const UNAVOIDABLE: &[(&str, &str)] = &[
    ("reading without waiting", "the kernel's FUSE does not offer RWF_NOWAIT"),
    (
        "ranges collapsed and inserted",
        "the kernel's FUSE refuses FALLOC_FL_COLLAPSE_RANGE and FALLOC_FL_INSERT_RANGE itself",
    ),
    ("appending no longer", "in passthrough the kernel goes on appending where the file was opened with O_APPEND"),
    (
        "set-id bits and root's writes",
        "they go where the file is still in passthrough, as for a moment after its last close: there the daemon's rights count",
    ),
];

/// A test case: its name and its calls. It gets an empty directory of mode 0755.
pub type Case = (&'static str, fn(&mut Log));

/// All cases.
pub fn cases() -> Vec<Case> {
    [names::CASES, content::CASES, attributes::CASES, xattrs::CASES, open_files::CASES].concat()
}

/// Runs one case in a new directory below `place`; returns its log, with a panic as the last line.
fn observe(place: &Path, case: &Case, number: usize) -> Vec<String> {
    let directory = place.join(format!("parity-{number}"));
    rustix::fs::mkdir(&directory, Mode::from_raw_mode(0o755))
        .unwrap_or_else(|e| panic!("mkdir {}: {e}", directory.display()));
    rustix::fs::chmod(&directory, Mode::from_raw_mode(0o755)).expect("chmod");
    let mut log = Log::new(&directory);
    if catch_unwind(AssertUnwindSafe(|| case.1(&mut log))).is_err() {
        log.say("the case panicked");
    }
    log.lines()
}

/// Runs every case on both and compares.
///
/// # Panics
/// After the last case, with the lines that differ.
pub fn compare(native: &Path, mounted: &Path) {
    compare_except(native, mounted, UNAVOIDABLE);
}

/// Compares like [`compare`], without the named cases: for mounts with intended differences. Each
/// exception has its reason.
///
/// # Panics
/// After the last case, with the lines that differ; at once if an exception names no case.
pub fn compare_except(native: &Path, mounted: &Path, exceptions: &[(&str, &str)]) {
    let cases = cases();
    for (name, _) in exceptions {
        assert!(cases.iter().any(|case| case.0 == *name), "no case is called {name:?}");
    }
    let mut differences = String::new();
    for (number, case) in
        cases.iter().enumerate().filter(|(_, case)| exceptions.iter().all(|(name, _)| *name != case.0))
    {
        let (wanted, got) = (observe(native, case, number), observe(mounted, case, number));
        assert!(!wanted.is_empty(), "case {:?} saw nothing", case.0);
        for index in 0..wanted.len().max(got.len()) {
            let pair = (wanted.get(index), got.get(index));
            if pair.0 != pair.1 {
                let line = |side: Option<&String>| side.map_or("(nothing)", String::as_str).to_owned();
                differences.push_str(&format!(
                    "{}:\n  native:  {}\n  mounted: {}\n",
                    case.0,
                    line(pair.0),
                    line(pair.1)
                ));
            }
        }
    }
    assert!(differences.is_empty(), "{} differ from {}:\n{differences}", mounted.display(), native.display());
}
