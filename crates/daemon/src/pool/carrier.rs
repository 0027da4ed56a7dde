//! A FUSE mount of a pool's process, and the file systems that are seen in it: one, or with those
//! that lie below it a family.
//!
//! Used by `mounts.rs` alone. fusermount3 is root's and is kept out of a mount that is its owner's
//! alone, so it cannot mount anything below: what an ordinary user mounts there is put into the
//! mount that is there already. Invariants: what the kernel knows of a file system that is taken
//! out is waited for, so that nothing of it means something else later; whatever is done by a path
//! is done by threads without descriptors ([`apart`]).

use std::{fs, path::Path, sync::Arc, time::Duration};

use fusewire::{FusermountRefusal, apart};
use nacre_admin::{Kind, MountOptions, Refusal};
use nacre_fuse::{FuseOptions, Mount, MountError, Survival};
use nacre_pool::engine::Changes;
use nacre_poolfs::{
    dataset::Dataset,
    dataset_tree::{DatasetTree, Rules},
};
use nacre_vfs::{Errno, FileId, Layer};
use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::fuse_conf;

use super::{mount_point::MountPoint, mount_point::kind};

/// How long the kernel may take to be told of a name, which waits for whoever holds its directory.
const TOLD: Duration = Duration::from_secs(5);
/// How long it may take to say what it does not use any more.
const FORGOTTEN: Duration = Duration::from_millis(500);
/// The same of what it knew before this process began: it has to be asked.
const ASKED_FOR: Duration = Duration::from_secs(4);

/// What an ordinary user can do where one mount is to lie within another that is not this pool's.
const NESTED: &str = "an ordinary user's mount can lie within one that is not this pool's only where /etc/fuse.conf has user_allow_other; \
                      or give it a mountpoint of its own: nacre fs set mountpoint=PATH";

/// See the file's head.
pub(super) struct Carrier {
    /// The mount.
    pub mount: Mount,
    /// What is seen in it, where it may be more than one file system.
    family: Option<Arc<DatasetTree>>,
    /// The root directory of what was mounted first.
    root: FileId,
    /// It goes on after another process.
    goes_on: bool,
}

impl Carrier {
    /// Mounts a file system, or goes on with its mount where `survival` has it, with these others in it;
    /// others can be put in later where it is a head and nothing could be mounted below it.
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
            // Flags of the mount would be those of all.
            read_only: alone && options.read_only || !head,
            noexec: alone && options.no_exec,
            // A snapshot stays as it is.
            no_open: !head,
            nosuid: options.no_suid,
            nodev: options.no_dev,
            noatime: alone && options.no_atime,
            // Others than the owner of a pool see it where the system lets him show it (fuse.conf).
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

    /// Shows one more file system, on the directory with this number, which was at this place a
    /// moment ago.
    pub fn put_in(&self, layer: &Arc<Dataset>, (at, on): (&Path, u64), options: &MountOptions) -> Result<(), Refusal> {
        let family = self.family.as_ref().ok_or_else(|| alone(options))?;
        family.graft(Arc::clone(layer), on, rules(options)).map_err(|error| refused(options, error))?;
        self.told();
        // Its users may have renamed the directory meanwhile: what is listed there would be
        // elsewhere.
        let seen =
            apart(|| Ok(rustix::fs::statx(CWD, at, AtFlags::empty(), StatxFlags::INO)?)).map(|stat| stat.stx_ino).ok();
        // The number of the directory itself: the kernel has not looked again yet.
        if seen != Some(on) && seen != family.root_of(layer.number()).map(|root| root.ino) {
            family.take_out(layer.number());
            self.told();
            let what = format!("cannot mount '{}': the mountpoint was moved meanwhile", options.source);
            return Err(Refusal::new(Kind::Busy, what).next("mount it again"));
        }
        Ok(())
    }

    /// Takes one out again that is seen at this place; false where it is in use, and not `force`.
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
                // The kernel has forgotten the name, which leads there for whoever is in it as
                // well: it is looked up again.
                drop(apart(|| fs::metadata(at)));
                return false;
            }
        }
        let numbers = family.numbers(dataset);
        family.take_out(dataset);
        // Who still has files of it open does not keep the file system from going.
        self.mount.close_files(&numbers);
        self.told();
        true
    }

    /// The files of a file system are others now.
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

    /// The files of a file system have changed elsewhere.
    pub fn changed(&self, layer: &Dataset, changes: &Changes) {
        match &self.family {
            Some(family) => family.changed(layer.number(), changes),
            None => layer.changed(changes),
        }
    }

    /// The kernel is to forget what it knows of a snapshot below `.zfs`, as far as nobody uses it.
    pub fn forget_snapshot(&self, name: &str) {
        self.mount.give_up_name(Dataset::snapshots_of(self.root), name.as_bytes());
        self.told();
    }

    /// `.zfs` of a file system is to be seen, or not any more.
    pub fn control_changed(&self, dataset: u64) {
        self.forget_control(dataset);
        self.told();
    }

    /// The kernel is about to look for `.zfs` of a file system anew.
    pub fn forget_control(&self, dataset: u64) {
        let root = self.family.as_ref().map_or(Some(self.root), |family| family.root_of(dataset));
        root.into_iter().for_each(|root| self.mount.forget_name(root, b".zfs"));
    }

    /// Gives a file system other rules; false where those are the mount's.
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

    /// How long the kernel may take to say what it does not use any more.
    pub fn forgets_within(&self) -> Duration {
        if self.goes_on { ASKED_FOR } else { FORGOTTEN }
    }

    /// Whether the kernel has forgotten all files of a file system, which it does soon with those
    /// that nobody uses.
    fn is_forgotten(&self, family: &DatasetTree, dataset: u64) -> bool {
        self.mount.wait_closed(self.forgets_within(), &mut || {
            !family.numbers(dataset).into_iter().any(|(from, to)| self.mount.knows_any(from, to))
        })
    }
}

/// Which of these mounts a directory is in that can show more, and its number there.
pub(super) fn at<'a>(at: &Path, mut all: impl Iterator<Item = &'a Arc<Carrier>>) -> Option<(Arc<Carrier>, u64)> {
    let stat = apart(|| Ok(rustix::fs::statx(CWD, at, AtFlags::empty(), StatxFlags::INO)?)).ok()?;
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    let found = all.find(|carrier| carrier.family.is_some() && carrier.mount.device_number() == Some(device))?;
    Some((Arc::clone(found), stat.stx_ino))
}

fn alone(options: &MountOptions) -> Refusal {
    Refusal::new(Kind::Io, format!("cannot mount '{}': nothing can be mounted there", options.source))
}

/// Why a file system was not put in.
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
