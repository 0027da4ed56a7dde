//! Tables as data: tests and targets of each table, and the targets shown by default.
//!
//! Read by `options` (names on the command line), `measure` (what to run) and `summary` (order of
//! rows). A new table is one more file here plus the workloads that its groups name in `workload`.

use nacre_bench_arguments::TableArguments;

use crate::target::Target;

mod aged;
mod exports;
mod listing;
mod logs;
mod mirror;
mod object;
mod pool;
mod raid;
mod union;

pub use aged::{AGED, LOADS, Load};
pub use exports::EXPORTS;
pub use listing::LISTING;
pub use logs::LOGS;
pub use mirror::MIRROR;
pub use object::OBJECT;
pub use pool::POOL;
pub use raid::RAID;
pub use union::UNION;

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
    /// dd that syncs each block, dd and a sync after it.
    Dd,
    /// Lines appended by a shell loop that opens the file for each.
    Shell,
    /// Lines appended by a program: the file opened for each, or held open.
    Appends,
    /// Several processes that append at once.
    Writers,
    /// Reading back and stat of files, warm.
    Warm,
    /// Sixteen writers until nothing more fits.
    Fill,
    /// A few thousand long names that both branches have.
    LongNames,
    /// Very many short names over two branches.
    ManyNames,
    /// stat of files of the lower branch.
    Lookups,
    /// Changes: new files, and small files of the lower branch written to.
    Changes,
    /// A large file of the lower branch written to.
    CopyUp,
    /// Warm data of either branch.
    BranchData,
    /// bonnie++'s big file, of data that cannot be compressed.
    Bonnie,
    /// bonnie++'s big file, of text.
    BonnieText,
    /// bonnie++'s many files.
    BonnieFiles,
    /// Small writes into a large file, and to the end of one.
    SmallWrites,
    /// Small files made, read and removed, one at a time and sixteen at once.
    SmallFiles,
    /// Snapshots and clones.
    Versions,
    /// Import or mount after a crash.
    Recovery,
    /// One directory of very many files.
    ManyFiles,
    /// One directory of very many files whose names have nothing in common.
    Unrelated,
    /// One directory of very many directories.
    ManyDirectories,
    /// A tree of very many files, brought from another file system.
    Copying,
    /// Streams, random reads and writes over several devices, one of them slow, missing, replaced.
    OverDevices,
    /// Space that files take on several devices.
    Space,
    /// Devices that join and leave while the pool is in use.
    Shapes,
    /// Exports to clients of NFS and SMB.
    Served,
    /// Small files, a tree, syncs and a large file, in a bucket.
    InBucket,
    /// One directory of very many files, in a bucket.
    ManyInBucket,
    /// A file that takes half of the room, overwritten at random.
    Aged50,
    /// A file that takes 70 % of the room, overwritten at random.
    Aged70,
    /// A file that takes 85 % of the room, overwritten at random.
    Aged85,
    /// A file that takes 95 % of the room, overwritten at random.
    Aged95,
    /// Reads of files that were overwritten at random.
    AgedReading,
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
            Self::Dd => "dd",
            Self::Shell => "shell",
            Self::Appends => "appends",
            Self::Writers => "writers",
            Self::Warm => "warm",
            Self::Fill => "fill",
            Self::LongNames => "long",
            Self::ManyNames => "names",
            Self::Lookups => "lookups",
            Self::Changes => "changes",
            Self::CopyUp => "copy-up",
            Self::BranchData => "data",
            Self::Bonnie => "bonnie",
            Self::BonnieText => "bonnie-text",
            Self::BonnieFiles => "bonnie-files",
            Self::SmallWrites => "small-writes",
            Self::SmallFiles => "small-files",
            Self::Versions => "versions",
            Self::Recovery => "recovery",
            Self::ManyFiles => "many-files",
            Self::Unrelated => "unrelated-names",
            Self::ManyDirectories => "many-directories",
            Self::Copying => "copying",
            Self::OverDevices => "devices",
            Self::Space => "space",
            Self::Shapes => "shapes",
            Self::Served => "served",
            Self::InBucket => "bucket",
            Self::ManyInBucket => "bucket-many",
            Self::Aged50 => "aged-50",
            Self::Aged70 => "aged-70",
            Self::Aged85 => "aged-85",
            Self::Aged95 => "aged-95",
            Self::AgedReading => "aged-reading",
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
            Self::Dd => "dd, blocks of 1 MiB into a new file",
            Self::Shell => "lines appended by a shell loop (open, append, close)",
            Self::Appends => "lines appended by a program",
            Self::Writers => "processes that append at once (dd oflag=append)",
            Self::Warm => "warm files",
            Self::Fill => "sixteen writers until it is full",
            Self::LongNames => "4096 names of 250 characters on both branches (ls)",
            Self::ManyNames => "very many names of 6 characters over two branches (ls)",
            Self::Lookups => "small files of the lower branch",
            Self::Changes => "changes",
            Self::CopyUp => "the first write to a large file of the lower branch",
            Self::BranchData => "page cache (one warm file on each branch, no fsync)",
            Self::Bonnie => "bonnie++'s file, data that cannot be compressed (fsync included in writes)",
            Self::BonnieText => "bonnie++'s file, text (fsync included in writes)",
            Self::BonnieFiles => "bonnie++'s files (empty, in one directory)",
            Self::SmallWrites => "writes of 4 KiB",
            Self::SmallFiles => "small files (1000 bytes) in one directory",
            Self::Versions => "snapshots (where there are none: copies of the tree)",
            Self::Recovery => "after a crash",
            Self::ManyFiles => "one directory of very many files",
            Self::Unrelated => "one directory of very many files with unrelated names",
            Self::ManyDirectories => "one directory of very many directories",
            Self::Copying => "a tree of very many small files, copied from another disk (cold, until it is durable)",
            Self::OverDevices => "over several devices, each limited",
            Self::Space => "room on the devices",
            Self::Shapes => "a device joins (RAID-Z of 4) or leaves (of 5 for themselves)",
            Self::Served => "given to clients of NFS and SMB, on loopback",
            Self::InBucket => "in a bucket (what is written counts when it is in the store)",
            Self::ManyInBucket => "one directory of very many files in a bucket",
            Self::Aged50 => "overwritten at random, 50 % full",
            Self::Aged70 => "overwritten at random, 70 % full",
            Self::Aged85 => "overwritten at random, 85 % full",
            Self::Aged95 => "overwritten at random, 95 % full",
            Self::AgedReading => "read after five times its size was overwritten at random",
        }
    }

    /// Whether devices of pools are limited, so that they are slower than the machine.
    pub fn limits_devices(self) -> bool {
        // Where bytes are counted, time does not matter.
        !matches!(self, Self::Space | Self::Aged50 | Self::Aged70 | Self::Aged85 | Self::Aged95 | Self::AgedReading)
    }

    /// Whether the devices of a pool have the size of one image together, without their redundancy.
    pub fn shares_image(self) -> bool {
        matches!(self, Self::Aged50 | Self::Aged70 | Self::Aged85 | Self::Aged95 | Self::AgedReading)
    }

    /// Returns the programs without which the group cannot be measured.
    pub fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Iozone | Self::Cache | Self::Files | Self::Clients | Self::Appends | Self::Warm | Self::Fill => &[],
            Self::Lookups | Self::Changes | Self::BranchData | Self::Unrelated => &[],
            Self::Bonnie | Self::BonnieText | Self::BonnieFiles | Self::SmallWrites | Self::SmallFiles => &[],
            Self::OverDevices | Self::Space | Self::Shapes => &[],
            Self::Aged50 | Self::Aged70 | Self::Aged85 | Self::Aged95 | Self::AgedReading => &[],
            Self::Versions | Self::Copying => &["cp"],
            Self::Recovery => &["xfs_io"],
            Self::ManyFiles | Self::ManyDirectories | Self::ManyInBucket => &["ls"],
            Self::Mmap => &["fio"],
            Self::Listing | Self::LongNames | Self::ManyNames => &["ls"],
            Self::CopyUp => &["cp"],
            Self::Tree => &["tar", "du", "rm"],
            Self::Dd => &["dd", "sync"],
            Self::Shell => &["bash", "seq"],
            Self::Writers => &["dd"],
            Self::InBucket => &["tar", "git"],
            Self::Served => &["ganesha.nfsd", "rpcbind", "nfs-cp", "nfs-ls", "smbd", "smbclient"],
        }
    }
}

