//! What the verbs need of mounting. Implemented by the process that owns the pool (over FUSE) and
//! by tests.

use std::path::{Path, PathBuf};

use nacre_pool::engine::Changes;
use serde::{Deserialize, Serialize};

use crate::refusal::{Kind, Refusal};

/// What is mounted: a dataset, or one of its snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct What {
    /// The number of the dataset.
    pub dataset: u64,
    /// The txg of the snapshot; `None`: the head.
    pub snapshot: Option<u64>,
}

impl What {
    /// A dataset as it is now.
    #[must_use]
    pub fn head(dataset: u64) -> Self {
        Self { dataset, snapshot: None }
    }
}

/// How a file system is shared over the network: what its properties say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharing {
    /// The number of the dataset in the world.
    pub guid: u64,
    /// `sharenfs`.
    pub nfs: String,
    /// `sharesmb`.
    pub smb: String,
}

impl Sharing {
    /// Whether it is to be shared at all.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        [&self.nfs, &self.smb].iter().any(|value| !matches!(value.as_str(), "" | "off"))
    }
}

/// How it is mounted: from properties and `-o`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    /// What the mount table calls it: the dataset's name.
    pub source: String,
    /// Nothing may be changed.
    pub read_only: bool,
    /// Programs may not be run.
    pub no_exec: bool,
    /// Set-user-id bits are without effect.
    pub no_suid: bool,
    /// Device files are without effect.
    pub no_dev: bool,
    /// Reading changes no access time.
    pub no_atime: bool,
    /// What is written is durable when write(2) returns.
    #[serde(default)]
    pub synchronous: bool,
    /// A mount over a directory that is not empty is fine.
    pub overlay: bool,
    /// Who else gets it.
    #[serde(default)]
    pub sharing: Sharing,
    /// A command of this machine has named the directory: it is not the pool's `mountpoint`.
    #[serde(default)]
    pub place_was_named: bool,
}

/// A mount that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// What.
    pub what: What,
    /// Where.
    pub at: PathBuf,
    /// How.
    pub options: MountOptions,
}

/// What is done at one moment: it calls what it is given when that is over.
pub type AtOneMoment<'a> = dyn FnMut(&mut dyn FnMut()) -> Result<(), Refusal> + 'a;

/// The mounts of one imported pool.
pub trait Mounts: Send + Sync {
    /// Mounts something; the directory is made where it is missing.
    ///
    /// # Errors
    /// Why not.
    fn mount(&self, what: What, at: &Path, options: &MountOptions) -> Result<(), Refusal>;

    /// Makes the directory of a mount that is about to be made, where it is missing: what was made
    /// goes with [`Mounts::not_mounted`], or with the mount.
    ///
    /// # Errors
    /// Why not: in the words of the mount.
    fn make_place(&self, at: &Path, options: &MountOptions) -> Result<(), Refusal>;

    /// The mounts are not made for which [`Mounts::make_place`] was called.
    fn not_mounted(&self);

    /// Unmounts it and ends its file system for all mount namespaces; nothing where it is not mounted.
    /// With `force` even while it is used.
    ///
    /// # Errors
    /// [`Kind::Busy`] while somebody uses it, or another mount namespace has it mounted.
    fn unmount(&self, what: What, force: bool) -> Result<(), Refusal>;

    /// Unmounts it in the mount namespace of the pool. Where another one has it mounted as well, it is
    /// served there on, and counts as hidden here.
    ///
    /// # Errors
    /// [`Kind::Busy`] while somebody uses it in this mount namespace.
    fn detach(&self, what: What) -> Result<(), Refusal> {
        self.unmount(what, false)
    }

    /// Whether it could be unmounted now, as far as that can be told without doing it: of one on
    /// which nothing else is mounted. Nothing changes.
    ///
    /// # Errors
    /// [`Kind::Busy`] while somebody uses it.
    fn is_free(&self, what: What) -> Result<(), Refusal>;

    /// The datasets whose mounts are there, but not to be seen: something was mounted over a
    /// directory above them later.
    fn hidden(&self) -> Vec<u64>;

