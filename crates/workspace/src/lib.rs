//! Workspaces: what the upper directory of a union changes in its base, and how that gets into the base.
//!
//! Knows directories and files only, no mounts and no processes: the callers hold the workspace's lock and have
//! unmounted its view where the upper must not change (docs/decisions/workspaces.md has the layout, the marks and the
//! record of the base's identities). Invariants:
//! * only the upper and what it hides are walked, never all of the base;
//! * nothing in the base or the upper is reached by a path that users could redirect: every step is relative to an open
//!   directory, without following links;
//! * nothing in the base is changed before all conflicts are known and resolved.
#![forbid(unsafe_code)]
#![allow(unused_variables, clippy::todo, reason = "bodies follow")]

use serde::Serialize;
use std::{
    fmt,
    io::{Read, Write},
    path::Path,
};

/// The directories that a workspace was made from, the topmost first, open.
#[derive(Debug)]
pub struct Base {}

/// The changes of a workspace: its upper directory, hard-link index and identity log, open.
#[derive(Debug)]
pub struct Upper {}

/// One changed name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Path relative to the base, names divided by `/`; any bytes.
    pub path: Vec<u8>,
    /// Kind of the change.
    pub kind: ChangeKind,
    /// Attributes in the base; `None` for added names.
    pub old: Option<Entry>,
    /// Attributes in the view; `None` for removed names.
    pub new: Option<Entry>,
}

/// Kind of a change of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// A new name.
    Added,
    /// A name that is not there any more; of a directory, with everything in it.
    Removed,
    /// The entry was `from` in the base. Its content or attributes may have changed as well.
    Renamed {
        /// Path in the base.
        from: Vec<u8>,
        /// Changes beyond the name.
        aspects: Aspects,
    },
    /// Another file, or the same one with changes.
    Modified(Aspects),
}

/// The changed aspects of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Aspects {
    /// Content of a file.
    pub content: bool,
    /// File type, as a file in place of a directory.
    pub kind: bool,
    /// Permission bits.
    pub mode: bool,
    /// User or group.
    pub owner: bool,
    /// Extended attributes, ACLs and capabilities included.
    pub xattrs: bool,
    /// Target of a symbolic link.
    pub target: bool,
    /// Number of a device.
    pub device: bool,
}

/// Attributes of an entry on one side of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes of a file or of a link's target.
    pub size: u64,
}

/// Paths that a command is limited to; empty: all. A directory stands for everything below it.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Paths relative to the base.
    pub paths: Vec<Vec<u8>>,
}

/// A path that others changed in the base since the workspace hid it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Path in the base.
    pub path: Vec<u8>,
    /// What the workspace did: `added`, `modified`, `removed`, `renamed`.
    pub ours: &'static str,
    /// What others did in the base: `added`, `modified`, `removed`, `replaced`.
    pub theirs: &'static str,
}

/// Outcome of a conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The workspace's change is made.
    Ours,
    /// The base stays as it is; the change is dropped from the workspace.
    Theirs,
}

/// A property of a change that an administrator has to confirm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Danger {
    /// Path in the base.
    pub path: Vec<u8>,
    /// Words for the user: `set-user-id of root`, `owned by 1001:1001`, `block device 8:0`.
    pub what: String,
}

/// The steps of a commit, before any is made.
#[derive(Debug)]
pub struct CommitPlan {}

/// The record of a commit in `commit/`, by which it is continued or undone after a crash.
#[derive(Debug)]
pub struct Journal {}

/// Figures of a finished commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Committed {
    /// Changed names.
    pub names: u64,
    /// Bytes of content that were copied or moved.
    pub bytes: u64,
}

/// How the conflicts of a commit are looked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct CommitOptions {
    /// Of files whose inode or ctime differ: no conflict where content and attributes are those of the workspace.
    pub compare_content: bool,
}

/// An error with the path and the system's reason, as a sentence.
#[derive(Debug)]
pub struct WorkspaceError {
    /// The sentence.
    pub what: String,
    /// Number of the system's error, if there is one.
    pub errno: Option<i32>,
}

impl fmt::Display for WorkspaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for WorkspaceError {}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, WorkspaceError>;

impl Base {
    /// Opens the directories of a base, the topmost first.
    ///
    /// # Errors
    /// One is missing or cannot be read.
    pub fn open(directories: &[impl AsRef<Path>]) -> Result<Base> {
        todo!()
    }
}

impl Upper {
    /// Opens the upper directory, hard-link index and identity log in the state directory of a workspace, or of one of
    /// its snapshots.
    ///
    /// # Errors
    /// One is missing or cannot be read.
    pub fn open(state: &Path) -> Result<Upper> {
        todo!()
    }
}

/// The changes of a workspace, in the order of their paths.
///
/// # Errors
/// Something in upper or base cannot be read.
pub fn changes(base: &Base, upper: &Upper, selection: &Selection) -> Result<Vec<Change>> {
    todo!()
}

/// Writes changes as a patch in git's unified form, which `git apply` and `patch -p1` apply.
///
/// # Errors
/// Something cannot be read, or `out` fails.
pub fn patch(base: &Base, upper: &Upper, changes: &[Change], out: &mut dyn Write) -> Result<()> {
    todo!()
}

impl CommitPlan {
    /// Plans a commit of these changes; finds conflicts and dangers.
    ///
    /// # Errors
    /// Several bases, or something cannot be read.
    pub fn new(base: &Base, upper: &Upper, changes: Vec<Change>, options: CommitOptions) -> Result<CommitPlan> {
        todo!()
    }

    /// The conflicts without a resolution.
    pub fn conflicts(&self) -> Vec<Conflict> {
        todo!()
    }

    /// Resolves the conflicts of a path.
    pub fn resolve(&mut self, path: &[u8], resolution: Resolution) {
        todo!()
    }

    /// The changes that an administrator has to confirm: set-id bits, capabilities, devices, other owners than the
    /// caller's `uid`.
    pub fn dangers(&self, uid: u32) -> Vec<Danger> {
        todo!()
    }

    /// Makes the changes in the base, and removes them from the upper. `journal` is the directory `commit/`, which must
    /// not be there; it is gone afterwards.
    ///
    /// # Errors
    /// Conflicts without a resolution; a step failed: the journal stays, and says whether it can be continued or undone.
    pub fn run(self, journal: &Path) -> Result<Committed> {
        todo!()
    }
}

impl Journal {
    /// Opens the journal of an interrupted commit; `None` where there is none.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(journal: &Path) -> Result<Option<Journal>> {
        todo!()
    }

    /// Makes the remaining steps.
    ///
    /// # Errors
    /// A step failed, or what it would replace has been changed by others.
    pub fn resume(self, base: &Base, upper: &Upper) -> Result<Committed> {
        todo!()
    }

    /// Whether all steps that were made can be taken back.
    pub fn can_undo(&self) -> bool {
        todo!()
    }

    /// Takes back the steps that were made.
    ///
    /// # Errors
    /// A step failed, or what it would restore has been changed by others.
    pub fn undo(self, base: &Base, upper: &Upper) -> Result<()> {
        todo!()
    }
}

/// Writes the upper as tar: a layer in OCI's form, with whiteouts.
///
/// # Errors
/// Something cannot be read, or `out` fails.
pub fn export(upper: &Upper, out: &mut dyn Write) -> Result<()> {
    todo!()
}

/// Reads a layer in OCI's form into the upper of a workspace without changes.
///
/// # Errors
/// The archive is malformed or has names outside of the base; nothing of it stays.
pub fn import(base: &Base, upper: &Upper, archive: &mut dyn Read) -> Result<()> {
    todo!()
}