/// Unit of a sample's amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes moved: shown as MB/s.
    Bytes,
    /// Operations done: shown as operations per second.
    Operations,
    /// The samples themselves are counts of bytes, or of what the row names, that should be zero or small.
    Count,
}

impl Unit {
    /// Returns its word in reports.
    pub fn word(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Operations => "operations",
            Self::Count => COUNT,
        }
    }
}

/// The word of [`Unit::Count`] in reports, and instead of a base in the figures file.
pub const COUNT: &str = "count";

/// One row of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// Name on the command line, in JSON and in the figures file.
    pub id: &'static str,
    /// Name in tables for people.
    pub title: &'static str,
    /// The workload that measures it.
    pub group: Group,
    /// Unit of its amounts.
    pub unit: Unit,
    /// Whether it changes files (left out for targets that require an unchanging source).
    pub writes: bool,
}

/// A table: rows, columns, and the columns shown by default.
#[derive(Debug)]
pub struct Table {
    /// Its name, title and options on the command line.
    pub arguments: TableArguments,
    /// Rows, in the order in which they are shown.
    pub tests: &'static [Test],
    /// Every column known.
    pub targets: &'static [Target],
    /// Identifiers of the columns measured by default.
    pub default_targets: &'static [&'static str],
    /// Programs whose versions are recorded, with the argument that prints them.
    pub programs: &'static [(&'static str, &'static str)],
}

