//! The table `listing`: directories of millions of names.

use nacre_bench_arguments as arguments;

use super::pool::{BTRFS, BTRFS_ZSTD, EXT4, IMAGE, NACRE, NACRE_ACL, NACRE_OFF, XFS, ZFS_FUSE, ZFS_FUSE_ON};
use super::{Table, Test, count, operations};
use crate::table::Group;
use crate::target::Target;

/// Very many files, or directories, in one directory: the original table of such directories. Ratios refer to XFS
/// on a loop device whose image is next to the others.
pub static LISTING: Table = Table {
    arguments: arguments::LISTING,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &["xfs", "ext4", "btrfs", "zfs-fuse", "nacre-pool"],
    programs: &[
        ("ls", "--version"),
        ("mkfs.xfs", "-V"),
        ("mkfs.ext4", "-V"),
        ("mkfs.btrfs", "-V"),
        ("fusermount3", "-V"),
        ("cp", "--version"),
        ("rsync", "--version"),
    ],
};

static TARGETS: &[Target] = &[
    Target { id: "xfs", title: "XFS", steps: &[XFS], ..IMAGE },
    Target { id: "ext4", title: "ext4", steps: &[EXT4], ..IMAGE },
    Target { id: "btrfs", title: "Btrfs", steps: &[BTRFS], ..IMAGE },
    Target { id: "btrfs-zstd", title: "Btrfs, zstd", steps: &[BTRFS_ZSTD], ..IMAGE },
    Target { id: "zfs-fuse", title: "zfs-fuse", steps: &[ZFS_FUSE], ..IMAGE },
    Target { id: "zfs-fuse-lzjb", title: "zfs-fuse, lzjb", steps: &[ZFS_FUSE_ON], ..IMAGE },
    Target { id: "nacre-pool", title: "nacre", steps: &[NACRE], ..IMAGE },
    Target { id: "nacre-pool-acl", title: "nacre, ACLs", steps: &[NACRE_ACL], ..IMAGE },
    Target { id: "nacre-pool-off", title: "nacre, off", steps: &[NACRE_OFF], ..IMAGE },
    Target { id: "nacre-pool-user", title: "nacre, as user", steps: &[NACRE], as_user: true, ..IMAGE },
];

static TESTS: &[Test] = &[
    operations("many-create", "create", Group::ManyFiles, true),
    operations("many-create-begin", "create, the first part", Group::ManyFiles, true),
    operations("many-create-end", "create, the last part", Group::ManyFiles, true),
    operations("many-lht-cold", "ls -lht, cold", Group::ManyFiles, true),
    operations("many-lht-warm", "ls -lht, warm", Group::ManyFiles, true),
    operations("many-u-cold", "ls -1U, cold", Group::ManyFiles, true),
    operations("many-u-warm", "ls -1U, warm", Group::ManyFiles, true),
    count("many-used", "disk use as the file system tells it", Group::ManyFiles, true),
    count("many-image", "disk use of the image", Group::ManyFiles, true),
    count("many-memory", "the most memory that the daemon has used", Group::ManyFiles, true),
    operations("unrelated-create", "create", Group::Unrelated, true),
    operations("tree-create", "mkdir", Group::ManyDirectories, true),
    operations("tree-lht-cold", "ls -lht, cold", Group::ManyDirectories, true),
    operations("tree-lht-warm", "ls -lht, warm", Group::ManyDirectories, true),
    operations("tree-u-cold", "ls -1U, cold", Group::ManyDirectories, true),
    operations("tree-u-warm", "ls -1U, warm", Group::ManyDirectories, true),
    count("tree-used", "disk use as the file system tells it", Group::ManyDirectories, true),
    count("tree-memory", "the most memory that the daemon has used", Group::ManyDirectories, true),
    operations("copy-cp", "cp -a", Group::Copying, true),
    operations("copy-rsync", "rsync -a", Group::Copying, true),
    operations("copy-nacre", "nacre copy", Group::Copying, true),
    count("copy-memory", "the most memory that the daemon has used", Group::Copying, true),
];