    /// Removes the directory of a mount that has left it, where it is empty.
    fn tidy(&self, at: &Path);

    /// Gives a mount other options, where it is mounted.
    ///
    /// # Errors
    /// Why not.
    fn remount(&self, what: What, options: &MountOptions) -> Result<(), Refusal>;

    /// What of the options of a mount counts only from its next mount on, as a sentence.
    fn begins_later(&self, what: What) -> Option<String> {
        let _ = what;
        None
    }

    /// Shares a mount as its properties say, once more where it is shared already: the server may
    /// have been started since.
    ///
    /// # Errors
    /// Why not.
    fn share(&self, dataset: u64) -> Result<(), Refusal> {
        let _ = dataset;
        Ok(())
    }

    /// Takes the shares of a mount back, until it is mounted again or [`Mounts::share`] comes.
    fn unshare(&self, dataset: u64) {
        let _ = dataset;
    }

    /// Why a mount is not shared although its properties want it.
    fn share_failure(&self, dataset: u64) -> Option<String> {
        let _ = dataset;
        None
    }

    /// There may be less room than before for what is written: quotas, reservations.
    fn room_changed(&self) {}

    /// All mounts, in the order in which they were made.
    fn mounted(&self) -> Vec<Mounted>;

    /// Has the kernel write back what it holds for these datasets: what was written before the call
    /// is in the engine when it returns.
    ///
    /// # Errors
    /// A write that failed.
    fn settle(&self, datasets: &[u64]) -> Result<(), Refusal>;

    /// Does what is to see these datasets at one moment: what was written before the call is in the
    /// engine then, and of what is written meanwhile nothing without what its writer had written
    /// before. `act` calls what it is given as soon as the moment is over.
    ///
    /// # Errors
    /// As [`Self::settle`]; those of `act`.
    fn at_one_moment(&self, datasets: &[u64], act: &mut AtOneMoment<'_>) -> Result<(), Refusal>;

    /// Makes the files of a dataset others, by `replace`, where it is mounted: nothing that was
    /// open before reaches the new ones, and what the kernel and the mount know of the old ones is
    /// forgotten.
    ///
    /// # Errors
    /// [`Kind::Busy`] where others have mounted something below it, and those of `replace`: nothing
    /// has changed then.
    fn replace(&self, dataset: u64, replace: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal>;

    /// Names have come to or gone from the root directory of a dataset, by a property.
    fn root_changed(&self, dataset: u64);

    /// The files of a dataset have changed elsewhere: what the kernel knows of what differs is forgotten.
    fn changed(&self, dataset: u64, changes: &Changes) {
        let _ = (dataset, changes);
    }
}

/// No mounts at all: for pools that are imported without (`-N`), and for tests.
#[derive(Debug, Default)]
pub struct NoMounts;

impl Mounts for NoMounts {
    fn mount(&self, _: What, at: &Path, _: &MountOptions) -> Result<(), Refusal> {
        Err(Refusal::new(
            Kind::Invalid,
            format!("cannot mount at {}: this pool is imported without mounts", at.display()),
        ))
    }

    fn make_place(&self, _: &Path, _: &MountOptions) -> Result<(), Refusal> {
        Ok(())
    }

    fn not_mounted(&self) {}

    fn unmount(&self, _: What, _: bool) -> Result<(), Refusal> {
        Ok(())
    }

    fn is_free(&self, _: What) -> Result<(), Refusal> {
        Ok(())
    }

    fn hidden(&self) -> Vec<u64> {
        Vec::new()
    }

    fn tidy(&self, _: &Path) {}

    fn remount(&self, _: What, _: &MountOptions) -> Result<(), Refusal> {
        Ok(())
    }

    fn mounted(&self) -> Vec<Mounted> {
        Vec::new()
    }

    fn settle(&self, _: &[u64]) -> Result<(), Refusal> {
        Ok(())
    }

    /// Nobody writes without a mount.
    fn at_one_moment(&self, _: &[u64], act: &mut AtOneMoment<'_>) -> Result<(), Refusal> {
        act(&mut || {})
    }

    fn replace(&self, _: u64, replace: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        replace()
    }

    fn root_changed(&self, _: u64) {}
}
