//! The steps of a commit, as the journal has them.
//!
//! Paths are relative to the base. *Old* paths are those before any step; *new* paths are those after all of them.

use crate::{
    meta::{Meta, Time, Xattrs},
    text,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A place in one of the staging directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Slot {
    /// Index of the staging directory.
    pub(crate) stage: usize,
    /// The name there.
    pub(crate) number: usize,
}

/// An entry of the base as the plan saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) ino: u64,
    /// Type bits of the mode.
    pub(crate) kind: u32,
    /// Size and modification time; `None` for directories, and for files that the commit itself changes.
    pub(crate) content: Option<(u64, Time)>,
}

const TYPE: u32 = 0o170_000;

impl Expected {
    pub(crate) fn new(meta: &Meta, is_changed_by_us: bool) -> Expected {
        let content = if meta.is_directory() || is_changed_by_us { None } else { Some((meta.size, meta.mtime)) };
        Expected { ino: meta.ino, kind: meta.mode & TYPE, content }
    }

    /// Whether an entry is the expected one.
    pub(crate) fn is(&self, meta: &Meta) -> bool {
        self.ino == meta.ino
            && self.kind == meta.mode & TYPE
            && self.content.is_none_or(|content| content == (meta.size, meta.mtime))
    }
}

/// How a staged entry is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Make {
    /// A directory.
    Directory {
        /// Steps that follow put entries into it, so its owner has to be able to.
        stays_open: bool,
    },
    /// A copy of a file of the upper.
    Copy {
        /// The file itself may get another name instead: nothing in the workspace keeps it.
        may_link: bool,
    },
    /// Another name of a staged file.
    LinkOfStaged {
        slot: Slot,
        #[serde(with = "text::path")]
        within: PathBuf,
    },
    /// Another name of a file of the base.
    LinkOfBase {
        #[serde(with = "text::path")]
        path: PathBuf,
        ino: u64,
    },
    /// A copy of the content of a file of the base, to restore it.
    Backup {
        #[serde(with = "text::path")]
        path: PathBuf,
        expected: Expected,
    },
}

/// An entry that is made in a staging directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    pub(crate) slot: Slot,
    /// Path in the slot; empty for the slot itself.
    #[serde(with = "text::path")]
    pub(crate) within: PathBuf,
    /// Path of the file in the state directory of the workspace.
    #[serde(with = "text::path")]
    pub(crate) source: PathBuf,
    /// Inode number, size and modification time of that file.
    pub(crate) ino: u64,
    pub(crate) size: u64,
    pub(crate) mtime: Time,
    pub(crate) make: Make,
    /// Labels of security modules that the entry takes over from the one that it replaces.
    #[serde(with = "text::xattrs")]
    pub(crate) labels: Xattrs,
    /// New path of the entry.
    #[serde(with = "text::path")]
    pub(crate) destination: PathBuf,
}

/// Attributes that are set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dress {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) atime: Time,
    pub(crate) mtime: Time,
    #[serde(with = "text::xattrs")]
    pub(crate) xattrs: Xattrs,
}

impl Dress {
    pub(crate) fn new(meta: &Meta, xattrs: Xattrs) -> Dress {
        Dress { mode: meta.mode, uid: meta.uid, gid: meta.gid, atime: meta.atime, mtime: meta.mtime, xattrs }
    }
}

/// New attributes of an entry that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SetAttributes {
    /// Old path.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) expected: Expected,
    pub(crate) before: Dress,
    pub(crate) after: Dress,
}

/// New content of a file with several names, which stays one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Overwrite {
    /// Old path.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) expected: Expected,
    /// The content after, and before.
    pub(crate) new: Slot,
    pub(crate) old: Slot,
}

/// A directory that its owner may not write to is opened for the time of the commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unlock {
    /// Old path.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) ino: u64,
    pub(crate) mode: u32,
}

/// An entry of the base goes to a staging directory: it is removed, or is placed elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Detach {
    /// Old path.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) slot: Slot,
    pub(crate) expected: Expected,
}

/// An entry of a staging directory gets its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// New path.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) slot: Slot,
    /// The entry that it replaces, which then is in the slot.
    pub(crate) over: Option<Expected>,
}

/// An entry in a directory that goes, as the plan saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Path in that directory.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) expected: Expected,
}

/// A directory of the base that is removed or replaced. It is deleted only if nothing else is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Going {
    /// The slot that it goes to.
    pub(crate) slot: Slot,
    pub(crate) ino: u64,
    pub(crate) entries: Vec<Seen>,
}

/// Final mode and times of a directory in which names were changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FinishDirectory {
    /// New path.
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) mode: u32,
    /// Access and modification time; `None` where others have changed the directory.
    pub(crate) times: Option<(Time, Time)>,
    /// Of a directory that was there before: its old path, mode, and times.
    pub(crate) before: Option<DirectoryBefore>,
}

/// A directory before the commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirectoryBefore {
    #[serde(with = "text::path")]
    pub(crate) path: PathBuf,
    pub(crate) ino: u64,
    pub(crate) mode: u32,
    pub(crate) atime: Time,
    pub(crate) mtime: Time,
}

/// All steps of a commit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Steps {
    pub(crate) version: u32,
    /// Inode number of the base's top.
    pub(crate) base: u64,
    /// Old paths of the staging directories: one in each file system.
    #[serde(with = "text::paths")]
    pub(crate) stages: Vec<PathBuf>,
    pub(crate) unlocks: Vec<Unlock>,
    pub(crate) staged: Vec<Staged>,
    pub(crate) overwrites: Vec<Overwrite>,
    pub(crate) attributes: Vec<SetAttributes>,
    /// The deepest paths first.
    pub(crate) detaches: Vec<Detach>,
    /// From the top down.
    pub(crate) places: Vec<Place>,
    pub(crate) going: Vec<Going>,
    /// The deepest paths first.
    pub(crate) finishes: Vec<FinishDirectory>,
    /// Paths in the state directory that are removed with everything below.
    #[serde(with = "text::paths")]
    pub(crate) upper_entries: Vec<PathBuf>,
    /// Directories in the state directory that are removed where they are empty, the deepest first.
    #[serde(with = "text::paths")]
    pub(crate) upper_directories: Vec<PathBuf>,
    /// Number of changed names, for the result.
    pub(crate) names: u64,
}

/// The version of the format.
pub(crate) const VERSION: u32 = 3;