impl Test {
    /// Whether it measures files that have not been accessed yet: meaningless where the mount itself has accessed
    /// them.
    pub fn starts_cold(&self) -> bool {
        self.id.ends_with("-first")
    }

    /// Whether the test changes files of the lower branch.
    fn copies_up(&self) -> bool {
        self.id.starts_with("copy-up")
    }

    /// Whether the test can be measured on the target.
    pub fn suits(&self, target: &Target) -> bool {
        !(self.writes && target.reads_only
            || self.starts_cold() && target.from_outside
            || self.group == Group::Fill && !target.is_bounded()
            || self.group == Group::Recovery && !target.crashes()
            || self.copies_up() && !target.copies_up())
    }
}

impl Table {
    /// Returns the groups of the table's tests in the order of its rows.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = Vec::new();
        for test in self.tests {
            if !groups.contains(&test.group) {
                groups.push(test.group);
            }
        }
        groups
    }

    /// Returns the test of that name.
    pub fn test(&self, id: &str) -> Option<&'static Test> {
        self.tests.iter().find(|test| test.id == id)
    }

    /// Returns the target of that name.
    pub fn target(&self, id: &str) -> Option<&'static Target> {
        self.targets.iter().find(|target| target.id == id)
    }
}

/// Returns the table called `name`.
pub fn find(name: &str) -> Option<&'static Table> {
    TABLES.iter().copied().find(|table| table.arguments.name == name)
}

/// Every table, in the order of the subcommands.
pub static TABLES: &[&Table] = &[&MIRROR, &LOGS, &UNION, &POOL, &LISTING, &RAID, &EXPORTS, &OBJECT, &AGED];

const fn bytes(id: &'static str, title: &'static str, group: Group, writes: bool) -> Test {
    Test { id, title, group, unit: Unit::Bytes, writes }
}

const fn operations(id: &'static str, title: &'static str, group: Group, writes: bool) -> Test {
    Test { id, title, group, unit: Unit::Operations, writes }
}

const fn count(id: &'static str, title: &'static str, group: Group, writes: bool) -> Test {
    Test { id, title, group, unit: Unit::Count, writes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_bench_arguments::TablePlace;

    #[test]
    fn every_table_of_the_command_line_is_here() {
        assert!(TABLES.iter().map(|table| table.arguments).eq(nacre_bench_arguments::TABLES.iter().copied()));
    }

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
                let image = table.arguments.place == TablePlace::Images;
                assert!(baseline.steps.is_empty() || image, "{} is measured against a mount", target.id);
                assert_eq!(baseline.baseline, baseline.id);
                // A file system of the kernel's in an image is root's.
                assert!(baseline.as_user == target.as_user || image);
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
        let fills = |target: &str| LOGS.test("overshoot").unwrap().suits(LOGS.target(target).unwrap());
        assert!(fills("loop-ext4") && fills("nacre-collected"));
        assert!(!fills("direct") && !fills("btrfs-nodatacow"), "nothing would stop the writers");
        let unites = |test: &str, target: &str| UNION.test(test).unwrap().suits(UNION.target(target).unwrap());
        assert!(unites("copy-up-big", "direct") && unites("copy-up-small", "overlayfs"));
        assert!(unites("create", "mergerfs") && !unites("copy-up-small", "mergerfs"), "its lower branch is read-only");
    }
}
