//! The columns of a table as data: each is a chain of steps from a ground to the path that is
//! measured.
//!
//! `mounted` turns the chain into mounts; nothing here touches the machine.

/// One step of a chain: how the path so far is shown at the next path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A symbolic link.
    Symlink,
    /// `mount --bind`.
    Bind,
    /// Debian's bindfs without options.
    Bindfs,
    /// `nacre mirror` with these extra arguments.
    Nacre(&'static [&'static str]),
    /// A directory in which no file is copied on write: `chattr +C`.
    Nodatacow,
    /// A Btrfs subvolume with quotas on while it is there.
    Subvolume,
    /// A new file system in a sparse image file, mounted through a loop device.
    Loop {
        /// Its type, as `mkfs` and `mount` call it.
        kind: &'static str,
        /// Whether the loop device goes past the host's page cache.
        direct_io: bool,
        /// Mount options, or nothing.
        options: &'static str,
    },
    /// `nacre cage` with these extra arguments.
    Cage(Cage, &'static [&'static str]),
    /// Two branches shown as one tree: the upper one, which takes changes, over the lower one.
    Union(Union),
    /// A new pool in a sparse image file.
    Pool(Pool),
    /// A new file system in a bucket of an object store.
    Bucket(Bucket),
}

/// A file system in a bucket: whose, and how far off the store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Whose.
    pub by: BucketOf,
    /// How long a request takes to the store and back, milliseconds.
    pub delay: u64,
}

/// Who serves a file system in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BucketOf {
    /// `nacre pool`.
    Nacre,
    /// JuiceFS, with its names in SQLite.
    JuiceFs,
    /// Nobody: curl puts and gets objects, as any client can.
    Curl,
}

/// Objects without a file system, bytes.
#[derive(Debug, Clone, Copy)]
pub enum Objects {
    /// New ones.
    Put(u64),
    /// Those.
    Get(u64),
}

/// A pool: whose, and how its file systems are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Whose.
    pub by: PoolOf,
    /// The property `compression`.
    pub compression: &'static str,
    /// What else is set, as `-O` takes it.
    pub also: &'static [&'static str],
    /// Over several devices, if not in one image.
    pub over: Option<Over>,
}

/// Several devices, each limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// What makes a group of them; nothing where they have no redundancy.
    pub word: &'static str,
    /// How many.
    pub devices: usize,
    /// How many of them may be lost.
    pub parity: usize,
}

impl Over {
    /// As many as a file's content needs.
    pub fn data(self) -> usize {
        self.devices.saturating_sub(self.parity).max(1)
    }
}

impl Pool {
    /// Whether a device can be taken away from it while it is used, and what it holds be asked for.
    pub fn can_be_degraded(self) -> bool {
        self.by != PoolOf::Btrfs
    }
}

/// Who serves a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolOf {
    /// The ZFS of Solaris behind FUSE.
    ZfsFuse,
    /// `nacre pool`.
    Nacre,
    /// The kernel's Btrfs, over several devices.
    Btrfs,
}

/// Who shows two branches as one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Union {
    /// The kernel's overlayfs.
    Overlayfs,
    /// The overlayfs of rootless containers.
    FuseOverlayfs,
    /// mergerfs, which copies nothing up: the lower branch is read-only to it.
    Mergerfs,
    /// unionfs-fuse with copy-up.
    UnionfsFuse,
    /// `nacre union` with these extra arguments.
    Nacre(&'static [&'static str]),
}

impl Union {
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Overlayfs => &["mount"],
            Self::FuseOverlayfs => &["fuse-overlayfs"],
            Self::Mergerfs => &["mergerfs"],
            Self::UnionfsFuse => &["unionfs"],
            Self::Nacre(_) => &["nacre"],
        }
    }

    /// The program that mounts it, if it is not the one under test.
    pub fn program(self) -> Option<&'static str> {
        self.programs().first().copied().filter(|name| *name != "nacre")
    }

    /// Whether a first write to a file of the lower branch makes a copy of it on the upper one.
    pub fn copies_up(self) -> bool {
        self != Self::Mergerfs
    }
}

/// What `nacre cage` makes of the directory that it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cage {
    /// A mount elsewhere; the files lie in the directory.
    Shown,
    /// A mount; the files lie in an image.
    Image,
    /// No mount: the directory itself is limited by the host's file system.
    Within,
}

