//! The columns of a table as data: each is a chain of steps from a ground directory to the path that is measured.
//!
//! `mounted` turns the chain into mounts; nothing here touches the machine.

/// One step of a chain: mounts the path so far at the next path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A symbolic link.
    Symlink,
    /// A mount by `mount --bind`.
    Bind,
    /// Debian's bindfs without options.
    Bindfs,
    /// `nacre mirror` with these extra arguments.
    Nacre(&'static [&'static str]),
    /// A directory in which no file is copied on write: `chattr +C`.
    Nodatacow,
    /// A Btrfs subvolume with quotas on while it exists.
    Subvolume,
    /// A new file system in a sparse image file, mounted through a loop device.
    Loop {
        /// Its type, as `mkfs` and `mount` call it.
        kind: &'static str,
        /// Whether the loop device bypasses the host's page cache.
        direct_io: bool,
        /// Mount options, or nothing.
        options: &'static str,
    },
    /// `nacre cage` with these extra arguments.
    Cage(Cage, &'static [&'static str]),
    /// Two branches shown as one tree: the upper one, which is writable, over the lower one.
    Union(Union),
    /// A new pool in a sparse image file.
    Pool(Pool),
    /// A new file system in a bucket of an object store.
    Bucket(Bucket),
}

/// A file system in a bucket, and the distance of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Kind of file system.
    pub by: BucketOf,
    /// Round trip of a request to the store, in milliseconds.
    pub delay: u64,
}

/// Kind of file system in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BucketOf {
    /// A pool of `nacre pool`.
    Nacre,
    /// A pool of `nacre pool`, in a directory that stands for a bucket.
    NacreInDirectory,
    /// JuiceFS, with its metadata in SQLite.
    JuiceFs,
    /// No file system: curl puts and gets objects, as any client can.
    Curl,
}

/// A transfer of objects without a file system, of this many bytes.
#[derive(Debug, Clone, Copy)]
pub enum Objects {
    /// Puts new objects.
    Put(u64),
    /// Gets the objects that were put.
    Get(u64),
}

/// A pool, with the compression of its file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Kind of pool.
    pub by: PoolOf,
    /// The property `compression`.
    pub compression: &'static str,
    /// Other properties, as for `-O`.
    pub also: &'static [&'static str],
    /// Several devices, if it is not in one image.
    pub over: Option<Over>,
}

/// Several devices, each with limited throughput.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// Kind of group; empty without redundancy.
    pub word: &'static str,
    /// Number of devices.
    pub devices: usize,
    /// Number of devices that may be lost.
    pub parity: usize,
}

impl Over {
    /// Returns the number of devices' worth of data.
    pub fn data(self) -> usize {
        self.devices.saturating_sub(self.parity).max(1)
    }
}

impl Pool {
    /// Whether a device can be taken offline while the pool is in use, and its space accounting be queried.
    pub fn can_be_degraded(self) -> bool {
        self.by != PoolOf::Btrfs
    }
}

/// Kind of pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolOf {
    /// The ZFS of Solaris through FUSE.
    ZfsFuse,
    /// A pool of `nacre pool`.
    Nacre,
    /// The kernel's Btrfs, over several devices.
    Btrfs,
}

/// Program that mounts two branches as one tree.
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

    /// Returns the program that mounts it, if it is not the one under test.
    pub fn program(self) -> Option<&'static str> {
        self.programs().first().copied().filter(|name| *name != "nacre")
    }

    /// Whether a first write to a file of the lower branch copies it up.
    pub fn copies_up(self) -> bool {
        self != Self::Mergerfs
    }
}

/// Kind of mount that `nacre cage` makes of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cage {
    /// A mount at another mount point; the files are in the directory.
    Shown,
    /// A mount; the files are in an image.
    Image,
    /// No mount: the directory itself is limited by the host's file system.
    Within,
}

impl Step {
    /// Returns the programs that the step runs, to be found on the search path; `nacre` is the program under test.
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
            Self::Bucket(Bucket { by: BucketOf::NacreInDirectory, .. }) => &["nacre"],
            Self::Bucket(Bucket { by: BucketOf::JuiceFs, .. }) => &["juicefs", "setpriv"],
            Self::Bucket(Bucket { by: BucketOf::Curl, .. }) => &["curl", "setpriv"],
            Self::Nodatacow => &["chattr"],
            Self::Subvolume => &["btrfs"],
            Self::Loop { kind: "xfs", .. } => &["losetup", "mkfs.xfs"],
            Self::Loop { kind: "btrfs", .. } => &["losetup", "mkfs.btrfs"],
            Self::Loop { .. } => &["losetup", "mkfs.ext4"],
        }
    }

    /// Whether a daemon serves the step through FUSE, so that ordinary users need fusermount3.
    pub fn is_fuse(self) -> bool {
        match self {
            Self::Pool(Pool { by: PoolOf::Btrfs, .. }) => false,
            Self::Bindfs | Self::Nacre(_) | Self::Cage(Cage::Shown, _) | Self::Pool(_) | Self::Bucket(_) => true,
            Self::Union(by) => by != Union::Overlayfs,
            _ => false,
        }
    }

    /// Returns the feature that only root may use here, if any.
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

/// Directory in which a chain begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// The source directory, the same for all targets, which mount it in different ways.
    Source,
    /// A new directory on the source's file system for each visit.
    Fresh,
    /// A new directory on Btrfs: on the source's file system if it is one, otherwise in an image next to the
    /// source.
    FreshBtrfs,
    /// The lower of two branches in the source directory, the same for all targets.
    Branches,
}

/// One column of a table: what is mounted and measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Name on the command line, in JSON and in the figures file.
    pub id: &'static str,
    /// Heading for users.
    pub title: &'static str,
    /// The target that its ratios refer to.
    pub baseline: &'static str,
    /// Directory in which its steps begin.
    pub ground: Ground,
    /// Steps from the ground outwards; empty for the ground itself.
    pub steps: &'static [Step],
    /// Whether daemon and clients run as an ordinary user.
    pub as_user: bool,
    /// Whether tests that change files are left out.
    pub reads_only: bool,
    /// Whether the source itself is measured while the steps are mounted over it and have read its directories: the
    /// cost of the mount for processes that do not use it.
    pub from_outside: bool,
}

impl Target {
    /// A target that is the ground itself; others are based on it.
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

    /// Whether its size is limited. A target without a limit must never be filled.
    pub fn is_bounded(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Loop { .. } | Step::Cage(..)))
    }

    /// Whether a crash of it can be simulated: Btrfs has no shutdown ioctl.
    pub fn crashes(&self) -> bool {
        self.steps.iter().all(|step| !matches!(step, Step::Loop { kind: "btrfs", .. }))
    }

    /// Returns the pool of its last step, if it is one.
    pub fn pool(&self) -> Option<Pool> {
        match self.steps.last() {
            Some(Step::Pool(pool)) => Some(*pool),
            _ => None,
        }
    }

    /// Whether its last step is a bucket without a file system.
    pub fn is_of_objects(&self) -> bool {
        matches!(self.steps.last(), Some(Step::Bucket(Bucket { by: BucketOf::Curl, .. })))
    }

    /// Whether the file system itself makes snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Pool(_) | Step::Loop { kind: "btrfs", .. }))
    }

    /// Whether files of the lower branch can be changed.
    pub fn copies_up(&self) -> bool {
        self.steps.iter().all(|step| !matches!(step, Step::Union(by) if !by.copies_up()))
    }
}
