//! Copying trees of millions of files: in parallel, with everything that belongs to a file, and so
//! that it can be interrupted.
//!
//! Called by `nacre copy`. [`run`] walks SOURCE with several workers ([`walk`]) that share a
//! bounded [`queue`], copies what each entry is ([`entry`], [`content`], [`metadata`]), keeps hard
//! links ([`links`]), and notes in DEST how far it has come ([`state`]).
//!
//! Invariants:
//! - a file has its name in DEST only when its data and all its metadata are in place: it is made
//!   under a temporary name and renamed;
//! - every name is looked up in a directory that is open, one component at a time, and never
//!   through a symbolic link, so that somebody who moves things in SOURCE or DEST meanwhile leads
//!   the copy nowhere else;
//! - memory does not grow with the number of files; it grows with the number of files with several
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

/// What is copied where, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory whose content is copied.
    pub source: PathBuf,
    /// The directory that becomes like it; made where it is missing.
    pub destination: PathBuf,
    /// How many files are copied at a time.
    pub jobs: usize,
    /// DEST may hold something: what is the same by size and time stays, what differs is replaced,
    /// the rest is left alone.
    pub update: bool,
    /// Whether DEST is read back and compared.
    pub verify: Verify,
    /// Whether blocks are shared where the file system can.
    pub reflink: Reflink,
    /// Directories on other file systems than SOURCE are made, but left empty.
    pub one_file_system: bool,
    /// Everything that DEST cannot hold is a failure, not a notice.
    pub strict: bool,
    /// Whether everything is on the device when the copy ends.
    pub sync: bool,
    /// Whether entries and bytes are counted ahead, for an estimate of the time left.
    pub estimate: bool,
}

/// Whether the copy is read back and compared with SOURCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// No.
    No,
    /// After copying.
    After,
    /// Nothing is copied, only compared.
    Only,
}

/// Whether files share their blocks with those of SOURCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reflink {
    /// Where the file system can.
    Auto,
    /// Files that cannot are failures.
    Always,
    /// Data is always copied.
    Never,
}

/// Something to be told while the copy goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyEvent {
    /// An entry that was not copied, or is not the same: what, where and why.
    Failed(String),
    /// Something that whoever copies may want to know.
    Notice(String),
}

/// How a copy ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// It took up an earlier one that was interrupted.
    pub resumed: bool,
    /// Somebody asked it to stop.
    pub interrupted: bool,
    /// Why it could not go on at all.
    pub fatal: Option<Fatal>,
    /// Entries that failed.
    pub failures: u64,
}

impl Outcome {
    /// Whether everything is as was asked for.
    pub fn complete(&self) -> bool {
        !self.interrupted && self.fatal.is_none() && self.failures == 0
    }
}

/// Why a copy could not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fatal {
    /// What, where and why.
    pub what: String,
    /// What there is too little of, where that is the reason.
    pub lack: Option<Lack>,
}

/// What there may be too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Room on the device.
    Room,
    /// Room that the user may take.
    Quota,
    /// Descriptors of open files.
    OpenFiles,
}

/// Why a copy did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// Something that was named is not there.
    NotFound,
    /// The system does not let this user.
    Denied,
    /// Another copy is at work there.
    Busy,
    /// DEST holds something, SOURCE is none of the things that can be copied...
    Refused,
}

/// A copy that did not begin; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What, where and why.
    pub what: String,
    /// What to do next; may be empty.
    pub next: String,
    /// What sort of reason.
    pub kind: RefusalKind,
}
