//! A FUSE mount of a pool's process (a *shared mount*, type `Carrier`) and the datasets that are visible in it:
//! one, or a dataset and those mounted below it (a family).
//!
//! Used by `mounts.rs` alone. fusermount3 is root's and has no access to a mount that is its owner's alone, so it
//! cannot mount anything below: a dataset that an ordinary user mounts there is grafted into the existing FUSE
//! mount. Invariants: before a dataset is removed, the kernel has forgotten its inodes, so that none of their node
//! ids is reused for something else; operations by path are done by threads without descriptors ([`apart`]).

use std::{io, path::Path, sync::Arc, time::Duration};

use fusewire::FusermountRefusal;
use nacre_admin::{Kind, MountOptions, Refusal};
use nacre_fuse::{FuseOptions, Mount, MountError, Survival};
use nacre_pool::engine::Changes;
use nacre_poolfs::{
    dataset::Dataset,
    dataset_tree::{DatasetTree, Rules},
};
use nacre_vfs::{Errno, FileId, Layer};
use rustix::fs::{AtFlags, CWD, Statx, StatxFlags};

use crate::fuse_conf;

use super::{
    mount_point::{MountPoint, kind},
    place_operations::apart,
};

/// Deadline for the kernel to accept an invalidation of a name: the kernel waits for the lock of its directory.
const TOLD: Duration = Duration::from_secs(5);
/// Deadline for the kernel to forget unused inodes.
const FORGOTTEN: Duration = Duration::from_millis(500);
/// Deadline for the kernel to forget unused inodes from before a failover: it has to be asked about them.
const ASKED_FOR: Duration = Duration::from_secs(4);

/// Advice where a mount of an ordinary user is to lie within one that is not this pool's.
const NESTED: &str = "an ordinary user's mount can lie within one that is not this pool's only where /etc/fuse.conf has user_allow_other; \
                      or give it a mountpoint of its own: nacre fs set mountpoint=PATH";

/// A FUSE mount with one or more datasets.
pub(super) struct Carrier {
    /// The FUSE mount.
    pub mount: Mount,
    /// The datasets visible in it, where there can be more than one.
    family: Option<Arc<DatasetTree>>,
    /// Root directory of the dataset that was mounted first.
    root: FileId,
    /// The mount was taken over from another process.
    goes_on: bool,
}

impl Carrier {
    /// Mounts a dataset, or takes over its mount where `survival` has it, with `members` grafted into it; more can
    /// be grafted later if it is no snapshot and nothing could be mounted below it.
    pub fn start(
        layer: &Arc<Dataset>,
        head: bool,
        place: &MountPoint,
        options: &MountOptions,
        survival: Option<Survival>,
        members: &[(Arc<Dataset>, u64, MountOptions)],
    ) -> Result<Carrier, Refusal> {
        let source = &options.source;
        let others = rustix::process::geteuid().is_root() || fuse_conf::may_show_others();
        let goes_on = survival.as_ref().is_some_and(Survival::resumes);
        let given = survival.as_ref().map(Survival::given_numbers);
        let family = (head && !others).then(|| {
            let family = DatasetTree::new(Arc::clone(layer), rules(options));
            Arc::new(given.iter().fold(family, DatasetTree::noting))
        });
        if family.is_none() {
            let numbered = layer.capabilities().numbered;
            given.iter().zip(numbered).for_each(|(given, numbered)| numbered.note_in(given));
        }
        for (member, on, options) in members {
            let family = family.as_ref().ok_or_else(|| alone(options))?;
            family.graft(Arc::clone(member), *on, rules(options)).map_err(|error| refused(options, error))?;
        }
        let alone = family.is_none();
        let fuse = FuseOptions {
            fsname: source.clone(),
            // Flags of the mount would apply to all datasets in it.
            read_only: alone && options.read_only || !head,
            noexec: alone && options.no_exec,
            // A snapshot does not change.
            no_open: !head,
            nosuid: options.no_suid,
            nodev: options.no_dev,
            noatime: alone && options.no_atime,
            // Users other than the pool's owner can access it where the system allows that (fuse.conf).
            allow_other: others,
            without_links: place.is_resolved(),
            survival,
            ..FuseOptions::new(place.path())
        };
        let root =
            layer.root().map_err(|error| Refusal::new(Kind::Io, format!("cannot mount '{source}': {error}")))?.attr.id;
        let shown: Arc<dyn Layer> = match &family {
            Some(family) => Arc::clone(family) as Arc<_>,
            None => Arc::clone(layer) as Arc<_>,
        };
        let mount = Mount::start(shown, fuse).map_err(|error| match error {
            MountError::Mount(cause) => {
                let refusal = Refusal::new(kind(&cause), format!("cannot mount '{source}': {cause}"));
                if !others && FusermountRefusal::of(&cause) == Some(FusermountRefusal::Unreachable) {
                    refusal.next(NESTED)
                } else {
                    refusal
                }
            }
            other => Refusal::new(Kind::Io, format!("cannot mount '{source}': {other}")),
        })?;
        Ok(Carrier { mount, family, root, goes_on })
    }

    /// Grafts one more dataset onto the directory with the inode number `on`, which was at the path `at` a moment
    /// ago.
    pub fn put_in(&self, layer: &Arc<Dataset>, (at, on): (&Path, u64), options: &MountOptions) -> Result<(), Refusal> {
        let family = self.family.as_ref().ok_or_else(|| alone(options))?;
        family.graft(Arc::clone(layer), on, rules(options)).map_err(|error| refused(options, error))?;
        self.told();
        // Users may have renamed the directory meanwhile: then the path in the list of mounts would be wrong.
        let seen = examine(at).map(|stat| stat.stx_ino);
        // The inode number of the directory itself is accepted, too: the kernel may not have looked the name up
        // again yet.
        let is_there = |ino: &u64| *ino == on || family.root_of(layer.number()).is_some_and(|root| root.ino == *ino);
        if !seen.as_ref().is_ok_and(is_there) {
            family.take_out(layer.number());
            self.told();
            let why = match seen.err().map(Errno::from) {
                Some(Errno::ETIMEDOUT | Errno::EBUSY) => "the path of the mountpoint does not answer",
                _ => "the mountpoint was moved meanwhile",
            };
            let what = format!("cannot mount '{}': {why}", options.source);
            return Err(Refusal::new(Kind::Busy, what).next("mount it again"));
        }
        Ok(())
    }

