//! The table `raid`: pools over several devices, each of them limited.

use nacre_bench_arguments as arguments;

use super::{Table, Test, bytes, count, operations};
use crate::table::Group;
use crate::target::{Ground, Over, Pool, PoolOf, Step, Target};

/// Pools with redundancy: streams, random reads and writes, with a device missing or slow, resilvered, scrubbed;
/// and the space that files take. Ratios refer to a pool of nacre without redundancy, on as many devices as hold
/// data in the RAID-Z ones.
pub static RAID: Table = Table {
    arguments: arguments::RAID,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &[
        "over-plain",
        "over-mirror",
        "over-raidz1",
        "over-raidz2",
        "btrfs-raid1",
        "zfs-raidz1",
        "zfs-raidz2",
    ],
    programs: &[("mkfs.btrfs", "-V"), ("fusermount3", "-V")],
};

const OVER: Target = Target { ground: Ground::Fresh, baseline: "over-plain", ..Target::PLAIN };

const fn over(by: PoolOf, word: &'static str, devices: usize, parity: usize) -> Pool {
    Pool { by, compression: "off", also: &[], over: Some(Over { word, devices, parity }) }
}

const ONE: Step = Step::Pool(over(PoolOf::Nacre, "", 1, 0));
const PLAIN: Step = Step::Pool(over(PoolOf::Nacre, "", 4, 0));
const MIRROR: Step = Step::Pool(over(PoolOf::Nacre, "mirror", 2, 1));
const RAIDZ1: Step = Step::Pool(over(PoolOf::Nacre, "raidz1", 5, 1));
const RAIDZ2: Step = Step::Pool(over(PoolOf::Nacre, "raidz2", 6, 2));
const BTRFS: Step = Step::Pool(over(PoolOf::Btrfs, "raid1", 2, 1));
const ZFS_RAIDZ1: Step = Step::Pool(over(PoolOf::ZfsFuse, "raidz1", 5, 1));
const ZFS_RAIDZ2: Step = Step::Pool(over(PoolOf::ZfsFuse, "raidz2", 6, 2));

static TARGETS: &[Target] = &[
    Target { id: "over-plain", title: "nacre, 4 devices", steps: &[PLAIN], ..OVER },
    Target { id: "over-one", title: "nacre, 1 device", steps: &[ONE], ..OVER },
    Target { id: "over-mirror", title: "nacre, mirror of 2", steps: &[MIRROR], ..OVER },
    Target { id: "over-raidz1", title: "nacre, raidz1 of 5", steps: &[RAIDZ1], ..OVER },
    Target { id: "over-raidz2", title: "nacre, raidz2 of 6", steps: &[RAIDZ2], ..OVER },
    Target { id: "btrfs-raid1", title: "Btrfs, raid1 of 2", steps: &[BTRFS], ..OVER },
    Target { id: "zfs-raidz1", title: "zfs-fuse, raidz1 of 5", steps: &[ZFS_RAIDZ1], ..OVER },
    Target { id: "zfs-raidz2", title: "zfs-fuse, raidz2 of 6", steps: &[ZFS_RAIDZ2], ..OVER },
];

static TESTS: &[Test] = &[
    bytes("over-device", "one device read by itself, raw", Group::OverDevices, false),
    bytes("over-devices", "all devices read at once, raw", Group::OverDevices, false),
    bytes("over-write", "write a file, fsync", Group::OverDevices, true),
    bytes("over-read", "read it, cold", Group::OverDevices, true),
    bytes("over-read-two", "two clients read a file each, cold", Group::OverDevices, true),
    operations("over-random-read", "random reads of 8 KiB, cold", Group::OverDevices, true),
    operations("over-random-write", "random overwrites of 8 KiB, one fsync", Group::OverDevices, true),
    operations("over-tail", "the slowest percent of reads of 128 KiB", Group::OverDevices, true),
    operations("over-tail-slow", "the same, one device ten times slower", Group::OverDevices, true),
    bytes("over-scrub", "scrub", Group::OverDevices, true),
    bytes("over-degraded", "read it, cold, a device missing", Group::OverDevices, true),
    bytes("over-rebuild", "another device in its place", Group::OverDevices, true),
    bytes("shape-alone", "write files of 32 MiB, fsync each", Group::Shapes, true),
    bytes("shape-beside", "the same while the shape changes", Group::Shapes, true),
    count("shape-moved", "moved, each MiB that has to be", Group::Shapes, true),
    count("shape-space", "taken beyond what a fresh pool of 5 takes, each MiB", Group::Shapes, true),
    count("shape-room", "less free than in a fresh pool of 5, each MiB", Group::Shapes, true),
    count("over-space-8k", "beyond data and parity, each MiB, records of 8 KiB", Group::Space, true),
    count("over-space-128k", "beyond data and parity, each MiB, records of 128 KiB", Group::Space, true),
    count("over-metadata-8k", "metadata, each MiB, records of 8 KiB", Group::Space, true),
    count("over-metadata-128k", "metadata, each MiB, records of 128 KiB", Group::Space, true),
];
