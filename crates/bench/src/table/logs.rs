//! The table `logs`: a directory that cannot outgrow its size, under the load of logs.

use nacre_bench_arguments as arguments;

use super::{Table, Test, bytes, count, operations};
use crate::table::Group;
use crate::target::{Cage, Ground, Step, Target};

/// Cages for logs: the original table of the cage. Every target begins with a new, empty directory.
pub static LOGS: Table = Table {
    arguments: arguments::LOGS,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &[
        "direct",
        "loop-ext4",
        "loop-ext4-direct",
        "loop-xfs",
        "nacre-collected",
        "nacre-through",
        "nacre-loop",
        "nacre-quota",
        "btrfs",
        "btrfs-nodatacow",
        "loop-btrfs",
        "loop-nodatacow",
        "nacre-btrfs",
        "nacre-qgroup",
    ],
    programs: &[
        ("dd", "--version"),
        ("bash", "--version"),
        ("fusermount3", "-V"),
        ("mkfs.ext4", "-V"),
        ("mkfs.xfs", "-V"),
        ("mkfs.btrfs", "-V"),
    ],
};

const HOST: Target = Target { ground: Ground::Fresh, ..Target::PLAIN };
const BTRFS: Target = Target { ground: Ground::FreshBtrfs, baseline: "btrfs", ..Target::PLAIN };
const EXT4: Step = Step::Loop { kind: "ext4", direct_io: false, options: "" };
const EXT4_DIRECT: Step = Step::Loop { kind: "ext4", direct_io: true, options: "" };
const XFS: Step = Step::Loop { kind: "xfs", direct_io: false, options: "" };
const AUTO: Step = Step::Cage(Cage::Shown, &["--engine=fuse"]);
const COLLECTED: Step = Step::Cage(Cage::Shown, &["--engine=fuse", "--writes=collected"]);
const THROUGH: Step = Step::Cage(Cage::Shown, &["--engine=fuse", "--writes=through"]);
// Its image is fully allocated, as by default.
const LOOP: Step = Step::Cage(Cage::Image, &["--engine=loop", "--fstype=ext4"]);
const QUOTA: Step = Step::Cage(Cage::Within, &["--engine=quota"]);

static TARGETS: &[Target] = &[
    Target { id: "direct", title: "direct", ..HOST },
    Target { id: "loop-ext4", title: "loop ext4", steps: &[EXT4], ..HOST },
    Target { id: "loop-ext4-direct", title: "loop direct", steps: &[EXT4_DIRECT], ..HOST },
    Target { id: "loop-xfs", title: "loop XFS", steps: &[XFS], ..HOST },
    Target { id: "nacre-collected", title: "nacre collected", steps: &[COLLECTED], ..HOST },
    Target { id: "nacre-through", title: "nacre through", steps: &[THROUGH], ..HOST },
    Target { id: "nacre-loop", title: "nacre loop", steps: &[LOOP], ..HOST },
    Target { id: "nacre-quota", title: "nacre quota", steps: &[QUOTA], ..HOST },
    Target { id: "direct-user", title: "direct, as user", baseline: "direct-user", as_user: true, ..HOST },
    Target {
        id: "nacre-user",
        title: "nacre, as user",
        baseline: "direct-user",
        steps: &[AUTO],
        as_user: true,
        ..HOST
    },
    Target { id: "btrfs", title: "Btrfs", ..BTRFS },
    Target { id: "btrfs-nodatacow", title: "nodatacow", steps: &[Step::Nodatacow], ..BTRFS },
    Target { id: "loop-btrfs", title: "loop/Btrfs", steps: &[EXT4], ..BTRFS },
    Target { id: "loop-nodatacow", title: "loop/nodatacow", steps: &[Step::Nodatacow, EXT4], ..BTRFS },
    Target { id: "nacre-btrfs", title: "nacre/Btrfs", steps: &[COLLECTED], ..BTRFS },
    Target { id: "nacre-qgroup", title: "nacre qgroup", steps: &[Step::Subvolume, QUOTA], ..BTRFS },
];

static TESTS: &[Test] = &[
    bytes("dd-sync", "dd oflag=sync", Group::Dd, true),
    bytes("dd-then-sync", "dd, then sync: both", Group::Dd, true),
    bytes("dd-alone", "dd, then sync: dd alone", Group::Dd, true),
    bytes("dd-fsync", "dd conv=fsync", Group::Dd, true),
    count("dirty-after-sync", "dirty after that sync (whole machine)", Group::Dd, true),
    operations("shell-short", "short lines", Group::Shell, true),
    operations("shell-long", "long lines", Group::Shell, true),
    operations("shell-very-long", "very long lines", Group::Shell, true),
    operations("open-short", "open-append-close, short", Group::Appends, true),
    operations("open-long", "open-append-close, long", Group::Appends, true),
    operations("open-very-long", "open-append-close, very long", Group::Appends, true),
    operations("held-short", "held descriptor, short", Group::Appends, true),
    operations("held-long", "held descriptor, long", Group::Appends, true),
    operations("held-very-long", "held descriptor, very long", Group::Appends, true),
    operations("held-after-open", "held, of a file opened for each line before", Group::Appends, true),
    operations("writers2-own", "two, a file each", Group::Writers, true),
    operations("writers2-one", "two on one file", Group::Writers, true),
    operations("writers4-own", "four, a file each", Group::Writers, true),
    operations("writers4-one", "four on one file", Group::Writers, true),
    bytes("warm-read-4k", "read, 4 KiB records", Group::Warm, true),
    bytes("warm-random-read-4k", "random read, 4 KiB", Group::Warm, true),
    operations("warm-stat", "stat", Group::Warm, true),
    operations("warm-open", "open-read-close", Group::Warm, true),
    operations("warm-stat-read", "stat after reading", Group::Warm, true),
    count("overshoot", "over the limit on the host", Group::Fill, true),
    count("lost", "accepted but not in the files", Group::Fill, true),
];
