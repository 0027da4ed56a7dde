//! The table `union`: two branches shown as one tree.

use nacre_bench_arguments as arguments;

use super::{Table, Test, bytes, count, operations};
use crate::table::Group;
use crate::target::{Ground, Step, Target, Union};

/// Two branches as one tree: the original table of the union. Ratios refer to the lower branch, which is the
/// larger, by itself.
pub static UNION: Table = Table {
    arguments: arguments::UNION,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &[
        "direct",
        "overlayfs",
        "fuse-overlayfs",
        "mergerfs",
        "unionfs-fuse",
        "nacre-union",
        "nacre-union-noxattr",
    ],
    programs: &[
        ("fuse-overlayfs", "--version"),
        ("mergerfs", "--version"),
        ("unionfs", "--version"),
        ("fusermount3", "-V"),
        ("ls", "--version"),
        ("cp", "--version"),
    ],
};

const LOWER: Target = Target { ground: Ground::Branches, ..Target::PLAIN };
const OVERLAYFS: Step = Step::Union(Union::Overlayfs);
const FUSE_OVERLAYFS: Step = Step::Union(Union::FuseOverlayfs);
const MERGERFS: Step = Step::Union(Union::Mergerfs);
const UNIONFS_FUSE: Step = Step::Union(Union::UnionfsFuse);
const NACRE: Step = Step::Union(Union::Nacre(&[]));
const WITHOUT_XATTRS: Step = Step::Union(Union::Nacre(&["-o", "xattr=nosys"]));

static TARGETS: &[Target] = &[
    Target { id: "direct", title: "larger branch", ..LOWER },
    Target { id: "overlayfs", title: "overlayfs", steps: &[OVERLAYFS], ..LOWER },
    Target { id: "fuse-overlayfs", title: "fuse-overlayfs", steps: &[FUSE_OVERLAYFS], ..LOWER },
    Target { id: "mergerfs", title: "mergerfs", steps: &[MERGERFS], ..LOWER },
    Target { id: "unionfs-fuse", title: "unionfs-fuse", steps: &[UNIONFS_FUSE], ..LOWER },
    Target { id: "nacre-union", title: "nacre", steps: &[NACRE], ..LOWER },
    Target { id: "nacre-union-noxattr", title: "nacre, no xattrs", steps: &[WITHOUT_XATTRS], ..LOWER },
];

static TESTS: &[Test] = &[
    operations("long-u-first", "ls -U, first", Group::LongNames, false),
    operations("long-u-again", "ls -U, again", Group::LongNames, false),
    operations("long-l-first", "ls -l, first", Group::LongNames, false),
    operations("long-l-again", "ls -l, again", Group::LongNames, false),
    operations("entry-first", "until the first entry, first", Group::ManyNames, false),
    operations("names-u-first", "ls -U, first", Group::ManyNames, false),
    operations("names-u-again", "ls -U, again", Group::ManyNames, false),
    operations("names-l-first", "ls -l, first", Group::ManyNames, false),
    operations("names-l-again", "ls -l, again", Group::ManyNames, false),
    count("memory-idle", "the daemon's own memory before", Group::ManyNames, false),
    count("memory-per-name", "more of it after ls -U, for each name of the smaller branch", Group::ManyNames, false),
    operations("stat-first", "stat, first", Group::Lookups, false),
    operations("stat-again", "stat, again", Group::Lookups, false),
    operations("missing-first", "stat of missing names, first", Group::Lookups, false),
    operations("missing-again", "stat of missing names, again", Group::Lookups, false),
    operations("open-first", "open-read-close, first", Group::Lookups, false),
    operations("open-again", "open-read-close, again", Group::Lookups, false),
    operations("stat-read", "stat after reading", Group::Lookups, false),
    operations("create", "create and write 100 B", Group::Changes, true),
    operations("append", "open-append-close", Group::Changes, true),
    operations("rename", "rename", Group::Changes, true),
    operations("unlink", "unlink", Group::Changes, true),
    operations("churn", "create-write-close-unlink", Group::Changes, true),
    operations("copy-up-small", "first write, lower branch", Group::Changes, true),
    bytes("copy-up-big", "first write (branch: cp)", Group::CopyUp, true),
    bytes("lower-read-1m", "lower: read, 1 MiB", Group::BranchData, false),
    bytes("lower-read-4k", "lower: read, 4 KiB", Group::BranchData, false),
    bytes("lower-random-read-4k", "lower: random read, 4 KiB", Group::BranchData, false),
    bytes("upper-read-1m", "upper: read, 1 MiB", Group::BranchData, true),
    bytes("upper-read-4k", "upper: read, 4 KiB", Group::BranchData, true),
    bytes("upper-write-1m", "upper: rewrite, 1 MiB", Group::BranchData, true),
    bytes("upper-write-4k", "upper: rewrite, 4 KiB", Group::BranchData, true),
];
