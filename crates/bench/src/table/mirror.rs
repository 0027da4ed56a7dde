//! The table `mirror`: a directory mounted at a second mount point.

use nacre_bench_arguments as arguments;

use super::{Table, Test, bytes, operations};
use crate::table::Group;
use crate::target::{Step, Target};

/// A directory at a second mount point: the original table of the mirror.
pub static MIRROR: Table = Table {
    arguments: arguments::MIRROR,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &[
        "direct",
        "symlink",
        "bind",
        "bindfs",
        "bindfs-bindfs",
        "bind-bindfs",
        "nacre",
        "nacre-nacre",
        "bind-nacre",
    ],
    programs: &[
        ("bindfs", "--version"),
        ("fusermount3", "-V"),
        ("fio", "--version"),
        ("ls", "--version"),
        ("tar", "--version"),
    ],
};

const PLAIN: Target = Target::PLAIN;

static TARGETS: &[Target] = &[
    Target { id: "direct", title: "direct", ..PLAIN },
    Target { id: "symlink", title: "symlink", steps: &[Step::Symlink], ..PLAIN },
    Target { id: "bind", title: "bind mount", steps: &[Step::Bind], ..PLAIN },
    Target { id: "bindfs", title: "bindfs", steps: &[Step::Bindfs], ..PLAIN },
    Target { id: "bindfs-bindfs", title: "bindfs over bindfs", steps: &[Step::Bindfs, Step::Bindfs], ..PLAIN },
    Target { id: "bind-bindfs", title: "bind over bindfs", steps: &[Step::Bindfs, Step::Bind], ..PLAIN },
    Target { id: "nacre", title: "nacre", steps: &[Step::Nacre(&[])], ..PLAIN },
    Target { id: "nacre-nacre", title: "nacre over nacre", steps: &[Step::Nacre(&[]), Step::Nacre(&[])], ..PLAIN },
    Target { id: "bind-nacre", title: "bind over nacre", steps: &[Step::Nacre(&[]), Step::Bind], ..PLAIN },
    Target {
        id: "nacre-noacl",
        title: "nacre, no xattrs",
        steps: &[Step::Nacre(&["--acl=off", "--xattr=none"])],
        ..PLAIN
    },
    Target {
        id: "nacre-immutable",
        title: "nacre, immutable",
        steps: &[Step::Nacre(&["--immutable"])],
        reads_only: true,
        ..PLAIN
    },
    Target {
        id: "nacre-no-open",
        title: "nacre, no opens",
        steps: &[Step::Nacre(&["--no-open"])],
        reads_only: true,
        ..PLAIN
    },
    Target { id: "watched", title: "source under nacre", steps: &[Step::Nacre(&[])], from_outside: true, ..PLAIN },
    Target { id: "direct-user", title: "direct, as user", baseline: "direct-user", as_user: true, ..PLAIN },
    Target {
        id: "nacre-user",
        title: "nacre, as user",
        baseline: "direct-user",
        steps: &[Step::Nacre(&[])],
        as_user: true,
        ..PLAIN
    },
];

static TESTS: &[Test] = &[
    bytes("iozone-write", "write", Group::Iozone, true),
    bytes("iozone-rewrite", "rewrite", Group::Iozone, true),
    bytes("iozone-read", "read", Group::Iozone, true),
    bytes("iozone-reread", "reread", Group::Iozone, true),
    bytes("iozone-random-read", "random read", Group::Iozone, true),
    bytes("iozone-random-write", "random write", Group::Iozone, true),
    bytes("iozone-backward-read", "backward read", Group::Iozone, true),
    bytes("iozone-record-rewrite", "record rewrite", Group::Iozone, true),
    bytes("iozone-stride-read", "stride read", Group::Iozone, true),
    bytes("cache-read-1m", "read, 1 MiB records", Group::Cache, false),
    bytes("cache-read-4k", "read, 4 KiB records", Group::Cache, false),
    bytes("cache-random-read-4k", "random read, 4 KiB", Group::Cache, false),
    bytes("cache-stride-read-64k", "stride read, 64 KiB", Group::Cache, false),
    bytes("cache-write-1m", "rewrite, 1 MiB records", Group::Cache, true),
    bytes("cache-write-4k", "rewrite, 4 KiB records", Group::Cache, true),
    bytes("cache-random-write-4k", "random rewrite, 4 KiB", Group::Cache, true),
    bytes("mmap-read", "mmap read", Group::Mmap, false),
    bytes("mmap-write", "mmap write", Group::Mmap, true),
    operations("stat-first", "stat, first", Group::Files, false),
    operations("stat-again", "stat, again", Group::Files, false),
    operations("missing-first", "stat of missing names, first", Group::Files, false),
    operations("missing-again", "stat of missing names, again", Group::Files, false),
    operations("open-first", "open-read-close, first", Group::Files, false),
    operations("open-again", "open-read-close, again", Group::Files, false),
    operations("stat-read", "stat after reading", Group::Files, false),
    operations("create", "create and write 100 B", Group::Files, true),
    operations("append", "open-append-close", Group::Files, true),
    operations("rename", "rename", Group::Files, true),
    operations("unlink", "unlink", Group::Files, true),
    operations("churn", "create-write-close-unlink", Group::Files, true),
    operations("ls-u-first", "ls -U, first", Group::Listing, false),
    operations("ls-u-again", "ls -U, again", Group::Listing, false),
    operations("ls-l-first", "ls -l, first", Group::Listing, false),
    operations("ls-l-again", "ls -l, again", Group::Listing, false),
    operations("tar-extract", "tar extract", Group::Tree, true),
    operations("du-first", "du, first", Group::Tree, true),
    operations("du-again", "du, again", Group::Tree, true),
    operations("rm-rf", "rm -rf", Group::Tree, true),
    operations("clients1-stat", "stat, one client", Group::Clients, false),
    operations("clients2-stat", "stat, two clients", Group::Clients, false),
    bytes("clients1-read", "random read 4 KiB, one client", Group::Clients, false),
    bytes("clients2-read", "random read 4 KiB, two clients", Group::Clients, false),
    operations("clients1-churn", "create-unlink, one client", Group::Clients, true),
    operations("clients2-churn", "create-unlink, two clients", Group::Clients, true),
];
