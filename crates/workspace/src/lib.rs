//! Workspaces: what the upper directory of a union changes in its base, and how that gets into the base.
//!
//! Knows directories and files only, no mounts and no processes: the callers hold the workspace's lock and have
//! unmounted its view where the upper must not change (docs/decisions/workspaces.md has the layout, the marks and the
//! record of the base's identities). Invariants:
//! * only the upper and what it hides are walked, never all of the base, unless a file with other names there was changed;
//! * nothing in the base or the upper is reached by a path that users could redirect: every step is relative to an open
//!   directory, without following links;
//! * nothing in the base is changed before all conflicts are known and resolved.
#![forbid(unsafe_code)]

mod base;
mod beneath;
mod build;
mod changes;
mod clean;
mod compare;
mod content;
mod dress;
mod execute;
mod in_place;
mod journal;
mod layer;
mod meta;
mod patch;
mod plan;
mod steps;
#[cfg(test)]
mod tests;
mod text;
mod trouble;
mod upper;

pub use base::Base;
pub use changes::changes;
pub use journal::Journal;
pub use layer::{export, import};
pub use patch::patch;
pub use plan::CommitPlan;
pub use upper::Upper;

use serde::Serialize;
use std::fmt;

/// One changed name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Path relative to the base, names divided by `/`, any bytes; `.` for the top.
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
    /// Modification time of a file.
    pub times: bool,
    /// Which names lead to one file.
    pub links: bool,
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
