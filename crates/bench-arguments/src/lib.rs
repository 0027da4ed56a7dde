//! What `nacre bench` understands: the table of its commands and options, from which help, man pages
//! and completions are made.
//!
//! Used by `nacre`, which answers for its own command line and starts the program `nacre-bench` for
//! the rest, and by `nacre-bench`, which measures. It has a crate of its own so that `nacre` links
//! nothing that measures or plots. Pure.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command, value_parser};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

/// What `--fs` may be.
pub const FILE_SYSTEMS: [&str; 3] = ["xfs", "ext4", "btrfs"];

/// What `--transport` may be.
pub const TRANSPORTS: [&str; 3] = ["device", "uring", "auto"];

/// Where a table is measured when neither `--source` nor `--fs` says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TablePlace {
    /// Root: on a new file system of this type in an image; others: in the temporary directory.
    Image(&'static str),
    /// In the scratch directory itself, so that syncs meet a real disk if it lies on one.
    Scratch,
    /// There, too; every target is a file system of its own in an image.
    Images,
}

/// A table as the command line knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableArguments {
    /// Name of the subcommand.
    pub name: &'static str,
    /// Heading of exports.
    pub title: &'static str,
    /// Where it is measured by default.
    pub place: TablePlace,
    /// Identifiers of the options that say how much work it does.
    pub amounts: &'static [&'static str],
}

/// The table `mirror`.
pub const MIRROR: TableArguments = TableArguments {
    name: "mirror",
    title: "A directory at a second place",
    place: TablePlace::Image("ext4"),
    amounts: &["full", "sizes", "records", "cache", "files", "listing", "tree"],
};

/// The table `logs`.
pub const LOGS: TableArguments = TableArguments {
    name: "logs",
    title: "A directory that cannot outgrow its size",
    place: TablePlace::Scratch,
    amounts: &["cage", "dd", "appends", "fill", "cache", "files"],
};

/// The table `union`.
pub const UNION: TableArguments = TableArguments {
    name: "union",
    title: "Two branches shown as one tree",
    // It makes reflinks, and inodes as they are needed.
    place: TablePlace::Image("xfs"),
    amounts: &["full", "names", "files", "copy", "cache"],
};

/// The table `pool`.
pub const POOL: TableArguments = TableArguments {
    name: "pool",
    title: "File systems in an image file",
    place: TablePlace::Images,
    amounts: &["image", "size", "files", "overwrite", "fsyncs", "snapshots"],
};

/// The table `listing`.
pub const LISTING: TableArguments = TableArguments {
    name: "listing",
    title: "Directories of very many names",
    place: TablePlace::Images,
    amounts: &["full", "image", "files", "directories", "mix"],
};

/// The table `raid`.
pub const RAID: TableArguments = TableArguments {
    name: "raid",
    title: "Pools over several devices",
    place: TablePlace::Images,
    amounts: &["image", "stream"],
};

/// The table `exports`.
pub const EXPORTS: TableArguments = TableArguments {
    name: "exports",
    title: "Pools given to others by NFS and SMB",
    place: TablePlace::Images,
    amounts: &["image", "stream", "files"],
};

/// The table `object`.
pub const OBJECT: TableArguments = TableArguments {
    name: "object",
    title: "Pools in object stores",
    place: TablePlace::Images,
    amounts: &["full", "image", "files", "tree", "fsyncs", "stream"],
};

/// The table `aged`.
pub const AGED: TableArguments = TableArguments {
    name: "aged",
    title: "File systems that are old and nearly full",
    place: TablePlace::Images,
    amounts: &["full", "image", "overwrite", "seconds"],
};

/// Every table, in the order of the subcommands.
pub static TABLES: &[TableArguments] = &[MIRROR, LOGS, UNION, POOL, LISTING, RAID, EXPORTS, OBJECT, AGED];

/// Why a value is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgumentError(String);

impl fmt::Display for ArgumentError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for ArgumentError {}

