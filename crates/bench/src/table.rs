//! Tables as data: which tests a table has, over which targets, and which of them are shown by default.
//!
//! Read by `options` (names on the command line), `measure` (what to run) and `summary` (order of rows). A new table
//! (logs, union, pool, listing) is one more `static` here plus the workloads that its groups name in `workload`.

use crate::target::{MIRROR_TARGETS, Target};

/// A family of tests that one workload measures together in one visit to a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// iozone's automatic mode: sizes times records, fsync inside the write timings.
    Iozone,
    /// The page cache: one big warm file, no fsync.
    Cache,
    /// Memory mapping, driven by fio.
    Mmap,
    /// Many small files, one system call family at a time.
    Files,
    /// One big directory, listed by the real `ls`.
    Listing,
    /// A source tree: tar, du, rm.
    Tree,
    /// One client against two at once.
    Clients,
}

impl Group {
    /// Name on the command line.
    pub fn id(self) -> &'static str {
        match self {
            Self::Iozone => "iozone",
            Self::Cache => "cache",
            Self::Mmap => "mmap",
            Self::Files => "files",
            Self::Listing => "listing",
            Self::Tree => "tree",
            Self::Clients => "clients",
        }
    }

    /// Heading in every export.
    pub fn title(self) -> &'static str {
        match self {
            Self::Iozone => "iozone automatic mode (fsync included in writes)",
            Self::Cache => "page cache (one warm file, no fsync)",
            Self::Mmap => "memory mapping (fio)",
            Self::Files => "small files",
            Self::Listing => "one big directory (ls)",
            Self::Tree => "source tree",
            Self::Clients => "one and two clients",
        }
    }

    /// The program without which the group cannot be measured.
    pub fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Iozone | Self::Cache | Self::Files | Self::Clients => &[],
            Self::Mmap => &["fio"],
            Self::Listing => &["ls"],
            Self::Tree => &["tar", "du", "rm"],
        }
    }
}

/// What a sample's amount counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes moved: shown as MB/s.
    Bytes,
    /// Operations done: shown as operations per second.
    Operations,
}

/// One row of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// Name on the command line, in JSON and in the figures file.
    pub id: &'static str,
    /// Name in tables for people.
    pub title: &'static str,
    /// The workload that measures it.
    pub group: Group,
    /// What its amounts count.
    pub unit: Unit,
    /// Whether it changes files (left out for targets that promise an unchanging source).
    pub writes: bool,
}

/// A table: rows, columns and the columns shown when none are chosen.
#[derive(Debug)]
pub struct Table {
    /// Name of the subcommand.
    pub name: &'static str,
    /// Heading of exports.
    pub title: &'static str,
    /// Rows, in the order in which they are shown.
    pub tests: &'static [Test],
    /// Every column known.
    pub targets: &'static [Target],
    /// Identifiers of the columns measured by default.
    pub default_targets: &'static [&'static str],
}

impl Test {
    /// Whether it is about what nobody has looked at yet: meaningless where the mount itself has looked.
    pub fn starts_cold(&self) -> bool {
        self.id.ends_with("-first")
    }

    /// Whether it can be measured on the target.
    pub fn suits(&self, target: &Target) -> bool {
        !(self.writes && target.reads_only || self.starts_cold() && target.from_outside)
    }
}

impl Table {
    /// The groups of the table's tests in the order of its rows.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = Vec::new();
        for test in self.tests {
            if !groups.contains(&test.group) {
                groups.push(test.group);
            }
        }
        groups
    }

    /// The test of that name.
    pub fn test(&self, id: &str) -> Option<&'static Test> {
        self.tests.iter().find(|test| test.id == id)
    }

    /// The target of that name.
    pub fn target(&self, id: &str) -> Option<&'static Target> {
        self.targets.iter().find(|target| target.id == id)
    }
}

/// The table called `name`.
pub fn find(name: &str) -> Option<&'static Table> {
    TABLES.iter().copied().find(|table| table.name == name)
}

/// Every table, in the order of the subcommands.
pub static TABLES: &[&Table] = &[&MIRROR];

/// A directory at a second place: the founding table of the mirror.
pub static MIRROR: Table = Table {
    name: "mirror",
    title: "A directory at a second place",
    tests: MIRROR_TESTS,
    targets: MIRROR_TARGETS,
    default_targets: &["direct", "symlink", "bind", "bindfs", "bindfs-bindfs", "bind-bindfs", "nacre", "nacre-nacre", "bind-nacre"],
};

const fn bytes(id: &'static str, title: &'static str, group: Group, writes: bool) -> Test {
    Test { id, title, group, unit: Unit::Bytes, writes }
}

const fn operations(id: &'static str, title: &'static str, group: Group, writes: bool) -> Test {
    Test { id, title, group, unit: Unit::Operations, writes }
}

static MIRROR_TESTS: &[Test] = &[
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
    operations("create", "create and write 100 B", Group::Files, true),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_defaults_exist() {
        for table in TABLES {
            for (index, test) in table.tests.iter().enumerate() {
                assert!(table.tests[index + 1..].iter().all(|other| other.id != test.id), "{} twice", test.id);
            }
            for id in table.default_targets {
                assert!(table.target(id).is_some(), "{id}");
            }
            for target in table.targets {
                let baseline = table.target(target.baseline).expect("baseline");
                assert!(baseline.steps.is_empty(), "{} is measured against a mount", target.id);
                assert_eq!(baseline.as_user, target.as_user);
            }
        }
    }

    #[test]
    fn tests_suit_targets() {
        let suits = |test: &str, target: &str| MIRROR.test(test).unwrap().suits(MIRROR.target(target).unwrap());
        assert!(suits("create", "nacre"));
        assert!(!suits("create", "nacre-immutable"));
        assert!(suits("stat-first", "nacre-immutable"));
        assert!(!suits("stat-first", "watched"));
        assert!(suits("create", "watched"));
    }
}
