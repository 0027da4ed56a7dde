//! The verbs' interface to mounts. Implemented by the process that owns the pool (over FUSE) and by tests.

use std::path::{Path, PathBuf};

use nacre_pool::engine::Changes;
use serde::{Deserialize, Serialize};

use crate::refusal::{Kind, Refusal};
use crate::system_places::{self, PlaceState};

/// Object that is mounted: a dataset, or one of its snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct What {
    /// The number of the dataset.
    pub dataset: u64,
    /// The txg of the snapshot; `None`: the head.
    pub snapshot: Option<u64>,
}

impl What {
    /// The live dataset, not a snapshot.
    #[must_use]
    pub fn head(dataset: u64) -> Self {
        Self { dataset, snapshot: None }
    }
}

/// Network shares of a file system, from its properties.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharing {
    /// GUID of the dataset.
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

/// Mount options, from properties and `-o`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    /// Source in the mount table: the dataset's name.
    pub source: String,
    /// Read-only mount.
    pub read_only: bool,
    /// Programs may not be run.
    pub no_exec: bool,
    /// Set-user-id bits are without effect.
    pub no_suid: bool,
    /// Device files are without effect.
    pub no_dev: bool,
    /// Reading changes no access time.
    pub no_atime: bool,
    /// Data is durable when write(2) returns (`sync=always`).
    #[serde(default)]
    pub synchronous: bool,
    /// A mount over a directory that is not empty is fine.
    pub overlay: bool,
    /// Its network shares.
    #[serde(default)]
    pub sharing: Sharing,
    /// A command of this machine has named the directory: it is not the pool's `mountpoint`.
    #[serde(default)]
    pub place_was_named: bool,
}

/// An existing mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// The mounted object.
    pub what: What,
    /// The mount point.
    pub at: PathBuf,
    /// The mount options.
    pub options: MountOptions,
}

/// An action that runs behind the write barrier of [`Mounts::at_one_moment`]: it calls its argument
/// to lift the barrier.
pub type AtOneMoment<'a> = dyn FnMut(&mut dyn FnMut()) -> Result<(), Refusal> + 'a;

/// The mounts of one imported pool.
pub trait Mounts: Send + Sync {
    /// Mounts an object; a missing mount point is made.
    ///
    /// # Errors
    /// The mount failed, or the directory could not be made.
    fn mount(&self, what: What, at: &Path, options: &MountOptions) -> Result<(), Refusal>;

    /// Makes the directory of a mount that is about to be made, where it is missing.
    /// [`Mounts::not_mounted`] removes it, or the end of the mount does.
    ///
    /// # Errors
    /// The directory cannot be made: in the words of a failed mount.
    fn make_place(&self, at: &Path, options: &MountOptions) -> Result<(), Refusal>;

    /// Drops the mounts that [`Mounts::make_place`] has prepared: they are not made.
    fn not_mounted(&self);

    /// Unmounts an object and ends its file system for all mount namespaces; does nothing where it
    /// is not mounted. With `force` even while it is in use.
    ///
    /// # Errors
    /// [`Kind::Busy`] while it is in use, or mounted in another mount namespace.
    fn unmount(&self, what: What, force: bool) -> Result<(), Refusal>;

    /// Unmounts an object in the mount namespace of the pool. Where another namespace has it
    /// mounted as well, it is still served there, and counts as hidden here.
    ///
    /// # Errors
    /// [`Kind::Busy`] while it is in use in this mount namespace.
    fn detach(&self, what: What) -> Result<(), Refusal> {
        self.unmount(what, false)
    }

    /// Checks whether it could be unmounted now, as far as the kernel shows this without an
    /// attempt, for a mount on which nothing else is mounted. Changes nothing.
    ///
    /// # Errors
    /// [`Kind::Busy`] while it is in use.
    fn is_free(&self, what: What) -> Result<(), Refusal>;

    /// Datasets whose mounts exist but cannot be reached by their paths: something was mounted
    /// later over a directory above them.
    fn hidden(&self) -> Vec<u64>;

    /// Examines an untrusted mount point; `None` where a file system on its path does not answer.
    fn examine(&self, at: &Path) -> Option<PlaceState>;

    /// Removes the directory of an ended mount, where it is empty.
    fn tidy(&self, at: &Path);

    /// Changes the options of a mount, where it exists.
    ///
    /// # Errors
    /// The options cannot be changed.
    fn remount(&self, what: What, options: &MountOptions) -> Result<(), Refusal>;

    /// A sentence about those options of a mount that take effect at its next mount only.
    fn begins_later(&self, what: What) -> Option<String> {
        let _ = what;
        None
    }

    /// Shares a mount as its properties say, again where it is shared already: the server may have
    /// been started since.
    ///
    /// # Errors
    /// The server refuses.
    fn share(&self, dataset: u64) -> Result<(), Refusal> {
        let _ = dataset;
        Ok(())
    }

    /// Ends the sharing of a mount, until it is mounted again or [`Mounts::share`] is called.
    fn unshare(&self, dataset: u64) {
        let _ = dataset;
    }

    /// Why a mount is not shared although its properties ask for it.
    fn share_failure(&self, dataset: u64) -> Option<String> {
        let _ = dataset;
        None
    }

    /// Reports that room for writes may have shrunk: quotas, reservations.
    fn room_changed(&self) {}

    /// All mounts, in the order in which they were made.
    fn mounted(&self) -> Vec<Mounted>;

    /// Has the kernel write back its dirty pages of these datasets: everything written before the
    /// call is in the engine when it returns.
    ///
    /// # Errors
    /// A write that failed.
    fn settle(&self, datasets: &[u64]) -> Result<(), Refusal>;

    /// Runs `act` while writes to these datasets are held at a barrier: everything written before
    /// the call is in the engine then, and no later write is seen without its writer's earlier
    /// ones. `act` calls its argument as soon as the barrier can be lifted.
    ///
    /// # Errors
    /// Errors of [`Self::settle`] and of `act`.
    fn at_one_moment(&self, datasets: &[u64], act: &mut AtOneMoment<'_>) -> Result<(), Refusal>;

    /// Exchanges the files of a dataset by `replace` (a rollback), where it is mounted: no file
    /// that was open before reaches the new ones, and the old ones are dropped from the caches of
    /// the kernel and the mount.
    ///
    /// # Errors
    /// [`Kind::Busy`] where another mount lies below it, and the errors of `replace`: nothing has changed then.
    fn replace(&self, dataset: u64, replace: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal>;

    /// Reports that a property has added names to the root directory of a dataset or removed them.
    fn root_changed(&self, dataset: u64);

    /// Invalidates the kernel's caches of files of a dataset that another machine has changed.
    fn changed(&self, dataset: u64, changes: &Changes) {
        let _ = (dataset, changes);
    }
}

/// A [`Mounts`] without mounts: for pools that are imported without (`-N`), and for tests.
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

    /// Runs `act` at once: without a mount there are no writes.
    fn at_one_moment(&self, _: &[u64], act: &mut AtOneMoment<'_>) -> Result<(), Refusal> {
        act(&mut || {})
    }

    fn replace(&self, _: u64, replace: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        replace()
    }

    fn root_changed(&self, _: u64) {}

    fn examine(&self, at: &Path) -> Option<PlaceState> {
        Some(system_places::examine(at))
    }
}