/// The grammar.
pub fn command() -> Command {
    let mut bench = Command::new("bench")
        .about("Measure a table of file-system operations on this machine, beside the directory itself and rivals")
        .subcommand_required(true)
        .arg_required_else_help(true);
    for table in TABLES {
        bench = bench.subcommand(table_command(table));
    }
    let show = Command::new("show").about("Print or export a result saved with --json again").arg(
        Arg::new("result")
            .value_name("FILE")
            .help("Result to read")
            .required(true)
            .value_parser(value_parser!(PathBuf)),
    );
    bench.subcommand(with_exports(show))
}

fn path(id: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name(value).help(help).value_parser(value_parser!(PathBuf))
}

fn list(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name("LIST").help(help).value_delimiter(',')
}

fn flag(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).help(help).action(ArgAction::SetTrue)
}

fn table_command(table: &'static TableArguments) -> Command {
    let command = Command::new(table.name)
        .about(table.title)
        .next_help_heading("Where")
        .arg(path("source", "DIR", "Measure in a fresh subdirectory of DIR").conflicts_with("fs"))
        .arg(Arg::new("fs").long("fs").value_name("TYPE").value_parser(FILE_SYSTEMS).help(match table.place {
            TablePlace::Image("xfs") => "Measure on a new file system on a loop device (root; default xfs)",
            TablePlace::Image(_) => "Measure on a new file system on a loop device (root; default ext4)",
            TablePlace::Scratch | TablePlace::Images => {
                "Measure on a new file system on a loop device (root; default: in the scratch directory itself)"
            }
        }))
        .arg(size("image-size", "Size of that file system (default 8G, sparse)"))
        .arg(path(
            "scratch",
            "DIR",
            "Directory of our own: new, empty, or left by an earlier run (default: a new one in the temporary directory)",
        ))
        .arg(path("nacre", "PROGRAM", "The nacre to measure (default: this one)"))
        .arg(
            Arg::new("user")
                .long("user")
                .value_name("NAME")
                .help("Ordinary user for the targets that need one (default: who called sudo, or nobody)"),
        )
        .arg(
            Arg::new("transport")
                .long("transport")
                .value_name("NAME")
                .value_parser(TRANSPORTS)
                .help("How FUSE requests travel: as on a new machine (device; root's default), by io_uring, or as this machine is set (auto)"),
        )
        .next_help_heading("What")
        .arg(list("targets", "Columns: names, or `all`").conflicts_with("list"))
        .arg(list("tests", "Rows: names of tests or groups"))
        .arg(flag("list", "List the names of targets and tests and do nothing"))
        .next_help_heading("How much")
        .args(amounts(table))
        .next_help_heading("Result")
        .arg(flag("check", "Exit with 1 if a figure that nacre promises is missed; measures every target unless some are chosen"));
    with_exports(command)
}

fn with_exports(command: Command) -> Command {
    command
        .next_help_heading("Result")
        .arg(
            Arg::new("show")
                .long("show")
                .value_name("AS")
                .value_parser(["ratio", "time"])
                .default_value("ratio")
                .help("Cells of the terminal table"),
        )
        .arg(path("json", "FILE", "Write the result as JSON"))
        .arg(path("csv", "FILE", "Write the result as CSV"))
        .arg(path("html", "FILE", "Write one self-contained page with plots"))
        .arg(path("markdown", "FILE", "Put the table between its markers in FILE (made if missing)"))
        .arg(
            Arg::new("section")
                .long("section")
                .value_name("NAME")
                .requires("markdown")
                .value_parser(section)
                .help("Keep it there beside the table's other results, under this name"),
        )
}

fn number(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name("N").help(help).value_parser(value_parser!(u64).range(1..))
}

/// An option that takes a size.
fn size(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name("SIZE").help(help).value_parser(parse_size)
}

fn sizes(id: &'static str, help: &'static str) -> Arg {
    size(id, help).value_name("LIST").value_delimiter(',')
}

