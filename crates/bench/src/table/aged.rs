//! The table `aged`: file systems that are nearly full and whose content is overwritten at random for long.

use nacre_bench_arguments as arguments;

use super::pool::{BTRFS, IMAGE, NACRE_OFF, XFS, ZFS_FUSE};
use super::{Table, Test, bytes, count, operations};
use crate::table::Group;
use crate::target::{Bucket, BucketOf, Over, Pool, PoolOf, Step, Target};

/// Random overwrites at several fill levels, and reads of a file after them: pools of nacre in an image, over a mirror
/// and RAID-Z, and in a directory that stands for a bucket. Devices are not limited. Ratios refer to XFS, which
/// overwrites in place.
pub static AGED: Table = Table {
    arguments: arguments::AGED,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &["xfs", "btrfs", "zfs-fuse", "nacre-pool-off", "nacre-mirror", "nacre-raidz1", "nacre-directory"],
    programs: &[("mkfs.xfs", "-V"), ("mkfs.btrfs", "-V")],
};

const fn over(word: &'static str, devices: usize, parity: usize) -> Step {
    Step::Pool(Pool { by: PoolOf::Nacre, compression: "off", also: &[], over: Some(Over { word, devices, parity }) })
}

const DIRECTORY: Step = Step::Bucket(Bucket { by: BucketOf::NacreInDirectory, delay: 0 });

static TARGETS: &[Target] = &[
    Target { id: "xfs", title: "XFS", steps: &[XFS], ..IMAGE },
    Target { id: "btrfs", title: "Btrfs", steps: &[BTRFS], ..IMAGE },
    Target { id: "zfs-fuse", title: "zfs-fuse", steps: &[ZFS_FUSE], ..IMAGE },
    Target { id: "nacre-pool-off", title: "nacre", steps: &[NACRE_OFF], ..IMAGE },
    Target { id: "nacre-mirror", title: "nacre, mirror of 2", steps: &[over("mirror", 2, 1)], ..IMAGE },
    Target { id: "nacre-raidz1", title: "nacre, raidz1 of 4", steps: &[over("raidz1", 4, 1)], ..IMAGE },
    Target { id: "nacre-directory", title: "nacre, bucket (directory)", steps: &[DIRECTORY], ..IMAGE },
];

/// A load: a file that takes this part of the room is overwritten at random in blocks of one length.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// The group with the loads of this fill level.
    pub group: Group,
    /// Size of the file, percent of the available room.
    pub fill: u64,
    /// Length of each write, bytes.
    pub block: usize,
    /// Test of the rate.
    pub rate: &'static str,
    /// Test of the latency that 99 of 100 writes do not exceed.
    pub p99: &'static str,
    /// Test of the longest latency of a write.
    pub longest: &'static str,
    /// Test of the bytes that devices get for each MiB written by the program.
    pub cost: &'static str,
    /// Test of the allocated size of the file for each MiB.
    pub size: &'static str,
}

macro_rules! loads {
    ($(($group:ident, $fill:literal, $kib:literal)),* $(,)?) => {
        /// All loads, in the order in which they are written.
        pub static LOADS: &[Load] = &[$(Load {
            group: Group::$group,
            fill: $fill,
            block: $kib << 10,
            rate: concat!("aged-", $fill, "-", $kib, "k-rate"),
            p99: concat!("aged-", $fill, "-", $kib, "k-p99"),
            longest: concat!("aged-", $fill, "-", $kib, "k-longest"),
            cost: concat!("aged-", $fill, "-", $kib, "k-cost"),
            size: concat!("aged-", $fill, "-", $kib, "k-size"),
        }),*];

        static TESTS: &[Test] = &[
            $(
                bytes(concat!("aged-", $fill, "-", $kib, "k-rate"), concat!($kib, " KiB, rate"), Group::$group, true),
                count(
                    concat!("aged-", $fill, "-", $kib, "k-p99"),
                    concat!($kib, " KiB, microseconds of 99 of 100 writes"),
                    Group::$group,
                    true,
                ),
                count(
                    concat!("aged-", $fill, "-", $kib, "k-longest"),
                    concat!($kib, " KiB, microseconds of the longest write"),
                    Group::$group,
                    true,
                ),
                count(
                    concat!("aged-", $fill, "-", $kib, "k-cost"),
                    concat!($kib, " KiB, bytes to devices, each MiB written"),
                    Group::$group,
                    true,
                ),
                count(
                    concat!("aged-", $fill, "-", $kib, "k-size"),
                    concat!($kib, " KiB, bytes allocated, each MiB of the file"),
                    Group::$group,
                    true,
                ),
            )*
            bytes("aged-read-fresh", "read a fresh file, cold", Group::AgedReading, true),
            bytes("aged-read-16k", "read, after overwrites of 16 KiB, cold", Group::AgedReading, true),
            bytes("aged-read-4k", "read, after overwrites of 4 KiB, cold", Group::AgedReading, true),
            operations("aged-random-fresh", "random reads of 4 KiB of a fresh file, cold", Group::AgedReading, true),
            operations("aged-random-16k", "random reads, after overwrites of 16 KiB, cold", Group::AgedReading, true),
            operations("aged-random-4k", "random reads, after overwrites of 4 KiB, cold", Group::AgedReading, true),
        ];
    };
}

loads![
    (Aged50, 50, 16),
    (Aged50, 50, 4),
    (Aged50, 50, 128),
    (Aged70, 70, 16),
    (Aged70, 70, 4),
    (Aged70, 70, 128),
    (Aged85, 85, 16),
    (Aged85, 85, 4),
    (Aged85, 85, 128),
    (Aged95, 95, 16),
    (Aged95, 95, 4),
    (Aged95, 95, 128),
];