    /// Removes a dataset that is visible at this path; false where it is in use, and not `force`.
    pub fn take_out(&self, dataset: u64, at: &Path, force: bool) -> bool {
        let Some(family) = &self.family else { return true };
        if force {
            self.mount.write_back(&family.numbers(dataset));
        } else {
            let free = !family.is_used(dataset) && {
                family.forget(dataset);
                self.told();
                self.is_forgotten(family, dataset) && !family.is_used(dataset)
            };
            if !free {
                // The kernel has dropped the dentry, also for processes with their working directory below it:
                // looks it up again.
                drop(examine(at));
                return false;
            }
        }
        let numbers = family.numbers(dataset);
        family.take_out(dataset);
        // Open files of the dataset do not keep it from being removed.
        self.mount.close_files(&numbers);
        self.told();
        true
    }

    /// Replaces the inodes of a dataset after a rollback.
    pub fn replaced(&self, layer: &Dataset) {
        let alone = || Some(layer.numbers_of_head());
        let Some(numbers) = self.family.as_ref().map_or_else(alone, |family| family.numbers_of_head(layer.number()))
        else {
            return;
        };
        if let Err(error) = self.mount.replaced(&[numbers]) {
            tracing::warn!(%error, "the kernel may still show files as they were before a file system was rolled back");
        }
    }

    /// Invalidates inodes of a dataset that another machine has changed.
    pub fn changed(&self, layer: &Dataset, changes: &Changes) {
        match &self.family {
            Some(family) => family.changed(layer.number(), changes),
            None => layer.changed(changes),
        }
    }

    /// Has the kernel forget the inodes of a snapshot below `.zfs`, as far as they are unused.
    pub fn forget_snapshot(&self, name: &str) {
        self.mount.give_up_name(Dataset::snapshots_of(self.root), name.as_bytes());
        self.told();
    }

    /// Invalidates the name `.zfs` of a dataset, which becomes visible or hidden, and waits for the kernel.
    pub fn control_changed(&self, dataset: u64) {
        self.forget_control(dataset);
        self.told();
    }

    /// Invalidates the name `.zfs` of a dataset.
    pub fn forget_control(&self, dataset: u64) {
        let root = self.family.as_ref().map_or(Some(self.root), |family| family.root_of(dataset));
        root.into_iter().for_each(|root| self.mount.forget_name(root, b".zfs"));
    }

    /// Sets the rules of a dataset; false where they are flags of the mount.
    pub fn set_rules(&self, dataset: u64, options: &MountOptions) -> bool {
        let Some(family) = &self.family else { return false };
        family.set_rules(dataset, rules(options));
        true
    }

    fn told(&self) {
        if !self.mount.delivered(TOLD) && !self.mount.ended() {
            tracing::warn!(
                "the kernel could not be told of a file system that comes or goes: its name may lead elsewhere for a while"
            );
        }
    }

    /// Returns how long the kernel may take to forget unused inodes.
    pub fn forgets_within(&self) -> Duration {
        if self.goes_on { ASKED_FOR } else { FORGOTTEN }
    }

    /// Whether the kernel has forgotten all inodes of a dataset; unused ones are forgotten soon.
    fn is_forgotten(&self, family: &DatasetTree, dataset: u64) -> bool {
        self.mount.wait_closed(self.forgets_within(), &mut || {
            !family.numbers(dataset).into_iter().any(|(from, to)| self.mount.knows_any(from, to))
        })
    }
}

/// Returns inode and device number of a mount point.
fn examine(at: &Path) -> io::Result<Statx> {
    let path = at.to_owned();
    apart(at, move || Ok(rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::INO)?))
}

/// Returns the shared mount that contains a directory and can show more datasets, with the directory's inode
/// number.
pub(super) fn at<'a>(at: &Path, mut all: impl Iterator<Item = &'a Arc<Carrier>>) -> Option<(Arc<Carrier>, u64)> {
    let stat = examine(at).ok()?;
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    let found = all.find(|carrier| carrier.family.is_some() && carrier.mount.device_number() == Some(device))?;
    Some((Arc::clone(found), stat.stx_ino))
}

fn alone(options: &MountOptions) -> Refusal {
    Refusal::new(Kind::Io, format!("cannot mount '{}': nothing can be mounted there", options.source))
}

/// Makes the refusal for a dataset that could not be grafted.
fn refused(options: &MountOptions, error: Errno) -> Refusal {
    let (kind, why) = match error {
        Errno::EBUSY => (Kind::Busy, "another file system is mounted there".to_owned()),
        Errno::EINVAL => (Kind::Invalid, "a directory of a snapshot cannot be a mountpoint".to_owned()),
        Errno::ENOENT => (Kind::NotFound, "the mountpoint is gone".to_owned()),
        Errno::ENOTDIR => (Kind::Invalid, "the mountpoint is not a directory".to_owned()),
        other => (Kind::Io, other.to_string()),
    };
    Refusal::new(kind, format!("cannot mount '{}': {why}", options.source))
}

fn rules(options: &MountOptions) -> Rules {
    Rules { read_only: options.read_only, no_exec: options.no_exec }
}