impl Step {
    /// The programs that the step runs, as found on the search path; `nacre` stands for the program
    /// under test.
    pub fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Symlink | Self::Bind => &[],
            Self::Bindfs => &["bindfs"],
            Self::Nacre(_) | Self::Cage(..) => &["nacre"],
            Self::Union(by) => by.programs(),
            Self::Pool(Pool { by: PoolOf::Nacre, .. }) => &["nacre"],
            Self::Pool(Pool { by: PoolOf::ZfsFuse, .. }) => &["zfs-fuse", "zpool", "zfs", "setpriv"],
            Self::Pool(Pool { by: PoolOf::Btrfs, .. }) => &["losetup", "mkfs.btrfs", "btrfs"],
            Self::Bucket(Bucket { by: BucketOf::Nacre, .. }) => &["nacre", "setpriv"],
            Self::Bucket(Bucket { by: BucketOf::JuiceFs, .. }) => &["juicefs", "setpriv"],
            Self::Bucket(Bucket { by: BucketOf::Curl, .. }) => &["curl", "setpriv"],
            Self::Nodatacow => &["chattr"],
            Self::Subvolume => &["btrfs"],
            Self::Loop { kind: "xfs", .. } => &["losetup", "mkfs.xfs"],
            Self::Loop { kind: "btrfs", .. } => &["losetup", "mkfs.btrfs"],
            Self::Loop { .. } => &["losetup", "mkfs.ext4"],
        }
    }

    /// Whether a daemon serves the step by FUSE, so that ordinary users need fusermount3.
    pub fn is_fuse(self) -> bool {
        match self {
            Self::Pool(Pool { by: PoolOf::Btrfs, .. }) => false,
            Self::Bindfs | Self::Nacre(_) | Self::Cage(Cage::Shown, _) | Self::Pool(_) | Self::Bucket(_) => true,
            Self::Union(by) => by != Union::Overlayfs,
            _ => false,
        }
    }

    /// What only root may do here, if anything.
    pub fn of_root(self) -> Option<&'static str> {
        match self {
            Self::Bind => Some("bind mounts"),
            Self::Loop { .. } => Some("loop devices"),
            Self::Subvolume => Some("Btrfs quotas"),
            Self::Cage(Cage::Image | Cage::Within, _) => Some("cages of the kernel"),
            Self::Union(Union::Overlayfs) => Some("mounts of overlayfs"),
            Self::Pool(Pool { over: Some(_), .. }) => Some("limits of loop devices"),
            Self::Pool(Pool { by: PoolOf::ZfsFuse, .. }) => Some("pools of zfs-fuse"),
            Self::Pool(Pool { by: PoolOf::Btrfs, .. }) => Some("file systems of the kernel"),
            Self::Symlink
            | Self::Bindfs
            | Self::Nacre(_)
            | Self::Nodatacow
            | Self::Cage(Cage::Shown, _)
            | Self::Bucket(_)
            | Self::Union(_) => None,
            Self::Pool(Pool { by: PoolOf::Nacre, .. }) => None,
        }
    }
}

/// Where a chain begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// The source directory, the same for all targets: they are ways to show it.
    Source,
    /// A directory on the source's file system that is new in each visit.
    Fresh,
    /// A new directory on Btrfs: the source's file system if it is one, an image beside the source if
    /// not.
    FreshBtrfs,
    /// The lower of two branches in the source directory, the same for all targets.
    Branches,
}

/// One column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Name on the command line, in JSON and in the figures file.
    pub id: &'static str,
    /// Heading for people.
    pub title: &'static str,
    /// The target that its ratios refer to.
    pub baseline: &'static str,
    /// Where its steps begin.
    pub ground: Ground,
    /// From the ground outwards; empty for the ground itself.
    pub steps: &'static [Step],
    /// Whether daemon and clients run as an ordinary user.
    pub as_user: bool,
    /// Whether tests that change files are left out.
    pub reads_only: bool,
    /// Whether the source itself is measured while the steps are mounted over it and have seen its
    /// directories: what the mount costs those who do not use it.
    pub from_outside: bool,
}

impl Target {
    /// A target that is the ground itself; others change fields of it.
    pub const PLAIN: Self = Self {
        id: "",
        title: "",
        baseline: "direct",
        ground: Ground::Source,
        steps: &[],
        as_user: false,
        reads_only: false,
        from_outside: false,
    };

    /// Whether something bounds what may be written to it. What has no bound must never be filled.
    pub fn is_bounded(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Loop { .. } | Step::Cage(..)))
    }

    /// Whether its end by a crash can be brought about: Btrfs has no way to be shut down.
    pub fn crashes(&self) -> bool {
        self.steps.iter().all(|step| !matches!(step, Step::Loop { kind: "btrfs", .. }))
    }

    /// The pool that it ends in, if it is one.
    pub fn pool(&self) -> Option<Pool> {
        match self.steps.last() {
            Some(Step::Pool(pool)) => Some(*pool),
            _ => None,
        }
    }

    /// Whether it ends in a bucket without a file system.
    pub fn is_of_objects(&self) -> bool {
        matches!(self.steps.last(), Some(Step::Bucket(Bucket { by: BucketOf::Curl, .. })))
    }

    /// Whether the file system itself makes snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Pool(_) | Step::Loop { kind: "btrfs", .. }))
    }

    /// Whether changes to files of the lower branch can be made.
    pub fn copies_up(&self) -> bool {
        self.steps.iter().all(|step| !matches!(step, Step::Union(by) if !by.copies_up()))
    }
}
