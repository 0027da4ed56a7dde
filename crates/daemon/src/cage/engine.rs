//! What all engines of cages have in common.
//!
//! The engines `loop` and `quota` leave all work to the kernel: no process of ours stays behind, so
//! what they made is remembered in [`super::record`]. [`engine`] gives the one that a record names.
//! The engine `fuse` is a mount with a daemon and made elsewhere.

use super::record::CageRecord;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// Kind of engine that enforces a cage's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The layer `cage`, in a daemon.
    Fuse,
    /// An image with a file system of its own.
    Loop,
    /// Quotas of the file system that the directory lies on.
    Quota,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineKind::Fuse => "fuse",
            EngineKind::Loop => "loop",
            EngineKind::Quota => "quota",
        })
    }
}

/// A file system of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileSystem {
    /// The file system ext4.
    Ext4,
    /// The file system XFS.
    Xfs,
    /// The file system Btrfs.
    Btrfs,
}

impl FileSystem {
    /// Returns the kernel's name of the file system.
    pub fn word(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
            FileSystem::Btrfs => "btrfs",
        }
    }

    /// Returns the file system of this name.
    pub fn of(word: &str) -> Option<FileSystem> {
        [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs].into_iter().find(|kind| kind.word() == word)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A cage as requested by the user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The directory: absolute and canonical.
    pub directory: PathBuf,
    /// Mount point if it is not the directory itself, canonical; `None`: mounted over the directory.
    pub mountpoint: Option<PathBuf>,
    /// Limit of bytes.
    pub bytes: Option<u64>,
    /// Limit of inodes.
    pub inodes: Option<u64>,
    /// Image file of the engine `loop`.
    pub image: Option<PathBuf>,
    /// File system of the image.
    pub fstype: Option<FileSystem>,
    /// The image is sparse: it takes space only as it fills.
    pub sparse: bool,
    /// The first option given that only the engine `fuse` has, as the user wrote it.
    pub fuse_only: Option<String>,
}

impl Wanted {
    /// Mount point of the cage.
    pub fn place(&self) -> &std::path::Path {
        self.mountpoint.as_deref().unwrap_or(&self.directory)
    }

    /// Refuses options that only the engine `fuse` supports.
    ///
    /// # Errors
    /// The first of these options.
    pub fn only_limits(&self, engine: EngineKind) -> Result<(), Failure> {
        match &self.fuse_only {
            Some(option) => {
                Err(Failure::usage(format!("{option} works only with --engine=fuse, not with --engine={engine}")))
            }
            None => Ok(()),
        }
    }
}

/// Limits and usage of a cage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    /// Whether the limit is in force (engine `loop`: whether the image is mounted; if not, the figures of usage are
    /// 0).
    pub attached: bool,
    /// The limit in bytes: the most that the cage can take from the host.
    pub limit: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that still fit.
    pub free: u64,
    /// The limit of inodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inode_limit: Option<u64>,
    /// Inodes in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inodes_used: Option<u64>,
    /// Bytes of the image on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_host: Option<u64>,
    /// How it works, in words: `ext4 on /dev/loop0, direct I/O`.
    pub mode: String,
    /// Remarks for the user, one sentence each.
    pub notes: Vec<String>,
    /// The line of fstab(5) that brings it back after a reboot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fstab: Option<String>,
}

/// Callback that gets progress messages and warnings, a line each.
pub type Tell<'a> = &'a mut dyn FnMut(&str);

/// Engine that enforces a limit without a process of ours.
pub trait CageEngine: Sync {
    /// Makes a cage or takes an existing one up again, and records it.
    ///
    /// # Errors
    /// What prevents it; nothing stays behind then, unless the message says so.
    fn create(&self, wanted: &Wanted, tell: Tell<'_>) -> Result<CageRecord, Failure>;

    /// Changes the limits that are `Some`.
    ///
    /// # Errors
    /// A limit that this engine cannot take; the cage is as it was, or as the message says.
    fn resize(
        &self,
        record: &CageRecord,
        bytes: Option<u64>,
        inodes: Option<u64>,
        tell: Tell<'_>,
    ) -> Result<CageRecord, Failure>;

    /// Returns limits and usage.
    ///
    /// # Errors
    /// The system does not report them.
    fn figures(&self, record: &CageRecord) -> Result<Figures, Failure>;

    /// Ends the cage (`nacre umount`). Its content stays.
    ///
    /// # Errors
    /// In use, or refused by the system.
    fn detach(&self, record: &CageRecord, lazy: bool) -> Result<(), Failure>;

    /// Ends the cage and removes everything that was made for it. The engine `loop` removes the image **with all
    /// its content**.
    ///
    /// # Errors
    /// In use, or refused by the system.
    fn destroy(&self, record: &CageRecord, tell: Tell<'_>) -> Result<(), Failure>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_have_one_name_each() {
        for kind in [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs] {
            assert_eq!(FileSystem::of(kind.word()), Some(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.to_string());
        }
        assert_eq!(FileSystem::of("vfat"), None);
        assert_eq!(serde_json::to_value(EngineKind::Loop).unwrap(), EngineKind::Loop.to_string());
    }
}
