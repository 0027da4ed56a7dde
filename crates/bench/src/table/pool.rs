//! The table `pool`: file systems in an image file, of the kernel, of zfs-fuse and of nacre.

use nacre_bench_arguments as arguments;

use super::{Table, Test, bytes, operations};
use crate::table::Group;
use crate::target::{Ground, Pool, PoolOf, Step, Target};

/// Pools: bonnie++'s columns, as in the original document, and operations in which file systems of this kind are
/// weak or strong. Ratios refer to XFS on a loop device whose image is next to the others.
pub static POOL: Table = Table {
    arguments: arguments::POOL,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &["xfs", "ext4", "btrfs", "zfs-fuse", "nacre-pool", "nacre-pool-off"],
    programs: &[("mkfs.xfs", "-V"), ("mkfs.ext4", "-V"), ("mkfs.btrfs", "-V"), ("fusermount3", "-V")],
};

/// Common fields of the targets of this table and of `listing`.
pub(super) const IMAGE: Target = Target { ground: Ground::Fresh, baseline: "xfs", ..Target::PLAIN };
pub(super) const XFS: Step = Step::Loop { kind: "xfs", direct_io: false, options: "" };
pub(super) const EXT4: Step = Step::Loop { kind: "ext4", direct_io: false, options: "" };
pub(super) const BTRFS: Step = Step::Loop { kind: "btrfs", direct_io: false, options: "" };
pub(super) const BTRFS_ZSTD: Step = Step::Loop { kind: "btrfs", direct_io: false, options: "compress=zstd" };
pub(super) const ZFS_FUSE: Step = Step::Pool(Pool { by: PoolOf::ZfsFuse, compression: "off", also: &[], over: None });
// zfs-fuse has only lzjb and gzip.
pub(super) const ZFS_FUSE_ON: Step = Step::Pool(Pool { by: PoolOf::ZfsFuse, compression: "on", also: &[], over: None });
pub(super) const NACRE: Step = Step::Pool(Pool { by: PoolOf::Nacre, compression: "on", also: &[], over: None });
const NACRE_LZ4: Step = Step::Pool(Pool { by: PoolOf::Nacre, compression: "lz4", also: &[], over: None });
pub(super) const NACRE_OFF: Step = Step::Pool(Pool { by: PoolOf::Nacre, compression: "off", also: &[], over: None });
pub(super) const NACRE_ACL: Step =
    Step::Pool(Pool { by: PoolOf::Nacre, compression: "on", also: &["acltype=posix"], over: None });
pub(super) const NACRE_ZSTD: Step = Step::Pool(Pool { by: PoolOf::Nacre, compression: "zstd", also: &[], over: None });

static TARGETS: &[Target] = &[
    Target { id: "xfs", title: "XFS", steps: &[XFS], ..IMAGE },
    Target { id: "ext4", title: "ext4", steps: &[EXT4], ..IMAGE },
    Target { id: "btrfs", title: "Btrfs", steps: &[BTRFS], ..IMAGE },
    Target { id: "btrfs-zstd", title: "Btrfs, zstd", steps: &[BTRFS_ZSTD], ..IMAGE },
    Target { id: "zfs-fuse", title: "zfs-fuse", steps: &[ZFS_FUSE], ..IMAGE },
    Target { id: "zfs-fuse-lzjb", title: "zfs-fuse, lzjb", steps: &[ZFS_FUSE_ON], ..IMAGE },
    Target { id: "nacre-pool", title: "nacre", steps: &[NACRE], ..IMAGE },
    Target { id: "nacre-pool-off", title: "nacre, off", steps: &[NACRE_OFF], ..IMAGE },
    Target { id: "nacre-pool-user", title: "nacre, as user", steps: &[NACRE], as_user: true, ..IMAGE },
    Target { id: "nacre-pool-lz4", title: "nacre, lz4", steps: &[NACRE_LZ4], ..IMAGE },
    Target { id: "nacre-pool-zstd", title: "nacre, zstd", steps: &[NACRE_ZSTD], ..IMAGE },
];

static TESTS: &[Test] = &[
    bytes("char-out", "output, byte by byte", Group::Bonnie, true),
    bytes("block-out", "output, blocks", Group::Bonnie, true),
    bytes("rewrite", "rewrite", Group::Bonnie, true),
    bytes("char-in", "input, byte by byte, cold", Group::Bonnie, true),
    bytes("block-in", "input, blocks, cold", Group::Bonnie, true),
    bytes("block-in-warm", "input, blocks, again", Group::Bonnie, true),
    operations("seeks", "seeks, cold", Group::Bonnie, true),
    bytes("text-char-out", "output, byte by byte", Group::BonnieText, true),
    bytes("text-block-out", "output, blocks", Group::BonnieText, true),
    bytes("text-rewrite", "rewrite", Group::BonnieText, true),
    bytes("text-char-in", "input, byte by byte, cold", Group::BonnieText, true),
    bytes("text-block-in", "input, blocks, cold", Group::BonnieText, true),
    bytes("text-block-in-warm", "input, blocks, again", Group::BonnieText, true),
    operations("text-seeks", "seeks, cold", Group::BonnieText, true),
    operations("sequential-create", "sequential create", Group::BonnieFiles, true),
    operations("sequential-stat", "sequential stat", Group::BonnieFiles, true),
    operations("sequential-delete", "sequential delete", Group::BonnieFiles, true),
    operations("random-create", "random create", Group::BonnieFiles, true),
    operations("random-stat", "random stat", Group::BonnieFiles, true),
    operations("random-delete", "random delete", Group::BonnieFiles, true),
    operations("overwrite", "random overwrites, one fsync", Group::SmallWrites, true),
    operations("append-fsync", "append and fsync", Group::SmallWrites, true),
    operations("small-create", "create", Group::SmallFiles, true),
    operations("small-open", "open-read-close", Group::SmallFiles, true),
    operations("small-stat-read", "stat after reading", Group::SmallFiles, true),
    operations("small-append", "open-append-close", Group::SmallFiles, true),
    operations("small-unlink", "unlink", Group::SmallFiles, true),
    operations("small-create-16", "create, 16 at once", Group::SmallFiles, true),
    operations("small-open-16", "open-read-close, 16 at once", Group::SmallFiles, true),
    operations("small-unlink-16", "unlink, 16 at once", Group::SmallFiles, true),
    operations("snapshot", "snapshot", Group::Versions, true),
    operations("clone", "clone", Group::Versions, true),
    operations("snapshot-destroy", "destroy an empty snapshot", Group::Versions, true),
    operations("snapshot-writes-none", "overwrites, no snapshots", Group::Versions, true),
    operations("snapshot-writes-many", "overwrites, many snapshots", Group::Versions, true),
    operations("recovery", "back in place", Group::Recovery, true),
];
