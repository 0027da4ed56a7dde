//! Copies trees of millions of files: in parallel, with all metadata, and resumable.
//!
//! Called by `nacre copy`. [`run`] walks SOURCE with several workers ([`walk`]) that share a bounded [`queue`],
//! copies each entry ([`entry`], [`content`], [`metadata`]), keeps hard links ([`links`]), and records its progress
//! in DEST ([`state`]).
//!
//! Invariants:
//! - a file has its name in DEST only when its data and all its metadata are complete: it is made under a temporary
//!   name and renamed;
//! - every name is looked up in an open directory, one component at a time, and never through a symbolic link, so
//!   that a user who moves entries in SOURCE or DEST meanwhile cannot lead the copy elsewhere;
//! - memory does not grow with the number of files; it grows with the number of files with further hard links that
//!   have not been found yet, by about 150 bytes each.
//!   names that have not been met yet, by about 150 bytes each.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod compare;
mod content;
mod destination;
mod entry;
mod figures;
mod job;
mod links;
mod metadata;
mod pair;
mod queue;
mod run;
mod scout;
mod state;
mod trouble;
mod walk;

pub use figures::{Figures, Snapshot};
pub use run::run;

use std::path::PathBuf;

/// Source, destination and options of a copy.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory whose content is copied.
    pub source: PathBuf,
    /// The directory that it is copied to; made where it is missing.
    pub destination: PathBuf,
    /// Number of concurrent workers.
    pub jobs: usize,
    /// DEST may have content: files with the same size and time stay, different ones are replaced, all others stay.
    pub update: bool,
    /// Whether DEST is read back and compared.
    pub verify: Verify,
    /// Whether blocks are shared where the file system supports it.
    pub reflink: Reflink,
    /// Directories on other file systems than SOURCE are made, but left empty.
    pub one_file_system: bool,
    /// Everything that DEST cannot hold is a failure, not a notice.
    pub strict: bool,
    /// Whether everything is synced when the copy ends.
    pub sync: bool,
    /// Whether entries and bytes are counted ahead, for an estimate of the remaining time.
    pub estimate: bool,
}

/// Whether the copy is read back and compared with SOURCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// Do not compare.
    No,
    /// Compare after copying.
    After,
    /// Nothing is copied, only compared.
    Only,
}

/// Whether files share their blocks with those of SOURCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reflink {
    /// Share blocks where the file system supports it.
    Auto,
    /// Files that cannot share blocks are failures.
    Always,
    /// Data is always copied.
    Never,
}

/// Message of a running copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyEvent {
    /// An entry that was not copied, or differs: what, where and why.
    Failed(String),
    /// A notice for the user.
    Notice(String),
}

/// Result of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The copy has continued an interrupted one.
    pub resumed: bool,
    /// The copy was stopped on request.
    pub interrupted: bool,
    /// Why the copy could not continue.
    pub fatal: Option<Fatal>,
    /// Entries that failed.
    pub failures: u64,
}

impl Outcome {
    /// Whether the copy is complete.
    pub fn complete(&self) -> bool {
        !self.interrupted && self.fatal.is_none() && self.failures == 0
    }
}

/// Why a copy could not continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fatal {
    /// What, where and why.
    pub what: String,
    /// The resource that is exhausted, if that is the reason.
    pub lack: Option<Lack>,
}

/// A resource that may be exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Space on the device.
    Room,
    /// The user's quota.
    Quota,
    /// File descriptors.
    OpenFiles,
}

/// Kind of reason why a copy did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// A named file does not exist.
    NotFound,
    /// The user has no permission.
    Denied,
    /// Another copy is running there.
    Busy,
    /// DEST is not empty, SOURCE cannot be copied ...
    Refused,
}

/// A copy that did not begin; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What, where and why.
    pub what: String,
    /// What to do next; may be empty.
    pub next: String,
    /// Kind of reason.
    pub kind: RefusalKind,
}