/// The options about amounts that `table` knows.
fn amounts(table: &TableArguments) -> Vec<Arg> {
    let quick = Arg::new("quick")
        .long("quick")
        .action(ArgAction::SetTrue)
        .help("A minute or a few: small amounts, three rounds");
    let full = Arg::new("full").long("full").action(ArgAction::SetTrue).conflicts_with("quick");
    let known = [
        full.help(if table.amounts.contains(&"names") {
            "One directory of 1,382,438 names over two branches: hours with every rival"
        } else if table.amounts.contains(&"directories") {
            "1,644,553 files in one directory and 1,100,000 directories in another: hours with every rival"
        } else if table.amounts.contains(&"seconds") {
            "Ten minutes for each load: many hours"
        } else if table.amounts.contains(&"tree") && table.amounts.contains(&"fsyncs") {
            "1,644,553 files in one directory, and waiting until the pool rests: --tests and --targets choose"
        } else {
            "Every file and record size of iozone's automatic mode: hours"
        }),
        sizes("sizes", "File sizes of the iozone tests"),
        sizes("records", "Record sizes of the iozone tests"),
        size("cache", "Size of the page-cache file"),
        number("files", "Small files"),
        number("listing", "Files of the big directory"),
        number("tree", "Files of the source tree"),
        size("cage", "Size of cages and images (default 10G, or 4G where less than 30G are free)"),
        number("dd", "Blocks of 1 MiB that dd writes (default 1000)"),
        number("appends", "Lines appended in each test (default 100000)"),
        size("fill", "Size of the cages that are filled (default 1G)"),
        number("names", "Names of the directory that lies on two branches (default 300000)"),
        size("copy", "Size of the large file that is copied up (default 1G)"),
        size("image", "Size of the images that the file systems lie in, sparse (default 24G; of aged 4G)"),
        size("size", "Size of bonnie++'s file (default 2G)"),
        size("stream", "Size of the files that are written and read as a whole (default 512M)"),
        size("overwrite", "Size of the file that is overwritten in small blocks (default 512M)"),
        number("fsyncs", "Appends that are synced one by one (default 1000)"),
        number("snapshots", "Snapshots beside which is written (default 1000)"),
        number("directories", "Directories in one directory (default 100000)"),
        number("seconds", "Seconds for which each load of random overwrites is written (default 60)"),
        Arg::new("mix")
            .long("mix")
            .action(ArgAction::SetTrue)
            .help("Files of 50 to 500 KB of text, and not of 100 bytes (1,644,553 of them are 450 GB)"),
    ];
    let known = known.into_iter().filter(|argument| table.amounts.contains(&argument.get_id().as_str()));
    [quick, number("rounds", "Rounds of which the median counts (default 5; of aged 1)")]
        .into_iter()
        .chain(known)
        .collect()
}

/// A size with an optional suffix K, M or G (powers of 1024). Not `nacre_size`: what is measured is
/// whole, never zero, and no larger unit would be meant.
fn parse_size(text: &str) -> Result<u64, ArgumentError> {
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (text.get(..at), KIB),
        Some((at, 'm' | 'M')) => (text.get(..at), MIB),
        Some((at, 'g' | 'G')) => (text.get(..at), GIB),
        _ => (Some(text), 1),
    };
    let number = digits.and_then(|digits| digits.parse::<u64>().ok()).filter(|number| *number > 0);
    number
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| ArgumentError(format!("{text} is not a size such as 64K or 16M")))
}

/// A section's name stands in the markers, which are comments: nothing in it may end one.
fn section(text: &str) -> Result<String, ArgumentError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    match text.starts_with(plain) && text.split('-').all(|word| !word.is_empty() && word.chars().all(plain)) {
        true => Ok(text.to_owned()),
        false => Err(ArgumentError("small letters and digits, words joined by '-'".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("16m"), Ok(16 << 20));
        assert_eq!(parse_size("512"), Ok(512));
        for bad in ["", "K", "0", "-1", "1T", "1.5M", "99999999999999999999", "99999999999999G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
